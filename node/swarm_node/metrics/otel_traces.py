"""Exports finished requests and rounds as OpenTelemetry spans, if the operator has enabled this. Otherwise imports
nothing.

A span is made when its request or round is over, from the swarm's own measurements: sums for each server and phase,
laid end to end in order. So a span's length is measured, but its position within its parent is not. Spans contain
nothing of a prompt or an answer. The SDK's thread sends them; if no collector answers, spans are lost and a line is
logged. Needs the extra `tracing`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from swarm.training.trainer_events import OuterStep, RoundAborted
from swarm_protocol.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span, Tracer

ENVIRONMENT = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""Variables that enable traces if no URL is given. The exporter also reads its other settings from the environment."""

EXPORT_TIMEOUT_S = 3.0
MAX_ABORTED = 64
"""Maximum number of failed attempts that the span of an outer step lists."""

Attributes = Mapping[str, str | int | float | bool]


class Traces:
    """Makes spans with `tracer`, if there is one. Times are Unix seconds. Methods only queue, in the event loop."""

    def __init__(self, tracer: Tracer | None = None, close: Callable[[], None] = lambda: None) -> None:
        self._tracer = tracer
        self.close = close
        """Send queued spans, or give up after some seconds. Blocks."""
        self._aborted: list[tuple[float, RoundAborted]] = []

    def request(
        self,
        request_id: str,
        model: str,
        *,
        began_at: float,
        ended_at: float,
        choices: Sequence[Mapping[str, Any]],
        error: BaseException | None,
    ) -> None:
        """Export the trace of a request.

        `choices` are the SDK's traces of the request's generations (`swarm.serving.session.trace.Trace.to_dict`).
        """
        if self._tracer is None:
            return
        root = self._start("request", began_at, None, {"swarm.request": request_id, "gen_ai.request.model": model})
        if error is not None:
            _fail(root, error)
        for index, trace in enumerate(choices):
            about: Attributes = {
                "swarm.choice": index,
                "swarm.session": str(trace.get("session_id", "")),
                "gen_ai.usage.input_tokens": int(trace.get("num_prompt_tokens", 0)),
                "gen_ai.usage.output_tokens": int(trace.get("num_tokens", 0)),
                "swarm.first_token_ms": float(trace.get("first_token_ms", 0.0)),
            }
            choice = self._start("choice", began_at, root, about)
            self._lay_out(_stretches_of(trace), began_at, choice)
            choice.end(_ns(ended_at))
        root.end(_ns(ended_at))

    def round_aborted(self, event: RoundAborted, at: float) -> None:
        """Record an aborted attempt, for the span of the step once the step is committed."""
        if self._tracer is not None:
            self._aborted = [*self._aborted, (at, event)][-MAX_ABORTED:]

    def outer_step(self, run: str, event: OuterStep, phases_s: Mapping[str, float], at: float) -> None:
        """Export the trace of an outer step. `phases_s` has the known phases in order."""
        if self._tracer is None:
            return
        began_at = at - max(event.seconds, sum(phases_s.values()))
        about: Attributes = {
            "swarm.run": run,
            "swarm.outer_step": event.step,
            "swarm.loss": event.loss,
            "swarm.group_size": len(event.group),
            "swarm.num_tokens": event.num_tokens,
            "swarm.bytes_sent": event.bytes_sent,
            "swarm.digest": event.digest,
        }
        root = self._start("outer step", began_at, None, about)
        for aborted_at, aborted in self._aborted:
            tried: Attributes = {
                "swarm.attempt": aborted.attempt,
                "swarm.reason": aborted.reason,
                "swarm.missing": ", ".join(aborted.missing),
            }
            root.add_event("attempt aborted", dict(tried), _ns(aborted_at))
        self._aborted = []
        self._lay_out([(phase, seconds, {}) for phase, seconds in phases_s.items()], began_at, root)
        root.end(_ns(at))

    def _lay_out(self, stretches: Sequence[tuple[str, float, Attributes]], at: float, parent: Span) -> None:
        for name, seconds, about in stretches:
            span = self._start(name, at, parent, about)
            at += seconds
            span.end(_ns(at))

    def _start(self, name: str, at: float, parent: Span | None, about: Attributes) -> Span:
        assert self._tracer is not None
        return self._tracer.start_span(name, context=_inside(parent), start_time=_ns(at), attributes=dict(about))


NO_TRACES = Traces()


def open_traces(url: str, about: Mapping[str, str]) -> Traces:
    """Send spans to the collector at `url`, or where OpenTelemetry's environment variables say, or nowhere.

    Each span carries `about`, the identity of the sender. Raises ConfigError if the extra is not installed.
    """
    if not url and not any(os.environ.get(name) for name in ENVIRONMENT):
        return NO_TRACES
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            "traces need OpenTelemetry, which is not installed",
            remedy=f"pip install 'swarm-node[tracing]', or leave out --otlp and {ENVIRONMENT[0]}",
        ) from error
    exporter = OTLPSpanExporter(endpoint=_endpoint(url) if url else None, timeout=EXPORT_TIMEOUT_S)
    return traces_to(BatchSpanProcessor(exporter), about)


def traces_to(processor: SpanProcessor, about: Mapping[str, str]) -> Traces:
    """Return Traces that send through `processor`."""
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415

    service = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "swarm-node")}
    provider = TracerProvider(resource=Resource.create({**service, **about}), shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return Traces(provider.get_tracer("swarm_node"), provider.shutdown)


def _endpoint(url: str) -> str:
    """Return the URL for traces. A collector's URL usually has no path."""
    return url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1/traces"


def _inside(parent: Span | None) -> Context:
    from opentelemetry.context import Context  # noqa: PLC0415
    from opentelemetry.trace import set_span_in_context  # noqa: PLC0415

    return Context() if parent is None else set_span_in_context(parent, Context())


def _fail(span: Span, error: BaseException) -> None:
    from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415

    span.set_status(Status(StatusCode.ERROR, type(error).__name__))


def _stretches_of(trace: Mapping[str, Any]) -> list[tuple[str, float, Attributes]]:
    """Return the parts of a generation's time, as servers and client measured them: name, seconds, attributes."""
    stretches: list[tuple[str, float, Attributes]] = [("open", float(trace.get("opening_ms", 0.0)) / 1000, {})]
    for hop in trace.get("hops", ()):
        about = {f"swarm.{name}": hop[name] for name in ("peer_id", "start", "end", "num_steps")}
        times = ("compute_ms", "queue_ms", "wire_ms", "prompt_ms")
        parts = {f"swarm.{name}": float(hop[name]) for name in times}
        stretches.append(("hop", sum(parts.values()) / 1000, {**about, **parts}))
    for replay in trace.get("replays", ()):
        about = {f"swarm.{name}": replay[name] for name in ("lost_peer", "start", "end", "reason", "num_tokens")}
        how = "handover" if replay["was_handed_over"] else "replay"
        peers = {"swarm.new_peers": ", ".join(replay["new_peers"])}
        stretches.append((how, float(replay["failover_ms"]) / 1000, {**about, **peers}))
    return stretches


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
