"""Looks up who is there, who serves which model and who trains which run. The collector's I/O, owned by its task.

The nodes are looked up every time. Of models and runs, which anyone can make up, those count that most nodes name, and
a look asks for a few of them, first those that were asked for longest ago: it costs the same however many there are.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm_protocol.errors import SwarmError
from swarm_protocol.records import NodeRecord, ServeRecord, TrainerRecord

from swarm_node.dashboard.snapshot import Listed, Look

MAX_MODELS = 32
MAX_RUNS = 24
"""With as many the views fit that Membership remembers; each run costs calls to its members, too."""

MAX_LISTINGS = 8
"""Models and runs that one look asks for. Each is a lookup of eight keys."""

Key = tuple[Literal["serve", "train"], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """`problems` are what could not be looked up, in words; of it the last listing stands."""

    look: Look
    problems: tuple[str, ...]


class Looking:
    def __init__(self, network: Network, membership: Membership) -> None:
        self._network = network
        self._membership = membership
        self._servers: dict[str, Listed[ServeRecord]] = {}
        self._trainers: dict[str, Listed[TrainerRecord]] = {}
        self._asked: dict[Key, int] = {}
        self._num_looks = 0

    async def look(self) -> Found:
        """Raises SwarmError if the nodes cannot be looked up."""
        self._num_looks += 1
        found = await self._membership.nodes()
        nodes = {peer_id: record for peer_id, record in found.items() if record.role != "visitor"}
        keys = self._keys(nodes)
        self._asked = {key: self._asked.get(key, 0) for key in keys}
        due = sorted(keys, key=self._asked.__getitem__)[:MAX_LISTINGS]
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(self._list(key), name=f"look up {key[1]}") for key in due]
        self._servers = {name: each for name, each in self._servers.items() if ("serve", name) in self._asked}
        self._trainers = {name: each for name, each in self._trainers.items() if ("train", name) in self._asked}
        return Found(look=self._look(nodes), problems=tuple(task.result() for task in asking if task.result()))

    def _keys(self, nodes: Mapping[str, NodeRecord]) -> list[Key]:
        models = _likeliest((record.models for record in nodes.values()), MAX_MODELS)
        # who has finished a run names it no more, and its last record says so for another minute
        named = _likeliest((record.runs for record in nodes.values()), MAX_RUNS)
        ended = [run for run, listed in self._trainers.items() if listed.records and run not in named]
        runs = [*named, *ended][:MAX_RUNS]
        return [*(("serve", model) for model in models), *(("train", run) for run in runs)]

    async def _list(self, key: Key) -> str:
        """What went wrong, empty if nothing did."""
        kind, name = key
        self._asked[key] = self._num_looks
        try:
            if kind == "serve":
                servers = await self._membership.servers(name)
                self._servers[name] = Listed(records=servers, ages_s=self._membership.ages_s(kind, name))
            else:
                trainers = await self._membership.trainers(name)
                self._trainers[name] = Listed(records=trainers, ages_s=self._membership.ages_s(kind, name))
        except SwarmError as error:
            return f"{name} could not be looked up: {error.message}"
        return ""

    def _look(self, nodes: Mapping[str, NodeRecord]) -> Look:
        servers = {peer_id for listed in self._servers.values() for peer_id in listed.records}
        return Look(
            at=self._network.now(),
            nodes=Listed(records=nodes, ages_s=self._membership.ages_s("nodes")),
            models={name: listed for name, listed in self._servers.items() if listed.records},
            runs={name: listed for name, listed in self._trainers.items() if listed.records},
            rtts_ms=self._membership.known_rtts_ms(servers),
        )


def _likeliest(named: Iterable[tuple[str, ...]], most: int) -> list[str]:
    """Those that most nodes name, by name among equals."""
    counts = Counter(name for names in named for name in names)
    return sorted(counts, key=lambda name: (-counts[name], name))[:most]
