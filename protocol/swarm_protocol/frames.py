"""Encode frames as the messages of a multiplexed connection.

A message is the version, the length of the header (4 bytes, little-endian), the header (a protobuf), and then the
payloads of all rows one after another. Payloads are thus copied once when they are sent and not at all when they are
received.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

from swarm_protocol import limits, wire
from swarm_protocol.checks import check_int
from swarm_protocol.proto import session_pb2
from swarm_protocol.rows import Data, Rows
from swarm_protocol.sampler import Grammar, Sampler
from swarm_protocol.session_frames import (
    PAGE_KEY_BYTES,
    AllowHandover,
    AnswerTokens,
    CloseSequence,
    Frame,
    LinkAck,
    LinkUpdate,
    OpenSequence,
    Push,
    PushRefused,
    SampledToken,
    SequenceEnded,
    SequenceReady,
    SequenceRef,
    ServerLeaving,
    Spent,
    StepRequest,
    StepResult,
    TokenDraw,
)

_Frame: TypeAlias = session_pb2.Frame


@dataclass(frozen=True, slots=True)
class Frames:
    """One message."""

    frames: tuple[Frame, ...]

    def __post_init__(self) -> None:
        check_int(len(self.frames), "number of frames", low=1, high=limits.MAX_FRAMES)

    def to_bytes(self) -> bytes:
        message, payloads = session_pb2.Frames(), list[Data]()
        for frame in self.frames:
            kind, fill = _FILLS[type(frame)]
            fill(getattr(message.frames.add(), kind), frame)
            if isinstance(frame, StepRequest | Push | StepResult) and frame.rows is not None:
                payloads.append(frame.rows.payload)
        return wire.encode_with_payloads(message, payloads)

    @classmethod
    def from_bytes(cls, data: bytes) -> Frames:
        """Decode a message. Raises PeerViolation. Payloads are views of `data`."""
        return wire.decode_with_payload(
            data,
            session_pb2.Frames,
            _frames,
            max_bytes=limits.MAX_MESSAGE_BYTES,
            max_header_bytes=limits.MAX_FRAMES_HEADER_BYTES,
        )


def num_bytes(frame: Frame) -> int:
    """Return the approximate size of a frame in a message, for bounds on queues."""
    rows = frame.rows if isinstance(frame, StepRequest | Push | StepResult) else None
    extra = 0
    if isinstance(frame, OpenSequence):
        extra = PAGE_KEY_BYTES * len(frame.page_keys) + _sampler_bytes(frame.sampler)
    elif isinstance(frame, AnswerTokens):
        extra = len(frame.token_ids)
    return limits.FRAME_BYTES + extra + (0 if rows is None else len(rows.payload))


def _sampler_bytes(sampler: Sampler | None) -> int:
    if sampler is None:
        return 0
    grammar = 4 * len(sampler.grammar.text) if sampler.grammar else 0
    return len(sampler.prompt_ids) + 16 * len(sampler.bias_ids) + grammar + limits.FRAME_BYTES


# --- to protobuf; by hand, for there may be thousands a second -------------------------------------------------------


def _fill_step(sent: _Frame.StepRequest | _Frame.Push, step: StepRequest | Push) -> None:
    sent.sequence_id = step.sequence_id
    sent.position = step.position
    sent.want = step.want
    if step.draw is not None:
        _fill_draw(sent.draw, step.draw)
    _fill_rows(sent.rows, step.rows)
    if isinstance(step, Push):
        sent.client_peer_id = step.client_peer_id  # type: ignore[union-attr]
        sent.source_id = step.source_id  # type: ignore[union-attr]
        sent.upstream_ms.extend(chain.from_iterable(step.upstream_ms))  # type: ignore[union-attr]
    else:
        sent.forward = step.forward  # type: ignore[union-attr]


def _fill_draw(sent: _Frame.TokenDraw, draw: TokenDraw) -> None:
    sent.SetInParent()
    sent.temperature = draw.temperature
    sent.top_p = draw.top_p
    sent.top_k = draw.top_k
    sent.seed = draw.seed
    sent.index = draw.index
    sent.ahead = draw.ahead
    sent.min_p = draw.min_p
    if draw.num_logprobs is not None:
        sent.num_logprobs = draw.num_logprobs


def _fill_result(sent: _Frame.StepResult, result: StepResult) -> None:
    sent.sequence_id = result.sequence_id
    sent.position = result.position
    sent.compute_ms = result.compute_ms
    sent.queue_ms = result.queue_ms
    sent.batch_size = result.batch_size
    sent.push_failed = result.push_failed
    sent.codec_error = result.codec_error
    sent.passed_on = result.passed_on
    sent.looped = result.looped
    sent.num_links = result.num_links
    sent.upstream_ms.extend(chain.from_iterable(result.upstream_ms))
    if (token := result.token) is not None:
        sent.token.token_id = token.token_id
        if token.logprob is not None:
            sent.token.logprob = token.logprob
        if token.top:
            sent.token.top_ids.extend(token_id for token_id, _ in token.top)
            sent.token.top_logprobs.extend(logprob for _, logprob in token.top)
    if result.rows is not None:
        _fill_rows(sent.rows, result.rows)


def _fill_rows(sent: _Frame.Rows, rows: Rows) -> None:
    sent.codec = rows.codec
    sent.num_rows = rows.num_rows
    sent.num_columns = rows.num_columns


def _fill_open(sent: _Frame.OpenSequence, opened: OpenSequence) -> None:
    sent.sequence_id, sent.session_id, sent.revision = opened.sequence_id, opened.session_id, opened.revision
    sent.start, sent.end, sent.max_tokens = opened.start, opened.end, opened.max_tokens
    sent.codec = opened.codec
    sent.page_keys = b"".join(opened.page_keys)
    if opened.previous is not None:
        _copy(sent.previous, opened.previous)
    if opened.next is not None:
        _copy(sent.next, opened.next)
    if opened.take_over is not None:
        _copy(sent.take_over, opened.take_over)
    if opened.sampler is not None:
        _copy(sent.sampler, opened.sampler)


def _copy(sent: Any, value: Any) -> None:
    sent.CopyFrom(wire.fill(type(sent), value))
    # a message without a set field is one that is there
    sent.SetInParent()


_FILLS: dict[type[Any], tuple[str, Callable[[Any, Any], None]]] = {
    OpenSequence: ("open", _fill_open),
    StepRequest: ("step", _fill_step),
    LinkUpdate: ("link", _copy),
    AllowHandover: ("hand", _copy),
    AnswerTokens: ("drawn", _copy),
    CloseSequence: ("close", _copy),
    SequenceReady: ("ready", _copy),
    StepResult: ("result", _fill_result),
    LinkAck: ("linked", _copy),
    SequenceEnded: ("ended", _copy),
    ServerLeaving: ("leaving", _copy),
    Push: ("push", _fill_step),
    PushRefused: ("push_refused", _copy),
}


# --- from protobuf ---------------------------------------------------------------------------------------------------


class _Payload:
    """Hand out the bytes that follow the header, in the order of the frames."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def rows(self, sent: _Frame.Rows) -> Rows:
        rows = Rows.sized(sent.codec, sent.num_rows, sent.num_columns, self._data[self._at :])
        self._at += len(rows.payload)
        return rows

    def check_empty(self) -> None:
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes follow the last row")


