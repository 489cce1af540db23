"""Decides whom a coordinator leaves out of a group because of accusations, and which member of a cut pair yields.

Two members that can never reach each other spoil each reduction in which both have a share. Left out are the members in
most disputes, and one of each two that only accuse each other. If both are members of the state, this one *yields*: in
the attempts that follow it reports no tokens, and sits out the reduction, in which its backup makes its part. It votes
once so many others have voted for one outcome that an honest one has audited it, and so counts for the quorum.

A liar that many members accuse is in most disputes, and is left out itself. A member yields only in turns in which a
draw picks it of itself and those that it accuses, so that of two members one contributes, and each in about half of the
turns. So one liar keeps out one honest member at a time, not always the same. All functions here are pure.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from swarm_protocol.training_messages import Ready

from swarm.training.allreduce.parts import MIN_MEMBERS_FOR_BACKUP
from swarm.training.round.round_state import RoundSetup, RoundState, coordinator_of

TURN_ATTEMPTS = 8
"""Number of attempts for which the same member of a pair yields. Others are drawn after that, since the members drawn
may be neighbours, which cannot both be in a group."""


def widely_accused(accusations: Mapping[str, Collection[str]], num_members: int) -> tuple[str, ...]:
    """Return the peers that more than a third of the state's `num_members` accuse. If fewer than a third of the members
    lie, one of these accusers is honest. Before an attempt has failed, no other accusation counts. `accusations` are by
    accuser."""
    counts = Counter(peer for by, accused in accusations.items() for peer in set(accused) - {by})
    return tuple(sorted(peer for peer, count in counts.items() if peer in accusations and 3 * count > num_members))


def whom_to_leave_out(accusations: Mapping[str, Collection[str]], num_failed: int) -> tuple[str, ...]:
    """Return the peers to leave out of an attempt after `num_failed` attempts have failed, from the members'
    accusations alone. `accusations` are by accuser.

    Nothing is proved here, so the peer in most disputes, on either side, is left out: all members accuse a peer that
    breaks the round for all, and a peer that accuses everyone stands alone. Peers that tie may be unable to work with
    each other. They take turns: a hash leaves out one of them, or none. Liars that make an attempt fail can therefore
    get an honest member left out of some later attempts, but never out of a step's first one.
    """
    disputes = _disputes(accusations)
    counts = {peer: others.total() for peer, others in disputes.items()}
    # the entry "" stands for leaving nobody out
    turns = {peer: hashlib.sha256(f"{num_failed}/{peer}".encode()).digest() for peer in ("", *accusations)}
    left_out = []
    while most := max(counts.values(), default=0):
        worst = {peer for peer, count in counts.items() if count == most}
        without_each_other = [peer for peer in worst if worst.isdisjoint(disputes[peer])]
        out = min(without_each_other) if without_each_other else min(("", *worst), key=turns.__getitem__)
        if out:
            left_out.append(out)
            del counts[out]
            for other in disputes.pop(out):
                counts[other] -= disputes[other].pop(out)
        else:  # their disputes with each other stay undecided
            for peer in worst:
                for other in worst & disputes[peer].keys():
                    counts[peer] -= disputes[peer].pop(other)
    return tuple(left_out)


def _disputes(accusations: Mapping[str, Collection[str]]) -> dict[str, Counter[str]]:
    """Return how many accusations there are between each peer and each other one, on either side."""
    heard = {by: accusations.keys() & set(accused) - {by} for by, accused in accusations.items()}
    return {
        peer: Counter([*accused, *(by for by, others in heard.items() if peer in others)])
        for peer, accused in heard.items()
    }


def accused_members(setup: RoundSetup, attempt: int, ready: Mapping[str, Ready]) -> set[str]:
    """Return which of the members that are `ready`, and of those that they accuse, `setup.me` leaves out of the group
    of `attempt`."""
    # accusations by strangers do not count: anyone can create any number of strangers
    heard = {peer: each.accused if peer in setup.roster or not setup.roster else () for peer, each in ready.items()}
    num_failed = attempt - setup.first_attempt
    # what this member saw itself counts even in a tie: it signs a group of members that it can work with
    own = ready.keys() & {*ready[setup.me].accused}
    if not num_failed:
        return {*widely_accused(heard, len(setup.roster or heard)), *own} - {setup.me}
    opponents = {peer: {*others} for peer, others in _disputes(heard).items()}
    out = set[str]()
    for peer in whom_to_leave_out(heard, num_failed):
        pair = {peer, *opponents[peer]} - out
        is_cut = len(pair) == 2 and all(len(opponents[each] - out) == 1 for each in pair)
        out.add(_yielding(setup, attempt, pair) if is_cut and pair.issubset(setup.roster) else peer)
    out = {*own, *out} - {setup.me}
    return out - (_sitting_out(out, ready, opponents) - own)


def _sitting_out(out: set[str], ready: Mapping[str, Ready], opponents: Mapping[str, set[str]]) -> set[str]:
    """Return the members of `out` that may be in the group, since they have yielded to their only opponent in it. The
    members before and after each of them contribute: one makes its part, and the other one's part has a backup."""
    idle, group = {peer for peer, each in ready.items() if not each.num_tokens}, ready.keys() - out
    sitting = set[str]()
    for peer in sorted(idle & out):
        ring = sorted({*group, *sitting, peer})
        at = ring.index(peer)
        is_near_idle = not idle.isdisjoint({ring[at - 1], ring[(at + 1) % len(ring)]})
        others = opponents[peer].intersection(ring)
        sits_out = len(others) == 1 and others.issubset(ready[peer].accused) and others.isdisjoint(idle)
        if sits_out and len(ring) >= MIN_MEMBERS_FOR_BACKUP and not is_near_idle:
            sitting.add(peer)
    return sitting


def yields(state: RoundState) -> bool:
    """Return whether this member reports no tokens in its attempt, because it has yielded earlier in the same turn."""
    after, turn = state.yields_after, _turn_beacon(state.setup, state.attempt)
    return after is not None and after < state.attempt and _turn_beacon(state.setup, after) == turn


def with_yield(state: RoundState) -> RoundState:
    """Return `state` after the coordinator has left this member out. If the draw picks the member of itself and those
    that it accuses, it yields in the rest of the turn, while it accuses any. This begins with the next attempt, since
    two reports to one attempt would convict it. The head of a cluster does not yield."""
    setup, opponents = state.setup, state.faults.failed & {*state.setup.roster}
    brings_others = state.mine is not None and (state.mine.followers or state.mine.newcomers)
    if yields(state) or brings_others or not opponents:
        return state
    if _yielding(setup, state.attempt, {setup.me, *opponents}) != setup.me:
        return state
    return replace(state, yields_after=state.attempt)


def _yielding(setup: RoundSetup, attempt: int, peers: Collection[str]) -> str:
    """Return which of `peers` yields in the turn of `attempt`."""
    return coordinator_of(_turn_beacon(setup, attempt), peers)


def _turn_beacon(setup: RoundSetup, attempt: int) -> bytes:
    return setup.beacon(attempt // TURN_ATTEMPTS * TURN_ATTEMPTS)
