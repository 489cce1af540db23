"""Looks at the network's signed records every second, and holds the views that everyone is shown.

It never dies: what fails is a warning, a counter and words in `Overview.stale`, and the views of before stay.
`keep_looking` is its one task; whoever reads its views does so on the same loop. Views are made in a thread, from
values.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import NoReturn

from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm_protocol.errors import SwarmError

from swarm_node.dashboard.change_log import Changes
from swarm_node.dashboard.checkpoints import Checkpoints
from swarm_node.dashboard.history.facts import Turnover
from swarm_node.dashboard.model_views import seen_now, server_view
from swarm_node.dashboard.node_views import uptime_share
from swarm_node.dashboard.remembering import Remembering
from swarm_node.dashboard.run_views import (
    RunFacts,
    contributor_view,
    contributors,
    downsampled,
    num_parameters,
    remembered_view,
)
from swarm_node.dashboard.runs_seen import MAX_REFUSALS, MAX_STEPS, FetchRun, RunsSeen
from swarm_node.dashboard.view_builder import Drafts, Picture, Place, numbers, picture
from swarm_node.dashboard.view_sanitizing import shown
from swarm_node.dashboard.views import (
    CheckpointFile,
    ContributorView,
    Happening,
    ModelDetail,
    NodeDetail,
    NodeView,
    Overview,
    RunDetail,
    Series,
    ServerView,
)
from swarm_node.network_snapshot import Listed, NetworkPoller, NetworkSnapshot, Poll

LOOK_S = 1.0
"""From the begin of a look to that of the next, by the clock: one that takes longer skips turns."""

PATIENCE_S = 4.0
"""Visitors hear at least every 5 s, also while a look takes longer."""

MAX_GONE = 1000
GONE_S = 24 * 3600.0
"""How long a node that went is still listed, as gone."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorCounters:
    """What was tolerated since the start: looks that failed, bugs on the way, readings that the history left out."""

    num_failed_looks: int
    num_bugs: int
    num_history_failures: int


@dataclass(frozen=True, slots=True)
class _Gone:
    view: NodeView
    heard_at: float


