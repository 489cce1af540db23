"""How the peers that ask a server for seats share it.

Alone, a peer may take all there is. While another one has a seat, or was lately refused for want of room, nobody gets
more than half of the seats and half of the pages by what is opened from then on; one seat, of any size that fits,
everyone may have. Nothing in use is ended for it: answers take seconds, so room comes back soon. A peer is whoever
holds an identity, and a gateway is one peer, however many people it asks for; against somebody who makes up
identities this is no defence.

No clock and no tasks of its own: the engine uses it in its loop.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from swarm_protocol.errors import PeerRefused

RETRY_AFTER_S = 5.0
"""A usual answer takes some seconds, and then its pages are free."""

WAIT_S = 2 * RETRY_AFTER_S
"""Who was refused counts as waiting for this long: until it has asked again, and some more."""


class Held(Protocol):
    """What an open seat holds."""

    @property
    def client(self) -> str: ...

    @property
    def num_pages(self) -> int: ...


class Admission:
    """For a server of `max_seats` and `num_pages`."""

    def __init__(self, max_seats: int, num_pages: int) -> None:
        self.max_seats = max_seats
        self._num_pages = num_pages
        self._waiting = ""
        self._waits_until_s = 0.0

    def check(self, client: str, num_pages: int, held: Collection[Held], *, now_s: float) -> None:
        """Whether the client may have another seat of `num_pages` beside those `held`, if there is room.

        Raises PeerRefused.
        """
        if num_pages > self._num_pages:
            raise PeerRefused(
                f"a session of {num_pages} pages is over the {self._num_pages} that this server has",
                remedy="ask another server, or for fewer tokens",
            )
        own = [seat for seat in held if seat.client == client]
        wanted = num_pages + sum(seat.num_pages for seat in own)
        is_over_half = 2 * (len(own) + 1) > self.max_seats or 2 * wanted > self._num_pages
        if own and is_over_half and (len(own) < len(held) or self._others_wait(client, now_s)):
            raise PeerRefused(
                f"others ask too, and {len(own)} sessions of yours hold what one peer may then have here",
                remedy="ask another server, or later",
                retry_after_s=RETRY_AFTER_S,
            )

    def refused(self, client: str, num_pages: int, held: Collection[Held], *, now_s: float) -> PeerRefused:
        """What to tell a client for whom there is no room now. If it has nothing here, it counts as waiting."""
        if all(seat.client != client for seat in held):
            self._waiting, self._waits_until_s = client, now_s + WAIT_S
        return PeerRefused(
            f"the server is full: {len(held)} of {self.max_seats} sessions are open, and {num_pages} more pages of "
            "cache are asked for than are free",
            remedy="ask another server, or later",
            retry_after_s=RETRY_AFTER_S,
        )

    def _others_wait(self, client: str, now_s: float) -> bool:
        return self._waiting != client and now_s < self._waits_until_s
