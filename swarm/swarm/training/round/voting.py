"""How a member votes in an attempt, and how it leaves one: the second half of `state_machine`.

First votes of enough members make a lock, with which the member votes a second time; second votes of enough members
make a certificate. A vote in which no outcome can get enough votes any more ends the attempt.

Pure functions on the round's state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from swarm_protocol.training_messages import Abort, Certificate, Outcome, PlacedSignature, Vote, VoteKind

from swarm.training.round.locks import make_lock
from swarm.training.round.quorum import Tally, electors_of, tally
from swarm.training.round.round_events import Announce, CastVote, Finish, Voted
from swarm.training.round.round_state import MAX_HEARD, HeldLock, RoundState, Step, Timers, blame, give_up, suspect
from swarm.training.run.methods import short


def on_voted(state: RoundState, event: Voted, now: float) -> Step:
    """Take a vote, if it counts."""
    # votes may come before the group does
    voting, vote = state.voting, event.vote
    votes = voting.prepares if vote.kind == "prepare" else voting.commits
    is_member = state.signed is None or event.peer in state.signed.group.peer_ids
    is_owed = state.signed is not None or event.peer in state.setup.roster
    has_room = is_owed or len(votes) < MAX_HEARD
    counts = state.setup.admits(event.peer) and event.peer not in state.faults.convicted
    if vote.attempt != state.attempt or not (is_member and has_room and counts):
        return state, []
    known = votes.get(event.peer)
    if known is not None and known != vote:
        # the first vote counts; strangers, who may vote before there is a group, are not worth the memory
        if state.signed is None:
            return state, []
        accused = {**state.faults.accused, event.peer: "voted twice"}
        return replace(state, faults=replace(state.faults, accused=accused)), []
    votes = {**votes, event.peer: vote}
    voting = replace(voting, prepares=votes) if vote.kind == "prepare" else replace(voting, commits=votes)
    return count_votes(replace(state, voting=voting), now)


def without_vote_of(state: RoundState, peer: str) -> RoundState:
    """Expect no vote of `peer` any more."""
    return replace(state, voting=replace(state.voting, silent=state.voting.silent | {peer}))


def valid_votes(state: RoundState, kind: VoteKind) -> dict[str, Vote]:
    """Return the votes of this kind by the group's members for this very group."""
    signed = state.signed
    if signed is None:
        return {}
    votes = state.voting.prepares if kind == "prepare" else state.voting.commits
    return {
        peer: vote
        for peer, vote in votes.items()
        if peer in signed.group.peer_ids and vote.group_digest == signed.digest
    }


def _tally(state: RoundState, kind: VoteKind) -> Tally:
    assert state.signed is not None
    silent = set(state.voting.silent)
    if kind == "commit":
        # who has another result than this member does not vote for it a second time
        others = valid_votes(state, "prepare").items()
        silent |= {peer for peer, vote in others if vote.outcome != state.voting.outcome}
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


def count_votes(state: RoundState, now: float) -> Step:
    """Count the votes. They decide only once this member has voted too: until then others may still need its part."""
    if state.signed is None or state.phase not in {"preparing", "voting"}:
        return state, []
    second = _tally(state, "commit")
    if second.decided is not None:
        return _finish(state, second.decided)
    if state.phase == "voting":
        return no_quorum(state, second.reason, now) if second.hopeless else (state, [])
    first = _tally(state, "prepare")
    if first.decided is not None and first.decided == state.voting.outcome:
        return _lock(state, first.decided, now)
    # if others have decided otherwise, this member's own result is damaged: their second votes will say so
    return no_quorum(state, first.reason, now) if first.hopeless else (state, [])


def _lock(state: RoundState, outcome: Outcome, now: float) -> Step:
    """Hold the lock that the first votes make, and vote a second time."""
    assert state.signed is not None
    prepared = state.prepared
    assert prepared is not None
    votes = {peer: vote for peer, vote in valid_votes(state, "prepare").items() if vote.outcome == outcome}
    lock = HeldLock(lock=make_lock(votes, _electors(state)), origin=prepared.origin)
    timers = Timers(deadline=now + state.signed.group.vote_s)
    state = replace(state, phase="voting", lock=lock, timers=timers)
    cast = CastVote(vote=replace(prepared.vote, kind="commit"), peers=other_members(state))
    state, actions = count_votes(state, now)
    # too many may have left already for this vote to matter
    return state, [cast, *actions] if state.signed is not None else actions


