"""`swarm-node run watch`: watches a run from outside, and prints everything that its members prove once."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median, median_high

from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.training.outside.observer import Observer, shortage_of
from swarm.training.run.run_copy import find_run
from swarm.training.run.run_file import load_signed_run
from swarm.training.run.signed_run import SignedRun
from swarm.training.state.checkpoint_names import digest_at
from swarm_protocol.errors import PeerTimeout, SwarmError
from swarm_protocol.identity import short_id
from swarm_protocol.records import TrainerRecord

from swarm_node import diagnostics
from swarm_node.commands.command_options import Flags, file_or_id, say_joining, with_peers
from swarm_node.events.emitter import Emitter
from swarm_node.events.tensorboard_files import recorded
from swarm_node.formatting import duration
from swarm_node.network_join import visiting
from swarm_node.settings.config import Config
from swarm_node.settings.parsers import RunId
from swarm_node.storage.home import Home
from swarm_node.storage.kept_runs import kept_copy

POLL_S = 1.0
OTHERS_S = 10.0
"""Seconds between two looks for members that follow another history of the run."""
FIND_S = 5.0
"""Seconds to look for a member that has the run's file before the user is told that there is none."""
FIRST_MEMBER_S = 180.0
"""Seconds to wait for the first member. A user who watches before training begins still has to start the members."""
NO_MEMBER_S = 20.0
"""Seconds to wait for another member once all have gone. Live members are seen within a second or two."""
FINISHED_S = 10.0
"""Like NO_MEMBER_S, once a member has said that the run is finished: no other member is expected then."""
WAITING_S = 5.0
"""Seconds for which a run must lack members before this is printed."""
SAY_AGAIN_S = 60.0
"""Seconds of waiting before it is printed a second time."""
MAX_COMPLAINTS = 16
"""Warnings that are remembered, so that each is printed once. Several members may be gone for different reasons."""


def watch(flags: Flags) -> int:
    """Print the progress of a run until it is finished. Raises ConfigError, IntegrityError, StartError or
    PeerTimeout."""
    which, config, emitter = file_or_id(flags), with_peers(flags), Emitter(json=flags.json)
    diagnostics.begin_work()
    home = Home(config.home)
    kept = kept_copy(home, which.run_id, load_signed_run) if isinstance(which, RunId) else None
    run = load_signed_run(which) if isinstance(which, Path) else kept or which
    if isinstance(run, SignedRun) and (digest := digest_at(home.checkpoints / run.run_id, run.config.outer_steps)):
        # a node of this home has trained the run to its end: its members may have left long ago
        emitter.emit("run_finished", run=run.run_id, outer_step=run.config.outer_steps, digest=digest.hex())
        return 0
    say_joining(config, emitter)
    return asyncio.run(_watch(run, config, emitter))


async def _watch(which: SignedRun | RunId, config: Config, emitter: Emitter) -> int:
    async with visiting(config) as (network, membership):
        run = which if isinstance(which, SignedRun) else await _file_of(which.run_id, network, membership, emitter)
        emitter.emit("watching", run=run.run_id, signed_by=run.peer_id, outer_steps=run.config.outer_steps)
        watching = RunWatcher(Observer(network, membership, run), emitter)
        with recorded(emitter, config.tensorboard, run.run_id, "watch"):
            await watching.until_finished()
    return 0


async def _file_of(run_id: str, network: Network, membership: Membership, emitter: Emitter) -> SignedRun:
    """Return the run's file from the first member, waiting at most FIRST_MEMBER_S for one. Raises PeerTimeout."""
    now_s = asyncio.get_running_loop().time
    until_s, has_said = now_s() + FIRST_MEMBER_S, False
    while True:
        try:
            return await find_run(network, membership, run_id, timeout_s=FIND_S)
        except PeerTimeout:
            if now_s() >= until_s:
                raise
        if not has_said:
            emitter.say(_waits_for_first(run_id))
            has_said = True


def _waits_for_first(run_id: str) -> str:
    waits = duration(FIRST_MEMBER_S)
    why = "nobody trains it yet, or it is over and all members have left"
    return f"no member of {run_id} was found: {why}; waiting up to {waits} for a member; Ctrl-C stops this"


