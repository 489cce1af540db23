"""A run among trainers on a simulated internet, with a synthetic model that trains in no time.

The "model" is a vector that each interval moves towards a fixed target by an amount that depends on the samples, so
that contributions differ, losses fall, and every replica can be compared bit by bit.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from support.faults import FaultScript
from swarm.evidence_folder import EvidenceFolder
from swarm.network.interface import no_failpoints
from swarm.network.membership import Membership
from swarm.network.memory.memory_link import LinkModel
from swarm.network.memory.memory_network import MemoryInternet, MemoryNetwork
from swarm.testing import virtual_time
from swarm.training.inner.inner_loop import IntervalResult
from swarm.training.inner.interval import TrainingSetup
from swarm.training.member.interval_loop import IntervalLoop
from swarm.training.member.outer_steps import OuterSteps
from swarm.training.member.round_driver import RoundDriver
from swarm.training.member.run_member import RunMember, RunMemberOptions
from swarm.training.round.promise import PromiseFile
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_tables import DataConfig, InnerConfig
from swarm.training.run.signed_run import SignedRun
from swarm.training.state.certificate import RunSignatures
from swarm.training.state.replica_state import ReplicaState
from swarm.training.state.run_context import RunContext
from swarm.training.trainer_events import OuterStep, StateFetched, TrainingEvent
from swarm_compression import Codec, get_codec
from swarm_protocol.commit_messages import Certificate, Outcome, PlacedSignature, Vote
from swarm_protocol.identity import Identity
from swarm_protocol.run_credentials import RunInvitation
from swarm_protocol.training_messages import Contribution, Group, SignedGroup
from torch import Tensor

E = TypeVar("E")

AUTHOR = Identity(b"r" * 32)
NUM_VALUES = 3000
WINDOW_TOKENS = 4
LAN = LinkModel(latency_s=0.005)
PHASES = [
    "interval",
    "round.ready",
    "round.sign",
    "round.signed",
    "round.slice",
    "round.reducing",
    "round.reduced",
    "round.deliver",
    "round.proposed",
    "round.vote",
    "round.voted",
    "round.committed",
    "round.applied",
]
"""The phases of a step at which faults can strike a member."""


def config(**changes: object) -> RunConfig:
    settings: dict[str, object] = {
        "name": "test",
        "outer_steps": 3,
        "interval_steps": 5,
        "min_group": 1,
        "max_group": 16,
        "quorum_grace_s": 1.0,
        "data": DataConfig(window_tokens=WINDOW_TOKENS),
        "inner": InnerConfig(batch_windows=2),
    }
    return RunConfig(**{**settings, **changes})  # type: ignore[arg-type]


def interval_cost(function: object, *, interval_s: float = 1.0, other_s: float = 0.0) -> float:
    """Return the virtual seconds of a task: an interval takes `interval_s`, everything else `other_s`."""
    return interval_s if getattr(function, "__name__", "") == "_stretch" else other_s


def identity_of(name: str) -> Identity:
    """That of the member of this name."""
    return Identity(hashlib.sha256(name.encode()).digest())


def signed(run: RunConfig) -> SignedRun:
    """Without `sign_run`, which builds the model in order to check it."""
    return SignedRun(config=run, peer_id=AUTHOR.peer_id, issued_at=1_750_000_000, signature=bytes(64))


@dataclass
class SyntheticInner:
    """Implements `interval.Inner`. `trained` are the sample ids of each stretch.

    A step takes `step_s` real seconds, and `virtual_step_s` in virtual time, which `clock` measures.
    """

    num_values: int = NUM_VALUES
    step_s: float = 0.0
    virtual_step_s: float = 0.0
    corrupt: Callable[[Tensor], Tensor] = lambda x_N: x_N
    diverges: bool = False
    trained: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.target_N = torch.randn(self.num_values, generator=generator)
        self.theta_N = torch.zeros(self.num_values)
        self._trained_s = 0.0
        self.is_closed = False

    def clock(self) -> float:
        return self._trained_s if self.virtual_step_s else time.monotonic()

    def load(self, theta_N: Tensor) -> None:
        self.theta_N = theta_N.clone()

    def take_in(self, where: slice, theta_F: Tensor, mixing: float) -> None:
        self.theta_N[where] = mixing * self.theta_N[where] + (1 - mixing) * theta_F

    def train(
        self,
        sample_ids: Sequence[int],
        num_steps: int,
        stop: Callable[[], bool] = lambda: False,
        *,
        done_steps: int = 0,
    ) -> IntervalResult:
        done, loss = 0, 0.0
        while done < num_steps and not stop():
            batch = sample_ids[2 * done : 2 * done + 2]
            loss += float((self.theta_N - self.target_N).square().mean())
            self.theta_N = self.theta_N + 0.05 * (1 + sum(batch) % 7) / 7 * (self.target_N - self.theta_N)
            done += 1
            if self.step_s:
                time.sleep(self.step_s)
            virtual_time.charge(self.virtual_step_s)
            self._trained_s += self.virtual_step_s
        self.trained.append(list(sample_ids[: 2 * done]))
        return IntervalResult(
            num_steps=done,
            num_samples=2 * done,
            num_tokens=2 * done * WINDOW_TOKENS,
            mean_loss=loss / done if done and not self.diverges else float("nan"),
            seconds=(self.virtual_step_s or 0.1) * done,
        )

    def flat(self, where: slice = slice(None)) -> Tensor:
        return self.corrupt(self.theta_N)[where].clone()

    def held_out_loss(self, theta_N: Tensor, num_windows: int = 1, draw: int = 0) -> float:
        return float((theta_N - self.target_N).square().mean())

    def close(self) -> None:
        self.is_closed = True


def setup_of(inner: SyntheticInner, fragments: int) -> TrainingSetup:
    """Fragments of nearly equal size."""
    bounds = tuple(inner.num_values * index // fragments for index in range(fragments + 1))
    return TrainingSetup(inner=inner, theta_N=torch.zeros(inner.num_values), bounds=bounds)


class AlteredMember(RunMember):
    """A member with steps that a test alters: override `_drive` or `_take_step`, and call `super` for what they do."""

    async def _open(self) -> OuterSteps:
        steps = await super()._open()
        self._drives, self._takes = steps._drive, steps._take_step

        async def drive(driver: RoundDriver) -> bytes:
            return await self._drive(driver, steps.context)

        steps._drive, steps._take_step = drive, self._take_step  # type: ignore[method-assign]
        return steps

    async def _drive(self, driver: RoundDriver, _context: RunContext) -> bytes:
        return await self._drives(driver)

    async def _take_step(self, intervals: IntervalLoop, background: asyncio.TaskGroup) -> bool:
        return await self._takes(intervals, background)


@dataclass(eq=False)
class Member:
    name: str
    network: MemoryNetwork
    trainer: RunMember
    inner: SyntheticInner
    events: list[TrainingEvent]
    task: asyncio.Task[None] | None = None
    is_alive: bool = True

    @property
    def peer_id(self) -> str:
        return self.network.peer_id

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def digest(self) -> str:
        assert self.trainer.state is not None
        return self.trainer.state.hashed_again().digest.hex()


class Swarm:
    """Starts, kills and joins the members of one run. Use as an async context manager in virtual time. All chance
    follows from `seed`."""

    def __init__(
        self,
        run: RunConfig,
        script: FaultScript | None = None,
        *,
        link: LinkModel = LAN,
        detection_s: float = 0.2,
        seed: int = 0,
    ) -> None:
        self.run = signed(run)
        self.internet = MemoryInternet(default_link=link, detection_s=detection_s, seed=seed)
        self.members: dict[str, Member] = {}
        self.script, self._seed = script, seed
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Swarm:
        return self

    async def __aexit__(self, *_: object) -> None:
        for member in self.members.values():
            if member.task is not None:
                member.task.cancel()
                await asyncio.wait({member.task})
            await member.trainer.close()
        await self._stack.aclose()
        for member in self.members.values():
            await member.network.close()

    async def join(
        self,
        name: str,
        *,
        inner: SyntheticInner | None = None,
        setup: TrainingSetup | None = None,
        state: ReplicaState | None = None,
        certificate: bytes = b"",
        history: tuple[bytes, ...] = (),
        kind: type[RunMember] = RunMember,
        bytes_per_s: float | None = None,
        promises: PromiseFile | None = None,
        evidence: EvidenceFolder | None = None,
        invitations: tuple[RunInvitation, ...] = (),
    ) -> Member:
        identity = identity_of(name)
        access = {} if bytes_per_s is None else {"up_bytes_per_s": bytes_per_s, "down_bytes_per_s": bytes_per_s}
        network = self.internet.network(identity, **access)
        membership = await self._stack.enter_async_context(Membership(network))
        inner = inner or SyntheticInner()
        events: list[TrainingEvent] = []
        trainer = kind(
            network,
            membership,
            identity,
            self.run,
            on_event=events.append,
            options=RunMemberOptions(
                setup=setup or setup_of(inner, self.run.config.fragments),
                clock=inner.clock,
                state=state,
                certificate=certificate,
                history=history,
                promises=promises,
                evidence=evidence,
                invitations=invitations,
                chance=random.Random(f"{self._seed}/{name}"),
            ),
            failpoints=self.script.hook(name) if self.script else no_failpoints,
        )
        member = Member(name, network, trainer, inner, events)
        self.members[name] = member
        member.task = asyncio.create_task(trainer.run(), name=f"trainer {name}")
        return member

    def kill(self, name: str) -> None:
        """Do what the fault script's `kill` does: the node is gone at once, without a word."""
        member = self.members[name]
        member.is_alive = False
        self.internet.crash(member.peer_id, detection_s=0.0)
        assert member.task is not None
        member.task.cancel()

    async def finish_after(self, script: FaultScript, timeout_s: float = 600.0) -> list[Member]:
        """Wait until all faults have struck, and the members that are then alive have returned from `run`."""
        async with asyncio.timeout(timeout_s):
            await script.until_all_fired()
        return await self.finish(timeout_s=timeout_s)

    async def finish(self, *names: str, timeout_s: float = 600.0) -> list[Member]:
        """Wait until these members, or all that live, have returned from `run`."""
        chosen = [self.members[name] for name in names] or [each for each in self.members.values() if each.is_alive]
        tasks = [member.task for member in chosen if member.task is not None]
        done, pending = await asyncio.wait(tasks, timeout=timeout_s)
        last = {member.name: member.events[-1:] for member in chosen if member.task in pending}
        assert not pending, f"still running, with the last event of each: {last}"
        for task in done:
            task.result()
        return chosen


