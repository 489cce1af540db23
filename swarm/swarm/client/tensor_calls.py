"""Makes a client's calls with tensors: embeddings, and passes through a model's blocks with their gradients.

`AsyncClient` imports this module with the first such call, because it imports torch, which takes more than a second and
170 MiB, and which a client for text does not need. There is one `TensorCalls` per client, on its event loop.

A remote forward pass is a node of autograd's graph, whose backward pass runs through the same blocks. Autograd runs
`backward` in the thread that asks for gradients, since the node works on CPU tensors; the network belongs to the
client's loop, in another thread.

Shapes: B sequences, T positions, H hidden size, C columns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent import futures
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError, SessionError
from swarm_protocol.serving_messages import HEAD_PIECE_BYTES, MAX_CALL_BYTES
from torch import Tensor
from torch.autograd.function import once_differentiable

from swarm.client.assets_cache import AssetsCache
from swarm.client.catalog import ChosenRevision, ModelCatalog
from swarm.client.remote_blocks import ChosenLogits, ForwardOptions, RemoteBlocks, RemotePart
from swarm.client.request import ContextExceeded, check_prompt_ids
from swarm.network.interface import Network
from swarm.serving.model.shape import ModelShape
from swarm.serving.session.peer_health import PeerHealth
from swarm.serving.session.route_finder import KnownServers

T = TypeVar("T")

Wait: TypeAlias = Callable[[Coroutine[Any, Any, Any]], Any]
"""Run a coroutine in the client's loop, and wait for it in another thread."""

MAX_SCORED_AT_ONCE = 2
"""Maximum texts that are scored at once. A server takes four calls of one client, and a call may still be ending there
when its answer has arrived."""

LOOK_S = 1.0
"""Seconds between two checks of a waiting thread that the loop still runs."""


OF_A_TEXT = ForwardOptions(is_patient=False)
"""A pass over a whole text, which fails as soon as an answer would."""


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """A computed forward pass with its `output`, float32 [B, T, C]."""

    output: Tensor
    parts: Sequence[RemotePart]
    blocks: RemoteBlocks


class TensorCalls:
    """Runs tensors through the blocks of the chosen revision. All calls raise what `AsyncClient.forward` does."""

    def __init__(self, network: Network, health: PeerHealth, catalog: ModelCatalog, assets: AssetsCache) -> None:
        self._network = network
        self._health = health
        self._catalog = catalog
        self._assets = assets
        self._scoring = asyncio.Semaphore(MAX_SCORED_AT_ONCE)

    async def embed(self, ids: Sequence[int] | Tensor, model: str) -> Tensor:
        """Return the input embeddings of token ids: float32 [T, H], or [B, T, H] for a tensor [B, T]."""
        tokens = ids if isinstance(ids, Tensor) else torch.tensor(check_prompt_ids(ids), dtype=torch.int64)
        return await self._in_one_call(model, ForwardOptions(), partial(embed, tokens))

    async def pooled(self, token_ids: Sequence[int], model: str) -> Tensor:
        """Return the mean of the last hidden states after the last norm, scaled to length 1: float32 [H]."""

        async def ask(blocks: RemoteBlocks) -> ForwardPass:
            check_length(len(token_ids), blocks.model)
            return await run(torch.tensor(token_ids, dtype=torch.int64), blocks)

        ran = await self._in_one_call(model, OF_A_TEXT, ask)
        return torch.nn.functional.normalize(ran.output[0].double().mean(dim=0), dim=0).float()

    async def score(self, chosen: ChosenRevision, token_ids: Sequence[int], num_top: int) -> list[list[float]]:
        """Return for each position of a text the `num_top` largest logits of the token after it, their token ids, the
        logit of the token that follows in the text, and the log-sum-exp of all logits.

        The token after the last position is unknown, so the last but one number there is meaningless.
        """
        tokens_1T = torch.tensor([token_ids], dtype=torch.int64)
        wanted = replace(OF_A_TEXT, chosen=ChosenLogits(tokens_1T.roll(-1, dims=1), num_top))
        async with self._scoring:
            blocks = await self.blocks(chosen, wanted)
            check_length(len(token_ids), blocks.model, num_top=num_top)
            rows_1TC, _ = await blocks.forward(tokens_1T, 0, blocks.model.num_blocks)
        self._catalog.answered(chosen)
        rows: list[list[float]] = rows_1TC[0].tolist()
        return rows

    async def run_forward(self, x: Tensor, model: str, wanted: ForwardOptions) -> ForwardPass:
        """Run `AsyncClient.forward` without the part of autograd, which must run in the caller's thread."""
        return await self._in_one_call(model, wanted, partial(run, x))

    async def _in_one_call(self, model: str, wanted: ForwardOptions, ask: Callable[[RemoteBlocks], Awaitable[T]]) -> T:
        chosen = await self._catalog.to_use(model)
        answer = await ask(await self.blocks(chosen, wanted))
        self._catalog.answered(chosen)
        return answer

    async def blocks(self, chosen: ChosenRevision, wanted: ForwardOptions) -> RemoteBlocks:
        """Return the blocks of one revision."""
        self._health.measure(chosen.revision.servers)
        assets = await self._assets.get(chosen.name, chosen.revision.servers, chosen.published)
        known = KnownServers(self._health, chosen.revision.servers, assets.shape)
        return RemoteBlocks(self._network, known, wanted)


