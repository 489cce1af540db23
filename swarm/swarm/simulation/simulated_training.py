"""Simulates trainers: real members of real runs (`RunMember`), whose vectors are short.

Groups, clusters, votes, certificates, reductions and state transfers are the real code. Inner steps only take time. So
do the transfers of a round's vectors: their time passes before the round, which then reduces vectors of NUM_VALUES.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias, get_args

import torch
from swarm_protocol.errors import PeerTimeout, SwarmError
from swarm_protocol.identity import Identity
from torch import Tensor

from swarm.network.membership import Membership
from swarm.network.memory.memory_link import LinkModel
from swarm.network.memory.memory_network import MemoryInternet, MemoryNetwork
from swarm.simulation.report import Measurements
from swarm.simulation.scenario import NodeClass, Scenario, Training
from swarm.simulation.simulated_host import Links, Place, SimulatedHost
from swarm.simulation.simulated_network import NETWORK_ID, SimulatedNetwork
from swarm.testing import virtual_time
from swarm.training.inner.inner_loop import IntervalResult
from swarm.training.inner.interval import TrainingSetup
from swarm.training.member.run_member import RunMember, RunMemberOptions
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_tables import DataConfig, InnerConfig
from swarm.training.run.signed_run import SignedRun
from swarm.training.trainer_events import ContributionLate, IntervalDone, OuterStep, RoundAborted, TrainingEvent
from swarm.trust.mixing import NO_MIXING

NUM_VALUES = 1024
"""Number of values of the vector that a round reduces."""

NUM_STEPS = 10
"""Number of inner steps of an interval."""

NUM_CANDIDATE_RUNS = 3
"""Number of runs whose trainers a newcomer counts. It joins the smallest of them."""

INITIAL_FILL = 0.8
"""Share of a run's places for which there are trainers at the start. The rest is for newcomers that join before
the run has noticed that others left."""

NUM_WORK_INTERVALS = 3
"""Number of intervals within which a trainer in work has contributed: one that began late, one whose contribution was
lost, and one more."""

RUN_IS_FULL = "the run is full"
"""Beginning of the reason of the event of a trainer for which no head has room."""

Situation: TypeAlias = Literal["in_work", "waiting", "refused"]
"""The situation of a trainer. "in_work": it has contributed within the last NUM_WORK_INTERVALS intervals. "refused": it
has not, and its last attempt ended because the run was full. "waiting": neither of these."""

_WINDOW_TOKENS, _BATCH_WINDOWS = 4, 2
_AUTHOR = Identity(b"simulated author".ljust(32))


@dataclass(slots=True, kw_only=True, eq=False)
class _Run:
    """A run and the number of its trainers.

    `max_group` trainers begin the run. All others wait until it `has_begun`, which is when its first step is committed:
    while the first group forms, each trainer asks all others repeatedly, which takes long with many of them.
    """

    signed: SignedRun
    has_begun: bool = False
    num_trainers: int = 0
    num_waiting: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self) -> None:
        """Note that the first step is committed."""
        self.has_begun = True
        self._changed.set()

    @asynccontextmanager
    async def joined(self) -> AsyncIterator[None]:
        """Wait until one more trainer may join, and count it while this context lasts."""
        self.num_waiting += 1
        try:
            while not self.has_begun and self.num_trainers >= self.signed.config.max_group:
                self._changed.clear()
                await self._changed.wait()
        finally:
            self.num_waiting -= 1
        self.num_trainers += 1
        try:
            yield
        finally:
            self.num_trainers -= 1
            self._changed.set()


def _runs_of(training: Training, num_trainers: float) -> list[_Run]:
    """Return about as many runs as give each of these trainers a place."""
    num_runs = max(1, round(num_trainers / max(1.0, INITIAL_FILL * training.members * training.cluster_size)))
    return [_Run(signed=_signed_run(f"run-{number}", training)) for number in range(num_runs)]


def _signed_run(name: str, training: Training) -> SignedRun:
    config = RunConfig(
        name=name,
        outer_steps=10_000_000,
        interval_steps=NUM_STEPS,
        min_group=min(2, training.members),
        max_group=training.members,
        cluster_size=training.cluster_size,
        aggregator="mean",
        fallback="",
        pre_aggregation=NO_MIXING,
        validation_interval=0,
        data=DataConfig(window_tokens=_WINDOW_TOKENS),
        inner=InnerConfig(batch_windows=_BATCH_WINDOWS),
    )
    return SignedRun(config=config, peer_id=_AUTHOR.peer_id, issued_at=1_750_000_000, signature=bytes(64))


class TimedInner:
    """An inner loop whose steps only take time. Implements `interval.Inner`. `transfer_s` returns the seconds that the
    vectors of the next round take on this trainer's link."""

    def __init__(self, step_s: float, transfer_s: Callable[[], float]) -> None:
        self._step_s = step_s
        self._transfer_s = transfer_s
        self._trained_s = 0.0
        self._theta_N = torch.zeros(NUM_VALUES)

    def clock(self) -> float:
        return self._trained_s

    def load(self, theta_N: Tensor) -> None:
        self._theta_N = theta_N.clone()

    def take_in(self, where: slice, theta_F: Tensor, mixing: float) -> None:
        self._theta_N[where] = mixing * self._theta_N[where] + (1 - mixing) * theta_F

    def train(
        self,
        sample_ids: Sequence[int],  # noqa: ARG002 - no sample is read
        num_steps: int,
        stop: Callable[[], bool] = lambda: False,
        *,
        done_steps: int = 0,  # noqa: ARG002
    ) -> IntervalResult:
        done = 0 if stop() else num_steps
        self._theta_N = self._theta_N + 0.01 * done
        self._trained_s += self._step_s * done
        virtual_time.charge(self._step_s * done)
        return IntervalResult(
            num_steps=done,
            num_samples=_BATCH_WINDOWS * done,
            num_tokens=_BATCH_WINDOWS * _WINDOW_TOKENS * done,
            mean_loss=1.0 if done else float("nan"),
            seconds=self._step_s * done,
        )

    def flat(self, where: slice = slice(None)) -> Tensor:
        virtual_time.charge(self._transfer_s())
        return self._theta_N[where].clone()

    def held_out_loss(self, theta_N: Tensor, num_windows: int, draw: int = 0) -> float:  # noqa: ARG002
        return 1.0

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class TrainingWorld:
    """The runs of a simulation, and the memory network that carries their streams."""

    def __init__(self, scenario: Scenario, links: Links) -> None:
        assert scenario.training is not None
        self._training = scenario.training
        total = sum(kind.share for kind in scenario.classes)
        num_trainers = scenario.nodes * sum(kind.share for kind in scenario.classes if kind.role == "train") / total
        self._runs = _runs_of(scenario.training, num_trainers)
        self._links = links
        self._places: dict[str, Place] = {}
        self._internet = MemoryInternet(scenario.seed, self._link)
        self._trainers: set[_Trainer] = set()
        self._committed: set[str] = set()

    def _link(self, a: str, b: str) -> LinkModel:
        return self._links.between(self._places[a], self._places[b])

    def streams_of(self, identity: Identity, host: SimulatedHost) -> MemoryNetwork:
        """Return a trainer's network of streams, with the latencies and the rates of its host."""
        self._places[identity.peer_id] = host.place
        return self._internet.network(
            identity, NETWORK_ID, up_bytes_per_s=host.up.bytes_per_s, down_bytes_per_s=host.down.bytes_per_s
        )

    def crash(self, peer_id: str) -> None:
        """End the trainer without a goodbye. Do nothing if the node is no trainer."""
        if peer_id in self._places:
            self._internet.crash(peer_id)

    async def take_part(
        self,
        identity: Identity,
        network: SimulatedNetwork,
        membership: Membership,
        kind: NodeClass,
        measured: Measurements,
    ) -> None:
        """Run a trainer until cancelled."""
        trainer = _Trainer(
            identity=identity,
            network=network,
            membership=membership,
            kind=kind,
            step_s=self._training.interval_minutes * 60 / NUM_STEPS,
            vector_bytes=1e6 * self._training.million_parameters,
            runs=self._runs,
            committed=self._committed,
            measured=measured,
        )
        self._trainers.add(trainer)
        try:
            await trainer.run()
        finally:
            self._trainers.discard(trainer)
            await network.close()

    def situations(self) -> dict[Situation, int]:
        """Return the number of trainers in each situation."""
        since, counts = self._since_s(), dict.fromkeys(get_args(Situation), 0)
        for trainer in self._trainers:
            counts[trainer.situation(since)] += 1
        return counts

    def share_in_work(self) -> float:
        """Return the share of the trainers in work among those that joined NUM_WORK_INTERVALS intervals ago or earlier;
        1 if there are none."""
        since = self._since_s()
        settled = [trainer for trainer in self._trainers if trainer.began_at < since]
        return sum(each.situation(since) == "in_work" for each in settled) / len(settled) if settled else 1.0

    def _since_s(self) -> float:
        return asyncio.get_running_loop().time() - NUM_WORK_INTERVALS * self._training.interval_minutes * 60


