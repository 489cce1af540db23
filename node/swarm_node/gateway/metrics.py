"""What a gateway counts and times; `swarm_node.metrics.metric_contract` names it.

No label has a value that a client or a peer can choose. State belongs to the gateway's event loop.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm_node.gateway.api_errors import REFUSAL
from swarm_node.gateway.first_tokens import FirstTokens
from swarm_node.gateway.responses import Usage
from swarm_node.metrics.metric_registry import Registry


class Metrics:
    """One gateway's, in its daemon's registry."""

    def __init__(self, registry: Registry) -> None:
        self.first_tokens = FirstTokens()
        self.http = registry.counter("swarm_gateway_http_requests_total")
        self.refusals = registry.counter("swarm_gateway_refusals_total")
        self.running = registry.gauge("swarm_gateway_num_requests_running")
        self.waiting = registry.gauge("swarm_gateway_num_requests_waiting")
        self.first_token = registry.histogram("swarm_gateway_time_to_first_token_seconds")
        self.next_token = registry.histogram("swarm_gateway_inter_token_latency_seconds")
        self.whole = registry.histogram("swarm_gateway_e2e_request_latency_seconds")
        self.success = registry.counter("swarm_gateway_request_success_total")
        self._prompt_tokens = registry.counter("swarm_gateway_prompt_tokens_total")
        self._cached_tokens = registry.counter("swarm_gateway_prompt_tokens_cached_total")
        self._generation_tokens = registry.counter("swarm_gateway_generation_tokens_total")
        self._hop = registry.histogram("swarm_gateway_hop_seconds")
        self._reroutes = registry.counter("swarm_gateway_reroutes_total")
        self._replayed_tokens = registry.counter("swarm_gateway_replayed_tokens_total")
        self._failover = registry.histogram("swarm_gateway_failover_seconds")

    def used(self, usage: Usage, traces: Sequence[Mapping[str, Any]]) -> None:
        """`traces` are those of the request's generations, which have ended."""
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._cached_tokens.inc(usage.cached_tokens)
        self._generation_tokens.inc(usage.completion_tokens)
        for trace in traces:
            for hop in trace.get("hops", ()):
                for part in ("compute", "queue", "wire"):
                    if hop["num_steps"]:
                        self._hop.labels(part).observe(hop[f"{part}_ms"] / 1000 / hop["num_steps"])
            for replay in trace.get("replays", ()):
                self._reroutes.labels("handover" if replay["was_handed_over"] else "replay").inc()
                self._replayed_tokens.inc(0 if replay["was_handed_over"] else replay["num_tokens"])
                self._failover.observe(replay["failover_ms"] / 1000)

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
