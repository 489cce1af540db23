"""One call on one server: some of a model's blocks on whole sequences, forward or backward, and how long to wait.

Legend of shapes: B sequences, T positions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from swarm_compression import CodecError
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError, PeerError, PeerTimeout, PeerUnreachable, SessionError, SwarmError
from swarm_protocol.forward_messages import BACKWARD_METHOD, Compute
from swarm_protocol.records import ServeRecord
from swarm_protocol.rows import TOKENS
from torch import Tensor

from swarm.network.interface import EndOfStream, Network
from swarm.serving.wire.tensor_stream import receive_floats, send_tensor

FLOOR_S = 10.0
"""Dialling through a relay and a server's slow moment."""

FACTOR = 16.0
"""Over what the server's record says: the calls and sessions of others come between."""

BACKWARD_FACTOR = 4.0
"""The forward pass is run twice again at worst, and the backward pass takes as long as two."""

MAX_COMPUTE_S = 600.0

SLOWEST_BYTES_PER_S = 250_000.0
"""A mobile uplink."""


async def compute(
    network: Network,
    peer_id: str,
    method: str,
    asked: Compute,
    tensors: Sequence[Tensor],
    *,
    num_columns: int,
) -> Tensor:
    """What the server made of `tensors` (int64 [B, T] or float32 [B, T, …] each): float32 [B, T, num_columns].

    Raises PeerError, SessionError if the server could not compute it, and ConfigError for numbers that are not finite.
    """
    limit_s = asked.deadline_s
    shape = asked.num_sequences, asked.num_positions, num_columns
    try:
        async with asyncio.timeout(limit_s), network.stream(peer_id, method, timeout_s=limit_s) as stream:
            await stream.send(asked.to_bytes())
            for x in tensors:
                await send_tensor(stream, x.flatten(0, 1), asked.codec if x.is_floating_point() else TOKENS)
            return await receive_floats(stream, shape)
    except CodecError as error:
        raise ConfigError(f"the numbers cannot be sent: {error}", remedy="check the loss") from error
    except TimeoutError:
        raise PeerTimeout("the server did not answer in time", peer_id=peer_id) from None
    except EndOfStream:
        raise PeerUnreachable("the server ended the call", peer_id=peer_id) from None
    except SwarmError as error:
        if not isinstance(error, PeerError | SessionError):
            # its own trouble, whatever it calls it
            raise PeerError(error.message, peer_id=peer_id) from error
        error.peer_id = error.peer_id or peer_id
        raise


def deadline_s(record: ServeRecord, method: str, *, num_blocks: int, num_rows: int, num_bytes: int) -> float:
    """How long a call may take, from the server's own claim within bounds."""
    expected_s = num_blocks * num_rows * record.prefill_ms_per_token / 1000
    factor = FACTOR * (BACKWARD_FACTOR if method.startswith(BACKWARD_METHOD) else 1.0)
    limit_s = FLOOR_S + min(factor * expected_s, MAX_COMPUTE_S) + num_bytes / SLOWEST_BYTES_PER_S
    return min(limit_s, limits.MAX_STEP_MS / 1000)
