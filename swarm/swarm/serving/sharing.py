"""How the peers that ask a server for sessions share it.

Alone, a peer may take all there is. While another one has a session, or was lately refused for want of room, nobody
gets more than half of the sessions and half of the cache by what is opened from then on; one session, of any size that
fits, everyone may have. Nothing open is ended for it: answers take seconds, so room comes back soon. A peer is
whoever holds an identity, and a gateway is one peer, however many people it asks for; against somebody who makes up
identities this is no defence.

No clock and no tasks of its own: used by `server`, in its loop.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from swarm_protocol.errors import PeerRefused

RETRY_AFTER_S = 5.0
"""A usual answer takes some seconds, and then its cache room is free."""

WAIT_S = 2 * RETRY_AFTER_S
"""Who was refused counts as waiting for this long: until it has asked again, and some more."""


class Held(Protocol):
    """What an open session holds."""

    peer_id: str
    max_tokens: int


class Sharing:
    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._waiting = ""
        self._waits_until_s = 0.0

    def check(self, peer_id: str, max_tokens: int, held: Collection[Held], room_tokens: int, *, now_s: float) -> None:
        """Whether the peer may open a session of `max_tokens` beside those `held`; the cache is of `room_tokens`.

        Raises PeerRefused.
        """
        free_tokens = max(0, room_tokens - sum(session.max_tokens for session in held))
        own = [session for session in held if session.peer_id == peer_id]
        if max_tokens > free_tokens or len(held) >= self._max_sessions:
            if not own:
                self._waiting, self._waits_until_s = peer_id, now_s + WAIT_S
            raise PeerRefused(
                f"the server has cache room for {free_tokens} more tokens and is asked for {max_tokens}",
                remedy="ask another server, or later",
                retry_after_s=RETRY_AFTER_S,
            )
        num_tokens = max_tokens + sum(session.max_tokens for session in own)
        is_over_half = 2 * (len(own) + 1) > self._max_sessions or 2 * num_tokens > room_tokens
        if own and is_over_half and (len(own) < len(held) or self._others_wait(peer_id, now_s)):
            raise PeerRefused(
                f"others ask too, and {len(own)} sessions of yours hold what one peer may then have here",
                remedy="ask another server, or later",
                retry_after_s=RETRY_AFTER_S,
            )

    def _others_wait(self, peer_id: str, now_s: float) -> bool:
        return self._waiting != peer_id and now_s < self._waits_until_s
