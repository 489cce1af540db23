"""Tensors as rows on the wire: the rows of one step with their checks, and whole tensors over a stream.

A whole tensor goes in pieces. `stall_s` is what the other side gets for a tensor beside the time that its bytes take
at SLOWEST_TENSOR_BYTES_PER_S. A peer that keeps sending or reading a little thus holds a tensor's memory no longer than
one that does neither.

Shapes: T positions, H hidden size, N rows, C columns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np
import torch
from swarm_compression import CodecError, get_row_codec
from swarm_protocol.errors import PeerTimeout, PeerViolation, SessionError
from swarm_protocol.rows import TOKENS, Rows
from swarm_protocol.serving_messages import FORWARD_CODECS, TensorPiece
from torch import Tensor

from swarm.network.interface import Stream

T = TypeVar("T")

SLOWEST_TENSOR_BYTES_PER_S = 250_000.0
"""A mobile uplink. Sessions allow for slower ones, but calls have no pings that notice a dead peer sooner."""


def rows_of(x_TH: Tensor, codec: str) -> tuple[Rows, float]:
    """Encode float32 [T, H] as rows; also return the codec's loss relative to their root mean square.

    Raises SessionError for numbers that the codec cannot hold.
    """
    row_codec = get_row_codec(codec)
    num_rows, num_columns = x_TH.shape
    try:
        payload = row_codec.encode(x_TH)
    except CodecError as error:
        raise SessionError(f"the server computed what {codec} cannot carry: {error}") from error
    rows = Rows(codec=codec, num_rows=num_rows, num_columns=num_columns, payload=payload)
    if codec == "raw":
        return rows, 0.0
    lost = torch.linalg.vector_norm(row_codec.decode(payload, num_rows, num_columns) - x_TH)
    return rows, min(1.0, float(lost / torch.linalg.vector_norm(x_TH).clamp(min=1e-30)))


def tokens_of(rows: Rows, vocab_size: int) -> Tensor:
    """Decode token ids, int64 [T]. Raises PeerViolation unless all are ids of this vocabulary."""
    if rows.codec != TOKENS:
        raise PeerViolation(f"got rows in {rows.codec}, not token ids")
    tokens_T = np.frombuffer(rows.payload, dtype="<i4").astype(np.int64)
    check_ids(tokens_T, vocab_size)
    return torch.from_numpy(tokens_T)


def check_ids(ids: np.ndarray, vocab_size: int) -> None:
    """Raises PeerViolation unless all are ids of tokens of this vocabulary."""
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise PeerViolation(f"token ids are outside this model's vocabulary of {vocab_size}")


def hidden_of(rows: Rows, codec: str, hidden_size: int) -> Tensor:
    """Decode hidden states, float32 [T, H]. Raises PeerViolation unless all are finite."""
    if rows.codec != codec or rows.num_columns != hidden_size:
        raise PeerViolation(f"got {rows.num_columns} columns in {rows.codec}, not {hidden_size} in {codec}")
    try:
        return get_row_codec(codec).decode(rows.payload, rows.num_rows, hidden_size)
    except CodecError as error:
        raise PeerViolation(f"the rows are damaged: {error}") from None


async def send_tensor(stream: Stream, x: Tensor, codec: str, *, stall_s: float | None = None) -> None:
    """Send `x`, which is int64 [N], or float32 [N, C] for a codec of numbers.

    Raises CodecError if it is not finite, PeerTimeout, and as `Stream`.
    """
    limit, num_columns = _Limit(stall_s), x.shape[1] if x.dim() > 1 else 0
    for piece in TensorPiece.cut(codec, len(x), num_columns, lambda start, end: _encoded(x[start:end], codec)):
        message = piece.to_bytes()
        await limit.keep(stream.send(message))
        limit.moved(len(message))


async def receive_tokens(stream: Stream, num_rows: int, vocab_size: int, *, stall_s: float | None = None) -> Tensor:
    """Receive int64 [N]. Raises PeerViolation unless all are ids of this vocabulary, PeerTimeout, and as `Stream`."""
    tokens_N = torch.empty(num_rows, dtype=torch.int64)
    row, limit = 0, _Limit(stall_s)
    while row < num_rows:
        rows = await _receive(stream, (TOKENS,), (num_rows - row, 0), limit)
        tokens_N[row : row + rows.num_rows] = tokens_of(rows, vocab_size)
        row += rows.num_rows
    return tokens_N


async def receive_floats(stream: Stream, shape: tuple[int, ...], *, stall_s: float | None = None) -> Tensor:
    """Receive float32 of `shape`, whose last side is a row.

    Raises PeerViolation for other rows or numbers that are not finite, PeerTimeout, and as `Stream`.
    """
    x = torch.empty(shape)
    x_NC = x.view(-1, shape[-1])
    num_rows, num_columns = x_NC.shape
    row, limit = 0, _Limit(stall_s)
    while row < num_rows:
        rows = await _receive(stream, FORWARD_CODECS, (num_rows - row, num_columns), limit)
        try:
            decoded = get_row_codec(rows.codec).decode(rows.payload, rows.num_rows, num_columns)
        except CodecError as error:
            raise PeerViolation(f"rows cannot be read: {error}") from error
        x_NC[row : row + rows.num_rows] = decoded
        row += rows.num_rows
    return x


def _encoded(x: Tensor, codec: str) -> bytes:
    return x.numpy().astype("<i4").tobytes() if codec == TOKENS else get_row_codec(codec).encode(x.contiguous())


async def _receive(stream: Stream, codecs: tuple[str, ...], due: tuple[int, int], limit: _Limit) -> Rows:
    rows = TensorPiece.due(await limit.keep(stream.receive()), codecs, *due)
    limit.moved(len(rows.payload))
    return rows


class _Limit:
    """The time by which the next piece of a tensor must have gone through, or no limit."""

    def __init__(self, stall_s: float | None) -> None:
        self._stall_s = stall_s
        self._at_s = None if stall_s is None else asyncio.get_running_loop().time() + stall_s

    async def keep(self, waiting: Coroutine[Any, Any, T]) -> T:
        """Wait within the limit. Raises PeerTimeout."""
        try:
            async with asyncio.timeout_at(self._at_s):
                return await waiting
        except TimeoutError:
            raise PeerTimeout(f"a tensor came to a stop, or nearly, for {self._stall_s:g} s") from None

    def moved(self, num_bytes: int) -> None:
        if self._at_s is not None:
            self._at_s += num_bytes / SLOWEST_TENSOR_BYTES_PER_S
