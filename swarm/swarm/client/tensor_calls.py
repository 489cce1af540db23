"""A client's calls with tensors: embeddings, and passes through a model's blocks.

`AsyncClient` imports this module with the first such call. It brings torch, which takes more than a second and 170 MiB,
and which a client of texts does not need. There is one `TensorCalls` per client, on its event loop.

Legend of shapes: B sequences, T positions, H hidden size.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from swarm.client.assets_cache import AssetsCache
from swarm.client.catalog import ChosenRevision, ModelCatalog
from swarm.client.request import check_prompt_ids
from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.remote.blocks import RemoteBlocks
from swarm.remote.gradient import ForwardOptions, ForwardPass, embed, run
from swarm.serving.session.peer_health import PeerHealth

T = TypeVar("T")


class TensorCalls:
    """Run tensors through the blocks of the revision that is to be used. All calls raise as `AsyncClient.forward`."""

    def __init__(
        self, network: Network, membership: Membership, health: PeerHealth, catalog: ModelCatalog, assets: AssetsCache
    ) -> None:
        self._network = network
        self._membership = membership
        self._health = health
        self._catalog = catalog
        self._assets = assets

    async def embed(self, ids: Sequence[int] | Tensor, model: str) -> Tensor:
        """Return the input embeddings of token ids: float32 [T, H], or [B, T, H] of a tensor [B, T]."""
        tokens = ids if isinstance(ids, Tensor) else torch.tensor(check_prompt_ids(ids), dtype=torch.int64)
        return await self._in_one_call(model, ForwardOptions(), partial(embed, tokens))

    async def pooled(self, token_ids: Sequence[int], model: str) -> Tensor:
        """Return the mean of the last hidden states after the last norm, scaled to length 1: float32 [H]."""
        ran = await self.run_forward(torch.tensor(token_ids, dtype=torch.int64), model, ForwardOptions())
        return torch.nn.functional.normalize(ran.output[0].double().mean(dim=0), dim=0).float()

    async def run_forward(self, x: Tensor, model: str, wanted: ForwardOptions) -> ForwardPass:
        """Run `AsyncClient.forward` without autograd's part, which belongs into the caller's thread."""
        return await self._in_one_call(model, wanted, partial(run, x, wanted))

    async def _in_one_call(self, model: str, wanted: ForwardOptions, ask: Callable[[RemoteBlocks], Awaitable[T]]) -> T:
        chosen = await self._catalog.to_use(model)
        answer = await ask(await self.blocks(chosen, wanted))
        self._catalog.answered(chosen)
        return answer

    async def blocks(self, chosen: ChosenRevision, wanted: ForwardOptions) -> RemoteBlocks:
        """Return the blocks of one revision."""
        self._health.measure(chosen.servers)
        return RemoteBlocks(
            self._network,
            self._membership,
            self._health,
            (await self._assets.get(chosen.name, chosen.servers, chosen.published)).shape,
            chosen.servers,
            head=wanted.head,
            codec=wanted.codec,
        )
