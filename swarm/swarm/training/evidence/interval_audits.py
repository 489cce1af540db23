"""Validations of other members' intervals: those that a step's outcome draws for this member, and those that
accusations ask for.

A member that validates skips one interval, and contributes nothing to that step, so that no step takes longer. The
weights that a step started from are kept for the last NUM_STARTS steps that drew an interval: 4 bytes a parameter each.

`OuterSteps` owns `IntervalAudits`, and tells it what was committed. `IntervalLoop` asks it before each interval for
what is due.

`replayed` recomputes an interval, and `replay_file` does so offline. In a run with `validation_rate` an interval
depends only on its initial state, the member's lease and the run's settings. Both block for as long as an interval.
Shapes: N values of the flat parameter vector.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from swarm_compression.codec import CodecError
from swarm_protocol.errors import IntegrityError, PeerViolation, RoundError, SwarmError
from swarm_protocol.identity import short_id
from swarm_protocol.proof_messages import WRONG_INTERVAL, Evidence, IntervalFinding, WrongInterval
from swarm_protocol.reduction_messages import AuditedSlice
from swarm_protocol.training_messages import Contribution
from torch import Tensor

from swarm.evidence_folder import proving
from swarm.newest_items import NewestItems
from swarm.threads import in_executor
from swarm.training.evidence.bans import MAX_IGNORED, Verdict
from swarm.training.evidence.evidence import open_file
from swarm.training.evidence.wrong_interval import (
    IntervalCase,
    IntervalStart,
    draw_leaves,
    draw_validators,
    has_voted,
    read_case,
)
from swarm.training.inner.interval import Inner, Intervals
from swarm.training.run.run_config import RunConfig
from swarm.training.run.signed_run import SignedRun
from swarm.training.state.certificate_history import Proof
from swarm.training.state.replica_state import ReplicaState
from swarm.training.state.run_context import RunContext
from swarm.training.trainer_events import FalselyAccused, IntervalValidated, TrainingEvent

logger = logging.getLogger(__name__)

NUM_STARTS = 2
MAX_DUE = 4
"""Maximum validations that wait. Further accusations are dropped, and need the findings of other members."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnInterval:
    """A validator's record of a step: `peer`, whose interval it validates, and that member's slices of the drawn
    leaves."""

    peer: str
    slices: tuple[AuditedSlice, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Validation:
    """An interval that this member is to recompute from `start`."""

    case: IntervalCase
    start: IntervalStart

    @property
    def is_accusation(self) -> bool:
        """True if another member has found the interval wrong."""
        return bool(self.case.finders)


class IntervalAudits:
    """The validations of one member. `convict` takes the evidence that it finds; intervals of banned members are
    skipped."""

    def __init__(
        self,
        context: RunContext,
        intervals: Intervals,
        *,
        convict: Callable[[bytes], Awaitable[None]],
        is_banned: Callable[[str], bool],
        on_event: Callable[[TrainingEvent], None],
    ) -> None:
        self._context = context
        self._intervals = intervals
        self._convict = convict
        self._is_banned = is_banned
        self._on_event = on_event
        self._starts = NewestItems[bytes, IntervalStart](NUM_STARTS)
        self._due = deque[Validation]()
        self._known: set[tuple[str, int]] = set()  # peers and steps
        self._refuted = NewestItems[str, None](MAX_IGNORED)

    def begins_at(self) -> IntervalStart | None:
        """Return the inputs of the next step's interval; None if the run neither validates nor measures any."""
        state, config = self._context.replica.current, self._context.replica.config
        if not (config.validation_rate or config.held_out_rule.num_drawn):
            return None
        return IntervalStart(step=state.outer_step + 1, theta_N=state.theta_N, stripes=state.manifest.stripes)

    def keep_step(self, proof: Proof, start: IntervalStart, drawn: DrawnInterval | None) -> None:
        """Keep the inputs of validations of the step that `proof` commits and that began from `start`. `drawn` is the
        interval that this member is to validate."""
        origin, outcome, config = proof.origin, proof.outcome, self._context.replica.config
        if not draw_validators(origin, outcome, config.validation_rate):
            return
        self._known = {(peer, step) for peer, step in self._known if step + 2 * NUM_STARTS > start.step}
        self._starts[outcome.origin_digest] = start
        if drawn is not None:
            evidence = WrongInterval(certificate=proof.certificate, peer=drawn.peer, slices=drawn.slices, findings=())
            member = next(each for each in origin.contributors if each.peer_id == drawn.peer)
            leaves = draw_leaves(origin, outcome, drawn.peer, self._context.network.peer_id)
            is_voted = has_voted(proof.certificate, drawn.peer, self._context.signatures)
            self._add(
                IntervalCase(
                    proof=proof, member=member, leaves=leaves, finders=(), evidence=evidence, is_voted=is_voted
                )
            )

    def accuse(self, case: IntervalCase) -> None:
        """Take an accusation that does not convict yet. This member recomputes the interval if it still has the
        inputs."""
        if case.finders[0] not in self._refuted:
            self._add(case)

    def next(self) -> Validation | None:
        """Return what this member is to validate in place of its next interval."""
        while self._due:
            due = self._due.popleft()
            if not self._is_banned(due.case.member.peer_id):
                return due
        return None

    async def run(self, due: Validation) -> None:
        """Recompute the interval, and report the result."""
        case, config = due.case, self._context.replica.config
        intervals = self._intervals
        stop = intervals.is_leaving.is_set
        try:
            delta_N = await intervals.off_loop(replayed, intervals.inner, due.start, case.member, config, stop)
        except RoundError as error:
            level = logging.INFO if stop() else logging.WARNING
            logger.log(level, "the interval of %s cannot be validated: %s", short_id(case.member.peer_id), error)
            return
        try:
            found = await in_executor(self._context.executor, case.compare, delta_N, config)
        except CodecError as error:
            logger.warning("the interval of %s cannot be compared: %s", short_id(case.member.peer_id), error)
            return
        self._on_event(
            IntervalValidated(
                step=case.step, peer_id=case.member.peer_id, tier=found.tier, distance=min(found.distance, MAX_TOLD)
            )
        )
        if found.tier == "wrong":
            await self._tell(case)
        elif due.is_accusation:
            accuser = case.finders[0]
            self._refuted[accuser] = None
            logger.warning("%s falsely accused %s", short_id(accuser), short_id(case.member.peer_id))
            self._on_event(FalselyAccused(step=case.step, peer_id=case.member.peer_id, accuser=accuser))

    async def _tell(self, case: IntervalCase) -> None:
        origin, signatures = case.proof.origin, self._context.signatures
        finding = IntervalFinding(
            run=origin.run,
            step=origin.step,
            attempt=origin.attempt,
            origin_digest=case.proof.outcome.origin_digest,
            peer=case.member.peer_id,
        )
        signed = signatures.sign(finding, self._context.network.now())
        evidence = replace(case.evidence, findings=(*case.evidence.findings, signed))
        try:
            await self._convict(evidence.evidence().to_bytes())
        except SwarmError as error:
            logger.warning("the lie of %s could not be turned into evidence: %s", short_id(case.member.peer_id), error)

    def _add(self, case: IntervalCase) -> None:
        start = self._starts.get(case.proof.outcome.origin_digest)
        key = (case.member.peer_id, case.step)
        is_mine = case.member.peer_id == self._context.network.peer_id
        if start is None or is_mine or key in self._known or len(self._due) >= MAX_DUE:
            return
        self._known.add(key)
        self._due.append(Validation(case=case, start=start))


MAX_TOLD = 1e6
"""Maximum distance in an event: the measured one can be infinite."""


def replayed(
    inner: Inner,
    start: IntervalStart,
    member: Contribution,
    config: RunConfig,
    stop: Callable[[], bool] = lambda: False,
) -> Tensor:
    """Return the pseudo-gradient [N] of the steps that `member` claims. Restores the weights of `inner`. Raises
    RoundError if training diverged, or if `stop`, which is called before each step, returned True."""
    samples = start.samples_of(member, config)
    num_steps, done_steps = len(samples) // config.inner.batch_windows, (start.step - 1) * config.interval_steps
    kept_N = inner.flat()
    try:
        inner.load(start.theta_N)
        if inner.train(samples, num_steps, stop, done_steps=done_steps).num_steps < num_steps:
            raise RoundError("this member is leaving")
        local_N = inner.flat()
        return torch.sub(start.theta_N, local_N, out=local_N)
    finally:
        inner.load(kept_N)


def replay_file(path: Path, state: ReplicaState, inner_of: Callable[[SignedRun], Inner]) -> tuple[SignedRun, Verdict]:
    """Check the accusation in `path` without trust in its findings, and return its run and the verdict. Recomputes the
    interval from `state`, from which the step began, with the inner loop that `inner_of` makes. Blocks for as long as
    an interval.

    Raises ConfigError, and IntegrityError if the file is no accusation, or proves nothing.
    """
    run, signatures, data = open_file(path)
    with proving(path):
        evidence = Evidence.from_bytes(data)
        if evidence.kind != WRONG_INTERVAL:
            raise PeerViolation("it is not about an interval: its check needs no state")
        case = read_case(evidence.body, signatures, run.config)
        if state.digest != case.proof.origin.state_digest:
            raise PeerViolation("this is not the state that the step began from")
        if not case.is_voted:
            raise PeerViolation("evidence has no vote of the accused: its group may be made up")
    inner = inner_of(run)
    try:
        start = IntervalStart(step=case.step, theta_N=state.theta_N, stripes=state.manifest.stripes)
        found = case.compare(replayed(inner, start, case.member, run.config), run.config)
    finally:
        inner.close()
    if found.tier != "wrong":
        raise IntegrityError(
            f"{path} proves nothing: computed once more, the interval gives what the member sent ({found.tier}, "
            f"distance {found.distance:.3g})"
        )
    return run, case.verdict
