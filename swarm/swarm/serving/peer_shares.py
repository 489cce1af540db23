"""Shares a server's sequences, pages and places for grammars among the peers that ask for sessions. Decisions only, for
the engine and the grammars.

Keys cost nothing, but addresses in many providers' networks do. So the networks of the peers share first, and in each
network its peers, both by the same rules: however many keys one network has, they cost other networks what one peer
costs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

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
"""Time after which room is kept again for a peer, or a network, for which it was kept in vain, so that one that asks
for too much again and again takes little from the others."""

MAX_WAITING = 1024
"""Maximum networks and peers that are remembered as waiting: the last ones."""

MAX_TURNS = 8
"""Maximum sizes of sessions in turn for room that are remembered of one peer: the largest ones."""


class Sharer(NamedTuple):
    """A peer, and the provider's network from which it is connected: one of its own, such as its peer id, where that is
    not known."""

    network: Hashable
    peer_id: str


Party = tuple[Hashable, ...]
"""A party of a level: `sharer[:1]` names a network, and `sharer[:2]` a peer. `()` names all peers together."""

Limits = tuple[int, int, int]
"""Limits of what all peers, those of one network, and one peer may hold."""


def byte_limits(num_bytes: int) -> Limits:
    """Return the limits where all may hold `num_bytes`: three quarters for those of one network, half for one peer."""
    return num_bytes, 3 * num_bytes // 4, num_bytes // 2


def over_limit(
    held: Collection[tuple[Sharer, int]], sharer: Sharer, num_more: int, limits: Limits
) -> Literal["", "peer", "network", "all"]:
    """Return who would hold too much if `sharer` had `num_more` beside what is `held`: "" if nobody would. A network
    or a peer that holds nothing may have any amount that is left for all."""
    levels: tuple[Literal["all", "network", "peer"], ...] = "all", "network", "peer"
    for depth in (2, 1, 0):
        num_own = sum(num for other, num in held if other[:depth] == sharer[:depth])
        if (num_own or not depth) and num_own + num_more > limits[depth]:
            return levels[depth]
    return ""


class Held(Protocol):
    """A sequence of a peer, with its pages and perhaps the place of a grammar. `since_s` and `idle_since_s` are times
    of the loop's clock."""

    sharer: Sharer
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
    """A size of sequences that a peer asks for again and again: the first refusal, and the last one."""

    since_s: float
    last_s: float

    def is_over(self, now_s: float) -> bool:
        return now_s >= min(self.last_s + WAIT_S, self.since_s + KEPT_UNTIL_S)

    def is_kept(self, now_s: float) -> bool:
        return KEPT_AFTER_S <= now_s - self.since_s < KEPT_UNTIL_S and now_s < self.last_s + WAIT_S


class _Level:
    """The parties that share with each other: all networks (`depth` 1), or the peers of each network (2)."""

    def __init__(self, depth: int, what: str, whose: str) -> None:
        self.depth = depth
        self.what, self.whose = what, whose  # in refusals
        self.waits_until_s = NewestItems[Party, float](MAX_WAITING)
        self.kept_since_s = NewestItems[Party, float](MAX_WAITING)

    def shares_with(self, sharer: Party, other: Party) -> bool:
        return sharer[: self.depth - 1] == other[: self.depth - 1]

    def own(self, sharer: Party, held: Collection[H]) -> list[H]:
        """Return the sequences of the party."""
        return [sequence for sequence in held if sharer[: self.depth] == sequence.sharer[: self.depth]]

    def rivals_waiting(self, sharer: Party, now_s: float) -> Iterator[Party]:
        """Yield the parties that wait and share with this one. Many keys may ask often, so few of them are looked
        at."""
        own, above = sharer[: self.depth], sharer[: self.depth - 1]
        for party, until_s in reversed(self.waits_until_s.items()):
            if now_s >= until_s:
                return  # as all that were noted before
            if party != own and party[: self.depth - 1] == above:
                yield party

    def has_rivals(self, sharer: Party, now_s: float) -> bool:
        """Return whether another party waits that shares with this one."""
        return next(self.rivals_waiting(sharer, now_s), None) is not None

    def kept_for_s(self, sharer: Party, now_s: float) -> float:
        return now_s - self.kept_since_s.get(sharer[: self.depth], -math.inf)


