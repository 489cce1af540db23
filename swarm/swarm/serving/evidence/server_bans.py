"""The servers whom evidence convicts: each with its verdict, the evidence, and until when it is not asked.

Everybody who holds the evidence derives the same time from it. Bounded: anyone can make keys that convict themselves,
so servers that nobody lists have few places, and never those of others. Values only; times are Unix seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from swarm_protocol import limits

from swarm.serving.manifest.possession import ServerVerdict

MAX_UNLISTED = 32
"""Bans beyond which none is added of a server that is not listed: it may be away, and is listed when it is back."""

MAX_EVIDENCE_BYTES = 16 * 2**20
"""A manifest has some kilobytes, 512 KiB at most."""

RENEWAL_S = 86400.0
"""A later statement replaces one that is older by this much: a liar signs ever new ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerBan:
    """`data` is the encoded Evidence for `verdict`."""

    verdict: ServerVerdict
    data: bytes


class ServerBans:
    """The bans of one node. A ban that is over at the time that is given is as if it were not there."""

    def __init__(self) -> None:
        self._bans: dict[str, ServerBan] = {}

    def is_news(self, peer_id: str, at: float) -> bool:
        """Return whether a lie of the peer at `at` would make a ban that is not here, or make one longer."""
        held = self._bans.get(peer_id)
        return held is None or at >= held.verdict.at + RENEWAL_S

    def add(self, ban: ServerBan, listed: Collection[str]) -> frozenset[str] | None:
        """Add a ban in place of an earlier one of its server; return the servers that gave way to it, those first that
        are not `listed`, and then those of the earliest lies.

        Return None, and change nothing, if it has no place: it would itself give way first, or is of one server more
        that is not listed than MAX_UNLISTED. The order is one of all bans, so that no two displace each other in turn,
        which would be news to every node each time.
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
        """Return the bans that hold, newest evidence last."""
        return tuple(ban for ban in self._bans.values() if ban.verdict.until > now)

    def peers(self, now: float) -> frozenset[str]:
        """Return who is banned."""
        return frozenset(ban.verdict.peer_id for ban in self.at(now))

    def lapse(self, now: float) -> frozenset[str]:
        """Forget the bans that are over, and return whose they were."""
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
