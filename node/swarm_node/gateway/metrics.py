"""What a gateway counts and times, for Prometheus. Names follow vLLM's, where it counts the same.

No label has a value that a client or a peer can choose. State belongs to the gateway's event loop.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm_node.gateway.errors import REFUSAL
from swarm_node.gateway.first_tokens import FirstTokens
from swarm_node.gateway.shapes import Usage

CONTENT_TYPE = CONTENT_TYPE_LATEST
_TOKEN_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0)
_REQUEST_S = (0.1, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 900.0, 1800.0)


class Metrics:
    """One gateway's, in a registry of its own."""

    def __init__(self) -> None:
        self.first_tokens = FirstTokens()
        registry = self._registry = CollectorRegistry()
        self.http = Counter(
            "swarm_gateway_http_requests_total",
            "HTTP requests by route and status.",
            ("route", "method", "status"),
            registry=registry,
        )
        self.refusals = Counter(
            "swarm_gateway_refusals_total",
            "Requests that were not answered, by the error's code.",
            ("reason",),
            registry=registry,
        )
        self.running = Gauge("swarm_gateway_num_requests_running", "Requests with a first token.", registry=registry)
        self.waiting = Gauge("swarm_gateway_num_requests_waiting", "Requests without one yet.", registry=registry)
        self.first_token = Histogram(
            "swarm_gateway_time_to_first_token_seconds",
            "From a request's admission to its first token.",
            buckets=_REQUEST_S,
            registry=registry,
        )
        self.next_token = Histogram(
            "swarm_gateway_inter_token_latency_seconds",
            "Between a choice's tokens.",
            buckets=_TOKEN_S,
            registry=registry,
        )
        self.whole = Histogram(
            "swarm_gateway_e2e_request_latency_seconds",
            "From a request's admission to its end.",
            buckets=_REQUEST_S,
            registry=registry,
        )
        self.prompt_tokens = Counter("swarm_gateway_prompt_tokens_total", "Tokens of prompts.", registry=registry)
        self.cached_tokens = Counter(
            "swarm_gateway_prompt_tokens_cached_total", "Of these, found in servers' caches.", registry=registry
        )
        self.generation_tokens = Counter(
            "swarm_gateway_generation_tokens_total", "Tokens of answers.", registry=registry
        )
        self.success = Counter(
            "swarm_gateway_request_success_total",
            "Choices that were answered to their end, by reason.",
            ("finished_reason",),
            registry=registry,
        )
        self.replays = Counter(
            "swarm_gateway_replays_total",
            "Spans that were lost in mid-answer and run again by other servers.",
            registry=registry,
        )

    def exposition(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)

    def used(self, usage: Usage, num_replays: int) -> None:
        self.prompt_tokens.inc(usage.prompt_tokens)
        self.cached_tokens.inc(usage.cached_tokens)
        self.generation_tokens.inc(usage.completion_tokens)
        self.replays.inc(num_replays)

    @contextmanager
    def request(self) -> Iterator[RequestTimes]:
        """Times one request while the context lasts."""
        times = RequestTimes(self)
        try:
            yield times
        finally:
            times.end()


class RequestTimes:
    """One request's clock."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._begun_s = time.perf_counter()
        self._last_s: dict[int, float] = {}
        metrics.waiting.inc()

    def token(self, index: int) -> None:
        """A token of the choice `index` is there."""
        now_s = time.perf_counter()
        if not self._last_s:
            self._metrics.waiting.dec()
            self._metrics.running.inc()
            self._metrics.first_token.observe(now_s - self._begun_s)
            self._metrics.first_tokens.add(now_s - self._begun_s)
        elif index in self._last_s:
            self._metrics.next_token.observe(now_s - self._last_s[index])
        self._last_s[index] = now_s

    def end(self) -> None:
        (self._metrics.running if self._last_s else self._metrics.waiting).dec()
        self._metrics.whole.observe(time.perf_counter() - self._begun_s)


class Counted:
    """Middleware: counts each request by its route, its status and the reason of a refusal."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = "gone"  # the client left before there was any

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception:
            status = "500"
            raise
        finally:
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in {"GET", "POST"} else "other"
            self._metrics.http.labels(route, method, status).inc()
            if REFUSAL in scope:
                self._metrics.refusals.labels(scope[REFUSAL]).inc()
