"""One outer step, as one member lives it: a pure machine, `step(state, event, now) -> (state, actions)`.

    forming ── group ──> reducing ── parts ──> voting ── two thirds ──> done
       │                    │                    │
       └─ coordinator gone ─┴── anything fails ──┴──> resting ──> forming, next attempt

The machine runs while the member's interval does, since others may be ready sooner. Every attempt has one coordinator
and one signed group. An attempt that fails changes nothing but the attempt's number: the contribution is kept.

Why no two replicas commit different outcomes of one step: an outcome needs votes of two thirds of its group; a member
votes only when it holds all parts; and a member that voted reports this with its next ready, whose group resumes
that outcome before any new one. A coordinator asks absent members where they are before it goes on without them, so
one that has committed already says so. What voids this: all who voted are cut off from those who go on, and these are
still `min_group`. The two sides then have different states, and the certificates decide who follows (`certificate`).

A group in which nobody has tokens reduces nothing and commits no outer step. It commits the roster: its members hold
the leases that follow. So do a run's first round, and a round in which no holder of a lease is left.

Leaves to others: time, the network, signatures (`driver`), bytes (`butterfly`), whom groups take (`coordinator`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from swarm_protocol.training_messages import Abort, Certificate, Contribution, Outcome, Ready, ReadyReply, Vote

from swarm.training.coordinator import Terms, complaint, coordinator_of, form_group, short
from swarm.training.round_events import (
    Action,
    Announce,
    Ask,
    CastVote,
    Event,
    Finish,
    GiveUp,
    Grouped,
    Left,
    LeftOut,
    Lost,
    Moved,
    Offered,
    Proven,
    Query,
    Recover,
    Reduce,
    Reduced,
    ReduceFailed,
    Reply,
    Reported,
    Sighted,
    Sign,
    Signed,
    Tick,
    Voted,
    Withdrew,
)
from swarm.training.vote import disagreement, tally

Phase: TypeAlias = Literal["forming", "signing", "left_out", "reducing", "voting", "resting", "done"]

FIRST_REST_S = 0.05
MAX_REST_S = 5.0
"""The pause after a failed attempt doubles from the first to the last, so that what fails for good spins slowly."""
LEFT_OUT_REST_S = 1.0
"""Whoever was left out asks again after this, to hear how the round ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """The outcome this member last voted for at this step, and the signed group the outcome is from."""

    attempt: int
    outcome: Outcome
    origin: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundState:
    """`known` are peers seen in the run. `accused` broke the protocol, `unreachable` could not be reached: each with how,
    as this member saw it. `ready` are the reports it holds unanswered. What follows `asked` belongs to the attempt."""

    terms: Terms
    attempt: int
    phase: Phase = "forming"
    mine: Contribution | None = None
    known: tuple[str, ...] = ()
    accused: Mapping[str, str] = field(default_factory=dict)
    unreachable: Mapping[str, str] = field(default_factory=dict)
    ready: Mapping[str, Ready] = field(default_factory=dict)
    ballot: Ballot | None = None
    num_failed: int = 0
    asked: str = ""
    grace_until: float | None = None
    hurry_at: float | None = None
    deadline: float | None = None
    signed: Signed | None = None
    outcome: Outcome | None = None
    recovering: bool = False
    votes: Mapping[str, Voted] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()


Step: TypeAlias = tuple[RoundState, list[Action]]


def begin(terms: Terms, *, accused: Mapping[str, str], known: tuple[str, ...] = ()) -> RoundState:
    """Before the member's interval. `accused`: whom it saw break the protocol at earlier steps."""
    return RoundState(terms=terms, attempt=terms.first_attempt, accused=accused, known=known)


def wake_at(state: RoundState) -> float | None:
    """When a Tick is due, if nothing happens before."""
    times = [state.grace_until, state.hurry_at, state.deadline] if state.phase != "done" else []
    return min((time for time in times if time is not None), default=None)


