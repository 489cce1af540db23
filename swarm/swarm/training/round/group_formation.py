"""Decides when a coordinator forms the group of its attempt, and which members it waits for.

The coordinator waits for reports and forms the group; every other member reports to it, and checks the signed group
(`group_members`). A trainer that follows a head reports to its head. All functions here are pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from swarm_protocol.identity import short_id
from swarm_protocol.run_credentials import any_expires_by
from swarm_protocol.training_messages import Ready, ReadyReply

from swarm.training.round.disputes import accused_members, with_yield
from swarm.training.round.group_members import (
    NO_SEAT,
    NOT_ADMITTED,
    contribution_to_report,
    form_group,
    lack_of_seats,
    own_report,
)
from swarm.training.round.quorum import presence
from swarm.training.round.round_events import Action, Ask, GiveUp, Query, Reply, Sign, left_out_reply
from swarm.training.round.round_state import (
    MAX_BELIEVED_ATTEMPT,
    MAX_HEARD,
    RoundState,
    Timers,
    Transition,
    begin_attempt,
    give_up,
    is_doubted,
    is_overdue,
    is_waiting,
    note_shortage,
    reached_again,
    rest_after,
    roster_left,
    without_doubt,
)
from swarm.training.standing.standings import grants_in

GRACE_SHARE = 0.25
MAX_GRACE_S = 30.0
"""The grace is this share of an interval, at most MAX_GRACE_S. Slower members would otherwise lose the work of a whole
interval. It is not longer, because the coordinator also waits that long for members that are gone without a word."""
MIN_WORK_DUE_S = 600.0
"""Members that bring no work wait at least this long for that of others. Slower machines, of whose intervals their own
say little, would otherwise be left out of each round."""

MAX_LONE_MOVES = 3
"""Maximum moves in one step to an attempt that too few members have reached for one of them to be honest. They only
save time."""

FOLLOWS = "another member brings its work"
CONVICTED = "evidence convicts it of a lie"

EXPIRED = "its invitation or a vouch for it expired before the group was signed: it has to report anew"
OWN_EXPIRED = "this member's invitation or a vouch for it expires before a group can be signed: it reports without it"
UNINVITED = (
    "the run wants an invitation, or vouchers, that this member does not have, or that do not hold any more: ask the "
    "run's author for an invitation, and join with it"
)

MIN_WAIT_S = 1.0
"""The minimum further wait for members that a group needs. They are asked for once in each such wait."""
LEFT_OUT_REST_S = 1.0
"""The wait of a member that was left out before it asks again how the round ended."""


def advance(state: RoundState, now: float) -> Transition:
    """Continue forming the group: as the coordinator, or by reporting to it."""
    if state.phase != "forming" or state.abstains or state.setup.follows:
        return state, []
    if state.coordinator == state.setup.me:
        return _coordinate(replace(state, asked="", timers=replace(state.timers, waits_until=None)), now)
    if state.mine is None or state.asked == state.coordinator:
        return state, []
    may_move = not state.setup.roster or state.setup.me in state.setup.roster
    waits_until = state.timers.waits_until or (now + decision_s(state, now) if may_move else None)
    state = replace(state, asked=state.coordinator, timers=Timers(waits_until=waits_until))
    was_missing = is_doubted(state, state.coordinator, now)
    return state, [Ask(peer=state.coordinator, ready=own_report(state), was_missing=was_missing)]


def follow(state: RoundState, peer: str, attempt: int, now: float) -> Transition:
    """Follow `peer` to a later `attempt`, if others confirm it or this member may still move for one peer.

    One of more than a third of the members is honest. So members that wait for hours stay together, and one that comes
    back joins them at once, as in Tendermint's rounds (Buchman et al. 2018, arXiv 1807.04938). Without a roster, the
    peers that this member has seen take its place.
    """
    if attempt > MAX_BELIEVED_ATTEMPT:
        return state, []
    members = set(state.setup.roster) or {*state.known, state.setup.me}
    if peer in members:
        named = {**state.attempts.named, peer: max(attempt, state.attempts.named.get(peer, 0))}
        state = replace(state, attempts=replace(state.attempts, named=named))
    reached = sorted(state.attempts.named.values(), reverse=True)
    num_needed = len(members) // 3 + 1
    if len(reached) >= num_needed and reached[num_needed - 1] > state.attempt:
        return _go_on(state, reached[num_needed - 1], now)
    return move(state, attempt, now)


def move(state: RoundState, attempt: int, now: float) -> Transition:
    """Move to a later `attempt` that one member has named, at most MAX_LONE_MOVES times and each time after a longer
    pause, so that no member can end every attempt. It is not so late that later ones would not be believed any more."""
    if state.attempts.num_moved >= MAX_LONE_MOVES or attempt > MAX_BELIEVED_ATTEMPT // 2:
        return state, []
    if now < state.attempts.movable_at:
        return replace(state, attempts=replace(state.attempts, later=max(state.attempts.later, attempt))), []
    num_moved = state.attempts.num_moved
    attempts = replace(state.attempts, num_moved=num_moved + 1, movable_at=now + rest_after(num_moved))
    return _go_on(replace(state, attempts=attempts), attempt, now)


def _go_on(state: RoundState, attempt: int, now: float) -> Transition:
    if state.phase == "forming" and state.mine is not None:
        state = note_shortage(state, now)  # the attempt ended without a group for the others, too
    state, replies = begin_attempt(state, attempt)
    state, actions = advance(state, now)
    return state, [*replies, *actions]


def on_reported(state: RoundState, peer: str, ready: Ready, now: float) -> Transition:
    if refusal := _refusal(state, peer, ready):
        return state, [Reply(peer=peer, reply=refusal)]
    if state.signed and ready.attempt == state.attempt and peer in state.signed.group.peer_ids:
        # the peer reports again because its answer was lost on the way
        return state, [Reply(peer=peer, reply=ReadyReply(kind="group", group=state.signed.data))]
    if peer not in state.setup.roster and (reason := _too_much(state, peer, ready)):
        return state, [Reply(peer=peer, reply=left_out_reply(reason))]
    before, state = state, without_doubt(state, peer)
    state = reached_again(state, peer, ready.attempt)
    if state is before and ready.attempt == state.attempt and state.reports.get(peer) == ready:
        return state, []  # it repeats its report while it waits, as hundreds do every second in a large run
    state = replace(state, reports={**state.reports, peer: ready})
    # any stranger could otherwise interrupt one attempt after the other
    is_heeded = peer in state.setup.roster or not roster_left(state)
    if ready.attempt > state.attempt and is_waiting(state) and is_heeded:
        return follow(state, peer, ready.attempt, now)
    return advance(state, now)


def _too_much(state: RoundState, peer: str, ready: Ready) -> str:
    """Return why a stranger's report is not kept until a group is formed, or an empty string if it is. Anyone can
    create any number of strangers, and a report can name thousands of trainers."""
    if peer not in state.reports and len(state.reports) >= MAX_HEARD:
        return "too many others are ready"
    brings = ready.followers or ready.newcomers or len(ready.credentials) > 1
    return "it brings other trainers, and heads no cluster" if brings else ""


def on_left_out(state: RoundState, attempt: int, reason: str, now: float) -> Transition:
    if state.phase != "forming" or state.attempt != attempt:
        return state, []
    timers = replace(state.timers, deadline=now + LEFT_OUT_REST_S)
    notice = GiveUp(step=state.setup.step, attempt=attempt, reason=f"left out: {reason}")
    return replace(with_yield(state), phase="left_out", asked="", timers=timers), [notice]


def on_withheld(state: RoundState, now: float) -> Transition:
    """Give up on the coordinator, which has put this member off for too long: a lying coordinator could do so for ever.
    It is not blamed, since its own interval may take that long."""
    reason = f"the coordinator {short_id(state.coordinator)} has formed no group with this member for too long"
    return give_up(state, reason, (state.coordinator,), now)


def on_expired(state: RoundState, attempt: int, at: float, now: float) -> Transition:
    """Drop the credentials that expire by `at`, in Unix seconds. Members that show such a credential are told to report
    again with what they have then. If this member does, and may have reported to this attempt already, it reports in a
    later one: two reports to one attempt would convict it."""
    if state.phase not in {"forming", "signing"} or attempt != state.attempt:
        return state, []
    expired = [peer for peer, ready in state.reports.items() if any_expires_by(at, ready.credentials)]
    kept = {peer: ready for peer, ready in state.reports.items() if peer not in expired}
    own, was_signing = _without_expired(state, at), state.phase == "signing"
    is_own = own != state
    state = replace(own, reports=kept, phase="forming")
    has_enough = len(_ready_members(state)) >= state.setup.succession.min_group
    if was_signing and has_enough and not set(expired) & set(state.setup.roster):
        # the others have waited long enough: newcomers whose credentials expire one after the other must not restart
        # the grace
        state = replace(state, timers=Timers(grace_until=now))
    if is_own and state.coordinator != state.setup.me:
        state, actions = give_up(state, OWN_EXPIRED, (), now)
    else:
        state, actions = advance(state, now)
    return state, [*(Reply(peer=peer, reply=left_out_reply(EXPIRED)) for peer in expired), *actions]


def _without_expired(state: RoundState, at: float) -> RoundState:
    """Return `state` without this member's own credentials that expire by `at`. Its report is then without a
    newcomer that may not enter: every member would refuse the report, and all work that comes with it."""
    setup, mine = state.setup, state.mine
    if setup.credential is not None and any_expires_by(at, [setup.credential]):
        setup = replace(setup, credential=None)
    if mine is not None:
        credentials = tuple(each for each in mine.credentials if not any_expires_by(at, [each]))
        grants = grants_in(credentials)
        newcomers = tuple(peer for peer in mine.newcomers if not setup.standings.refuses(peer, grants.get(peer)))
        mine = replace(mine, credentials=credentials, newcomers=newcomers)
    return replace(state, setup=setup, mine=mine)


def give_up_short(state: RoundState, now: float) -> Transition:
    """Give up: too few members are ready, or the run refuses this one and nobody else coordinates."""
    if _is_refused(state):
        return give_up(state, UNINVITED, (), now)
    setup, reports = state.setup, {**_current_reports(state), state.setup.me: own_report(state)}
    here, absent = _ready_members(state), set(setup.roster) - set(reports)
    busy, missing = sorted(absent & state.heard), tuple(sorted(absent - state.heard))
    names = f"; missing: {', '.join(map(short_id, missing))}" if missing else ""
    names += f"; there, and not ready: {', '.join(map(short_id, busy))}" if busy else ""
    few = presence(len(here), setup.succession.min_group, of_roster=False, how="ready")
    reason = lack_of_seats(setup, [reports[peer] for peer in here]) or few
    if not setup.succession.is_usual(setup.roster, here):
        needed, num_here = setup.succession.num_usual(setup.roster), len(here & set(setup.roster))
        reason = presence(num_here, needed, of_roster=True, how="ready")
    return give_up(note_shortage(state, now), f"{reason}{names}", missing, now)


def _coordinate(state: RoundState, now: float) -> Transition:
    """Wait for `min_group`, then for absent members until the grace ends, then ask for the group's signature."""
    if _is_refused(state):
        return _stand_aside(state, now)
    if state.timers.grace_until is None:
        state, queries = _begin_to_wait(state, now)
        if queries or state.timers.grace_until is None:
            return state, queries
    grace_until = state.timers.grace_until
    if grace_until is not None and now < grace_until and not (state.mine and _is_complete(state)):
        return state, []
    # if all are here, and others' accusations alone leave too few, waiting does not help
    fit = _ready_members(state) if absent_members(state) else _current_reports(state).keys() - state.faults.failed
    return _form(state, now) if _has_electors(state, fit | {state.setup.me}, now) else _wait_for_electors(state, now)


