"""Runs a span on whole sequences, for clients that train something of their own around it. It keeps no state for a
client.

A call's tensors are received, computed piece by piece in the engine's thread between the passes of sessions, and sent
back. `forward_call` cuts a call into pieces; a session's token waits for at most one of them. `ForwardServer` bounds
the memory and number of all calls; each call runs in the network's handler task and ends with it.

Shapes: B sequences, T positions, N rows of all sequences, H hidden size, V vocabulary, C columns: H, V after
the head, or what is chosen of V.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from weakref import WeakKeyDictionary

import torch
from swarm_compression import CodecError
from swarm_protocol import limits
from swarm_protocol.errors import PeerRefused, PeerTimeout, SessionError, SwarmError
from swarm_protocol.serving_messages import BACKWARD_METHOD, FORWARD_METHOD, MAX_CALL_BYTES, Compute
from torch import Tensor

from swarm.network.interface import EndOfStream, FailpointHook, Stream, StreamHandler, no_failpoints
from swarm.network.peer_budgets import ProviderOf
from swarm.serving.model.span import Span
from swarm.serving.peer_shares import Limits, Sharer, byte_limits, over_limit
from swarm.serving.server.deployment import Deployment
from swarm.serving.server.forward_call import Direction, ForwardCall, ForwardPace
from swarm.serving.wire.tensor_stream import receive_floats, receive_tokens, send_tensor

RETRY_AFTER_S = 1.0
"""Seconds after which a refused client may ask again: most calls take less."""

PACE_S = 60.0
"""Seconds after the last piece until its pace is forgotten: a machine that was slow for a while would refuse all calls
by it, and so measure no other."""

OPEN_S = 10.0
"""Seconds within which a new stream must send its request."""

STALL_S = 30.0
"""Seconds that a tensor may take beyond the time of its bytes: a client that hardly sends or reads must not hold memory
for long."""

MAX_CALL_S = 600.0
"""Maximum seconds of a call, whatever deadline a client sets."""


class ForwardAdmission:
    """Admits calls and counts their tensors: up to `max_bytes` for all calls, three quarters of that for those of one
    provider's network, and half for one client's. `max_calls` are the numbers of calls for the same three. `calls` are
    those that have not ended, each with its client and its bytes.
    """

    def __init__(self, *, max_bytes: int = 2 * MAX_CALL_BYTES, max_calls: Limits = (32, 16, 4)) -> None:
        self.calls: list[tuple[Sharer, int]] = []
        self._max_bytes = byte_limits(max_bytes)
        self._max_calls = max_calls

    @contextmanager
    def reserved(self, client: Sharer, num_bytes: int) -> Iterator[None]:
        """Reserve `num_bytes` for a call of `client`. Raises PeerRefused, with `retry_after_s` if there may be room
        later."""
        most = self._max_bytes[-1]
        if num_bytes > most:
            raise PeerRefused(
                f"the call takes {num_bytes} bytes, and a client may have {most} here",
                remedy="use fewer or shorter sequences, or no logits",
                lacks_room=True,
            )
        calls = [(other, 1) for other, _ in self.calls]
        full = {over_limit(calls, client, 1, self._max_calls)}
        full.add(over_limit(self.calls, client, num_bytes, self._max_bytes))
        if full != {""}:
            raise self._busy("other calls of yours are under way" if "peer" in full else "others call, too")
        call = (client, num_bytes)
        self.calls.append(call)
        try:
            yield
        finally:
            self.calls.remove(call)

    def _busy(self, why: str) -> PeerRefused:
        return PeerRefused(
            f"no room for another call on whole sequences: {why}",
            remedy="wait, or ask another server",
            retry_after_s=RETRY_AFTER_S,
        )


class ForwardServer:
    """Answers both methods of the model `name`. `current` returns the deployment that calls run on, or raises
    PeerRefused."""

    def __init__(
        self,
        name: str,
        current: Callable[[], Deployment],
        *,
        provider_of: ProviderOf,
        room: ForwardAdmission | None = None,
        failpoints: FailpointHook = no_failpoints,
    ) -> None:
        self.room = room or ForwardAdmission()
        self._name = name
        self._current = current
        self._provider_of = provider_of
        self._failpoints = failpoints
        self._paces: WeakKeyDictionary[Deployment, ForwardPace] = WeakKeyDictionary()
        # the engine gets one piece at a time, so that its own passes run between any two
        self._turn = asyncio.Lock()

    @property
    def methods(self) -> Mapping[str, StreamHandler]:
        """The handlers of both methods, by name."""
        return {
            f"{FORWARD_METHOD}/{self._name}": partial(self._answer, "forward"),
            f"{BACKWARD_METHOD}/{self._name}": partial(self._answer, "backward"),
        }

    async def _answer(self, direction: Direction, peer_id: str, stream: Stream) -> None:
        try:
            async with asyncio.timeout(OPEN_S):
                asked = Compute.from_bytes(await stream.receive())
            deployed = self._current()
            call = ForwardCall(asked, direction, deployed, self._pace(deployed))
            with self.room.reserved(Sharer(self._provider_of(peer_id), peer_id), call.num_bytes):
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
            idle_ms = deployed.loaded.speed.prefill_ms
            pace = self._paces[deployed] = ForwardPace(deployed.speed.prefill_ms, idle_ms=idle_ms)
            pace.until_s = now_s + PACE_S
        return pace

    async def _serve_call(self, call: ForwardCall, stream: Stream) -> None:
        asked, span = call.asked, call.span
        shape = asked.num_sequences, asked.num_positions
        if asked.of_tokens:
            x = (await receive_tokens(stream, asked.num_rows, span.vocab_size, stall_s=STALL_S)).view(shape)
        else:
            x = await receive_floats(stream, (*shape, span.hidden_size), stall_s=STALL_S)
        if call.direction == "forward":
            targets_BT = None
            if asked.has_targets:
                received = await receive_tokens(stream, asked.num_rows, span.vocab_size, stall_s=STALL_S)
                targets_BT = received.view(shape)
            await self._failpoints.reached("serve/forward")
            answer = await self._forward(call, x, targets_BT)
        else:
            grad_BTC = await receive_floats(stream, call.answer_shape, stall_s=STALL_S)
            await self._failpoints.reached("serve/backward")
            answer = await self._backward(call, x, grad_BTC)
        try:
            await send_tensor(stream, answer.flatten(0, 1), asked.codec, stall_s=STALL_S)
        except CodecError as error:
            raise SessionError(f"the answer is not finite: {error}", remedy="use a model in a wider dtype") from error

    async def _forward(self, call: ForwardCall, x: Tensor, targets_BT: Tensor | None) -> Tensor:
        """Return the output rows [B, T, C] for `x`."""
        if not call.asked.end:
            async with self._turn:
                embed = partial(_embed, call.span)
                embedded: tuple[Tensor, float] = await call.deployed.engine.in_thread(_timed, embed, x)
            return embedded[0]
        outputs = []
        for rows in _batches(x, call.cut.num_sequences):
            for start, end in call.cut.spans:
                run = partial(_forward, call, start=start, end=end)
                num_blocks = call.num_blocks(start, end)
                rows = await self._piece(call, "forward", num_blocks, run, rows)  # noqa: PLW2901 the next one's input
            outputs.append(rows.float())
        output = torch.cat(outputs)
        return await self._chosen_logits(call, output, targets_BT) if call.chooses_logits else output

    async def _chosen_logits(self, call: ForwardCall, hidden_BTH: Tensor, targets_BT: Tensor | None) -> Tensor:
        """Return what the call wants of the logits, given the outputs of the model's last block."""
        asked = call.asked
        rows_1NH = hidden_BTH[:, -asked.num_last :].flatten(0, 1)[None]
        targets_1N = None if targets_BT is None else targets_BT[:, -asked.num_last :].flatten()[None]
        chosen, low = list[Tensor](), 0
        while low < rows_1NH.shape[1]:
            part = slice(low, low + call.head_rows)
            targets = None if targets_1N is None else targets_1N[:, part]
            run = partial(_head, call.span, asked, targets=targets)
            chosen.append(await self._piece(call, "forward", 0.0, run, rows_1NH[:, part]))
            low = part.stop
        return torch.cat(chosen, dim=1).view(call.answer_shape)

    async def _backward(self, call: ForwardCall, x_BTH: Tensor, grad_BTC: Tensor) -> Tensor:
        """Return the gradient with respect to `x_BTH`, in its shape. The inputs of each piece are computed again."""
        each, span, head = call.cut.num_sequences, call.span, call.asked.head
        grads = []
        for rows, grad in zip(_batches(x_BTH, each), _batches(grad_BTC, each), strict=True):
            inputs = [rows]
            for start, end in call.cut.spans[:-1]:
                run, num_blocks = partial(_forward, call, start=start, end=end), call.num_blocks(start, end)
                inputs.append(await self._piece(call, "forward", num_blocks, run, inputs[-1]))
            for start, end in reversed(call.cut.spans):
                back, num_blocks = partial(span.backward, start=start, end=end, head=head), call.num_blocks(start, end)
                grad = await self._piece(call, "backward", num_blocks, back, inputs.pop(), grad)  # noqa: PLW2901
            grads.append(grad.float())
        return torch.cat(grads)

    async def _piece(
        self,
        call: ForwardCall,
        direction: Direction,
        num_blocks: float,
        run: Callable[..., Tensor],
        *tensors: Tensor,
    ) -> Tensor:
        """Run one piece, which takes the time of `num_blocks`, in the engine's thread. Pieces of the head (0 blocks)
        measure no pace, since they may be tiny.

        Raises SessionError if it could not be computed, and PeerRefused if the engine has ended.
        """
        async with self._turn:
            timed: tuple[Tensor, float] = await call.deployed.engine.in_thread(_timed, run, *tensors)
        result, elapsed_ms = timed
        if num_blocks:
            call.pace.took(direction, len(tensors[0]) * call.sequence_work, num_blocks, elapsed_ms)
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
def _forward(call: ForwardCall, x: Tensor, *, start: int, end: int) -> Tensor:
    if call.chooses_logits and end == call.asked.end:
        return call.span.last_output(x, start)
    return call.span.forward(x, start, end, head=call.asked.head, num_last=call.asked.num_last)