def _frames(sent: session_pb2.Frames, data: memoryview) -> Frames:
    if len(sent.frames) > limits.MAX_FRAMES:
        raise ValueError(f"{len(sent.frames)} frames, more than {limits.MAX_FRAMES}")
    payload = _Payload(data)
    frames = Frames(tuple([_frame(frame, payload) for frame in sent.frames]))
    payload.check_empty()
    return frames


def _frame(sent: _Frame, payload: _Payload) -> Frame:
    kind = sent.WhichOneof("kind")
    match kind:
        case "step":
            return _step(sent.step, payload)
        case "push":
            return _push(sent.push, payload)
        case "result":
            return _result(sent.result, payload)
        case None:
            raise ValueError("a frame is of no known kind")
    frame: Frame = _BUILDS[kind](getattr(sent, kind))
    return frame


def _step(sent: _Frame.StepRequest, payload: _Payload) -> StepRequest:
    return StepRequest(
        sequence_id=sent.sequence_id,
        position=sent.position,
        want=sent.want,
        forward=sent.forward,
        draw=_draw(sent.draw) if sent.HasField("draw") else None,
        rows=payload.rows(sent.rows),
    )


def _push(sent: _Frame.Push, payload: _Payload) -> Push:
    return Push(
        client_peer_id=sent.client_peer_id,
        sequence_id=sent.sequence_id,
        position=sent.position,
        want=sent.want,
        draw=_draw(sent.draw) if sent.HasField("draw") else None,
        rows=payload.rows(sent.rows),
        source_id=sent.source_id,
        upstream_ms=_pairs(sent.upstream_ms),
    )


