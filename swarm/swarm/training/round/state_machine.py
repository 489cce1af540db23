"""One outer step at one member, as a pure state machine: `step(state, event, now) -> (state, actions)`.

    forming ─ group ─> reducing ─ parts ─> preparing ─ lock ─> committing ─ two thirds ─> done
       │                  │                  │                  │
       └ coordinator gone ┴── anything fails ┴──────────────────┴──> resting ──> forming, next attempt

The machine already runs during the member's interval, since others may be ready sooner. Every attempt has one
coordinator and one signed group. A failed attempt changes nothing but the attempt's number: the contribution is kept.

No two replicas commit different outcomes of one step. A member casts its prepare vote for an outcome when it holds all
parts and has audited them. With the prepare votes of two thirds of the deciding members it holds a lock, writes it to
disk, and casts its commit vote; the commit votes of two thirds are a certificate. Both times enough members of the
state before must be among the voters (see `quorum`). A report names the lock, so that the next group resumes the locked
outcome before any new one. So at most one side of a partitioned network goes on, and the other side follows it later.
This holds even if fewer than a third of the members lie. A coordinator asks absent members where they are before it
goes on without them, so it learns from a member that has committed already. If too many members are gone without a
word, the run waits for some of them. A `min_group` of 1 voids this guarantee, and so do liars where a majority is
enough. The two sides then have different states, and the certificates decide which side follows the other.

A group in which nobody has tokens reduces nothing and commits no outer step. It commits the roster: its members hold
the leases that follow. A run's first round has such a group, and so does a round whose members all failed to train.

`round_driver` handles time, the network and signatures, `butterfly` the tensors, `group_formation` the forming of
groups, `group_work` the work in them, and `quorum` how many votes decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from swarm_protocol.commit_messages import Abort, Certificate, Outcome, PlacedSignature, Vote, VoteKind
from swarm_protocol.identity import short_id

from swarm.training.round.group_formation import (
    CONVICTED,
    absent_members,
    advance,
    follow,
    give_up_short,
    move,
    on_expired,
    on_left_out,
    on_reported,
    on_withheld,
)
from swarm.training.round.group_work import (
    fail,
    leave_without_quorum,
    on_convicted,
    on_grouped,
    on_reduce_failed,
    other_members,
    own_outcome,
    recover_audited,
    reduces,
    valid_votes,
    with_dispute,
    without_vote_of,
)
from swarm.training.round.promise import Promise, bound_by
from swarm.training.round.quorum import Tally, electors_of, make_lock, presence, tally
from swarm.training.round.round_events import (
    AttemptLeft,
    CastVote,
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
    Reduced,
    ReduceFailed,
    Reported,
    Sighted,
    Tick,
    Voted,
    Withdrew,
)
from swarm.training.round.round_state import (
    MAX_HEARD,
    Faults,
    OwnPrepareVote,
    RoundSetup,
    RoundState,
    Timers,
    Transition,
    accuse,
    give_up,
    is_waiting,
    moves_at,
    note_shortage,
    rest,
    roster_left,
    with_coordinator,
    with_sighted,
    with_unreachable,
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

    `accused` are the peers that the member saw break the protocol at earlier steps, and `convicted` are the peers whom
    evidence convicts. `promise` is the member's newest promise, which may be from an earlier process. `interval_s` is
    the duration of its last interval; 0 if it had none. `began_at` is now.
    """
    convicted_of = dict.fromkeys(convicted, CONVICTED)
    faults = Faults(accused={**convicted_of, **accused}, convicted=convicted)
    state = RoundState(
        setup=setup, attempt=setup.first_attempt, faults=faults, interval_s=interval_s, began_at=began_at
    )
    return bound_by(with_coordinator(state), promise)


def wake_at(state: RoundState) -> float | None:
    """Return when a Tick is due if no other event comes first, or None if none is due."""
    if state.phase == "done":
        return None
    timers = state.timers
    times = (timers.grace_until, timers.hurry_at, timers.waits_until, timers.deadline, moves_at(state))
    return min((time for time in times if time is not None), default=None)


def step(state: RoundState, event: Event, now: float) -> Transition:  # noqa: C901, PLR0911, PLR0912 - one case an event
    """Return the state and the actions that follow from `event`. Never raises: an event that does not fit the phase is
    ignored."""
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
            return replace(state, reports={by: each for by, each in state.reports.items() if by != peer}), []
        case CredentialsExpired(attempt=attempt, at=at):
            return on_expired(state, attempt, at, now)
        case Moved():
            return _on_moved(state, event, now)
        case LeftOut(attempt=attempt, reason=reason):
            return on_left_out(state, attempt, reason, now)
        case Grouped(signed=signed):
            return on_grouped(state, signed, now)
        case Reduced(attempt=attempt, outcome=outcome):
            return _on_reduced(state, attempt, outcome, now)
        case ReduceFailed():
            return on_reduce_failed(state, event, now)
        case Convicted(peer=peer, reason=reason):
            return on_convicted(state, peer, reason, now)
        case Voted(peer=peer, vote=vote):
            return _on_voted(state, peer, vote, now)
        case AttemptLeft(peer=peer, abort=abort):
            return _on_left(state, peer, abort, now)
        case Lost(peer=peer, reason=reason, attempt=attempt):
            # a vote's call may fail seconds after its attempt has ended, and the peer may be back by then
            return _on_lost(state, peer, reason, now) if attempt in {None, state.attempt} else (state, [])
        case Proven(certificate=certificate):
            return replace(state, phase="done"), [Finish(certificate=certificate)]
        case Tick():
            return _on_tick(state, now)


