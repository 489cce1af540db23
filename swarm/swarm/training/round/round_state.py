"""What a member knows of a round, and the few ways in which all of `forming` and `round` change it.

Values and pure functions. See `round` for what the phases mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from swarm_protocol import limits
from swarm_protocol.training_messages import Contribution, Outcome, Ready, ReadyReply

from swarm.training.round.coordinator import Terms, coordinator_of, reported
from swarm.training.round.round_events import Action, GiveUp, Reply, SignedGroup, Voted

Phase: TypeAlias = Literal["forming", "signing", "left_out", "reducing", "voting", "resting", "done"]

FIRST_REST_S = 0.05
MAX_REST_S = 5.0
"""The pause after a failed attempt doubles from the first to the last, so that what fails for good spins slowly."""

MAX_BELIEVED_ATTEMPT = limits.MAX_ATTEMPT // 2
"""The furthest that others can bring an attempt's number: the other half is for the attempts that follow."""

MAX_HEARD = 1024
"""Peers whose reports or votes are kept: four full groups, so that strangers cannot fill the memory. The members of the
state, and of a group, are heard beyond it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """The outcome this member last voted for at this step, and the signed group the outcome is from."""

    attempt: int
    outcome: Outcome
    origin: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundState:
    """`known` are peers seen in the run. `accused` broke the protocol, `unreachable` could not be reached: each with
    how, as this member saw it. `suspects` spoiled an attempt, and are left out until the one that is named: that they
    are heard of proves nothing. `disputes` counts the attempts of this step that ended as somebody left, on either
    side. A member that `abstains` takes part in no group (see `promise`). Since `short_since`, too few members of the
    state have been there for a group. Others have moved this member to later attempts `num_moved` times, and may again
    from `movable_at` on, to `later`. The step began at `began_at`, and the member's newest interval took `interval_s`;
    0: not known. `ready` are the reports it holds, `heard` the peers that have answered or called in this attempt. What
    follows `leader` belongs to the attempt.
    `claimants` are, at the coordinator, those who said to have voted for the outcome that the group resumes."""

    terms: Terms
    attempt: int
    phase: Phase = "forming"
    mine: Contribution | None = None
    known: tuple[str, ...] = ()
    accused: Mapping[str, str] = field(default_factory=dict)
    unreachable: Mapping[str, str] = field(default_factory=dict)
    suspects: Mapping[str, int] = field(default_factory=dict)
    ready: Mapping[str, Ready] = field(default_factory=dict)
    ballot: Ballot | None = None
    num_failed: int = 0
    abstains: bool = False
    short_since: float | None = None
    disputes: Mapping[str, int] = field(default_factory=dict)
    num_moved: int = 0
    movable_at: float = 0.0
    later: int = 0
    interval_s: float = 0.0
    began_at: float = 0.0
    heard: frozenset[str] = frozenset()
    leader: str = ""
    asked: str = ""
    grace_until: float | None = None
    hurry_at: float | None = None
    deadline: float | None = None
    claimants: tuple[str, ...] = ()
    signed: SignedGroup | None = None
    outcome: Outcome | None = None
    recovering: bool = False
    votes: Mapping[str, Voted] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()


Step: TypeAlias = tuple[RoundState, list[Action]]


def led(state: RoundState) -> RoundState:
    """`state` with the attempt's coordinator in this member's eyes.

    One of the roster, which is the same for all, so that all agree; where nobody of it is left, as at a run's
    beginning, one of those seen lately.
    """
    candidates = roster_left(state) or (set(state.known) - failed(state)) | {state.terms.me}
    leader = coordinator_of(state.terms.run, state.terms.step, state.attempt, candidates)
    return replace(state, leader=leader)


def failed(state: RoundState) -> set[str]:
    return state.accused.keys() | state.unreachable.keys()


def roster_left(state: RoundState) -> set[str]:
    return set(state.terms.roster) - failed(state)


def waits(state: RoundState) -> bool:
    return state.phase in {"forming", "left_out", "resting"}


def moves_at(state: RoundState) -> float | None:
    """When to go on at the later attempt that others have named, if they have."""
    return state.movable_at if waits(state) and state.later > state.attempt else None


def own_ready(state: RoundState) -> Ready:
    mine = reported(state.terms, state.mine)
    # a report names only so many, and those of earlier rosters matter least
    accused = sorted(failed(state), key=lambda peer: (peer not in state.terms.roster, peer))
    return Ready(
        run=state.terms.run,
        step=state.terms.step,
        attempt=state.attempt,
        state_digest=state.terms.state_digest,
        num_tokens=mine.num_tokens,
        num_samples=mine.num_samples,
        loss=mine.loss,
        accused=tuple(sorted(accused[: limits.MAX_GROUP_MEMBERS])),
        voted_attempt=state.ballot.attempt if state.ballot else 0,
        voted=state.ballot.outcome if state.ballot else None,
        voted_origin=state.ballot.origin if state.ballot else b"",
        leaving=mine.leaving,
        bytes_per_s=mine.bytes_per_s,
        sequence=state.terms.sequence,
    )


def blame(state: RoundState, accused: tuple[str, ...], unreachable: tuple[str, ...], reason: str) -> RoundState:
    return replace(
        state,
        accused={**state.accused, **{peer: reason for peer in accused if peer != state.terms.me}},
        unreachable={**state.unreachable, **{peer: reason for peer in unreachable if peer != state.terms.me}},
    )


def suspect(state: RoundState, peers: tuple[str, ...]) -> RoundState:
    """Leave `peers` out of the next attempt, whatever they say meanwhile: they have spoiled this one."""
    until = {peer: state.attempt + 1 for peer in peers if peer != state.terms.me}
    return replace(state, suspects={**state.suspects, **until})


def rest_after(num_times: int) -> float:
    """Seconds to pause after what has happened `num_times` before."""
    # no power of what others can count up without end
    return min(FIRST_REST_S * 2.0 ** min(num_times, 16), MAX_REST_S)


def is_overdue(state: RoundState, now: float) -> bool:
    """Whether a majority of the state's members is enough for a group by now."""
    after_s, since = state.terms.majority_after_s, state.short_since
    return after_s > 0 and since is not None and now >= since + after_s


