"""Encodes frames as the messages of a multiplexed connection.

A message is the version, the length of the header (4 bytes, little-endian), the header (a protobuf), and then the
payloads of all rows one after another. Payloads are thus copied once when sent, and not at all when received.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias, get_args

from swarm_protocol import limits, wire
from swarm_protocol.checks import check_int
from swarm_protocol.proto import session_pb2
from swarm_protocol.rows import Data, Rows
from swarm_protocol.sampler import Sampler
from swarm_protocol.session_frames import (
    PAGE_KEY_BYTES,
    AnswerTokens,
    Commitment,
    DraftText,
    Frame,
    OpenSequence,
    SampledToken,
    Spent,
)

_Frame: TypeAlias = session_pb2.Frame


@dataclass(frozen=True, slots=True)
class Frames:
    """One message on a multiplexed connection: frames, in the order in which they were sent."""

    frames: tuple[Frame, ...]

    def __post_init__(self) -> None:
        check_int(len(self.frames), "number of frames", low=1, high=limits.MAX_FRAMES)

    def to_bytes(self) -> bytes:
        message, payloads = session_pb2.Frames(), list[Data]()
        for frame in self.frames:
            kind, write = _WRITERS[type(frame)]
            write(getattr(message.frames.add(), kind), frame)
            if (rows := rows_in(frame)) is not None:
                payloads.append(rows.payload)
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
    extra = 0
    if (rows := rows_in(frame)) is not None:
        extra = len(rows.payload)
    elif isinstance(frame, OpenSequence):
        extra = PAGE_KEY_BYTES * len(frame.page_keys) + _sampler_bytes(frame.sampler)
    elif isinstance(frame, AnswerTokens | DraftText):
        extra = len(frame.token_ids)
    elif isinstance(frame, Commitment):
        extra = len(frame.signed)
    return limits.FRAME_BYTES + extra


def rows_in(frame: Frame) -> Rows | None:
    """Return the rows of a frame that has some."""
    rows: Rows | None = getattr(frame, "rows", None)
    return rows


def _sampler_bytes(sampler: Sampler | None) -> int:
    if sampler is None:
        return 0
    grammar = 4 * len(sampler.grammar.text) if sampler.grammar else 0
    return len(sampler.prompt_ids) + 16 * len(sampler.bias_ids) + grammar + limits.FRAME_BYTES


class _Payload:
    """Hands out the bytes that follow the header, in the order of the frames."""

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
    if kind is None:
        raise ValueError("a frame is of no known kind")
    content, read = getattr(sent, kind), _READERS[kind]
    if kind in ("step", "push"):
        return read(content, payload.rows(content.rows))
    if kind == "result":
        return read(content, payload.rows(content.rows) if content.HasField("rows") else None)
    return read(content)


def _write_rows(sent: _Frame.Rows, rows: Rows) -> None:
    sent.codec = rows.codec
    sent.num_rows = rows.num_rows
    sent.num_columns = rows.num_columns


def _write_token(sent: _Frame.SampledToken, token: SampledToken) -> None:
    sent.token_id = token.token_id
    if token.logprob is not None:
        sent.logprob = token.logprob
    if token.top:
        sent.top_ids.extend(token_id for token_id, _ in token.top)
        sent.top_logprobs.extend(logprob for _, logprob in token.top)
    if token.fingerprint:
        sent.fingerprint = token.fingerprint


def _read_token(sent: _Frame.SampledToken) -> SampledToken:
    if len(sent.top_ids) != len(sent.top_logprobs):
        raise ValueError(f"{len(sent.top_ids)} top_ids, and {len(sent.top_logprobs)} top_logprobs")
    return SampledToken(
        token_id=sent.token_id,
        logprob=sent.logprob if sent.HasField("logprob") else None,
        top=tuple(zip(sent.top_ids, sent.top_logprobs, strict=True)),
        fingerprint=sent.fingerprint,
    )


def _read_pairs(upstream_ms: Sequence[float]) -> tuple[Spent, ...]:
    if len(upstream_ms) % 2:
        raise ValueError(f"upstream_ms has {len(upstream_ms)} numbers, which are no pairs")
    return tuple(zip(upstream_ms[::2], upstream_ms[1::2], strict=True))


def _read_page_keys(keys: bytes) -> tuple[bytes, ...]:
    if len(keys) % PAGE_KEY_BYTES:
        raise ValueError(f"page_keys are not {PAGE_KEY_BYTES} bytes each")
    return tuple([keys[at : at + PAGE_KEY_BYTES] for at in range(0, len(keys), PAGE_KEY_BYTES)])


_FORMS: wire.Forms = {
    "rows": wire.FieldForm(_write_rows, None),  # its numbers are among the payloads
    "token": wire.FieldForm(_write_token, _read_token),
    "upstream_ms": wire.FieldForm(chain.from_iterable, _read_pairs),
    "page_keys": wire.FieldForm(b"".join, _read_page_keys),
}


_TYPES: Mapping[str, type[Frame]] = {frame_type.__name__: frame_type for frame_type in get_args(Frame)}
_DESCRIPTOR: Any = session_pb2.Frame.DESCRIPTOR
_KINDS = [
    (kind.name, _TYPES[kind.message_type.name], kind.message_type) for kind in _DESCRIPTOR.oneofs_by_name["kind"].fields
]
_WRITERS: Mapping[type[Any], tuple[str, Callable[[Any, Any], None]]] = {
    frame_type: (kind, wire.writer(frame_type, content, _FORMS)) for kind, frame_type, content in _KINDS
}
_READERS: Mapping[str, Callable[..., Frame]] = {
    kind: wire.reader(frame_type, content, _FORMS) for kind, frame_type, content in _KINDS
}
