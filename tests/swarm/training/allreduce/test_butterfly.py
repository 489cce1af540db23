"""Tests the all-reduce of one group on a simulated network, member by member."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial, partialmethod
from typing import Any, TypeAlias, cast

import pytest
import torch
from support.aggregated import aggregate
from support.training_swarm import SpoiledCodec
from swarm.network.interface import FailpointHook, Stream, no_failpoints
from swarm.network.memory.memory_link import LinkModel
from swarm.network.memory.memory_network import MemoryInternet, MemoryNetwork
from swarm.testing import virtual_time
from swarm.testing.virtual_time import JobPlace
from swarm.training.allreduce import backup_owner
from swarm.training.allreduce import parts as module
from swarm.training.allreduce.backup_owner import BackupOwner
from swarm.training.allreduce.butterfly import Butterfly
from swarm.training.allreduce.part_reduction import QUICK_MEMBERS, PartReducer
from swarm.training.allreduce.part_streams import PartStreams
from swarm.training.allreduce.parts import (
    CaughtLying,
    PartResult,
    ReductionScheme,
    UndecodableSlice,
    decoded_frames,
    leaf_at,
    part_leaves,
    part_values,
)
from swarm.training.allreduce.peer_connections import PeerConnections
from swarm.training.run.methods import Methods
from swarm.trust.standard_aggregators import aggregator_names, get_aggregator
from swarm_compression import Codec, get_codec, warm_up
from swarm_compression.codec import Data
from swarm_protocol.envelope import OutOfTime
from swarm_protocol.errors import PeerError, PeerUnreachable, PeerViolation, RoundError, SwarmError
from swarm_protocol.proof_messages import Evidence
from swarm_protocol.reduction_messages import OpeningKind, ReduceOpening
from swarm_protocol.training_messages import Contribution, Group, SignedGroup
from torch import Tensor

METHODS = Methods("run")
Parts: TypeAlias = tuple[Data, ...]


class Ring:
    """Build a group whose members each have a network and a vector. `run` reduces among them."""

    def __init__(
        self,
        tokens: list[int],
        num_values: int = 3000,
        codec: str = "int8",
        aggregator: str = "mean",
    ) -> None:
        self.internet = MemoryInternet(detection_s=0.1)
        self.executor = ThreadPoolExecutor(2)
        self.codec: Codec = get_codec(codec)
        self.aggregator = get_aggregator(aggregator, {})
        unsorted = [self.internet.network() for _ in tokens]
        self.networks = sorted(unsorted, key=lambda each: each.peer_id)
        peers = [each.peer_id for each in self.networks]
        group = Group(
            run="run",
            step=1,
            attempt=0,
            state_digest=bytes(32),
            members=tuple(
                Contribution(peer_id=peer, num_tokens=count, num_samples=count)
                for peer, count in zip(peers, tokens, strict=True)
            ),
            part_values=part_values(num_values, (1.0,) * len(tokens)),
            reduce_s=10.0,
            vote_s=1.0,
        )
        self.signed = SignedGroup(group=group, signer=peers[0], data=b"signed group", digest=b"d" * 32)
        self.vectors = [
            torch.randn(num_values, generator=torch.Generator().manual_seed(each)) for each in range(len(tokens))
        ]
        self.failures: dict[int, SwarmError] = {}
        self.butterflies: list[Butterfly] = []

    def member(self, index: int, codec: Codec | None = None, failpoints: FailpointHook = no_failpoints) -> Butterfly:
        network = self.networks[index]
        has_tokens = self.signed.group.members[index].num_tokens > 0
        streams = PartStreams(
            PeerConnections(network=network, methods=METHODS),
            self.signed,
            self.vectors[index] if has_tokens else None,
            ReductionScheme(codec=codec or self.codec, aggregator=self.aggregator),
            self.executor,
            failpoints=failpoints,
        )
        return Butterfly(streams, partial(self._failed, index), cast(Any, None))  # nobody audits

    async def _failed(self, index: int, error: SwarmError) -> None:
        self.failures.setdefault(index, error)

    async def serve(self, network: MemoryNetwork, butterfly: Butterfly) -> None:
        async def accept(peer: str, stream: Stream) -> None:
            opening = ReduceOpening.from_bytes(await stream.receive())
            assert opening.group_digest == self.signed.digest
            await butterfly.accept(peer, opening, stream)

        await network.serve_stream(METHODS.reduce, accept)

    async def start(
        self, members: list[Butterfly], accepted: dict[int, Butterfly] | None = None
    ) -> list[asyncio.Task[Parts]]:
        """Start all members. A member with an entry in `accepted` answers streams through that butterfly instead."""
        self.butterflies = members
        for index, network in enumerate(self.networks):
            await self.serve(network, (accepted or {}).get(index, members[index]))
        return [asyncio.create_task(each.run()) for each in members]

    async def run(self, codecs: dict[int, Codec] | None = None) -> list[Parts]:
        self.butterflies = [self.member(index, (codecs or {}).get(index)) for index in range(len(self.networks))]
        for network, butterfly in zip(self.networks, self.butterflies, strict=True):
            await self.serve(network, butterfly)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(each.run()) for each in self.butterflies]
        return [task.result() for task in running]

    def mean_of(self, parts: Parts) -> Tensor:
        mean_N = torch.full_like(self.vectors[0], math.nan)
        for frame, mean_F in decoded_frames(self.signed.group, parts, self.codec):
            mean_N[frame] = mean_F
        return mean_N

    async def run_until_failed(self, members: set[int], codecs: dict[int, Codec] | None = None) -> None:
        """Run until all of `members` have reported a failure."""
        running = asyncio.create_task(self.run(codecs))
        async with asyncio.timeout(30):
            while not members <= self.failures.keys():
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait({running})

    async def close(self) -> None:
        for network in self.networks:
            await network.close()
        self.executor.shutdown()


def in_ring(
    tokens: list[int], case: Callable[[Ring], Awaitable[None]], *, jobs: JobPlace = "loop", **options: object
) -> None:
    async def main() -> None:
        ring = Ring(tokens, **options)  # type: ignore[arg-type]
        try:
            await case(ring)
        finally:
            await ring.close()

    virtual_time.run(main(), jobs=jobs)


@pytest.mark.parametrize("tokens", [[5], [3, 9], [1, 1, 1], [4, 0, 2, 7], [1] * 8])
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_run_gives_every_member_the_same_bits_near_the_weighted_mean(tokens: list[int], codec: str) -> None:
    async def case(ring: Ring) -> None:
        reductions = await ring.run()
        mean_N = sum(x_N.double() * count for x_N, count in zip(ring.vectors, tokens, strict=True)) / sum(tokens)
        for each in reductions:
            assert each == reductions[0]
        error = (ring.mean_of(reductions[0]).double() - mean_N).norm() / mean_N.norm()
        assert error < (1e-6 if codec == "fp32" else 0.02)
        assert not ring.failures

    in_ring(tokens, case, codec=codec)


def test_run_sums_in_group_order_when_a_member_is_slow() -> None:
    results = []
    for slow in range(3):

        async def case(ring: Ring, slow: int = slow) -> None:
            for other in range(3):
                if other != slow:
                    ring.internet.link(
                        ring.networks[slow].peer_id,
                        ring.networks[other].peer_id,
                        slow_link(latency_s=0.5),
                    )
            results.append((await ring.run())[0])

        in_ring([3, 5, 7], case, codec="fp32")
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize(
    ("aggregator", "codec", "num_members", "uses_threads"),
    [
        ("mean", "int8", 3, False),
        ("mean", "int8", QUICK_MEMBERS + 1, True),
        ("mean", "fp16", 3, True),
        ("median", "int8", 3, True),
    ],
)
def test_run_uses_threads_only_for_reductions_that_take_longer_than_the_handover(
    aggregator: str, codec: str, num_members: int, uses_threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up()
    handed = []
    monkeypatch.setattr(PartReducer, "reduce", partialmethod(_noted, PartReducer.reduce, handed))

    async def case(ring: Ring) -> None:
        reductions = await ring.run()
        assert all(each == reductions[0] for each in reductions)

    in_ring([1] * num_members, case, jobs="threads", codec=codec, aggregator=aggregator)
    assert {thread is not threading.main_thread() for thread in handed} == {uses_threads}


def _noted(owner: PartReducer, reduce: Callable[..., None], handed: list[threading.Thread], *arguments: object) -> None:
    handed.append(threading.current_thread())
    reduce(owner, *arguments)


def slow_link(latency_s: float) -> LinkModel:
    return LinkModel(latency_s=latency_s)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("name", aggregator_names())
def test_run_gives_every_member_the_aggregate_of_the_slices(
    name: str, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FRAME_VALUES", 512)
    tokens = [4, 0, 5, 4, 3, 5]

    async def case(ring: Ring) -> None:
        ring.vectors[2] *= -1000
        peers = ring.signed.group.peer_ids
        reductions = await ring.run()
        assert all(each == reductions[0] for each in reductions)

        def sent(x_F: Tensor) -> Tensor:
            return ring.codec.decode(ring.codec.encode(x_F), x_F.numel())

        for index in range(6):
            kept = torch.zeros(6)
            for leaf in (leaf_at(6 * 1024, each) for each in part_leaves(ring.signed.group, index)):
                rows = [[sent(ring.vectors[member][leaf]).numpy() for member in range(6)]]
                expected_L, report = aggregate(ring.aggregator, partial(iter, rows), tokens)
                assert torch.equal(ring.mean_of(reductions[0])[leaf], sent(torch.from_numpy(expected_L)))
                kept += torch.tensor(report.kept or (1.0,) * 6) / len(part_leaves(ring.signed.group, index))
            reduced = [peer for peer, share, count in zip(peers, kept, tokens, strict=True) if count and share < 0.5]
            assert sorted(ring.butterflies[index].own.reducer.kept_shares) == reduced
        assert not ring.failures

    in_ring(tokens, case, codec=codec, num_values=6 * 1024, aggregator=name)


def test_run_fails_at_every_owner_and_names_the_sender_when_a_surveyed_slice_is_bad() -> None:
    async def case(ring: Ring) -> None:
        await ring.run_until_failed({0, 1, 3}, {2: SpoiledCodec(lambda data: NAN + data[4:])})
        for honest in (0, 1, 3):
            error = ring.failures[honest]
            assert isinstance(error, PeerViolation)
            assert error.peer_id == ring.networks[2].peer_id

    in_ring([1] * 4, case, aggregator="centered_clip")


def test_run_warns_of_weaker_guarantees_when_multi_krum_has_too_few_members(caplog: pytest.LogCaptureFixture) -> None:
    async def case(ring: Ring) -> None:
        await ring.run()
        assert "0 liars are left out instead of 1, because only 4 members contribute" in caplog.text

    in_ring([1] * 4, case, aggregator="multi_krum")


def test_run_sends_about_two_bytes_for_each_value_with_int8() -> None:
    async def case(ring: Ring) -> None:
        await ring.run()
        for each in ring.butterflies:
            # (n - 1) / n of the vector both ways and 1 / n to the backup, with a scale for each 256 values
            assert each.streams.bytes_sent / 400_000 == pytest.approx(1.75 * (1 + 4 / 256), rel=0.01)

    in_ring([1] * 4, case, num_values=400_000)


def test_run_has_the_same_result_in_several_frames_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole: list[Tensor] = []

    async def case(ring: Ring) -> None:
        whole.append(ring.mean_of((await ring.run())[0]))

    in_ring([2, 1], case, num_values=5000)
    monkeypatch.setattr(module, "FRAME_VALUES", 512)
    in_ring([2, 1], case, num_values=5000)
    assert torch.equal(whole[0], whole[1])


def test_run_ends_when_vector_has_fewer_blocks_than_members() -> None:
    async def case(ring: Ring) -> None:
        assert ring.mean_of((await ring.run())[0]).isfinite().all()

    in_ring([1] * 5, case, num_values=300)


EXCHANGE = ReduceOpening(kind="exchange", part=0, step=1, group_digest=b"d" * 32).to_bytes()
NAN = torch.tensor([math.nan]).numpy().tobytes()


@pytest.mark.parametrize(
    "spoil",
    [lambda data: NAN + data[4:], lambda data: data[:-1], lambda data: data + b"\0", lambda _: b""],
    ids=["nan", "short", "long", "empty"],
)
def test_run_fails_at_every_owner_and_names_the_sender_when_a_slice_is_bad(spoil: Callable[[bytes], bytes]) -> None:
    async def case(ring: Ring) -> None:
        await ring.run_until_failed({0, 1, 3}, {2: SpoiledCodec(spoil)})
        for honest in (0, 1, 3):
            error = ring.failures[honest]
            assert isinstance(error, PeerViolation)
            assert error.peer_id == ring.networks[2].peer_id

    in_ring([1] * 4, case)


def test_run_names_the_sender_when_frames_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FRAME_VALUES", 256)

    async def case(ring: Ring) -> None:
        honest = ring.member(0)
        await ring.serve(ring.networks[0], honest)
        running = asyncio.create_task(honest.run())

        async def cheat(_peer: str, stream: Stream) -> None:
            await asyncio.Event().wait()

        await ring.networks[1].serve_stream(METHODS.reduce, cheat)
        async with ring.networks[1].stream(ring.networks[0].peer_id, METHODS.reduce, timeout_s=5.0) as stream:
            await stream.send(EXCHANGE)
            await stream.send(ring.codec.encode(ring.vectors[1][:256]))
            await stream.finish()
            while 0 not in ring.failures:
                await asyncio.sleep(0.01)
        assert "too few" in str(ring.failures[0])
        assert ring.failures[0].peer_id == ring.networks[1].peer_id
        running.cancel()
        await asyncio.wait({running})

    in_ring([1, 1], case)


def test_run_names_the_owner_when_it_blames_another_member() -> None:
    """Otherwise one liar could have any member convicted by all others."""

    async def case(ring: Ring) -> None:
        liar, victim = ring.networks[1].peer_id, ring.networks[2].peer_id

        async def frame(_peer: str, stream: Stream) -> None:
            await stream.receive()
            raise PeerViolation("it sent a bad slice", peer_id=victim)

        async def silent(_peer: str, _stream: Stream) -> None:
            await asyncio.Event().wait()

        await ring.networks[1].serve_stream(METHODS.reduce, frame)
        await ring.networks[2].serve_stream(METHODS.reduce, silent)
        honest = ring.member(0)
        await ring.serve(ring.networks[0], honest)
        running = asyncio.create_task(honest.run())
        async with asyncio.timeout(30):
            while 0 not in ring.failures:
                await asyncio.sleep(0.01)
        assert ring.failures[0].peer_id == liar
        assert not isinstance(ring.failures[0], PeerViolation), "a failure without proof is no violation"
        running.cancel()
        await asyncio.wait({running})

    in_ring([1, 1, 1], case)


def test_run_fails_with_a_clear_message_when_codec_cannot_hold_a_contribution() -> None:
    async def case(ring: Ring) -> None:
        ring.vectors[1] *= 1e6
        await ring.run_until_failed({1})
        assert isinstance(ring.failures[1], RoundError)
        assert "fp16" in str(ring.failures[1])

    in_ring([1, 1, 1], case, codec="fp16")


def test_accept_refuses_a_second_stream_of_the_same_member() -> None:
    async def case(ring: Ring) -> None:
        honest = ring.member(0)
        await ring.serve(ring.networks[0], honest)
        running = asyncio.create_task(honest.run())

        async def silent(_peer: str, _stream: Stream) -> None:
            await asyncio.Event().wait()

        await ring.networks[1].serve_stream(METHODS.reduce, silent)
        owner = ring.networks[0].peer_id
        async with ring.networks[1].stream(owner, METHODS.reduce, timeout_s=5.0) as first:
            await first.send(EXCHANGE)
            async with ring.networks[1].stream(owner, METHODS.reduce, timeout_s=5.0) as second:
                await second.send(EXCHANGE)
                with pytest.raises(PeerViolation, match="an unexpected or repeated exchange stream"):
                    await second.receive()
        running.cancel()
        await asyncio.wait({running})

    in_ring([1, 1], case)


def test_run_names_a_silent_member_within_half_the_deadline() -> None:
    async def case(ring: Ring) -> None:
        async def silent(_peer: str, _stream: Stream) -> None:
            await asyncio.Event().wait()

        await ring.networks[2].serve_stream(METHODS.reduce, silent)
        honest = [ring.member(index) for index in (0, 1)]
        for network, each in zip(ring.networks, honest, strict=False):
            await ring.serve(network, each)
        running = [asyncio.create_task(each.run()) for each in honest]
        started = asyncio.get_running_loop().time()
        while len(ring.failures) < 2:
            await asyncio.sleep(0.05)
        assert asyncio.get_running_loop().time() - started < 6.0
        for error in ring.failures.values():
            assert isinstance(error, PeerError)
            assert error.peer_id == ring.networks[2].peer_id
        for task in running:
            task.cancel()
        await asyncio.wait(running)

    in_ring([1, 1, 1], case)


def test_run_reports_a_member_that_dies_as_unreachable() -> None:
    async def case(ring: Ring) -> None:
        for other in (0, 1):
            ring.internet.link(ring.networks[2].peer_id, ring.networks[other].peer_id, slow_link(latency_s=1.0))
        running = asyncio.create_task(ring.run())
        await asyncio.sleep(0.5)
        ring.internet.crash(ring.networks[2].peer_id)
        async with asyncio.timeout(5):
            while not {0, 1} <= ring.failures.keys():
                await asyncio.sleep(0.01)
        for index in (0, 1):
            assert isinstance(ring.failures[index], PeerUnreachable)
            assert ring.failures[index].peer_id == ring.networks[2].peer_id
        running.cancel()
        await asyncio.wait({running})

    in_ring([1, 1, 1], case)


class Struck:
    """Call `strike` the first time that the phase is reached. `fired` is set then."""

    def __init__(self, phase: str, strike: Callable[[], Awaitable[None]]) -> None:
        self._phase = phase
        self._strike = strike
        self.fired = False

    async def reached(self, phase: str) -> None:
        if phase == self._phase and not self.fired:
            self.fired = True
            await self._strike()


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("phase", ["round.reduced", "round.deliver"])
@pytest.mark.parametrize("manner", ["killed", "stalls"])
def test_backup_finishes_the_part_with_the_same_bytes_when_owner_fails_after_its_slices(
    manner: str, phase: str, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FRAME_VALUES", 256)
    tokens, honest = [3, 5, 2, 7], [index for index in range(4) if index != victim]
    undisturbed: list[Parts] = []

    async def whole(ring: Ring) -> None:
        undisturbed.extend(await ring.run())

    async def case(ring: Ring) -> None:
        async def strike() -> None:
            await asyncio.sleep(0.5)  # until the messages that it sent have arrived
            if manner == "killed":
                ring.internet.crash(ring.networks[victim].peer_id)
            await asyncio.Event().wait()

        struck, members = Struck(phase, strike), [ring.member(index) for index in range(4)]
        members[victim] = ring.member(victim, failpoints=struck)
        running = await ring.start(members)
        reductions = [await running[index] for index in honest]
        assert struck.fired
        assert not ring.failures.keys() & set(honest)
        for each in reductions:
            assert each == undisturbed[0]
        running[victim].cancel()
        await asyncio.wait({running[victim]})

    in_ring(tokens, whole)
    in_ring(tokens, case)


def test_part_is_taken_from_the_backup_when_the_owners_clock_is_wrong() -> None:
    async def case(ring: Ring) -> None:
        members, owner = [ring.member(index) for index in range(4)], ring.networks[1].peer_id
        take = members[0].streams.take_result

        async def refuse(stream: Stream, part: PartResult, peer: str, first: int = 0) -> None:
            if peer == owner:
                await asyncio.sleep(0.5)  # until the messages that this member sent have arrived
                raise OutOfTime("it is not valid yet", peer_id=owner)
            await take(stream, part, peer, first)

        members[0].streams.take_result = refuse  # type: ignore[method-assign]
        async with asyncio.timeout(30):
            reductions = [await each for each in await ring.start(members)]
        assert all(each == reductions[1] for each in reductions)
        assert members[0].is_from_backup(1)
        assert not ring.failures

    in_ring([1] * 4, case)


def test_part_is_taken_from_the_backup_when_its_owner_gave_up_handing_it_out() -> None:
    """An owner does so if a member is cut off for some seconds, and must not be accused of a lie for it."""

    async def case(ring: Ring) -> None:
        async def give_up() -> None:
            await asyncio.sleep(0.5)  # until its slices are with the backup
            members[1].own.stop_delivery(ring.networks[0].peer_id)

        struck = Struck("round.reduced", give_up)
        members = [ring.member(index, failpoints=struck if index == 1 else no_failpoints) for index in range(4)]
        async with asyncio.timeout(30):
            reductions = [await each for each in await ring.start(members)]
        assert struck.fired
        assert all(each == reductions[1] for each in reductions)
        assert members[0].is_from_backup(1)
        assert not ring.failures

    in_ring([1] * 4, case)


def test_backup_makes_the_part_once_for_concurrent_requests_and_again_when_the_waiting_one_leaves() -> None:
    """A second stream for the same slices at the same time would look like a violation by the backup."""

    async def case(ring: Ring) -> None:
        members = [ring.member(index) for index in range(4)]
        for running in await ring.start(members):
            await running
        backup = members[2]
        asking = [asyncio.create_task(backup.backup.make()) for _ in range(6)]
        await asyncio.sleep(0)
        asking[0].cancel()
        await asyncio.gather(*asking[1:])
        assert asking[0].cancelled()
        assert backup.backup._num_begun == 2
        assert not ring.failures

    in_ring([1] * 4, case)


def test_backup_reports_a_proof_that_it_finds_after_its_reduction_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An auditor may ask the backup for the part after something else has ended the attempt."""

    async def case(ring: Ring) -> None:
        members, heard = [ring.member(index) for index in range(4)], list[SwarmError]()
        for running in await ring.start(members):
            await running
        backup, sender = members[2], ring.networks[0].peer_id
        bad = UndecodableSlice("it sent a bad slice", peer_id=sender, data=b"", frame=slice(0, 256))
        lie = CaughtLying("it lied", peer_id=sender, evidence=(Evidence(kind="bad_slice", body=b"proof"),))

        async def run(_self: BackupOwner) -> None:
            raise bad

        async def proved(*_arguments: object, **_options: object) -> SwarmError:
            return lie

        async def hear(error: SwarmError) -> None:
            heard.append(error)

        monkeypatch.setattr(BackupOwner, "run", run)
        monkeypatch.setattr(backup_owner, "proved", proved)
        backup._on_failure = backup.backup._on_cut_off = hear
        first = RoundError("another member has left")
        await backup._report(first)
        await backup._report(RoundError("and so has a third"))
        with pytest.raises(CaughtLying):
            await backup.backup.make()
        assert heard == [first, lie]

    in_ring([1] * 4, case)