def _on_sighted(state: RoundState, peer: str, attempt: int, now: float) -> Transition:
    """Record that `peer` is in the run. If it is at a later attempt, move to that attempt. Without a roster, the
    coordinator follows from the peers that this member has seen and from its attempt."""
    before, setup = state, state.setup
    state = with_sighted(state, peer, attempt)
    is_heeded = peer in setup.roster if setup.roster else setup.admits(peer)
    if not is_waiting(state) or not is_heeded:
        return state, []
    if attempt > state.attempt:
        # otherwise two members that saw the same failure differently would each wait for the other at its own attempt
        return follow(state, peer, attempt, now)
    if setup.roster:
        came_back = peer in before.faults.unreachable and peer not in state.faults.unreachable
        if state.phase != "forming" or not came_back:
            return state, []
        # the others may take `peer` for the coordinator, and would form their group without this member
    elif peer not in before.known and peer in state.known and state.timers.grace_until is not None:
        # `peer` may know others in turn, and a run must have one first group
        state = replace(state, timers=replace(state.timers, grace_until=now + setup.grace_s))
    return advance(with_coordinator(state), now)


def _on_moved(state: RoundState, event: Moved, now: float) -> Transition:
    """Follow the coordinator to a later attempt, where it waits for this member. If this member does not follow it any
    more, end the attempt."""
    if not (event.attempt == state.attempt < event.to and is_waiting(state)):
        return state, []
    coordinator = state.coordinator
    state, actions = follow(state, coordinator, event.to, now)
    if state.attempt == event.attempt:
        why = f', and says "{event.reason}"' if event.reason else ""
        return give_up(state, f"the coordinator {short_id(coordinator)} gave the attempt up{why}", (), now)
    return state, actions


def _on_lost(state: RoundState, peer: str, reason: str, now: float) -> Transition:
    state = with_unreachable(replace(state, heard=state.heard - {peer}), (peer,))
    if state.phase == "forming" and state.asked == peer:
        waits = _shortage(state)
        gone = f"the coordinator {short_id(peer)} is gone: {reason}{waits}"
        # a member outside the roster would get far ahead of the roster's members, who do not follow it to its attempt
        end = give_up if not waits or state.setup.me in state.setup.roster else rest
        return end(note_shortage(state, now), gone, (peer,), now)
    if state.phase in {"preparing", "committing"}:
        return _count_votes(without_vote_of(state, peer), now)
    return advance(state, now)


def _shortage(state: RoundState) -> str:
    """Return the part of a message that says how many members of the state are missing; empty if enough are there."""
    setup, left = state.setup, roster_left(state)
    if setup.succession.is_enough(setup.roster, left):
        return ""
    needed = setup.succession.num_enough(setup.roster, left)
    return f"; the run waits: {presence(len(left), needed, of_roster=True)}"


def _on_reduced(state: RoundState, attempt: int, outcome: Outcome, now: float) -> Transition:
    if not reduces(state, attempt):
        return state, []
    assert state.signed is not None
    group = state.signed.group
    if group.resumes is not None and outcome != group.resumes:
        return fail(state, "recomputing the resumed outcome led to a different state", (), now)
    vote = state.signed.vote(outcome, "prepare")
    own_vote = OwnPrepareVote(vote=vote, origin=group.origin or state.signed.data)
    # others may still reduce, or take from this member the parts that an owner withheld from them
    deadline = max(state.timers.deadline or now, now) + group.vote_s
    state = replace(state, phase="preparing", own_prepare_vote=own_vote, timers=Timers(deadline=deadline))
    return state, [CastVote(vote=vote, peers=other_members(state))]


