"""Votes of one step: what a member does with those of its group, and when they decide.

A member casts its prepare vote for the outcome that it has reduced. A quorum of prepare votes makes a lock, with which
it casts its commit vote; a quorum of commit votes makes the certificate that commits the step. `quorum` says how many
are enough.

Pure functions; `state_machine` calls them, and `round_driver` carries out the actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from swarm_protocol.commit_messages import Abort, Certificate, Lock, Outcome, PlacedSignature, Vote, VoteKind
from swarm_protocol.identity import short_id
from swarm_protocol.training_messages import SignedGroup

from swarm.training.round.quorum import Succession, disagreement, electors_of, quorum
from swarm.training.round.round_events import (
    Announce,
    CastVote,
    Finish,
    Recover,
    Voted,
)
from swarm.training.round.round_state import (
    MAX_HEARD,
    HeldLock,
    OwnPrepareVote,
    RoundState,
    Timers,
    Transition,
    blame,
    give_up,
    suspect,
)

TWO_THIRDS = Succession()
"""The usual rule for who decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """The result of a count. `decided` is the outcome that has a quorum. If the vote is `hopeless`, no outcome can get
    one any more. `reason` says why, in words."""

    decided: Outcome | None
    hopeless: bool
    reason: str


def tally(
    members: Collection[str],
    votes: Mapping[str, Vote],
    silent: Iterable[str],
    *,
    roster: Collection[str] = (),
    succession: Succession = TWO_THIRDS,
) -> Tally:
    """Count `votes` by member. Those of others than `members` do not count. `silent` members will not vote any more.
    `roster` are the members of the state before: enough of them must be among the voters, too."""
    needed = quorum(len(members))
    votes = {peer: vote for peer, vote in votes.items() if peer in members}
    counts = Counter(vote.outcome for vote in votes.values())
    outcome, most = counts.most_common(1)[0] if counts else (None, 0)
    supporters = {peer for peer, vote in votes.items() if vote.outcome == outcome}
    outstanding = set(members) - votes.keys() - set(silent)
    if most >= needed:
        if succession.is_enough(roster, supporters):
            return Tally(decided=outcome, hopeless=False, reason="")
        reason = f"{len(supporters & set(roster))} of the {len(roster)} members of the state before voted for it"
        hopeless = not succession.is_enough(roster, supporters | outstanding)
        return Tally(decided=None, hopeless=hopeless, reason=f"{reason}, which is too few")
    split = f", in {len(counts)} different outcomes" if len(counts) > 1 else ""
    reason = f"{len(votes)} of {len(members)} members voted{split}, and {needed} must agree"
    return Tally(decided=None, hopeless=most + len(outstanding) < needed, reason=reason)


def make_lock(votes: Mapping[str, Vote], electors: Sequence[str]) -> Lock:
    """Return the lock that these equal first `votes` of a quorum make. Votes of others than `electors` are not kept."""
    vote = next(iter(votes.values()))
    placed = tuple(
        PlacedSignature(place=place, signature=votes[peer].signature)
        for place, peer in enumerate(electors)
        if peer in votes
    )
    return Lock(attempt=vote.attempt, group_digest=vote.group_digest, outcome=vote.outcome, votes=placed)


def vote_of_lock(lock: Lock, origin: SignedGroup) -> Vote:
    """Return the vote that the signatures of `lock` are of; its outcome is from the group `origin`."""
    vote = origin.vote(lock.outcome, "prepare")
    return replace(vote, attempt=lock.attempt, group_digest=lock.group_digest)


def recover(state: RoundState, signed: SignedGroup, outcome: Outcome) -> Recover:
    voters = [peer for peer, each in state.voting.prepare_votes.items() if each.outcome == outcome]
    others = [peer for peer in signed.group.peer_ids if peer not in voters and peer != state.setup.me]
    return Recover(signed=signed, outcome=outcome, holders=(*voters, *others))


def on_reduced(state: RoundState, attempt: int, outcome: Outcome, now: float) -> Transition:
    if not reduces(state, attempt):
        return state, []
    assert state.signed is not None
    group = state.signed.group
    if group.resumes is not None and outcome != group.resumes:
        return fail(state, "recomputing the resumed outcome led to a different state", (), now)
    vote = state.signed.vote(outcome, "prepare")
    own_vote = OwnPrepareVote(vote=vote, origin=group.origin or state.signed.data)
    voting, timers = replace(state.voting, outcome=outcome), Timers(deadline=now + group.vote_s)
    state = replace(state, phase="preparing", own_prepare_vote=own_vote, voting=voting, timers=timers)
    return state, [CastVote(vote=vote, peers=other_members(state))]


