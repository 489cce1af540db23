"""Tests that states and parts are fetched by digest from several donors, of which some fail or lie."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.replica_states import state_of
from support.training_swarm import config
from swarm.network.framing import WINDOW_BYTES
from swarm.network.interface import Stream
from swarm.network.memory.memory_network import MemoryInternet
from swarm.testing import virtual_time
from swarm.testing.virtual_time import JobPlace
from swarm.training.allreduce.parts import part_values
from swarm.training.run.methods import Methods
from swarm.training.state import state_transfer
from swarm.training.state.lease import LeaseStripe
from swarm.training.state.replica import Replica
from swarm.training.state.replica_state import (
    Manifest,
    ReplicaState,
)
from swarm.training.state.state_transfer import Donor, Fetcher
from swarm_compression import get_codec
from swarm_protocol.commit_messages import Outcome
from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerViolation, RoundError
from swarm_protocol.identity import short_id
from swarm_protocol.member_messages import ChunkRequest, PartRequest
from swarm_protocol.training_messages import Contribution, Group

NUM_VALUES = 1 << 19
"""4 MiB of state: four chunks."""
METHODS = Methods("run")
CODEC = get_codec("int8")


class World:
    def __init__(self, num_donors: int) -> None:
        self.internet = MemoryInternet(detection_s=0.1)
        self.executor = ThreadPoolExecutor(1)
        self.mine = self.internet.network()
        self.fetcher = Fetcher(self.mine, METHODS, self.executor)
        generator = torch.Generator().manual_seed(5)
        theta_N = torch.randn(NUM_VALUES, generator=generator)
        self.old = ReplicaState.initial(torch.zeros(NUM_VALUES))
        self.new = state_of(theta_N, outer_step=3)
        self.donors = [self.internet.network() for _ in range(num_donors)]
        self.num_chunks_given = [0] * num_donors

    async def open(self, lies: dict[int, Callable[[bytes], bytes]]) -> None:
        for index, network in enumerate(self.donors):
            donor = Donor(Replica(config(), self.new))

            async def chunk(peer: str, request: bytes, donor: Donor = donor, index: int = index) -> bytes:
                self.num_chunks_given[index] += 1
                return lies.get(index, bytes)(await donor.chunk(peer, request))

            await network.serve(METHODS.manifest, donor.manifest)
            await network.serve(METHODS.chunk, chunk)
            await network.serve_stream(METHODS.part, donor.part)

    @property
    def peers(self) -> list[str]:
        return [network.peer_id for network in self.donors]

    async def close(self) -> None:
        for network in (self.mine, *self.donors):
            await network.close()
        self.executor.shutdown()


def in_world(
    case: Callable[[World], Awaitable[None]],
    *,
    num_donors: int = 3,
    lies: dict[int, Callable[[bytes], bytes]] | None = None,
    jobs: JobPlace = "loop",
) -> None:
    async def main() -> None:
        world = World(num_donors)
        await world.open(lies or {})
        try:
            await case(world)
        finally:
            await world.close()

    virtual_time.run(main(), jobs=jobs)


def test_state_comes_from_all_donors_at_once_and_has_the_requested_digest() -> None:
    async def case(world: World) -> None:
        fetched = await world.fetcher.state(world.new.digest, world.peers, [world.old])
        assert fetched.state.hashed_again().digest == world.new.digest
        # momentum is zero in both states, so that the member already has half of the chunks
        assert fetched.num_bytes == 4 * NUM_VALUES
        assert len(fetched.donors) == 2

    in_world(case)


def test_repair_fetches_only_the_chunks_that_differ() -> None:
    async def case(world: World) -> None:
        theta_N = world.new.theta_N.clone()
        theta_N[5] += 1
        diverged = replace(world.new, theta_N=theta_N).hashed_again()
        fetched = await world.fetcher.state(world.new.digest, world.peers, [diverged])
        assert fetched.num_bytes == 1 << 20
        assert torch.equal(fetched.state.theta_N, world.new.theta_N)

    in_world(case)


def test_lying_donor_is_dropped_after_one_chunk() -> None:
    async def case(world: World) -> None:
        fetched = await world.fetcher.state(world.new.digest, world.peers, [world.old])
        assert fetched.state.hashed_again().digest == world.new.digest
        assert world.peers[0] not in fetched.donors
        assert world.num_chunks_given[0] == 1

    in_world(case, lies={0: lambda data: data[:-1] + bytes([data[-1] ^ 1])})


def test_state_is_fetched_when_a_donor_dies() -> None:
    async def case(world: World) -> None:
        fetching = asyncio.create_task(world.fetcher.state(world.new.digest, world.peers, [world.old]))
        await asyncio.sleep(0)
        world.internet.crash(world.peers[1])
        fetched = await fetching
        assert fetched.state.hashed_again().digest == world.new.digest

    in_world(case)


def test_fetch_names_each_donor_when_all_of_them_lie() -> None:
    async def case(world: World) -> None:
        with pytest.raises(RoundError, match=short_id(world.peers[0])):
            await world.fetcher.state(world.new.digest, world.peers, [world.old])

    in_world(case, num_donors=2, lies={0: lambda data: data + b"x", 1: lambda _: b""})


def test_fetch_raises_a_clear_error_when_nobody_has_the_state() -> None:
    async def case(world: World) -> None:
        with pytest.raises(RoundError, match="no longer has the state"):
            await world.fetcher.state(bytes(32), world.peers, [world.old])
        with pytest.raises(RoundError, match="no donors"):
            await world.fetcher.state(world.new.digest, [], [world.old])

    in_world(case)


def test_state_of_another_size_is_refused_before_memory_is_allocated() -> None:
    async def case(world: World) -> None:
        small = ReplicaState.initial(torch.zeros(10))
        with pytest.raises(RoundError, match="another size"):
            await world.fetcher.state(world.new.digest, world.peers, [small])

    in_world(case)


def reduced(world: World) -> tuple[Group, Replica]:
    """Return the donors' group, and a replica that is about to take a step by 3,000 of its values."""
    group = Group(
        run="run",
        step=1,
        attempt=0,
        state_digest=bytes(32),
        members=tuple(Contribution(peer_id=peer, num_tokens=1, num_samples=1) for peer in sorted(world.peers)),
        part_values=part_values(3000, (1.0,) * len(world.peers)),
        reduce_s=1.0,
        vote_s=1.0,
    )
    stripes = (LeaseStripe(roster=group.peer_ids),)
    current = state_of(torch.zeros(3000), roster=group.peer_ids, stripes=stripes)
    return group, Replica(config(), current)


