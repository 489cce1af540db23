"""How an attempt comes to its group: by leading it, if this member is the attempt's coordinator, or by asking who is.

Pure functions on the round's state. What follows once there is a signed group is `round`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from swarm_protocol.training_messages import Ready, ReadyReply

from swarm.training.round.coordinator import NOT_ADMITTED, form_group, grace_after, short
from swarm.training.round.round_events import Ask, GiveUp, Query, Reply, Sign
from swarm.training.round.round_state import (
    MAX_BELIEVED_ATTEMPT,
    MAX_HEARD,
    RoundState,
    Step,
    give_up,
    is_overdue,
    own_ready,
    renew,
    rest_after,
    roster_left,
    short_from,
    waits,
)

MIN_GRACE_S = 1.0
"""Between two calls for members without whom there is no group."""
LEFT_OUT_REST_S = 1.0
"""Whoever was left out asks again after this, to hear how the round ended."""


def advance(state: RoundState, now: float) -> Step:
    """Go on with forming: as the coordinator, or by asking it."""
    if state.phase != "forming" or state.abstains:
        return state, []
    if state.leader == state.terms.me:
        return _lead(replace(state, asked=""), now)
    if state.mine is None or state.asked == state.leader:
        return state, []
    state = replace(state, asked=state.leader, grace_until=None, hurry_at=None, deadline=None)
    return state, [Ask(peer=state.leader, ready=own_ready(state))]


def move(state: RoundState, attempt: int, now: float) -> Step:
    """Go on at a later `attempt`, which another member has named. The more often, the longer until the next time: one
    that names another attempt again and again ends none that gets under way meanwhile."""
    if attempt > MAX_BELIEVED_ATTEMPT:
        return state, []
    if now < state.movable_at:
        return replace(state, later=max(state.later, attempt)), []
    if state.phase == "forming":
        state = short_from(state, now)  # for others the attempt ended without a group
    moved = replace(state, num_moved=state.num_moved + 1, movable_at=now + rest_after(state.num_moved))
    state, replies = renew(moved, attempt)
    state, actions = advance(state, now)
    return state, [*replies, *actions]


def on_reported(state: RoundState, peer: str, ready: Ready, now: float) -> Step:
    if refusal := _refusal(state, peer, ready):
        return state, [Reply(peer=peer, reply=refusal)]
    if state.signed and ready.attempt == state.attempt and peer in state.signed.group.peer_ids:
        # its answer was lost on the way
        return state, [Reply(peer=peer, reply=ReadyReply(kind="group", group=state.signed.data))]
    if peer not in state.ready and len(state.ready) >= MAX_HEARD and peer not in state.terms.roster:
        return state, [Reply(peer=peer, reply=ReadyReply(kind="left_out", reason="too many others are ready"))]
    is_forgiven = ready.attempt > state.suspects.get(peer, -1)
    heard = {other: reason for other, reason in state.unreachable.items() if other != peer or not is_forgiven}
    state = replace(state, ready={**state.ready, peer: ready}, unreachable=heard)
    # a stranger could otherwise interrupt one attempt after the other
    is_heeded = peer in state.terms.roster or not roster_left(state)
    if ready.attempt > state.attempt and waits(state) and is_heeded:
        return move(state, ready.attempt, now)
    return advance(state, now)


def on_left_out(state: RoundState, attempt: int, reason: str, now: float) -> Step:
    if state.phase != "forming" or state.attempt != attempt:
        return state, []
    state = replace(state, phase="left_out", asked="", deadline=now + LEFT_OUT_REST_S)
    notice = GiveUp(step=state.terms.step, attempt=attempt, reason=f"left out: {reason}", missing=())
    return state, [notice]


def too_few(state: RoundState, now: float) -> Step:
    absent = set(state.terms.roster) - present_members(state).keys() - {state.terms.me}
    busy, missing = sorted(absent & state.heard), tuple(sorted(absent - state.heard))
    names = f"; missing: {', '.join(map(short, missing))}" if missing else ""
    names += f"; there, and not ready: {', '.join(map(short, busy))}" if busy else ""
    terms, here = state.terms, present_members(state).keys() | {state.terms.me}
    reason = f"{len(here)} of at least {terms.min_group} members are ready{names}"
    if not terms.succession.is_usual(terms.roster, here):
        needed, num_here = terms.succession.num_usual(terms.roster), len(here & set(terms.roster))
        reason = f"of {len(terms.roster)} members of the state {needed} must be ready, and it is {num_here}{names}"
    return give_up(short_from(state, now), reason, missing, now)


def _lead(state: RoundState, now: float) -> Step:
    """Wait for `min_group`, then for the absent until the grace ends, then have the group signed."""
    terms, present, absent = state.terms, present_members(state), absent_members(state)
    num_ready = len(present.keys() | {terms.me})
    if state.grace_until is None:
        state, queries = _begin_to_wait(state, num_ready, now)
        if queries or state.grace_until is None:
            return state, queries
    # a run's first group has no roster that says who is to come, so it always waits
    is_complete = (not absent and bool(terms.roster)) or num_ready >= terms.max_group
    if not (is_complete and state.mine) and state.grace_until is not None and now < state.grace_until:
        return state, []
    if not _has_electors(state, present.keys() | {terms.me}, now):
        return _wait_for_electors(state, absent, now)
    reports = {**present, terms.me: own_ready(state)}
    group, left_out = form_group(terms, state.attempt, reports)
    if len(group.members) < terms.min_group or not _has_electors(state, group.peer_ids, now):
        reasons = "; ".join(f"{short(peer)}: {reason}" for peer, reason in left_out.items())
        return give_up(state, f"too few members are fit for a group: {reasons}", (), now)
    claimants = tuple(peer for peer, each in present.items() if each.voted and each.voted == group.resumes)
    state = replace(state, phase="signing", claimants=claimants, grace_until=None, hurry_at=None, deadline=None)
    return state, [Sign(group=group, left_out=left_out)]


def _begin_to_wait(state: RoundState, num_ready: int, now: float) -> Step:
    """For the grace, if enough members are ready, else for enough of them. Those who are absent are asked whether they
    are there, in the second case only after a while."""
    terms, present, absent = state.terms, present_members(state), absent_members(state)
    # a member that only wants to be admitted must not cut the others' intervals short
    worked = any(each.num_tokens for each in present.values()) or bool(state.mine and state.mine.num_tokens)
    if num_ready < terms.min_group or (absent and not worked):
        if state.deadline is not None or state.mine is None:
            return state, []
        return replace(state, deadline=now + terms.patience_s, hurry_at=now + terms.patience_s / 2), []
    # a member's first interval takes at least as long as those that have ended
    grace_s = grace_after(state.interval_s or now - state.began_at, terms.grace_s)
    hurry_at = now + grace_s / 2 if absent else None
    state = replace(state, grace_until=now + grace_s, hurry_at=hurry_at, deadline=None)
    others = tuple(peer for peer in absent if peer != terms.me)
    return state, [Query(peers=others, hurry=False)] if others and grace_s > 0 else []


def _has_electors(state: RoundState, peers: Collection[str], now: float) -> bool:
    """Whether enough members of the state before are among `peers` for a group that is formed now."""
    succession, roster = state.terms.succession, state.terms.roster
    return succession.is_usual(roster, peers) or (is_overdue(state, now) and succession.is_enough(roster, peers))


def _wait_for_electors(state: RoundState, absent: tuple[str, ...], now: float) -> Step:
    """The grace is over, and too few members of the state before are here for what follows from it."""
    terms = state.terms
    state = replace(
        short_from(state, now),
        grace_until=now + max(terms.grace_s, MIN_GRACE_S),
        hurry_at=None,
        deadline=state.deadline or now + terms.patience_s,
    )
    return state, [Query(peers=absent, hurry=True)] if absent else []


def present_members(state: RoundState) -> dict[str, Ready]:
    return {peer: each for peer, each in state.ready.items() if each.attempt == state.attempt}


def absent_members(state: RoundState) -> tuple[str, ...]:
    """Members with a lease who may still come, this member included while its interval lasts."""
    present = present_members(state)
    mine = {state.terms.me} if state.mine else set()
    # not all of more than a third lie when they say that a member is gone
    reports = Counter(peer for each in present.values() for peer in each.accused)
    gone = {peer for peer, count in reports.items() if 3 * count > len(present.keys() | mine)}
    return tuple(sorted(roster_left(state) - present.keys() - mine - gone))


def _refusal(state: RoundState, peer: str, ready: Ready) -> ReadyReply | None:
    """Why `peer` cannot be in this attempt's group, if it cannot."""
    if not state.terms.admits(peer):
        return ReadyReply(kind="left_out", reason=NOT_ADMITTED)
    is_behind = (ready.sequence, ready.state_digest) != (state.terms.sequence, state.terms.state_digest)
    if ready.attempt < state.attempt and not is_behind:
        return ReadyReply(kind="attempt", attempt=state.attempt)
    if is_behind:
        return ReadyReply(kind="behind", state_digest=state.terms.state_digest)
    return None


def awaited_peers(state: RoundState) -> tuple[str, ...]:
    """Return the peers without which the round does not go on: the coordinator, at the coordinator the absent members,
    and in the vote those that have not voted."""
    terms, group = state.terms, state.signed
    match state.phase:
        case "voting" if group is not None:
            return tuple(peer for peer in group.group.peer_ids if peer not in state.votes and peer != terms.me)
        case "forming" | "left_out" | "resting" if state.leader == terms.me:
            return tuple(sorted(set(terms.roster) - present_members(state).keys() - {terms.me}))
        case "forming" | "left_out" | "resting":
            return (state.leader,)
        case _:
            return ()
