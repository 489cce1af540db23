"""Measures how fast a node's peers send to it, and how far they are, as its real traffic shows. Nothing is sent to
measure it.

A long message is whole at its sender, so it arrives as fast as the link, the limits of both sides, and what else they
carry allow. Messages of one peer that arrive at the same time or right after each other are one transfer; a transfer
that is large enough gives one sample. Only who answers at once tells a round trip: the least of some answers counts.

State belongs to the network's loop, whose clock it reads. It is bounded: the peers not heard of for the longest go.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from swarm_protocol import limits

MIN_MESSAGE_BYTES = 2**16
"""The time of a shorter message says more about the machines than about the link between them."""

SAMPLE_BYTES = 2**17
"""A transfer of fewer bytes gives no sample."""

MIN_MESSAGE_DURATIONS = 4
"""A transfer that has lasted for as many times as its longest message gives a sample, and begins anew. What is under
way then counts in the next one, and is a small part of either."""

MIN_SAMPLE_S = 0.01
"""A shorter transfer goes on: clocks of event loops tick in milliseconds, and buffers on the way empty at once."""

MAX_GAP_S = 0.005
"""Messages with a shorter gap belong to the same transfer."""

NUM_SAMPLES = 8
"""The rate is the median of this many samples, so that one transfer on a busy machine does not change it."""

NUM_ANSWERS = 3
KEPT_S = 600.0
"""Maximum age of what is known of a peer."""

MAX_PEERS = 4096
MAX_BYTES_PER_S = limits.MAX_LINK_BYTES_PER_S


@dataclass(slots=True)
class _Transfer:
    """Bytes that came from `since_s` to `until_s`, of a sample that is not whole yet."""

    since_s: float
    until_s: float
    num_bytes: int = 0
    longest_s: float = 0.0


@dataclass(slots=True)
class _Link:
    transfer: _Transfer | None = None
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_SAMPLES))
    rated_at_s: float = 0.0
    answers: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=2 * NUM_ANSWERS))  # when, seconds


class LinkMeter:
    """All rates are in bytes per second, of payload."""

    def __init__(self) -> None:
        self._links: dict[str, _Link] = {}

    def received(self, peer_id: str, num_bytes: int, since_s: float) -> None:
        """Note that a message of `num_bytes` came from `peer_id`, whose first bytes were here at `since_s`."""
        if num_bytes >= MIN_MESSAGE_BYTES:
            _add(self._link(peer_id), num_bytes, since_s, asyncio.get_running_loop().time())

    def answered(self, peer_id: str, seconds: float) -> None:
        """Note that `peer_id` answered a small call, to which it answers at once, after `seconds`."""
        self._link(peer_id).answers.append((asyncio.get_running_loop().time(), seconds))

    def rate_from(self, peer_id: str) -> float | None:
        """Return how fast `peer_id` sends to this node; None: unknown."""
        return _rate(self._links.get(peer_id))

    def round_trip_s(self, peer_id: str, *, max_age_s: float) -> float | None:
        """Return the least round trip of the newest answers; None if there were not enough in `max_age_s`."""
        since_s = asyncio.get_running_loop().time() - max_age_s
        link = self._links.get(peer_id)
        recent = [seconds for at_s, seconds in (link.answers if link else ()) if at_s > since_s]
        return min(recent) if len(recent) >= NUM_ANSWERS else None

    def rates_from(self, peer_ids: Iterable[str]) -> dict[str, float]:
        """Return the rates that are known of `peer_ids`, the fastest first."""
        known = {peer_id: rate for peer_id in peer_ids if (rate := self.rate_from(peer_id)) is not None}
        return dict(sorted(known.items(), key=lambda each: -each[1]))

    def all_rates(self) -> list[float]:
        """Return every rate that is known."""
        return list(self.rates_from(self._links).values())

    def fastest_first(self, peer_ids: Sequence[str]) -> list[str]:
        """Return `peer_ids` by their rates; one whose rate is unknown counts as a usual one."""
        known = self.rates_from(peer_ids)
        usual = statistics.median(known.values()) if known else 0.0
        return sorted(peer_ids, key=lambda peer_id: -known.get(peer_id, usual))

    def _link(self, peer_id: str) -> _Link:
        link = self._links.pop(peer_id) if peer_id in self._links else _Link()
        self._links[peer_id] = link  # the latest heard of
        if len(self._links) > MAX_PEERS:
            del self._links[next(iter(self._links))]
        return link


def _add(link: _Link, num_bytes: int, since_s: float, now_s: float) -> None:
    transfer = link.transfer
    if transfer is None or since_s > transfer.until_s + MAX_GAP_S:
        _finish(link)
        transfer = link.transfer = _Transfer(since_s, now_s)
    transfer.until_s = now_s
    transfer.num_bytes += num_bytes
    transfer.longest_s = max(transfer.longest_s, now_s - since_s)
    if transfer.until_s - transfer.since_s >= MIN_MESSAGE_DURATIONS * transfer.longest_s:
        _finish(link)


def _finish(link: _Link) -> None:
    """Take a sample of the transfer, if it is large enough; the next one begins where it ended."""
    if (transfer := link.transfer) is None:
        return
    took_s = transfer.until_s - transfer.since_s
    if transfer.num_bytes >= SAMPLE_BYTES and took_s >= MIN_SAMPLE_S:
        link.rates.append(min(transfer.num_bytes / took_s, MAX_BYTES_PER_S))
        link.rated_at_s = transfer.until_s
        link.transfer = _Transfer(transfer.until_s, transfer.until_s)


def _rate(link: _Link | None) -> float | None:
    now_s = asyncio.get_running_loop().time()
    if link is not None and link.transfer is not None and now_s > link.transfer.until_s + MAX_GAP_S:
        _finish(link)
    if link is None or not link.rates or now_s - link.rated_at_s > KEPT_S:
        return None
    return statistics.median(link.rates)
