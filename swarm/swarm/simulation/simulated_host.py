"""Simulated hosts that call each other: two timers for a call, in place of sockets. What `RecordDht` runs over.

A message takes its sender's uplink, its receiver's downlink and the latency between their places; between hosts that
only a relay joins it takes the relay's way and rate. A host that is gone answers nothing, or,
if it said goodbye, refuses the connection. Connections are not set up and not lost: what they cost comes on top.
State belongs to the one event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

from swarm_protocol.errors import PeerUnreachable, SwarmError
from swarm_protocol.failure_messages import decode_failure, encode_failure

from swarm.network.interface import NotServed, UnaryHandler
from swarm.network.memory.memory_link import OVERHEAD_BYTES, LinkModel
from swarm.network.rate import Rate
from swarm.simulation.scenario import Nat, Scenario

RELAY_BYTES_PER_S = 1e6
"""Limits what one relayed pair gets of a relay, which has others to carry too."""

DIAL_TIMEOUT_S = 5.0
"""libp2p's own, for a host that does not answer at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a host: its region, by index, and its NAT. `key` stands for both."""

    region: int
    nat: Nat
    key: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", f"{self.region} {self.nat.kind}")


@cache
def place_at(region: int, nat: Nat) -> Place:
    """Return the one `Place` of a region and a NAT: thousands of hosts look at a few objects again and again."""
    return Place(region=region, nat=nat)


class Links:
    """The link between any two places of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        index = {region.name: number for number, region in enumerate(scenario.regions)}
        self._latency_s = [
            [(one.latency_ms if one is other else 60.0) / 1e3 for other in scenario.regions] for one in scenario.regions
        ]
        self._costs: dict[tuple[str, str], tuple[float, float]] = {}
        for path in scenario.paths:
            a, b = (index[name] for name in path.between)
            self._latency_s[a][b] = self._latency_s[b][a] = path.latency_ms / 1e3

    @property
    def least_latency_s(self) -> float:
        """The least latency between any two places."""
        return min(min(row) for row in self._latency_s)

    def latency_s(self, a: Place, b: Place) -> float:
        """Return the latency in one direction. A relay is in the region of the one that it relays for."""
        latency_s = self._latency_s[a.region][b.region]
        return latency_s + self._latency_s[b.region][b.region] if is_relayed(a, b) else latency_s

    def cost(self, a: Place, b: Place) -> tuple[float, float]:
        """Return the seconds that a message takes in one direction beside both hosts' own links: in all, and a byte."""
        key = (a.key, b.key)
        if (known := self._costs.get(key)) is None:
            s_per_byte = 1 / RELAY_BYTES_PER_S if is_relayed(a, b) else 0.0
            known = self._costs[key] = (self.latency_s(a, b), s_per_byte)
        return known

    def between(self, a: Place, b: Place) -> LinkModel:
        rate = RELAY_BYTES_PER_S if is_relayed(a, b) else float("inf")
        return LinkModel(latency_s=self.latency_s(a, b), bandwidth_bytes_per_s=rate)


def is_relayed(a: Place, b: Place) -> bool:
    """Return whether two hosts reach each other through a relay only."""
    one, other = a.nat.kind, b.nat.kind
    return (one == "relayed" or other == "relayed") and one != "open" and other != "open"


class Caller(Protocol):
    """The part of a host that answers go to."""

    peer_id: str
    place: Place
    down: Rate


class CallReply(Protocol):
    """The answer that the caller of a host waits for. `Answer` is one."""

    def done(self) -> bool: ...

    def resolve_at(self, arrives_s: float, response: bytes) -> None: ...

    def reject_at(self, arrives_s: float, failure: bytes, peer_id: str) -> None:
        """Raise what `peer_id` answers with, as it is on the wire; where that is empty, nothing of that name is
        served."""

    def time_out(self, until_s: float) -> None:
        """Let nobody wait after `until_s`."""

    def on_cancel(self, cancel: Callable[[], object]) -> None:
        """Have `cancel` called if the caller waits no more."""


class Answer(asyncio.Future[bytes]):
    """The answer to a call of a host in this process. Implements `CallReply`."""

    def resolve_at(self, arrives_s: float, response: bytes) -> None:
        self.get_loop().call_at(arrives_s, self.resolve, response)

    def reject_at(self, arrives_s: float, failure: bytes, peer_id: str) -> None:
        error = decode_failure(failure, peer_id) if failure else NotServed(peer_id)
        self.get_loop().call_at(arrives_s, self.reject, error)

    def time_out(self, until_s: float) -> None:
        if until_s < math.inf:  # else the caller's own deadline ends its waiting
            self.get_loop().call_at(until_s, self.reject, TimeoutError())

    def on_cancel(self, cancel: Callable[[], object]) -> None:
        self.add_done_callback(lambda answer: answer.cancelled() and cancel())

    def resolve(self, response: bytes) -> None:
        if not self.done():
            self.set_result(response)

    def reject(self, error: Exception) -> None:
        if not self.done():
            self.set_exception(error)


class DistantHost(Caller, Protocol):
    """A host that another process simulates."""

    async def called(
        self, caller: SimulatedHost, protocol: str, request: bytes, sent_s: float, arrives_s: float, until_s: float
    ) -> bytes:
        """Call it with what `caller` has sent."""


