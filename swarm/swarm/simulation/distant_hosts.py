"""Divides the nodes of a simulation among several processes, and connects these: calls between hosts of different
processes, and clocks that advance together.

The first process runs all trainers, servers and gateways, because they are connected by streams and share objects. The
nodes that only keep records are distributed such that each process has about the same amount of work (`Division`, which
is pure).

This is a conservative parallel simulation (Chandy and Misra, "Distributed Simulation", 1979; Bryant, 1977). A message
arrives no sooner than the lowest latency after it was sent, so each process can simulate a window of that length alone.
At the end of a window the processes exchange the messages between them, in the order in which they were sent, and wait
for each other. The result thus depends only on the scenario and the number of processes.

Each process computes by itself when each node joins and leaves, so only goodbyes are exchanged. Calls take the same
time as within one process, with two exceptions: messages from two processes to one host may pass its downlink in
another order, and a caller that gives up does not end the work of its call in another process.
"""

from __future__ import annotations

import asyncio
import itertools
import marshal
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from swarm_protocol.errors import SwarmError

from swarm.network.memory.memory_link import OVERHEAD_BYTES
from swarm.network.rate import Rate
from swarm.simulation.packed_messages import Packer
from swarm.simulation.scenario import NodeClass, Scenario
from swarm.simulation.simulated_host import Answer, Caller, HostWorld, Links, Place, SimulatedHost

BUSY_WEIGHT = 6.0
"""Processor time of a trainer, server or gateway, as a multiple of that of a node that only keeps records. It was
measured for trainers."""

MIN_DIVIDED_NODES = 2000
"""Minimum number of nodes of a simulation that is divided by default. Smaller ones are short, and their reports are the
same on all machines."""

MIN_WINDOW_S = 0.002
"""Minimum latency of a simulation that is divided: its processes wait for each other at the end of each window of this
length."""

_GOLDEN = 0.6180339887498949

RemoteEvent: TypeAlias = tuple[Any, ...]
"""An event that one process sends to another. Its first item is one of the numbers below."""

_CALL, _ANSWER, _FAILURE, _SILENCE, _GOODBYE = range(5)


def num_processes(scenario: Scenario, asked_for: int = 0) -> int:
    """Return the number of processes that a simulation uses. `asked_for` is 0 for the default. A simulation with
    latencies below MIN_WINDOW_S always uses one process."""
    if Links(scenario).least_latency_s < MIN_WINDOW_S:
        return 1
    if asked_for:
        return asked_for
    return min(2, _num_cores()) if scenario.nodes >= MIN_DIVIDED_NODES else 1


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Division:
    """The division of a scenario's nodes among `num_processes`. `index` is the index of this process."""

    scenario: Scenario
    num_processes: int = 1
    index: int = 0

    def process_of(self, number: int, kind: NodeClass) -> int:
        """Return the index of the process that simulates node `number`."""
        if self.num_processes == 1 or self._is_busy(kind):
            return 0
        return min(int(self._position(number)), self.num_processes - 1)

    def _position(self, number: int) -> float:
        """Return the position of a node that only keeps records between 0 and the number of processes. Its whole part
        is the process. The part below that trainers, servers and gateways fill is left out, and the golden ratio
        distributes the nodes evenly over the rest."""
        busy = sum(kind.share for kind in self.scenario.classes if self._is_busy(kind)) * BUSY_WEIGHT
        idle = sum(kind.share for kind in self.scenario.classes if not self._is_busy(kind))
        start = min(1.0, busy * self.num_processes / (busy + idle))
        return start + number * _GOLDEN % 1.0 * (self.num_processes - start)

    def _is_busy(self, kind: NodeClass) -> bool:
        if kind.role == "train":
            return self.scenario.training is not None
        return kind.role != "idle" and self.scenario.model is not None


class ProcessEnded(SwarmError):
    """Another process of the simulation has ended without its result. If it could, it has sent the error that ended
    it."""

    @classmethod
    def unexplained(cls) -> ProcessEnded:
        return cls(
            "another process of this simulation has ended", remedy="check whether this machine has run out of memory"
        )