class RunWatcher:
    """Prints what an observer sees, each fact once."""

    def __init__(self, observer: Observer, emitter: Emitter) -> None:
        self._observer = observer
        self._run = observer.run
        self._emitter = emitter
        self._states: Mapping[str, str] = {}
        self._validated = -1
        self._endorsed = 0
        self._finished: TrainerRecord | None = None
        """The last record of one member, if all members that are not leaving say that the run is finished."""
        self._complaints: deque[str] = deque(maxlen=MAX_COMPLAINTS)
        self._others_at_s = 0.0
        self._num_apart = 0
        self._waits_since_s: float | None = None
        self._waits_for = ""
        self._say_again_s = 0.0

    async def until_finished(self) -> None:
        """Watch until the run is finished, or until its members say so and have left.

        Raises PeerTimeout if no member trains the run, or no longer does.
        """
        loop = asyncio.get_running_loop()
        seen_s, patience_s = loop.time(), FIRST_MEMBER_S
        has_looked = False
        while True:
            try:
                members = await self._observer.members()
                if await self._report(members):
                    return
            except SwarmError as error:
                if not self._finished:  # after the end, members may be gone without a warning
                    self._complain(error)
                members = {}
            if not (members or has_looked):
                self._emitter.say(_waits_for_first(self._run.run_id))
            has_looked = True
            if members:
                seen_s, patience_s = loop.time(), NO_MEMBER_S
            elif self._finished and loop.time() - seen_s > FINISHED_S:
                self._emitter.emit(
                    "run_left",
                    run=self._run.run_id,
                    outer_step=self._finished.outer_step,
                    digest=self._finished.digest.hex(),
                    loss=self._finished.loss,
                    checked=self._observer.outer_step,
                )
                return
            elif loop.time() - seen_s > patience_s:
                raise self._no_member_error()
            await asyncio.sleep(POLL_S)

    async def _report(self, members: Mapping[str, TrainerRecord]) -> bool:
        """Print the news. Return whether the run is finished."""
        self._report_members(members)
        steps = await self._observer.look(members)
        self._report_endorsed()
        self._report_validated(members)
        self._report_waiting(members)
        await self._report_other_history(members)
        speed = sum(each.tokens_per_s for each in members.values() if each.state != "joining")
        last = self._run.config.outer_steps
        for step in steps:
            fields = asdict(step)
            self._emitter.emit(
                "committed", run=self._run.run_id, step=fields.pop("outer_step"), of=last, tokens_per_s=speed, **fields
            )
            if step.outer_step == last:
                self._emitter.emit("run_finished", run=self._run.run_id, outer_step=last, digest=step.digest)
                return True
        return False

    def _report_members(self, members: Mapping[str, TrainerRecord]) -> None:
        present = [each for each in members.values() if each.state != "leaving"]
        if present:
            last = self._run.config.outer_steps
            is_finished = all(each.state == "finished" and each.outer_step == last and each.digest for each in present)
            self._finished = present[0] if is_finished else None
        states = {peer: each.state for peer, each in members.items()}
        if states == self._states:
            return
        self._states = states
        counts = Counter(states.values())
        summary = ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "none"
        shown = ("state", "outer_step", "tokens_per_s", "loss")
        listed = [{"peer_id": peer, **{name: getattr(each, name) for name in shown}} for peer, each in members.items()]
        self._emitter.emit("members", run=self._run.run_id, members=listed, summary=summary)

    def _report_endorsed(self) -> None:
        newest = self._observer.endorsement
        if newest is not None and newest.sequence != self._endorsed:
            self._endorsed, digest = newest.sequence, newest.state_digest.hex()
            fields = {"step": newest.outer_step, "digest": digest, "sequence": newest.sequence, "is_other": False}
            self._emitter.emit("state_endorsed", run=self._run.run_id, **fields)

    def _report_validated(self, members: Mapping[str, TrainerRecord]) -> None:
        """Print the newest validation loss once. It is the median over members, since some may lie, for steps that were
        seen."""
        every = [record.validation for record in members.values() if record.validation is not None]
        seen = [each for each in every if each.outer_step <= self._observer.outer_step]
        step = median_high(each.outer_step for each in seen) if seen else -1
        if step > self._validated:
            self._validated = step
            loss = median(each.loss for each in seen if each.outer_step == step)
            self._emitter.emit("validated", run=self._run.run_id, step=step, loss=loss)

    async def _report_other_history(self, members: Mapping[str, TrainerRecord]) -> None:
        """Warn of members that follow another history of the run: when there are some, and when there are twice as
        many."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._others_at_s:
            return
        self._others_at_s = now_s + OTHERS_S
        other = await self._observer.look_for_other_history(members)
        if other is not None and other.is_news(self._num_apart):
            self._num_apart = len(other.peers)
            self._emitter.warning(other.words(short_id), remedy=other.remedy)

    def _report_waiting(self, members: Mapping[str, TrainerRecord]) -> None:
        """Print what the run waits for: again when that changes, and when the wait has become twice as long."""
        now_s = asyncio.get_running_loop().time()
        shortage = shortage_of(self._run.config, self._observer.outer_step, self._observer.roster, members)
        if shortage is None or self._finished or not members:
            self._waits_since_s, self._waits_for = None, ""
            return
        self._waits_since_s = now_s if self._waits_since_s is None else self._waits_since_s
        waits_s, words = now_s - self._waits_since_s, shortage.words(short_id)
        if waits_s < WAITING_S or (words == self._waits_for and waits_s < self._say_again_s):
            return
        self._waits_for, self._say_again_s = words, max(SAY_AGAIN_S, 2 * waits_s)
        self._emitter.emit(
            "run_waits",
            run=self._run.run_id,
            reason=words,
            ready=shortage.num_ready,
            needed=shortage.num_needed,
            missing=shortage.missing,
            seconds=waits_s,
            remedy=shortage.remedy,
        )

    def _complain(self, error: SwarmError) -> None:
        if error.message not in self._complaints:
            self._emitter.warning(f"the run's progress cannot be seen: {error.message}", remedy=error.remedy)
        self._complaints.append(error.message)

    def _no_member_error(self) -> PeerTimeout:
        step, last = self._observer.outer_step, self._run.config.outer_steps
        if step:
            message = f"no member trains {self._run.run_id} any more: it is at outer step {step} of {last}"
        else:
            message = f"no member trains {self._run.run_id} in this network"
        return PeerTimeout(message, remedy="check --peers and --network-id, or join it: swarm-node join --run RUN")
