"""Simulates the hosts over which `RecordDht` runs: a call takes two timers in place of sockets.

A message takes time for its sender's uplink, its receiver's downlink and the latency between their places. Between two
hosts that need a relay, it takes the latency and the rate of the way through the relay. A call of a host that left
without a goodbye times out. A host that left with one refuses the connection. Connections are neither set up nor lost,
and their cost is not simulated. State belongs to the one event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NoReturn

from swarm_protocol.errors import PeerUnreachable, SwarmError
from swarm_protocol.failure_messages import decode_failure, encode_failure

from swarm.network.interface import NotServed, UnaryHandler
from swarm.network.memory.memory_link import OVERHEAD_BYTES, LinkModel
from swarm.network.rate import Rate
from swarm.simulation.scenario import Nat, Path, Scenario

RELAY_BYTES_PER_S = 1e6
"""Bytes per second that one relayed pair gets of a relay, which carries others, too."""

DIAL_TIMEOUT_S = 5.0
"""Seconds until the dial of a host that does not answer fails, as in libp2p."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a host: the index of its region, and its NAT. `key` is one string for both."""

    region: int
    nat: Nat
    key: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", f"{self.region} {self.nat.kind}")


@cache
def place_at(region: int, nat: Nat) -> Place:
    """Return the `Place` of a region and a NAT. All hosts at one place share the object, which keeps it in the
    processor's cache."""
    return Place(region=region, nat=nat)


class Links:
    """The links between the places of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        index = {region.name: number for number, region in enumerate(scenario.regions)}
        self._latency_s = [
            [(one.latency_ms if one is other else Path().latency_ms) / 1e3 for other in scenario.regions]
            for one in scenario.regions
        ]
        self._costs: dict[tuple[str, str], tuple[float, float]] = {}
        for path in scenario.paths:
            a, b = (index[name] for name in path.between)
            self._latency_s[a][b] = self._latency_s[b][a] = path.latency_ms / 1e3

    def latency_s(self, a: Place, b: Place) -> float:
        """Return the latency in one direction. A relay is assumed to be in the region of `b`."""
        latency_s = self._latency_s[a.region][b.region]
        return latency_s + self._latency_s[b.region][b.region] if is_relayed(a, b) else latency_s

    def cost(self, a: Place, b: Place) -> tuple[float, float]:
        """Return the time that a message takes in one direction, besides both hosts' own links: the latency in seconds,
        and the seconds for each byte."""
        key = (a.key, b.key)
        if (cost := self._costs.get(key)) is None:
            s_per_byte = 1 / RELAY_BYTES_PER_S if is_relayed(a, b) else 0.0
            cost = self._costs[key] = (self.latency_s(a, b), s_per_byte)
        return cost

    def between(self, a: Place, b: Place) -> LinkModel:
        """Return the link of the memory network that takes the same time."""
        rate = RELAY_BYTES_PER_S if is_relayed(a, b) else float("inf")
        return LinkModel(latency_s=self.latency_s(a, b), bandwidth_bytes_per_s=rate)


def is_relayed(a: Place, b: Place) -> bool:
    """Return whether two hosts need a relay to reach each other."""
    one, other = a.nat.kind, b.nat.kind
    return (one == "relayed" or other == "relayed") and one != "open" and other != "open"


class Answer(asyncio.Future[bytes]):
    """The answer to a call. Times are those of the loop."""

    def resolve_at(self, arrives_s: float, response: bytes) -> None:
        self.get_loop().call_at(arrives_s, self.resolve, response)

    def reject_at(self, arrives_s: float, error: Exception) -> None:
        self.get_loop().call_at(arrives_s, self.reject, error)

    def time_out(self, until_s: float) -> None:
        """Raise TimeoutError in the caller at `until_s`. Do nothing if that is infinite."""
        if until_s < math.inf:  # otherwise the caller has a deadline of its own
            self.reject_at(until_s, TimeoutError())

    def resolve(self, response: bytes) -> None:
        if not self.done():
            self.set_result(response)

    def reject(self, error: Exception) -> None:
        if not self.done():
            self.set_exception(error)


class HostWorld:
    """The `hosts` that are up, by peer id, and the places of those that have `left` with a goodbye."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self.loop = asyncio.get_running_loop()
        self.hosts: dict[str, SimulatedHost] = {}
        self.left: dict[str, Place] = {}