class _UnknownRate(Rate):
    """Stands for the downlink of a host in another process. That process adds the time for it."""

    def reserve(self, num_bytes: float, now_s: float) -> float:  # noqa: ARG002
        return now_s


_UNKNOWN_RATE = _UnknownRate(float("inf"))


class DistantNode:
    """A node that another process simulates. Implements `DistantHost`."""

    down: Rate = _UNKNOWN_RATE

    def __init__(self, number: int, peer_id: str, place: Place, process: int, exchange: WindowExchange) -> None:
        self.number = number
        self.peer_id = peer_id
        self.place = place
        self.process = process
        self.joined_at = exchange.world.loop.time()
        self._exchange = exchange

    @property
    def is_up(self) -> bool:
        """Return whether it is up, as far as this process knows. It hears of goodbyes at the end of a window."""
        return self._exchange.world.elsewhere.get(self.peer_id) is self

    def stop(self, *, goodbye: bool) -> None:
        """Note that it has left."""
        if self._exchange.world.elsewhere.pop(self.peer_id, None) is not None and goodbye:
            self._exchange.world.left[self.peer_id] = self.place

    async def called(
        self, caller: SimulatedHost, protocol: str, request: bytes, sent_s: float, arrives_s: float, until_s: float
    ) -> bytes:
        exchange, answer = self._exchange, Answer(loop=self._exchange.world.loop)
        number = next(exchange.call_numbers)
        exchange.waiting[number] = (answer, until_s)
        times, ends = (sent_s, arrives_s, until_s), (exchange.packer.number_of(caller.peer_id), self.number)
        exchange.queue(self.process, _CALL, number, times, ends, protocol, exchange.packer.pack(request), len(request))
        try:
            return await answer
        finally:
            del exchange.waiting[number]


class _DistantReply:
    """Sends the answer to call `number` of a caller in another process. Implements `CallReply`."""

    def __init__(self, exchange: WindowExchange, caller: DistantNode, answerer: int, number: int) -> None:
        self._caller = caller
        self._answerer = answerer
        self._number = number
        self._exchange = exchange
        self._queue = partial(exchange.queue, caller.process)

    def done(self) -> bool:
        return False

    def resolve_at(self, arrives_s: float, response: bytes) -> None:
        packed = self._exchange.packer.pack(response)
        self._send(_ANSWER, arrives_s, packed, len(response))

    def reject_at(self, arrives_s: float, failure: bytes, peer_id: str) -> None:  # noqa: ARG002 - the receiver knows it
        self._send(_FAILURE, arrives_s, failure, len(failure))

    def _send(self, kind: int, arrives_s: float, content: Any, num_bytes: int) -> None:
        times = self._exchange.world.loop.time(), arrives_s
        self._queue(kind, self._number, times, (self._answerer, self._caller.number), content, num_bytes)

    def time_out(self, until_s: float) -> None:  # noqa: ARG002 - the receiver knows it
        self._queue(_SILENCE, self._number)

    def on_cancel(self, cancel: Callable[[], object]) -> None:
        """Do nothing: processes are not told when a caller in another one gives up."""


