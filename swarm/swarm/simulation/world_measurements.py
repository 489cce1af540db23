"""Measures the nodes of a simulation: one sample a minute, lookups of random records, and the traffic of each node.

`World` decides when. State belongs to the world's event loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from swarm_protocol.errors import SwarmError
from swarm_protocol.records import publish_key

from swarm.router.routing import missing_spans
from swarm.simulation.report import Measurements, mean
from swarm.simulation.scenario import Scenario
from swarm.simulation.simulated_network import SimulatedNode
from swarm.simulation.simulated_serving import SimulatedServer

if TYPE_CHECKING:
    from swarm.simulation.simulated_training import TrainingWorld

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
        before = asyncio.get_running_loop().time() - SETTLED_S
        return [node for node in self.nodes.values() if node.joined_at < before and node.membership is not None]


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


async def probe_lookups(rate: float, chance: Random, population: Population, measured: Measurements) -> None:
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
