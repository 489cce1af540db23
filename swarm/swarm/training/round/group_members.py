"""Decides which members a coordinator takes into the group of an attempt, and whom it leaves out, and why.

Pure functions. `group_formation` says when the group is formed; the other members check it (`group_checks`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from swarm_protocol import limits
from swarm_protocol.identity import short_id
from swarm_protocol.run_credentials import revocation_in
from swarm_protocol.training_messages import Contribution, Group, Ready

from swarm.training.allreduce.parts import part_sizes
from swarm.training.round.beacon import drawn, seat_beacon
from swarm.training.round.group_checks import (
    MISSTATED,
    MISSTATED_SCORE,
    NOT_INVITED,
    cluster_overclaim,
    misstates_score,
    misstates_standing,
    num_seats,
)
from swarm.training.round.quorum import highest_claim
from swarm.training.round.round_state import RoundSetup
from swarm.training.standing.standings import grants_in

NO_SEAT = "the seats for members on probation are taken: it proves itself when one is free"

TOO_MANY_ENTER = "its invitation or its vouchers let in others with this group, and may be used up by that"

NOT_ADMITTED = "the run does not admit it"


def form_group(setup: RoundSetup, attempt: int, ready: Mapping[str, Ready]) -> tuple[Group, dict[str, str]]:
    """Return the group of the members that are `ready`, and the reason for each one left out. `setup.me` is always
    taken.

    If members hold locks, the group resumes the outcome of the highest one (see `quorum`).
    """
    left_out = _unfit(setup, attempt, ready)
    fit = {peer: each.contribution_of(peer) for peer, each in ready.items() if peer not in left_out}
    order = _seated(setup, attempt, fit)
    for peer in order[setup.max_group :]:
        left_out[peer] = f"the group is full with {setup.max_group} members"
    seated = order[: setup.max_group]
    for peer in surplus_newcomers(setup, seated, fit):
        left_out[peer] = NO_SEAT
        seated.remove(peer)
    for peer in _surplus_credentials(setup, seated, fit):
        left_out[peer] = TOO_MANY_ENTER
        seated.remove(peer)
    members = tuple(fit[peer] for peer in sorted(seated))
    claim = highest_claim(members)
    locked = (ready[member.peer_id] for member in members if claim is not None and member.locked == claim)
    latest = next(locked, None)
    reduces = latest is None and any(member.num_tokens for member in members)
    group = Group(
        run=setup.run,
        step=setup.step,
        attempt=attempt,
        state_digest=setup.state_digest,
        members=members,
        part_values=part_sizes(setup.num_values, members) if reduces else (),
        reduce_s=setup.reduce_s,
        vote_s=setup.vote_s,
        lock=latest.lock if latest else None,
        origin=latest.origin if latest else b"",
        order=setup.order,
        revocation=_news(setup, ready),
    )
    return group, left_out


def _seated(setup: RoundSetup, attempt: int, fit: Mapping[str, Contribution]) -> list[str]:
    """Return the members that are `fit`, in the order in which they take the group's seats.

    Members that have proven themselves come before those on probation, of these those that contribute before those that
    only want to be admitted, and members of the state before others; of equals, a beacon draws (see `beacon`).
    """
    members = [each for peer, each in fit.items() if peer in setup.roster]
    beacon = seat_beacon(setup.beacon(attempt), members)

    def place(peer: str) -> tuple[bool, bool, bool, bool, bytes]:
        is_new, is_idle = fit[peer].steps_left > 0, fit[peer].num_tokens == 0
        return peer != setup.me, is_new, is_idle, peer not in setup.roster, drawn(beacon, peer)

    return sorted(fit, key=place)


def surplus_newcomers(setup: RoundSetup, seated: Sequence[str], fit: Mapping[str, Contribution]) -> list[str]:
    """Return the members on probation for whom there is no seat, of those that are `seated` in this order. Without a
    proven member that contributes there is none for those that do: they alone would make the step."""
    proven = [peer for peer in seated if not fit[peer].steps_left]
    newcomers = [peer for peer in seated if fit[peer].steps_left and peer != setup.me]
    num_taken = int(bool(fit[setup.me].steps_left))
    num_free = max(0, num_seats(setup, len(proven)) - num_taken)
    if proven and not any(fit[peer].num_tokens for peer in proven):
        return [peer for peer in newcomers if fit[peer].num_tokens] + [
            peer for peer in newcomers if not fit[peer].num_tokens
        ][num_free:]
    return newcomers[num_free:]


def _news(setup: RoundSetup, ready: Mapping[str, Ready]) -> bytes:
    """Return a revocation of the author that the state does not know, of those that members report; empty for none."""
    reported = sorted((each.revocation for each in ready.values() if each.revocation), key=len, reverse=True)
    return next((each for each in reported if setup.standings.is_news(revocation_in(each))), b"")


def _surplus_credentials(setup: RoundSetup, seated: Sequence[str], fit: Mapping[str, Contribution]) -> list[str]:
    """Return who of `seated` enters with a credential that does not hold beside those of the others, or for which the
    group has no room. `setup.me` goes first and then the state's members, which bring others'."""
    kept, surplus = set[str](), []
    for peer in sorted(seated, key=lambda each: (each != setup.me, each not in setup.roster, each)):
        # in the order of the group, which decides where a head shows another credential of a peer than it does itself
        shown = [each for member in sorted({*kept, peer}) for each in fit[member].credentials]
        is_over = bool(fit[peer].credentials) and bool(set(setup.standings.overused(grants_in(shown))) & {*kept, peer})
        if peer != setup.me and (is_over or len(shown) > limits.MAX_CREDENTIALS):
            surplus.append(peer)
        else:
            kept.add(peer)
    return surplus


def widely_accused(accusations: Mapping[str, Collection[str]], num_members: int) -> tuple[str, ...]:
    """Return the peers that more than a third of the state's `num_members` accuse: not all of these lie, if fewer than
    a third do. No other word counts before an attempt has failed. `accusations` are by accuser."""
    counts = Counter(peer for by, accused in accusations.items() for peer in set(accused) - {by})
    return tuple(sorted(peer for peer, count in counts.items() if peer in accusations and 3 * count > num_members))


def whom_to_leave_out(accusations: Mapping[str, Collection[str]], num_failed: int) -> tuple[str, ...]:
    """Return the peers to leave out of an attempt after `num_failed` have failed, by the members' word alone.
    `accusations` are by accuser.

    Nothing is proved here, so this takes the peer in most disputes, on either side: a peer that breaks the round for
    all is accused by all, and a peer that accuses all stands alone. In a tie the two may be unable to work with each
    other. Then the tied peers take turns: by a hash, one of them is left out, or none. So liars that make an attempt
    fail can have an honest member left out of some of those that follow, and of no step's first one.
    """
    disputes: dict[str, Counter[str]] = {peer: Counter() for peer in accusations}  # of each peer, with the others
    for by, accused in accusations.items():
        for of in disputes.keys() & set(accused) - {by}:
            disputes[by][of] += 1
            disputes[of][by] += 1
    counts = {peer: each.total() for peer, each in disputes.items()}
    # the turn of "" is that of none
    turns = {peer: hashlib.sha256(f"{num_failed}/{peer}".encode()).digest() for peer in ("", *accusations)}
    left_out = []
    while most := max(counts.values(), default=0):
        worst = sorted(peer for peer, count in counts.items() if count == most)
        tied = set(worst)
        alone = [peer for peer in worst if tied.isdisjoint(disputes[peer])]
        out = alone[0] if alone else min(("", *worst), key=turns.__getitem__)
        left_out += [out] if out else []
        for peer in [out] if out else worst:
            for other in disputes[peer].keys() & (disputes.keys() if out else tied):
                num = disputes[peer].pop(other)
                del disputes[other][peer]
                counts[peer] -= num
                counts[other] -= num
    return tuple(left_out)


def _unfit(setup: RoundSetup, attempt: int, ready: Mapping[str, Ready]) -> dict[str, str]:
    unfit = {peer: NOT_ADMITTED for peer in ready if not setup.admits(peer)}
    places = set[int]()
    # this member's own claims come first: it does not leave itself out
    for peer, each in sorted(ready.items(), key=lambda item: (item[0] != setup.me, item[0])):
        report = each.contribution_of(peer)
        grant = grants_in(report.credentials).get(peer)
        reason = NOT_INVITED if setup.standings.refuses(peer, grant) else cluster_overclaim(setup, report)
        reason = reason or (MISSTATED if misstates_standing(setup, report) else "")
        reason = reason or (MISSTATED_SCORE if misstates_score(setup, report) else "")
        claimed = {follower.place for follower in each.followers}
        if not reason and claimed & places:
            reason = "it brings a trainer's work that another member brings, too"
        if peer == setup.me or not reason:
            places |= claimed
        else:
            unfit[peer] = reason
    honest = {peer: each.accused for peer, each in ready.items() if peer not in unfit}
    # anyone can make any number of strangers
    heard = {peer: each if peer in setup.roster or not setup.roster else () for peer, each in honest.items()}
    num_failed = attempt - setup.first_attempt
    out = whom_to_leave_out(heard, num_failed) if num_failed else widely_accused(heard, len(setup.roster or heard))
    own = ready[setup.me].accused if setup.me in ready else ()
    # what this member saw itself counts also in a tie: it signs a group of members that it can work with
    for peer in (*out, *(peer for peer in own if peer in honest)):
        if peer != setup.me:
            accusers = [by for by, accused in honest.items() if peer in accused]
            unfit[peer] = f"accused by {', '.join(map(short_id, accusers)) or 'nobody else, and accuses others'}"
    return unfit
