"""One download of a state: its chunks come from many donors at once, and each is checked before it is used.

`ChunkSchedule` decides which donor to ask for which chunk. It is pure: the caller passes events with their time. Each
donor is asked for one chunk at first, and then for about as many as it delivers in a second. So a link with a long
delay is kept full, and a slow donor has few chunks pending. At the end, idle donors are also asked for chunks that are
pending at slower ones.

`Download` owns the tasks that fetch. A donor that fails or lies is left out, and its pending chunks are asked for
again. Chunks that a state of this member has, or that an earlier, unfinished download left in the `ChunkFolder`, are
not fetched.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path

from swarm_protocol.errors import RoundError, SwarmError
from swarm_protocol.identity import short_id

from swarm.threads import in_executor
from swarm.training.state.replica_state import CHUNK_BYTES, Assembly, Manifest, ReplicaState

logger = logging.getLogger(__name__)


AHEAD_S = 1.0
"""Amount that is pending at a donor, in seconds at its own rate. It is more than a round trip around the world, and
little is lost if the donor fails."""
MAX_DONOR_BYTES = 16 << 20
"""Maximum pending at one donor: 1 Gbit/s at a round trip of 130 ms."""
MAX_BYTES = 64 << 20
"""Maximum pending at all donors together, and so a download's memory in addition to the state."""
ASSUMED_S = 1.0
"""Assumed time of a chunk from a donor that has not delivered any: 1 MiB at 8 Mbit/s."""

CHUNK_TIMEOUT_S = 30.0
"""Time of a chunk of 1 MiB at 0.3 Mbit/s, a hardly usable link. The time limit is this times the number of donors,
since all may share this member's own link. Other donors are asked for a silent donor's chunks long before."""
LOOK_S = 0.5
"""Interval at which the download checks whether a donor is late."""