def on_voted(state: RoundState, event: Voted, now: float) -> Transition:
    """Take a vote, if it counts."""
    # votes may come before the group does
    voting, vote = state.voting, event.vote
    votes = voting.prepare_votes if vote.kind == "prepare" else voting.commit_votes
    is_member = state.signed is None or event.peer in state.signed.group.peer_ids
    is_owed = state.signed is not None or event.peer in state.setup.roster
    has_room = is_owed or len(votes) < MAX_HEARD
    counts = state.setup.admits(event.peer) and event.peer not in state.faults.convicted
    if vote.attempt != state.attempt or not (is_member and has_room and counts):
        return state, []
    known = votes.get(event.peer)
    if known is not None and known != vote:
        # the vote that came first counts; strangers, who may vote before there is a group, are not worth the memory
        if state.signed is None:
            return state, []
        accused = {**state.faults.accused, event.peer: "voted twice"}
        return replace(state, faults=replace(state.faults, accused=accused)), []
    votes = {**votes, event.peer: vote}
    voting = replace(voting, prepare_votes=votes) if vote.kind == "prepare" else replace(voting, commit_votes=votes)
    return count_votes(replace(state, voting=voting), now)


def without_vote_of(state: RoundState, peer: str) -> RoundState:
    """Expect no vote of `peer` any more."""
    return replace(state, voting=replace(state.voting, silent=state.voting.silent | {peer}))


def valid_votes(state: RoundState, kind: VoteKind) -> dict[str, Vote]:
    """Return the votes of this kind by the group's members for this very group."""
    signed = state.signed
    if signed is None:
        return {}
    votes = state.voting.prepare_votes if kind == "prepare" else state.voting.commit_votes
    return {
        peer: vote
        for peer, vote in votes.items()
        if peer in signed.group.peer_ids and vote.group_digest == signed.digest
    }


def _tally_of(state: RoundState, kind: VoteKind) -> Tally:
    assert state.signed is not None
    silent = set(state.voting.silent)
    if kind == "commit":
        # who has another result than this member casts no commit vote for it
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


def count_votes(state: RoundState, now: float) -> Transition:
    """Count the votes. They decide only once this member has voted too: until then others may still need its part."""
    if state.signed is None or state.phase not in {"preparing", "committing"}:
        return state, []
    commit = _tally_of(state, "commit")
    if commit.decided is not None:
        return _finish(state, commit.decided)
    if state.phase == "committing":
        return no_quorum(state, commit.reason, now) if commit.hopeless else (state, [])
    prepare = _tally_of(state, "prepare")
    if prepare.decided is not None and prepare.decided == state.voting.outcome:
        return _lock(state, prepare.decided, now)
    # if others have decided otherwise, this member's own result is damaged: their commit votes will say so
    return no_quorum(state, prepare.reason, now) if prepare.hopeless else (state, [])


def _lock(state: RoundState, outcome: Outcome, now: float) -> Transition:
    """Hold the lock that the prepare votes make, and cast the commit vote."""
    assert state.signed is not None
    own_vote = state.own_prepare_vote
    assert own_vote is not None
    votes = {peer: vote for peer, vote in valid_votes(state, "prepare").items() if vote.outcome == outcome}
    lock = HeldLock(lock=make_lock(votes, _electors(state)), origin=own_vote.origin)
    timers = Timers(deadline=now + state.signed.group.vote_s)
    state = replace(state, phase="committing", lock=lock, timers=timers)
    cast = CastVote(vote=replace(own_vote.vote, kind="commit"), peers=other_members(state))
    state, actions = count_votes(state, now)
    # too many may have left already for this vote to matter
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


def no_quorum(state: RoundState, reason: str, now: float) -> Transition:
    mine = state.voting.outcome
    assert state.signed is not None
    assert mine is not None
    votes = valid_votes(state, "prepare")
    group = state.signed.group
    accused, suspects = disagreement(mine, votes, group.peer_ids, group.deciding)
    voted = votes if state.phase == "preparing" else valid_votes(state, "commit")
    absent = tuple(sorted(set(state.signed.group.peer_ids) - voted.keys()))
    names = f"; no vote from {', '.join(map(short_id, absent))}" if absent else ""
    state = suspect(blame(state, accused, suspects, "its part or vote differs"), suspects)
    return leave_group(state, reason + names, (*absent, *accused, *suspects), now)


def other_members(state: RoundState) -> tuple[str, ...]:
    assert state.signed is not None
    return tuple(peer for peer in state.signed.group.peer_ids if peer != state.setup.me)


def leave_group(
    state: RoundState, reason: str, accused: tuple[str, ...], now: float, *, missing: tuple[str, ...] | None = None
) -> Transition:
    """Leave a signed group, and tell its members why."""
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


def fail(
    state: RoundState, reason: str, accused: tuple[str, ...], now: float, *, missing: tuple[str, ...] | None = None
) -> Transition:
    """Go on where this member cannot reduce. If another member could, recover its outcome; else abort the attempt.
    Other members are told of `accused`; this member's user is told of `missing`, or of `accused` too."""
    signed = state.signed
    assert signed is not None
    # members that voted have all parts, and would have given them
    state = blame(state, (), state.claimants, "it does not give the parts it says it voted for")
    votes = valid_votes(state, "prepare")
    if votes and not state.recovering:
        outcome = next(iter(votes.values())).outcome
        return replace(state, recovering=True), [recover(state, signed, outcome)]
    return leave_group(state, reason, accused, now, missing=missing)


def reduces(state: RoundState, attempt: int) -> bool:
    return state.phase == "reducing" and state.attempt == attempt
