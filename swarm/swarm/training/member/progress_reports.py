"""What a trainer tells of what has happened: events to its owner, and the record that other members see. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_protocol.records import RoundReport, TrainerRecord, TrainerState, ValidationReport
from swarm_protocol.training_messages import Contribution

from swarm.training.inner.inner_loop import IntervalResult
from swarm.training.member.trainer_events import Admitted, OuterStep, RoundAborted, RunResumed, StateFetched
from swarm.training.round.certificate import Proof
from swarm.training.round.coordinator import Terms
from swarm.training.round.round_events import GiveUp
from swarm.training.state.replica import Replica
from swarm.training.state.state_sync import Reached


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What a step took of this member: see `events.OuterStep`."""

    bytes_sent: int
    seconds: float
    round_s: float


def committed(proof: Proof, cost: StepCost, latest: IntervalResult | None) -> OuterStep | Admitted | RunResumed:
    """What `proof` has committed. `latest` is what came of this member's last interval."""
    origin = proof.origin
    if proof.is_order:
        digest = proof.outcome.state_digest.hex()
        return RunResumed(step=proof.outer_step, digest=digest, roster=proof.roster, sequence=proof.sequence)
    if not origin.num_tokens:
        return Admitted(step=origin.step, group=origin.peer_ids)
    return OuterStep(
        step=origin.step,
        loss=sum(member.loss * member.num_tokens for member in origin.members) / origin.num_tokens,
        digest=proof.outcome.state_digest.hex(),
        group=origin.peer_ids,
        num_tokens=origin.num_tokens,
        bytes_sent=cost.bytes_sent,
        seconds=cost.seconds,
        round_s=cost.round_s,
        tokens_per_s=latest.tokens_per_s if latest else 0.0,
    )


def state_fetched(reached: Reached, seconds: float) -> StateFetched:
    fetched = reached.fetched
    assert fetched is not None
    return StateFetched(
        step=reached.proof.outer_step,
        digest=reached.held.digest.hex(),
        donors=fetched.donors,
        num_bytes=fetched.num_bytes,
        seconds=seconds,
    )


def aborted(notice: GiveUp) -> RoundAborted:
    return RoundAborted(step=notice.step, attempt=notice.attempt, reason=notice.reason, missing=notice.missing)


def is_lost(proof: Proof, terms: Terms, mine: Contribution | None) -> bool:
    """Whether the step was committed, as `proof` says, without what `terms.me` has trained for it. `mine` is what that
    came to; None: its interval still runs."""
    origin = proof.origin
    counts = any(member.peer_id == terms.me and member.num_tokens for member in origin.members)
    has_work = terms.me in terms.leased and (mine is None or mine.num_tokens > 0)
    is_step = not proof.is_order and origin.step == terms.step and origin.num_tokens > 0
    return is_step and has_work and not counts


def record(
    run: str,
    replica: Replica | None,
    latest: IntervalResult | None,
    state: TrainerState,
    report: RoundReport | None = None,
    validation: ValidationReport | None = None,
) -> TrainerRecord:
    """`replica` is None while the member prepares. `report` is of the newest round that it was there for, `validation`
    the newest."""
    return TrainerRecord(
        run=run,
        outer_step=replica.outer_step if replica else 0,
        digest=replica.digest if replica else b"",
        tokens_per_s=latest.tokens_per_s if latest else 0.0,
        loss=latest.mean_loss if latest else None,
        state=state,
        report=report,
        num_parameters=replica.current.manifest.num_values if replica else None,
        validation=validation,
    )