def _on_voted(state: RoundState, peer: str, vote: Vote, now: float) -> Transition:
    """Keep a vote if it counts, and count again."""
    # votes may arrive before the group does
    setup, votes = state.setup, state.votes[vote.kind]
    is_member = state.signed is None or peer in state.signed.group.peer_ids
    is_owed = state.signed is not None or peer in setup.roster
    has_room = is_owed or len(votes) < MAX_HEARD
    counts = setup.admits(peer) and peer not in state.faults.convicted
    # a lock and a certificate name only group and outcome, so a signature that covers another state or resume order
    # would make them invalid; a member may cast such a vote before it learns of an order, and it may arrive late
    place = (state.attempt, setup.state_digest, setup.sequence)
    is_here = (vote.attempt, vote.state_digest, vote.sequence) == place
    if not (is_here and is_member and has_room and counts):
        return state, []
    if votes.get(peer, vote) != vote:
        # the first vote counts; before there is a group, second votes are ignored, since strangers may send any number
        # of them
        if state.signed is None:
            return state, []
        return accuse(state, (peer,), "voted twice"), []
    return _count_votes(replace(state, votes={**state.votes, vote.kind: {**votes, peer: vote}}), now)


def _count_votes(state: RoundState, now: float) -> Transition:
    """Count the votes. They decide only once this member has voted too: until then other members may still need its
    part."""
    if state.signed is None or state.phase not in {"preparing", "committing"}:
        return recover_audited(state)
    commit = _tally_of(state, "commit")
    if commit.decided is not None:
        return _finish(state, commit.decided)
    if state.phase == "committing":
        return leave_without_quorum(state, commit.reason, now) if commit.hopeless else (state, [])
    prepare = _tally_of(state, "prepare")
    if prepare.decided is not None and prepare.decided == own_outcome(state):
        return _lock(state, prepare.decided, now)
    # if others have decided otherwise, this member's own result is damaged: their commit votes will say so
    return leave_without_quorum(state, prepare.reason, now) if prepare.hopeless else (state, [])


def _tally_of(state: RoundState, kind: VoteKind) -> Tally:
    assert state.signed is not None
    silent = set(state.silent)
    if kind == "commit":
        # a member with another result than this one casts no commit vote for this member's outcome
        others = valid_votes(state, "prepare").items()
        silent |= {peer for peer, vote in others if vote.outcome != own_outcome(state)}
    return tally(
        state.signed.group.deciding,
        valid_votes(state, kind),
        silent,
        roster=_electors(state),
        succession=state.setup.succession,
    )


def _electors(state: RoundState) -> tuple[str, ...]:
    assert state.signed is not None
    return electors_of(state.setup.roster, (state.signed.origin or state.signed).group)


def _lock(state: RoundState, outcome: Outcome, now: float) -> Transition:
    """Hold the lock that the prepare votes make, and cast the commit vote."""
    assert state.signed is not None
    own_vote = state.own_prepare_vote
    assert own_vote is not None
    votes = {peer: vote for peer, vote in valid_votes(state, "prepare").items() if vote.outcome == outcome}
    lock, timers = make_lock(votes, _electors(state)), Timers(deadline=now + state.signed.group.vote_s)
    state = replace(state, phase="committing", lock=lock, lock_origin=own_vote.origin, timers=timers)
    cast = CastVote(vote=replace(own_vote.vote, kind="commit"), peers=other_members(state))
    state, actions = _count_votes(state, now)
    # counting may have ended the attempt, because too many have left already: then there is nothing to cast
    return state, [cast, *actions] if state.signed is not None else actions


def _finish(state: RoundState, decided: Outcome) -> Transition:
    assert state.signed is not None
    votes = valid_votes(state, "commit")
    placed = tuple(
        PlacedSignature(place=place, signature=votes[peer].signature)
        for place, peer in enumerate(state.signed.group.peer_ids)
        if peer in votes and votes[peer].outcome == decided
    )
    certificate = Certificate(group=state.signed.data, outcome=decided, votes=placed).to_bytes()
    return replace(state, phase="done"), [Finish(certificate=certificate)]


def _on_left(state: RoundState, peer: str, abort: Abort, now: float) -> Transition:
    members = set(state.signed.group.peer_ids) if state.signed else set()
    if state.signed is None or abort.group_digest != state.signed.digest or peer not in members:
        return state, []
    state = without_vote_of(state, peer)
    if state.phase in {"preparing", "committing"}:
        return _count_votes(state, now)
    reason = f"{short_id(peer)} left: {abort.reason}"
    state = with_dispute(state, peer, {peer, *abort.accused} & members)
    missing = tuple(each for each in abort.accused if each in members and each != state.setup.me)
    return fail(state, reason, (peer,), now, missing=missing)


def _on_tick(state: RoundState, now: float) -> Transition:
    timers = state.timers
    if (moves := moves_at(state)) is not None and now >= moves:
        return move(state, state.attempts.later, now)
    if timers.waits_until is not None and now >= timers.waits_until:
        return on_withheld(state, now)
    if timers.hurry_at is not None and now >= timers.hurry_at:
        absent = absent_members(state)
        # before the grace, so many members are missing that shorter intervals help nobody: this only asks who is there
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
            return leave_without_quorum(state, "the vote took too long", now)
        case _:
            return give_up_short(state, now)
