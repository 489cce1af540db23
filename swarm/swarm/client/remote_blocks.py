"""Runs a model's blocks on remote servers, as a function of whole sequences, with its gradient.

The client keeps the input of each part of a chain until the gradient has passed back through it. So if a server dies,
another one can compute its part without having taken part in the forward pass. The module is used in the client's loop,
by any number of tasks.

Shapes: B sequences, T positions, H hidden size, V vocabulary, C columns: H, or V after the head.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from uuid import uuid4

from swarm_compression import CodecError
from swarm_protocol import limits
from swarm_protocol.checks import check_choice
from swarm_protocol.errors import (
    ConfigError,
    PeerError,
    PeerRefused,
    PeerTimeout,
    PeerUnreachable,
    PeerViolation,
    SessionError,
    SwarmError,
)
from swarm_protocol.records import ServeRecord
from swarm_protocol.rows import TOKENS
from swarm_protocol.serving_messages import BACKWARD_METHOD, FORWARD_CODECS, FORWARD_METHOD, Compute
from torch import Tensor

from swarm.client.request import ContextExceeded
from swarm.network.interface import EndOfStream, Network
from swarm.router.routing import Hop, NoChain
from swarm.serving.model.shape import ModelShape
from swarm.serving.session.repair import MAX_FAILURES
from swarm.serving.session.route_finder import RETRY_S, KnownServers
from swarm.serving.wire.tensor_stream import SLOWEST_TENSOR_BYTES_PER_S, receive_floats, send_tensor

logger = logging.getLogger(__name__)

PATIENCE_S = 20.0
"""Seconds to look for a server, or for room on one, before a call fails."""

FLOOR_S = 10.0
"""Minimum deadline in seconds: enough to dial through a relay, and for a slow moment of the server."""

FACTOR = 16.0
"""Multiple of the time by the server's record that a call may take, since calls and sessions of others come between."""

BACKWARD_FACTOR = 4.0
"""Multiple of a forward call's time that a backward call may take: at worst two more forward passes, and a backward
pass of two."""

MAX_COMPUTE_S = 600.0


class CallRouteFinder:
    """Finds the servers for the blocks of one call, and remembers which of them have failed it.

    Unless it `is_patient`, it looks up blocks without a server only once more, as a new session does. It always waits
    for servers that are full or busy, or failed just before the call. It is used by one task at a time.
    """

    def __init__(self, known: KnownServers, *, salt: str, is_patient: bool) -> None:
        self._known = known
        self._health = known.health
        self._salt = salt
        self._failed: set[str] = set()
        self._busy_until_s: dict[str, float] = {}
        self._too_small: dict[str, PeerRefused] = {}
        self._num_failures = 0
        self._last: SwarmError | None = None
        self._is_patient = is_patient
        self._began_s = asyncio.get_running_loop().time()
        self._left_s = PATIENCE_S  # of searching: the time in which servers compute does not count

    async def find(self, start: int, end: int) -> list[Hop]:
        """Return the cheapest chain over `[start, end)` from servers that have not refused this call.

        Raises NoChain, the error of the last server that refused or failed, or ContextExceeded if the call is too large
        for every server of some blocks.
        """
        time = asyncio.get_running_loop().time
        give_up_at_s = time() + self._left_s
        looked_up = False
        while True:
            self._left_s = give_up_at_s - time()
            is_last = self._left_s <= 0
            context = self._health.routing_context(self._known.servers, 1, self._salt, is_last=is_last)
            busy_until_s = {peer_id: at_s for peer_id, at_s in self._busy_until_s.items() if at_s > time()}
            barred = self._failed.union(self._too_small, busy_until_s, context.barred)
            try:
                return self._known.find_chain(start, end, replace(context, barred=barred))
            except NoChain as error:
                self._check_size(error)
                peers = self._known.peers_of(*error.missing)
                busy_s = min((busy_until_s[each] - time() for each in peers & busy_until_s.keys()), default=math.inf)
                is_busy = busy_s <= self._left_s
                resting = self._health.resting(self._began_s)
                may_wait = self._is_patient or self._known.each_has_one_of(error.missing, resting)
                match self._last:
                    case _ if is_busy:
                        pass
                    case PeerRefused(retry_after_s=retry_after_s) if 0 < retry_after_s <= self._left_s:
                        pass
                    case PeerRefused() | SessionError():
                        raise self._last from None
                    case _ if is_last or (looked_up and not may_wait):
                        raise
                async with self._health.until_rested(peers if may_wait else ()):
                    await asyncio.sleep(min(busy_s, RETRY_S) if is_busy else RETRY_S)
                    await self._known.look_up()
                    looked_up = True

    def _check_size(self, error: NoChain) -> None:
        """Raise ContextExceeded if the call is too large for every server of some missing blocks."""
        for span in error.missing:
            peers = self._known.peers_of(span)
            if peers and peers <= self._too_small.keys():
                refusal = self._too_small[min(peers)]
                raise ContextExceeded(refusal.message, remedy=refusal.remedy, field="prompt") from refusal

    def failed(self, peer_id: str, error: SwarmError) -> None:
        """Do not ask the peer again in this call, or if it is busy not before it says.

        Raises `error` once enough peers failed that the call itself must be the cause.
        """
        logger.info("%s failed a call on blocks of %s: %s", peer_id, self._known.model.name, error)
        if isinstance(error, PeerRefused) and error.lacks_room and not error.retry_after_s:
            # not the last error: the call still waits for servers that are busy or resting
            self._too_small[peer_id] = error
        else:
            self._last = error
            # a refusal says nothing about other calls, and a server that could not be reached may come back
            if is_gone := isinstance(error, PeerUnreachable | PeerTimeout | PeerViolation):
                self._health.failed(peer_id, error)
            if isinstance(error, PeerRefused) and error.retry_after_s:
                self._busy_until_s[peer_id] = asyncio.get_running_loop().time() + error.retry_after_s
            elif not (is_gone and self._is_patient):
                self._failed.add(peer_id)
            self._num_failures += 1
        if self._num_failures > MAX_FAILURES:
            raise error