def _finish(state: RoundState, decided: Outcome) -> Step:
    assert state.signed is not None
    votes = valid_votes(state, "commit")
    placed = tuple(
        PlacedSignature(place=place, signature=votes[peer].signature)
        for place, peer in enumerate(state.signed.group.peer_ids)
        if peer in votes and votes[peer].outcome == decided
    )
    certificate = Certificate(group=state.signed.data, outcome=decided, votes=placed).to_bytes()
    return replace(state, phase="done"), [Finish(certificate=certificate)]


def no_quorum(state: RoundState, reason: str, now: float) -> Step:
    mine = state.voting.outcome
    assert state.signed is not None
    assert mine is not None
    votes = valid_votes(state, "prepare")
    group = state.signed.group
    convicted, suspects = disagreement(mine, votes, group.peer_ids, group.deciding)
    voted = votes if state.phase == "preparing" else valid_votes(state, "commit")
    absent = tuple(sorted(set(state.signed.group.peer_ids) - voted.keys()))
    names = f"; no vote from {', '.join(map(short, absent))}" if absent else ""
    state = suspect(blame(state, convicted, suspects, "its part or vote differs"), suspects)
    return leave_group(state, reason + names, (*absent, *convicted, *suspects), now)


def other_members(state: RoundState) -> tuple[str, ...]:
    assert state.signed is not None
    return tuple(peer for peer in state.signed.group.peer_ids if peer != state.setup.me)


def leave_group(
    state: RoundState, reason: str, accused: tuple[str, ...], now: float, *, missing: tuple[str, ...] | None = None
) -> Step:
    """Leave a signed group, and tell its members: see `state_machine`."""
    assert state.signed is not None
    abort = Abort(
        run=state.setup.run,
        step=state.setup.step,
        attempt=state.attempt,
        group_digest=state.signed.digest,
        reason=reason[:400],
        accused=tuple(sorted(set(accused))),
    )
    announce = Announce(abort=abort, peers=other_members(state))
    state, actions = give_up(state, reason, accused if missing is None else missing, now)
    return state, [announce, *actions]


def disagreement(
    mine: Outcome, votes: Mapping[str, Vote], owners: tuple[str, ...], deciding: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the peers that votes which differ from `mine` convict, and those that they only make suspect.

    Only the members that are `deciding` count, as keys on probation cost nothing.

    Convicted is the owner of a part that more than a third see otherwise: not all of these lie, so it gave different
    results. So is a member with the same parts and a state that fewer members have than mine; where as many have it,
    mine may be the damaged one (see `repair_if_damaged`). A vote that differs in other members' parts proves nothing:
    either the voter made it up, or an owner gave it another result. One vote could otherwise turn all honest members
    against each other.
    """
    differing = {peer: _owners_of_other_parts(mine, vote.outcome, owners) for peer, vote in votes.items()}
    counts = Counter(owner for peer, differ in differing.items() if peer in deciding for owner in differ)
    convicted = {owner for owner, count in counts.items() if 3 * count > len(deciding)}
    suspects = {peer for peer, differ in differing.items() if differ - convicted}
    supporters = Counter(vote.outcome for peer, vote in votes.items() if peer in deciding)
    convicted |= {
        peer
        for peer, vote in votes.items()
        if vote.outcome != mine and not differing[peer] and supporters[vote.outcome] < supporters[mine]
    }
    return tuple(sorted(convicted)), tuple(sorted(suspects - convicted))


def _owners_of_other_parts(mine: Outcome, other: Outcome, owners: tuple[str, ...]) -> set[str]:
    parts = zip(owners, mine.part_digests, other.part_digests, strict=False)
    return {owner for owner, own, theirs in parts if own != theirs}