def coordinator(state: RoundState) -> str:
    """Whom this member takes for the attempt's coordinator.

    One of the roster, which is the same for all; where nobody of it is left, one of those seen lately.
    """
    failed = state.accused.keys() | state.unreachable.keys()
    candidates = set(state.terms.roster) - failed
    if not candidates:
        candidates = (set(state.known) - failed) | {state.terms.me}
    return coordinator_of(state.terms.run, state.terms.step, state.attempt, candidates)


def step(state: RoundState, event: Event, now: float) -> Step:  # noqa: C901, PLR0911, PLR0912 - one case an event
    """What follows from `event`. Never raises: what does not fit the phase is ignored."""
    if state.phase == "done":
        return state, []
    match event:
        case Proven(certificate=certificate):
            return replace(state, phase="done"), [Finish(certificate=certificate)]
        case Offered(contribution=contribution):
            return _advance(replace(state, mine=contribution), now)
        case Sighted(peers=peers):
            return _advance(replace(state, known=peers), now)
        case Reported(peer=peer, ready=ready):
            return _on_reported(state, peer, ready, now)
        case Withdrew(peer=peer):
            return replace(state, ready={by: each for by, each in state.ready.items() if by != peer}), []
        case Lost(peer=peer, reason=reason):
            return _on_lost(state, peer, reason, now)
        case Moved(attempt=attempt, to=to):
            return _move(state, to, now) if attempt == state.attempt < to and _waits(state) else (state, [])
        case LeftOut(attempt=attempt, reason=reason):
            return _on_left_out(state, attempt, reason, now)
        case Grouped(signed=signed):
            return _on_grouped(state, signed, now)
        case Reduced(attempt=attempt, outcome=outcome):
            return _on_reduced(state, outcome, now) if _reduces(state, attempt) else (state, [])
        case ReduceFailed(attempt=attempt, reason=reason):
            if not _reduces(state, attempt):
                return state, []
            return _fail(
                _blame(state, event.accused, event.unreachable, reason),
                reason,
                (*event.accused, *event.unreachable),
                now,
            )
        case Voted():
            return _on_voted(state, event, now)
        case Left(peer=peer, abort=abort):
            return _on_left(state, peer, abort, now)
        case Tick():
            return _on_tick(state, now)


def _waits(state: RoundState) -> bool:
    return state.phase in {"forming", "left_out", "resting"}


def _reduces(state: RoundState, attempt: int) -> bool:
    return state.phase == "reducing" and state.attempt == attempt


def _own_ready(state: RoundState) -> Ready:
    mine = state.mine or Contribution(peer_id=state.terms.me)
    return Ready(
        run=state.terms.run,
        step=state.terms.step,
        attempt=state.attempt,
        state_digest=state.terms.state_digest,
        num_tokens=mine.num_tokens,
        num_samples=mine.num_samples,
        loss=mine.loss,
        accused=tuple(sorted(state.accused.keys() | state.unreachable.keys())),
        voted_attempt=state.ballot.attempt if state.ballot else 0,
        voted=state.ballot.outcome if state.ballot else None,
        voted_origin=state.ballot.origin if state.ballot else b"",
    )


def _advance(state: RoundState, now: float) -> Step:
    """Go on with forming: as the coordinator, or by asking it."""
    if state.phase != "forming":
        return state, []
    leader = coordinator(state)
    if leader == state.terms.me:
        return _lead(replace(state, asked=""), now)
    if state.mine is None or state.asked == leader:
        return state, []
    state = replace(state, asked=leader, grace_until=None, hurry_at=None, deadline=None)
    return state, [Ask(peer=leader, ready=_own_ready(state))]


def _present(state: RoundState) -> dict[str, Ready]:
    return {peer: each for peer, each in state.ready.items() if each.attempt == state.attempt}


def _absent(state: RoundState) -> tuple[str, ...]:
    """Members with a lease who may still come, this member included while its interval lasts."""
    gone = state.accused.keys() | state.unreachable.keys() | _present(state).keys()
    mine = {state.terms.me} if state.mine else set()
    return tuple(sorted(set(state.terms.roster) - gone - mine))