def _is_refused(state: RoundState) -> bool:
    """Return whether the run refuses this member with the credentials that it can show."""
    setup, me = state.setup, state.setup.me
    return setup.standings.refuses(me, grants_in(contribution_to_report(setup, state.mine).credentials).get(me))


def _stand_aside(state: RoundState, now: float) -> Transition:
    """Send the members that report to this one on to the next attempt: every member would refuse a group that this one
    signs, and blame it for the group."""
    if _current_reports(state):
        return give_up(state, UNINVITED, (), now)
    return replace(state, timers=Timers(deadline=state.timers.deadline or now + state.setup.patience_s)), []


def _form(state: RoundState, now: float) -> Transition:
    """Have the group of the ready members signed, or give up if too few of them are fit for it."""
    ready = {**_current_reports(state), state.setup.me: own_report(state)}
    group, left_out = form_group(state.setup, state.attempt, ready)
    if len(group.members) < state.setup.succession.min_group or not _has_electors(state, group.peer_ids, now):
        reasons = "; ".join(f"{short_id(peer)}: {reason}" for peer, reason in left_out.items())
        seats = lack_of_seats(state.setup, group.members) if NO_SEAT in left_out.values() else ""
        accused = sorted(left_out.keys() & accused_members(state.setup, state.attempt, ready))
        state = replace(state, reports={by: each for by, each in state.reports.items() if by not in accused})
        state, actions = give_up(state, seats or f"too few members are fit for a group: {reasons}", (), now)
        return state, [*(Reply(peer=peer, reply=left_out_reply(left_out[peer])) for peer in accused), *actions]
    return replace(state, phase="signing", timers=Timers()), [Sign(group=group, left_out=left_out)]


