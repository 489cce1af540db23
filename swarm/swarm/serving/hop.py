"""The client's side of one server in a chain: its stream, what was sent through it, and how long to wait for it.

`Hop.inputs` keeps everything the span was given, so that another server can be brought to the same state. Owned by one
`Session`, used by one task at a time.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import torch
from swarm_protocol.errors import PeerTimeout, PeerUnreachable, PeerViolation, SwarmError
from swarm_protocol.records import ServeRecord
from swarm_protocol.serving_messages import SESSION_METHOD, Open, Ready, Step, StepResult
from torch import Tensor

from swarm.network.interface import EndOfStream, Network, Stream
from swarm.router import routing
from swarm.serving.blocks import Want
from swarm.serving.tensors import pack, unpack_floats
from swarm.serving.trace import HopTrace

OPEN_S = 10.0
"""Dialling through a relay and a server's slow moment."""

STREAM_S = 3600.0
"""The stream's own limit; a step's is shorter and set here."""

FLOOR_S = 5.0
"""No server is given up sooner: a busy machine may pause for a second or two."""

FACTOR = 8.0
"""A step may take this many times what steps took so far, for another session's prefill may stand before it."""

MAX_COMPUTE_S = 600.0
"""Whatever a server claims: a chunk of a prompt on a slow machine, with others waiting, is done by then."""

SLOWEST_BYTES_PER_S = 250_000.0
"""A mobile uplink. Slower ones cannot carry activations."""


class Ledger:
    """Tensors appended along the first side, in one buffer that grows by doubling."""

    def __init__(self) -> None:
        self.length = 0
        self._buffer: Tensor | None = None

    def append(self, x: Tensor) -> None:
        length = self.length + x.shape[0]
        if self._buffer is None or self._buffer.shape[0] < length:
            grown = torch.empty(max(64, 2 * length), *x.shape[1:], dtype=x.dtype)
            if self._buffer is not None:
                grown[: self.length] = self._buffer[: self.length]
            self._buffer = grown
        self._buffer[self.length : length] = x
        self.length = length

    def rows(self, start: int, end: int) -> Tensor:
        assert self._buffer is not None
        assert 0 <= start < end <= self.length
        return self._buffer[start:end]


class StepTimer:
    """How long a step may take: from the server's own claim at first, then from what its steps took."""

    def __init__(self, record: ServeRecord, num_blocks: int) -> None:
        crowd = 1 + record.queue_depth
        self._decode_s = num_blocks * record.decode_ms_per_block * crowd / 1000
        self._prefill_s = num_blocks * record.prefill_ms_per_token * crowd / 1000

    def timeout_s(self, num_tokens: int, num_bytes: int) -> float:
        expected_s = self._decode_s if num_tokens == 1 else self._prefill_s * num_tokens
        return FLOOR_S + min(FACTOR * expected_s, MAX_COMPUTE_S) + num_bytes / SLOWEST_BYTES_PER_S

    def took(self, num_tokens: int, seconds: float) -> None:
        if num_tokens == 1:
            self._decode_s += 0.2 * (seconds - self._decode_s)
        else:
            self._prefill_s += 0.2 * (seconds / num_tokens - self._prefill_s)


class Hop:
    """An open session on one server. `length` positions of `inputs` have been run there."""

    def __init__(self, planned: routing.Hop, stream: Stream, stack: AsyncExitStack, timer: StepTimer) -> None:
        self.peer_id = planned.peer_id
        self.start = planned.start
        self.end = planned.end
        self.inputs = Ledger()
        self.length = 0
        self.max_step_tokens = 1
        self.is_leaving = False
        self.is_closed = False
        self.trace = HopTrace(peer_id=self.peer_id, start=self.start, end=self.end)
        self._stream = stream
        self._stack = stack
        self._timer = timer

    @classmethod
    async def open(cls, network: Network, planned: routing.Hop, opened: Open, record: ServeRecord) -> Hop:
        """Raises PeerError, or what the server refused with."""
        stack = AsyncExitStack()
        peer_id = planned.peer_id
        try:
            async with asyncio.timeout(OPEN_S):
                stream = await stack.enter_async_context(
                    network.stream(peer_id, f"{SESSION_METHOD}/{opened.model}", timeout_s=STREAM_S)
                )
                hop = cls(planned, stream, stack, StepTimer(record, planned.end - planned.start))
                await stream.send(opened.to_bytes())
                hop.max_step_tokens = Ready.from_bytes(await stream.receive()).max_step_tokens
                return hop
        except BaseException as error:
            await stack.aclose()
            raise _translated(error, peer_id) from error

    @property
    def is_behind(self) -> bool:
        return self.length < self.inputs.length

    async def run(self, num_tokens: int, want: Want, output_width: int) -> tuple[Tensor | None, float]:
        """Run the next `num_tokens` of the inputs. Returns float32 [T, output_width], one row for `Want.LAST`, and the
        milliseconds that were neither compute nor queue.

        Raises PeerError or what the server raised; the hop is then of no further use.
        """
        x = self.inputs.rows(self.length, self.length + num_tokens)
        num_rows = {Want.NOTHING: 0, Want.LAST: 1, Want.ALL: num_tokens}[want]
        num_bytes = x.nbytes + 4 * num_rows * output_width
        loop = asyncio.get_running_loop()
        since_s = loop.time()
        try:
            async with asyncio.timeout(self._timer.timeout_s(num_tokens, num_bytes)):
                step = Step(position=self.length, want=want.name.lower(), tensor=pack(x))
                await self._stream.send(step.to_bytes())
                result = StepResult.from_bytes(await self._stream.receive())
            if result.position != self.length + num_tokens or (result.tensor is None) != (num_rows == 0):
                raise PeerViolation("the server answered another question")
            output = unpack_floats(result.tensor, num_rows, output_width) if result.tensor else None
        except (SwarmError, TimeoutError, EndOfStream) as error:
            raise _translated(error, self.peer_id) from error
        self.length += num_tokens
        self.is_leaving = result.leave_within_s is not None
        self._timer.took(num_tokens, loop.time() - since_s)
        wire_ms = max(0.0, (loop.time() - since_s) * 1000 - result.compute_ms - result.queue_ms)
        self.trace.num_steps += 1
        self.trace.compute_ms += result.compute_ms
        self.trace.queue_ms += result.queue_ms
        self.trace.wire_ms += wire_ms
        return output, wire_ms

    async def close(self) -> None:
        await self._stack.aclose()


def _translated(error: BaseException, peer_id: str) -> BaseException:
    match error:
        case TimeoutError():
            return PeerTimeout("the server did not answer in time", peer_id=peer_id)
        case EndOfStream():
            return PeerUnreachable("the server ended the session", peer_id=peer_id)
        case SwarmError():
            error.peer_id = error.peer_id or peer_id
    return error
