"""Members of an all-reduce for `test_bench_allreduce`, each a process of its own: ours, and hivemind's averager.

A member answers each command that comes through its pipe: `prepare` and `go` are one round, split where its group is
formed, so that only the reduction is timed. Values are drawn from the member's own seed.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import psutil
import torch
import uvloop
from support.network_worlds import libp2p_node
from swarm.network.interface import Stream
from swarm.network.libp2p_network import Libp2pNetwork
from swarm.training.allreduce.butterfly import Butterfly
from swarm.training.allreduce.part_streams import PartStreams
from swarm.training.allreduce.parts import ReductionScheme, decoded_frames, part_values
from swarm.training.allreduce.peer_connections import PeerConnections
from swarm.training.run.methods import Methods
from swarm.trust.standard_aggregators import get_aggregator
from swarm_compression import get_codec, warm_up
from swarm_protocol.errors import SwarmError
from swarm_protocol.reduction_messages import ReduceOpening
from swarm_protocol.training_messages import Contribution, Group, SignedGroup
from torch import Tensor

CODEC = get_codec("int8")
METHODS = Methods("bench")
START_S = 90.0
"""Time for members to import and to find each other on a busy machine."""
ROUND_S = 30.0
"""Time for members to form a group, and again for them to reduce."""


class Stuck(Exception):
    """Raised when members did not answer in time, or ended."""


def vector(index: int, num_values: int) -> Tensor:
    """Return the contribution of member `index`."""
    return torch.randn(num_values, generator=torch.Generator().manual_seed(index))


def group_of(peer_ids: list[str], num_values: int) -> Group:
    return Group(
        run="bench",
        step=1,
        attempt=0,
        state_digest=bytes(32),
        members=tuple(Contribution(peer_id=peer, num_tokens=1, num_samples=1) for peer in peer_ids),
        part_values=part_values(num_values, (1.0,) * len(peer_ids)),
        reduce_s=60.0,
        vote_s=1.0,
    )


class Member:
    """Run our all-reduce as one member. Its peak memory is the growth of the process beyond the vector, as the kernel
    counts it."""

    def __init__(self, node: Libp2pNetwork, index: int) -> None:
        self._node = node
        self._index = index
        self._executor = ThreadPoolExecutor(2)
        self._delta_N = self._mean_N = torch.empty(0)
        self._next: asyncio.Future[Butterfly] = asyncio.get_running_loop().create_future()
        self._butterfly: Butterfly | None = None
        self._before_bytes = 0

    async def accept(self, peer: str, stream: Stream) -> None:
        opening = ReduceOpening.from_bytes(await stream.receive())
        await (await asyncio.shield(self._next)).accept(peer, opening, stream)

    def prepare(self, data: bytes) -> None:
        group = Group.from_bytes(data)
        if len(self._delta_N) != sum(group.part_values):
            self._delta_N = self._mean_N = torch.empty(0)
            self._delta_N = vector(self._index, sum(group.part_values))
            self._mean_N = torch.zeros_like(self._delta_N)
        self._group = group
        self._butterfly = None
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        self._before_bytes = psutil.Process().memory_info().rss
        streams = PartStreams(
            PeerConnections(network=self._node, methods=METHODS),
            SignedGroup(group=group, signer=group.peer_ids[0], data=data, digest=bytes(32)),
            self._delta_N,
            ReductionScheme(codec=CODEC, aggregator=get_aggregator("mean", {})),
            self._executor,
        )
        self._butterfly = Butterfly(streams, self._report, cast(Any, None))  # nobody audits
        self._next.set_result(self._butterfly)

    async def _report(self, error: SwarmError) -> None:
        print("member", self._index, error, flush=True)

    async def go(self) -> dict[str, float]:
        """Reduce and decode the mean, which hivemind's averager leaves, too."""
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        since, butterfly = time.process_time(), self._butterfly
        assert butterfly is not None
        parts = await butterfly.run()
        self._next = asyncio.get_running_loop().create_future()
        peak_bytes = _peak_bytes() - self._before_bytes
        await asyncio.to_thread(self._take, parts)
        return {
            "sent_bytes": butterfly.streams.bytes_sent,
            "peak_bytes": peak_bytes,
            "cpu_s": time.process_time() - since,
        }

    def _take(self, parts: Any) -> None:
        for frame, mean_F in decoded_frames(self._group, parts, CODEC):
            self._mean_N[frame] = mean_F

    def error(self, num_members: int) -> float:
        """Return the error of the mean, relative to its norm."""
        mean_N = sum((vector(index, len(self._mean_N)) for index in range(num_members)), torch.zeros(1)) / num_members
        return float((self._mean_N - mean_N).norm() / mean_N.norm())


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def ours(pipe: Connection, index: int, folder: str) -> None:
    torch.set_num_threads(1)
    warm_up()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        peers = await loop.run_in_executor(None, pipe.recv)
        async with await libp2p_node(Path(folder) / f"member{index}", peers=peers) as node:
            member = Member(node, index)
            await node.serve_stream(METHODS.reduce, member.accept)
            pipe.send((node.peer_id, await node.addrs()))
            while (command := await loop.run_in_executor(None, pipe.recv)) is not None:
                name, *arguments = command
                result = getattr(member, name)(*arguments)
                pipe.send(await result if asyncio.iscoroutine(result) else result)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def hiveminds(pipe: Connection, index: int, num_values: int, num_members: int) -> None:
    from hivemind import DHT  # noqa: PLC0415 - only in its own process
    from hivemind.averaging import DecentralizedAverager  # noqa: PLC0415
    from hivemind.averaging.control import AveragingStage  # noqa: PLC0415
    from hivemind.compression import Float16Compression  # noqa: PLC0415

    multiprocessing.set_start_method("fork", force=True)  # so that nothing is pickled
    torch.set_num_threads(1)
    dht = DHT(initial_peers=pipe.recv(), start=True)
    averager = DecentralizedAverager(
        [vector(index, num_values)],
        dht,
        start=True,
        prefix="bench",
        target_group_size=num_members,
        min_group_size=num_members,
        min_matchmaking_time=2.0,
        request_timeout=1.0,
        compression=Float16Compression(),
    )
    pipe.send((str(dht.peer_id), [str(addr) for addr in dht.get_visible_maddrs()]))
    while (command := pipe.recv()) is not None:
        if command[0] == "prepare":
            control = averager.step(wait=False, require_trigger=True, timeout=ROUND_S)
            while control.stage is not AveragingStage.AWAITING_TRIGGER and not control.done():
                time.sleep(0.02)
            pipe.send(None)
        else:
            try:
                control.allow_allreduce()
                result = control.result(ROUND_S)
            except (TimeoutError, RuntimeError):  # these end a failed round
                result = None
            pipe.send({"members": len(result)} if result else None)
    averager.shutdown()
    dht.shutdown()


