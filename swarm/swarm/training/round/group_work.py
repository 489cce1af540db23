"""Decides what a member does in an attempt's group beside voting: check the group, reduce, and leave it.

All functions here are pure. `state_machine` calls them, and `round_driver` carries out the actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from swarm_protocol.commit_messages import Abort, Outcome, Vote, VoteKind
from swarm_protocol.identity import short_id
from swarm_protocol.training_messages import SignedGroup

from swarm.training.allreduce.parts import MIN_MEMBERS_FOR_BACKUP
from swarm.training.round.disputes import yields
from swarm.training.round.group_formation import advance
from swarm.training.round.group_members import complaint, own_report
from swarm.training.round.quorum import disagreement, enough_for_one_honest
from swarm.training.round.round_events import Announce, Recover, Reduce, ReduceFailed, ShowEvidence
from swarm.training.round.round_state import RoundState, Timers, Transition, accuse, give_up, suspect, with_unreachable


def on_grouped(state: RoundState, signed: SignedGroup, now: float) -> Transition:
    if signed.group.attempt != state.attempt or signed.signer != state.coordinator:
        return state, []
    if state.signed is not None:
        return _on_second_group(state, signed, now) if signed.digest != state.signed.digest else (state, [])
    if liars := tuple(peer for peer in signed.group.peer_ids if peer in state.faults.convicted):
        state, actions = give_up(state, f"the group has {short_id(liars[0])}, whom evidence convicts", liars, now)
        return state, [ShowEvidence(peers=tuple(peer for peer in signed.group.peer_ids if peer not in liars)), *actions]
    if reason := _objection(state, signed):
        return give_up(accuse(state, (signed.signer,), reason), reason, (signed.signer,), now)
    group = signed.group
    members = set(group.peer_ids)
    votes = {kind: {peer: vote for peer, vote in cast.items() if peer in members} for kind, cast in state.votes.items()}
    state = replace(
        state,
        phase="reducing",
        signed=signed,
        asked="",
        attempts=replace(state.attempts, short_since=None),
        timers=Timers(deadline=now + group.reduce_s),
        votes=votes,
        # the reports to this attempt have their answer now
        reports={peer: each for peer, each in state.reports.items() if each.attempt > state.attempt},
    )
    if group.resumes is None:
        state, actions = recover_audited(replace(state, sits_out=_sits_out(state, signed)))
        return state, [Reduce(signed=signed, sits_out=state.sits_out), *actions]
    # the members whose votes make the lock have audited the outcome
    return _recover(state, group.resumes, is_audited=True)


def _sits_out(state: RoundState, signed: SignedGroup) -> bool:
    """Return whether this member, which has yielded, cannot reach a contributor, and others can do without it: its part
    has a backup, and the votes of the others are enough to show that an honest member has audited."""
    contributors = {each.peer_id for each in signed.group.contributors}
    is_cut = state.setup.me not in contributors and not contributors.isdisjoint(state.faults.failed)
    deciding = signed.group.deciding
    others_show = len({*deciding} - {state.setup.me}) >= enough_for_one_honest(len(deciding))
    return yields(state) and is_cut and others_show and len(signed.group.members) >= MIN_MEMBERS_FOR_BACKUP


def recover_audited(state: RoundState) -> Transition:
    """Recover the outcome that an honest member has audited, if this member sits out and there is one."""
    if state.phase != "reducing" or state.recovering or not state.sits_out:
        return state, []
    outcome = _audited_outcome(state)
    return (state, []) if outcome is None else _recover(state, outcome, is_audited=True)


def _objection(state: RoundState, signed: SignedGroup) -> str:
    """Return why this member takes no part in the signed group; empty if it does."""
    if signed.signer == state.setup.me:
        return ""  # the group was valid when this member signed it, even if its interval has ended since
    wrong = complaint(state.setup, state.attempt, own_report(state).contribution_of(state.setup.me), signed)
    return wrong and f"the group that {short_id(signed.signer)} signed is not acceptable: {wrong}"


def _on_second_group(state: RoundState, signed: SignedGroup, now: float) -> Transition:
    reason = f"{short_id(signed.signer)} signed two groups for one attempt"
    return leave_group(accuse(state, (signed.signer,), reason), reason, (signed.signer,), now)


def on_reduce_failed(state: RoundState, event: ReduceFailed, now: float) -> Transition:
    if not reduces(state, event.attempt):
        if event.certain and event.attempt < state.attempt:
            state = accuse(state, event.accused, event.reason)
        return state, []
    state = suspect(accuse(state, event.accused, event.reason), event.unreachable)
    faulty = (*event.accused, *event.unreachable)
    if not event.unaudited:
        return fail(state, event.reason, faulty, now)
    if (outcome := _audited_outcome(state)) is None:
        return leave_group(state, event.reason, faulty, now)
    return _recover(state, outcome, is_audited=True)


def _audited_outcome(state: RoundState) -> Outcome | None:
    """Return the outcome for which more than a third of the deciding members, and at least two, have voted, or None. If
    fewer than a third lie, at least one honest member has audited it. Members on probation do not count, as keys cost
    nothing."""
    assert state.signed is not None
    deciding = state.signed.group.deciding
    counts = Counter(each.outcome for peer, each in valid_votes(state, "prepare").items() if peer in deciding)
    outcome, most = counts.most_common(1)[0] if counts else (None, 0)
    return outcome if most >= enough_for_one_honest(len(deciding)) else None


def on_convicted(state: RoundState, peer: str, reason: str, now: float) -> Transition:
    """Stop working with `peer` for good: leave a group that has it, drop its report, and do not report to it."""
    if peer in state.faults.convicted or peer == state.setup.me:
        return state, []
    state = accuse(state, (peer,), reason)
    state = replace(state, faults=replace(state.faults, convicted=state.faults.convicted | {peer}))
    state = replace(state, reports={by: each for by, each in state.reports.items() if by != peer})
    if state.signed is not None and peer in state.signed.group.peer_ids:
        others = tuple(each for each in other_members(state) if each != peer)
        state, actions = leave_group(state, reason, (peer,), now)
        return state, [ShowEvidence(peers=others), *actions]
    if state.phase == "forming" and state.coordinator == peer:
        return give_up(state, reason, (peer,), now)
    return advance(state, now)


def _recover(state: RoundState, outcome: Outcome, *, is_audited: bool) -> Transition:
    """Get the parts of `outcome` from other members, those that voted for it first."""
    assert state.signed is not None
    voters = [peer for peer, each in state.votes["prepare"].items() if each.outcome == outcome]
    others = [peer for peer in other_members(state) if peer not in voters]
    action = Recover(signed=state.signed, outcome=outcome, holders=(*voters, *others), is_audited=is_audited)
    return replace(state, recovering=True), [action]


def fail(
    state: RoundState, reason: str, accused: tuple[str, ...], now: float, *, missing: tuple[str, ...] | None = None
) -> Transition:
    """Handle a reduction that this member cannot finish: recover the outcome of a member that could, else abort the
    attempt. The other members are told of `accused`. This member's user is told of `missing`, or of `accused` if that
    is None."""
    signed = state.signed
    assert signed is not None
    if (lock := signed.group.lock) is not None and signed.signer == state.setup.me:
        # members that voted for the outcome have all its parts, and would have sent them
        claims = {each.peer_id: each.locked for each in signed.group.members if each.locked is not None}
        claimants = tuple(peer for peer, each in claims.items() if each.outcome_digest == lock.claim.outcome_digest)
        state = with_unreachable(state, claimants)
    votes = Counter(vote.outcome for vote in valid_votes(state, "prepare").values())
    if votes and not state.recovering:
        ((outcome, _),) = votes.most_common(1)
        # the reduction's time may be over; those that voted wait this long for others
        deadline = max(state.timers.deadline or now, now + signed.group.vote_s)
        return _recover(replace(state, timers=Timers(deadline=deadline)), outcome, is_audited=False)
    return leave_group(state, reason, accused, now, missing=missing)


def with_dispute(state: RoundState, peer: str, involved: Collection[str]) -> RoundState:
    """Return `state` after `peer` has left the reduction. It and the members that it blames are `involved`.

    What it says may be right or made up. So a peer that is involved in two disputes is suspect, unless others are in as
    many. If nobody is by that rule, a peer that blames this very member is: the two may be unable to reach each other,
    and the coordinator must not hear only one of them. So is a stranger to the state, whose word counts for nothing.
    """
    roster, me = state.setup.roster, state.setup.me
    if roster and peer not in roster:
        return suspect(state, (peer,))
    disputes = Counter(state.faults.disputes) + Counter(involved)
    (worst, most), *others = disputes.most_common(2)
    is_worst = most > 1 and not any(count == most for _, count in others)
    suspects = (worst,) if is_worst else (peer,) if me in involved else ()
    state = replace(state, faults=replace(state.faults, disputes=disputes))
    return suspect(state, suspects)


def leave_group(
    state: RoundState, reason: str, accused: tuple[str, ...], now: float, *, missing: tuple[str, ...] | None = None
) -> Transition:
    """Leave the signed group, and tell its members why."""
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


def leave_without_quorum(state: RoundState, reason: str, now: float) -> Transition:
    """Leave the group, since its votes can no longer decide."""
    assert state.signed is not None
    mine, votes = own_outcome(state), valid_votes(state, "prepare")
    group = state.signed.group
    suspects = disagreement(mine, votes, group.peer_ids, group.deciding)
    voted = votes if state.phase == "preparing" else valid_votes(state, "commit")
    absent = tuple(sorted(set(group.peer_ids) - voted.keys()))
    names = f"; no vote from {', '.join(map(short_id, absent))}" if absent else ""
    state = suspect(state, suspects)
    return leave_group(state, reason + names, (*absent, *suspects), now)


def own_outcome(state: RoundState) -> Outcome:
    """Return the outcome that this member has voted for, once it has."""
    assert state.own_prepare_vote is not None
    return state.own_prepare_vote.vote.outcome


def reduces(state: RoundState, attempt: int) -> bool:
    return state.phase == "reducing" and state.attempt == attempt


def valid_votes(state: RoundState, kind: VoteKind) -> dict[str, Vote]:
    """Return the votes of this kind by the group's members for this very group, and for an outcome that it can have."""
    signed = state.signed
    if signed is None:
        return {}
    members = set(signed.group.peer_ids)  # made anew each time that it is asked for
    return {
        peer: vote
        for peer, vote in state.votes[kind].items()
        if peer in members and vote.group_digest == signed.digest and _can_have(signed, vote.outcome)
    }


def _can_have(signed: SignedGroup, outcome: Outcome) -> bool:
    """Return whether a certificate of this group can be of `outcome`. A member that follows a made-up vote would
    otherwise hold a lock that nobody takes."""
    if signed.group.resumes is not None:
        return outcome == signed.group.resumes
    num_parts = len(signed.group.part_values)
    return (outcome.origin_digest, len(outcome.part_digests)) == (signed.digest, num_parts)


def without_vote_of(state: RoundState, peer: str) -> RoundState:
    """Expect no vote of `peer` any more."""
    return replace(state, silent=state.silent | {peer})


def other_members(state: RoundState) -> tuple[str, ...]:
    assert state.signed is not None
    return tuple(peer for peer in state.signed.group.peer_ids if peer != state.setup.me)