def test_run_fails_and_names_the_owner_when_it_dies_before_its_slices_have_arrived() -> None:
    async def case(ring: Ring) -> None:
        async def strike() -> None:
            ring.internet.crash(ring.networks[2].peer_id)
            await asyncio.Event().wait()

        struck, members = Struck("round.slice", strike), [ring.member(index) for index in range(3)]
        members.append(ring.member(3))
        members[2] = ring.member(2, failpoints=struck)
        for other in (0, 1, 3):
            ring.internet.link(ring.networks[2].peer_id, ring.networks[other].peer_id, slow_link(latency_s=1.0))
        running = await ring.start(members)
        async with asyncio.timeout(30):
            while not {0, 1, 3} <= ring.failures.keys():
                await asyncio.sleep(0.01)
        assert struck.fired
        for index in (0, 1, 3):
            assert ring.failures[index].peer_id == ring.networks[2].peer_id
        for each in running:
            each.cancel()
        await asyncio.wait(running)

    in_ring([1] * 4, case)


@pytest.mark.parametrize("kind", ["slices", "audit", "proof"])
def test_requester_names_the_peer_that_ends_its_stream_without_an_answer(kind: OpeningKind) -> None:
    async def case(ring: Ring) -> None:
        peer, streams = ring.networks[1], ring.member(0).streams

        async def answer_nothing(_peer: str, stream: Stream) -> None:
            await stream.receive()

        await peer.serve_stream(METHODS.reduce, answer_nothing)
        with pytest.raises(PeerError, match=f"ended its {kind} stream") as caught:
            async with streams.open(peer.peer_id, streams.opening(kind, 0)) as stream:
                await stream.receive()
        assert caught.value.peer_id == peer.peer_id

    in_ring([1] * 2, case)


