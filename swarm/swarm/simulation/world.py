"""Runs a scenario in virtual time: nodes join, do their work and leave, and are measured: one sample a minute, lookups
of random records, and the traffic of each node.

Each node is one task, which the world's own task starts and ends. All randomness comes from the scenario's seed, so
equal scenarios give equal reports.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from swarm_protocol.checks import unchecked
from swarm_protocol.errors import SwarmError
from swarm_protocol.identity import Identity
from swarm_protocol.records import publish_key
from swarm_protocol.wire import handing_over

from swarm import heap
from swarm.ended_tasks import end_tasks
from swarm.network.membership import Membership
from swarm.network.rate import Rate
from swarm.router.routing import missing_spans
from swarm.simulation.message_sizes import SIZES, UNCHECKED
from swarm.simulation.report import Measurements, Report, mean, report_of
from swarm.simulation.scenario import Model, Nat, NodeClass, Region, Scenario
from swarm.simulation.simulated_host import HostWorld, Links, SimulatedHost, place_at
from swarm.simulation.simulated_network import SharedRecords, SimulatedNetwork, SimulatedNode, tend_table
from swarm.simulation.simulated_serving import SimulatedGateway, SimulatedServer
from swarm.testing import virtual_time

if TYPE_CHECKING:
    from swarm.simulation.simulated_training import TrainingWorld

S = TypeVar("S", Region, Nat)
OnMinute = Callable[[float, int], None]

NUM_SEEDS = 3
"""Nodes through which the others join, and which never leave."""

REAL_LIMIT_S = 86400.0
SAMPLE_S = 60.0
REPLACE_WITHIN_S = 60.0
"""Maximum seconds between a node that leaves and the one that replaces it."""

BYTES_PER_MBIT = 125_000.0

MIN_HUGE_PAGES_BYTES = 2**29
HUGE_PAGES_GROWTH = 1.1
"""Growth of this process's memory, beyond MIN_HUGE_PAGES_BYTES, after which it is put into huge pages again."""

_SEED = NodeClass(name="seed", up_mbit=1000.0, down_mbit=1000.0)
_OPEN = Nat()

SETTLED_S = 90.0
"""Seconds after which a node has surely announced itself. Only such nodes are looked for."""

PROBE_TIMEOUT_S = 5.0


@dataclass(slots=True, kw_only=True, eq=False)
class Population:
    """The nodes that are present, by number, and the servers among them, by peer id. `training` is None if the scenario
    has none."""

    nodes: dict[int, SimulatedNode] = field(default_factory=dict)
    servers: dict[str, SimulatedServer] = field(default_factory=dict)
    training: TrainingWorld | None = None

    def settled(self) -> list[SimulatedNode]:
        """Return the nodes that joined more than SETTLED_S ago."""
        before = asyncio.get_running_loop().time() - SETTLED_S
        return [node for node in self.nodes.values() if node.joined_at < before and node.membership is not None]


def simulate(scenario: Scenario, *, on_minute: OnMinute = lambda _minute, _nodes: None) -> Report:
    """Run a scenario in virtual time and return its report.

    `on_minute` is called after each simulated minute, including those of the warm-up, with that minute and the number
    of nodes.

    Raises `virtual_time.RealTimeout` after REAL_LIMIT_S of real time, and what a task of the simulation raises.
    """
    thresholds = gc.get_threshold()
    # by default the garbage collector would go through millions of lasting objects so often that it took half the time
    gc.set_threshold(1_000_000, 20, 1000)
    try:
        with handing_over(SIZES), unchecked(UNCHECKED):
            run = World(scenario, on_minute).run()
            measured = virtual_time.run(run, real_timeout_s=REAL_LIMIT_S, watch_tasks=False)
    finally:
        gc.set_threshold(*thresholds)
    return report_of(scenario, measured)


