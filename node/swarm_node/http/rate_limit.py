"""Rate limits by caller: token buckets, and OpenAI's `x-ratelimit-` headers that report them.

A bucket holds one minute's allowance. A caller may use it all at once, and then continues at the rate. Pure except for
the clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from swarm.newest_items import NewestItems

from swarm_node.http.http_error import HttpError

Clock = Callable[[], float]

MAX_CALLERS = 4096
"""Maximum number of callers (addresses and keys) that are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The rates of one caller. 0 means no limit. Tokens count prompts and answers together."""

    requests_per_min: int = 0
    tokens_per_min: int = 0


class Bucket:
    """A token bucket that fills at a rate, up to one minute's allowance.

    Its level is negative after a request that cost more than was reserved.
    """

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
        """Return the seconds until `amount` is available, 0 if it is now."""
        return max(0.0, min(amount, self.per_min) - self.level()) * 60 / self.per_min

    def take(self, amount: float) -> None:
        """Take `amount`. A negative amount is returned to the bucket."""
        self._level = min(self.per_min, self.level() - amount)


class RateLimiter:
    """Limits the requests and the tokens of one caller."""

    def __init__(self, rates: Rates, now_s: Clock) -> None:
        self.rates = rates
        self._requests = Bucket(rates.requests_per_min, now_s) if rates.requests_per_min else None
        self._tokens = Bucket(rates.tokens_per_min, now_s) if rates.tokens_per_min else None

    def take_request(self) -> None:
        """Take one request. Raises HttpError 429, which says when to try again."""
        _take(self._requests, 1, "requests")

    def reserve(self, num_tokens: int) -> int:
        """Reserve what the request may cost, at most one minute's allowance, and return it for `settle`. Raises
        HttpError 429."""
        if self._tokens is None:
            return 0
        reserved = min(num_tokens, self._tokens.per_min)
        _take(self._tokens, reserved, "tokens")
        return reserved

    def take_tokens(self, num_tokens: int) -> int:
        """Take what a running request costs beyond its reservation, and return it, to be added to what was reserved."""
        if self._tokens is None:
            return 0
        self._tokens.take(num_tokens)
        return num_tokens

    def settle(self, reserved: int, num_tokens: int) -> None:
        """Replace what was reserved by what the request has cost."""
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


class RateLimiters:
    """Rate limiters of the most recent callers, by the caller's name. Owned by the server's event loop."""

    def __init__(self, now_s: Clock) -> None:
        self._now_s = now_s
        self._known = NewestItems[str, RateLimiter](MAX_CALLERS)

    def get(self, caller: str, rates: Rates) -> RateLimiter:
        """Return the limiter of `caller`, or a new one if its rates have changed."""
        known = self._known.get(caller)
        if known is None or known.rates != rates:
            known = RateLimiter(rates, self._now_s)
        self._known[caller] = known
        return known


def _take(bucket: Bucket | None, amount: int, what: str) -> None:
    if bucket is None:
        return
    if wait_s := bucket.wait_s(amount):
        raise HttpError(
            429,
            f"the limit of {bucket.per_min} {what} per minute is reached: try again in {_duration(wait_s)}",
            code="rate_limit_exceeded",
            retry_after_s=wait_s,
        )
    bucket.take(amount)


def _duration(seconds: float) -> str:
    """Format a duration as OpenAI does: 120ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60:
        return f"{seconds:.3g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s"