class HostWorld:
    """All hosts that are up, and the goodbyes of those that are not. `elsewhere` are the ones in other processes."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self.loop = asyncio.get_running_loop()
        self.hosts: dict[str, SimulatedHost] = {}
        self.elsewhere: dict[str, DistantHost] = {}
        self.left: dict[str, Place] = {}
        self.on_goodbye: Callable[[str], None] = lambda _peer_id: None


class SimulatedHost:
    """One host. Implements `RecordTransport`; its counters only grow."""

    def __init__(self, world: HostWorld, peer_id: str, place: Place, *, up: Rate, down: Rate) -> None:
        self.peer_id = peer_id
        self.place = place
        self.up, self.down = up, down
        self.num_sent = 0
        self.sent_bytes = 0
        self._world = world
        self._quick: dict[str, UnaryHandler] = {}
        self._answers: dict[str, UnaryHandler] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        world.hosts[peer_id] = self

    @property
    def is_up(self) -> bool:
        return self._world.hosts.get(self.peer_id) is self

    def stop(self, *, goodbye: bool) -> None:
        """Answer nobody any more. With `goodbye`, callers are told at once."""
        del self._world.hosts[self.peer_id]
        if goodbye:
            self._world.left[self.peer_id] = self.place
            self._world.on_goodbye(self.peer_id)
        for task in self._tasks:
            task.cancel()

    def sees(self, peer_id: str) -> bool:
        """Return whether this peer is up, as open connections show."""
        return peer_id in self._world.hosts or peer_id in self._world.elsewhere

    async def serve(self, protocol: str, answer: UnaryHandler) -> None:
        """Answer by a handler that awaits nothing, as the record DHT's do: it costs no task."""
        self._quick[protocol] = answer

    def serve_in_tasks(self, protocol: str, answer: UnaryHandler) -> None:
        self._answers[protocol] = answer

    async def call(
        self,
        peer_id: str,
        protocol: str,
        request: bytes,
        *,
        addrs: Sequence[str] | None = None,  # noqa: ARG002 - peers are dialled by their id
        timeout_s: float = math.inf,
    ) -> bytes:
        """Call a peer. Only what is served by `serve` keeps the time-out."""
        world, loop = self._world, self._world.loop
        if not self.is_up:
            raise PeerUnreachable("this node has left", peer_id=self.peer_id)
        target = world.hosts.get(peer_id)
        now = loop.time()
        if target is not None:
            answer = Answer(loop=loop)
            arrives_s, until_s = self._send(target, len(request), now), now + timeout_s
            if arrives_s >= until_s:
                answer.time_out(until_s)
            loop.call_at(arrives_s, target.receive, self, protocol, request, answer, until_s)
            return await answer
        if (distant := world.elsewhere.get(peer_id)) is not None:
            arrives_s = self._send(distant, len(request), now)
            return await distant.called(self, protocol, request, now, arrives_s, now + timeout_s)
        place = world.left.get(peer_id)
        dial_s = DIAL_TIMEOUT_S if place is None else 2 * world.links.latency_s(self.place, place)
        await asyncio.sleep(min(dial_s, timeout_s))
        if timeout_s < dial_s:
            raise TimeoutError
        raise PeerUnreachable("the peer does not answer", peer_id=peer_id)

    def _send(self, target: Caller, num_bytes: int, now: float) -> float:
        """Count a message and return its time of arrival."""
        num_bytes += OVERHEAD_BYTES
        self.num_sent += 1
        self.sent_bytes += num_bytes
        latency_s, s_per_byte = self._world.links.cost(self.place, target.place)
        up_s, down_s = self.up.reserve(num_bytes, now), target.down.reserve(num_bytes, now)
        return (up_s if up_s > down_s else down_s) + num_bytes * s_per_byte + latency_s

    def receive(self, caller: Caller, protocol: str, request: bytes, answer: CallReply, until_s: float) -> None:
        """Take in a message whose sender waits until `until_s`. Only for one that waits in vain a timer is set: one for
        each call, cancelled with its answer, costs as much as all else that carries a message."""
        if answer.done():
            return
        if not self.is_up:
            answer.time_out(until_s)
        elif (quick := self._quick.get(protocol)) is not None:
            response = _run_at_once(quick(caller.peer_id, request))
            arrives_s = self._send(caller, len(response), self._world.loop.time())
            if arrives_s < until_s:
                answer.resolve_at(arrives_s, response)
            else:
                answer.time_out(until_s)
        elif (handler := self._answers.get(protocol)) is not None:
            task = self._world.loop.create_task(self._work(handler, caller, request, answer), name=protocol)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            answer.on_cancel(task.cancel)
        else:
            answer.reject_at(self._send(caller, 0, self._world.loop.time()), b"", self.peer_id)

    async def _work(self, handler: UnaryHandler, caller: Caller, request: bytes, answer: CallReply) -> None:
        try:
            response = await handler(caller.peer_id, request)
            answer.resolve_at(self._send(caller, len(response), self._world.loop.time()), response)
        except SwarmError as error:
            failure = encode_failure(error)
            answer.reject_at(self._send(caller, len(failure), self._world.loop.time()), failure, self.peer_id)


def _run_at_once(answering: Awaitable[bytes]) -> bytes:
    steps = answering.__await__()
    try:
        next(steps)
    except StopIteration as done:
        response: bytes = done.value
        return response
    raise AssertionError("a handler of the record DHT waits for something")
