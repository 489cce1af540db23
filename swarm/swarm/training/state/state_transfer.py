"""Sends committed states and result parts to peers by digest, and fetches them from peers.

`state_download` fetches a state's chunks. Everything fetched is checked against its digest, and its size is bounded by
the run's config.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from swarm_compression import Codec
from swarm_protocol import limits
from swarm_protocol.commit_messages import Outcome
from swarm_protocol.errors import IntegrityError, PeerRefused, PeerTimeout, PeerViolation, RoundError, SwarmError
from swarm_protocol.identity import short_id
from swarm_protocol.member_messages import ChunkRequest, ManifestRequest, PartRequest
from swarm_protocol.training_messages import Group

from swarm.network.interface import EndOfStream, Network, Stream
from swarm.newest_items import NewestItems
from swarm.threads import in_executor
from swarm.training.allreduce.parts import part_bytes
from swarm.training.run.methods import Methods
from swarm.training.state.ancestry import ask_until
from swarm.training.state.proof_reader import SMALL_BYTES
from swarm.training.state.replica import Replica
from swarm.training.state.replica_state import CHUNK_BYTES, MAX_HEAD_BYTES, Manifest, ReplicaState
from swarm.training.state.state_download import ChunkFolder, Download

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
"""Parts are sent in messages of this size."""
LATE_S = 2.0
"""Time after which other donors are asked for a manifest, too: 250 KiB, for a state of 8 GiB, at 1 Mbit/s."""
PIECE_TIMEOUT_S = 30.0
"""Time for 1 MiB at 0.3 Mbit/s, a hardly usable link."""
SLOWEST_DONOR_BYTES_PER_S = PIECE_BYTES / PIECE_TIMEOUT_S
"""Minimum rate of a part. A slower holder is dropped, since it could delay a member forever."""
SLOWEST_STATE_BYTES_PER_S = 1.25e5
"""Minimum rate of a state from all donors together: 1 Mbit/s, which a round demands of every member."""
MUCH_SLOWER = 4.0
MAX_HOLDERS_TRIED = 4
"""The time limit of a part allows this many slow holders, one after the other."""


class Donor:
    """Answers peers' requests from one replica. `round_service` registers it with the network."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def manifest(self, _peer: str, request: bytes) -> bytes:
        return self._held(ManifestRequest.from_bytes(request).state_digest).manifest.to_bytes()

    async def chunk(self, peer: str, request: bytes) -> bytes:
        wanted = ChunkRequest.from_bytes(request)
        try:
            return self._held(wanted.state_digest).chunk(wanted.index)
        except IndexError:
            raise PeerViolation(f"the state has no chunk {wanted.index}", peer_id=peer) from None

    async def part(self, _peer: str, stream: Stream) -> None:
        """Send a part. Raises TimeoutError if the receiver takes nothing: the part stays in memory while it is sent."""
        async with asyncio.timeout(PIECE_TIMEOUT_S):
            wanted = PartRequest.from_bytes(await stream.receive())
        found = self._replica.parts_of(wanted.origin_digest)[wanted.index : wanted.index + 1]
        if not found:
            raise PeerRefused("this member no longer has the part")
        view = memoryview(found[0])
        for start in range(0, len(view), PIECE_BYTES):
            async with asyncio.timeout(PIECE_TIMEOUT_S):
                await stream.send(bytes(view[start : start + PIECE_BYTES]))

    def _held(self, digest: bytes) -> ReplicaState:
        state = self._replica.donate(digest)
        if state is None:
            raise PeerRefused("this member no longer has the state")
        return state


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedState:
    """A fetched state, the peers that sent some of it, and the bytes that they sent."""

    state: ReplicaState
    donors: tuple[str, ...]
    num_bytes: int


