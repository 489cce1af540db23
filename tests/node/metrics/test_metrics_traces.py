"""Requests and rounds as spans, in memory and received by a real collector's HTTP endpoint."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from typing import Any

import pytest
from node.gateway.scripted_client import ScriptedClient, converse
from openai import APIStatusError, AsyncOpenAI
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.exposed_metrics import OUTER_STEP, PHASES_S, TRACE
from swarm.training.trainer_events import RoundAborted
from swarm_node.gateway.app import GatewayOptions
from swarm_node.metrics.otel_traces import ENVIRONMENT, NO_TRACES, Traces, open_traces, traces_to
from swarm_protocol.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


def collected() -> tuple[Traces, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    return traces_to(SimpleSpanProcessor(exporter), {"service.instance.id": "me"}), exporter


def seconds(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return round(span.start_time / 1e9, 6), round(span.end_time / 1e9, 6)


def test_request_has_a_span_for_each_hop_and_each_loss_laid_end_to_end() -> None:
    traces, exporter = collected()
    traces.request("chatcmpl-1", "tiny", began_at=100.0, ended_at=101.0, choices=[TRACE], error=None)
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["open", "hop", "hop", "hop", "replay", "handover", "choice", "request"]
    laid = [seconds(span) for span in spans[:6]]
    expected = [100.0, 100.02, 100.072, 100.168, 100.168, 100.468, 100.768]
    assert laid == [pytest.approx(pair) for pair in pairwise(expected)]
    request, choice = spans[-1], spans[-2]
    assert seconds(request) == (100.0, 101.0)
    assert request.parent is None
    assert choice.parent == request.context
    assert all(span.parent == choice.context for span in spans[:6])
    first = dict(spans[1].attributes or {})
    assert first == {
        "swarm.peer_id": "a",
        "swarm.start": 0,
        "swarm.end": 2,
        "swarm.num_steps": 4,
        "swarm.compute_ms": 40.0,
        "swarm.queue_ms": 4.0,
        "swarm.wire_ms": 8.0,
        "swarm.prompt_ms": 0.0,
    }
    assert (spans[4].attributes or {})["swarm.lost_peer"] == "b"
    assert (request.attributes or {})["gen_ai.request.model"] == "tiny"
    assert request.status.is_unset
    assert request.resource.attributes["service.instance.id"] == "me"


def test_failed_request_is_marked_and_has_its_own_trace() -> None:
    traces, exporter = collected()
    for number in range(2):
        traces.request(f"r{number}", "tiny", began_at=1.0, ended_at=2.0, choices=[], error=TimeoutError("secret"))
    first, second = exporter.get_finished_spans()
    assert first.status.description == "TimeoutError"
    assert first.context is not None
    assert second.context is not None
    assert first.context.trace_id != second.context.trace_id


def test_round_has_its_phases_and_the_attempts_that_failed_before() -> None:
    traces, exporter = collected()
    traces.round_aborted(RoundAborted(step=7, attempt=0, reason="b is gone", missing=("b",)), 499.0)
    traces.outer_step("run-1", OUTER_STEP, PHASES_S, 506.0)
    traces.outer_step("run-1", OUTER_STEP, {}, 512.0)
    *phases, step, later = exporter.get_finished_spans()
    assert [span.name for span in phases] == list(PHASES_S)
    assert [seconds(span)[0] for span in phases] == [500.0, 504.0, 504.5, 505.5, 505.75]
    assert seconds(step) == (500.0, 506.0)
    [event] = step.events
    assert dict(event.attributes or {})["swarm.reason"] == "b is gone"
    assert (step.attributes or {})["swarm.group_size"] == 2
    assert later.events == ()


def test_tracing_does_and_imports_nothing_without_a_collector() -> None:
    assert open_traces("", {}) is NO_TRACES
    NO_TRACES.request("r", "tiny", began_at=1.0, ended_at=2.0, choices=[TRACE], error=None)
    NO_TRACES.outer_step("run", OUTER_STEP, PHASES_S, 1.0)
    NO_TRACES.round_aborted(RoundAborted(step=7, attempt=0, reason="", missing=()), 1.0)
    NO_TRACES.close()


def test_tracing_names_the_missing_package_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def lacking(name: str, *arguments: Any, **more: Any) -> Any:
        if name.startswith("opentelemetry.exporter"):
            raise ImportError(name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(ConfigError, match=r"pip install 'swarm-node\[tracing\]'"):
        open_traces("http://127.0.0.1:4318", {})


class Collector(HTTPServer):
    """An OTLP endpoint over HTTP that can read the spans it receives."""

    def __init__(self) -> None:
        self.received: list[tuple[str, ExportTraceServiceRequest]] = []
        super().__init__(("127.0.0.1", 0), _Receiver)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def names(self) -> list[str]:
        return [
            span.name
            for _, request in self.received
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class _Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        assert isinstance(self.server, Collector)
        self.server.received.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            collector.shutdown()
            thread.join()


@pytest.mark.parametrize("by", ["option", "environment"])
def test_spans_reach_a_real_collector_before_close_returns(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as collector:
        if by == "environment":
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        traces = open_traces(collector.url if by == "option" else "", {"service.version": "1"})
        traces.outer_step("run-1", OUTER_STEP, PHASES_S, 506.0)
        traces.close()
        assert [path for path, _ in collector.received] == ["/v1/traces"]
        assert collector.names == [*PHASES_S, "outer step"]


def test_gateway_sends_a_span_for_each_answered_request() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        await openai.completions.create(model="tiny", prompt="hi")
        with pytest.raises(APIStatusError):
            await openai.completions.create(model="nobody", prompt="hi")

    with collecting() as collector:
        traces = open_traces(collector.url, {})
        converse(ScriptedClient(), conversation, options=GatewayOptions(traces=traces))
        traces.close()
        assert collector.names == ["open", "choice", "request"]
