"""One download of a state: its chunks from many donors at once, each checked before it is believed.

Bandwidth adds up over the donors; `chunk_schedule` says whom to ask for what. A donor that fails or lies is left out,
and costs what it had under way. Chunks that a state of this member has already are not fetched, nor those that an
earlier download, which did not come to its end, left in the store. Owns its tasks.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, Protocol, TypeVar

from swarm_protocol.errors import RoundError, SwarmError

from swarm.training.state.chunk_schedule import ChunkSchedule
from swarm.training.state.manifest import Manifest
from swarm.training.state.replica_state import Assembly, ReplicaState

T = TypeVar("T")
Ask = Callable[[str, int, float], Awaitable[bytes]]
"""`ask(donor, index, timeout_s)`: the chunk, unchecked. Raises SwarmError."""

logger = logging.getLogger(__name__)

CHUNK_TIMEOUT_S = 30.0
"""A chunk of 1 MiB over a link that is hardly usable, 0.3 Mbit/s; so long for each donor, since all may share this
member's own link. What a silent donor holds is asked of another long before."""
LOOK_S = 0.5
"""How often it is looked whether a donor is late."""


class ChunkStore(Protocol):
    """Where chunks outlive this process, by their digests. It may lose or spoil any of them. All calls block."""

    def resume(self, digests: Collection[bytes]) -> Iterator[bytes]:
        """The chunks of these digests that are here, in any order. All others are forgotten."""

    def keep(self, digest: bytes, data: bytes) -> None: ...

    def clear(self) -> None:
        """The download is done: forget everything."""


class _NoStore:
    """Keeps nothing."""

    def resume(self, digests: Collection[bytes]) -> Iterator[bytes]:
        del digests
        return iter(())

    def keep(self, digest: bytes, data: bytes) -> None:
        del digest, data

    def clear(self) -> None:
        pass


NO_STORE = _NoStore()


class Download:
    """`gave` says how many bytes of the state each donor has given."""

    def __init__(self, manifest: Manifest, ask: Ask, executor: Executor, store: ChunkStore) -> None:
        self.gave: dict[str, int] = {}
        self._manifest = manifest
        self._ask = ask
        self._executor = executor
        self._store = store
        self._assembly = Assembly(manifest)
        self._failures: dict[str, str] = {}

    async def run(self, donors: Sequence[str], own: Sequence[ReplicaState]) -> ReplicaState:
        """The state. Raises RoundError if the donors together do not give all of it."""
        await self._off_loop(self._reuse, own)
        if self._assembly.missing:
            await self._fetch_all(ChunkSchedule(self._assembly.missing, donors), len(donors))
        if self._assembly.missing:
            reasons = "; ".join(f"{donor[-6:]}: {reason}" for donor, reason in self._failures.items())
            raise RoundError(f"the state cannot be had: {reasons or 'nobody has it'}")
        state = await self._off_loop(self._assembly.finish)
        await self._off_loop(self._store.clear)
        return state

    def _reuse(self, own: Sequence[ReplicaState]) -> None:
        """Take what is here already. Blocks."""
        for state in own:
            self._assembly.reuse(state)
        digests = self._manifest.chunk_digests
        wanted: dict[bytes, list[int]] = {}
        for index in self._assembly.missing:
            wanted.setdefault(digests[index], []).append(index)
        for data in self._store.resume(wanted.keys()):
            for index in wanted.get(hashlib.sha256(data).digest(), ()):
                self._assembly.put(index, data)

    async def _fetch_all(self, schedule: ChunkSchedule, num_donors: int) -> None:
        """Until all chunks are here, or no donor is left."""
        timeout_s = CHUNK_TIMEOUT_S * num_donors
        now = asyncio.get_running_loop().time
        under_way: dict[asyncio.Task[str], tuple[str, int]] = {}
        async with asyncio.TaskGroup() as tasks:
            while schedule.is_open:
                while (ask := schedule.next(now())) is not None:
                    under_way[tasks.create_task(self._fetch(*ask, timeout_s))] = ask
                if not under_way:
                    break
                ended, _ = await asyncio.wait(under_way, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    self._settle(schedule, under_way, task)
            for task in under_way:
                task.cancel()

    def _settle(
        self, schedule: ChunkSchedule, under_way: dict[asyncio.Task[str], tuple[str, int]], task: asyncio.Task[str]
    ) -> None:
        """What `task` brought, unless another task brought it at the same time."""
        if (ask := under_way.pop(task, None)) is None:
            return
        donor, index = ask
        if failure := task.result():
            self._failures[donor] = failure
            schedule.failed(donor)
            late = [other for other, asked in under_way.items() if asked[0] == donor]
        else:
            self.gave[donor] = self.gave.get(donor, 0) + self._manifest.chunk_size(index)
            schedule.came(donor, index, asyncio.get_running_loop().time())
            late = [other for other, asked in under_way.items() if asked[1] == index]
        for other in late:
            other.cancel()
            del under_way[other]

    async def _fetch(self, donor: str, index: int, timeout_s: float) -> str:
        """Take chunk `index` of `donor`: why it cannot be had, or nothing."""
        try:
            data = await self._ask(donor, index, timeout_s)
            await self._off_loop(self._assembly.put, index, data)
        except SwarmError as error:
            logger.warning("dropped %s as a donor: %s", donor[-6:], error)
            return error.message
        await self._off_loop(self._store.keep, self._manifest.chunk_digests[index], data)
        return ""

    async def _off_loop(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)