async def call_server(
    network: Network, peer_id: str, method: str, asked: Compute, tensors: Sequence[Tensor], *, num_columns: int
) -> Tensor:
    """Let a server run a pass on `tensors`, each int64 [B, T] or float32 [B, T, …]. Return float32 [B, T, num_columns].

    Raises PeerError, SessionError if the server could not compute the pass, and ConfigError for numbers that are not
    finite.
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
            # the server's own failure, whatever kind of error it reports
            raise PeerError(error.message, peer_id=peer_id) from error
        error.peer_id = error.peer_id or peer_id
        raise


def deadline_s(record: ServeRecord, method: str, *, num_blocks: float, num_rows: int, num_bytes: int) -> float:
    """Return the seconds that a call may take, by the server's own claim within bounds."""
    expected_s = num_blocks * num_rows * record.prefill_ms_per_token / 1000
    factor = FACTOR * (BACKWARD_FACTOR if method.startswith(BACKWARD_METHOD) else 1.0)
    limit_s = FLOOR_S + min(factor * expected_s, MAX_COMPUTE_S) + num_bytes / SLOWEST_TENSOR_BYTES_PER_S
    return min(limit_s, limits.MAX_STEP_MS / 1000)


@dataclass(frozen=True, slots=True)
class ChosenLogits:
    """Asks the last server for only some numbers of each position's logits: the `num_top` largest, their token ids, the
    logit of its token in `targets_BT`, and the log-sum-exp of all."""

    targets_BT: Tensor
    num_top: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOptions:
    """Options of a pass through blocks `[start, end)`, up to the last one if `end` is None. Passes that compute
    gradients are patient: if all servers of a block have failed, they wait for others. Raises ConfigError."""

    start: int = 0
    end: int | None = None
    head: bool = False
    codec: str = "raw"
    is_patient: bool = True
    chosen: ChosenLogits | None = None

    def __post_init__(self) -> None:
        given: tuple[tuple[str, object], ...] = ("start", self.start), ("end", 0 if self.end is None else self.end)
        for name, block in given:
            if not isinstance(block, Integral):
                raise ConfigError(f"{name} is {block!r:.80}", remedy="use the whole number of a block")
        try:
            check_choice(self.codec, "codec", FORWARD_CODECS)
        except ValueError as error:
            raise ConfigError(str(error), remedy="use raw or bf16") from error

    def blocks(self, model: ModelShape) -> tuple[int, int]:
        """Return the blocks to run. Raises ConfigError if the model has no such blocks."""
        end = model.num_blocks if self.end is None else self.end
        if not 0 <= self.start < end <= model.num_blocks:
            raise ConfigError(
                f"blocks {self.start}:{end} are not within 0:{model.num_blocks} of {model.name}",
                remedy="choose start and end within the model",
            )
        if self.head and end < model.num_blocks:
            raise ConfigError("the head follows the last block", remedy=f"run the blocks to {model.num_blocks}")
        return self.start, end


@dataclass(frozen=True, slots=True)
class RemotePart:
    """A server's share in a forward pass, with its input: [B, T, H], or token ids [B, T]."""

    by: Hop
    x: Tensor