def _lead(state: RoundState, now: float) -> Step:
    """Wait for `min_group`, then for the absent until the grace ends, then have the group signed."""
    terms, present, absent = state.terms, _present(state), _absent(state)
    num_ready = len(present.keys() | {terms.me})
    if state.grace_until is None:
        # a member that only wants to be admitted must not cut the others' intervals short
        worked = any(each.num_tokens for each in present.values()) or bool(state.mine and state.mine.num_tokens)
        if num_ready < terms.min_group or (absent and not worked):
            waits = state.deadline is not None or state.mine is None
            return (state if waits else replace(state, deadline=now + terms.patience_s)), []
        hurry_at = now + terms.grace_s / 2 if absent else None
        state = replace(state, grace_until=now + terms.grace_s, hurry_at=hurry_at, deadline=None)
        queried = tuple(peer for peer in absent if peer != terms.me)
        if queried and terms.grace_s > 0:
            return state, [Query(peers=queried, hurry=False)]
    # a run's first group has no roster that says who is to come, so it always waits
    complete = (not absent and bool(terms.roster)) or num_ready >= terms.max_group
    if not complete and state.grace_until is not None and now < state.grace_until:
        return state, []
    group, left_out = form_group(terms, state.attempt, {**present, terms.me: _own_ready(state)})
    if len(group.members) < terms.min_group:
        reasons = "; ".join(f"{short(peer)}: {reason}" for peer, reason in left_out.items())
        return _give_up(state, f"too few members are fit for a group: {reasons}", tuple(left_out), now)
    state = replace(state, phase="signing", grace_until=None, hurry_at=None, deadline=None)
    return state, [Sign(group=group, left_out=left_out)]


def _on_reported(state: RoundState, peer: str, ready: Ready, now: float) -> Step:
    if ready.attempt < state.attempt:
        return state, [Reply(peer=peer, reply=ReadyReply(kind="attempt", attempt=state.attempt))]
    if ready.state_digest != state.terms.state_digest:
        return state, [_behind(state, peer)]
    if state.signed and ready.attempt == state.attempt and peer in state.signed.group.peer_ids:
        # its answer was lost on the way
        return state, [Reply(peer=peer, reply=ReadyReply(kind="group", group=state.signed.data))]
    heard = {other: reason for other, reason in state.unreachable.items() if other != peer}
    state = replace(state, ready={**state.ready, peer: ready}, unreachable=heard)
    if ready.attempt > state.attempt and _waits(state):
        return _move(state, ready.attempt, now)
    return _advance(state, now)


def _behind(state: RoundState, peer: str) -> Reply:
    return Reply(peer=peer, reply=ReadyReply(kind="behind", state_digest=state.terms.state_digest))


def _on_lost(state: RoundState, peer: str, reason: str, now: float) -> Step:
    state = _blame(state, (), (peer,), reason)
    if state.phase == "forming" and state.asked == peer:
        return _give_up(state, f"the coordinator {short(peer)} is gone: {reason}", (peer,), now)
    if state.phase == "voting":
        return _count(replace(state, silent=state.silent | {peer}), now)
    return _advance(state, now)


def _on_left_out(state: RoundState, attempt: int, reason: str, now: float) -> Step:
    if state.phase != "forming" or state.attempt != attempt:
        return state, []
    state = replace(state, phase="left_out", asked="", deadline=now + LEFT_OUT_REST_S)
    notice = GiveUp(step=state.terms.step, attempt=attempt, reason=f"left out: {reason}", missing=())
    return state, [notice]


def _on_grouped(state: RoundState, signed: Signed, now: float) -> Step:
    if signed.group.attempt != state.attempt:
        return state, []
    if state.signed is not None:
        if signed.signer != state.signed.signer or signed.digest == state.signed.digest:
            return state, []
        reason = f"{short(signed.signer)} signed two groups for one attempt"
        return _abort(_blame(state, (signed.signer,), (), reason), reason, (signed.signer,), now)
    if signed.signer != coordinator(state) or not (_waits(state) or state.phase == "signing"):
        return state, []
    if wrong := complaint(state.terms, state.attempt, state.mine, signed.group):
        reason = f"the group that {short(signed.signer)} signed is not acceptable: {wrong}"
        return _give_up(_blame(state, (signed.signer,), (), reason), reason, (signed.signer,), now)
    group = signed.group
    state = replace(
        state,
        phase="reducing",
        signed=signed,
        asked="",
        grace_until=None,
        hurry_at=None,
        deadline=now + group.reduce_s,
        # these have their answer from now on
        ready={peer: each for peer, each in state.ready.items() if each.attempt > state.attempt},
    )
    if group.resumes is None:
        return state, [Reduce(signed=signed)]
    return replace(state, recovering=True), [_recover(state, signed, group.resumes)]