def _is_complete(state: RoundState) -> bool:
    """Return whether there is nobody left to wait for.

    A run's first group has no roster that names the expected members, so it always waits unless it is full. In a run
    with clusters it waits even then: more trainers than a group has places may begin together, and in several groups.
    """
    setup = state.setup
    is_full = len(_ready_members(state)) >= setup.max_group and (bool(setup.roster) or setup.clusters.size == 1)
    return is_full or (bool(setup.roster) and not absent_members(state))


def _begin_to_wait(state: RoundState, now: float) -> Transition:
    """Start the grace if enough members are ready, else wait for that. Ask absent ones where they are, now or later."""
    setup, present, absent = state.setup, _current_reports(state), absent_members(state)
    # members that bring no work must not cut the others' intervals short
    has_waited = state.mine is not None and (state.mine.num_tokens or now >= _work_due_at(state))
    worked = has_waited or any(each.num_tokens for each in present.values())
    if len(_ready_members(state)) < setup.succession.min_group or (absent and not worked):
        if state.timers.deadline is not None or state.mine is None:
            return state, []
        return replace(state, timers=Timers(deadline=now + setup.patience_s, hurry_at=now + setup.patience_s / 2)), []
    # a member's first interval takes at least as long as those that have ended
    grace_s = grace_after(state.interval_s or now - state.began_at, setup.grace_s)
    others = tuple(peer for peer in absent if peer != setup.me)
    queries: list[Action] = [Query(peers=others, hurry=False)] if others and grace_s > 0 else []
    timers = Timers(grace_until=now + grace_s, hurry_at=now + grace_s / 2 if absent else None)
    return replace(state, timers=timers), queries