class PeerShares(Generic[H]):
    """Shares `max_sequences` and `num_pages` of a server, which has the sequences `held`, among the networks whose
    peers ask for sessions, and in each network among its peers. What follows holds for both: a party is a network among
    all, or a peer among those of its network.

    A party may take all room that no other party asks for, but for `num_kept` places. These are for parties that hold
    none, half of them for networks that hold none. They would otherwise find no place for as long as the answers of
    others take, and that may be minutes.

    While another party waits, a party opens no session beyond its equal share: the other places and the pages, each
    divided by the number of parties that hold some. All that wait and hold nothing count as one more, so that parties
    which only ask, however many, cost the others no more than one does. While another network waits, the peers of a
    network share its equal share, else all. Each network may have one session of any size that fits. A party waits from
    when it was refused for lack of room within its share until it is admitted, for WAIT_S at most; a network waits on
    while another of its peers does. So what is freed goes to those that wait.

    Small sessions fit in what is freed, and a large one might wait for ever. So once one was asked for in vain for
    KEPT_AFTER_S, its pages are kept for it until KEPT_UNTIL_S, but half of all pages at most: of several for the one
    that was asked for first. Other sessions of its peer, such as those of a gateway's other users, must leave them, and
    while its party waits those of others, too. After KEPT_S in vain, nothing is kept for the party for REST_S.

    No session is ended or kept from growing for the equal share. Answers take seconds, so room is soon free. But an
    answer may grow for minutes: while another party waits, no session grows if its party then holds over half. And a
    party may keep sessions open on purpose: where another one needs room, `evictable` names those to end.

    A peer is an identity: a gateway is one peer for all its users. Peers that share a network with one that makes up
    many identities share that network's part of the server with all of them.
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
        self._num_kept, self._num_shared = num_kept, max_sequences - num_kept
        self._num_pages = num_pages
        self._evict_idle_s, self._evict_old_s = evict_idle_s, evict_old_s
        self._what = what
        self._lacks_room = lacks_room
        self._networks, self._peers = self._levels = _Level(1, "network", "your network's"), _Level(2, "peer", "your")
        self._turns = NewestItems[Sharer, dict[int, _Turn]](MAX_WAITING)  # by the pages of the sequence

    def check(self, sharer: Sharer, num_pages: int, *, now_s: float) -> None:
        """Check that a peer may have another sequence of `num_pages`. Does not check for free room.

        Raises PeerRefused.
        """
        self.check_size(num_pages)
        for level in self._levels:
            if level.has_rivals(sharer, now_s) and self._is_beyond_share(level, sharer, num_pages, 1, now_s):
                # it may still wait for other peers of its own network
                self._note_waiting(self._levels[level.depth :], sharer, num_pages, 1, now_s)
                num_own = len(level.own(sharer, self._held))
                raise self._refusal(level, f"{num_own} {self._what} already use the share of one {level.what}")

    def check_turn(self, sharer: Sharer, num_pages: int, *, num_free: int, now_s: float) -> None:
        """Check that another sequence of `num_pages` leaves the free pages that are kept for an earlier one.

        Raises PeerRefused.
        """
        kept = self._num_kept_pages(sharer, num_pages, now_s)
        if kept and num_free < num_pages + kept:
            raise self.refused(sharer, num_pages, now_s=now_s, num_more=1)

    def places_for(self, sharer: Sharer) -> int:
        """Return how many sequences may be open, with those of others, for a peer to have one more."""
        if self._peers.own(sharer, self._held):
            return self._num_shared
        num_left = (self._num_kept + 1) // 2 if self._networks.own(sharer, self._held) else 0
        return self.max_sequences - num_left

    def check_size(self, num_pages: int) -> None:
        """Raise PeerRefused for a sequence that would have no room here even if it was alone."""
        if num_pages > self._num_pages:
            raise PeerRefused(
                f"a session of {num_pages} pages is over the {self._num_pages} pages of this server",
                remedy="ask another server, or for fewer tokens",
                lacks_room=True,
            )

    def check_growth(self, sharer: Sharer, num_more: int, *, now_s: float) -> None:
        """Check that a sequence of a peer may get `num_more` pages. Does not check for free room.

        Raises PeerRefused.
        """
        for level in self._levels:
            if level.has_rivals(sharer, now_s):
                wanted = num_more + sum(sequence.num_pages for sequence in level.own(sharer, self._held))
                if 2 * wanted > self._num_pages:
                    raise self._refusal(level, f"{self._what} use more than half of the cache")

    def refused(
        self, sharer: Sharer, num_pages: int, *, now_s: float, num_more: int = 0, retry_after_s: float = RETRY_AFTER_S
    ) -> PeerRefused:
        """Return the refusal for a peer for which there is no room now, and call `wait`. It wants `num_pages`, and
        `num_more` sequences."""
        self.wait(sharer, num_pages, num_more=num_more, now_s=now_s)
        pages = f"{num_pages} more page{'' if num_pages == 1 else 's'}"
        places = self.places_for(sharer)
        kept = "" if places == self.max_sequences else f", but for {self.max_sequences - places} for those without any"
        all_open = f"all {self.max_sequences} sessions are open{kept}"
        why = all_open if len(self._held) + num_more > places else f"its cache has no room for {pages}"
        return PeerRefused(
            f"the server is full: {why}",
            remedy="ask another server, or later",
            retry_after_s=retry_after_s,
            lacks_room=True,
        )

    def wait(self, sharer: Sharer, num_pages: int, *, num_more: int, now_s: float) -> None:
        """Note that a peer was refused for lack of room. Within their shares, it and its network count as waiting."""
        self._note_waiting(self._levels, sharer, num_pages, num_more, now_s)
        if not num_more:
            return  # what grows takes no turn: it is often refused, and then goes on elsewhere
        turns = {size: turn for size, turn in self._turns.get(sharer, {}).items() if not turn.is_over(now_s)}
        turns[num_pages] = _Turn(turns[num_pages].since_s if num_pages in turns else now_s, now_s)
        if len(turns) > MAX_TURNS:
            del turns[min(turns)]
        self._turns[sharer] = turns

    def admitted(self, sharer: Sharer, num_pages: int, *, now_s: float) -> None:
        """Note that a peer was given what it asked for, so that it waits no more. Its network waits on with others."""
        self._peers.waits_until_s.pop(sharer[:2], None)
        if not self._peers.has_rivals(sharer, now_s):
            self._networks.waits_until_s.pop(sharer[:1], None)
        turn = self._turns.get(sharer, {}).pop(num_pages, None)
        if turn is not None and turn.is_kept(now_s):
            for level in self._levels:
                level.kept_since_s.pop(sharer[: level.depth], None)

    def evictable(self, sharer: Sharer, num_pages: int, *, now_s: float) -> Iterator[H]:
        """Yield the sequences to end for a peer that needs `num_pages` more: those of others that have been idle for
        long, the longest idle first; then old ones of a party beyond half of the server, if the peer's own party then
        has at most half."""
        others = [sequence for sequence in self._held if sequence.sharer != sharer]
        idle = [each for each in others if each.is_idle and now_s - each.idle_since_s >= self._evict_idle_s]
        yield from sorted(idle, key=lambda sequence: sequence.idle_since_s)
        left = dict.fromkeys(each for each in self._held if each not in idle)
        entitled = [level for level in self._levels if not self._exceeds(level.own(sharer, left), num_pages)]
        for sequence in others:
            level = self._level_between(sharer, sequence.sharer)
            if (
                level in entitled
                and sequence in left
                and now_s - sequence.since_s >= self._evict_old_s
                and self._exceeds(level.own(sequence.sharer, left), 0)
            ):
                del left[sequence]
                yield sequence

    def _level_between(self, sharer: Sharer, other: Sharer) -> _Level:
        """Return the level at which two peers share with each other."""
        return self._peers if sharer.network == other.network else self._networks

    def _note_waiting(
        self, levels: Collection[_Level], sharer: Sharer, num_pages: int, num_more: int, now_s: float
    ) -> None:
        for level in levels:
            if not self._is_beyond_share(level, sharer, num_pages, num_more, now_s):
                level.waits_until_s[sharer[: level.depth]] = now_s + WAIT_S

    def _exceeds(self, own: Collection[Held], num_pages: int, *, num_more: int = 0, num_parties: int = 2) -> bool:
        """Return whether a party has over a share of `num_parties` in the sequences or pages, with `num_pages` and
        `num_more` sequences beside its `own`."""
        wanted = num_pages + sum(sequence.num_pages for sequence in own)
        return num_parties * (len(own) + num_more) > self._num_shared or num_parties * wanted > self._num_pages

    def _is_beyond_share(self, level: _Level, sharer: Sharer, num_pages: int, num_more: int, now_s: float) -> bool:
        if not (own := level.own(sharer, self._held)):
            return False
        num_parties = self._num_parties(level, sharer, now_s)
        if level is self._peers and self._networks.has_rivals(sharer, now_s):
            num_parties *= self._num_parties(self._networks, sharer, now_s)
        return self._exceeds(own, num_pages, num_more=num_more, num_parties=num_parties)

    def _num_parties(self, level: _Level, sharer: Sharer, now_s: float) -> int:
        """Return the number of parties that hold some, with one more for all that wait and hold none."""
        holders = {each.sharer[: level.depth] for each in self._held if level.shares_with(sharer, each.sharer)}
        return len(holders) + any(party not in holders for party in level.rivals_waiting(sharer, now_s))

    def _num_kept_pages(self, sharer: Sharer, num_pages: int, now_s: float) -> int:
        """Return how many free pages a sequence of `num_pages` must leave for the one that was asked for first."""
        kept = [
            (turn.since_s, other, size)
            for other, turns in self._turns.items()
            for size, turn in turns.items()
            if turn.is_kept(now_s)
        ]
        kept.sort(key=lambda asked: asked[0])
        waiting = ((other, size) for _, other, size in kept if self._goes_before(other, sharer, now_s))
        if (first := next(waiting, None)) is None or first == (sharer, num_pages):
            return 0
        other, size = first
        level = self._level_between(sharer, other)
        if level.kept_for_s(other, now_s) >= KEPT_S:
            level.kept_since_s[other[: level.depth]] = now_s
        return min(size, self._num_pages // 2)

    def _goes_before(self, first: Sharer, sharer: Sharer, now_s: float) -> bool:
        """Return whether a sequence of `sharer` must leave pages for an earlier one of `first`."""
        level = self._level_between(sharer, first)
        waits = first == sharer or now_s < level.waits_until_s.get(first[: level.depth], -math.inf)
        return waits and not KEPT_S <= level.kept_for_s(first, now_s) < KEPT_S + REST_S

    def _refusal(self, level: _Level, why: str) -> PeerRefused:
        return PeerRefused(
            f"other {level.what}s are waiting, and {level.whose} {why}",
            remedy="ask another server, or later",
            retry_after_s=RETRY_AFTER_S,
            lacks_room=self._lacks_room,
        )