def short_from(state: RoundState, now: float) -> RoundState:
    """`state` with the time noted at which too few members were there, unless it was so before."""
    return state if state.short_since is not None else replace(state, short_since=now)


def give_up(state: RoundState, reason: str, missing: tuple[str, ...], now: float) -> Step:
    """This attempt is over; the next one begins after a pause."""
    missing = tuple(sorted(set(missing)))
    notice = GiveUp(step=state.terms.step, attempt=state.attempt, reason=reason, missing=missing)
    rest_s = rest_after(state.num_failed)
    state, replies = renew(replace(state, num_failed=state.num_failed + 1), state.attempt + 1)
    return replace(state, phase="resting", deadline=now + rest_s), [notice, *replies]


def renew(state: RoundState, attempt: int) -> Step:
    """The beginning of `attempt`. Whoever still waits for an earlier one is told."""
    replies: list[Action] = [
        Reply(peer=peer, reply=ReadyReply(kind="attempt", attempt=attempt))
        for peer, each in state.ready.items()
        if each.attempt < attempt
    ]
    terms = state.terms
    state = RoundState(
        terms=terms,
        attempt=attempt,
        mine=state.mine,
        known=state.known,
        accused=state.accused,
        suspects={peer: until for peer, until in state.suspects.items() if attempt <= until},
        # if too few are left for any group, the others may be back: without them the run waits anyway
        unreachable=state.unreachable if terms.succession.is_enough(terms.roster, roster_left(state)) else {},
        ready={peer: each for peer, each in state.ready.items() if each.attempt >= attempt},
        ballot=state.ballot,
        num_failed=state.num_failed,
        abstains=state.abstains,
        short_since=state.short_since,
        disputes=state.disputes,
        num_moved=state.num_moved,
        movable_at=state.movable_at,
        later=state.later,
        interval_s=state.interval_s,
        began_at=state.began_at,
    )
    return led(state), replies