class SimulatedHost:
    """One host. Implements `RecordTransport`. `num_sent` and `sent_bytes` count the messages that it has sent."""

    def __init__(self, world: HostWorld, peer_id: str, place: Place, *, up: Rate, down: Rate) -> None:
        self.peer_id = peer_id
        self.place = place
        self.up, self.down = up, down
        self.num_sent = 0
        self.sent_bytes = 0
        self._world = world
        self._immediate: dict[str, UnaryHandler] = {}
        self._in_tasks: dict[str, UnaryHandler] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        world.hosts[peer_id] = self

    @property
    def is_up(self) -> bool:
        return self._world.hosts.get(self.peer_id) is self

    def stop(self, *, goodbye: bool) -> None:
        """Stop answering. With `goodbye`, later calls are refused at once instead of timing out."""
        del self._world.hosts[self.peer_id]
        if goodbye:
            self._world.left[self.peer_id] = self.place
        for task in self._tasks:
            task.cancel()

    def sees(self, peer_id: str) -> bool:
        """Return whether this peer is up. A real node sees it by its connection."""
        return peer_id in self._world.hosts

    async def serve(self, protocol: str, answer: UnaryHandler) -> None:
        """Serve a protocol by a handler that never waits, as those of the record DHT. It runs without a task."""
        self._immediate[protocol] = answer

    def serve_in_tasks(self, protocol: str, answer: UnaryHandler) -> None:
        """Serve a protocol by a handler that may wait. Each call runs in a task."""
        self._in_tasks[protocol] = answer

    async def call(
        self,
        peer_id: str,
        protocol: str,
        request: bytes,
        *,
        addrs: Sequence[str] | None = None,  # noqa: ARG002 - peers are dialled by their id
        timeout_s: float = math.inf,
    ) -> bytes:
        """Call a peer. Raises PeerUnreachable, NotServed, or the SwarmError of its handler.

        Raises TimeoutError after `timeout_s`, except while a handler of `serve_in_tasks` works or answers: a caller of
        such a handler needs a deadline of its own.
        """
        world, loop = self._world, self._world.loop
        if not self.is_up:
            raise PeerUnreachable("this node has left", peer_id=self.peer_id)
        if (target := world.hosts.get(peer_id)) is None:
            await self._dial_in_vain(peer_id, timeout_s)
        answer = Answer(loop=loop)
        arrives_s, until_s = self._send(target, len(request)), loop.time() + timeout_s
        if arrives_s >= until_s:
            answer.time_out(until_s)
        loop.call_at(arrives_s, target._receive, self, protocol, request, answer, until_s)
        return await answer

    async def _dial_in_vain(self, peer_id: str, timeout_s: float) -> NoReturn:
        """Dial a host that has left."""
        place = self._world.left.get(peer_id)
        dial_s = DIAL_TIMEOUT_S if place is None else 2 * self._world.links.latency_s(self.place, place)
        await asyncio.sleep(min(dial_s, timeout_s))
        if timeout_s < dial_s:
            raise TimeoutError
        raise PeerUnreachable("the peer does not answer", peer_id=peer_id)

    def _send(self, target: SimulatedHost, num_bytes: int) -> float:
        """Count a message, and return the time at which it arrives."""
        now = self._world.loop.time()
        num_bytes += OVERHEAD_BYTES
        self.num_sent += 1
        self.sent_bytes += num_bytes
        latency_s, s_per_byte = self._world.links.cost(self.place, target.place)
        up_s, down_s = self.up.reserve(num_bytes, now), target.down.reserve(num_bytes, now)
        return (up_s if up_s > down_s else down_s) + num_bytes * s_per_byte + latency_s

    def _receive(self, caller: SimulatedHost, protocol: str, request: bytes, answer: Answer, until_s: float) -> None:
        """Handle a request whose caller waits until `until_s`. A timer is set only if no answer will come in time: a
        timer for each call, cancelled by its answer, would double the cost of a message."""
        if answer.done():
            return
        if not self.is_up:
            answer.time_out(until_s)
        elif (immediate := self._immediate.get(protocol)) is not None:
            response = _run_at_once(immediate(caller.peer_id, request))
            arrives_s = self._send(caller, len(response))
            if arrives_s < until_s:
                answer.resolve_at(arrives_s, response)
            else:
                answer.time_out(until_s)
        elif (handler := self._in_tasks.get(protocol)) is not None:
            task = self._world.loop.create_task(self._answer_with(handler, caller, request, answer), name=protocol)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            answer.add_done_callback(lambda answer: answer.cancelled() and task.cancel())
        else:
            answer.reject_at(self._send(caller, 0), NotServed(self.peer_id))

    async def _answer_with(self, handler: UnaryHandler, caller: SimulatedHost, request: bytes, answer: Answer) -> None:
        try:
            response = await handler(caller.peer_id, request)
            answer.resolve_at(self._send(caller, len(response)), response)
        except SwarmError as error:
            failure = encode_failure(error)
            answer.reject_at(self._send(caller, len(failure)), decode_failure(failure, self.peer_id))


def _run_at_once(answering: Awaitable[bytes]) -> bytes:
    """Return the result of a coroutine that never waits."""
    steps = answering.__await__()
    try:
        next(steps)
    except StopIteration as done:
        response: bytes = done.value
        return response
    raise AssertionError("this handler waits; serve it with serve_in_tasks")