class Swarm:
    """Processes that run `target`, which are told things together. `peer_ids` are sorted, `members` alike.

    No wait is endless: members that do not answer in time are Stuck, and of no use from then on.
    """

    def __init__(self, target: Callable[..., None], num_members: int, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        self.members: list[tuple[str, Connection]] = []
        members, pipes = [], []
        addrs: list[str] = []
        for index in range(num_members):
            pipe, theirs = context.Pipe()
            process = context.Process(target=target, args=(theirs, index, *arguments))
            process.start()
            self._processes.append(process)
            pipes.append(pipe)
        # all import at once, which takes longest; the others join through the first one
        try:
            for pipe in pipes:
                pipe.send(tuple(addrs))
                peer_id, own = _answer(pipe, START_S)
                addrs = addrs or list(own)[:1]
                members.append((peer_id, pipe))
        except Stuck:
            self.close()
            raise
        self.members = members
        self.peer_ids = sorted(peer_id for peer_id, _ in members)

    def ask(self, *command: Any) -> list[Any]:
        for _, pipe in self.members:
            pipe.send(command)
        return [_answer(pipe, 2 * ROUND_S) for _, pipe in self.members]

    def round_s(self, *prepare: Any) -> tuple[float, float, list[Any]]:
        """Return the seconds until all members have finished, the CPU seconds of all their processes, and their
        answers."""
        self.ask("prepare", *prepare)
        since, cpu_s = time.perf_counter(), self._cpu_s()
        results = self.ask("go")
        return time.perf_counter() - since, self._cpu_s() - cpu_s, results

    def close(self) -> None:
        """Let members end by themselves, or kill them with all processes that they have started."""
        for _, pipe in self.members:
            with suppress(OSError):
                pipe.send(None)
        started = self._started()
        deadline = time.monotonic() + (10 if self.members else 0)
        for process in self._processes:
            process.join(timeout=max(0.0, deadline - time.monotonic()))
        for each in started:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        for process in self._processes:
            process.join()

    def _started(self) -> list[psutil.Process]:
        """Return all members and their children: daemons of the network, and processes that hivemind forks."""
        own = [psutil.Process(process.pid) for process in self._processes if process.is_alive()]
        return [each for parent in own for each in (parent, *parent.children(recursive=True))]

    def _cpu_s(self) -> float:
        return sum(each.cpu_times().user + each.cpu_times().system for each in self._started())


def _answer(pipe: Connection, limit_s: float) -> Any:
    if not pipe.poll(limit_s):
        raise Stuck(f"did not finish within {limit_s:.0f} s")
    try:
        return pipe.recv()
    except EOFError:
        raise Stuck("has ended") from None


@contextmanager
def swarm(target: Callable[..., None], num_members: int, *arguments: Any) -> Iterator[Swarm]:
    members = Swarm(target, num_members, *arguments)
    try:
        yield members
    finally:
        members.close()