class WindowExchange:
    """Exchanges events with the other processes until `until_s`. `pipes` lead to them, by their index, and `index` is
    that of this process. `run` is a task of the world."""

    def __init__(self, world: HostWorld, index: int, pipes: Mapping[int, Connection], until_s: float) -> None:
        self.world = world
        self.packer = Packer()
        self.waiting: dict[int, tuple[Answer, float]] = {}
        """The calls to hosts of other processes, by number: the answer that each waits for, and until when."""
        self.call_numbers = itertools.count()
        self._index = index
        self._pipes = sorted(pipes.items())
        self._start_s = world.loop.time()
        self._until_s = until_s
        self._events: dict[int, list[RemoteEvent]] = {process: [] for process in pipes}
        self._peer_ids: dict[int, str] = {}
        self._distant: dict[int, DistantNode] = {}
        world.on_goodbye = self._say_goodbye

    def add(self, number: int, addr: str, host: SimulatedHost | DistantNode) -> None:
        """Add a node that joins now, in this process or another one."""
        self.packer.add(number, host.peer_id, addr)
        self._peer_ids[number] = host.peer_id
        if isinstance(host, DistantNode):
            self._distant[number] = self.world.elsewhere[host.peer_id] = host

    def queue(self, process: int, *event: Any) -> None:
        """Keep an event for another process until the window ends."""
        self._events[process].append(event)

    async def run(self) -> None:
        """Exchange events at the end of each window. Raises ProcessEnded if another process has ended."""
        window_s = self.world.links.least_latency_s
        for window in itertools.count(1):
            ends_s = self._start_s + window * window_s
            if ends_s >= self._until_s:  # all processes return here, so none waits for another
                return
            await asyncio.sleep(ends_s - self.world.loop.time())
            self._exchange()

    def _exchange(self) -> None:
        """Send and receive the events of a window. The process with the lower index sends first: if both did, they
        would block for ever once the pipes are full."""
        for process, pipe in self._pipes:
            events, self._events[process] = self._events[process], []
            data = marshal.dumps(events)
            try:
                if self._index < process:
                    pipe.send_bytes(data)
                received = marshal.loads(pipe.recv_bytes())  # noqa: S302 - another process of this program wrote it
                if self._index > process:
                    pipe.send_bytes(data)
            except (EOFError, OSError):
                raise ProcessEnded.unexplained() from None
            for event in received:
                self._take(event)

    def _take(self, event: RemoteEvent) -> None:
        kind, number, *content = event
        if kind == _CALL:
            self._take_call(number, content)
        elif kind == _GOODBYE:
            self._distant[number].stop(goodbye=True)
        elif (waiting := self.waiting.get(number)) is not None:
            self._take_answer(*waiting, kind, content)

    def _take_call(self, number: int, content: Sequence[Any]) -> None:
        (sent_s, arrives_s, until_s), (caller_number, host_number), protocol, packed, num_bytes = content
        caller, host = self._distant[caller_number], self.world.hosts.get(self._peer_ids[host_number])
        reply = _DistantReply(self, caller, host_number, number)
        if host is not None:
            arrives_s = self._arrival(host, caller, num_bytes, sent_s, arrives_s)
        if host is None or arrives_s >= until_s:
            reply.time_out(until_s)
            return
        request = self.packer.unpack(packed, caller_number)
        self.world.loop.call_at(arrives_s, host.receive, caller, protocol, request, reply, until_s)

    def _take_answer(self, answer: Answer, until_s: float, kind: int, content: Sequence[Any]) -> None:
        if kind == _SILENCE:
            answer.time_out(until_s)
            return
        (sent_s, arrives_s), (answerer_number, number), packed, num_bytes = content
        answerer, host = self._distant[answerer_number], self.world.hosts.get(self._peer_ids[number])
        if host is not None:
            arrives_s = self._arrival(host, answerer, num_bytes, sent_s, arrives_s)
        if arrives_s >= until_s:
            answer.time_out(until_s)
        elif kind == _ANSWER:
            answer.resolve_at(arrives_s, self.packer.unpack(packed, answerer_number))
        else:
            answer.reject_at(arrives_s, packed, answerer.peer_id)

    def _arrival(self, host: SimulatedHost, sender: Caller, num_bytes: int, sent_s: float, arrives_s: float) -> float:
        """Return the time at which a message arrives at `host`, given that without its downlink it would arrive at
        `arrives_s`."""
        num_bytes += OVERHEAD_BYTES
        latency_s, s_per_byte = self.world.links.cost(sender.place, host.place)
        return max(arrives_s, host.down.reserve(num_bytes, sent_s) + num_bytes * s_per_byte + latency_s)

    def _say_goodbye(self, peer_id: str) -> None:
        number = self.packer.number_of(peer_id)
        for process in self._events:
            self.queue(process, _GOODBYE, number)
