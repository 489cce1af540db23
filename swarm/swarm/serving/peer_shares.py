"""Shares a server's sequences, pages and places for grammars among the peers that ask for sessions. Decisions only, for
the engine and the grammars."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import Protocol, TypeVar

from swarm_protocol.errors import PeerRefused

RETRY_AFTER_S = 5.0
"""A typical answer takes some seconds. Then its pages are free."""

WAIT_S = 2 * RETRY_AFTER_S
"""Time for which a refused client counts as waiting: until it has asked again, and some more."""


class Held(Protocol):
    """A sequence of a client, with its pages and perhaps the place of a grammar. `since_s` and `idle_since_s` are times
    of the loop's clock."""

    client: str
    since_s: float
    idle_since_s: float

    @property
    def num_pages(self) -> int: ...

    @property
    def is_idle(self) -> bool: ...

    def evict(self, *, lacks_room: bool) -> None: ...


H = TypeVar("H", bound=Held)


class PeerShares:
    """Shares `max_sequences` and `num_pages` of a server among the peers that ask for sessions.

    A peer that is alone may take everything. While another peer has a session, or was recently refused for lack of
    room, a peer may open no session beyond half of the sessions or half of the pages, except that each may have one
    session of any size that fits. Answers take seconds, so room is soon free. But an answer may grow for minutes: while
    another peer waits, no session grows if its peer then holds over half. And a peer may keep sessions open on purpose:
    where another one needs room, `evictable` names those to end.
    A peer is an identity: a gateway is one peer for all its users, and this is no defence against made-up identities.
    """

    def __init__(
        self,
        max_sequences: int,
        num_pages: int = sys.maxsize,
        *,
        what: str = "sessions",
        lacks_room: bool = True,
        evict_idle_s: float = 10.0,
        evict_old_s: float = 60.0,
    ) -> None:
        """`what` names what is shared in a refusal. `lacks_room` is False for all but the cache of keys and values: an
        answer that lacks room for these ends early."""
        self.max_sequences = max_sequences
        self._num_pages = num_pages
        self._evict_idle_s, self._evict_old_s = evict_idle_s, evict_old_s
        self._what = what
        self._lacks_room = lacks_room
        self._waiting = ""
        self._waits_until_s = 0.0

    def check(self, client: str, num_pages: int, held: Collection[Held], *, now_s: float) -> None:
        """Check that the client may have another sequence of `num_pages` beside those `held`. Does not check for free
        room.

        Raises PeerRefused.
        """
        self.check_size(num_pages)
        num_own = sum(sequence.client == client for sequence in held)
        is_over_half = self.is_over_half(client, num_pages, held, num_more=1)
        if num_own and is_over_half and (num_own < len(held) or self._others_wait(client, now_s)):
            raise PeerRefused(
                f"other peers are waiting, and your {num_own} {self._what} already use the share of one peer",
                remedy="ask another server, or later",
                retry_after_s=RETRY_AFTER_S,
                lacks_room=self._lacks_room,
            )

    def is_over_half(self, client: str, num_pages: int, held: Collection[Held], *, num_more: int = 0) -> bool:
        """Return whether the client has over half of the sequences or pages, with `num_pages` and `num_more` sequences
        beside those `held`."""
        own = [sequence for sequence in held if sequence.client == client]
        wanted = num_pages + sum(sequence.num_pages for sequence in own)
        return 2 * (len(own) + num_more) > self.max_sequences or 2 * wanted > self._num_pages

    def check_size(self, num_pages: int) -> None:
        """Raise PeerRefused for a sequence that would have no room here even if it was alone."""
        if num_pages > self._num_pages:
            raise PeerRefused(
                f"a session of {num_pages} pages is over the {self._num_pages} pages of this server",
                remedy="ask another server, or for fewer tokens",
                lacks_room=True,
            )

    def check_growth(self, client: str, num_more: int, held: Collection[Held], *, now_s: float) -> None:
        """Check that a sequence of the client, which is among those `held`, may get `num_more` pages. Does not check
        for free room.

        Raises PeerRefused.
        """
        wanted = num_more + sum(sequence.num_pages for sequence in held if sequence.client == client)
        if 2 * wanted > self._num_pages and self._others_wait(client, now_s):
            raise PeerRefused(
                f"other peers are waiting, and your {self._what} use more than half of the cache",
                remedy="ask another server, or later",
                retry_after_s=RETRY_AFTER_S,
                lacks_room=True,
            )

    def refused(
        self,
        client: str,
        num_pages: int,
        held: Collection[Held],
        *,
        now_s: float,
        num_more: int = 0,
        retry_after_s: float = RETRY_AFTER_S,
    ) -> PeerRefused:
        """Return the refusal for a client for which there is no room now, and call `wait`. It wants `num_pages`, and
        `num_more` sequences beside those `held`."""
        self.wait(client, held, now_s=now_s)
        pages = f"{num_pages} more page{'' if num_pages == 1 else 's'}"
        are_all_open = len(held) + num_more > self.max_sequences
        why = f"all {self.max_sequences} sessions are open" if are_all_open else f"its cache has no room for {pages}"
        return PeerRefused(
            f"the server is full: {why}",
            remedy="ask another server, or later",
            retry_after_s=retry_after_s,
            lacks_room=True,
        )

    def wait(self, client: str, held: Collection[Held], *, now_s: float) -> None:
        """Note that a client was refused for lack of room. If it holds nothing, it counts as waiting."""
        if all(sequence.client != client for sequence in held):
            self._waiting, self._waits_until_s = client, now_s + WAIT_S

    def evictable(self, client: str, num_pages: int, held: Collection[H], *, now_s: float) -> Iterator[H]:
        """Yield the sequences to end for a client that needs `num_pages` more: those of others that have been idle for
        long, the longest idle first; then old ones of a peer beyond half of the server, if the client then has at most
        half."""
        others = [sequence for sequence in held if sequence.client != client]
        idle = [each for each in others if each.is_idle and now_s - each.idle_since_s >= self._evict_idle_s]
        yield from sorted(idle, key=lambda sequence: sequence.idle_since_s)
        left = dict.fromkeys(each for each in held if each not in idle)
        if self.is_over_half(client, num_pages, left):
            return
        for sequence in others:
            if (
                sequence in left
                and now_s - sequence.since_s >= self._evict_old_s
                and self.is_over_half(sequence.client, 0, left)
            ):
                del left[sequence]
                yield sequence

    def _others_wait(self, client: str, now_s: float) -> bool:
        return self._waiting != client and now_s < self._waits_until_s
