"""Keeps what a gateway measures of its requests: counters and times, waits for first tokens, and the newest traces.

`swarm_node.metrics.metric_contract` defines the metrics. No label has a value that a client or a peer can choose. The
gateway's event loop owns the state.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, get_args

from openai.types import CompletionUsage
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from swarm.client.possession_checks import PossessionChecks
from swarm.newest_items import NewestItems
from swarm.serving.checking.finished_answer import CheckReport, Result

from swarm_node.gateway import http_limits
from swarm_node.http.http_error import REFUSAL
from swarm_node.metrics.metric_registry import Reading, Registry, start_at_zero

WINDOW_S = 300.0
MAX_WAITS = 2000
"""The number of waits that are kept. They cover the whole window at up to seven requests a second."""

METHODS = {"GET", "HEAD", "POST"}
"""The methods that routes have. A client may send any other."""

Trace = dict[str, Any]


class Metrics:
    """One gateway's metrics in the registry of its daemon."""

    def __init__(self, registry: Registry) -> None:
        self.first_tokens = FirstTokenWaits()
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
        start_at_zero(self.success, ("stop", "length"))
        start_at_zero(self._reroutes, ("replay", "handover"))

    def used(self, usage: CompletionUsage, traces: Sequence[Mapping[str, Any]]) -> None:
        """Record what a request used. `traces` are those of its generations, which have ended."""
        details = usage.prompt_tokens_details
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._cached_tokens.inc((details and details.cached_tokens) or 0)
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


class SpotCheckCounter:
    """Counts spot checks of spans, and how many proved a lie."""

    def __init__(self, registry: Registry) -> None:
        self._checks = registry.counter("swarm_gateway_spot_checks_total")
        self._lies = registry.counter("swarm_gateway_proved_lies_total")
        start_at_zero(self._checks, get_args(Result))

    def add(self, report: CheckReport) -> None:
        self._checks.labels(report.result).inc()
        self._lies.inc(1 if report.named else 0)


class RequestTimes:
    """Times one request from its admission to its last token."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._begun_s = time.perf_counter()
        self._last_s: dict[int, float] = {}
        metrics.waiting.inc()

    def token(self, index: int) -> None:
        """Record that a token of the choice `index` has arrived."""
        now_s = time.perf_counter()
        if not self._last_s:
            self._metrics.waiting.dec()
            self._metrics.running.inc()
            self._metrics.first_token.observe(now_s - self._begun_s)
            self._metrics.first_tokens.add(now_s - self._begun_s)
        elif index in self._last_s:
            self._metrics.next_token.observe(now_s - self._last_s[index])
        self._last_s[index] = now_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        (self._metrics.running if self._last_s else self._metrics.waiting).dec()
        self._metrics.whole.observe(time.perf_counter() - self._begun_s)


class RequestCounter:
    """Middleware: counts each request by route, method and status, and each refusal by its reason."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = "gone"  # the client disconnected before the response began

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
            method = scope["method"] if scope["method"] in METHODS else "other"
            self._metrics.http.labels(route, method, status).inc()
            if REFUSAL in scope:
                self._metrics.refusals.labels(scope[REFUSAL]).inc()


class FirstTokenWaits:
    """Records how long the newest requests waited for their first token. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waits = deque[tuple[float, float]](maxlen=MAX_WAITS)

    def add(self, seconds: float) -> None:
        """Record a request whose first token came after `seconds`."""
        self._waits.append((self._clock(), seconds))

    def newest(self) -> tuple[float, float] | tuple[None, None]:
        """Return the median and the 95th percentile, in seconds, of the requests whose first token came in the last
        WINDOW_S. None means that there were none."""
        since = self._clock() - WINDOW_S
        while self._waits and self._waits[0][0] < since:
            self._waits.popleft()
        waits = sorted(seconds for _, seconds in self._waits)
        return (_rank(waits, 50), _rank(waits, 95)) if waits else (None, None)


def _rank(waits: list[float], percent: int) -> float:
    """Return the nearest-rank percentile, which is one of the sorted `waits`."""
    return waits[-(-percent * len(waits) // 100) - 1]


class TraceStore:
    """The newest traces by request id. A running request's trace is read anew each time; a finished one's is final."""

    def __init__(self, capacity: int = http_limits.MAX_KEPT_TRACES) -> None:
        self._read = NewestItems[str, Callable[[], Trace]](capacity)

    def begin(self, trace_id: str, read: Callable[[], Trace]) -> None:
        """Keep `read`, which returns the trace. Beyond the capacity the oldest trace is dropped."""
        self._read[trace_id] = read

    def finish(self, trace_id: str) -> None:
        """Replace the reader of the trace by its last value, so that the request is freed."""
        if trace_id in self._read:
            last = self._read[trace_id]()
            self._read[trace_id] = lambda: last

    def get(self, trace_id: str) -> Trace | None:
        read = self._read.get(trace_id)
        return read() if read else None

    def __len__(self) -> int:
        return len(self._read)


def read_possession(checks: PossessionChecks) -> Iterator[Reading]:
    """Read the outcomes of the proofs of possession that this gateway asked servers for."""
    outcomes = {"proven": checks.num_proven, "failed": checks.num_failed, "unanswered": checks.num_unanswered}
    for outcome, number in outcomes.items():
        yield Reading("swarm_gateway_possession_checks_total", number, {"outcome": outcome})
