"""Follows runs from outside: their signed files, the steps that they commit, what their members measure and refuse,
and whom they ban. `followed_run` takes in what is found.

Each run has one job at a time, which asks its members; a slow one holds up no other and no poll. A file is believed if
it is the one that the run's id names, a step if its certificate holds (see `swarm.training.outside.observer`). Owned by
the collector's task, which gives the task group that the jobs run in.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.training.outside.observer import Observer
from swarm.training.run.signed_run import SignedRun
from swarm_protocol.errors import SwarmError
from swarm_protocol.records import TrainerRecord

from swarm_node.dashboard.followed_run import FollowedRun
from swarm_node.dashboard.history.history import DashboardHistory
from swarm_node.dashboard.run_views import Names, active
from swarm_node.network_snapshot import Listed

MAX_RUNS = 48
"""Runs that are kept, with those that nobody trains any more; the poller bounds how many are followed."""

RETRY_FILE_S = 30.0
ASK_FOR_BANS_S = 10.0
MAX_MEMBERS_ASKED = 4
"""Members that are asked for the file before the next pause."""

FetchRun = Callable[[Network, str, str], Awaitable[SignedRun]]
"""`fetch(network, peer_id, run_id)`: the run's file from one member, checked against its id. Raises SwarmError."""

logger = logging.getLogger(__name__)


class RunFollower:
    """The runs that were polled, by run id."""

    def __init__(
        self, network: Network, membership: Membership, history: DashboardHistory, *, fetch: FetchRun
    ) -> None:
        self._network = network
        self._membership = membership
        self._history = history
        self._fetch = fetch
        self.runs: dict[str, FollowedRun] = {}

    def take(
        self, tasks: asyncio.TaskGroup, runs: Mapping[str, Listed[TrainerRecord]], names: Names, at: float
    ) -> None:
        """Take in what the records say, and start to ask the members what is new."""
        for run_id, trainers in runs.items():
            run = self.runs.setdefault(run_id, FollowedRun(run_id=run_id, trainers=trainers, seen_at=at))
            run.take_records(trainers, names, at, self._history)
        for run_id, run in self.runs.items():
            if run_id not in runs:
                run.trainers = Listed(records={}, ages_s={})
            elif run.job is None or run.job.done():
                run.job = tasks.create_task(self._follow(run), name=f"follow run {run_id}")
        while len(self.runs) > MAX_RUNS:
            oldest = min(self.runs.values(), key=lambda run: run.seen_at)
            if oldest.job is not None:
                oldest.job.cancel()
            del self.runs[oldest.run_id]

    async def _follow(self, run: FollowedRun) -> None:
        loop = asyncio.get_running_loop()
        try:
            if not run.has_recalled:
                run.has_recalled = True
                steps = await self._history.steps(run.run_id)
                run.recall(steps, await self._history.refusals(run.run_id))
            if run.observer is None:
                await self._find_file(run)
            if run.observer is not None:
                committed = await run.observer.look(active(run.trainers.records))
                run.take_steps(committed, self._network.now(), self._history)
                if loop.time() >= run.ask_for_bans_at:
                    run.ask_for_bans_at = loop.time() + ASK_FOR_BANS_S
                    run.bans = await run.observer.look_for_bans(active(run.trainers.records))
                run.last_problem = ""
        except SwarmError as error:
            if error.message != run.last_problem:
                logger.warning("cannot see where the run %s is: %s", run.run_id, error.message)
            run.last_problem = error.message
        except Exception:
            logger.exception("the dashboard failed to follow the run %s", run.run_id)

    async def _find_file(self, run: FollowedRun) -> None:
        """Ask a few members, again after a pause if none of them has it. Raises what the last one did."""
        loop = asyncio.get_running_loop()
        if loop.time() < run.ask_again_at:
            return
        run.ask_again_at = loop.time() + RETRY_FILE_S
        failure: SwarmError | None = None
        members = active(run.trainers.records)
        # those with a digest have the state, so they have had the file for longest
        for peer_id in sorted(members, key=lambda peer_id: (not members[peer_id].digest, peer_id))[:MAX_MEMBERS_ASKED]:
            try:
                signed = await self._fetch(self._network, peer_id, run.run_id)
            except SwarmError as error:
                failure = error
                continue
            run.observer = Observer(self._network, self._membership, signed)
            run.file = signed
            return
        if failure is not None:
            raise failure
