"""Draws the clusters of a run: which members of a round bring the work of the trainers that have no place in it.

A round has at most `max_group` members. In a run with clusters each of them is the head of a cluster: it takes the work
of its followers, aggregates it with its own, and brings the result to the round as one contribution. Votes,
certificates and the state's digest belong to the round, so they are the same for all trainers.

Clusters are drawn anew from each committed state. The state's digest is the randomness, so nobody chooses a cluster,
and every member draws the same ones. Trainers are sorted by a hash, and dealt to the heads in turn: clusters differ in
size by one at most. A follower's second head takes its work if the first one is gone; the followers of one head have
different second heads. If the round has fewer than `max_group` members, the first trainers in the order of the hash
take the vacant places: they report to the coordinator themselves.

A trainer keeps its lease if a head brought its work, and also if its first head took no part in the round, since the
trainer is then not at fault. Otherwise it has to ask a head to admit it again, as newcomers do.

This is hierarchical averaging whose clusters a beacon draws, as in MoDeST (de Vos et al. 2023, arXiv 2302.13837). In
MoDeST only the drawn sample works in a round; here all trainers work. The module keeps no state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from swarm_protocol import limits
from swarm_protocol.errors import RoundError
from swarm_protocol.training_messages import Contribution, Group

NUM_REMEMBERED = 4
"""Number of draws that this process caches for all its members. Each member asks for the clusters of a step several
times, and a draw takes milliseconds in a run with thousands of trainers."""
NUM_ASKED = 8
"""Number of heads that a newcomer asks for a place. Most heads have one, unless the run is nearly full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clusters:
    """The clusters of one step, each of at most `size` trainers.

    `heads` are the members of the state, in the order of the hash. `promoted` take vacant places in the round. `dealt`
    maps each follower to its heads, the first one first, and `led` maps each first head to its followers. If `is_full`,
    newcomers find no place in the round and have to ask a head. A head may bring `newcomers_per_head` of them.
    """

    digest: bytes = b""
    heads: tuple[str, ...] = ()
    promoted: tuple[str, ...] = ()
    dealt: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    led: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    size: int = 1
    is_full: bool = False
    newcomers_per_head: int = 0

    def follows(self, peer: str) -> bool:
        """Return whether another member brings the work of `peer`, or would bring it once `peer` is in the run."""
        return peer in self.dealt or (self.is_full and peer not in self.heads and peer not in self.promoted)

    def heads_of(self, peer: str) -> tuple[str, ...]:
        """Return the heads that the follower `peer` asks to bring its work, in this order."""
        if peer in self.dealt:
            return self.dealt[peer]
        ranked = sorted(self.heads, key=lambda head: drawn(self.digest, f"{peer}/{head}"))
        return tuple(ranked[:NUM_ASKED])

    def followers_of(self, head: str) -> tuple[str, ...]:
        """Return the followers whose first head is `head`."""
        return self.led.get(head, ())

    def num_newcomers(self, head: str) -> int:
        """Return how many newcomers `head` may bring."""
        if head not in self.heads or not self.is_full:
            return 0
        return min(max(0, self.size - 1 - len(self.followers_of(head))), self.newcomers_per_head)


