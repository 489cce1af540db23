"""A member that fetches a state from donors over simulated links, each with an uplink of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from support.replica_states import state_of
from support.training_swarm import config
from swarm.network.memory.memory_link import LinkModel
from swarm.network.memory.memory_network import MemoryInternet, MemoryNetwork
from swarm.training.run.methods import Methods
from swarm.training.state.replica import Replica
from swarm.training.state.replica_state import ReplicaState
from swarm.training.state.state_download import ChunkFolder
from swarm.training.state.state_transfer import Donor, FetchedState, Fetcher

MBIT_S = 1e6 / 8
METHODS = Methods("run")
Answer = Callable[[str, bytes], Awaitable[bytes]]


def states(num_values: int) -> tuple[ReplicaState, ReplicaState]:
    """A state to fetch, and one of the same size with no chunk in common with it."""
    generator = torch.Generator().manual_seed(5)
    theta_N, momentum_N = torch.randn(2, num_values, generator=generator)
    return state_of(theta_N, momentum_N, outer_step=3), state_of(theta_N + 1, momentum_N + 1)


class DonorWorld:
    """Create it in a running loop. Use as an async context manager."""

    def __init__(
        self,
        num_values: int,
        *,
        down_mbit_s: float = 1e6,
        latency_s: float = 0.05,
        store: ChunkFolder | None = None,
    ) -> None:
        self.wanted, self.own = states(num_values)
        self.internet = MemoryInternet(default_link=LinkModel(latency_s=latency_s), detection_s=1.0)
        self.executor = ThreadPoolExecutor(1)
        self.mine = self.internet.network(down_bytes_per_s=down_mbit_s * MBIT_S)
        self.fetcher = Fetcher(self.mine, METHODS, self.executor, store)
        self.donors: list[MemoryNetwork] = []
        self.num_asked: list[int] = []

    async def __aenter__(self) -> DonorWorld:
        return self

    async def __aexit__(self, *_: object) -> None:
        for network in (self.mine, *self.donors):
            await network.close()
        self.executor.shutdown()

    @property
    def peers(self) -> list[str]:
        return [network.peer_id for network in self.donors]

    async def donor(
        self, up_mbit_s: float = 1e6, *, chunk: Answer | None = None, manifest: Answer | None = None
    ) -> Donor:
        """One more; `chunk` and `manifest` answer in place of an honest donor."""
        number = len(self.donors)
        network = self.internet.network(up_bytes_per_s=up_mbit_s * MBIT_S)
        honest = Donor(Replica(config(), self.wanted))

        async def counted(peer: str, request: bytes) -> bytes:
            self.num_asked[number] += 1
            return await (chunk or honest.chunk)(peer, request)

        await network.serve(METHODS.manifest, manifest or honest.manifest)
        await network.serve(METHODS.chunk, counted)
        self.donors.append(network)
        self.num_asked.append(0)
        return honest

    async def fetch(self, own: Sequence[ReplicaState] = ()) -> tuple[FetchedState, float]:
        """The wanted state, checked, and the seconds that it took."""
        now = asyncio.get_running_loop().time
        started = now()
        fetched = await self.fetcher.state(self.wanted.digest, self.peers, own or [self.own])
        assert fetched.state.hashed_again().digest == self.wanted.digest
        return fetched, now() - started