class World:
    """Runs one scenario."""

    def __init__(self, scenario: Scenario, on_minute: OnMinute) -> None:
        self._scenario = scenario
        self._on_minute = on_minute
        self._measured = Measurements()
        self._population = Population()
        self._random = random.Random(f"{scenario.seed}/world")
        self._num_created = 0
        self._num_of_class: Counter[str] = Counter()
        self._seeds: list[str] = []
        self._num_gateways = 0
        self._huge_pages_bytes = max(MIN_HUGE_PAGES_BYTES, heap.resident_bytes())
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures: list[BaseException] = []
        self._has_failed = asyncio.Event()
        self._is_over = False

    async def run(self) -> Measurements:
        """Run the scenario to its end. Raises what a task of a node raises."""
        scenario = self._scenario
        self._start_s = asyncio.get_running_loop().time()
        self._measured_from_s = self._start_s + scenario.warm_up_minutes * 60
        self._hosts = HostWorld(Links(scenario))
        self._records = SharedRecords()
        self._end_s = self._measured_from_s + scenario.minutes * 60
        if scenario.training is not None:
            # imports torch, for which a scenario without trainers does not wait
            from swarm.simulation.simulated_training import TrainingWorld  # noqa: PLC0415

            self._population.training = TrainingWorld(scenario, self._hosts.links)
        logging.disable(logging.WARNING)
        try:
            self._schedule_joins()
            self._spawn(self._probe(), "probes")
            await self._sample_every_minute()
            take_traffic(scenario.minutes, self._measured_from_s, self._population, self._measured)
            return self._measured
        finally:
            self._is_over = True
            for node in self._population.nodes.values():
                if node.host.is_up:
                    node.host.stop(goodbye=False)
            await end_tasks(*self._tasks)
            logging.disable(logging.NOTSET)

    def _schedule_joins(self) -> None:
        """Start the seeds, and schedule the joins of the other nodes: those of the first nodes evenly over the warm-up
        without its last SETTLED_S / 2, and those of later sessions of a trace at their times."""
        loop, scenario = asyncio.get_running_loop(), self._scenario
        for _ in range(NUM_SEEDS):
            self._seeds.append(self._join(_SEED).identity.peer_id)
        window_s = self._measured_from_s - self._start_s - SETTLED_S / 2
        for index in range(scenario.nodes):
            join_s, leave_s = scenario.sessions[index] if scenario.sessions else (0.0, self._stay_s())
            if join_s <= 0:
                at_s = self._start_s + 1 + (window_s - 1) * index / scenario.nodes
            else:
                at_s = self._measured_from_s + join_s
            loop.call_at(at_s, self._join, self._next_class(), self._measured_from_s + leave_s)

    def _next_class(self) -> NodeClass:
        """Return the class that lacks most nodes. So every share is met exactly, even a small one."""
        classes, number = self._scenario.classes, sum(self._num_of_class.values()) + 1
        total = sum(each.share for each in classes)
        kind = max(classes, key=lambda each: number * each.share / total - self._num_of_class[each.name])
        self._num_of_class[kind.name] += 1
        return kind

    def _stay_s(self) -> float:
        """Draw the seconds that a node stays."""
        churn = self._scenario.churn
        match churn.model:
            case "half-life":
                return self._random.expovariate(math.log(2) / (churn.half_life_minutes * 60))
            case "weibull":
                return self._random.weibullvariate(churn.scale_minutes * 60, churn.shape)
            case _:
                return math.inf

    def _join(self, kind: NodeClass, leaves_at: float = math.inf) -> SimulatedNode:
        """Let a node join. It leaves at `leaves_at`, if that is before the end."""
        loop, scenario = asyncio.get_running_loop(), self._scenario
        self._num_created += 1
        number = self._num_created
        seed = hashlib.sha256(f"{scenario.seed}/{number}".encode()).digest()
        identity = Identity(seed)
        nat = _OPEN if kind is _SEED else self._draw(scenario.nats)
        place = place_at(scenario.regions.index(self._draw(scenario.regions)), nat)
        up, down = Rate(kind.up_mbit * BYTES_PER_MBIT), Rate(kind.down_mbit * BYTES_PER_MBIT)
        host = SimulatedHost(self._hosts, identity.peer_id, place, up=up, down=down)
        node = SimulatedNode(number=number, kind=kind, identity=identity, host=host, joined_at=loop.time())
        self._population.nodes[number] = node
        if leaves_at < self._end_s:
            loop.call_at(leaves_at, self._leave, node)
        self._measured.count("joined")
        node.task = self._spawn(self._live(node, seed), f"node {number}")
        return node

    def _draw(self, among: Sequence[S]) -> S:
        return self._random.choices(among, [each.share for each in among])[0]

    def _leave(self, node: SimulatedNode) -> None:
        """Let a node leave, with a goodbye or without, and schedule the one that replaces it."""
        if self._is_over:
            return
        del self._population.nodes[node.number]
        self._measured.count("left")
        churn = self._scenario.churn
        if self._random.random() >= churn.goodbye:
            node.host.stop(goodbye=False)
            if self._population.training is not None:
                self._population.training.crash(node.identity.peer_id)
        assert node.task is not None
        node.task.cancel()  # it says goodbye unless its host is already down
        if churn.replace and not self._scenario.sessions:
            loop = asyncio.get_running_loop()
            at_s = loop.time() + self._random.uniform(0, REPLACE_WITHIN_S)
            loop.call_at(at_s, self._join, node.kind, at_s + self._stay_s())

    async def _live(self, node: SimulatedNode, seed: bytes) -> None:
        """Run a node until it is cancelled."""
        entries = [peer_id for peer_id in self._seeds if peer_id != node.identity.peer_id]
        if node.kind.role == "train" and self._population.training is not None:
            node.streams = self._population.training.streams_of(node.identity, node.host)
        try:
            network = await SimulatedNetwork.join(
                seed, node.host, self._records, addr=node.addr, entries=entries, streams=node.streams
            )
            async with Membership(network) as membership:
                membership.announce(node.record)
                node.network, node.membership = network, membership
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(tend_table(network))
                    if (role := self._role(node, network, membership)) is not None:
                        tasks.create_task(role)
        finally:
            self._population.servers.pop(node.identity.peer_id, None)
            if node.host.is_up:
                node.host.stop(goodbye=True)

    def _role(
        self, node: SimulatedNode, network: SimulatedNetwork, membership: Membership
    ) -> Coroutine[object, object, None] | None:
        """Return the work of a node besides keeping records, or None."""
        scenario, kind, training = self._scenario, node.kind, self._population.training
        if kind.role == "serve" and scenario.model is not None:
            relayed = node.host.place.nat.kind == "relayed"
            server = SimulatedServer(network, membership, scenario.model, kind, relayed=relayed)
            self._population.servers[network.peer_id] = server
            return server.run()
        if kind.role == "gateway" and scenario.model is not None:
            return self._ask_for_answers(scenario.model, network, membership)
        if kind.role == "train" and training is not None:
            return training.take_part(node.identity, network, membership, kind, self._measured)
        return None

    async def _ask_for_answers(self, model: Model, network: SimulatedNetwork, membership: Membership) -> None:
        """Run a gateway. All gateways share the scenario's requests evenly."""

        def requests_per_s() -> float:
            return model.requests_per_minute / 60 / self._num_gateways

        self._num_gateways += 1
        try:
            server_at = self._population.servers.get
            await SimulatedGateway(network, membership, model, requests_per_s, server_at, self._measured).run()
        finally:
            self._num_gateways -= 1

    async def _sample_every_minute(self) -> None:
        """Begin the measurement after the warm-up, and take a sample each minute until the end. Raise at once what a
        task of the world or of a node raises."""
        at_s, measured = self._start_s, self._measured
        while at_s < self._end_s:
            at_s = min(at_s + SAMPLE_S, self._measured_from_s if at_s < self._measured_from_s else self._end_s)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(at_s):
                    await self._has_failed.wait()
            if self._failures:
                raise self._failures[0]
            if measured.is_on:
                take_sample((at_s - self._measured_from_s) / 60, self._scenario, self._population, measured)
            elif at_s >= self._measured_from_s:
                self._begin_measurement()
            self._on_minute((at_s - self._start_s) / 60, len(self._population.nodes))
            if heap.resident_bytes() > HUGE_PAGES_GROWTH * self._huge_pages_bytes:
                heap.use_huge_pages()
                self._huge_pages_bytes = heap.resident_bytes()

    def _begin_measurement(self) -> None:
        self._measured.is_on = True
        for node in self._population.nodes.values():
            node.base = node.host.num_sent, node.host.sent_bytes

    async def _probe(self) -> None:
        await asyncio.sleep(self._measured_from_s - asyncio.get_running_loop().time())
        chance = random.Random(f"{self._scenario.seed}/probes/0")
        await probe_lookups(self._scenario.probes_per_minute / 60, chance, self._population, self._measured)

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


