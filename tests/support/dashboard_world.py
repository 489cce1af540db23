"""A swarm of records on a simulated internet, for the collector: peers that announce, and a plain history."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from support.plain_records import node_record
from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.network.memory.memory_network import MemoryInternet, MemoryNetwork
from swarm.network.traffic import PeerPath
from swarm.training.run.signed_run import SignedRun, parse_signed_run
from swarm_node.dashboard.collector import Collector
from swarm_node.dashboard.history.reader import ContributionTotal, Turnover
from swarm_node.dashboard.history.recorder import Fact, PresenceFact, RefusalFact, SamplesFact, SeriesSample, StepFact
from swarm_node.dashboard.history.store import HistoryError
from swarm_node.dashboard.run_follower import FetchRun
from swarm_node.dashboard.views import ChangeEvent, PresenceView, RefusalView, Series, StepView
from swarm_protocol.errors import PeerRefused
from swarm_protocol.identity import Identity
from swarm_protocol.records import Record, TrainerRecord

SETTLED_S = 15.0
"""After it, a dashboard tells who comes and who goes."""


def trainer_record(outer_step: int = 1, **changes: object) -> TrainerRecord:
    record = TrainerRecord(
        run="story", outer_step=outer_step, digest=bytes(32), tokens_per_s=50.0, loss=2.0, state="training"
    )
    return replace(record, **changes)  # type: ignore[arg-type]


@dataclass
class PlainHistory:
    """Lists instead of a database; with a `failure` nothing of what they hold is answered."""

    present: list[frozenset[str]] = field(default_factory=list)
    samples: list[tuple[float, list[SeriesSample]]] = field(default_factory=list)
    told_steps: dict[tuple[str, int], StepFact] = field(default_factory=dict)
    told_refusals: list[RefusalView] = field(default_factory=list)
    told: list[ChangeEvent] = field(default_factory=list)
    failure: HistoryError | None = None

    @property
    def problem(self) -> HistoryError | None:
        return self.failure

    def record(self, fact: Fact) -> None:
        match fact:
            case PresenceFact():
                self.present.append(fact.peer_ids)
            case SamplesFact():
                self.samples.append((fact.at, list(fact.samples)))
            case StepFact():
                self.told_steps[fact.run, fact.step.outer_step] = fact
            case RefusalFact():
                self.told_refusals.append(fact.refusal)
            case ChangeEvent():
                self.told.append(fact)

    async def turnover(self) -> Turnover | None:
        if self.failure is not None:
            return None
        kinds = [each.kind for each in self._kept(self.told)]
        since = min((at for at, _ in self._kept(self.samples)), default=None)
        return Turnover(joins=kinds.count("join"), leaves=kinds.count("leave"), since=since)

    async def changes(self) -> tuple[ChangeEvent, ...]:
        return tuple(self._kept(self.told)[::-1][:20])

    async def presence(self, peer_id: str) -> tuple[PresenceView, ...]:
        return (
            (PresenceView(since=1.0, until=None),) if any(peer_id in each for each in self._kept(self.present)) else ()
        )

    async def series(self, name: str, hours: float) -> Series | None:
        values = [(at, each.value) for at, samples in self._kept(self.samples) for each in samples if each.name == name]
        if not values:
            return None
        return Series(name=name, unit="?", start=values[0][0], step_s=1.0, values=tuple(value for _, value in values))

    async def steps(self, run: str) -> tuple[StepView, ...]:
        return tuple(
            fact.step.model_copy(update={"num_members": len(fact.group)})
            for fact in self._kept(
                [fact for _, fact in sorted(self.told_steps.items(), key=lambda told: told[0]) if fact.run == run]
            )
        )

    async def runs(self) -> tuple[str, ...] | None:
        found = sorted(self.told_steps.values(), key=lambda fact: -fact.at)
        return None if self.failure is not None else tuple(dict.fromkeys(fact.run for fact in found))

    async def run(self, run: str) -> SignedRun | None:
        files = [fact.file for fact in self._kept(list(self.told_steps.values())) if fact.run == run and fact.file]
        return parse_signed_run(files[0].encode(), "a test") if files else None

    async def refusals(self, run: str) -> tuple[RefusalView, ...]:
        return tuple(self._kept(self.told_refusals))

    async def contributions(self, run: str) -> tuple[ContributionTotal, ...]:
        return tuple(each for (its_run, _), each in self._totals().items() if its_run == run)

    async def contributions_of(self, peer_id: str) -> dict[str, ContributionTotal]:
        return {run: each for (run, its_peer), each in self._totals().items() if its_peer == peer_id}

    def _totals(self) -> dict[tuple[str, str], ContributionTotal]:
        """Return what each peer contributed to each run, by run and peer."""
        found: dict[tuple[str, str], ContributionTotal] = {}
        for fact in self._kept(list(self.told_steps.values())):
            tokens = fact.step.num_tokens // max(1, fact.step.num_members)
            for peer_id in fact.group:
                before = found.get((fact.run, peer_id), ContributionTotal(peer_id=peer_id, tokens=0, rounds=0))
                found[fact.run, peer_id] = replace(before, tokens=before.tokens + tokens, rounds=before.rounds + 1)
        return found

    def _kept(self, what: list) -> list:  # type: ignore[type-arg]
        return what if self.failure is None else []


async def fetch_nothing(_network: Network, peer_id: str, _run: str) -> SignedRun:
    raise PeerRefused("this member does not have the run's file", peer_id=peer_id)


@dataclass
class World:
    """Peers by name on one internet, and a dashboard beside them."""

    internet: MemoryInternet
    stack: AsyncExitStack
    network: MemoryNetwork
    membership: Membership
    history: PlainHistory
    collector: Collector
    paths: dict[str, PeerPath]
    """The dashboard's own paths, to be set by a test."""
    peers: dict[str, tuple[MemoryNetwork, Membership, AsyncExitStack]] = field(default_factory=dict)

    async def join(self, name: str, *records: Record, called: str = "", **changes: object) -> str:
        """A node of that name, or `called` otherwise by its record, that announces `records`, too. Its peer id."""
        own = AsyncExitStack()
        network = self.internet.network(Identity(name.encode().ljust(32, b".")[:32]))
        own.push_async_callback(network.close)
        membership = await own.enter_async_context(Membership(network))
        membership.announce(node_record(called or name, **changes))
        for record in records:
            membership.announce(record)
        self.peers[name] = network, membership, own
        return network.peer_id

    def announce(self, name: str, record: Record) -> None:
        self.peers[name][1].announce(record)

    async def leave(self, name: str) -> None:
        await self.peers.pop(name)[2].aclose()

    async def looks(self, num: int = 1) -> None:
        """Wait until the collector has looked so many times more."""
        for _ in range(num):
            await self.collector.wait_changed()


@asynccontextmanager
async def world(
    fetch_run: FetchRun = fetch_nothing,
    internet: MemoryInternet | None = None,
    history: PlainHistory | None = None,
) -> AsyncIterator[World]:
    internet = internet or MemoryInternet()
    async with AsyncExitStack() as stack:
        network = internet.network(Identity(b"dashboard".ljust(32, b".")))
        stack.push_async_callback(network.close)
        membership = await stack.enter_async_context(Membership(network))
        history = history or PlainHistory()
        paths: dict[str, PeerPath] = {}
        collector = Collector(
            network,
            membership,
            history,  # type: ignore[arg-type]
            fetch_run=fetch_run,
            peer_paths=lambda: paths,
        )
        found = World(internet, stack, network, membership, history, collector, paths)
        looking = asyncio.create_task(collector.run_forever())
        try:
            yield found
        finally:
            looking.cancel()
            await asyncio.wait({looking})
            for name in list(found.peers):
                await found.leave(name)
