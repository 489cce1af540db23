"""The simulated world: nodes that come and go, what they do, and what is measured of them.

`simulation_run` runs it in virtual time of its own. Each node is one task; the world's task starts and ends them. All
randomness comes from the scenario's seed, so equal scenarios give equal reports.

Of a simulation that is divided, each process has a world. All of them draw when each node comes and goes, and each
simulates those nodes that are its own (`distant_hosts`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from swarm_protocol.errors import SwarmError
from swarm_protocol.identity import Identity
from swarm_protocol.records import publish_key

from swarm import heap
from swarm.network.membership import Membership
from swarm.network.rate import Rate
from swarm.router.routing import missing_spans
from swarm.simulation.distant_hosts import DistantNode, Division, WindowExchange
from swarm.simulation.report import Measurements, mean
from swarm.simulation.scenario import Model, Nat, NodeClass, Region, Scenario
from swarm.simulation.simulated_host import HostWorld, Links, SimulatedHost, place_at
from swarm.simulation.simulated_network import SharedRecords, SimulatedNetwork, SimulatedNode, addr_of, tend_table
from swarm.simulation.simulated_serving import SimulatedGateway, SimulatedServer

if TYPE_CHECKING:
    from swarm.simulation.simulated_training import TrainingWorld

S = TypeVar("S", Region, Nat)

NUM_SEEDS = 3
"""Nodes that never leave and that others join through."""

SETTLED_S = 90.0
"""A node that has been there for this time has announced itself; only such nodes are looked for."""

SAMPLE_S = 60.0
REPLACE_WITHIN_S = 60.0
PROBE_TIMEOUT_S = 5.0
BYTES_PER_MBIT = 125_000.0

LARGE_BYTES = 2**29
GROWN = 1.1
"""From LARGE_BYTES on, this process's memory is put into huge pages each time it has grown by this factor."""

logger = logging.getLogger(__name__)


_SEED = NodeClass(name="seed", up_mbit=1000.0, down_mbit=1000.0)
_OPEN = Nat()