@torch.no_grad()
def _head(span: Span, asked: Compute, x_BTH: Tensor, *, targets: Tensor | None) -> Tensor:
    return chosen_logits(span.head(x_BTH), asked.num_top, asked.temperature or 1.0, targets)


def chosen_logits(logits_BTV: Tensor, num_top: int, temperature: float, targets_BT: Tensor | None) -> Tensor:
    """Return for each row the largest logits, then their ids, then with targets the logit of the row's target, then the
    log-sum-exp of all logits at `temperature`."""
    logits_BTV = logits_BTV.float()
    values, ids = logits_BTV.topk(min(num_top, logits_BTV.shape[-1]))
    # ids are below MAX_VOCAB, and so exact in float32
    columns = [values, ids.float()]
    if targets_BT is not None:
        logits_BT1 = logits_BTV.gather(-1, targets_BT.to(logits_BTV.device)[..., None])
        columns.append(logits_BT1.clamp(min=-limits.MAX_LOGPROB))  # a token that the model excludes has no finite one
    return torch.cat([*columns, (logits_BTV / temperature).logsumexp(-1, keepdim=True)], dim=-1)


def _embed(span: Span, tokens_BT: Tensor) -> Tensor:
    return torch.stack([span.embed(tokens_T) for tokens_T in tokens_BT]).float()
