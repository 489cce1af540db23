"""Makes what a member reports: the measurements of one step, in events and in the record that others see (`RoundLog`),
and events about the member itself, each when something changes (`MemberReports`). The module owns no tasks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

from swarm_protocol import limits
from swarm_protocol.checks import shared_fields
from swarm_protocol.commit_messages import Endorsement
from swarm_protocol.records import Refusal, RoundReport
from swarm_protocol.run_credentials import Grant
from swarm_protocol.training_messages import Contribution

from swarm.training.evidence.bans import Ban
from swarm.training.inner.inner_loop import IntervalResult
from swarm.training.round.clusters import has_contributed
from swarm.training.round.round_events import GiveUp
from swarm.training.round.round_state import RoundSetup, RoundState
from swarm.training.standing.entrance import Entry
from swarm.training.standing.held_out_scores import MICRO, HeldOutScore
from swarm.training.state.certificate_history import Proof
from swarm.training.state.endorsement import contradicts
from swarm.training.state.replica import Replica
from swarm.training.state.run_context import RunContext
from swarm.training.trainer_events import (
    Admitted,
    ContributionLate,
    HeldOutScored,
    InvitationRefused,
    MemberConvicted,
    OnProbation,
    OuterStep,
    RoundAborted,
    RunEntered,
    RunResumed,
    StateEndorsed,
    TrainingEvent,
)

logger = logging.getLogger(__name__)

Measured: TypeAlias = Literal["interval", "group", "reduce", "commit", "apply"]

Weight: TypeAlias = Literal[0, 1, 2]
BROKE_PROTOCOL: Weight = 0
LEFT_OUT: Weight = 1
DOWNWEIGHTED: Weight = 2
"""The severity of a refusal, 0 being the most severe: a record holds only the most severe ones."""


class RoundLog:
    """Records how a member spends one step's time, over all attempts, what it sends, and which peers it refuses.

    `round_driver` owns it, `outer_steps` reads it. Times are the loop's.
    """

    def __init__(self) -> None:
        self.bytes_sent = 0
        self._seconds: dict[Measured, float] = {}
        self._phase: Measured | None = None
        self._since = 0.0
        self._refused: dict[str, tuple[Weight, str]] = {}

    def enter(self, phase: Measured | None, now: float) -> None:
        """Count the time from `now` on as `phase`; None counts it as nothing."""
        if self._phase is not None:
            self.add(self._phase, now - self._since)
        self._phase, self._since = phase, now

    def sent(self, num_bytes: int) -> None:
        """Count bytes that this member sends to others."""
        self.bytes_sent += num_bytes

    def add(self, phase: Measured, seconds: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def refuse(self, peer_id: str, reason: str, weight: Weight) -> None:
        """Record why `peer_id` is refused. The most severe reason is kept for each peer, and the first of equally
        severe ones."""
        known = self._refused.get(peer_id)
        if known is None and len(self._refused) >= limits.MAX_GROUP_MEMBERS:
            return
        if known is None or weight < known[0]:
            self._refused[peer_id] = weight, reason

    def refuse_new(self, accused: Mapping[str, str], before: Mapping[str, str]) -> None:
        """Refuse each peer that is `accused` now and was not `before`."""
        for peer_id, reason in accused.items():
            if before.get(peer_id) != reason:
                self.refuse(peer_id, reason, BROKE_PROTOCOL)

    def report(self, outer_step: int, rates_from: Mapping[str, float]) -> RoundReport:
        slowest = sorted(rates_from.items(), key=lambda each: each[1])[: limits.MAX_REPORTED_RATES]
        worst = sorted(self._refused.items(), key=lambda item: item[1][0])[: limits.MAX_REFUSALS]
        return RoundReport(
            outer_step=outer_step,
            phases_s={phase: min(max(0.0, each), limits.MAX_MEASURED_S) for phase, each in self._seconds.items()},
            bytes_sent=min(self.bytes_sent, limits.MAX_ROUND_BYTES),
            refused=tuple(Refusal(peer_id=peer_id, reason=_line(reason)) for peer_id, (_, reason) in worst),
            rates_from={peer_id: min(rate, limits.MAX_LINK_BYTES_PER_S) for peer_id, rate in slowest},
        )


def _line(reason: str) -> str:
    """Return `reason`, which may contain another peer's text, as a record can hold it."""
    line = "".join(char if char.isprintable() else "?" for char in reason)
    return line[: limits.MAX_REFUSAL_CHARS] or "for no reason that it gave"


def measured(state: RoundState) -> Measured | None:
    """Return what this member spends its time on, or None while its own interval runs."""
    match state.phase:
        case "reducing":
            return "reduce"
        case "preparing" | "committing":
            return "commit"
        case "done":
            return "apply"
        case _:
            return "group" if state.mine is not None else None


def event_of_commit(
    proof: Proof, latest: IntervalResult | None, *, bytes_sent: int, seconds: float, round_s: float
) -> OuterStep | Admitted | RunResumed:
    """Return the event for the step that `proof` has committed. `latest` is the result of this member's last interval;
    `OuterStep` describes the other arguments."""
    origin = proof.origin
    if proof.is_order:
        digest = proof.outcome.state_digest.hex()
        return RunResumed(step=proof.outer_step, digest=digest, roster=proof.roster, sequence=proof.sequence)
    if not origin.num_tokens:
        return Admitted(step=origin.step, group=origin.peer_ids)
    return OuterStep(
        step=origin.step,
        loss=proof.mean_loss,
        digest=proof.outcome.state_digest.hex(),
        group=origin.peer_ids,
        num_trainers=origin.num_trainers,
        num_tokens=origin.num_tokens,
        bytes_sent=bytes_sent,
        seconds=seconds,
        round_s=round_s,
        tokens_per_s=latest.tokens_per_s if latest else 0.0,
    )