def assert_equal_steps(members: Sequence[Member], num_steps: int) -> None:
    """Every member has the same final state, and no two ever reported different digests for one outer step."""
    assert {member.trainer.state.outer_step for member in members if member.trainer.state} == {num_steps}
    assert len({member.digest for member in members}) == 1
    digests: dict[int, set[str]] = {}
    for member in members:
        for event in member.events:
            if isinstance(event, OuterStep | StateFetched) and event.step:
                digests.setdefault(event.step, set()).add(event.digest)
    assert all(len(each) == 1 for each in digests.values()), digests


def certified(signers: list[RunSignatures], step: int, now: float) -> bytes:
    """A certificate of `step` that these alone have signed."""
    peers = sorted(each.identity.peer_id for each in signers)
    group = Group(
        run=signers[0].run,
        step=step,
        attempt=0,
        state_digest=bytes([step]) * 32,
        members=tuple(Contribution(peer_id=peer, num_tokens=1, num_samples=1) for peer in peers),
        part_values=(1,) * len(peers),
        reduce_s=1.0,
        vote_s=1.0,
    )
    signed = signers[0].sign_group(group, now)
    outcome = Outcome(
        origin_digest=signed.digest, part_digests=(bytes(32),) * len(peers), state_digest=bytes([step + 1]) * 32
    )
    return certificate_of(signed, outcome, signers)