class ChunkSchedule:
    """Schedules the chunks `missing` over `donors`. A donor that failed is not asked again."""

    def __init__(self, missing: Iterable[int], donors: Sequence[str]) -> None:
        self._waiting = sorted(missing, reverse=True)
        self._asked: dict[int, dict[str, float]] = {}
        self._under_way = dict.fromkeys(donors, 0)
        self._pace_s: dict[str, float] = {}  # seconds per chunk, of donors that have delivered one

    @property
    def is_open(self) -> bool:
        """True if chunks are still missing."""
        return bool(self._waiting or self._asked)

    @property
    def num_under_way(self) -> int:
        return sum(self._under_way.values())

    def next(self, now: float) -> tuple[str, int] | None:
        """Return the donor to ask now, and for which chunk. None if no donor is to be asked now."""
        if self.num_under_way >= MAX_BYTES // CHUNK_BYTES:
            return None
        for donor in sorted(self._under_way, key=lambda donor: (self._under_way[donor], self._pace(donor))):
            if self._under_way[donor] < self._window(donor):
                index = self._waiting.pop() if self._waiting else self._overdue(donor, now)
                if index is not None:
                    self._asked.setdefault(index, {})[donor] = now
                    self._under_way[donor] += 1
                    return donor, index
        return None

    def delivered(self, donor: str, index: int, now: float) -> None:
        """Record that `donor` delivered. Other requests for this chunk are dropped: their donors took at least as
        long."""
        for asked, asked_at in self._asked.pop(index).items():
            # a donor's chunks share its link: this is the time that one chunk alone would have taken
            pace_s = (now - asked_at) / self._under_way[asked]
            self._pace_s[asked] = pace_s if asked == donor else max(pace_s, self._pace_s.get(asked, 0.0))
            self._under_way[asked] -= 1

    def failed(self, donor: str) -> None:
        """Leave `donor` out. Chunks that were pending only there wait again."""
        del self._under_way[donor]
        for index, askers in list(self._asked.items()):
            if askers.pop(donor, None) is not None and not askers:
                del self._asked[index]
                self._waiting.append(index)

    def _pace(self, donor: str) -> float:
        return self._pace_s.get(donor, ASSUMED_S)

    def _window(self, donor: str) -> int:
        """Return how many chunks may be pending at this donor, at most its share of the chunks that are left."""
        fair = 1 + len(self._waiting) // len(self._under_way)
        ahead = int(AHEAD_S / max(self._pace_s[donor], 1e-6)) if donor in self._pace_s else 0
        return min(1 + ahead, MAX_DONOR_BYTES // CHUNK_BYTES, fair)

    def _overdue(self, donor: str, now: float) -> int | None:
        """Return the pending chunk that is expected last, if `donor` is expected to deliver it in less than half that
        time."""
        left_s = {index: self._left_s(index, now) for index, askers in self._asked.items() if donor not in askers}
        latest = max(left_s, key=lambda index: left_s[index], default=None)
        return latest if latest is not None and left_s[latest] > 2 * self._pace(donor) else None

    def _left_s(self, index: int, now: float) -> float:
        return min(self._left_of(donor, now - asked_at) for donor, asked_at in self._asked[index].items())

    def _left_of(self, donor: str, waited_s: float) -> float:
        """Return the expected seconds until `donor` delivers. A late donor is expected to take as long again as it is
        late."""
        return abs(self._pace_s.get(donor, 0.0) * self._under_way[donor] - waited_s)


Ask = Callable[[str, int, float], Awaitable[bytes]]
"""`ask(donor, index, timeout_s)` returns the chunk, unchecked. Raises SwarmError."""


class ChunkFolder:
    """Keeps the fetched chunks in `folder`, which belongs to one process, up to `max_bytes`. Blocks.

    One file per chunk, named by its digest, so that a killed node continues with the chunks it has. Each chunk is
    checked against its digest when it is used, so files are neither flushed nor renamed: a chunk damaged by a crash is
    fetched again. A failing disk causes a warning, and a restart then begins the download anew; the download itself
    goes on.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._has_failed = False

    def resume(self, digests: Collection[bytes]) -> Iterator[bytes]:
        """Yield the stored chunks with these digests, in any order, and delete all others."""
        wanted = {digest.hex() for digest in digests}
        self._num_bytes = 0
        for path in sorted(self._folder.iterdir()) if self._folder.is_dir() else []:
            try:
                size = path.stat().st_size
                if path.name not in wanted or size > CHUNK_BYTES or self._num_bytes + size > self._max_bytes:
                    path.unlink()
                    continue
                self._num_bytes += size
                yield path.read_bytes()
            except OSError as error:
                self._warn(error)

    def keep(self, digest: bytes, data: bytes) -> None:
        if self._has_failed or self._num_bytes + len(data) > self._max_bytes:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / digest.hex()).write_bytes(data)
        except OSError as error:
            self._warn(error)
        else:
            self._num_bytes += len(data)

    def clear(self) -> None:
        """Delete all chunks: the download is done."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._num_bytes = 0

    def _warn(self, error: OSError) -> None:
        if not self._has_failed:
            logger.warning(
                "after a restart the state must be fetched anew: %s cannot be used (%s)", self._folder, error
            )
        self._has_failed = True


class Download:
    """Runs one download. `gave` counts the bytes of the state from each donor."""

    def __init__(self, manifest: Manifest, ask: Ask, executor: Executor, store: ChunkFolder | None) -> None:
        self.gave: dict[str, int] = {}
        self._manifest = manifest
        self._ask = ask
        self._executor = executor
        self._store = store
        self._assembly = Assembly(manifest)
        self._failures: dict[str, str] = {}

    async def run(self, donors: Sequence[str], own: Sequence[ReplicaState]) -> ReplicaState:
        """Return the state. Raises RoundError if the donors together do not deliver all of it."""
        await in_executor(self._executor, self._reuse, own)
        if self._assembly.missing:
            await self._fetch_all(ChunkSchedule(self._assembly.missing, donors), len(donors))
        if self._assembly.missing:
            reasons = "; ".join(f"{short_id(donor)}: {reason}" for donor, reason in self._failures.items())
            raise RoundError(f"the state cannot be fetched: {reasons or 'nobody has it'}")
        state = await in_executor(self._executor, self._assembly.finish)
        if self._store is not None:
            await in_executor(self._executor, self._store.clear)
        return state

    def _reuse(self, own: Sequence[ReplicaState]) -> None:
        """Take the chunks that this member already has. Blocks."""
        for state in own:
            self._assembly.reuse(state)
        digests = self._manifest.chunk_digests
        wanted: dict[bytes, list[int]] = {}
        for index in self._assembly.missing:
            wanted.setdefault(digests[index], []).append(index)
        for data in self._store.resume(wanted.keys()) if self._store is not None else ():
            for index in wanted.get(hashlib.sha256(data).digest(), ()):
                self._assembly.put(index, data)

    async def _fetch_all(self, schedule: ChunkSchedule, num_donors: int) -> None:
        """Fetch until no chunk is missing or no donor is left."""
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
        """Take the result of `task`, unless another task brought the same chunk at the same time."""
        if (ask := under_way.pop(task, None)) is None:
            return
        donor, index = ask
        if failure := task.result():
            self._failures[donor] = failure
            schedule.failed(donor)
            late = [other for other, asked in under_way.items() if asked[0] == donor]
        else:
            self.gave[donor] = self.gave.get(donor, 0) + self._manifest.chunk_size(index)
            schedule.delivered(donor, index, asyncio.get_running_loop().time())
            late = [other for other, asked in under_way.items() if asked[1] == index]
        for other in late:
            other.cancel()
            del under_way[other]

    async def _fetch(self, donor: str, index: int, timeout_s: float) -> str:
        """Fetch chunk `index` from `donor`. Return the reason of a failure, or ""."""
        try:
            data = await self._ask(donor, index, timeout_s)
            await in_executor(self._executor, self._assembly.put, index, data)
        except SwarmError as error:
            logger.warning("dropped %s as a donor: %s", short_id(donor), error)
            return error.message
        if self._store is not None:
            await in_executor(self._executor, self._store.keep, self._manifest.chunk_digests[index], data)
        return ""
