"""Has other servers recompute blocks of an answer, as one pass over the whole sequence (`serving.forward`).

The server is told neither the expected result nor that this is a check. Its answer may take RECOMPUTE_S, and as many
bytes as the rows or logits asked for. Used on the client's event loop; without torch.

Shapes: T positions, H hidden size, N draws, K largest logits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from swarm_protocol import limits
from swarm_protocol.errors import PeerTimeout, PeerUnreachable, PeerViolation
from swarm_protocol.rows import TOKENS, Rows, row_bytes
from swarm_protocol.serving_messages import FORWARD_METHOD, Compute, TensorPiece

from swarm.network.interface import EndOfStream, Network, Stream
from swarm.serving.checking.comparison import Floats, LargestLogits
from swarm.serving.model.shape import ModelShape

RECOMPUTE_S = 120.0
"""A check is not urgent, and a server may serve other requests first."""

NUM_TOP = 64
"""Logits that are asked for per draw. The sum over all logits bounds the others."""

PIECE_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanInputs:
    """The inputs of blocks `[start, end)`: token ids for block 0, else hidden states [T, H] as fp32.

    `num_draws` tokens were drawn after the last positions, at `temperature`; 0 for spans without the last block.
    """

    start: int
    end: int
    rows: bytes
    num_rows: int
    num_draws: int = 0
    temperature: float = 0.0


async def recompute(network: Network, model: ModelShape, peer_id: str, inputs: SpanInputs) -> Floats:
    """Return the outputs [T, H], or the largest logits [N, 2 K + 1] as `Compute` defines them.

    Raises PeerError, also the server's own error, and PeerViolation for numbers that are not finite.
    """
    asked = Compute(
        revision=model.revision,
        start=inputs.start,
        end=inputs.end,
        num_sequences=1,
        num_positions=inputs.num_rows,
        of_tokens=inputs.start == 0,
        head=inputs.num_draws > 0,
        codec="raw",
        deadline_s=RECOMPUTE_S,
        num_top=NUM_TOP if inputs.num_draws else 0,
        num_last=inputs.num_draws,
        temperature=inputs.temperature,
    )
    num_columns = model.vocab_size if inputs.num_draws else model.hidden_size
    _, num_rows, num_columns = asked.answer_shape(num_columns, has_logits=inputs.num_draws > 0)
    try:
        async with (
            asyncio.timeout(RECOMPUTE_S),
            network.stream(peer_id, f"{FORWARD_METHOD}/{model.name}", timeout_s=RECOMPUTE_S) as stream,
        ):
            await stream.send(asked.to_bytes())
            for piece in _pieces(inputs, model.hidden_size):
                await stream.send(piece.to_bytes())
            return await _received(stream, num_rows, num_columns)
    except TimeoutError:
        raise PeerTimeout("the server did not compute a check in time", peer_id=peer_id) from None
    except EndOfStream:
        raise PeerUnreachable("the server ended a check", peer_id=peer_id) from None


def largest_logits(answer_NC: Floats) -> list[LargestLogits]:
    num_top = answer_NC.shape[1] // 2
    return [
        LargestLogits(
            values_K=row[:num_top],
            ids_K=np.clip(row[num_top : 2 * num_top], 0, limits.MAX_VOCAB).astype(np.int64),
            log_sum=float(row[2 * num_top]),
        )
        for row in answer_NC
    ]


def fp32_bytes(rows_TH: Floats) -> bytes:
    """Encode hidden states for `SpanInputs`."""
    return rows_TH.astype("<f4").tobytes()


def _pieces(inputs: SpanInputs, hidden_size: int) -> Sequence[TensorPiece]:
    codec, num_columns = (TOKENS, 0) if inputs.start == 0 else ("raw", hidden_size)
    each = row_bytes(codec, num_columns)
    rows_each = min(1024, max(1, PIECE_BYTES // each))
    view = memoryview(inputs.rows)
    return [
        TensorPiece(
            rows=Rows(
                codec=codec,
                num_rows=min(rows_each, inputs.num_rows - row),
                num_columns=num_columns,
                payload=view[row * each : min(row + rows_each, inputs.num_rows) * each],
            )
        )
        for row in range(0, inputs.num_rows, rows_each)
    ]


async def _received(stream: Stream, num_rows: int, num_columns: int) -> Floats:
    parts: list[NDArray[np.float32]] = []
    num_left = num_rows
    while num_left:
        rows = TensorPiece.from_bytes(await stream.receive()).rows
        if rows.codec != "raw" or rows.num_columns != num_columns or rows.num_rows > num_left:
            raise PeerViolation(f"got {rows.num_rows} rows of {rows.num_columns} in {rows.codec}, of {num_left} due")
        parts.append(np.frombuffer(rows.payload, dtype="<f4").reshape(-1, num_columns).astype(np.float32))
        num_left -= rows.num_rows
    answer = np.concatenate(parts).astype(np.float64)
    if not np.isfinite(answer).all():
        raise PeerViolation("the numbers are not all finite")
    return answer