@pytest.mark.parametrize("name", ["trimmed_mean", "centered_clip", "multi_krum"])
def test_backup_finishes_the_part_when_owner_fails_under_an_aggregator_that_surveys(name: str) -> None:
    undisturbed: list[Parts] = []

    async def whole(ring: Ring) -> None:
        undisturbed.extend(await ring.run())

    async def case(ring: Ring) -> None:
        async def strike() -> None:
            await asyncio.sleep(0.5)
            ring.internet.crash(ring.networks[1].peer_id)
            await asyncio.Event().wait()

        struck, members = Struck("round.reduced", strike), [ring.member(index) for index in range(5)]
        members[1] = ring.member(1, failpoints=struck)
        running = await ring.start(members)
        reductions = [await running[index] for index in (0, 2, 3, 4)]
        assert struck.fired
        assert all(each == undisturbed[0] for each in reductions)
        running[1].cancel()
        await asyncio.wait({running[1]})

    for each in (whole, case):
        in_ring([1] * 5, each, aggregator=name)


@pytest.mark.parametrize(
    ("kind", "part"), [("keep", 0), ("keep", 2), ("result", 0), ("result", 1), ("slices", 1), ("exchange", 1)]
)
def test_accept_refuses_streams_that_the_sender_may_not_open(kind: OpeningKind, part: int) -> None:
    """In a group of three, member 1 opens a stream to member 0. Member 0 is the backup of part 2, and member 1 is the
    backup of part 0."""

    async def case(ring: Ring) -> None:
        honest = ring.member(0)
        await ring.serve(ring.networks[0], honest)
        running = asyncio.create_task(honest.run())
        async with ring.networks[1].stream(ring.networks[0].peer_id, METHODS.reduce, timeout_s=5.0) as stream:
            opening = ReduceOpening(kind=kind, part=part, step=1, group_digest=ring.signed.digest)
            await stream.send(opening.to_bytes())
            with pytest.raises(PeerViolation, match="an unexpected or repeated"):
                await stream.receive()
        running.cancel()
        await asyncio.wait({running})

    in_ring([1] * 3, case)


