"""How an attempt gets its group: its coordinator forms it, and every other member asks the coordinator.

Pure functions on the round's state. `state_machine` decides what follows once there is a signed group.
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
    Timers,
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
"""The time between two calls for members that a group needs."""
LEFT_OUT_REST_S = 1.0
"""After this, a member that was left out asks again how the round ended."""


def advance(state: RoundState, now: float) -> Step:
    """Go on with forming: as the coordinator, or by asking it."""
    if state.phase != "forming" or state.abstains:
        return state, []
    if state.leader == state.terms.me:
        return _lead(replace(state, asked=""), now)
    if state.mine is None or state.asked == state.leader:
        return state, []
    state = replace(state, asked=state.leader, timers=Timers())
    return state, [Ask(peer=state.leader, ready=own_ready(state))]


def move(state: RoundState, attempt: int, now: float) -> Step:
    """Go on at a later `attempt`, which another member has named.

    Each move delays the next one for longer: a member that names one attempt after the other then cannot end every
    attempt that gets under way.
    """
    if attempt > MAX_BELIEVED_ATTEMPT:
        return state, []
    if now < state.attempts.movable_at:
        return replace(state, attempts=replace(state.attempts, later=max(state.attempts.later, attempt))), []
    if state.phase == "forming":
        state = short_from(state, now)  # for others the attempt ended without a group
    num_moved = state.attempts.num_moved
    attempts = replace(state.attempts, num_moved=num_moved + 1, movable_at=now + rest_after(num_moved))
    state, replies = renew(replace(state, attempts=attempts), attempt)
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
    faults = state.faults
    if ready.attempt > faults.suspects.get(peer, -1):
        unreachable = {other: reason for other, reason in faults.unreachable.items() if other != peer}
        faults = replace(faults, unreachable=unreachable)
    state = replace(state, ready={**state.ready, peer: ready}, faults=faults)
    # a stranger could otherwise interrupt one attempt after the other
    is_heeded = peer in state.terms.roster or not roster_left(state)
    if ready.attempt > state.attempt and waits(state) and is_heeded:
        return move(state, ready.attempt, now)
    return advance(state, now)


def on_left_out(state: RoundState, attempt: int, reason: str, now: float) -> Step:
    if state.phase != "forming" or state.attempt != attempt:
        return state, []
    timers = replace(state.timers, deadline=now + LEFT_OUT_REST_S)
    notice = GiveUp(step=state.terms.step, attempt=attempt, reason=f"left out: {reason}", missing=())
    return replace(state, phase="left_out", asked="", timers=timers), [notice]


def too_few(state: RoundState, now: float) -> Step:
    """Give up, because too few members are ready."""
    terms, here = state.terms, present_members(state).keys() | {state.terms.me}
    absent = set(terms.roster) - here
    busy, missing = sorted(absent & state.heard), tuple(sorted(absent - state.heard))
    names = f"; missing: {', '.join(map(short, missing))}" if missing else ""
    names += f"; there, and not ready: {', '.join(map(short, busy))}" if busy else ""
    reason = f"{len(here)} of at least {terms.min_group} members are ready{names}"
    if not terms.succession.is_usual(terms.roster, here):
        needed, num_here = terms.succession.num_usual(terms.roster), len(here & set(terms.roster))
        reason = f"of {len(terms.roster)} members of the state {needed} must be ready, and it is {num_here}{names}"
    return give_up(short_from(state, now), reason, missing, now)


def _lead(state: RoundState, now: float) -> Step:
    """Wait for `min_group`, then for absent members until the grace ends, then have the group signed."""
    if state.timers.grace_until is None:
        state, queries = _begin_to_wait(state, now)
        if queries or state.timers.grace_until is None:
            return state, queries
    grace_until = state.timers.grace_until
    if grace_until is not None and now < grace_until and not (state.mine and _is_complete(state)):
        return state, []
    if not _has_electors(state, _ready_members(state), now):
        return _wait_for_electors(state, now)
    return _form(state, now)


def _form(state: RoundState, now: float) -> Step:
    """Have the group of those who are ready signed, or give up if too few of them are fit for it."""
    present = present_members(state)
    group, left_out = form_group(state.terms, state.attempt, {**present, state.terms.me: own_ready(state)})
    if len(group.members) < state.terms.min_group or not _has_electors(state, group.peer_ids, now):
        reasons = "; ".join(f"{short(peer)}: {reason}" for peer, reason in left_out.items())
        return give_up(state, f"too few members are fit for a group: {reasons}", (), now)
    claimants = tuple(peer for peer, each in present.items() if each.voted and each.voted == group.resumes)
    return replace(state, phase="signing", claimants=claimants, timers=Timers()), [Sign(group=group, left_out=left_out)]


def _is_complete(state: RoundState) -> bool:
    """Return whether nobody is waited for any more. A run's first group has no roster that says who is to come, so it
    always waits, unless it is full."""
    is_full = len(_ready_members(state)) >= state.terms.max_group
    return is_full or (bool(state.terms.roster) and not absent_members(state))


def _begin_to_wait(state: RoundState, now: float) -> Step:
    """Wait for the grace if enough members are ready, else for enough of them. Absent members are asked whether they
    are there, in the second case only after a while."""
    terms, present, absent = state.terms, present_members(state), absent_members(state)
    # a member that only wants to be admitted must not cut the others' intervals short
    worked = any(each.num_tokens for each in present.values()) or bool(state.mine and state.mine.num_tokens)
    if len(_ready_members(state)) < terms.min_group or (absent and not worked):
        if state.timers.deadline is not None or state.mine is None:
            return state, []
        return replace(state, timers=Timers(deadline=now + terms.patience_s, hurry_at=now + terms.patience_s / 2)), []
    # a member's first interval takes at least as long as those that have ended
    grace_s = grace_after(state.interval_s or now - state.began_at, terms.grace_s)
    timers = Timers(grace_until=now + grace_s, hurry_at=now + grace_s / 2 if absent else None)
    others = tuple(peer for peer in absent if peer != terms.me)
    queries = [Query(peers=others, hurry=False)] if others and grace_s > 0 else []
    return replace(state, timers=timers), [*queries]


def _has_electors(state: RoundState, peers: Collection[str], now: float) -> bool:
    """Return whether enough members of the state before are among `peers` for a group that is formed now."""
    succession, roster = state.terms.succession, state.terms.roster
    return succession.is_usual(roster, peers) or (is_overdue(state, now) and succession.is_enough(roster, peers))


def _wait_for_electors(state: RoundState, now: float) -> Step:
    """Wait on, because the grace is over and too few members of the state before are here for a group."""
    terms, absent = state.terms, absent_members(state)
    timers = Timers(
        grace_until=now + max(terms.grace_s, MIN_GRACE_S), deadline=state.timers.deadline or now + terms.patience_s
    )
    queries = [Query(peers=absent, hurry=True)] if absent else []
    return replace(short_from(state, now), timers=timers), [*queries]


def present_members(state: RoundState) -> dict[str, Ready]:
    return {peer: each for peer, each in state.ready.items() if each.attempt == state.attempt}


def _ready_members(state: RoundState) -> set[str]:
    """Return the members that have reported to this attempt, and this one."""
    return present_members(state).keys() | {state.terms.me}


def absent_members(state: RoundState) -> tuple[str, ...]:
    """Return the members with a lease that may still come, this member included while its interval lasts."""
    present = present_members(state)
    mine = {state.terms.me} if state.mine else set()
    # if more than a third say that a member is gone, not all of them lie
    reports = Counter(peer for each in present.values() for peer in each.accused)
    gone = {peer for peer, count in reports.items() if 3 * count > len(present.keys() | mine)}
    return tuple(sorted(roster_left(state) - present.keys() - mine - gone))


def _refusal(state: RoundState, peer: str, ready: Ready) -> ReadyReply | None:
    """Return why `peer` cannot be in this attempt's group, or None if it can."""
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
            return tuple(peer for peer in group.group.peer_ids if peer not in state.voting.votes and peer != terms.me)
        case "forming" | "left_out" | "resting" if state.leader == terms.me:
            return tuple(sorted(set(terms.roster) - _ready_members(state)))
        case "forming" | "left_out" | "resting":
            return (state.leader,)
        case _:
            return ()
