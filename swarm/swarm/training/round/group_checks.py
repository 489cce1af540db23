"""Checks a signed group, as every member does before it takes part.

A coordinator can only leave members out. The group carries the reports that its members have signed for this very
attempt, and all else follows from these: weights, part sizes, clusters, and which outcome it resumes (`quorum`). Every
member recomputes it, and checks that its own report is there unchanged, that nobody's weight exceeds its lease, and a
head's not those of its cluster, and that all start from its own state. `RunSignatures.check_reports` checks the
signatures.

Pure functions on the round's setup.
"""

from __future__ import annotations

from dataclasses import replace

from swarm_protocol import limits
from swarm_protocol.identity import short_id
from swarm_protocol.run_credentials import revocation_in
from swarm_protocol.training_messages import Contribution, Group, SignedGroup

from swarm.training.allreduce.parts import part_sizes
from swarm.training.round.clusters import overclaim
from swarm.training.round.quorum import lock_complaint
from swarm.training.round.round_state import RoundSetup
from swarm.training.standing.standings import grants_in

NOT_INVITED = "the run wants an invitation, or vouchers, that it does not have or that are used up"
MISSTATED = "it says otherwise than the state how long it is on probation"
MISSTATED_SCORE = "it says otherwise than the state whether its score is low"


def complaint(setup: RoundSetup, attempt: int, mine: Contribution, signed: SignedGroup) -> str:
    """Return what is wrong with a group for `setup.me`, which reported `mine`; empty if nothing is."""
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
    """Return why no honest member can have voted in `origin`, a group of this step and state; empty if one can."""
    if setup.roster and origin.signer not in setup.roster:
        return f"{short_id(origin.signer)} signed it and is no member of the state that it follows from"
    return _forbidden(setup, origin.group)


def _forbidden(setup: RoundSetup, group: Group) -> str:
    """Return which rule `group` breaks that holds for all groups of this step; empty if none."""
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
        (not all(map(setup.admits, group.peer_ids)), "it has a member that the run does not admit"),
        (
            any(setup.standings.refuses(peer, grants.get(peer)) for peer in group.peer_ids),
            f"of a member, {NOT_INVITED}",
        ),
        (
            len(group.credentials) > limits.MAX_CREDENTIALS
            or bool(set(setup.standings.overused(grants)) & set(group.peer_ids)),
            "it has more newcomers than their invitations or vouchers let in",
        ),
        (any(misstates_standing(setup, member) for member in group.members), f"of a member, {MISSTATED}"),
        (any(misstates_score(setup, member) for member in group.members), f"of a member, {MISSTATED_SCORE}"),
        (
            len(group.on_probation) > num_seats(setup, len(group.members) - len(group.on_probation)),
            f"it has {len(group.on_probation)} members on probation, which is too many",
        ),
        (any(peer in setup.clusters.dealt for peer in group.peer_ids), "it has a member whose work another one brings"),
        (any(cluster_overclaim(setup, member) for member in group.members), "a member claims more than its lease"),
        (len(places) > len(set(places)), "two members bring one trainer's work"),
        (
            bool(group.part_values) and group.part_values != part_sizes(setup.num_values, group.members),
            "its part sizes do not follow from the bandwidths that its members reported",
        ),
    )
    return next((text for is_wrong, text in checks if is_wrong), "")


def num_seats(setup: RoundSetup, num_proven: int) -> int:
    """Return how many members on probation may be in a group with `num_proven` others."""
    return setup.standings.rule.num_seats(setup.max_group, num_proven)


def num_presentable(max_group: int) -> int:
    """Return how many credentials of newcomers one head may bring, so that those of a whole group have room."""
    return limits.MAX_CREDENTIALS // max_group


def num_demotable(max_group: int) -> int:
    """Return how many members one report may demote, so that those of a whole group have room."""
    return max(1, limits.MAX_DEMOTED // max_group)


def misstates_standing(setup: RoundSetup, member: Contribution) -> bool:
    """Return whether `member` says otherwise than the state how many steps it or a follower has to prove itself."""
    own = grants_in(member.credentials).get(member.peer_id)
    if setup.standings.steps_left(member.peer_id, own) != member.steps_left:
        return True
    followers = [
        (setup.leased[each.place], each.steps_left) for each in member.followers if each.place < len(setup.leased)
    ]
    return any(setup.standings.steps_left(peer) != left for peer, left in followers)


def misstates_score(setup: RoundSetup, member: Contribution) -> bool:
    """Return whether `member` says otherwise than the state whether it counts for less."""
    return setup.held_out.is_discounted(member.peer_id) != member.discounted


def cluster_overclaim(setup: RoundSetup, member: Contribution) -> str:
    """Return what `member` claims for itself or its cluster without having it; empty if nothing."""
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