def test_run_refuses_bytes_of_a_backup_that_no_encoder_wrote() -> None:
    async def case(ring: Ring) -> None:
        async def strike() -> None:
            await asyncio.sleep(0.5)
            ring.internet.crash(ring.networks[1].peer_id)
            await asyncio.Event().wait()

        struck, members = Struck("round.reduced", strike), [ring.member(index) for index in range(4)]
        members[1] = ring.member(1, failpoints=struck)
        running = await ring.start(members, {2: Lying(members[2], part=1)})
        async with asyncio.timeout(30):
            while not {0, 3} <= ring.failures.keys():
                await asyncio.sleep(0.01)
        assert struck.fired
        for index in (0, 3):
            assert ring.failures[index].peer_id == ring.networks[1].peer_id, (
                "another member was named for a failure of the backup"
            )
        for each in running:
            each.cancel()
        await asyncio.wait(running)

    in_ring([1] * 4, case)


class Lying(Butterfly):
    """Answer requests for the result of `part` with random bytes."""

    def __init__(self, honest: Butterfly, part: int) -> None:
        self._honest = honest
        self._part = part

    async def accept(self, peer: str, opening: ReduceOpening, stream: Stream) -> None:
        if opening.kind != "result":
            await self._honest.accept(peer, opening, stream)
            return
        await stream.send(b"\xff" * self._honest._parts[self._part].frames[0].stop)
