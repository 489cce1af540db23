"""Decides which members a coordinator takes into a group, and checks the group at every member.

A coordinator can only leave members out. The group carries the reports that its members have signed for this very
attempt, and everything else follows from these: weights, part sizes, clusters, and which outcome it resumes (`quorum`).
Before a member takes part it recomputes all this. It also checks that its own report is there unchanged, that no
member's weight exceeds its lease, that no head's weight exceeds the leases of its cluster, and that all members start
from its own state. `RunSignatures.check_reports` checks the signatures.

All functions here are pure functions of the round's setup. `group_formation` decides when the group is formed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from swarm_protocol import limits
from swarm_protocol.checks import shared_fields
from swarm_protocol.identity import short_id
from swarm_protocol.run_credentials import Grant, revocation_in
from swarm_protocol.training_messages import Contribution, Group, Ready, SignedGroup

from swarm.training.allreduce.parts import part_sizes
from swarm.training.round.clusters import drawn, overclaim
from swarm.training.round.disputes import accused_members, yields
from swarm.training.round.quorum import highest_claim, lock_complaint, presence
from swarm.training.round.round_state import RoundSetup, RoundState
from swarm.training.standing.standings import grants_in

NOT_INVITED = "the run wants an invitation, or vouchers, that it does not have or that are used up"
MISSTATED = "it says otherwise than the state how long it is on probation"
MISSTATED_SCORE = "it says otherwise than the state whether its score is low"
NO_SEAT = "the seats for members on probation are taken: it proves itself when one is free"
TOO_MANY_ENTER = "its invitation or its vouchers let in others with this group, and may be used up by that"
NOT_ADMITTED = "the run does not admit it"


def contribution_to_report(setup: RoundSetup, contribution: Contribution | None) -> Contribution:
    """Return what `setup.me` reports with `contribution`. Without a contribution it reports only its bandwidth,
    standing and credentials."""
    contribution = contribution or Contribution(peer_id=setup.me)
    own = (setup.credential,) if setup.credential and setup.standings.is_new(setup.me) else ()
    return replace(
        contribution,
        bytes_per_s=setup.bytes_per_s,
        steps_left=setup.standings.steps_left(setup.me, grants_in(own).get(setup.me)),
        credentials=(*own, *contribution.credentials),
        demoted=setup.demoted,
        discounted=setup.held_out.is_discounted(setup.me),
    )


def own_report(state: RoundState) -> Ready:
    mine = contribution_to_report(state.setup, state.mine)
    if yields(state):
        mine = replace(mine, num_tokens=0, num_samples=0, loss=0.0, commitment=None)
    # a report has room for a limited number of peers, and those outside the roster matter least
    accused = sorted(state.faults.failed, key=lambda peer: (peer not in state.setup.roster, peer))
    return Ready(
        run=state.setup.run,
        step=state.setup.step,
        attempt=state.attempt,
        state_digest=state.setup.state_digest,
        accused=tuple(sorted(accused[: limits.MAX_GROUP_MEMBERS])),
        lock=state.lock,
        origin=state.lock_origin,
        sequence=state.setup.sequence,
        revocation=state.setup.revocation,
        **shared_fields(mine, Ready),
    )


def form_group(setup: RoundSetup, attempt: int, ready: Mapping[str, Ready]) -> tuple[Group, dict[str, str]]:
    """Return the group of the members that are `ready`, and the reason for each member left out. `setup.me` is always
    in the group.

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

    `setup.me` comes first. Then proven members come before those on probation, members that contribute before those
    that only want to be admitted, and members of the state before others. A beacon draws the order of equals.
    """
    members = [each for peer, each in fit.items() if peer in setup.roster]
    beacon = seat_beacon(setup.beacon(attempt), members)

    def place(peer: str) -> tuple[bool, bool, bool, bool, bytes]:
        is_new, is_idle = fit[peer].steps_left > 0, fit[peer].num_tokens == 0
        return peer != setup.me, is_new, is_idle, peer not in setup.roster, drawn(beacon, peer)

    return sorted(fit, key=place)


def seat_beacon(beacon: bytes, reports: Iterable[Contribution]) -> bytes:
    """Return the beacon that draws the seats of the attempt with this `beacon`, whose members report `reports`. It also
    includes their commitments to their slices. Before there is a group, only their makers and the attempt's coordinator
    know these."""
    roots = sorted(each.commitment.root for each in reports if each.commitment)
    return hashlib.sha256(beacon + b"".join(roots)).digest()


def surplus_newcomers(setup: RoundSetup, seated: Sequence[str], fit: Mapping[str, Contribution]) -> list[str]:
    """Return the members on probation that get no seat, of those that are `seated` in this order. If no proven member
    contributes, newcomers that contribute get no seat: they alone would make the step."""
    proven = [peer for peer in seated if not fit[peer].steps_left]
    newcomers = [peer for peer in seated if fit[peer].steps_left and peer != setup.me]
    num_taken = int(bool(fit[setup.me].steps_left))
    num_free = max(0, num_seats(setup, len(proven)) - num_taken)
    if proven and not any(fit[peer].num_tokens for peer in proven):
        return [peer for peer in newcomers if fit[peer].num_tokens] + [
            peer for peer in newcomers if not fit[peer].num_tokens
        ][num_free:]
    return newcomers[num_free:]


def lack_of_seats(setup: RoundSetup, ready: Collection[Contribution | Ready]) -> str:
    """Return why the members that are `ready` make no group, if no newcomers can help, since these have too few seats
    beside so few proven members; else return an empty string."""
    fewest, num_proven = setup.succession.min_group, sum(not each.steps_left for each in ready)
    enough = setup.standings.rule.num_proven_needed(fewest, setup.max_group, setup.standings.outer_step)
    if num_proven >= enough:
        return ""
    return (
        f"{presence(len(ready), fewest, of_roster=False, how='ready')} (proven: {num_proven}), and newcomers on "
        f"probation have no more seats beside these (seats: {num_seats(setup, num_proven)}): the run waits until "
        f"{enough} proven members are ready, or its author names newcomers as members: swarm-node run resume FILE "
        "--peers ADDR --members LIST"
    )


def _news(setup: RoundSetup, ready: Mapping[str, Ready]) -> bytes:
    """Return the longest reported revocation of the author that the state does not know yet, or empty bytes if there is
    none."""
    reported = sorted((each.revocation for each in ready.values() if each.revocation), key=len, reverse=True)
    return next((each for each in reported if setup.standings.is_news(revocation_in(each))), b"")


def _surplus_credentials(setup: RoundSetup, seated: Sequence[str], fit: Mapping[str, Contribution]) -> list[str]:
    """Return the peers of `seated` whose credentials do not hold together with those of the others, or have no room in
    the group. `setup.me` goes first, then the state's members, which bring credentials of others."""
    kept, surplus = set[str](), []
    for peer in sorted(seated, key=lambda each: (each != setup.me, each not in setup.roster, each)):
        # in the order of the group, which decides when a head and a peer show different credentials for that peer
        shown = [each for member in sorted({*kept, peer}) for each in fit[member].credentials]
        is_over = bool(fit[peer].credentials) and bool(set(setup.standings.overused(grants_in(shown))) & {*kept, peer})
        if peer != setup.me and (is_over or len(shown) > limits.MAX_CREDENTIALS):
            surplus.append(peer)
        else:
            kept.add(peer)
    return surplus


