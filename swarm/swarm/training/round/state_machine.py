"""One outer step at one member, as a pure state machine: `step(state, event, now) -> (state, actions)`.

    forming ─ group ─> reducing ─ parts ─> preparing ─ lock ─> committing ─ two thirds ─> done
       │                  │                  │                  │
       └ coordinator gone ┴── anything fails ┴──────────────────┴──> resting ──> forming, next attempt

The machine runs while the member's interval does, since others may be ready sooner. Every attempt has one coordinator
and one signed group. An attempt that fails changes nothing but the attempt's number: the contribution is kept.

No two replicas commit different outcomes of one step. A member casts its prepare vote for an outcome when it holds all
parts and has audited them. With the prepare votes of two thirds of the group it holds a lock, writes it to disk, and
casts its commit vote; two thirds of commit votes are a certificate. Both times enough members of the state before must
be among the voters (see `quorum`). A report names the lock, so that the next group resumes that outcome before any new
one. So at most one side of a partitioned network goes on, and the other side follows it later; if fewer than a third of
the members lie, lies change nothing of that. A coordinator asks absent members where they are before it goes on without
them, so a member that has committed already says so. If too many members are gone without a word, the run waits for
some of them. A `min_group` of 1 voids this guarantee, and so do liars where a majority is enough. The two sides then
have different states, and the certificates decide who follows.

A group in which nobody has tokens reduces nothing and commits no outer step. It commits the roster: its members hold
the leases that follow. A run's first round is such a group, and a round whose members all failed to train.

Time, the network and signatures are left to `round_driver`, bytes to `butterfly`, forming groups to `group_formation`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from swarm_protocol.commit_messages import Abort, Outcome
from swarm_protocol.identity import short_id
from swarm_protocol.training_messages import SignedGroup

from swarm.training.round.group_checks import complaint
from swarm.training.round.group_formation import (
    CONVICTED,
    absent_members,
    advance,
    move,
    on_expired,
    on_left_out,
    on_reported,
    on_withheld,
    too_few,
)
from swarm.training.round.promise import Promise, bound_by
from swarm.training.round.quorum import presence
from swarm.training.round.round_events import (
    AttemptLeft,
    Convicted,
    CredentialsExpired,
    Event,
    Finish,
    Grouped,
    LeftOut,
    Lost,
    Moved,
    Offered,
    Proven,
    Query,
    Reduce,
    Reduced,
    ReduceFailed,
    Reported,
    ShowEvidence,
    Sighted,
    Tick,
    Voted,
    Withdrew,
)
from swarm.training.round.round_state import (
    MAX_BELIEVED_ATTEMPT,
    MAX_HEARD,
    Faults,
    RoundSetup,
    RoundState,
    Timers,
    Transition,
    blame,
    give_up,
    is_waiting,
    moves_at,
    note_shortage,
    own_report,
    reached_again,
    roster_left,
    suspect,
    with_coordinator,
    without_doubt,
)
from swarm.training.round.voting import (
    count_votes,
    fail,
    leave_group,
    no_quorum,
    on_reduced,
    on_voted,
    other_members,
    recover,
    reduces,
    valid_votes,
    without_vote_of,
)


def begin(
    setup: RoundSetup,
    *,
    accused: Mapping[str, str],
    convicted: frozenset[str] = frozenset(),
    promise: Promise | None = None,
    interval_s: float = 0.0,
    began_at: float = 0.0,
) -> RoundState:
    """Return the state at the beginning of the member's interval.

    `accused` are the peers that it saw break the protocol at earlier steps, and `convicted` those of them whom evidence
    convicts. `promise` is its newest one, also of an earlier process. `interval_s` is the duration of its last
    interval; 0 if it had none. `began_at` is now.
    """
    convicted_of = dict.fromkeys(convicted, CONVICTED)
    faults = Faults(accused={**convicted_of, **accused}, convicted=convicted)
    state = RoundState(
        setup=setup, attempt=setup.first_attempt, faults=faults, interval_s=interval_s, began_at=began_at
    )
    return bound_by(with_coordinator(state), promise)


def wake_at(state: RoundState) -> float | None:
    """Return when a Tick is due, if nothing happens before."""
    if state.phase == "done":
        return None
    timers = state.timers
    times = (timers.grace_until, timers.hurry_at, timers.waits_until, timers.deadline, moves_at(state))
    return min((time for time in times if time is not None), default=None)


def step(state: RoundState, event: Event, now: float) -> Transition:  # noqa: C901, PLR0911, PLR0912 - one case an event
    """Return what follows from `event`. Never raises: an event that does not fit the phase is ignored."""
    if state.phase == "done":
        return state, []
    match event:
        case Offered(contribution=contribution, interval_s=interval_s):
            return advance(replace(state, mine=contribution, interval_s=interval_s or state.interval_s), now)
        case Sighted(peer=peer, attempt=attempt):
            return _on_sighted(state, peer, attempt, now)
        case Reported(peer=peer, ready=ready):
            return on_reported(state, peer, ready, now)
        case Withdrew(peer=peer):
            return replace(state, ready={by: each for by, each in state.ready.items() if by != peer}), []
        case CredentialsExpired(at=at):
            return on_expired(state, at, now)
        case Lost(peer=peer, reason=reason):
            return _on_lost(state, peer, reason, now)
        case Moved(attempt=attempt, to=to):
            return _on_moved(state, attempt, to, now)
        case LeftOut(attempt=attempt, reason=reason):
            return on_left_out(state, attempt, reason, now)
        case Grouped(signed=signed):
            return _on_grouped(state, signed, now)
        case Reduced(attempt=attempt, outcome=outcome):
            return on_reduced(state, attempt, outcome, now)
        case ReduceFailed():
            return _on_reduce_failed(state, event, now)
        case Convicted(peer=peer, reason=reason):
            return _on_convicted(state, peer, reason, now)
        case Voted():
            return on_voted(state, event, now)
        case AttemptLeft(peer=peer, abort=abort):
            return _on_left(state, peer, abort, now)
        case Proven(certificate=certificate):
            return replace(state, phase="done"), [Finish(certificate=certificate)]
        case Tick():
            return _on_tick(state, now)


def _on_sighted(state: RoundState, peer: str, attempt: int, now: float) -> Transition:
    """Note that `peer` is in the run. If it is at a later attempt, move to that attempt. Without a roster, the peers
    that a member has met and its attempt decide who it takes for the coordinator."""
    is_new = peer not in state.known and len(state.known) < MAX_HEARD and state.setup.admits(peer)
    state = without_doubt(replace(state, known=(*state.known, peer)) if is_new else state, peer)
    was_unreachable, state = peer in state.faults.unreachable, reached_again(state, peer, attempt)
    if peer in state.setup.roster and peer not in state.heard:
        state = replace(state, heard=state.heard | {peer})
    is_heeded = peer in state.setup.roster if state.setup.roster else state.setup.admits(peer)
    if not is_waiting(state) or not is_heeded:
        return state, []
    if attempt > state.attempt:
        # two members that saw the same failure differently would otherwise each wait for the other at its own attempt
        return move(state, attempt, now)
    if state.setup.roster:
        if state.phase != "forming" or not was_unreachable or peer in state.faults.unreachable:
            return state, []
        # the others may take it for the coordinator, and would form their group without this member
        return advance(with_coordinator(state), now)
    if is_new and state.timers.grace_until is not None:
        # it may know others in turn, and a run must have one first group
        state = replace(state, timers=replace(state.timers, grace_until=now + state.setup.grace_s))
    return advance(with_coordinator(state), now)


def _on_moved(state: RoundState, attempt: int, to: int, now: float) -> Transition:
    """Follow the coordinator to a later attempt, where it waits for this member."""
    if not (attempt == state.attempt < to and is_waiting(state)):
        return state, []
    if now < state.attempts.movable_at or to > MAX_BELIEVED_ATTEMPT:
        return give_up(state, f"the coordinator {short_id(state.coordinator)} moves on again and again", (), now)
    return move(state, to, now)


def _on_lost(state: RoundState, peer: str, reason: str, now: float) -> Transition:
    state = blame(replace(state, heard=state.heard - {peer}), (), (peer,), reason)
    if state.phase == "forming" and state.asked == peer:
        gone = f"the coordinator {short_id(peer)} is gone: {reason}{_shortage(state)}"
        return give_up(note_shortage(state, now), gone, (peer,), now)
    if state.phase in {"preparing", "committing"}:
        return count_votes(without_vote_of(state, peer), now)
    return advance(state, now)


def _shortage(state: RoundState) -> str:
    """Return, for a message, that too few members of the state are there, if this member sees too few."""
    setup, left = state.setup, roster_left(state)
    if setup.succession.is_enough(setup.roster, left):
        return ""
    needed = setup.succession.num_enough(setup.roster, left)
    return f"; the run waits: {presence(len(left), needed, of_roster=True)}"


def _on_grouped(state: RoundState, signed: SignedGroup, now: float) -> Transition:
    if signed.group.attempt != state.attempt or signed.signer != state.coordinator:
        return state, []
    if state.signed is not None:
        return _on_second_group(state, signed, now) if signed.digest != state.signed.digest else (state, [])
    if liars := tuple(peer for peer in signed.group.peer_ids if peer in state.faults.convicted):
        state, actions = give_up(state, f"the group has {short_id(liars[0])}, whom evidence convicts", liars, now)
        return state, [ShowEvidence(peers=tuple(peer for peer in signed.group.peer_ids if peer not in liars)), *actions]
    liar, reason = _objection(state, signed)
    if liar:
        return give_up(blame(state, (liar,), (), reason), reason, (liar,), now)
    group = signed.group
    prepare_votes = {peer: each for peer, each in state.voting.prepare_votes.items() if peer in group.peer_ids}
    commit_votes = {peer: each for peer, each in state.voting.commit_votes.items() if peer in group.peer_ids}
    state = replace(
        state,
        phase="reducing",
        signed=signed,
        asked="",
        attempts=replace(state.attempts, short_since=None),
        timers=Timers(deadline=now + group.reduce_s),
        voting=replace(state.voting, prepare_votes=prepare_votes, commit_votes=commit_votes),
        # the reports to this attempt are answered from now on
        ready={peer: each for peer, each in state.ready.items() if each.attempt > state.attempt},
    )
    if group.resumes is None:
        return state, [Reduce(signed=signed)]
    # the votes of the lock are those of members that audited the outcome
    return replace(state, recovering=True), [replace(recover(state, signed, group.resumes), is_audited=True)]


def _objection(state: RoundState, signed: SignedGroup) -> tuple[str, str]:
    """Return the peer that keeps this member out of the signed group, with the reason; empty if none does."""
    me, mine, origin = state.setup.me, state.mine, signed.origin
    if signed.signer == me:
        # the group was right when this member signed it, even if its interval has ended since
        return "", ""
    if wrong := complaint(state.setup, state.attempt, own_report(state).contribution_of(me), signed):
        return signed.signer, f"the group that {short_id(signed.signer)} signed is not acceptable: {wrong}"
    leaves = any(member.peer_id == me and member.leaving for member in origin.group.members) if origin else False
    if origin and leaves and origin.signer != me and not (mine and mine.leaving):
        # the coordinator could otherwise leave itself as the only member that the next state depends on
        return origin.signer, f"{short_id(origin.signer)} signed a group in which this member leaves, and it does not"
    return "", ""


def _on_second_group(state: RoundState, signed: SignedGroup, now: float) -> Transition:
    reason = f"{short_id(signed.signer)} signed two groups for one attempt"
    return leave_group(blame(state, (signed.signer,), (), reason), reason, (signed.signer,), now)


def _on_reduce_failed(state: RoundState, event: ReduceFailed, now: float) -> Transition:
    if not reduces(state, event.attempt):
        if event.certain and event.attempt < state.attempt:
            state = blame(state, event.accused, (), event.reason)
        return state, []
    state = suspect(blame(state, event.accused, event.unreachable, event.reason), event.unreachable)
    faulty = (*event.accused, *event.unreachable)
    if not event.unaudited:
        return fail(state, event.reason, faulty, now)
    assert state.signed is not None
    if (outcome := _audited_outcome(state)) is None:
        return leave_group(state, event.reason, faulty, now)
    return replace(state, recovering=True), [replace(recover(state, state.signed, outcome), is_audited=True)]


def _audited_outcome(state: RoundState) -> Outcome | None:
    """Return the outcome for which more than a third of the members that decide, and two at least, have voted: if fewer
    than a third lie, one that did not lie has audited it. None if there is no such outcome. Members on probation do not
    count, as keys cost nothing."""
    assert state.signed is not None
    deciding = state.signed.group.deciding
    counts = Counter(each.outcome for peer, each in valid_votes(state, "prepare").items() if peer in deciding)
    outcome, most = counts.most_common(1)[0] if counts else (None, 0)
    return outcome if most >= max(2, len(deciding) // 3 + 1) else None


def _on_convicted(state: RoundState, peer: str, reason: str, now: float) -> Transition:
    """Have nothing to do with `peer` from now on: leave a group with it, and do not report to it."""
    if peer in state.faults.convicted or peer == state.setup.me:
        return state, []
    state = blame(state, (peer,), (), reason)
    state = replace(state, faults=replace(state.faults, convicted=state.faults.convicted | {peer}))
    state = replace(state, ready={by: each for by, each in state.ready.items() if by != peer})
    if state.signed is not None and peer in state.signed.group.peer_ids:
        others = tuple(each for each in other_members(state) if each != peer)
        state, actions = leave_group(state, reason, (peer,), now)
        return state, [ShowEvidence(peers=others), *actions]
    if state.phase == "forming" and state.coordinator == peer:
        return give_up(state, reason, (peer,), now)
    return advance(state, now)


def _on_left(state: RoundState, peer: str, abort: Abort, now: float) -> Transition:
    members = set(state.signed.group.peer_ids) if state.signed else set()
    if state.signed is None or abort.group_digest != state.signed.digest or peer not in members:
        return state, []
    state = without_vote_of(state, peer)
    if state.phase in {"preparing", "committing"}:
        return count_votes(state, now)
    reason = f"{short_id(peer)} left: {abort.reason}"
    # it may report rightly that another member has left or lied, or accuse anyone: a peer in two disputes is suspect
    disputes = Counter(state.faults.disputes) + Counter({peer, *abort.accused} & members)
    (worst, most), *others = disputes.most_common(2)
    if most > 1 and not any(count == most for _, count in others):
        state = suspect(blame(state, (), (worst,), reason), (worst,))
    missing = tuple(each for each in abort.accused if each in members and each != state.setup.me)
    state = replace(state, faults=replace(state.faults, disputes=disputes))
    return fail(state, reason, (peer,), now, missing=missing)


def _on_tick(state: RoundState, now: float) -> Transition:
    timers = state.timers
    if (moves := moves_at(state)) is not None and now >= moves:
        return move(state, state.attempts.later, now)
    if timers.waits_until is not None and now >= timers.waits_until:
        return on_withheld(state, now)
    if timers.hurry_at is not None and now >= timers.hurry_at:
        absent = absent_members(state)
        # before the grace so many are missing that a shorter interval helps nobody: this only asks who is there
        query = Query(peers=absent, hurry=timers.grace_until is not None)
        return replace(state, timers=replace(timers, hurry_at=None)), [query] if absent else []
    if timers.grace_until is not None and now >= timers.grace_until:
        return advance(state, now)
    return _on_deadline(state, now) if timers.deadline is not None and now >= timers.deadline else (state, [])


def _on_deadline(state: RoundState, now: float) -> Transition:
    match state.phase:
        case "resting" | "left_out":
            return advance(replace(state, phase="forming", timers=replace(state.timers, deadline=None)), now)
        case "reducing":
            return fail(state, "the reduction took too long", (), now)
        case "preparing" | "committing":
            return no_quorum(state, "the vote took too long", now)
        case _:
            return too_few(state, now)