def certificate_of(signed: SignedGroup, outcome: Outcome, signers: Sequence[RunSignatures]) -> bytes:
    """Return the certificate that commit votes of these members of the group make."""
    group = signed.group
    vote = signed.vote(outcome, "commit")
    votes = placed_votes(vote, signers, group.peer_ids)
    return Certificate(group=signed.data, outcome=outcome, votes=votes).to_bytes()


def placed_votes(vote: Vote, signers: Sequence[RunSignatures], peers: Sequence[str]) -> tuple[PlacedSignature, ...]:
    """Return this vote of the `signers`, by their places among `peers`."""
    signatures = {peers.index(each.identity.peer_id): each.sign_vote(vote).signature for each in signers}
    return tuple(PlacedSignature(place=place, signature=signatures[place]) for place in sorted(signatures))


class SpoiledCodec:
    """int8, except for what it sends; it tolerates whatever it gets."""

    name = "spoiled"
    is_quick = False
    combine = Codec.combine

    def __init__(self, spoil: Callable[[bytes], bytes]) -> None:
        self._honest = get_codec("int8")
        self._spoil = spoil

    def encoded_bytes(self, num_values: int) -> int:
        return self._honest.encoded_bytes(num_values)

    def encode(self, x_N: Tensor) -> bytes:
        return self._spoil(self._honest.encode(x_N))

    def encode_into(self, x_N: Tensor, buffer: bytearray) -> None:
        buffer[:] = self.encode(x_N)

    def pieces(self, data: bytes, num_values: int, start: int, stop: int) -> tuple[memoryview, ...]:
        size = self.encoded_bytes(num_values)
        return self._honest.pieces(bytes(data[:size]).ljust(size, b"\0"), num_values, start, stop)

    def check(self, data: bytes | bytearray | memoryview, num_values: int) -> float:
        return 0.0

    def decode_into(self, data: bytes | bytearray | memoryview, x_N: Tensor) -> float:
        try:
            return self._honest.decode_into(data, x_N)
        except ValueError:
            x_N.zero_()
            return 0.0

    def accumulate(self, data: bytes | bytearray | memoryview, weight: float, acc_N: Tensor) -> None:
        x_N = torch.empty_like(acc_N)
        self.decode_into(data, x_N)
        acc_N += weight * x_N