def take_sample(minute: float, scenario: Scenario, population: Population, measured: Measurements) -> None:
    """Add a sample of the present state to `measured`."""
    nodes = population.nodes.values()
    counts = [node.network.dht.counts for node in nodes if node.membership and node.network]
    sample = {"minute": minute, "nodes": len(nodes)}
    for name, numbers in (
        ("records", [each.num_records for each in counts]),
        ("peers", [each.num_peers for each in counts]),
        ("addresses", [each.num_addresses for each in counts]),
    ):
        sample |= {f"{name}_mean": mean(numbers), f"{name}_max": max(numbers, default=0)}
    if (model := scenario.model) is not None:
        found = [population.servers.get(node.identity.peer_id) for node in nodes]
        servers = {str(number): each.record for number, each in enumerate(found) if each and each.record}
        sample["servers"] = len(servers)
        sample["blocks_without_server"] = sum(end - start for start, end in missing_spans(servers, model.blocks))
        sample["answer_tokens"] = measured.counts["answer tokens"]
    if (training := population.training) is not None:
        sample["trainers"] = sum(node.kind.role == "train" for node in nodes)
        sample["share_in_work"] = training.share_in_work()
        sample |= {f"trainers_{name}": number for name, number in training.situations().items()}
        sample["committed_tokens"] = measured.counts["committed tokens"]
    measured.samples.append(sample)