class Collector:
    """Implements `source.Source` while `keep_looking` runs. `fetch_run` is asked for runs' signed files."""

    def __init__(
        self,
        network: Network,
        membership: Membership,
        remembering: Remembering,
        *,
        place: Place,
        fetch_run: FetchRun,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self._network = network
        self._poller = NetworkPoller(network, membership)
        self._remembering = remembering
        self._place = place
        self._checkpoints = checkpoints
        self._runs = RunsSeen(network, membership, remembering, fetch=fetch_run)
        self._changes = Changes()
        self._early: set[str] = set()  # who came while others were still being found
        self._changed = asyncio.Event()
        self._num_failed_looks = 0
        self._num_bugs = 0
        self._gone: dict[str, _Gone] = {}
        self._recent: tuple[Turnover, tuple[Happening, ...]] = Turnover(joins=0, leaves=0), ()
        self._recalling: asyncio.Task[None] | None = None
        self._look = NetworkSnapshot(at=network.now(), nodes=Listed(records={}, ages_s={}), models={}, runs={})
        self._drafts = Drafts()
        self._picture = picture(self._look, (), place, self._drafts)
        self._nodes: dict[str, NodeView] = {}
        self._overview = self._picture.overview
        self._publish("the network has not been looked at yet")

    # --- looking ----------------------------------------------------------------------------------------------------

    async def keep_looking(self) -> NoReturn:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        async with asyncio.TaskGroup() as tasks:
            while True:
                looking = tasks.create_task(self._look_once(tasks), name="dashboard look")
                while not (await asyncio.wait({looking}, timeout=PATIENCE_S))[0]:
                    self._publish("the network takes long to answer")
                due_s += LOOK_S * (1 + max(0.0, loop.time() - due_s) // LOOK_S)
                await asyncio.sleep(due_s - loop.time())
        raise AssertionError("the loop above has no end")

    async def _look_once(self, tasks: asyncio.TaskGroup) -> None:
        try:
            await self._take(await self._poller.poll(), tasks)
        except SwarmError as error:
            self._num_failed_looks += 1
            logger.warning("the dashboard cannot look at the network: %s", error)
            self._publish(f"the network cannot be looked at: {shown(error.message)}")
        except Exception:
            self._num_failed_looks += 1
            self._num_bugs += 1
            logger.exception("the dashboard failed to look at the network")
            self._publish("the dashboard failed to look at the network; its log says why")

    async def _take(self, found: Poll, tasks: asyncio.TaskGroup) -> None:
        look = found.snapshot
        names = {peer_id: shown(record.name) for peer_id, record in look.nodes.records.items()}
        self._runs.look(tasks, look.runs, names, look.at)
        facts = tuple(seen.facts for seen in self._runs.runs.values())
        made = await asyncio.to_thread(picture, look, facts, self._place, self._drafts)
        self._bury(made, look.at)
        self._look, self._picture = look, made
        self._record(made, look.at)
        if self._recalling is None or self._recalling.done():
            self._recalling = tasks.create_task(self._recall(), name="dashboard history")
        for problem in found.problems:
            logger.warning("the dashboard's picture is older than it should be: %s", problem)
        self._publish("; ".join(map(shown, found.problems)))

    def _bury(self, made: Picture, at: float) -> None:
        """Keep the nodes that were there before, and are not any more."""
        for peer_id in self._picture.nodes.keys() - made.nodes.keys():
            view = self._picture.nodes[peer_id]
            self._gone[peer_id] = _Gone(view.model_copy(update={"state": "gone"}), self._look.at - view.age_s)
        self._gone = {
            peer_id: gone
            for peer_id, gone in self._gone.items()
            if peer_id not in made.nodes and at - gone.heard_at < GONE_S
        }
        while len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]
        gone = (each.view.model_copy(update={"age_s": max(0.0, at - each.heard_at)}) for each in self._gone.values())
        listed = sorted((*made.nodes.values(), *gone), key=lambda node: (node.name, node.peer_id))
        self._nodes = {node.peer_id: node for node in listed}

    def _record(self, made: Picture, at: float) -> None:
        models = {name: detail.model for name, detail in made.models.items()}
        self._remembering.samples(numbers(made), at)
        told = self._changes.look(at, made.nodes, models, made.runs)
        for happening in told:
            self._remembering.happening(happening)
        self._record_nodes({peer_id for peer_id, node in made.nodes.items() if node.state == "alive"}, told, at)

    def _record_nodes(self, present: set[str], told: list[Happening], at: float) -> None:
        """The history takes who is missing in a look for gone, and who is new for come: not before all are found."""
        if self._changes.is_settling:
            self._early.update(each.peer_id for each in told if each.peer_id is not None)
            return
        if self._early:
            self._remembering.nodes(present - self._early, at)
            self._early.clear()
        self._remembering.nodes(present, at)

    async def _recall(self) -> None:
        """What the history says of late: shown with the next look, which does not wait for it."""
        try:
            self._recent = await self._remembering.recent()
        except Exception:
            self._num_bugs += 1
            logger.exception("the dashboard failed to read its history")

    def _publish(self, problem: str) -> None:
        turnover, happenings = self._recent
        problems = [each for each in (problem, self._remembering.problem) if each]
        self._overview = self._picture.overview.model_copy(
            update={
                "stale": "; ".join(problems) or None,
                "joins_24h": turnover.joins,
                "leaves_24h": turnover.leaves,
                "happenings": happenings[:20],
            }
        )
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @property
    def counters(self) -> CollectorCounters:
        """As of now."""
        return CollectorCounters(
            num_failed_looks=self._num_failed_looks,
            num_bugs=self._num_bugs + self._runs.num_failures,
            num_history_failures=self._remembering.num_failures,
        )

    # --- what everyone is shown: `source.Source` --------------------------------------------------------------------

    def overview(self) -> Overview:
        return self._overview

    def model(self, name: str) -> ModelDetail | None:
        return self._picture.models.get(name)

    def nodes(self) -> tuple[NodeView, ...]:
        return tuple(self._nodes.values())

    async def run(self, run: str) -> RunDetail | None:
        view, seen = self._picture.runs.get(run), self._runs.runs.get(run)
        if view is None or seen is None:
            return await self._remembered(run)
        remembered = {step.outer_step: step for step in await self._remembering.steps(run)}
        steps = {**remembered, **{step.outer_step: step for step in seen.steps}}
        refusals = tuple(seen.refusals) or await self._remembering.refusals(run)
        done = await self._remembering.contributions(run)
        return RunDetail(
            run=view,
            num_parameters=num_parameters(seen.trainers.records),
            steps=downsampled([steps[outer_step] for outer_step in sorted(steps)], MAX_STEPS),
            refusals=refusals[:MAX_REFUSALS],
            contributors=contributors(seen.facts, done, self._names(), seen.since, self._look.at),
            checkpoint=await self._files(run),
        )

    async def _remembered(self, run: str) -> RunDetail | None:
        """What the history knows of a run that was not there since this dashboard started."""
        steps = await self._remembering.steps(run)
        if not steps:
            return None
        facts = RunFacts(run=run, file=None, trainers=Listed(records={}, ages_s={}), steps=steps)
        done = await self._remembering.contributions(run)
        return RunDetail(
            run=remembered_view(facts, self._look.at),
            num_parameters=None,
            steps=steps,
            refusals=await self._remembering.refusals(run),
            contributors=contributors(facts, done, self._names(), {}, self._look.at),
            checkpoint=await self._files(run),
        )

    async def node(self, peer_id: str) -> NodeDetail | None:
        view = self._nodes.get(peer_id)
        if view is None:
            return None
        presence = await self._remembering.presence(peer_id)
        done = await self._remembering.contribution(peer_id)
        return NodeDetail(
            node=view,
            presence=presence,
            uptime_share=uptime_share(presence, self._look.at),
            tokens_trained=done.tokens,
            rounds=done.rounds,
            serving=self._serving(peer_id),
            training=await self._training(peer_id),
        )

    async def series(self, name: str, hours: float) -> Series | None:
        return await self._remembering.series(name, hours)

    async def wait_changed(self) -> None:
        await self._changed.wait()

    def _serving(self, peer_id: str) -> tuple[ServerView, ...]:
        return tuple(
            seen_now(server_view(peer_id, listed.records[peer_id]), self._names(), listed.age_s(peer_id))
            for _, listed in sorted(self._look.models.items())
            if peer_id in listed.records
        )

    async def _training(self, peer_id: str) -> tuple[ContributorView, ...]:
        name, at = self._names().get(peer_id), self._look.at
        found = []
        for seen in tuple(self._runs.runs.values()):
            if (record := seen.trainers.records.get(peer_id)) is not None:
                by_peer = {each.peer_id: each for each in await self._remembering.contributions(seen.run)}
                done = by_peer.get(peer_id)
                found.append(contributor_view(peer_id, seen.run, record, done, name=name, since=seen.since, at=at))
        return tuple(found)

    def _names(self) -> dict[str, str]:
        return {peer_id: node.name for peer_id, node in self._nodes.items()}

    async def _files(self, run: str) -> tuple[CheckpointFile, ...]:
        return () if self._checkpoints is None else await asyncio.to_thread(self._checkpoints.files, run)