def _has_electors(state: RoundState, peers: Collection[str], now: float) -> bool:
    """Return whether enough members of the state before are among `peers` for a group that is formed now."""
    succession, roster = state.setup.succession, state.setup.roster
    return succession.is_usual(roster, peers) or (is_overdue(state, now) and succession.is_enough(roster, peers))


def _wait_for_electors(state: RoundState, now: float) -> Transition:
    """Wait longer, because the grace is over and too few members of the state before are here for a group."""
    setup, absent = state.setup, absent_members(state)
    timers = Timers(
        grace_until=now + max(setup.grace_s, MIN_WAIT_S), deadline=state.timers.deadline or now + setup.patience_s
    )
    queries: list[Action] = [Query(peers=absent, hurry=True)] if absent else []
    return replace(note_shortage(state, now), timers=timers), queries


def _current_reports(state: RoundState) -> dict[str, Ready]:
    """Return the reports to this attempt, by member. `state.reports` has reports to later attempts, too."""
    return {peer: each for peer, each in state.reports.items() if each.attempt == state.attempt}


def _ready_members(state: RoundState) -> set[str]:
    """Return this member, and those that have reported to this attempt, except for those that it will leave out."""
    ready = {**_current_reports(state), state.setup.me: own_report(state)}
    return ready.keys() - accused_members(state.setup, state.attempt, ready)


