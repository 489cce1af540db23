"""Keeps a client's track record of servers, from its own checks of answers and files, and derives costs for routing.

A server that was proved to have lied is not asked for BAR_S. Passed checks make a server cheaper for routing than an
unchecked one, by up to a fifth. Open disputes make it more expensive, and from MAX_DISPUTES on it is asked only where
no other server can answer. Passed checks and disputes fade. One session in EXPLORE_EVERY is routed without cost
factors, so that newcomers are asked, too. What other clients say does not count.

Pure: times are arguments, in Unix seconds.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from swarm_protocol.identity import check_peer_id

Outcome: TypeAlias = Literal["passed", "failed", "disputed"]

BAR_S = 30 * 86400.0
"""Time for which a server whose lie was proved is not asked."""

PASSED_HALF_LIFE_S = 7 * 86400.0
"""Passed checks count half after this time: a machine, its software and its owner's intentions change within weeks."""

DISPUTED_HALF_LIFE_S = 86400.0
"""Disputes count half after this time: one of the two servers in a dispute is innocent, and should recover soon."""

MAX_DISPUTES = 2.5
"""Disputes from which on a server is avoided: three within some hours. An innocent server is in a dispute with a liar
once in a while, a liar is in many."""

MAX_DISCOUNT = 0.25
"""A server with passed checks may be slower than an unchecked one by up to this fraction and still be chosen. Each
dispute raises its cost by the same fraction."""

EXPLORE_EVERY = 8

MAX_PEERS = 4096
"""Maximum peers with a track record: some hundred kilobytes in a file. The one checked longest ago is dropped first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackRecord:
    """The results of one server's checks. `num_passed` and `num_disputed` are faded to the time `at`; `failed_at` is
    when a lie was proved, or 0."""

    num_passed: float = 0.0
    num_disputed: float = 0.0
    failed_at: float = 0.0
    at: float = 0.0

    def faded(self, now: float) -> TrackRecord:
        """Return the record faded to `now`."""
        passed_s = max(0.0, now - self.at)
        return replace(
            self,
            num_passed=self.num_passed * 0.5 ** (passed_s / PASSED_HALF_LIFE_S),
            num_disputed=self.num_disputed * 0.5 ** (passed_s / DISPUTED_HALF_LIFE_S),
            failed_at=self.failed_at if now - self.failed_at < BAR_S else 0.0,
            at=max(now, self.at),
        )

    def after(self, outcome: Outcome, now: float) -> TrackRecord:
        """Return the record after one more check."""
        known = self.faded(now)
        match outcome:
            case "passed":
                return replace(known, num_passed=known.num_passed + 1)
            case "failed":
                return replace(known, failed_at=now, num_passed=0.0)
            case "disputed":
                return replace(known, num_disputed=known.num_disputed + 1)

    def is_barred(self, now: float) -> bool:
        return bool(self.failed_at) and now - self.failed_at < BAR_S

    def is_avoided(self, now: float) -> bool:
        return self.faded(now).num_disputed >= MAX_DISPUTES

    def cost_factor(self, now: float) -> float:
        """Return the factor on the cost of the server's blocks in a route: 1 for a server that was never checked."""
        known = self.faded(now)
        discount = MAX_DISCOUNT * known.num_passed / (1 + known.num_passed)
        return (1 + MAX_DISCOUNT * known.num_disputed) / (1 + discount)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTrust:
    """The input of routing: factors on costs, peers to ask only where no other can answer, and peers not to ask."""

    cost_factors: Mapping[str, float]
    avoided: frozenset[str]
    barred: frozenset[str]


class Reputation:
    """The track records of up to MAX_PEERS peers."""

    def __init__(self, track_records: Mapping[str, TrackRecord] | None = None) -> None:
        self.track_records = dict(track_records or {})

    def note(self, peer_id: str, outcome: Outcome, now: float) -> None:
        """Add a check's outcome."""
        known = self.track_records.pop(peer_id, TrackRecord(at=now))
        self.track_records[peer_id] = known.after(outcome, now)
        while len(self.track_records) > MAX_PEERS:
            # a server that was proved to have lied is forgotten last
            first = next((peer for peer, each in self.track_records.items() if not each.is_barred(now)), None)
            del self.track_records[first if first is not None else next(iter(self.track_records))]

    def for_routing(self, peer_ids: Iterable[str], now: float, salt: str) -> RoutingTrust:
        """Return what routing uses about these peers, for a session with this `salt`."""
        known = {peer_id: self.track_records[peer_id] for peer_id in peer_ids if peer_id in self.track_records}
        explores = zlib.crc32(f"explore {salt}".encode()) % EXPLORE_EVERY == 0
        return RoutingTrust(
            cost_factors={} if explores else {peer_id: each.cost_factor(now) for peer_id, each in known.items()},
            avoided=frozenset(peer_id for peer_id, each in known.items() if each.is_avoided(now)),
            barred=frozenset(peer_id for peer_id, each in known.items() if each.is_barred(now)),
        )

    def to_dict(self) -> dict[str, Sequence[float]]:
        """Return plain values, for a file."""
        return {
            peer_id: (each.num_passed, each.num_disputed, each.failed_at, each.at)
            for peer_id, each in self.track_records.items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Reputation:
        """Read what `to_dict` returned. Raises ValueError, TypeError."""
        if len(values) > MAX_PEERS:
            raise ValueError(f"track records of {len(values)} peers, more than {MAX_PEERS}")
        track_records = {}
        for peer_id, numbers in values.items():
            num_passed, num_disputed, failed_at, at = (float(number) for number in numbers)
            if not all(0 <= number < 1e12 for number in (num_passed, num_disputed, failed_at, at)):
                raise ValueError(f"a track record of {peer_id:.60} is out of bounds")
            track_records[check_peer_id(peer_id)] = TrackRecord(
                num_passed=num_passed, num_disputed=num_disputed, failed_at=failed_at, at=at
            )
        return cls(track_records)