def _recover(state: RoundState, signed: Signed, outcome: Outcome) -> Recover:
    voters = [peer for peer, each in state.votes.items() if each.vote.outcome == outcome]
    others = [peer for peer in signed.group.peer_ids if peer not in voters and peer != state.terms.me]
    return Recover(signed=signed, outcome=outcome, holders=(*voters, *others))


def _on_reduced(state: RoundState, outcome: Outcome, now: float) -> Step:
    assert state.signed is not None
    group = state.signed.group
    if group.resumes is not None and outcome != group.resumes:
        return _abort(state, "the resumed outcome gives another state here", (), now)
    vote = Vote(
        run=group.run,
        step=group.step,
        attempt=group.attempt,
        group_digest=state.signed.digest,
        outcome=outcome,
    )
    ballot = Ballot(attempt=group.attempt, outcome=outcome, origin=group.origin or state.signed.data)
    state = replace(state, phase="voting", outcome=outcome, ballot=ballot, deadline=now + group.vote_s)
    return state, [CastVote(vote=vote, peers=_others(state))]


def _on_voted(state: RoundState, event: Voted, now: float) -> Step:
    if event.vote.attempt != state.attempt:
        return state, []
    known = state.votes.get(event.peer)
    if known is not None and known.vote != event.vote:
        # the first one counts
        return replace(state, accused={**state.accused, event.peer: "voted twice"}), []
    return _count(replace(state, votes={**state.votes, event.peer: event}), now)


def _valid_votes(state: RoundState) -> dict[str, Voted]:
    """Those of the group's members for this very group; votes may come before the group does."""
    signed = state.signed
    if signed is None:
        return {}
    peers = signed.group.peer_ids
    return {
        peer: each for peer, each in state.votes.items() if peer in peers and each.vote.group_digest == signed.digest
    }


def _count(state: RoundState, now: float) -> Step:
    """Votes decide only once this member has voted too: until then others may still need its part."""
    if state.signed is None or state.phase != "voting":
        return state, []
    votes = _valid_votes(state)
    result = tally(state.signed.group.peer_ids, {peer: each.vote for peer, each in votes.items()}, state.silent)
    if result.decided is not None:
        agreeing = tuple(votes[peer].data for peer in sorted(votes) if votes[peer].vote.outcome == result.decided)
        certificate = Certificate(group=state.signed.data, votes=agreeing).to_bytes()
        return replace(state, phase="done"), [Finish(certificate=certificate)]
    if result.hopeless:
        return _no_quorum(state, result.reason, now)
    return state, []


def _no_quorum(state: RoundState, reason: str, now: float) -> Step:
    assert state.signed is not None
    assert state.outcome is not None
    votes = {peer: each.vote for peer, each in _valid_votes(state).items()}
    blamed = disagreement(state.outcome, votes, state.signed.group.peer_ids)
    absent = tuple(sorted(set(state.signed.group.peer_ids) - votes.keys()))
    names = f"; no vote from {', '.join(map(short, absent))}" if absent else ""
    state = _blame(state, blamed, (), "its part or vote differs")
    return _abort(state, reason + names, (*absent, *blamed), now)


def _on_left(state: RoundState, peer: str, abort: Abort, now: float) -> Step:
    if state.signed is None or abort.group_digest != state.signed.digest or peer not in state.signed.group.peer_ids:
        return state, []
    state = replace(state, silent=state.silent | {peer})
    if state.phase == "voting":
        return _count(state, now)
    return _fail(state, f"{short(peer)} left: {abort.reason}", (), now)


