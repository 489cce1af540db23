"""A model's blocks over whichever servers have them, as a function of whole sequences and its gradient.

Each part of a chain keeps its input until the gradient has come back through it, so a server may die at any moment: the
part is computed by others, which had no share in the forward pass. Used in the client's loop, by any number of tasks.
Legend of shapes: B sequences, T positions, H hidden size, V vocabulary, C columns: H, or V after the head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import uuid4

from swarm_protocol.errors import PeerError, SessionError
from swarm_protocol.forward_messages import BACKWARD_METHOD, FORWARD_METHOD, Compute
from swarm_protocol.records import ServeRecord
from torch import Tensor

from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.remote.call import compute, deadline_s
from swarm.remote.search import Search
from swarm.router.routing import Hop
from swarm.serving.model.shape import ModelShape
from swarm.serving.session.known_servers import Candidate, KnownServers
from swarm.serving.session.peer_health import Links


@dataclass(frozen=True, slots=True)
class Part:
    """A server's share in a forward pass, and what it was given: [B, T, H], or token ids [B, T]."""

    by: Candidate
    x: Tensor


class RemoteBlocks:
    """With `head`, what the model's last block gives becomes logits. `servers` are of the model's revision."""

    def __init__(
        self,
        network: Network,
        membership: Membership,
        links: Links,
        model: ModelShape,
        servers: Mapping[str, ServeRecord],
        *,
        head: bool,
        codec: str,
    ) -> None:
        self.model = model
        self._network = network
        self._membership = membership
        self._links = links
        self._servers = servers
        self._head = head
        self._codec = codec
        self._salt = uuid4().hex

    async def embed(self, tokens_BT: Tensor) -> Tensor:
        """Input embeddings, float32 [B, T, H]. Raises as `forward`."""
        search = self._search()
        while True:
            first = (await search.find(0, 1))[0]
            no_blocks = Hop(peer_id=first.planned.peer_id, start=0, end=0, cost_ms=0.0)
            part = Part(Candidate(planned=no_blocks, record=first.record), tokens_BT)
            if (embeddings := await self._ask(search, FORWARD_METHOD, part)) is not None:
                return embeddings

    async def forward(self, x: Tensor, start: int, end: int) -> tuple[Tensor, list[Part]]:
        """float32 [B, T, C] of float32 `x` [B, T, H], or of token ids [B, T] at the first block; and who did it.

        Raises NoChain when nobody has some block, what the servers refuse or fail with, and ConfigError for numbers
        that are not finite.
        """
        return await self._forward(self._search(), x, start, end)

    async def backward(self, parts: Sequence[Part], grad_BTC: Tensor) -> Tensor:
        """The gradient [B, T, H] of the first part's input, given that of what `forward` made of it."""
        search, left = self._search(), list(parts)
        while left:
            part = left.pop()
            grad = await self._ask(search, BACKWARD_METHOD, part, grad_BTC)
            if grad is None:
                left += await self._replaced(search, part)
            else:
                grad_BTC = grad
        return grad_BTC

    def _search(self) -> Search:
        known = KnownServers(self._membership, self._servers, model=self.model.name, revision=self.model.revision)
        return Search(known, self._links, salt=self._salt)

    async def _forward(self, search: Search, x: Tensor, start: int, end: int) -> tuple[Tensor, list[Part]]:
        parts: list[Part] = []
        chain: list[Candidate] = []
        while start < end:
            chain = chain or await search.find(start, end)
            part = Part(chain.pop(0), x)
            output = await self._ask(search, FORWARD_METHOD, part)
            if output is None:
                chain = []
                continue
            parts.append(part)
            x, start = output, part.by.planned.end
        return x, parts

    async def _replaced(self, search: Search, part: Part) -> list[Part]:
        """The same blocks on other servers, with the input of each."""
        start, end = part.by.planned.start, part.by.planned.end
        *others, last = await search.find(start, end)
        if not others:
            return [Part(last, part.x)]
        x, parts = await self._forward(search, part.x, start, last.planned.start)
        return [*parts, Part(last, x)]

    async def _ask(self, search: Search, method: str, part: Part, *grads: Tensor) -> Tensor | None:
        """float32 [B, T, …], or None if the server failed, which the search then knows. Raises ConfigError."""
        peer_id = part.by.planned.peer_id
        asked, num_columns = self._asked(method, part)
        self._links.opened(peer_id)
        try:
            output = await compute(
                self._network, peer_id, f"{method}/{self.model.name}", asked, (part.x, *grads), num_columns=num_columns
            )
        except (PeerError, SessionError) as error:
            search.failed(peer_id, error)
            return None
        finally:
            self._links.closed(peer_id)
        self._links.worked(peer_id)
        return output

    def _asked(self, method: str, part: Part) -> tuple[Compute, int]:
        """And the number of columns that the server answers with."""
        model, hop, x = self.model, part.by.planned, part.x
        has_logits = self._head and hop.end == model.num_blocks
        num_rows = x.shape[0] * x.shape[1]
        # as much comes back of one method as is sent to the other
        num_bytes = 4 * num_rows * (model.hidden_size + (model.vocab_size if has_logits else model.hidden_size))
        num_blocks = hop.end - hop.start
        limit_s = deadline_s(part.by.record, method, num_blocks=num_blocks, num_rows=num_rows, num_bytes=num_bytes)
        asked = Compute(
            revision=model.revision,
            start=hop.start,
            end=hop.end,
            num_sequences=x.shape[0],
            num_positions=x.shape[1],
            of_tokens=not x.is_floating_point(),
            head=self._head,
            codec=self._codec,
            deadline_s=limit_s,
        )
        return asked, model.vocab_size if has_logits and method == FORWARD_METHOD else model.hidden_size
