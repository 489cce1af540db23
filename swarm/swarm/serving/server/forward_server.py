"""Runs a span on whole sequences, for clients that train something of their own around it. It keeps no state for a
client.

A call's tensors are received, computed piece by piece in the engine's thread between the passes of sessions, and sent
back. A piece runs some blocks on some sequences. It takes about PIECE_MS; the smallest piece is one block on one
sequence. A call is refused if that takes over MAX_PIECE_MS. A session's token waits for at most one piece.
`ForwardServer` bounds the memory and number of all calls; each call runs in the network's handler task and ends with
it. Legend of shapes: B sequences, T positions, H hidden size, C columns: H, or the vocabulary after the head.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias
from weakref import WeakKeyDictionary

import torch
from swarm_compression import CodecError
from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerViolation, SessionError, SwarmError
from swarm_protocol.serving_messages import BACKWARD_METHOD, FORWARD_METHOD, Compute
from torch import Tensor

from swarm.network.interface import EndOfStream, FailpointHook, Network, Stream, no_failpoints
from swarm.serving.model.span import Span
from swarm.serving.server.deployment import Deployment
from swarm.serving.wire.tensor_stream import receive_floats, receive_tokens, send_tensor

RETRY_AFTER_S = 1.0
"""Seconds after which a refused client may ask again: most calls take less."""

PIECE_MS = 50.0
"""Target time of a piece: about that of a token's pass on a volunteer's machine, so that sessions get every other
pass."""

MAX_PIECE_MS = 1000.0

PACE_S = 60.0
"""Seconds after the last piece until its pace is forgotten: a machine that was slow for a while would refuse all calls
by it, and so measure no other."""

MIN_POSITION_MS = 1e-6
"""Minimum time of a position, for clocks that are too coarse."""

BACKWARD_FACTOR = 3.0
"""Time of a backward pass in forward passes: the block is run again, and then each product with a weight is computed
once more for the gradient of its input."""

Direction: TypeAlias = Literal["forward", "backward"]

OPEN_S = 10.0
"""Seconds within which a new stream must send its request."""

STALL_S = 30.0
"""Seconds that a tensor may take beyond the time of its bytes: a client that hardly sends or reads must not hold memory
for long."""

MAX_CALL_S = 600.0
"""Maximum seconds of a call, whatever deadline a client sets."""

BLOCK_WEIGHTS = 12
"""A block has some 12 H^2 weights, and the head has H V. This estimates the head's time before it has run."""


class ForwardAdmission:
    """Admits calls and counts their tensors: up to `max_bytes` for all calls, and half of that for one client's.

    `num_bytes` and `num_calls` are 0 when there is no call.
    """

    def __init__(self, *, max_bytes: int = 2**30, max_calls: int = 32, max_client_calls: int = 4) -> None:
        self._max_bytes = max_bytes
        self._max_calls = max_calls
        self._max_client_calls = max_client_calls
        self._calls: list[tuple[str, int]] = []

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self._calls)

    @contextmanager
    def reserved(self, client: str, num_bytes: int) -> Iterator[None]:
        """Reserve `num_bytes` for a call of `client`. Raises PeerRefused, with `retry_after_s` if there may be room
        later."""
        most = self._max_bytes // 2
        if num_bytes > most:
            raise PeerRefused(
                f"the call takes {num_bytes} bytes, and a client may have {most} here",
                remedy="use fewer or shorter sequences, or no logits",
            )
        own = [taken for peer_id, taken in self._calls if peer_id == client]
        if len(own) >= self._max_client_calls or sum(own) + num_bytes > most:
            raise self._busy("other calls of yours are under way")
        if self.num_calls >= self._max_calls or self.num_bytes + num_bytes > self._max_bytes:
            raise self._busy("others call, too")
        call = (client, num_bytes)
        self._calls.append(call)
        try:
            yield
        finally:
            self._calls.remove(call)

    def _busy(self, why: str) -> PeerRefused:
        return PeerRefused(
            f"no room for another call on whole sequences: {why}",
            remedy="wait, or ask another server",
            retry_after_s=RETRY_AFTER_S,
        )