class RemoteBlocks:
    """The blocks of a model on its `known` servers. With `options.head`, the last block's output becomes logits, and
    with `options.chosen` those numbers of them."""

    def __init__(self, network: Network, known: KnownServers, options: ForwardOptions) -> None:
        self.model = known.model
        self.options = options
        self._network = network
        self._known = known
        self._health = known.health
        self._salt = uuid4().hex

    async def embed(self, tokens_BT: Tensor) -> Tensor:
        """Return input embeddings, float32 [B, T, H]. Raises as `forward`."""
        search = self._search()
        while True:
            first = (await search.find(0, 1))[0]
            part = RemotePart(replace(first, end=0), tokens_BT)
            if (embeddings := await self._ask(search, FORWARD_METHOD, part)) is not None:
                return embeddings

    async def forward(self, x: Tensor, start: int, end: int) -> tuple[Tensor, list[RemotePart]]:
        """Run float32 `x` [B, T, H], or token ids [B, T] for the first block. Return float32 [B, T, C], and the part of
        each server.

        Raises NoChain if no server has some block, the errors with which servers refuse or fail, ContextExceeded for a
        call that is too large for all servers of a block, and ConfigError for numbers that are not finite.
        """
        return await self._forward(self._search(), x, start, end)

    async def backward(self, parts: Sequence[RemotePart], grad_BTC: Tensor) -> Tensor:
        """Return the gradient [B, T, H] of the first part's input, given that of `forward`'s output."""
        search, left = self._search(), list(parts)
        while left:
            part = left.pop()
            grad = await self._ask(search, BACKWARD_METHOD, part, grad_BTC)
            if grad is None:
                left += await self._replaced(search, part)
            else:
                grad_BTC = grad
        return grad_BTC

    def _search(self) -> CallRouteFinder:
        return CallRouteFinder(self._known, salt=self._salt, is_patient=self.options.is_patient)

    async def _forward(
        self, search: CallRouteFinder, x: Tensor, start: int, end: int
    ) -> tuple[Tensor, list[RemotePart]]:
        parts: list[RemotePart] = []
        chain: list[Hop] = []
        while start < end:
            chain = chain or await search.find(start, end)
            part = RemotePart(chain.pop(0), x)
            output = await self._ask(search, FORWARD_METHOD, part)
            if output is None:
                chain = []
                continue
            parts.append(part)
            x, start = output, part.by.end
        return x, parts

    async def _replaced(self, search: CallRouteFinder, part: RemotePart) -> list[RemotePart]:
        """Return parts for the same blocks on other servers, with the input of each."""
        start, end = part.by.start, part.by.end
        *others, last = await search.find(start, end)
        if not others:
            return [RemotePart(last, part.x)]
        x, parts = await self._forward(search, part.x, start, last.start)
        return [*parts, RemotePart(last, x)]

    async def _ask(self, search: CallRouteFinder, method: str, part: RemotePart, *grads: Tensor) -> Tensor | None:
        """Return float32 [B, T, …], or None if the server failed, which is recorded in `search`. Raises ConfigError."""
        peer_id = part.by.peer_id
        chosen = self.options.chosen if part.by.end == self.model.num_blocks else None
        asked, num_columns = self._asked(method, part, chosen)
        tensors = (part.x, *grads) if chosen is None else (part.x, chosen.targets_BT)
        self._health.opened(peer_id)
        try:
            output = await call_server(
                self._network, peer_id, f"{method}/{self.model.name}", asked, tensors, num_columns=num_columns
            )
            if chosen is not None:
                _check_ids(output[..., num_columns // 2 - 1 : -2], self.model.vocab_size)
        except (PeerError, SessionError) as error:
            search.failed(peer_id, error)
            return None
        finally:
            self._health.closed(peer_id)
        self._health.worked(peer_id)
        return output

    def _asked(self, method: str, part: RemotePart, chosen: ChosenLogits | None) -> tuple[Compute, int]:
        """Return the request, and the number of columns of the server's answer."""
        model, hop, x = self.model, part.by, part.x
        has_logits = chosen is not None or (self.options.head and hop.end == model.num_blocks)
        num_rows = x.shape[0] * x.shape[1]
        # one method returns as many bytes as the other one gets. Few logits are chosen, but the whole head has to run
        num_columns = model.vocab_size if has_logits and chosen is None else model.hidden_size
        num_bytes = 4 * num_rows * (model.hidden_size + num_columns)
        num_blocks = hop.end - hop.start + (0.0 if chosen is None else model.vocab_size / (12 * model.hidden_size))
        limit_s = deadline_s(hop.record, method, num_blocks=num_blocks, num_rows=num_rows, num_bytes=num_bytes)
        asked = Compute(
            revision=model.revision,
            start=hop.start,
            end=hop.end,
            num_sequences=x.shape[0],
            num_positions=x.shape[1],
            of_tokens=not x.is_floating_point(),
            head=self.options.head or chosen is not None,
            codec=self.options.codec,
            deadline_s=limit_s,
            num_top=0 if chosen is None else chosen.num_top,
            has_targets=chosen is not None,
        )
        if method == BACKWARD_METHOD or not has_logits:
            return asked, model.hidden_size
        return asked, asked.answer_shape(model.vocab_size, has_logits=True)[2]


def _check_ids(ids: Tensor, vocab_size: int) -> None:
    """Check token ids that came as numbers. Raises PeerViolation."""
    if not bool(((ids >= 0) & (ids < vocab_size)).all()):
        raise PeerViolation(f"the likely tokens are outside this model's vocabulary of {vocab_size}")