class Fetcher:
    """Fetches for one member of a run. `executor` hashes and parses large data. `store` keeps a state's chunks across
    restarts."""

    def __init__(
        self, network: Network, methods: Methods, executor: Executor, store: ChunkFolder | None = None
    ) -> None:
        self._network = network
        self._methods = methods
        self._executor = executor
        self._store = store
        # holders that were asked for a part last and did not send it
        self._owing = NewestItems[str, None](limits.MAX_GROUP_MEMBERS)

    async def state(self, digest: bytes, donors: Sequence[str], own: Sequence[ReplicaState]) -> FetchedState:
        """Fetch the state named `digest`. Chunks that a state in `own` has are not fetched. `own` is not empty.

        Raises RoundError if the donors together do not send all of it in time.
        """
        manifest = await self._manifest(digest, donors, own[0].manifest.num_values)
        limit_s = 2 * PIECE_TIMEOUT_S + manifest.num_bytes / SLOWEST_STATE_BYTES_PER_S

        async def ask(donor: str, index: int, timeout_s: float) -> bytes:
            request = ChunkRequest(state_digest=digest, index=index).to_bytes()
            return await self._network.call(
                donor, self._methods.chunk, request, timeout_s=timeout_s, max_bytes=CHUNK_BYTES
            )

        download = Download(manifest, ask, self._executor, self._store)
        try:
            async with asyncio.timeout(limit_s):
                state = await download.run(donors, own)
        except TimeoutError:
            raise RoundError(f"the state did not come within {limit_s:.0f} s", missing=tuple(donors)) from None
        gave = download.gave
        return FetchedState(state=state, donors=tuple(sorted(gave)), num_bytes=sum(gave.values()))

    async def _manifest(self, digest: bytes, donors: Sequence[str], num_values: int) -> Manifest:
        """Return the manifest from the first donor that answers correctly. Others are asked whenever one has failed or
        all are late, so that silent donors do not block the others."""
        failures: dict[str, str] = {}

        async def ask(donor: str) -> Manifest | None:
            try:
                return await self._manifest_of(donor, digest, num_values)
            except SwarmError as error:
                failures[donor] = error.message
                return None

        if (manifest := await ask_until(donors, ask, late_s=LATE_S)) is not None:
            return manifest
        reasons = "; ".join(f"{short_id(donor)}: {reason}" for donor, reason in failures.items())
        raise RoundError(f"the state's manifest cannot be fetched: {reasons or 'there are no donors'}")

    async def _manifest_of(self, donor: str, digest: bytes, num_values: int) -> Manifest:
        request = ManifestRequest(state_digest=digest).to_bytes()
        most = 4 + MAX_HEAD_BYTES + -(-8 * num_values // CHUNK_BYTES) * limits.DIGEST_BYTES
        data = await self._network.call(
            donor, self._methods.manifest, request, timeout_s=PIECE_TIMEOUT_S, max_bytes=most
        )
        is_small = len(data) <= SMALL_BYTES
        manifest = _named(data, digest) if is_small else await in_executor(self._executor, _named, data, digest)
        if manifest.num_values != num_values:
            raise PeerViolation("its state is of another size than the run's", peer_id=donor)
        return manifest

    async def parts(self, origin: Group, outcome: Outcome, holders: Sequence[str], codec: Codec) -> tuple[bytes, ...]:
        """Fetch the result parts of `outcome` of the group `origin`. Raises RoundError if one cannot be fetched."""
        sizes = [part_bytes(origin, index, codec) for index in range(len(outcome.part_digests))]
        limit_s = MAX_HOLDERS_TRIED * (PIECE_TIMEOUT_S + max(sizes, default=0) / SLOWEST_DONOR_BYTES_PER_S)
        try:
            async with asyncio.timeout(limit_s), asyncio.TaskGroup() as tasks:
                fetching = [
                    tasks.create_task(self._part(outcome, index, holders, size)) for index, size in enumerate(sizes)
                ]
        except TimeoutError:
            raise RoundError(f"the parts did not come within {limit_s:.0f} s", missing=tuple(holders)) from None
        parts = tuple(task.result() for task in fetching)
        if any(part is None for part in parts):
            raise RoundError("a part of the outcome cannot be fetched from any member", missing=tuple(holders))
        return tuple(part for part in parts if part is not None)

    async def _part(self, outcome: Outcome, index: int, holders: Sequence[str], size: int) -> bytes | None:
        request = PartRequest(origin_digest=outcome.origin_digest, index=index).to_bytes()
        for holder in self._in_turn(holders, index):
            data = b""
            try:
                data = await self._receive(holder, request, size)
            except SwarmError as error:
                logger.warning("could not get part %d from %s: %s", index, short_id(holder), error)
                continue
            finally:
                if len(data) < size:  # also if the attempt that needs the part has ended
                    self._owing[holder] = None
            if await in_executor(self._executor, _digest, data) == outcome.part_digests[index]:
                self._owing.pop(holder, None)
                return data
            logger.warning("%s sent a part that does not match its digest", short_id(holder))
        return None

    def _in_turn(self, holders: Sequence[str], index: int) -> list[str]:
        """Return the holders in the order to ask for part `index`: another first holder for each part. Much slower
        holders, and those that owe this member a part, come last."""
        rates = self._network.links.rates_from(holders)
        enough = max(rates.values(), default=0.0) / MUCH_SLOWER
        usual = [each for each in holders if rates.get(each, enough) >= enough and each not in self._owing]
        first = index % max(len(usual), 1)
        return [*usual[first:], *usual[:first], *(holder for holder in holders if holder not in usual)]

    async def _receive(self, holder: str, request: bytes, size: int) -> bytes:
        received, limit_s = bytearray(), PIECE_TIMEOUT_S + size / SLOWEST_DONOR_BYTES_PER_S
        try:
            async with (
                asyncio.timeout(limit_s),
                self._network.stream(holder, self._methods.part, timeout_s=PIECE_TIMEOUT_S) as stream,
            ):
                await stream.send(request)
                await stream.finish()
                while len(received) < size:
                    received += await stream.receive()
        except EndOfStream:
            pass
        except TimeoutError:
            raise PeerTimeout(f"it did not send the part within {limit_s:.0f} s", peer_id=holder) from None
        return bytes(received)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _named(data: bytes, digest: bytes) -> Manifest:
    """Return the manifest in `data`. Raises IntegrityError or PeerViolation unless its name is `digest`."""
    if _digest(data) != digest:
        raise IntegrityError("its manifest does not match the digest")
    return Manifest.from_bytes(data)