def _result(sent: _Frame.StepResult, payload: _Payload) -> StepResult:
    return StepResult(
        sequence_id=sent.sequence_id,
        position=sent.position,
        compute_ms=sent.compute_ms,
        queue_ms=sent.queue_ms,
        batch_size=sent.batch_size,
        push_failed=sent.push_failed,
        codec_error=sent.codec_error,
        token=_sampled_token(sent.token) if sent.HasField("token") else None,
        rows=payload.rows(sent.rows) if sent.HasField("rows") else None,
        passed_on=sent.passed_on,
        looped=sent.looped,
        num_links=sent.num_links,
        upstream_ms=_pairs(sent.upstream_ms),
    )


def _pairs(upstream_ms: Sequence[float]) -> tuple[Spent, ...]:
    return tuple(zip(upstream_ms[::2], upstream_ms[1::2], strict=True))


def _draw(sent: _Frame.TokenDraw) -> TokenDraw:
    return TokenDraw(
        temperature=sent.temperature,
        top_p=sent.top_p,
        top_k=sent.top_k,
        seed=sent.seed,
        index=sent.index,
        num_logprobs=sent.num_logprobs if sent.HasField("num_logprobs") else None,
        ahead=sent.ahead,
        min_p=sent.min_p,
    )


def _sampled_token(sent: _Frame.SampledToken) -> SampledToken:
    return SampledToken(
        token_id=sent.token_id,
        logprob=sent.logprob if sent.HasField("logprob") else None,
        top=tuple(zip(sent.top_ids, sent.top_logprobs, strict=True)),
    )


def _page_keys(keys: bytes) -> tuple[bytes, ...]:
    if len(keys) % PAGE_KEY_BYTES:
        raise ValueError(f"page_keys are not {PAGE_KEY_BYTES} bytes each")
    return tuple([keys[at : at + PAGE_KEY_BYTES] for at in range(0, len(keys), PAGE_KEY_BYTES)])


_sequence_ref = wire.flat(SequenceRef)
_sampler = wire.flat(Sampler, {"grammar": wire.flat(Grammar)})
_BUILDS: dict[str, Callable[[Any], Any]] = {
    "open": wire.flat(
        OpenSequence,
        {
            "page_keys": _page_keys,
            "previous": _sequence_ref,
            "next": _sequence_ref,
            "take_over": _sequence_ref,
            "sampler": _sampler,
        },
    ),
    "link": wire.flat(LinkUpdate, {"previous": _sequence_ref, "next": _sequence_ref}),
    "hand": wire.flat(AllowHandover),
    "drawn": wire.flat(AnswerTokens),
    "close": wire.flat(CloseSequence),
    "ready": wire.flat(SequenceReady),
    "linked": wire.flat(LinkAck),
    "ended": wire.flat(SequenceEnded),
    "leaving": wire.flat(ServerLeaving),
    "push_refused": wire.flat(PushRefused),
}
