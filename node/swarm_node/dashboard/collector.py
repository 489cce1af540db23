"""Polls the network's signed records every second, and holds the views that all visitors see.

The collector never ends by itself. A failure becomes a log entry and a text in `Overview.stale`, and the earlier views
stay. `run_forever` is its only task, and its views are read on the same event loop. A thread builds views from values.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.network.traffic import PeerPath
from swarm.serving.evidence.server_convictions import ServerConvictions
from swarm.serving.manifest.manifest_book import ManifestBook
from swarm.training.run.run_copy import fetch_run
from swarm_protocol.errors import ConfigError, SwarmError
from swarm_protocol.records import NodeRecord

from swarm_node.dashboard.checkpoints import checkpoint_files
from swarm_node.dashboard.history.history import DashboardHistory
from swarm_node.dashboard.history.reader import MAX_REFUSALS, Turnover
from swarm_node.dashboard.history.recorder import PresenceFact, SamplesFact
from swarm_node.dashboard.history.store import sqlite_file, url_of
from swarm_node.dashboard.model_views import server_view
from swarm_node.dashboard.run_follower import FetchRun, RunFollower
from swarm_node.dashboard.run_views import (
    RunFacts,
    ban_views,
    contributor_view,
    contributors,
    downsampled,
    num_parameters,
    remembered_view,
)
from swarm_node.dashboard.view_builder import (
    ChangeLog,
    SnapshotViews,
    build_views,
    series_samples,
    turnover_counts,
    unique_names,
    uptime_share,
)
from swarm_node.dashboard.views import (
    ChangeEvent,
    ModelDetail,
    NodeDetail,
    NodeView,
    Overview,
    RefusalView,
    RunDetail,
    RunView,
    Series,
)
from swarm_node.formatting import DAY_S, shown
from swarm_node.network_snapshot import Listed, NetworkPoller, NetworkSnapshot
from swarm_node.node import Node
from swarm_node.settings.config import Config

POLL_S = 1.0
"""Time in seconds from the start of a poll to the start of the next. A poll that takes longer skips turns."""

PATIENCE_S = 4.0
"""Seconds after which a poll that still runs is reported to visitors, so that they get news at least every 5 s."""

MAX_GONE = 1000
"""Maximum number of nodes that are listed as gone, since anyone can create any number of nodes."""

GONE_S = DAY_S
"""Time in seconds for which a node that went is still listed, as gone."""

logger = logging.getLogger(__name__)


class ListedNodes:
    """The nodes of the newest snapshot, and those that have gone since. `views` has a view of each, by peer id."""

    def __init__(self) -> None:
        self.views: dict[str, NodeView] = {}
        self._own_names: dict[str, str] = {}  # names in records, by peer id
        self._at = 0.0

    @property
    def names(self) -> dict[str, str]:
        return {peer_id: node.name for peer_id, node in self.views.items()}

    def unique_names(self, records: Mapping[str, NodeRecord]) -> dict[str, str]:
        """Return the displayed names of the nodes that are listed or have a record. A node that came back with another
        key has its earlier name."""
        self._own_names |= {peer_id: record.name for peer_id, record in records.items()}
        return unique_names(self._own_names)

    def take(self, nodes: Mapping[str, NodeView], at: float, names: Mapping[str, str]) -> None:
        """List the `nodes` of a snapshot, and keep listing those that have gone."""
        gone = [
            view.model_copy(
                update={
                    "state": "gone",
                    "from_here": None,
                    "age_s": max(0.0, view.age_s + at - self._at),
                    "name": names[peer_id],
                }
            )
            for peer_id, view in self.views.items()
            if peer_id not in nodes
        ]
        gone = sorted((view for view in gone if view.age_s < GONE_S), key=lambda view: view.age_s)[:MAX_GONE]
        listed = sorted((*nodes.values(), *gone), key=lambda node: (node.name, node.peer_id))
        self.views, self._at = {node.peer_id: node for node in listed}, at
        self._own_names = {peer_id: self._own_names[peer_id] for peer_id in self.views}


class Collector:
    """Implements `views.ViewSource` while `run_forever` runs.

    `fetch_run` fetches a run's signed file from a member. `peer_paths` returns this node's paths to its connected
    peers. `unreachable`, which a gateway in the same process sets, returns the servers that it failed to reach, given
    the age of each server's record.
    """

    def __init__(
        self,
        network: Network,
        membership: Membership,
        history: DashboardHistory,
        *,
        peers: Sequence[str] = (),
        fetch_run: FetchRun,
        checkpoints: Path | None = None,
        peer_paths: Callable[[], Mapping[str, PeerPath]] = dict,
    ) -> None:
        self.unreachable: Callable[[Mapping[str, float]], Collection[str]] = lambda _: ()
        self._convictions = ServerConvictions(network, membership)
        self._poller = NetworkPoller(network, membership, peer_paths)
        self._manifests = ManifestBook(network)
        self._history = history
        self._checkpoints = checkpoints
        self._runs = RunFollower(network, membership, history, fetch=fetch_run)
        self._changes = ChangeLog()
        self._found_early: set[str] = set()  # nodes that joined while others were still being found
        self._changed = asyncio.Event()
        self._turnover: Turnover | None = None
        self._recent_changes: tuple[ChangeEvent, ...] = ()
        self._earlier_runs: dict[str, RunView] | None = None  # of earlier dashboards; None until the history answers
        self._recalling: asyncio.Task[None] | None = None
        self._snapshot = NetworkSnapshot(at=network.now(), nodes=Listed(records={}, ages_s={}), models={}, runs={})
        self._build = partial(build_views, peers=peers, network_id=network.network_id)
        self._views = self._build(self._snapshot, (), {}, publishers={}, convicted={}, unreachable={})
        self._nodes = ListedNodes()
        self._overview = self._views.overview
        self._publish("the network's records have not been read yet")

    async def run_forever(self) -> NoReturn:
        """Poll until cancelled."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        async with asyncio.TaskGroup() as tasks:
            while True:
                polling = tasks.create_task(self._poll(tasks), name="dashboard poll")
                while not (await asyncio.wait({polling}, timeout=PATIENCE_S))[0]:
                    self._publish("the network is slow to answer")
                due_s += POLL_S * (1 + max(0.0, loop.time() - due_s) // POLL_S)
                await asyncio.sleep(due_s - loop.time())

    async def _poll(self, tasks: asyncio.TaskGroup) -> None:
        try:
            await self._take(*await self._poller.poll(), tasks)
        except SwarmError as error:
            logger.warning("the dashboard cannot read the network's records: %s", error)
            self._publish(f"the network's records cannot be read: {shown(error.message)}")
        except Exception:
            logger.exception("the dashboard failed to read the network's records")
            self._publish("the dashboard failed to read the network's records; its log says why")

    async def _take(self, snapshot: NetworkSnapshot, problems: tuple[str, ...], tasks: asyncio.TaskGroup) -> None:
        names = self._nodes.unique_names(snapshot.nodes.records)
        self._runs.take(tasks, snapshot.runs, names, snapshot.at)
        facts = tuple(run.facts for run in self._runs.runs.values())
        publishers = await self._learn(snapshot)
        unreachable = {name: self.unreachable(listed.ages_s) for name, listed in snapshot.models.items()}
        views = await asyncio.to_thread(
            self._build,
            snapshot,
            facts,
            names,
            publishers=publishers,
            convicted=self._convicted,
            unreachable=unreachable,
        )
        self._nodes.take(views.nodes, snapshot.at, names)
        self._snapshot, self._views = snapshot, views
        self._record(views, snapshot.at)
        if self._recalling is None or self._recalling.done():
            self._recalling = tasks.create_task(self._recall(), name="dashboard history")
        for problem in problems:
            logger.warning("some of the dashboard's figures are old: %s", problem)
        self._publish("; ".join(map(shown, problems)))

    async def _learn(self, snapshot: NetworkSnapshot) -> dict[bytes, str]:
        """Ask servers for manifests that are not known, and for evidence, which is checked here. Return the publishers
        by manifest digest."""
        for name, listed in snapshot.models.items():
            await self._manifests.learn(name, listed.records, within_s=0.0)
            if any(record.manifest for record in listed.records.values()):
                await self._convictions.learn(name, listed.records)
        digests = {record.manifest for listed in snapshot.models.values() for record in listed.records.values()}
        found = {digest: self._manifests.known(digest) for digest in digests}
        return {digest: published.publisher for digest, published in found.items() if published is not None}

    @property
    def _convicted(self) -> dict[str, str]:
        """Why servers are convicted, by peer id."""
        return {ban.verdict.peer_id: shown(ban.verdict.reason) for ban in self._convictions.bans}

    async def close(self) -> None:
        """End background work other than the polls."""
        await self._convictions.close()
        await self._manifests.close()

    def _record(self, views: SnapshotViews, at: float) -> None:
        self._history.record(SamplesFact(at, tuple(series_samples(views))))
        models = {name: detail.model for name, detail in views.models.items()}
        changes = self._changes.update(at, views.nodes, models, views.runs)
        for change in changes:
            self._history.record(change)
        self._record_nodes({peer_id for peer_id, node in views.nodes.items() if node.state == "alive"}, changes, at)

    def _record_nodes(self, present: set[str], changes: list[ChangeEvent], at: float) -> None:
        """Record which nodes are there, once all are found. The history derives joins and departures from it."""
        self._found_early.update(each.peer_id for each in changes if each.kind == "join" and each.peer_id is not None)
        if self._changes.is_settling:
            return
        if self._found_early:
            self._history.record(PresenceFact(at, frozenset(present - self._found_early)))
            self._found_early.clear()
        self._history.record(PresenceFact(at, frozenset(present)))

    async def _recall(self) -> None:
        """Read the newest history. The next poll shows it; no poll waits for it."""
        try:
            self._turnover = await self._history.turnover() or self._turnover
            self._recent_changes = await self._history.changes() or self._recent_changes
            if self._earlier_runs is None and (runs := await self._history.runs()) is not None:
                found = [facts for run in runs if (facts := await self._remembered(run)).steps]
                self._earlier_runs = {facts.run: remembered_view(facts) for facts in found}
        except Exception:
            logger.exception("the dashboard failed to read its history")

    async def _remembered(self, run_id: str) -> RunFacts:
        """Return what the history has of a run."""
        file, steps = await self._history.run(run_id), await self._history.steps(run_id)
        return RunFacts(run=run_id, file=file, trainers=Listed(records={}, ages_s={}), steps=steps)

    def _publish(self, problem: str) -> None:
        # visitors read this: what is told in the terminal names the machine's files, or its database server
        history_problem = "the history cannot be used; the dashboard's log says why" if self._history.problem else ""
        problems = [each for each in (problem, history_problem) if each]
        earlier = [view for run, view in (self._earlier_runs or {}).items() if run not in self._views.runs]
        self._overview = self._views.overview.model_copy(
            update={
                "stale": "; ".join(problems) or None,
                "runs": (*self._views.runs.values(), *earlier),
                **turnover_counts(self._turnover, self._views.overview.at),
                "happenings": self._recent_changes,
            }
        )
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def overview(self) -> Overview:
        return self._overview

    async def model(self, name: str) -> ModelDetail | None:
        return self._views.models.get(name)

    def nodes(self) -> tuple[NodeView, ...]:
        return tuple(self._nodes.views.values())

    async def run(self, run_id: str) -> RunDetail | None:
        view, followed = self._views.runs.get(run_id), self._runs.runs.get(run_id)
        refusals: tuple[RefusalView, ...] = ()
        if view is None or followed is None:
            # not seen since this dashboard started: show what the history has
            facts, since = await self._remembered(run_id), dict[str, float]()
            if not (steps := facts.steps):
                return None
            view = remembered_view(facts)
        else:
            facts, since, refusals = followed.facts, followed.since, tuple(followed.refusals)
            kept = await self._history.steps(run_id)
            by_step = {step.outer_step: step for step in (*kept, *followed.steps)}
            steps = downsampled([by_step[outer_step] for outer_step in sorted(by_step)])
        refusals = refusals or await self._history.refusals(run_id)
        totals = await self._history.contributions(run_id)
        return RunDetail(
            run=view,
            num_parameters=num_parameters(facts.trainers.records),
            steps=tuple(steps),
            refusals=refusals[:MAX_REFUSALS],
            contributors=contributors(facts, totals, self._nodes.names, since, self._snapshot.at),
            bans=ban_views(followed.bans, self._nodes.names) if followed is not None else (),
            checkpoint=await asyncio.to_thread(checkpoint_files, self._checkpoints, run_id),
        )

    async def node(self, peer_id: str) -> NodeDetail | None:
        view = self._nodes.views.get(peer_id)
        if view is None:
            return None
        presence = await self._history.presence(peer_id)
        done, name = await self._history.contributions_of(peer_id), self._nodes.names.get(peer_id)
        at = self._snapshot.at
        return NodeDetail(
            node=view,
            presence=presence,
            uptime_share=uptime_share(presence, at),
            tokens_trained=sum(each.tokens for each in done.values()),
            rounds=sum(each.rounds for each in done.values()),
            serving=tuple(
                server_view(peer_id, listed, self._nodes.names, self._convicted)
                for _, listed in sorted(self._snapshot.models.items())
                if peer_id in listed.records
            ),
            training=tuple(
                contributor_view(peer_id, run, record, done.get(run), name=name, since=followed.since, at=at)
                for run, followed in self._runs.runs.items()
                if (record := followed.trainers.records.get(peer_id)) is not None
            ),
        )

    async def series(self, name: str, hours: float) -> Series | None:
        return await self._history.series(name, hours)

    async def wait_changed(self) -> None:
        await self._changed.wait()


def check_folders(config: Config) -> None:
    """Refuse a place where the dashboard's history cannot be, and a missing directory of checkpoints, before the node
    starts. Raises ConfigError."""
    file = sqlite_file(url_of(config.history)) if config.history else None
    if file is not None and not file.parent.is_dir():
        raise ConfigError(f"there is no directory {file.parent} to keep the history in", remedy="check --history")
    if file is not None and file.is_dir():
        raise ConfigError(f"the history cannot be kept in the directory {file}", remedy="name a file with --history")
    if config.checkpoints is not None and not config.checkpoints.is_dir():
        raise ConfigError(f"there is no directory {config.checkpoints}", remedy="check --checkpoints")


def daemon_collector(node: Node) -> AbstractAsyncContextManager[Collector]:
    """Run a daemon's collector, like `running_collector`."""

    def warn(error: SwarmError) -> None:
        node.emitter.warning(error.message, error.remedy)

    place = node.config.history or node.home.path / "history.sqlite"
    return running_collector(node.network, node.membership, node.config, place, node.peer_paths, on_warning=warn)


@asynccontextmanager
async def running_collector(
    network: Network,
    membership: Membership,
    config: Config,
    place: Path | str,
    peer_paths: Callable[[], Mapping[str, PeerPath]],
    *,
    on_warning: Callable[[SwarmError], None] | None = None,
) -> AsyncIterator[Collector]:
    """Run a collector while the context lasts. It keeps its history in `place`.

    Raises ConfigError if `place` can never hold a history.
    """
    async with DashboardHistory(place, on_warning=on_warning) as history:
        collector = Collector(
            network,
            membership,
            history,
            peers=config.peers,
            fetch_run=fetch_run,
            checkpoints=config.checkpoints,
            peer_paths=peer_paths,
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                polling = tasks.create_task(collector.run_forever(), name="dashboard")
                yield collector
                polling.cancel()
        finally:
            await collector.close()