async def proposed(world: World) -> tuple[Group, Replica, tuple[bytes, ...], Outcome]:
    """Return the donors' group, and a replica that has proposed the step with the encoded `parts` of its outcome."""
    group, replica = reduced(world)
    values = torch.randn(3000, generator=torch.Generator().manual_seed(1))
    parts = tuple(CODEC.encode(piece) for piece in values.split(list(group.part_values)))
    return group, replica, parts, await replica.propose(world.executor, b"g" * 32, group, parts)


async def trickled_part(_peer: str, stream: Stream) -> None:
    """Send an empty message every 20 s, and never a part."""
    await stream.receive()
    while True:
        await stream.send(b"")
        await asyncio.sleep(20.0)


def test_parts_are_fetched_by_digest_from_any_peer_that_has_them() -> None:
    async def main() -> None:
        world = World(3)
        group, replica, parts, outcome = await proposed(world)
        donor = Donor(replica)

        async def corrupt(_peer: str, stream: Stream) -> None:
            await stream.receive()
            await stream.send(b"x" * 100)

        await world.donors[0].serve_stream(METHODS.part, corrupt)
        await world.donors[2].serve_stream(METHODS.part, donor.part)
        # the first peer lies, and the second one does not serve parts
        got = await world.fetcher.parts(group, outcome, world.peers, CODEC)
        assert got == parts
        with pytest.raises(RoundError, match="cannot be fetched"):
            await world.fetcher.parts(group, outcome, world.peers[:2], CODEC)
        await world.close()

    virtual_time.run(main())


def test_parts_are_fetched_in_time_from_the_next_holder_when_one_trickles() -> None:
    async def main() -> None:
        world = World(2)
        group, replica, parts, outcome = await proposed(world)

        await world.donors[0].serve_stream(METHODS.part, trickled_part)
        await world.donors[1].serve_stream(METHODS.part, Donor(replica).part)
        async with asyncio.timeout(120):
            assert await world.fetcher.parts(group, outcome, world.peers, CODEC) == parts
        await world.close()

    virtual_time.run(main())