def contribution_late(
    context: RunContext, setup: RoundSetup, mine: Contribution | None, proof: Proof, waited_s: float | None
) -> ContributionLate | None:
    """Return the work of `setup.me` for the step as an event, if `proof` shows that the step was committed without it,
    else None.

    `mine` is its contribution, which it offered `waited_s` seconds ago; both are None while its interval still runs.
    """
    origin, late_s = proof.origin, None
    has_work = setup.me in setup.leased and (mine is None or mine.num_tokens > 0)
    is_step = not proof.is_order and origin.step == setup.step and origin.num_tokens > 0
    if not (is_step and has_work) or has_contributed(setup.me, origin, setup.state_digest, setup.leased):
        return None
    if waited_s is not None:
        now = context.network.now()
        late_s = max(0.0, now - waited_s - context.signatures.formed_at(proof, now))
    return ContributionLate(step=setup.step, num_tokens=mine.num_tokens if mine else 0, late_s=late_s)


def lowest_scores(held_out: Sequence[HeldOutScore]) -> dict[str, float]:
    """Return the scores that a record holds: the lowest ones, in nats."""
    lowest = sorted(held_out, key=lambda each: (each.value, each.peer_id))[: limits.MAX_REPORTED_SCORES]
    return {each.peer_id: each.value / MICRO for each in lowest}


class MemberReports:
    """Reports to `on_event` what happens to the member `peer_id`. `grant` is what its credential gives when it enters
    the run."""

    def __init__(self, peer_id: str, on_event: Callable[[TrainingEvent], None]) -> None:
        self.grant: Grant | None = None
        self.on_event = on_event
        self._peer_id = peer_id
        self._steps_left = 0
        self._entry: Entry | None = None
        self._refusal = ""
        self._told_endorsement: Endorsement | None = None
        self._told_abort: tuple[int, str] | None = None
        self._num_apart = 0

    def probation(self, replica: Replica) -> None:
        """Report how many steps of probation this member has left, and how it entered or why its invitation does not
        count, whenever one of these changes."""
        steps_left = replica.standings.steps_left(self._peer_id, self.grant)
        if steps_left != self._steps_left:
            self._steps_left = steps_left
            self.on_event(OnProbation(step=replica.outer_step, steps_left=steps_left))
        entry = next((e for e in replica.standings.register.entries if e.peer_id == self._peer_id), None)
        if entry is not None and entry != self._entry:
            self._entry = entry
            self.on_event(RunEntered(step=entry.step, how=entry.how))
        refusal = replica.standings.why_shut_out(self.grant) if self.grant is not None else ""
        if self.grant is not None and refusal not in ("", self._refusal):
            serial = f"{self.grant.serial:016x}"
            self.on_event(InvitationRefused(step=replica.outer_step, serial=serial, reason=refusal))
        self._refusal = refusal

    def scores(self, replica: Replica) -> None:
        """Report the members' scores on held-out data, once there are any."""
        if scores := scores_of(replica):
            self.on_event(HeldOutScored(step=replica.outer_step, scores=scores, own=scores.get(self._peer_id)))

    def endorsed(self, context: RunContext) -> bool:
        """Report the author's newest endorsement, once. Return whether it was new."""
        endorsement = context.endorsements.newest
        if endorsement is None or endorsement == self._told_endorsement:
            return False
        self._told_endorsement = endorsement
        digest, is_other = endorsement.state_digest.hex(), contradicts(endorsement, context.replica.history)
        event = StateEndorsed(
            step=endorsement.outer_step, digest=digest, sequence=endorsement.sequence, is_other=is_other
        )
        self.on_event(event)
        return True

    def apart(self, context: RunContext) -> None:
        """Report the peers that follow another history of the run: when there are some, and when they are twice as
        many."""
        other = context.other_history(context.replica.history)
        if other is not None and other.is_news(self._num_apart):
            self._num_apart = len(other.peers)
            self.on_event(other)

    def aborted(self, notice: GiveUp) -> None:
        """Report that an attempt was given up. The log has each reason once per step, since a member that is alone
        gives up an attempt every few seconds."""
        if (notice.step, notice.reason) != self._told_abort:
            self._told_abort = notice.step, notice.reason
            logger.warning("attempt %d at outer step %d: %s", notice.attempt, notice.step, notice.reason)
        self.on_event(RoundAborted(**shared_fields(notice, RoundAborted)))

    def convicted(self, ban: Ban) -> None:
        """Report that evidence has convicted a member."""
        self.on_event(MemberConvicted(until=ban.until, **shared_fields(ban.verdict, MemberConvicted)))

    def late(self, event: ContributionLate) -> None:
        """Report that a group was formed before this member's contribution was ready."""
        when = "its interval still ran" if event.late_s is None else f"it was ready {event.late_s:.1f} s later"
        logger.warning("outer step %d was formed without this member's contribution: %s", event.step, when)
        self.on_event(event)


def scores_of(replica: Replica) -> dict[str, float]:
    """Return the trainers' scores in the committed state, in nats, by peer."""
    return {each.peer_id: each.value / MICRO for each in replica.current.manifest.held_out}