async def run(x: Tensor, blocks: RemoteBlocks) -> ForwardPass:
    """Run the forward pass of `x`: hidden states [B, T, H] or [T, H], or for the first block token ids [B, T] or [T].

    Raises SwarmError.
    """
    start, end = blocks.options.blocks(blocks.model)
    check_input(x, blocks.model, start)
    output, parts = await blocks.forward(_on_wire(x.detach()), start, end)
    return ForwardPass(output, parts, blocks)


async def embed(tokens: Tensor, blocks: RemoteBlocks) -> Tensor:
    """Return the input embeddings, float32 [T, H] or [B, T, H], of token ids [T] or [B, T]. Raises SwarmError."""
    check_input(tokens, blocks.model, 0)
    if tokens.is_floating_point():
        raise ConfigError("these are not token ids", remedy="use int64")
    embeddings = await blocks.embed(_on_wire(tokens))
    return embeddings if tokens.dim() == 2 else embeddings[0]


def attach(x: Tensor, ran: ForwardPass, wait: Wait) -> Tensor:
    """Return the output for `x`, with its dtype, device and number of dimensions. Gradients flow back through it to
    `x`."""
    if not x.is_floating_point():
        return ran.output if x.dim() == 2 else ran.output[0]
    output: Tensor = _RemotePass.apply(_on_wire(x), ran, wait)  # type: ignore[no-untyped-call]
    return (output if x.dim() == 3 else output[0]).to(x.device, x.dtype)


def check_tensor(x: object) -> None:
    """Check that `x` is a tensor. Raises ConfigError if it is not."""
    if not isinstance(x, Tensor):
        raise ConfigError(f"the input is {x!r:.80} and not a tensor", remedy="give torch.tensor(…) of it")


def check_input(x: Tensor, model: ModelShape, start: int) -> None:
    """Check an input. Raises ConfigError if no server would accept it."""
    num_sides = x.dim() - x.is_floating_point()
    if num_sides not in (1, 2) or not x.numel():
        raise ConfigError(
            f"the input has shape {tuple(x.shape)}", remedy="give [B, T, H] or [T, H], or token ids [B, T] or [T]"
        )
    num_positions = x.shape[:num_sides].numel()
    if num_positions > limits.MAX_FORWARD_ROWS:
        raise ConfigError(f"the input has {num_positions} positions", remedy=f"give {limits.MAX_FORWARD_ROWS} at most")
    if x.is_floating_point():
        if x.shape[-1] != model.hidden_size:
            raise ConfigError(
                f"the input has {x.shape[-1]} columns, and {model.name} {model.hidden_size}",
                remedy="give hidden states of this model",
            )
        if not bool(torch.isfinite(x).all()):
            raise ConfigError("the input is not finite", remedy="check the learning rate")
    elif start:
        raise ConfigError("token ids are for the first block", remedy="give hidden states, or start at 0")
    elif x.dtype != torch.int64 or int(x.min()) < 0 or int(x.max()) >= model.vocab_size:
        raise ConfigError("these are not token ids of the model", remedy=f"use int64 from 0 to {model.vocab_size - 1}")


def check_length(num_tokens: int, model: ModelShape, *, num_top: int = 0) -> None:
    """Check the length of a text, which will be scored if `num_top` is not 0. Raises ContextExceeded for one that every
    server would refuse for the memory that its call takes."""
    row_bytes = 8 * model.hidden_size + (8 * num_top + 16 if num_top else 0)
    most = (MAX_CALL_BYTES - (HEAD_PIECE_BYTES if num_top else 0)) // row_bytes
    if num_tokens > most:
        raise ContextExceeded(
            f"the text has {num_tokens} tokens, and {model.name} computes at most {most} of them in one call",
            remedy="shorten the text",
            field="prompt",
        )


def waiting_for(loop: asyncio.AbstractEventLoop) -> Wait:
    """Return the function that waits for work in the client's `loop`, whose user runs `backward` in another thread."""

    def wait(work: Coroutine[Any, Any, T]) -> T:
        if not loop.is_running() or _runs_here(loop):
            work.close()
            if not loop.is_running():
                raise _closed()
            raise ConfigError(
                "backward() would wait for the event loop that it stops",
                remedy="use: await asyncio.to_thread(loss.backward)",
            )
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            while not futures.wait([future], LOOK_S).done:
                if not loop.is_running():
                    raise _closed()
            return future.result()
        except futures.CancelledError:
            raise _closed() from None
        finally:
            future.cancel()

    return wait


class _RemotePass(torch.autograd.Function):
    """The autograd function of a pass on float32 [B, T, H] on the CPU. It keeps the input of each part, as autograd
    does for layers."""

    @staticmethod
    def forward(ctx: Any, x_BTH: Tensor, ran: ForwardPass, wait: Wait) -> Tensor:
        # saved by autograd, so that an in-place change is an error, and the memory is freed with the graph
        ctx.save_for_backward(x_BTH, *(part.x for part in ran.parts[1:]))
        ctx.servers = [part.by for part in ran.parts]
        ctx.blocks = ran.blocks
        ctx.wait = wait
        return ran.output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTC: Tensor) -> tuple[Tensor, None, None]:
        parts = [RemotePart(by, x.detach()) for by, x in zip(ctx.servers, ctx.saved_tensors, strict=True)]
        return ctx.wait(ctx.blocks.backward(parts, grad_BTC.detach())), None, None


def _on_wire(x: Tensor) -> Tensor:
    """Return `x` on the CPU, as float32 [B, T, H] or token ids [B, T]. The conversion is differentiable."""
    x = x if x.dim() == 2 + x.is_floating_point() else x[None]
    return x.to("cpu", torch.float32) if x.is_floating_point() else x.cpu()


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _closed() -> SessionError:
    return SessionError("the client has been closed", remedy="call backward() inside its `with` block")
