"""The servers that evidence convicts: each with the verdict and its evidence.

The end of a ban follows from the evidence, so it is the same for all nodes that hold the same evidence. A node with
evidence of an earlier lie takes that of a later one when its own ban has ended and it asks again. Anyone can make keys
that convict themselves, so bans of servers that are not listed are few, and displace no others. Values only; times are
Unix seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from swarm_protocol import limits

from swarm.serving.manifest.possession import ServerVerdict

MAX_UNLISTED = 32
"""Maximum bans of servers that are not listed. Such a server may be away, and be listed again when it returns."""

MAX_EVIDENCE_BYTES = 16 * 2**20
"""Maximum evidence in all. Each piece contains a manifest of some kilobytes, 512 KiB at most."""

RENEWAL_S = 86400.0
"""A statement replaces one that is older by at least this much. A liar may sign new ones all the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerBan:
    """`data` is the encoded Evidence for `verdict`."""

    verdict: ServerVerdict
    data: bytes


class ServerBans:
    """The bans of one node. Methods ignore bans that have ended at `now`."""

    def __init__(self) -> None:
        self._bans: dict[str, ServerBan] = {}

    def is_news(self, peer_id: str, at: float) -> bool:
        """Return whether a lie of the peer at `at` would make a new ban, or extend one by RENEWAL_S or more."""
        held = self._bans.get(peer_id)
        return held is None or at >= held.verdict.at + RENEWAL_S

    def add(self, ban: ServerBan, listed: Collection[str]) -> frozenset[str] | None:
        """Add a ban, in place of an earlier one of its server, and return the servers whose bans it displaced: first
        those that are not `listed`, then those of the earliest lies.

        Return None, and change nothing, if there is no room: the ban itself would be displaced first, or there are
        MAX_UNLISTED bans of other servers that are not listed. All bans have one order, so no two can displace each
        other in turn, which would be news to every node each time.
        """
        peer_id = ban.verdict.peer_id
        bans = {peer: held for peer, held in self._bans.items() if peer != peer_id}
        is_new_stranger = peer_id not in listed and peer_id not in self._bans
        if is_new_stranger and len(set(bans).difference(listed)) >= MAX_UNLISTED:
            return None
        bans[peer_id] = ban
        while len(bans) > limits.MAX_SERVER_BANS or _num_bytes(bans) > MAX_EVIDENCE_BYTES:
            first = min(bans, key=lambda peer: (peer in listed, bans[peer].verdict.at, peer))
            if first == peer_id:
                return None
            del bans[first]
        displaced = frozenset(set(self._bans).difference(bans))
        self._bans = bans
        return displaced

    def at(self, now: float) -> tuple[ServerBan, ...]:
        """Return the bans that hold at `now`, newest evidence last."""
        return tuple(ban for ban in self._bans.values() if ban.verdict.until > now)

    def peers(self, now: float) -> frozenset[str]:
        """Return the servers that are banned at `now`."""
        return frozenset(ban.verdict.peer_id for ban in self.at(now))

    def lapse(self, now: float) -> frozenset[str]:
        """Forget the bans that have ended, and return their servers."""
        lapsed = frozenset(self._bans) - self.peers(now)
        for peer_id in lapsed:
            del self._bans[peer_id]
        return lapsed

    def unknown_to(self, known: Iterable[str], now: float) -> tuple[ServerBan, ...]:
        """Return the bans of peers that are not among `known`."""
        held = frozenset(known)
        return tuple(ban for ban in self.at(now) if ban.verdict.peer_id not in held)


def _num_bytes(bans: Mapping[str, ServerBan]) -> int:
    return sum(len(ban.data) for ban in bans.values())
