"""Measures how the bytes of two hosts travel: which share a seed carries, and when they begin to go directly."""

from __future__ import annotations

import time
from dataclasses import dataclass

from internet.lab import HOME_ROUTER, PUBLIC, Lab, Sent, address6, lan_of

LOOK_S = 0.5
MIN_DIRECT_BYTES = 200
"""The least bytes in one look. Dials that nobody answers send fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Bytes that the two hosts of a pair have sent, and the seed's share of them: what the seed sent meanwhile."""

    pair_bytes: int
    seed_bytes: int

    @property
    def seed_share(self) -> float:
        return self.seed_bytes / self.pair_bytes


class PairMeter:
    """Count bytes from its creation on. All bytes of packets count, with records, greetings, headers and
    acknowledgements."""

    def __init__(self, lab: Lab, one: str, other: str, *, seed: str = "seed") -> None:
        self._lab = lab
        self._pair = (one, other)
        self._seed = seed
        self._since = self._look()

    def shares(self) -> Shares:
        """Return the bytes sent since the meter was made."""
        sent = [now.total - before.total for now, before in zip(self._look(), self._since, strict=True)]
        return Shares(pair_bytes=sent[0] + sent[1], seed_bytes=sent[2])

    def wait_direct(self, *, within_s: float) -> float | None:
        """Return the seconds until most bytes of the first host go directly to the second one, or None if that takes
        too long. Something must be sent all the time."""
        began_at = time.monotonic()
        before = self._lab.sent(self._pair[0])
        while (waited_s := time.monotonic() - began_at) < within_s:
            time.sleep(LOOK_S)
            now = self._lab.sent(self._pair[0])
            direct = self._direct_bytes(now) - self._direct_bytes(before)
            if direct > max(MIN_DIRECT_BYTES, (now.total - before.total) / 2):
                return waited_s + LOOK_S
            before = now
        return None

    def _direct_bytes(self, sent: Sent) -> int:
        one, other = self._pair
        direct = sent.to[self._lab.address(other)] + sent.to.get(address6(other), 0)
        is_neighbour = other not in PUBLIC and HOME_ROUTER.get(one) == HOME_ROUTER[other]
        return direct + (sent.to[lan_of(other)] if is_neighbour else 0)

    def _look(self) -> list[Sent]:
        return [self._lab.sent(host) for host in (*self._pair, self._seed)]