class ForwardPace:
    """Estimates the milliseconds of a position on one block: at first from `forward_ms`, then as measured. It is good
    until `until_s` on the loop's clock."""

    def __init__(self, forward_ms: float) -> None:
        self.until_s = math.inf
        forward_ms = max(forward_ms, MIN_POSITION_MS)
        self.ms: dict[Direction, float] = {"forward": forward_ms, "backward": BACKWARD_FACTOR * forward_ms}

    def took(self, direction: Direction, num_positions: int, num_blocks: float, elapsed_ms: float) -> None:
        measured_ms = elapsed_ms / (num_positions * num_blocks)
        self.ms[direction] = max(MIN_POSITION_MS, 0.8 * self.ms[direction] + 0.2 * measured_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardCut:
    """A call cut into pieces. Each piece runs one of `spans`, the last of which includes the head, on
    `num_sequences`."""

    num_sequences: int
    spans: tuple[tuple[int, int], ...]


def cut_call(num_positions: int, start: int, end: int, *, head_blocks: float, position_ms: float) -> ForwardCut:
    """Cut a call on sequences of `num_positions` into pieces. The head takes as long as `head_blocks` blocks, 0 without
    a head.

    Raises PeerRefused if one block takes too long.
    """
    block_ms = num_positions * position_ms
    if block_ms * max(1.0, head_blocks) > MAX_PIECE_MS:
        raise PeerRefused(
            f"a block takes {block_ms:.0f} ms for {num_positions} positions here, and others would wait for it",
            remedy="use shorter sequences",
        )
    num_blocks = end - start
    num_fitting = PIECE_MS / block_ms
    whole = max(1.0, num_blocks + head_blocks)
    if num_fitting >= whole:
        return ForwardCut(num_sequences=int(num_fitting // whole), spans=((start, end),))
    each = max(1, int(num_fitting))
    return ForwardCut(num_sequences=1, spans=tuple((low, min(low + each, end)) for low in range(start, end, each)))


@dataclass(slots=True)
class _ForwardCall:
    """A call that was checked against the span."""

    asked: Compute
    direction: Direction
    deployed: Deployment
    pace: ForwardPace
    cut: ForwardCut = field(init=False)

    def __post_init__(self) -> None:
        """Set `cut`. Raises PeerRefused or PeerViolation for what this server cannot compute."""
        asked, span = self.asked, self.span
        if asked.revision != self.deployed.loaded.revision:
            raise PeerRefused(f"this server has revision {self.deployed.loaded.revision}", remedy="look up its record")
        if not span.start <= asked.start <= asked.end <= span.end:
            raise PeerRefused(f"this server has blocks {span.start}:{span.end}", remedy="look up its record")
        if self.direction == "backward" and (asked.of_tokens or asked.num_top or asked.num_last):
            raise PeerViolation("token ids and chosen logits have no gradient")
        self.cut = cut_call(
            asked.num_positions,
            asked.start,
            asked.end,
            head_blocks=self.head_blocks,
            position_ms=self.pace.ms[self.direction],
        )

    @property
    def span(self) -> Span:
        return self.deployed.loaded.span

    @property
    def has_head(self) -> bool:
        return self.asked.head and self.asked.end == self.span.num_blocks

    @property
    def head_blocks(self) -> float:
        span = self.span
        return span.vocab_size / (BLOCK_WEIGHTS * span.hidden_size) if self.has_head else 0.0

    @property
    def answer_shape(self) -> tuple[int, int, int]:
        """The numbers of sequences, positions and columns of the forward output."""
        span = self.span
        return self.asked.answer_shape(span.vocab_size if self.has_head else span.hidden_size, has_logits=self.has_head)

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors held for the call at a time, as fp32, without the memory that a running piece
        needs."""
        span, asked = self.span, self.asked
        hidden_size = span.hidden_size
        num_sequences, num_positions, num_columns = self.answer_shape
        if self.direction == "forward":
            # the logits of a piece are held while the largest of them are selected
            head_bytes = 4 * num_positions * span.vocab_size if self.has_head and asked.num_top else 0
            return 4 * (asked.num_rows * hidden_size + num_sequences * num_positions * num_columns) + head_bytes
        row_bytes = 4 * (hidden_size + num_columns)
        kept_rows = (
            min(self.cut.num_sequences, self.asked.num_sequences) * self.asked.num_positions * len(self.cut.spans)
        )
        return self.asked.num_rows * (row_bytes + 4 * hidden_size) + kept_rows * 4 * hidden_size


class ForwardServer:
    """Serves both methods of the model `name`. `current` returns the deployment that calls run on, or raises
    PeerRefused."""

    def __init__(
        self,
        name: str,
        current: Callable[[], Deployment],
        *,
        room: ForwardAdmission | None = None,
        failpoints: FailpointHook = no_failpoints,
    ) -> None:
        self.room = room or ForwardAdmission()
        self._name = name
        self._current = current
        self._failpoints = failpoints
        self._paces: WeakKeyDictionary[Deployment, ForwardPace] = WeakKeyDictionary()
        # the engine gets one piece at a time, so that its own passes run between any two
        self._turn = asyncio.Lock()

    async def serve(self, network: Network) -> None:
        await network.serve_stream(f"{FORWARD_METHOD}/{self._name}", partial(self._answer, "forward"))
        await network.serve_stream(f"{BACKWARD_METHOD}/{self._name}", partial(self._answer, "backward"))

    async def _answer(self, direction: Direction, peer_id: str, stream: Stream) -> None:
        try:
            async with asyncio.timeout(OPEN_S):
                asked = Compute.from_bytes(await stream.receive())
            deployed = self._current()
            call = _ForwardCall(asked, direction, deployed, self._pace(deployed))
            with self.room.reserved(peer_id, call.num_bytes):
                async with asyncio.timeout(min(asked.deadline_s, MAX_CALL_S)):
                    await self._serve_call(call, stream)
        except EndOfStream:
            pass
        except TimeoutError:
            raise PeerTimeout("a call on whole sequences took too long") from None

    def _pace(self, deployed: Deployment) -> ForwardPace:
        now_s = asyncio.get_running_loop().time()
        pace = self._paces.get(deployed)
        if pace is None or pace.until_s <= now_s:
            pace = self._paces[deployed] = ForwardPace(deployed.speed.prefill_ms)
            pace.until_s = now_s + PACE_S
        return pace

    async def _serve_call(self, call: _ForwardCall, stream: Stream) -> None:
        asked, span = call.asked, call.span
        shape = asked.num_sequences, asked.num_positions
        if asked.of_tokens:
            x = (await receive_tokens(stream, asked.num_rows, span.vocab_size, stall_s=STALL_S)).view(shape)
        else:
            x = await receive_floats(stream, (*shape, span.hidden_size), stall_s=STALL_S)
        if call.direction == "forward":
            await self._failpoints.reached("serve/forward")
            answer = await self._forward(call, x)
        else:
            grad_BTC = await receive_floats(stream, call.answer_shape, stall_s=STALL_S)
            await self._failpoints.reached("serve/backward")
            answer = await self._backward(call, x, grad_BTC)
        try:
            await send_tensor(stream, answer.flatten(0, 1), asked.codec, stall_s=STALL_S)
        except CodecError as error:
            raise SessionError(f"the answer is not finite: {error}", remedy="use a model in a wider dtype") from error

    async def _forward(self, call: _ForwardCall, x: Tensor) -> Tensor:
        """Return the output rows [B, T, C] for `x`."""
        if not call.asked.end:
            async with self._turn:
                embed = partial(_embed, call.span)
                embedded: tuple[Tensor, float] = await call.deployed.engine.in_thread(_timed, embed, x)
            return embedded[0]
        outputs = []
        for rows in _batches(x, call.cut.num_sequences):
            for start, end in call.cut.spans:
                run = partial(_forward, call.span, call.asked, start=start, end=end)
                rows = await self._piece(call, "forward", (start, end), run, rows)  # noqa: PLW2901 the next one's input
            outputs.append(rows.float())
        return torch.cat(outputs)

    async def _backward(self, call: _ForwardCall, x_BTH: Tensor, grad_BTC: Tensor) -> Tensor:
        """Return the gradient with respect to `x_BTH`, in its shape. The inputs of each piece are computed again."""
        each, span, head = call.cut.num_sequences, call.span, call.asked.head
        grads = []
        for rows, grad in zip(_batches(x_BTH, each), _batches(grad_BTC, each), strict=True):
            inputs = [rows]
            for start, end in call.cut.spans[:-1]:
                run = partial(_forward, span, call.asked, start=start, end=end)
                inputs.append(await self._piece(call, "forward", (start, end), run, inputs[-1]))
            for start, end in reversed(call.cut.spans):
                back = partial(span.backward, start=start, end=end, head=head)
                grad = await self._piece(call, "backward", (start, end), back, inputs.pop(), grad)  # noqa: PLW2901
            grads.append(grad.float())
        return torch.cat(grads)

    async def _piece(
        self,
        call: _ForwardCall,
        direction: Direction,
        blocks: tuple[int, int],
        run: Callable[..., Tensor],
        *tensors: Tensor,
    ) -> Tensor:
        """Run one piece in the engine's thread. Raises SessionError if it could not be computed, and PeerRefused if the
        engine has ended."""
        async with self._turn:
            timed: tuple[Tensor, float] = await call.deployed.engine.in_thread(_timed, run, *tensors)
        result, elapsed_ms = timed
        num_positions = tensors[0].shape[0] * tensors[0].shape[1]
        num_blocks = blocks[1] - blocks[0] + (call.head_blocks if blocks[1] == call.asked.end else 0.0)
        call.pace.took(direction, num_positions, num_blocks, elapsed_ms)
        call.pace.until_s = asyncio.get_running_loop().time() + PACE_S
        return result


def _batches(x: Tensor, num_sequences: int) -> list[Tensor]:
    return [x[low : low + num_sequences] for low in range(0, len(x), num_sequences)]


def _timed(run: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, float]:
    """Run, and return the result, on the CPU, with the milliseconds that it took."""
    since_s = time.perf_counter()
    try:
        result = run(*tensors).to("cpu")  # in this thread, so that the loop does not wait for an accelerator
    except SwarmError:
        raise
    except Exception as error:  # a bug or an exhausted device, reported to the caller
        raise SessionError(f"the server could not compute: {type(error).__name__}: {error}") from error
    return result, (time.perf_counter() - since_s) * 1000


@torch.no_grad()
def _forward(span: Span, asked: Compute, x: Tensor, *, start: int, end: int) -> Tensor:
    output = span.forward(x, start, end, head=asked.head, num_last=asked.num_last)
    if not (asked.num_top and asked.head and end == span.num_blocks):
        return output
    return largest_logits(output, asked.num_top, asked.temperature or 1.0)


def largest_logits(logits_BTV: Tensor, num_top: int, temperature: float) -> Tensor:
    """Return for each row the largest logits, then their ids, then the log-sum-exp of all logits at `temperature`, as
    [B, T, 2 num_top + 1]."""
    logits_BTV = logits_BTV.float()
    values, ids = logits_BTV.topk(min(num_top, logits_BTV.shape[-1]))
    # ids are below MAX_VOCAB, and so exact in float32
    return torch.cat([values, ids.float(), (logits_BTV / temperature).logsumexp(-1, keepdim=True)], dim=-1)


def _embed(span: Span, tokens_BT: Tensor) -> Tensor:
    return torch.stack([span.embed(tokens_T) for tokens_T in tokens_BT]).float()
