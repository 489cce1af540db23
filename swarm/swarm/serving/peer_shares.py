"""Shares a server's sequences, pages and places for grammars among the peers that ask for sessions. Decisions only, for
the engine and the grammars."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from swarm_protocol.errors import PeerRefused

from swarm.newest_items import NewestItems

RETRY_AFTER_S = 2.0
"""Room that is freed is kept for a client that waits, so it is used no sooner than that client asks again."""

WAIT_S = 3 * RETRY_AFTER_S
"""Time for which a refused client counts as waiting: until it has asked again, and some more."""

KEPT_AFTER_S = WAIT_S
"""Time for which a session is asked for in vain until room is kept for it. Smaller ones use what is freed before."""

KEPT_UNTIL_S = 20.0
"""Time after which room is no longer kept for it, so that none lies idle in vain. Clients give up after as long."""

KEPT_S = KEPT_UNTIL_S - KEPT_AFTER_S

REST_S = 60.0
"""Time after which room is kept again for a peer for which it was kept in vain, so that one that asks for too much
again and again takes little from the others."""

MAX_WAITING = 1024
"""Maximum peers, and sessions, that are remembered as waiting: the last ones."""


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


@dataclass(frozen=True, slots=True)
class _Turn:
    """The first refusal of a sequence that is asked for again and again, and the last one."""

    since_s: float
    last_s: float

    def is_kept(self, now_s: float) -> bool:
        return now_s < self.last_s + WAIT_S and KEPT_AFTER_S <= now_s - self.since_s < KEPT_UNTIL_S


class PeerShares(Generic[H]):
    """Shares `max_sequences` and `num_pages` of a server, which has the sequences `held`, among the peers that ask for
    sessions.

    A peer may take all room that no other peer asks for, but for `num_kept` places. These are for peers that hold none,
    which would otherwise find no place for as long as the answers of others take, and that may be minutes.

    While another peer waits, a peer opens no session beyond its equal share: the other places and the pages, each
    divided by the number of peers that hold some. All that wait and hold nothing count as one more, so that peers which
    only ask, however many, cost the others no more than one does. Each peer may have one session of any size that fits.
    A peer waits from when it was refused for lack of room within its share until it is admitted, for WAIT_S at most. So
    what is freed goes to those that wait.

    Small sessions fit in what is freed, and a large one might wait for ever. So once one was asked for in vain for
    KEPT_AFTER_S, its pages are kept for it until KEPT_UNTIL_S, but half of all pages at most: of several for the one
    that was asked for first. Other sessions of its peer, such as those of a gateway's other users, must leave them, and
    while that peer waits those of others, too. After KEPT_S in vain, nothing is kept for the peer for REST_S.

    No session is ended or kept from growing for the equal share. Answers take seconds, so room is soon free. But an
    answer may grow for minutes: while another peer waits, no session grows if its peer then holds over half. And a peer
    may keep sessions open on purpose: where another one needs room, `evictable` names those to end.
    A peer is an identity: a gateway is one peer for all its users, and this is no defence against made-up identities.
    """

    def __init__(
        self,
        held: Collection[H],
        max_sequences: int,
        num_pages: int = sys.maxsize,
        *,
        num_kept: int = 0,
        what: str = "sessions",
        lacks_room: bool = True,
        evict_idle_s: float = 10.0,
        evict_old_s: float = 60.0,
    ) -> None:
        """`what` names what is shared in a refusal. `lacks_room` is False for all but the cache of keys and values: an
        answer that lacks room for these ends early."""
        self.max_sequences = max_sequences
        self._held = held
        self._num_shared = max_sequences - num_kept
        self._num_pages = num_pages
        self._evict_idle_s, self._evict_old_s = evict_idle_s, evict_old_s
        self._what = what
        self._lacks_room = lacks_room
        self._waits_until_s = NewestItems[str, float](MAX_WAITING)
        self._turns = NewestItems[tuple[str, int], _Turn](MAX_WAITING)  # by client and pages
        self._kept_since_s = NewestItems[str, float](MAX_WAITING)  # by client

    def check(self, client: str, num_pages: int, *, now_s: float) -> None:
        """Check that the client may have another sequence of `num_pages`. Does not check for free room.

        Raises PeerRefused.
        """
        self.check_size(num_pages)
        if self._others_waiting(client, now_s) and self._is_beyond_share(client, num_pages, 1, now_s):
            num_own = sum(sequence.client == client for sequence in self._held)
            raise PeerRefused(
                f"other peers are waiting, and your {num_own} {self._what} already use the share of one peer",
                remedy="ask another server, or later",
                retry_after_s=RETRY_AFTER_S,
                lacks_room=self._lacks_room,
            )

    def check_turn(self, client: str, num_pages: int, *, num_free: int, now_s: float) -> None:
        """Check that another sequence of `num_pages` leaves the free pages that are kept for an earlier one.

        Raises PeerRefused.
        """
        kept = self._num_kept_pages(client, num_pages, now_s)
        if kept and num_free < num_pages + kept:
            raise self.refused(client, num_pages, now_s=now_s, num_more=1)

    def places_for(self, client: str) -> int:
        """Return how many sequences may be open, with those of others, for the client to have one more."""
        has_some = any(sequence.client == client for sequence in self._held)
        return self._num_shared if has_some else self.max_sequences

    def check_size(self, num_pages: int) -> None:
        """Raise PeerRefused for a sequence that would have no room here even if it was alone."""
        if num_pages > self._num_pages:
            raise PeerRefused(
                f"a session of {num_pages} pages is over the {self._num_pages} pages of this server",
                remedy="ask another server, or for fewer tokens",
                lacks_room=True,
            )

    def check_growth(self, client: str, num_more: int, *, now_s: float) -> None:
        """Check that a sequence of the client may get `num_more` pages. Does not check for free room.

        Raises PeerRefused.
        """
        wanted = num_more + sum(sequence.num_pages for sequence in self._held if sequence.client == client)
        if 2 * wanted > self._num_pages and self._others_waiting(client, now_s):
            raise PeerRefused(
                f"other peers are waiting, and your {self._what} use more than half of the cache",
                remedy="ask another server, or later",
                retry_after_s=RETRY_AFTER_S,
                lacks_room=True,
            )

    def refused(
        self, client: str, num_pages: int, *, now_s: float, num_more: int = 0, retry_after_s: float = RETRY_AFTER_S
    ) -> PeerRefused:
        """Return the refusal for a client for which there is no room now, and call `wait`. It wants `num_pages`, and
        `num_more` sequences."""
        self.wait(client, num_pages, num_more=num_more, now_s=now_s)
        pages = f"{num_pages} more page{'' if num_pages == 1 else 's'}"
        places = self.places_for(client)
        kept = "" if places == self.max_sequences else f", but for {self.max_sequences - places} for peers without any"
        all_open = f"all {self.max_sequences} sessions are open{kept}"
        why = all_open if len(self._held) + num_more > places else f"its cache has no room for {pages}"
        return PeerRefused(
            f"the server is full: {why}",
            remedy="ask another server, or later",
            retry_after_s=retry_after_s,
            lacks_room=True,
        )

    def wait(self, client: str, num_pages: int, *, num_more: int, now_s: float) -> None:
        """Note that a client was refused for lack of room. Within its share, it counts as waiting."""
        if not self._is_beyond_share(client, num_pages, num_more, now_s):
            self._waits_until_s[client] = now_s + WAIT_S
        if not num_more:
            return  # what grows takes no turn: it is often refused, and then goes on elsewhere
        turn = self._turns.get((client, num_pages))
        if turn is None or now_s >= min(turn.last_s + WAIT_S, turn.since_s + KEPT_UNTIL_S):
            turn = _Turn(now_s, now_s)
        self._turns[client, num_pages] = _Turn(turn.since_s, now_s)

    def admitted(self, client: str, num_pages: int, *, now_s: float) -> None:
        """Note that a client was given what it asked for, so that it waits no more."""
        self._waits_until_s.pop(client, None)
        turn = self._turns.pop((client, num_pages), None)
        if turn is not None and turn.is_kept(now_s):
            self._kept_since_s.pop(client, None)

    def evictable(self, client: str, num_pages: int, *, now_s: float) -> Iterator[H]:
        """Yield the sequences to end for a client that needs `num_pages` more: those of others that have been idle for
        long, the longest idle first; then old ones of a peer beyond half of the server, if the client then has at most
        half."""
        others = [sequence for sequence in self._held if sequence.client != client]
        idle = [each for each in others if each.is_idle and now_s - each.idle_since_s >= self._evict_idle_s]
        yield from sorted(idle, key=lambda sequence: sequence.idle_since_s)
        left = dict.fromkeys(each for each in self._held if each not in idle)
        if self._exceeds(client, num_pages, left):
            return
        for sequence in others:
            if (
                sequence in left
                and now_s - sequence.since_s >= self._evict_old_s
                and self._exceeds(sequence.client, 0, left)
            ):
                del left[sequence]
                yield sequence

    def _exceeds(
        self, client: str, num_pages: int, held: Collection[Held], *, num_more: int = 0, num_peers: int = 2
    ) -> bool:
        """Return whether the client has over a share of `num_peers` in the sequences or pages, with `num_pages` and
        `num_more` sequences beside those `held`."""
        own = [sequence for sequence in held if sequence.client == client]
        wanted = num_pages + sum(sequence.num_pages for sequence in own)
        return num_peers * (len(own) + num_more) > self._num_shared or num_peers * wanted > self._num_pages

    def _is_beyond_share(self, client: str, num_pages: int, num_more: int, now_s: float) -> bool:
        peers = {sequence.client for sequence in self._held}
        num_peers = len(peers) + any(peer not in peers for peer in self._others_waiting(client, now_s))
        return client in peers and self._exceeds(client, num_pages, self._held, num_more=num_more, num_peers=num_peers)

    def _num_kept_pages(self, client: str, num_pages: int, now_s: float) -> int:
        """Return how many free pages a sequence of `num_pages` must leave for the one that was asked for first."""
        waiting = {client, *self._others_waiting(client, now_s)}
        waiting = {peer for peer in waiting if not KEPT_S <= self._kept_for_s(peer, now_s) < KEPT_S + REST_S}
        turns = {key: turn.since_s for key, turn in self._turns.items() if key[0] in waiting and turn.is_kept(now_s)}
        first = min(turns, key=turns.__getitem__, default=(client, num_pages))
        if first == (client, num_pages):
            return 0
        if self._kept_for_s(first[0], now_s) >= KEPT_S:
            self._kept_since_s[first[0]] = now_s
        return min(first[1], self._num_pages // 2)

    def _kept_for_s(self, client: str, now_s: float) -> float:
        return now_s - self._kept_since_s.get(client, -math.inf)

    def _others_waiting(self, client: str, now_s: float) -> list[str]:
        return [peer for peer, until_s in self._waits_until_s.items() if peer != client and now_s < until_s]
