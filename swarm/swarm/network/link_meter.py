"""Measures how fast a node's peers send to it, and their round trips, from real traffic. It sends nothing itself.

A sender has all of a long message when it begins to send. So the message arrives as fast as the link, the limits of
both sides and their other traffic allow. Messages of one peer that arrive at the same time or right after each other
are one transfer. A transfer that is large enough gives one sample. Round trips come only from calls that the peer
answers at once, and the shortest of several counts. The network notes of which peers it has heard anything.

State belongs to the network's loop, whose clock the meter reads. It is bounded: beyond MAX_PEERS, the peer heard of
least recently is forgotten.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from swarm_protocol import limits

from swarm.newest_items import NewestItems

MIN_MESSAGE_BYTES = 2**16
"""A shorter message is ignored, since its time says more about the machines than about the link."""

SAMPLE_BYTES = 2**17
"""A transfer of fewer bytes gives no sample."""

MIN_MESSAGE_DURATIONS = 4
"""A transfer that has lasted this many times as long as its longest message gives a sample, and a new transfer begins.
Messages under way then count in the new transfer; they are a small part of either."""

MIN_SAMPLE_S = 0.01
"""A shorter transfer gives no sample yet: event loops' clocks tick in milliseconds, and full buffers on the way arrive
at once."""

MAX_GAP_S = 0.005
"""Messages with a gap of at most this belong to the same transfer."""

NUM_SAMPLES = 8
"""The rate is the median of this many samples, so that one transfer on a busy machine does not change it."""

NUM_ANSWERS = 3
"""Minimum answers that make a round trip."""
KEPT_S = 600.0
"""Maximum age of a peer's rate."""

MAX_PEERS = 4096
MAX_BYTES_PER_S = limits.MAX_LINK_BYTES_PER_S


@dataclass(slots=True)
class _Transfer:
    """The bytes that came from `since_s` to `until_s`, and the time in seconds of the longest message among them."""

    since_s: float
    until_s: float
    num_bytes: int = 0
    longest_s: float = 0.0


@dataclass(slots=True)
class _Link:
    transfer: _Transfer | None = None
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_SAMPLES))
    rated_at_s: float = 0.0
    heard_at_s: float = -math.inf
    answers: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=2 * NUM_ANSWERS))  # when, seconds


class LinkMeter:
    """The rates at which peers send to this node, in bytes of payload per second, and the round trips to them."""

    def __init__(self) -> None:
        self._links = NewestItems[str, _Link](MAX_PEERS)

    def received(self, peer_id: str, num_bytes: int, since_s: float) -> None:
        """Note that a message of `num_bytes` came from `peer_id`, whose first bytes came at `since_s`."""
        if num_bytes >= MIN_MESSAGE_BYTES:
            _add(self._link(peer_id), num_bytes, since_s, asyncio.get_running_loop().time())

    def answered(self, peer_id: str, seconds: float) -> None:
        """Note that `peer_id` answered a small call after `seconds`, a call that peers answer at once."""
        self._link(peer_id).answers.append((asyncio.get_running_loop().time(), seconds))

    def heard(self, peer_id: str) -> None:
        """Note that `peer_id` sent a part of a message or an acknowledgement lately."""
        self._link(peer_id).heard_at_s = asyncio.get_running_loop().time()

    def was_heard(self, peer_id: str, *, within_s: float) -> bool:
        """Return whether anything was heard of `peer_id` in the last `within_s`."""
        link = self._links.get(peer_id)
        return link is not None and asyncio.get_running_loop().time() - link.heard_at_s < within_s

    def rate_from(self, peer_id: str) -> float | None:
        """Return the rate at which `peer_id` sends to this node, or None if it is unknown."""
        return _rate(self._links.get(peer_id))

    def round_trip_s(self, peer_id: str, *, max_age_s: float) -> float | None:
        """Return the shortest round trip among the newest answers; None if there were fewer than NUM_ANSWERS in
        `max_age_s`."""
        since_s = asyncio.get_running_loop().time() - max_age_s
        link = self._links.get(peer_id)
        recent = [seconds for at_s, seconds in (link.answers if link else ()) if at_s > since_s]
        return min(recent) if len(recent) >= NUM_ANSWERS else None

    def rates_from(self, peer_ids: Iterable[str]) -> dict[str, float]:
        """Return the known rates of `peer_ids`, the fastest first."""
        known = {peer_id: rate for peer_id in peer_ids if (rate := self.rate_from(peer_id)) is not None}
        return dict(sorted(known.items(), key=lambda each: -each[1]))

    def all_rates(self) -> list[float]:
        """Return all known rates."""
        return list(self.rates_from(self._links).values())

    def fastest_first(self, peer_ids: Sequence[str]) -> list[str]:
        """Return `peer_ids` by rate, the fastest first. An unknown rate counts as the median of the known ones."""
        known = self.rates_from(peer_ids)
        usual = statistics.median(known.values()) if known else 0.0
        return sorted(peer_ids, key=lambda peer_id: -known.get(peer_id, usual))

    def _link(self, peer_id: str) -> _Link:
        link = self._links[peer_id] = self._links.get(peer_id) or _Link()
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
    """Take a sample of the transfer if it is large enough. The next transfer then begins where this one ended."""
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