def take_traffic(minutes: float, begin_s: float, population: Population, measured: Measurements) -> None:
    """Record what each node that was present at `begin_s`, when the measurement began, has sent since."""
    measured.sent_a_minute = [
        ((node.host.num_sent - node.base[0]) / minutes, (node.host.sent_bytes - node.base[1]) / minutes)
        for node in population.nodes.values()
        if node.joined_at < begin_s
    ]


async def probe_lookups(rate: float, chance: random.Random, population: Population, measured: Measurements) -> None:
    """Have random nodes look for the records of others, `rate` times a second, until cancelled."""
    async with asyncio.TaskGroup() as lookups:
        while rate:
            await asyncio.sleep(chance.expovariate(rate))
            settled = population.settled()
            if len(settled) > 1:
                asker, sought = chance.sample(settled, 2)
                lookups.create_task(_look_for(asker, sought, measured), name="probe")


async def _look_for(asker: SimulatedNode, sought: SimulatedNode, measured: Measurements) -> None:
    assert asker.network is not None
    loop, sought_id = asyncio.get_running_loop(), sought.identity.peer_id
    began_s = loop.time()
    keys = [publish_key(asker.record, sought_id, depth) for depth in range(4)]
    try:
        found = await asker.network.lookup(keys, timeout_s=PROBE_TIMEOUT_S)
    except SwarmError:
        if asker.host.is_up:
            measured.count("lookups")
            measured.count("lookups failed")
        return
    if asker.host.is_up and sought.host.is_up:  # otherwise the lookup is void
        measured.count("lookups")
        measured.count("records lost", all(envelope.peer_id != sought_id for envelope in found))
        measured.take(measured.lookup_hops, asker.network.dht.last_hops)
        measured.take(measured.lookup_s, loop.time() - began_s)
