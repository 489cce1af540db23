"""Takes snapshots of the network: which nodes are there, which serve each model, and which train each run.

A snapshot consists of values only: signed records by peer, and the age of each. `NetworkPoller` does the lookups; the
task of its owner owns it. Each poll looks up the nodes. Since anyone can invent models and runs, the poller considers
those that most nodes name, and looks up a few of them per poll, the least recently looked up first. So a poll costs the
same however many there are.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.network.traffic import PeerPath
from swarm_protocol.errors import SwarmError
from swarm_protocol.records import NodeRecord, ServeRecord, TrainerRecord

R = TypeVar("R", NodeRecord, ServeRecord, TrainerRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed(Generic[R]):
    """The newest record of each peer, and the seconds since it was signed."""

    records: Mapping[str, R]
    ages_s: Mapping[str, float]

    def age_s(self, peer_id: str) -> float:
        return self.ages_s.get(peer_id, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSnapshot:
    """The network at one time: records by peer id, by model and by run id.

    `paths` are the paths of the observing node, `observer`, to its connected peers. `rtts_ms` are its known round trips
    to these peers and to servers.
    """

    at: float
    nodes: Listed[NodeRecord]
    models: Mapping[str, Listed[ServeRecord]]
    runs: Mapping[str, Listed[TrainerRecord]]
    rtts_ms: Mapping[str, float] = field(default_factory=dict)
    paths: Mapping[str, PeerPath] = field(default_factory=dict)
    observer: str = ""


MAX_MODELS = 32
MAX_RUNS = 24
"""Maximum runs in one snapshot. Membership keeps that many views, and each run costs calls to its members."""

MAX_LISTINGS = 8
"""Models and runs that one poll looks up. Each is a lookup of eight keys."""

LookupKey = tuple[Literal["serve", "train"], str]


class NetworkPoller:
    """Looks up records repeatedly, and makes snapshots of them."""

    def __init__(
        self, network: Network, membership: Membership, peer_paths: Callable[[], Mapping[str, PeerPath]] = dict
    ) -> None:
        """`peer_paths` returns the paths to the connected peers, for callers that need them in snapshots."""
        self._network = network
        self._membership = membership
        self._peer_paths = peer_paths
        self._listed: dict[LookupKey, Listed[Any]] = {}
        self._asked: dict[LookupKey, int] = {}
        self._num_polls = 0

    async def poll(self) -> tuple[NetworkSnapshot, tuple[str, ...]]:
        """Take a snapshot, and return it with descriptions of what could not be looked up, for which it has the last
        listing.

        Raises SwarmError if the nodes cannot be looked up.
        """
        self._num_polls += 1
        found = await self._membership.nodes()
        nodes = {peer_id: record for peer_id, record in found.items() if record.role != "visitor"}
        keys = self._keys(nodes)
        self._asked = {key: self._asked.get(key, 0) for key in keys}
        due = sorted(keys, key=self._asked.__getitem__)[:MAX_LISTINGS]
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(self._list(key), name=f"look up {key[1]}") for key in due]
        self._listed = {key: listed for key, listed in self._listed.items() if key in self._asked}
        return self._snapshot(nodes), tuple(task.result() for task in asking if task.result())

    def _keys(self, nodes: Mapping[str, NodeRecord]) -> list[LookupKey]:
        models = _most_named((record.models for record in nodes.values()), MAX_MODELS)
        # a member that has finished a run no longer names it, but its last record is valid for another minute
        named = _most_named((record.runs for record in nodes.values()), MAX_RUNS)
        ended = [run for run in self._of("train") if run not in named]
        runs = [*named, *ended][:MAX_RUNS]
        return [*(("serve", model) for model in models), *(("train", run) for run in runs)]

    async def _list(self, key: LookupKey) -> str:
        """Look up one model or run. Return a description of what went wrong, or ""."""
        kind, name = key
        self._asked[key] = self._num_polls
        try:
            look_up = self._membership.servers if kind == "serve" else self._membership.trainers
            records: Mapping[str, Any] = await look_up(name)
            self._listed[key] = Listed(records=records, ages_s=self._membership.ages_s(kind, name))
        except SwarmError as error:
            return f"{name} could not be looked up: {error.message}"
        return ""

    def _snapshot(self, nodes: Mapping[str, NodeRecord]) -> NetworkSnapshot:
        models = self._of("serve")
        servers = {peer_id for listed in models.values() for peer_id in listed.records}
        paths = self._peer_paths()
        return NetworkSnapshot(
            at=self._network.now(),
            nodes=Listed(records=nodes, ages_s=self._membership.ages_s("nodes")),
            models=models,
            runs=self._of("train"),
            rtts_ms=self._membership.known_rtts_ms(servers | paths.keys()),
            paths=paths,
            observer=self._network.peer_id,
        )

    def _of(self, kind: Literal["serve", "train"]) -> dict[str, Listed[Any]]:
        return {name: listed for (each, name), listed in self._listed.items() if each == kind and listed.records}


def _most_named(named: Iterable[tuple[str, ...]], most: int) -> list[str]:
    """Return the names that most nodes name. Equally frequent names are in alphabetical order."""
    counts = Counter(name for names in named for name in names)
    return sorted(counts, key=lambda name: (-counts[name], name))[:most]