def _unfit(setup: RoundSetup, attempt: int, ready: Mapping[str, Ready]) -> dict[str, str]:
    """Return the members that are `ready` and that the group must leave out, each with the reason. `setup.me` is not
    among them."""
    unfit, places = dict[str, str](), set[int]()
    # this member's own claims come first, since it does not leave itself out
    for peer, each in sorted(ready.items(), key=lambda item: (item[0] != setup.me, item[0])):
        report = each.contribution_of(peer)
        brought = {follower.place for follower in report.followers}
        reason = _breach(setup, report, grants_in(report.credentials).get(peer))
        if not reason and brought & places:
            reason = "it brings a trainer's work that another member brings, too"
        if reason and peer != setup.me:
            unfit[peer] = reason
        else:
            places |= brought
    honest = {peer: each for peer, each in ready.items() if peer not in unfit}
    for peer in sorted(accused_members(setup, attempt, honest)):
        accusers = [by for by, each in honest.items() if peer in each.accused]
        unfit[peer] = f"accused by {', '.join(map(short_id, accusers)) or 'nobody else, and accuses others'}"
    return unfit


def _breach(setup: RoundSetup, member: Contribution, grant: Grant | None) -> str:
    """Return why the report of `member` may be in no group; empty if it may be in one. `grant` is what lets the member
    into the run, if anything does."""
    if not setup.admits(member.peer_id):
        return NOT_ADMITTED
    if setup.standings.refuses(member.peer_id, grant):
        return NOT_INVITED
    if _misstates_standing(setup, member):
        return MISSTATED
    if setup.held_out.is_discounted(member.peer_id) != member.discounted:
        return MISSTATED_SCORE
    return cluster_overclaim(setup, member)


def complaint(setup: RoundSetup, attempt: int, mine: Contribution, signed: SignedGroup) -> str:
    """Return why `setup.me`, which reported `mine`, must not join the group; empty if it may."""
    group = signed.group
    kept = next((replace(member, signature=b"") for member in group.members if member.peer_id == setup.me), None)
    checks = (
        ((group.run, group.step, group.attempt) != (setup.run, setup.step, attempt), "it is for another round"),
        (group.state_digest != setup.state_digest, "it starts from another state"),
        (kept != replace(mine, signature=b""), "it lacks or changes this member's report"),
        (
            (group.reduce_s, group.vote_s) != (setup.reduce_s, setup.vote_s),
            "its deadlines are not those that follow from the run",
        ),
    )
    wrong = next((text for is_wrong, text in checks if is_wrong), "") or lock_complaint(group)
    wrong = wrong or _forbidden(setup, group)
    if wrong or group.resumes is None:
        return wrong
    wrong = origin_complaint(setup, signed.origin) if signed.origin else "it is not there"
    return f"of the group whose outcome it resumes, {wrong}" if wrong else ""