def test_holder_that_sent_no_part_before_the_attempt_ended_is_asked_last_in_the_next_one() -> None:
    """A liar could otherwise make each attempt end in the same way, in which a member needs the parts in seconds."""

    async def main() -> None:
        world = World(3)
        group, replica, parts, outcome = await proposed(world)
        await world.donors[0].serve_stream(METHODS.part, trickled_part)
        for network in world.donors[1:]:
            await network.serve_stream(METHODS.part, Donor(replica).part)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(9.0):
                await world.fetcher.parts(group, outcome, world.peers, CODEC)
        async with asyncio.timeout(1.0):
            assert await world.fetcher.parts(group, outcome, world.peers, CODEC) == parts
        await world.close()

    virtual_time.run(main())


def test_fetch_of_a_state_is_given_up_in_time_when_donors_trickle() -> None:
    async def main() -> None:
        world = World(1)
        donor = Donor(Replica(config(), world.new))
        await world.donors[0].serve(METHODS.manifest, donor.manifest)
        served: list[bytes] = []

        async def trickle(peer: str, request: bytes) -> bytes:
            await asyncio.sleep(29.0)
            served.append(request)
            return await donor.chunk(peer, request)

        await world.donors[0].serve(METHODS.chunk, trickle)
        own = replace(world.old, momentum_N=torch.ones(NUM_VALUES)).hashed_again()
        started = asyncio.get_running_loop().time()
        with pytest.raises(RoundError, match=r"within 94 s"):
            await world.fetcher.state(world.new.digest, world.peers, [own])
        assert asyncio.get_running_loop().time() - started < 100
        assert len(served) == 3, "each chunk must arrive in time, and only their sum be too late"
        await world.close()

    virtual_time.run(main())


def test_fetch_of_parts_is_given_up_in_time_when_all_holders_trickle() -> None:
    async def main() -> None:
        world = World(9)
        group, _replica, _parts, outcome = await proposed(world)

        for network in world.donors:
            await network.serve_stream(METHODS.part, trickled_part)
        started = asyncio.get_running_loop().time()
        with pytest.raises(RoundError, match="did not come within"):
            await world.fetcher.parts(group, outcome, world.peers, CODEC)
        assert asyncio.get_running_loop().time() - started < 125
        await world.close()

    virtual_time.run(main())


def test_large_manifest_is_parsed_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case(world: World) -> None:
        threads = []

        def parse(data: bytes) -> Manifest:
            threads.append(threading.current_thread())
            return Manifest.from_bytes(data)

        monkeypatch.setattr(state_transfer, "Manifest", SimpleNamespace(from_bytes=parse))
        monkeypatch.setattr(state_transfer, "SMALL_BYTES", 10)
        await world.fetcher.state(world.new.digest, world.peers, [world.old])
        assert threads
        assert threading.main_thread() not in threads

    in_world(case, jobs="threads")


def test_part_is_freed_when_the_requesting_peer_does_not_take_it() -> None:
    """Anyone could otherwise have a member keep the parts of every step, which are as large as the model."""

    async def main() -> None:
        world = World(1)
        replica, late = Replica(config(), world.new), 1.5 * state_transfer.PIECE_TIMEOUT_S
        replica.keep_parts(b"g" * 32, (bytes(2 * WINDOW_BYTES),))
        await world.donors[0].serve_stream(METHODS.part, Donor(replica).part)
        async with world.mine.stream(world.peers[0], METHODS.part, timeout_s=1000.0) as stream:
            await stream.send(PartRequest(origin_digest=b"g" * 32, index=0).to_bytes())
            await asyncio.sleep(late)
            for _ in range(WINDOW_BYTES // state_transfer.PIECE_BYTES - 1):
                await stream.receive()
            with pytest.raises(PeerTimeout, match="before its own deadline"):
                await stream.receive()
        async with world.mine.stream(world.peers[0], METHODS.part, timeout_s=late) as silent:
            with pytest.raises(PeerTimeout, match="before its own deadline"):
                await silent.receive()
        await world.close()

    virtual_time.run(main())


def test_part_and_chunk_requests_out_of_range_are_refused() -> None:
    async def case(world: World) -> None:
        request = ChunkRequest(state_digest=world.new.digest, index=4).to_bytes()
        with pytest.raises(PeerViolation, match="no chunk 4"):
            await world.mine.call(world.peers[0], METHODS.chunk, request, timeout_s=1.0)
        async with world.mine.stream(world.peers[0], METHODS.part, timeout_s=1.0) as stream:
            await stream.send(PartRequest(origin_digest=bytes(32), index=0).to_bytes())
            with pytest.raises(PeerRefused, match="no longer has the part"):
                await stream.receive()

    in_world(case)
