"""How much each caller may ask for a minute: token buckets, and what OpenAI's `x-ratelimit-` headers say of them.

A bucket holds a minute's worth, so a caller may use that at once and then goes on at the rate. Pure but for the clock.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from swarm_node.gateway import http_limits
from swarm_node.gateway.api_errors import ApiError

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of one caller, a minute; 0: no limit. Tokens are those of prompts and answers together."""

    requests_per_min: int = 0
    tokens_per_min: int = 0


class Bucket:
    """Filled at a rate, up to a minute's worth. Overdrawn by what turns out to cost more than was reserved."""

    def __init__(self, per_min: int, now_s: Clock) -> None:
        self.per_min = per_min
        self._now_s = now_s
        self._level = float(per_min)
        self._seen_s = now_s()

    def level(self) -> float:
        now_s = self._now_s()
        self._level = min(self.per_min, self._level + (now_s - self._seen_s) * self.per_min / 60)
        self._seen_s = now_s
        return self._level

    def wait_s(self, amount: float) -> float:
        """Until `amount` is there; 0 if it is."""
        return max(0.0, min(amount, self.per_min) - self.level()) * 60 / self.per_min

    def take(self, amount: float) -> None:
        """A negative amount is given back."""
        self._level = min(self.per_min, self.level() - amount)


class Allowance:
    """What one caller has left."""

    def __init__(self, rates: Rates, now_s: Clock) -> None:
        self.rates = rates
        self._requests = Bucket(rates.requests_per_min, now_s) if rates.requests_per_min else None
        self._tokens = Bucket(rates.tokens_per_min, now_s) if rates.tokens_per_min else None

    def take_request(self) -> None:
        """Raises ApiError 429, which says when to come back."""
        _take(self._requests, 1, "requests")

    def reserve(self, num_tokens: int) -> int:
        """What the request may cost, as far as a minute has it. Raises ApiError 429. `settle` what it returns."""
        if self._tokens is None:
            return 0
        reserved = min(num_tokens, self._tokens.per_min)
        _take(self._tokens, reserved, "tokens")
        return reserved

    def settle(self, reserved: int, num_tokens: int) -> None:
        """Charge what it has cost instead."""
        if self._tokens is not None:
            self._tokens.take(num_tokens - reserved)

    def headers(self) -> dict[str, str]:
        headers = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.per_min)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level())))
                headers[f"x-ratelimit-reset-{name}"] = _duration(bucket.wait_s(bucket.per_min))
        return headers


class Allowances:
    """Of the callers seen last, by name. Owned by the gateway's event loop."""

    def __init__(self, now_s: Clock) -> None:
        self._now_s = now_s
        self._known: OrderedDict[str, Allowance] = OrderedDict()

    def of(self, caller: str, rates: Rates) -> Allowance:
        """What is left to `caller`, anew if its rates have changed."""
        known = self._known.get(caller)
        if known is None or known.rates != rates:
            known = self._known[caller] = Allowance(rates, self._now_s)
        self._known.move_to_end(caller)
        if len(self._known) > http_limits.MAX_CALLERS:
            self._known.popitem(last=False)
        return known


def _take(bucket: Bucket | None, amount: int, what: str) -> None:
    if bucket is None:
        return
    if wait_s := bucket.wait_s(amount):
        raise ApiError(
            429,
            f"the limit of {bucket.per_min} {what} a minute is reached: try again in {_duration(wait_s)}",
            code="rate_limit_exceeded",
            retry_after_s=wait_s,
        )
    bucket.take(amount)


def _duration(seconds: float) -> str:
    """As OpenAI writes them: 120ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60:
        return f"{seconds:.3g}s"
    return f"{int(seconds // 60)}m{math.ceil(seconds % 60)}s"