class World:
    """Runs one scenario: creates nodes, lets them leave, and measures them."""

    def __init__(
        self,
        scenario: Scenario,
        on_minute: Callable[[float, int], None],
        *,
        division: Division | None = None,
        pipes: Mapping[int, Connection] = MappingProxyType({}),
    ) -> None:
        """`pipes` lead to the other processes of a `division`."""
        self.scenario = scenario
        self.measured = Measurements()
        self._division = division or Division(scenario)
        self._pipes = pipes
        self._distant: dict[int, DistantNode] = {}
        self._prober = random.Random(f"{scenario.seed}/probes/{self._division.index}")
        self.nodes: dict[int, SimulatedNode] = {}
        self._on_minute = on_minute
        self._compacted_bytes = max(LARGE_BYTES, heap.resident_bytes())
        self._chance = random.Random(f"{scenario.seed}/world")
        self._num_created = 0
        self._num_of_kind: Counter[str] = Counter()
        self._seeds: list[str] = []
        self._servers: dict[str, SimulatedServer] = {}
        self._num_gateways = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures: list[BaseException] = []
        self._has_failed = asyncio.Event()
        self._is_over = False
        self._training: TrainingWorld | None = None

    async def run(self) -> Measurements:
        loop, scenario = asyncio.get_running_loop(), self.scenario
        self._began_s = loop.time()
        self._begin_s = self._began_s + scenario.warm_up_minutes * 60
        self._hosts = HostWorld(Links(scenario))
        self._records = SharedRecords(is_divided=bool(self._pipes))
        self._exchange = WindowExchange(
            self._hosts, self._division.index, self._pipes, self._begin_s + scenario.minutes * 60
        )
        if scenario.training is not None and self._division.index == 0:
            # brings torch, which a scenario without trainers does not wait for
            from swarm.simulation.simulated_training import TrainingWorld  # noqa: PLC0415

            self._training = TrainingWorld(scenario, self._hosts.links)
        logging.disable(logging.WARNING)
        try:
            self._schedule_joins()
            self._spawn(self._probe(), "probes")
            if self._pipes:
                self._spawn(self._exchange.run(), "exchange")
            await self._watch()
            self._take_traffic()
            return self.measured
        finally:
            self._is_over = True
            for node in self.nodes.values():
                if node.host.is_up:
                    node.host.stop(goodbye=False)
            await self._end_tasks()
            logging.disable(logging.NOTSET)

    def settled(self) -> list[SimulatedNode]:
        """Return the nodes of this process that have been there for SETTLED_S."""
        before = asyncio.get_running_loop().time() - SETTLED_S
        return [node for node in self.nodes.values() if node.joined_at < before and node.membership is not None]

    # --- who comes and goes -------------------------------------------------------------------------------------------

    def _schedule_joins(self) -> None:
        loop, scenario = asyncio.get_running_loop(), self.scenario
        for _ in range(NUM_SEEDS):
            self._seeds.append(self._start(_SEED, leaves_at=None))
        window_s = self._begin_s - self._began_s - SETTLED_S / 2
        begins_s = [self._began_s + 1 + (window_s - 1) * index / scenario.nodes for index in range(scenario.nodes)]
        for index, begin_s in enumerate(begins_s):
            join_s, leave_s = scenario.sessions[index] if scenario.sessions else (0.0, self._stay_s())
            at_s = begin_s if join_s <= 0 else self._begin_s + join_s
            loop.call_at(at_s, self._start, self._next_kind(), self._begin_s + leave_s)

    def _next_kind(self) -> NodeClass:
        """Return the class that lacks most nodes, so that every share is met exactly, however small."""
        classes, number = self.scenario.classes, sum(self._num_of_kind.values()) + 1
        total = sum(each.share for each in classes)
        kind = max(classes, key=lambda each: number * each.share / total - self._num_of_kind[each.name])
        self._num_of_kind[kind.name] += 1
        return kind

    def _stay_s(self) -> float:
        churn = self.scenario.churn
        match churn.model:
            case "half-life":
                return self._chance.expovariate(math.log(2) / (churn.half_life_minutes * 60))
            case "weibull":
                return self._chance.weibullvariate(churn.scale_minutes * 60, churn.shape)
            case _:
                return math.inf

    def _start(self, kind: NodeClass, leaves_at: float | None) -> str:
        """Let a node come, here or in another process, and return its peer id."""
        loop, scenario = asyncio.get_running_loop(), self.scenario
        self._num_created += 1
        number = self._num_created
        seed = hashlib.sha256(f"{scenario.seed}/{number}".encode()).digest()
        identity = Identity(seed)
        nat = _OPEN if kind is _SEED else self._draw(scenario.nats)
        place = place_at(scenario.regions.index(self._draw(scenario.regions)), nat)
        if leaves_at is not None and leaves_at < self._begin_s + scenario.minutes * 60:
            loop.call_at(leaves_at, self._leave, number, kind)
        if (process := self._division.process_of(number, kind)) != self._division.index:
            distant = self._distant[number] = DistantNode(number, identity.peer_id, place, process, self._exchange)
            self._exchange.add(number, addr_of(number), distant)
            return identity.peer_id
        up, down = Rate(kind.up_mbit * BYTES_PER_MBIT), Rate(kind.down_mbit * BYTES_PER_MBIT)
        host = SimulatedHost(self._hosts, identity.peer_id, place, up=up, down=down)
        node = SimulatedNode(number=number, kind=kind, identity=identity, host=host, joined_at=loop.time())
        self.nodes[number] = node
        self._exchange.add(number, addr_of(number), host)
        self.measured.count("joined")
        node.task = self._spawn(self._live(node, seed), f"node {number}")
        return identity.peer_id

    def _draw(self, among: Sequence[S]) -> S:
        return self._chance.choices(among, [each.share for each in among])[0]

    def _leave(self, number: int, kind: NodeClass) -> None:
        """Let the node leave, with or without a word, and perhaps another one comes for it."""
        if self._is_over:
            return
        says_goodbye = self._chance.random() < self.scenario.churn.goodbye
        if (node := self.nodes.pop(number, None)) is not None:
            self._end(node, says_goodbye=says_goodbye)
        elif not says_goodbye:
            self._distant[number].stop(goodbye=False)
        self._distant.pop(number, None)
        if self.scenario.churn.replace and not self.scenario.sessions:
            loop = asyncio.get_running_loop()
            at_s = loop.time() + self._chance.uniform(0, REPLACE_WITHIN_S)
            loop.call_at(at_s, self._start, kind, at_s + self._stay_s())

    def _end(self, node: SimulatedNode, *, says_goodbye: bool) -> None:
        self.measured.count("left")
        if not says_goodbye:
            node.host.stop(goodbye=False)
            if self._training is not None:
                self._training.crash(node.identity.peer_id)
        assert node.task is not None
        node.task.cancel()

    async def _live(self, node: SimulatedNode, seed: bytes) -> None:
        entries = [peer_id for peer_id in self._seeds if peer_id != node.identity.peer_id]
        if node.kind.role == "train" and self._training is not None:
            node.streams = self._training.streams_of(node.identity, node.host)
        try:
            network = await SimulatedNetwork.join(
                seed, node.host, self._records, addr=addr_of(node.number), entries=entries, streams=node.streams
            )
            async with Membership(network) as membership:
                membership.announce(node.record)
                node.network, node.membership = network, membership
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(tend_table(network))
                    if (role := self._role(node, network, membership)) is not None:
                        tasks.create_task(role)
        finally:
            self._servers.pop(node.identity.peer_id, None)
            if node.host.is_up:
                node.host.stop(goodbye=True)

    def _role(
        self, node: SimulatedNode, network: SimulatedNetwork, membership: Membership
    ) -> Coroutine[object, object, None] | None:
        scenario, kind = self.scenario, node.kind
        if kind.role == "serve" and scenario.model is not None:
            relayed = node.host.place.nat.kind == "relayed"
            server = SimulatedServer(network, membership, scenario.model, kind, relayed=relayed)
            self._servers[network.peer_id] = server
            return server.run()
        if kind.role == "gateway" and scenario.model is not None:
            return self._ask_for_answers(scenario.model, network, membership)
        if kind.role == "train" and self._training is not None:
            return self._training.take_part(node.identity, network, membership, kind, self.measured)
        return None

    async def _ask_for_answers(self, model: Model, network: SimulatedNetwork, membership: Membership) -> None:
        """Run a gateway, which has its share of the clients."""

        def requests_per_s() -> float:
            return model.requests_per_minute / 60 / self._num_gateways

        self._num_gateways += 1
        try:
            await SimulatedGateway(network, membership, model, requests_per_s, self._servers.get, self.measured).run()
        finally:
            self._num_gateways -= 1

    # --- what is measured ---------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Take a sample each minute until the end. Raises at once what a task of the world or of a node has raised."""
        at_s, minutes = self._began_s, self.scenario.minutes
        while at_s < self._begin_s + minutes * 60:
            at_s = min(at_s + SAMPLE_S, self._begin_s + (0 if at_s < self._begin_s else minutes * 60))
            with suppress(TimeoutError):
                async with asyncio.timeout_at(at_s):
                    await self._has_failed.wait()
            self._raise_failures()
            if self.measured.is_on:
                self.measured.samples.append(self._sample((at_s - self._begin_s) / 60))
            elif at_s >= self._begin_s:
                self._begin()
            self._on_minute((at_s - self._began_s) / 60, len(self.nodes) + len(self._distant))
            if heap.resident_bytes() > GROWN * self._compacted_bytes:
                heap.use_huge_pages()
                self._compacted_bytes = heap.resident_bytes()

    def _begin(self) -> None:
        self.measured.is_on = True
        for node in self.nodes.values():
            node.base = node.host.num_sent, node.host.sent_bytes

    def _sample(self, minute: float) -> dict[str, float]:
        counts = [node.network.dht.counts for node in self.nodes.values() if node.membership and node.network]
        sample = {
            "minute": minute,
            "nodes": len(self.nodes) + len(self._distant),
            "records_mean": mean([each.num_records for each in counts]),
            "records_max": max([each.num_records for each in counts], default=0),
            "peers_mean": mean([each.num_peers for each in counts]),
            "peers_max": max([each.num_peers for each in counts], default=0),
            "addresses_mean": mean([each.num_addresses for each in counts]),
            "addresses_max": max([each.num_addresses for each in counts], default=0),
        }
        self.measured.num_sampled.append(len(counts))
        if (model := self.scenario.model) is not None:
            found = {node.number: self._servers.get(node.identity.peer_id) for node in self.nodes.values()}
            servers = {str(number): each.record for number, each in found.items() if each and each.record}
            missing = missing_spans(servers, model.blocks)
            sample["servers"] = len(servers)
            sample["blocks_without_server"] = sum(end - start for start, end in missing)
            sample["answer_tokens"] = self.measured.counts["answer tokens"]
        if self._training is not None:
            sample["trainers"] = sum(node.kind.role == "train" for node in self.nodes.values())
            sample["share_in_work"] = self._training.share_in_work()
            sample |= {f"trainers_{name}": number for name, number in self._training.situations().items()}
            sample["committed_tokens"] = self.measured.counts["committed tokens"]
        return sample

    async def _probe(self) -> None:
        """Have a random node look for the record of another, again and again. Where the node is in another process,
        that one has its own draw."""
        rate, loop = self.scenario.probes_per_minute / 60, asyncio.get_running_loop()
        await asyncio.sleep(self._begin_s - loop.time())
        while rate:
            await asyncio.sleep(self._prober.expovariate(rate))
            before = loop.time() - SETTLED_S
            settled: list[SimulatedNode | DistantNode] = [*self.settled()]
            settled += [node for node in self._distant.values() if node.joined_at < before]
            if len(settled) > 1:
                asker, sought = self._prober.sample(settled, 2)
                if isinstance(asker, SimulatedNode):
                    host = sought.host if isinstance(sought, SimulatedNode) else sought
                    self._spawn(self._look_for(asker, host), "probe")

    async def _look_for(self, asker: SimulatedNode, sought: SimulatedHost | DistantNode) -> None:
        assert asker.network is not None
        loop, measured = asyncio.get_running_loop(), self.measured
        began_s = loop.time()
        keys = [publish_key(asker.record, sought.peer_id, depth) for depth in range(4)]
        try:
            found = await asker.network.lookup(keys, timeout_s=PROBE_TIMEOUT_S)
        except SwarmError:
            if asker.host.is_up:
                measured.count("lookups")
                measured.count("lookups failed")
            return
        if asker.host.is_up and sought.is_up:  # else there is nobody to look, or to be found
            measured.count("lookups")
            is_there = any(envelope.peer_id == sought.peer_id for envelope in found)
            measured.count("records lost", not is_there)
            measured.take(measured.lookup_hops, asker.network.dht.last_hops)
            measured.take(measured.lookup_s, loop.time() - began_s)

    def _take_traffic(self) -> None:
        minutes = self.scenario.minutes
        self.measured.sent_a_minute = [
            ((node.host.num_sent - node.base[0]) / minutes, (node.host.sent_bytes - node.base[1]) / minutes)
            for node in self.nodes.values()
            if node.joined_at < self._begin_s
        ]

    # --- tasks --------------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures.append(error)
            self._has_failed.set()

    def _raise_failures(self) -> None:
        if self._failures:
            raise self._failures[0]

    async def _end_tasks(self) -> None:
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