@dataclass(slots=True, kw_only=True, eq=False)
class _Trainer:
    """One trainer, which is a member of one of `runs`."""

    identity: Identity
    network: SimulatedNetwork
    membership: Membership
    kind: NodeClass
    step_s: float
    vector_bytes: float
    """The size of a vector in the codec int8: one byte for each value."""
    runs: Sequence[_Run]
    committed: set[str]
    """The digests of the states that any trainer has committed, which all trainers share."""
    measured: Measurements
    began_at: float = 0.0
    contributed_at: float = 0.0
    is_refused: bool = False
    sought_at: float | None = None
    last_interval: IntervalDone | None = None
    """The last interval, or None if its contribution came too late."""
    member: RunMember | None = None

    def situation(self, since_s: float) -> Situation:
        """Return the situation of this trainer. Contributions before `since_s` do not count."""
        if self.contributed_at >= since_s:
            return "in_work"
        return "refused" if self.is_refused else "waiting"

    async def run(self) -> None:
        """Find a run and train until cancelled."""
        self.began_at = self.sought_at = asyncio.get_running_loop().time()
        run = await self._smallest_run()
        async with run.joined():
            await self._train(run)

    async def _train(self, run: _Run) -> None:
        inner = TimedInner(self.step_s, lambda: self._transfer_s(run.signed.config))
        setup = TrainingSetup(inner=inner, theta_N=torch.zeros(NUM_VALUES), bounds=(0, NUM_VALUES))
        chance = random.Random(f"audits/{self.network.peer_id}")
        options = RunMemberOptions(setup=setup, clock=inner.clock, chance=chance)
        while True:
            member = self.member = RunMember(
                self.network,
                self.membership,
                self.identity,
                run.signed,
                on_event=partial(self._on_event, run),
                options=options,
            )
            try:
                await member.run()
            except SwarmError:
                self.measured.count("members failed")
                await asyncio.sleep(10.0)
            finally:
                await member.close()

    async def _smallest_run(self) -> _Run:
        """Return the smallest of NUM_CANDIDATE_RUNS random runs, or a random one if no lookup succeeds."""
        chance = random.Random(self.network.peer_id)
        found: list[tuple[int, int]] = []
        for index in chance.sample(range(len(self.runs)), min(NUM_CANDIDATE_RUNS, len(self.runs))):
            run = self.runs[index]
            try:
                trainers = await self.membership.some_trainers(run.signed.run_id)
            except PeerTimeout:
                continue
            found.append((run.num_waiting + sum(each.state != "leaving" for each in trainers.values()), index))
        return self.runs[min(found)[1] if found else chance.randrange(len(self.runs))]

    def _transfer_s(self, config: RunConfig) -> float:
        """Return the seconds that a round's vectors take on this trainer's link."""
        host = self.network.host
        return self._num_vectors(config) * self.vector_bytes / min(host.up.bytes_per_s, host.down.bytes_per_s)

    def _num_vectors(self, config: RunConfig) -> int:
        """Return the number of vectors that this trainer's link carries in a round: its own and the result. A head also
        carries those of its cluster, which is assumed to be full."""
        state = self.member.state if self.member else None
        is_head = state is not None and self.network.peer_id in state.manifest.roster
        return 2 * (config.cluster_size if is_head else 1)

    def _on_event(self, run: _Run, event: TrainingEvent) -> None:
        measured = self.measured
        if isinstance(event, IntervalDone):
            self.last_interval, self.is_refused = event, False
            measured.count("training s", event.seconds)
            measured.count("vector bytes", self.vector_bytes * self._num_vectors(run.signed.config))
        elif isinstance(event, ContributionLate):
            self.last_interval = None
        elif isinstance(event, RoundAborted) and event.reason.startswith(RUN_IS_FULL):
            self.is_refused = True
        elif isinstance(event, RoundAborted):
            measured.count("attempts failed")
        elif isinstance(event, OuterStep) and (done := self.last_interval) is not None and done.step == event.step:
            run.begin()
            now_s = self.contributed_at = asyncio.get_running_loop().time()
            if self.sought_at is not None:
                measured.take(measured.find_group_s, now_s - self.sought_at - done.seconds)
                self.sought_at = None
            measured.take(measured.round_s, event.round_s)
            measured.count("contributions")
            measured.count("committed tokens", self.kind.training_tokens_per_s * done.seconds)
            measured.count("rounds", event.digest not in self.committed)
            self.committed.add(event.digest)
