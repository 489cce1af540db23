"""What every member checks of a signed group, before it takes part.

A coordinator is trusted only to choose among the members that reported. Every member checks that its own contribution
is there unchanged, that nobody's weight exceeds its lease, and a head's not those of its cluster, that all start from
its own state, and that the part sizes follow from the bandwidths in the group. Each member finds its own bandwidth
there, so a coordinator can invent only its own, within `parts.MAX_SKEW`.

Pure functions on the round's setup.
"""

from __future__ import annotations

from swarm_protocol.training_messages import Contribution, Group, SignedGroup

from swarm.training.allreduce.parts import part_sizes
from swarm.training.round.round_state import RoundSetup, reported
from swarm.training.run.methods import short
from swarm.training.state.clusters import overclaim


def complaint(setup: RoundSetup, attempt: int, contribution: Contribution | None, signed: SignedGroup) -> str:
    """Return what is wrong with a group for `setup.me`, which offered `contribution`; empty if nothing is."""
    group = signed.group
    checks = (
        ((group.run, group.step, group.attempt) != (setup.run, setup.step, attempt), "it is for another round"),
        (group.state_digest != setup.state_digest, "it starts from another state"),
        (reported(setup, contribution) not in group.members, "it lacks or changes this member's contribution"),
        (
            group.reduce_s > setup.reduce_s or group.vote_s > setup.vote_s,
            "its deadlines are longer than the run allows",
        ),
    )
    wrong = next((text for is_wrong, text in checks if is_wrong), "") or _forbidden(setup, group)
    if wrong or group.resumes is None:
        return wrong
    wrong = origin_complaint(setup, signed.origin) if signed.origin else "it is not there"
    return f"of the group whose outcome it resumes, {wrong}" if wrong else ""


def origin_complaint(setup: RoundSetup, origin: SignedGroup) -> str:
    """Return why no honest member can have voted in `origin`, a group of this step and state; empty if one can."""
    if setup.roster and origin.signer not in setup.roster:
        return f"{short(origin.signer)} signed it and is no member of the state that it follows from"
    return _forbidden(setup, origin.group)


def _forbidden(setup: RoundSetup, group: Group) -> str:
    """Return which rule `group` breaks that holds for all groups of this step; empty if none."""
    num_members = len(group.members)
    places = [each.place for member in group.members for each in member.followers]
    checks = (
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
        (any(peer in setup.clusters.dealt for peer in group.peer_ids), "it has a member whose work another one brings"),
        (any(cluster_overclaim(setup, member) for member in group.members), "a member claims more than its lease"),
        (len(places) > len(set(places)), "two members bring one trainer's work"),
        (
            bool(group.part_values) and group.part_values != part_sizes(setup.num_values, group.members),
            "its part sizes do not follow from the bandwidths that its members reported",
        ),
    )
    return next((text for is_wrong, text in checks if is_wrong), "")


def cluster_overclaim(setup: RoundSetup, member: Contribution) -> str:
    """Return what `member` claims for itself or its cluster without having it; empty if nothing."""
    if not all(map(setup.admits, member.newcomers)):
        return "it brings a newcomer that the run does not admit"
    return overclaim(
        member,
        setup.leased,
        setup.clusters,
        max_samples=setup.samples_per_member,
        tokens_per_sample=setup.tokens_per_sample,
    )