def origin_complaint(setup: RoundSetup, origin: SignedGroup) -> str:
    """Return why no honest member can have voted in `origin`, a group of this step and state; empty if one may have."""
    return signer_complaint(setup, origin.signer) or _forbidden(setup, origin.group)


def signer_complaint(setup: RoundSetup, signer: str) -> str:
    """Return why no honest member can have voted in a group of this step and state that `signer` signed; empty if one
    may have."""
    if setup.roster and signer not in setup.roster:
        return f"{short_id(signer)} signed it and is no member of the state that it follows from"
    return ""


def _forbidden(setup: RoundSetup, group: Group) -> str:
    """Return the rule for all groups of this step that `group` breaks; empty if it breaks none."""
    num_members, grants = len(group.members), grants_in(group.credentials)
    places = [each.place for member in group.members for each in member.followers]
    checks = (
        (
            bool(group.revocation) and not setup.standings.is_news(revocation_in(group.revocation)),
            "it revokes what the state knows to be revoked",
        ),
        (group.order != setup.order, "it follows from another resume order of the run's author"),
        (num_members > setup.max_group, f"it has {num_members} members, more than {setup.max_group}"),
        (
            num_members < setup.succession.min_group,
            f"it has {num_members} members, fewer than {setup.succession.min_group}",
        ),
        (
            not setup.succession.is_enough(setup.roster, group.peer_ids),
            "it has too few members of the state that it follows from",
        ),
        (
            len(group.credentials) > limits.MAX_CREDENTIALS
            or bool(set(setup.standings.overused(grants)) & set(group.peer_ids)),
            "it has more newcomers than their invitations or vouchers let in",
        ),
        (
            len(group.on_probation) > num_seats(setup, len(group.members) - len(group.on_probation)),
            f"it has {len(group.on_probation)} members on probation, which is too many",
        ),
        (any(peer in setup.clusters.dealt for peer in group.peer_ids), "it has a member whose work another one brings"),
        (len(places) > len(set(places)), "two members bring one trainer's work"),
        (
            bool(group.part_values) and group.part_values != part_sizes(setup.num_values, group.members),
            "its part sizes do not follow from the bandwidths that its members reported",
        ),
    )
    if wrong := next((text for is_wrong, text in checks if is_wrong), ""):
        return wrong
    for member in group.members:
        if breach := _breach(setup, member, grants.get(member.peer_id)):
            return f"of {short_id(member.peer_id)}, {breach}"
    return ""


def num_seats(setup: RoundSetup, num_proven: int) -> int:
    """Return how many members on probation may be in a group with `num_proven` others."""
    return setup.standings.rule.num_seats(setup.max_group, num_proven)


def num_presentable(max_group: int) -> int:
    """Return how many credentials of newcomers one head may bring, so that a group of heads has room for all of
    them."""
    return limits.MAX_CREDENTIALS // max_group


def num_demotable(max_group: int) -> int:
    """Return how many members one report may demote, so that a group has room for the demotions of all its members."""
    return max(1, limits.MAX_DEMOTED // max_group)


def _misstates_standing(setup: RoundSetup, member: Contribution) -> bool:
    """Return whether `member` contradicts the state about how many steps of probation it or a follower has left."""
    own = grants_in(member.credentials).get(member.peer_id)
    if setup.standings.steps_left(member.peer_id, own) != member.steps_left:
        return True
    followers = [
        (setup.leased[each.place], each.steps_left) for each in member.followers if each.place < len(setup.leased)
    ]
    return any(setup.standings.steps_left(peer) != left for peer, left in followers)


def cluster_overclaim(setup: RoundSetup, member: Contribution) -> str:
    """Return which claim of `member` for itself or its cluster is false; empty if none is."""
    grants = grants_in(member.credentials)
    if any(not setup.admits(peer) or setup.standings.refuses(peer, grants.get(peer)) for peer in member.newcomers):
        return "it brings a newcomer that the run does not admit"
    shown = [each.peer_id for each in member.credentials]
    if len(set(shown) - {member.peer_id}) > num_presentable(setup.max_group):
        return "it brings more newcomers with credentials than a group has room for"
    if len(member.demoted) > num_demotable(setup.max_group):
        return "it demotes more members than its share of a group's room"
    if len(shown) > len(set(shown)) or not {member.peer_id, *member.newcomers}.issuperset(shown):
        return "it shows a credential of another peer, or two of one"
    return overclaim(
        member,
        setup.leased,
        setup.clusters,
        max_samples=setup.samples_per_member,
        tokens_per_sample=setup.tokens_per_sample,
    )