def absent_members(state: RoundState) -> tuple[str, ...]:
    """Return the members of the state that may still report, this member included while its interval lasts, and the
    trainers that take vacant places."""
    present = _current_reports(state)
    mine = {state.setup.me} if state.mine else set()
    # if more than a third of the state's members say that a member is gone, not all of them lie
    roster = set(state.setup.roster)
    reports = Counter(peer for by, each in present.items() if by in roster for peer in each.accused)
    gone = {peer for peer, count in reports.items() if 3 * count > len(roster)}
    expected = roster_left(state) | (set(state.setup.clusters.promoted) - state.faults.failed)
    return tuple(sorted(expected - present.keys() - mine - gone))


def _refusal(state: RoundState, peer: str, ready: Ready) -> ReadyReply | None:
    """Return why `peer` cannot be in this attempt's group, or None if it can."""
    if not state.setup.admits(peer):
        return left_out_reply(NOT_ADMITTED)
    if peer in state.setup.clusters.dealt:
        return left_out_reply(FOLLOWS)
    if peer in state.faults.convicted:
        return left_out_reply(CONVICTED)
    if (ready.sequence, ready.state_digest) != (state.setup.sequence, state.setup.state_digest):
        return ReadyReply(kind="behind", state_digest=state.setup.state_digest)
    if ready.attempt < state.attempt:
        return ReadyReply(kind="attempt", attempt=state.attempt)
    return None


def awaited_peers(state: RoundState) -> tuple[str, ...]:
    """Return the peers that the round waits for at this member. For a follower that is its head; at the coordinator,
    the absent members; in a vote, those that have not voted. Elsewhere they are the members that were missing when too
    few were there, or else the coordinator."""
    setup, group = state.setup, state.signed
    if setup.follows:
        return setup.clusters.heads_of(setup.me)[:1]
    if is_waiting(state):
        if state.coordinator == setup.me:
            return tuple(sorted(set(setup.roster) - _current_reports(state).keys() - {setup.me}))
        is_short = state.attempts.short_since is not None
        missing = {*state.faults.unreachable, *state.faults.doubted} & set(setup.roster) if is_short else set()
        return tuple(sorted(missing)) or (state.coordinator,)
    if group is None or state.phase not in {"preparing", "committing"}:
        return ()
    voted = state.votes["prepare" if state.phase == "preparing" else "commit"]
    return tuple(peer for peer in group.group.peer_ids if peer not in voted and peer != setup.me)


def num_lacking(state: RoundState) -> int:
    """Return how many more members this coordinator needs before it can form a group. Other members do not know the
    number and get 0."""
    is_forming = is_waiting(state) and state.coordinator == state.setup.me and not state.setup.follows
    return max(0, state.setup.succession.min_group - len(_ready_members(state))) if is_forming else 0


def decision_s(state: RoundState, now: float) -> float:
    """Return how many seconds a member waits for the group of a coordinator that answers: another interval as long as
    its own (without work, until that of others is due), the longest grace, and the time that a coordinator waits. This
    grows with each failed attempt, since the others' intervals may take many times as long."""
    rest_s = max(state.setup.grace_s, MAX_GRACE_S) + 2 * state.setup.patience_s
    if state.setup.roster and not (state.mine and state.mine.num_tokens):
        return max(0.0, _work_due_at(state) - now) + rest_s * (1 + state.attempts.num_failed)
    return (state.interval_s + rest_s) * (1 + state.attempts.num_failed)


def _work_due_at(state: RoundState) -> float:
    """Return when members that bring no work stop waiting for the work of others, who may hang for good."""
    return state.began_at + max(2 * state.interval_s, MIN_WORK_DUE_S)


def grace_after(interval_s: float, least_s: float) -> float:
    """Return how many seconds a round waits for members once enough are there, after an interval that took
    `interval_s`. A run with a `least_s` of 0 waits for nobody."""
    return max(least_s, min(GRACE_SHARE * interval_s, MAX_GRACE_S)) if least_s else 0.0