@lru_cache(maxsize=NUM_REMEMBERED)
def draw_clusters(
    digest: bytes,
    roster: tuple[str, ...],
    trainers: frozenset[str],
    *,
    max_group: int,
    size: int,
    newcomers: frozenset[str] = frozenset(),
    num_seats: int = limits.MAX_GROUP_MEMBERS,
    min_group: int = 1,
) -> Clusters:
    """Return the clusters of the step that follows the state `digest`, whose members are `roster` and whose trainers
    are `trainers`. There are none if `size` is 1, and before a run's first group. `newcomers` are the trainers on
    probation: they take vacant places after all others, and at most `num_seats`. If `roster` is less than `min_group`,
    others may report, too: those with seats may be gone."""
    if size == 1 or not roster:
        return Clusters(size=size)
    heads = tuple(sorted(roster, key=lambda peer: drawn(digest, peer)))
    others = sorted(trainers.difference(roster), key=lambda peer: drawn(digest, peer))
    num_vacant = max(0, max_group - len(heads))
    promoted = [peer for peer in others if peer not in newcomers][:num_vacant]
    num_free = min(num_vacant - len(promoted), num_seats)
    seats = [peer for peer in others if peer in newcomers][:num_free]
    followers = [peer for peer in others if peer not in {*promoted, *seats}]
    return Clusters(
        digest=digest,
        heads=heads,
        promoted=(*promoted, *seats),
        dealt={peer: _heads_of(heads, place) for place, peer in enumerate(followers)},
        led={head: tuple(followers[index :: len(heads)]) for index, head in enumerate(heads)},
        size=size,
        is_full=len(seats) >= num_free and len(heads) >= min_group,
        newcomers_per_head=max(1, limits.MAX_NEWCOMERS // max_group),
    )


def trainers_after(origin: Group, leased: Sequence[str], clusters: Clusters) -> tuple[str, ...]:
    """Return the trainers that hold leases after the round of `origin`: its roster, then the other trainers that stay,
    sorted.

    Raises RoundError if a follower has no lease.
    """
    stay, left = set[str](), set[str](origin.roster)
    for member in origin.members:
        (left if member.leaving else stay).add(member.peer_id)
        stay |= set(member.newcomers)
        for each in member.followers:
            (left if each.leaving else stay).add(_leased_at(leased, each.place))
    stay |= {peer for peer, heads in clusters.dealt.items() if heads[0] not in origin.peer_ids}
    return (*origin.roster, *sorted(stay - left))


def samples_used(origin: Group, leased: Sequence[str]) -> dict[str, int]:
    """Return how many samples of its lease each contributing trainer has used. Raises RoundError if a follower has no
    lease."""
    used = {member.peer_id: member.own_samples for member in origin.members if member.own_samples}
    for member in origin.members:
        for each in member.followers:
            if each.num_samples:
                used[_leased_at(leased, each.place)] = each.num_samples
    return used


def has_contributed(peer: str, origin: Group, state_digest: bytes, leased: Sequence[str]) -> bool:
    """Return whether `origin` counts work of `peer`. `leased` are the leases after the state `state_digest`. A group
    that starts from another state tells only which of its members have contributed, not which followers."""
    if origin.state_digest == state_digest:
        return peer in samples_used(origin, leased)
    return any(member.peer_id == peer and member.num_tokens for member in origin.members)


def overclaim(
    member: Contribution, leased: Sequence[str], clusters: Clusters, *, max_samples: int, tokens_per_sample: int
) -> str:
    """Return which claim of `member` is false: more work than its lease allows, or trainers that are not its own.
    Return an empty string if none is."""
    works = [(member.peer_id in leased, member.own_samples, member.own_tokens)]
    works += [(True, each.num_samples, each.num_tokens) for each in member.followers]
    for has_lease, num_samples, num_tokens in works:
        if num_samples > (max_samples if has_lease else 0) or num_tokens > num_samples * tokens_per_sample:
            return "it claims more tokens or samples than its lease has"
    for each in member.followers:
        heads = clusters.dealt.get(leased[each.place], ()) if each.place < len(leased) else ()
        if member.peer_id not in heads:
            return "it claims the work of a trainer that does not follow it"
    if len(member.newcomers) > clusters.num_newcomers(member.peer_id):
        return "it brings more newcomers than it has room for"
    if any(peer in leased or peer in clusters.heads for peer in member.newcomers):
        return "it brings a newcomer that is in the run"
    return ""


def drawn(beacon: bytes, peer: str) -> bytes:
    """Return the number that `peer` draws from `beacon`. The lowest number comes first."""
    return hashlib.sha256(beacon + peer.encode()).digest()


def _leased_at(leased: Sequence[str], place: int) -> str:
    if place >= len(leased):
        raise RoundError(f"a group names the trainer at place {place} of {len(leased)} leases")
    return leased[place]


def _heads_of(heads: Sequence[str], place: int) -> tuple[str, ...]:
    num_heads = len(heads)
    if num_heads == 1:
        return (heads[0],)
    turn, first = divmod(place, num_heads)
    return heads[first], heads[(first + 1 + turn % (num_heads - 1)) % num_heads]