def _on_tick(state: RoundState, now: float) -> Step:
    if state.hurry_at is not None and now >= state.hurry_at:
        absent = _absent(state)
        return replace(state, hurry_at=None), [Query(peers=absent, hurry=True)] if absent else []
    if state.grace_until is not None and now >= state.grace_until:
        return _lead(state, now)
    if state.deadline is None or now < state.deadline:
        return state, []
    match state.phase:
        case "resting" | "left_out":
            return _advance(replace(state, phase="forming", deadline=None), now)
        case "reducing":
            return _fail(state, "the reduction took too long", (), now)
        case "voting":
            return _no_quorum(state, "the vote took too long", now)
        case _:
            return _too_few(state, now)


def _too_few(state: RoundState, now: float) -> Step:
    absent = tuple(sorted(set(state.terms.roster) - _present(state).keys() - {state.terms.me}))
    names = f"; missing: {', '.join(map(short, absent))}" if absent else ""
    reason = f"{len(_present(state)) + 1} of at least {state.terms.min_group} members are ready{names}"
    return _give_up(state, reason, absent, now)


def _fail(state: RoundState, reason: str, missing: tuple[str, ...], now: float) -> Step:
    """This member cannot reduce. If another one could, its outcome can be had; else the attempt is over."""
    assert state.signed is not None
    votes = _valid_votes(state)
    if votes and not state.recovering:
        outcome = next(iter(votes.values())).vote.outcome
        return replace(state, recovering=True), [_recover(state, state.signed, outcome)]
    return _abort(state, reason, missing, now)


def _blame(state: RoundState, accused: tuple[str, ...], unreachable: tuple[str, ...], reason: str) -> RoundState:
    others = {state.terms.me}
    return replace(
        state,
        accused={**state.accused, **{peer: reason for peer in accused if peer != state.terms.me}},
        unreachable={**state.unreachable, **{peer: reason for peer in unreachable if peer != state.terms.me}},
    )


def _others(state: RoundState) -> tuple[str, ...]:
    assert state.signed is not None
    return tuple(peer for peer in state.signed.group.peer_ids if peer != state.terms.me)


def _abort(state: RoundState, reason: str, missing: tuple[str, ...], now: float) -> Step:
    """Leave a signed group, and say so."""
    assert state.signed is not None
    abort = Abort(
        run=state.terms.run,
        step=state.terms.step,
        attempt=state.attempt,
        group_digest=state.signed.digest,
        reason=reason[:400],
        accused=tuple(sorted(set(missing))),
    )
    announce = Announce(abort=abort, peers=_others(state))
    state, actions = _give_up(state, reason, missing, now)
    return state, [announce, *actions]


def _give_up(state: RoundState, reason: str, missing: tuple[str, ...], now: float) -> Step:
    """This attempt is over; the next one begins after a pause."""
    missing = tuple(sorted(set(missing)))
    notice = GiveUp(step=state.terms.step, attempt=state.attempt, reason=reason, missing=missing)
    rest_s = min(FIRST_REST_S * 2**state.num_failed, MAX_REST_S)
    state, replies = _renew(replace(state, num_failed=state.num_failed + 1), state.attempt + 1)
    return replace(state, phase="resting", deadline=now + rest_s), [notice, *replies]


def _move(state: RoundState, attempt: int, now: float) -> Step:
    state, replies = _renew(state, attempt)
    state, actions = _advance(state, now)
    return state, [*replies, *actions]


def _renew(state: RoundState, attempt: int) -> Step:
    """The beginning of `attempt`. Whoever still waits for an earlier one is told."""
    replies: list[Action] = [
        Reply(peer=peer, reply=ReadyReply(kind="attempt", attempt=attempt))
        for peer, each in state.ready.items()
        if each.attempt < attempt
    ]
    state = RoundState(
        terms=state.terms,
        attempt=attempt,
        mine=state.mine,
        known=state.known,
        accused=state.accused,
        unreachable=state.unreachable,
        ready={peer: each for peer, each in state.ready.items() if each.attempt >= attempt},
        ballot=state.ballot,
        num_failed=state.num_failed,
    )
    return state, replies
