"""Holds what a committed state keeps of a run's trainers beside their leases and their probation.

`credits` is a memory of proven members. A member earns one for each outer step to which it contributes while it counts
fully, up to its run's `absence_steps`, and uses up one for each step that is made while it is away. While it has an
entry it is remembered: it comes back at full weight. So who was there for long may be away for long, and a key that has
just proven itself is soon forgotten. Strangers have no entry at all. Of the members that are away, those with the most
credits stay, so that newcomers displace nobody who has done more.

All replicas hold the same register, as a part of the state's manifest. Values and pure functions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from swarm_protocol import limits
from swarm_protocol.checks import check_int
from swarm_protocol.identity import check_peer_id

from swarm.training.standing.entrance import MAX_ALL_REVOKED, MAX_ENTRIES, MAX_SERIALS, Entry

MAX_AWAY = 1024
"""Members that are remembered while they are away: four full groups, 60 KiB of a state's manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """`credits` are by peer, in the order of peer ids. `entries` say who entered by an invitation or by vouches, the
    newest ones last (see `entrance`), and `uses` by serial how many did before them. `revoked` are serials of
    invitations and `revoked_inviters` keys that the run's author has taken back, the newest ones last."""

    credits: tuple[tuple[str, int], ...] = ()
    entries: tuple[Entry, ...] = ()
    uses: tuple[tuple[int, int], ...] = ()
    revoked: tuple[int, ...] = ()
    revoked_inviters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError."""
        peers = [peer for peer, _ in self.credits]
        if peers != sorted(set(peers)):
            raise ValueError("the credits are not in the order of distinct peers")
        for peer, value in self.credits:
            check_peer_id(peer)
            check_int(value, "credits", high=limits.MAX_ABSENCE_STEPS)
        serials = [serial for serial, _ in self.uses]
        # the entries that are there when the last group of new serials comes, and that group, are counted in the end
        most = MAX_SERIALS + MAX_ENTRIES + limits.MAX_CREDENTIALS
        if serials != sorted(set(serials)) or len(serials) > most:
            raise ValueError("the uses are too many, or not in the order of distinct serials")
        for serial, count in self.uses:
            check_int(serial, "uses", low=1, high=2**64 - 1)
            check_int(count, "uses", low=1, high=2**53)
        for serial in self.revoked:
            check_int(serial, "revoked", low=1, high=2**64 - 1)
        for peer in self.revoked_inviters:
            check_peer_id(peer)
        if len(self.revoked) > MAX_ALL_REVOKED or len(self.revoked_inviters) > MAX_ALL_REVOKED:
            raise ValueError("the revocations are too many")
        entered = [each.peer_id for each in self.entries]
        if len(entered) > MAX_ENTRIES or len(entered) != len(set(entered)):
            raise ValueError("the entries are too many, or name a peer twice")

    def to_json(self) -> dict[str, Any]:
        """Return what a manifest says of it: nothing, if there is nothing."""
        head: dict[str, Any] = {"credits": self.credits} if self.credits else {}
        head |= {"entries": [each.to_json() for each in self.entries]} if self.entries else {}
        head |= {"uses": [[f"{serial:016x}", count] for serial, count in self.uses]} if self.uses else {}
        head |= {"revoked": [f"{serial:016x}" for serial in self.revoked]} if self.revoked else {}
        return head | ({"revoked_inviters": self.revoked_inviters} if self.revoked_inviters else {})

    @classmethod
    def from_json(cls, head: Mapping[str, Any]) -> Register:
        """Raises ValueError, TypeError or LookupError."""
        return cls(
            credits=tuple((peer, value) for peer, value in head.get("credits", ())),
            entries=tuple(map(Entry.from_json, head.get("entries", ()))),
            uses=tuple((int(serial, 16), count) for serial, count in head.get("uses", ())),
            revoked=tuple(int(serial, 16) for serial in head.get("revoked", ())),
            revoked_inviters=tuple(head.get("revoked_inviters", ())),
        )


def credits_after(
    before: Mapping[str, int],
    *,
    most: int,
    proven: Collection[str],
    unproven: Collection[str],
    contributors: Collection[str],
    num_steps: int,
) -> tuple[tuple[str, int], ...]:
    """Return the credits after a round that made `num_steps` outer steps, 0 or 1.

    `proven` and `unproven` are the trainers that are there afterwards, and `contributors` those of all that have
    contributed. Nobody has more than `most`; 0: the run remembers nobody.
    """
    if not most:
        return ()
    here = {
        peer: min(most, before.get(peer, 0) + (peer in contributors))
        for peer in proven
        if peer in before or peer in contributors
    }
    away = {
        peer: value - num_steps
        for peer, value in before.items()
        if peer not in proven and peer not in unproven and value >= num_steps
    }
    longest = sorted(away, key=lambda peer: (-away[peer], peer))[:MAX_AWAY]
    kept = here | {peer: away[peer] for peer in longest}
    return tuple((peer, kept[peer]) for peer in sorted(kept))
