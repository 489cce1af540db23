"""Follows runs from outside: their signed files, committed steps, their members' measurements and refusals, and bans.

Each run has at most one job at a time, which asks members; a slow job delays no other run and no poll. A file is
accepted if the run's id names it, and a step if its certificate is valid (see `swarm.training.outside.observer`). The
collector's task owns the state and provides the task group for the jobs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from swarm.network.interface import Network
from swarm.network.link_diagnosis import LinkWatch
from swarm.network.membership import Membership
from swarm.training.evidence.bans import Ban
from swarm.training.outside.observer import CommittedStep, Observer
from swarm.training.run.signed_run import SignedRun
from swarm.training.trainer_events import OtherHistory
from swarm_protocol.errors import SwarmError
from swarm_protocol.identity import short_id
from swarm_protocol.records import RoundReport, TrainerRecord, ValidationReport

from swarm_node.dashboard.history.history import DashboardHistory
from swarm_node.dashboard.history.reader import MAX_REFUSALS, MAX_RUNS, MAX_STEPS
from swarm_node.dashboard.history.recorder import RefusalFact, StepFact
from swarm_node.dashboard.run_views import Names, RunEnd, RunFacts, active, end_of, num_parameters, step_view
from swarm_node.dashboard.views import RefusalView, StepView
from swarm_node.formatting import shown
from swarm_node.network_snapshot import Listed

RETRY_FILE_S = 30.0
ASK_FOR_BANS_S = 10.0
MAX_MEMBERS_ASKED = 4
"""Members that are asked for the file before the next pause."""

FetchRun = Callable[[Network, str, str], Awaitable[SignedRun]]
"""`fetch(network, peer_id, run_id)` returns the run's file from one member, checked against its id. Raises
SwarmError."""

MAX_OPEN_STEPS = 8
"""The newest steps for which members may still report measurements. Their records come seconds after a step."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class OpenStep:
    """A step for which members may still report measurements. `committed` is None until its proof was seen, and
    `losses` are on held-out data. Both dictionaries are by peer id."""

    committed: CommittedStep | None = None
    reports: dict[str, RoundReport] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class FollowedRun:
    """One run as this dashboard has seen it: its members' newest records, its steps, refusals and bans.

    It records everything that it takes in in the `history`. It asks no peer.
    """

    run_id: str
    history: DashboardHistory
    trainers: Listed[TrainerRecord]
    seen_at: float
    observer: Observer | None = None
    steps: deque[StepView] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    refusals: deque[RefusalView] = field(default_factory=lambda: deque(maxlen=MAX_REFUSALS))
    bans: tuple[Ban, ...] = ()
    other_history: OtherHistory | None = None
    ask_for_bans_at: float = 0.0
    since: dict[str, float] = field(default_factory=dict)
    newest: CommittedStep | None = None
    open_steps: dict[int, OpenStep] = field(default_factory=dict)
    end: RunEnd | None = None
    reported: dict[str, int] = field(default_factory=dict)  # each member's last report, by outer step
    ask_again_at: float = 0.0
    has_recalled: bool = False
    is_lost: bool = False  # its members have not answered since the last step that was seen
    links: LinkWatch = field(default_factory=LinkWatch)
    job: asyncio.Task[None] | None = None

    @property
    def file(self) -> SignedRun | None:
        """The run's signed file; None until a member gave it."""
        return self.observer.run if self.observer else None

    @property
    def facts(self) -> RunFacts:
        is_proved = self.file and self.steps and self.steps[-1].outer_step >= self.file.config.outer_steps
        return RunFacts(
            run=self.run_id,
            file=self.file,
            trainers=self.trainers,
            steps=tuple(self.steps),
            end=None if is_proved else self.end,
            slow_links=self.links.named,
            endorsed_step=self.endorsed_step,
            newest=self.newest,
            roster=self.observer.roster if self.observer else (),
            other_history=self.other_history,
            digests=self.observer.digests if self.observer else (),
        )

    @property
    def endorsed_step(self) -> int | None:
        """The newest outer step that the run's author has endorsed. 0: none was seen. None: the run's file is not
        known."""
        if self.observer is None:
            return None
        endorsement = self.observer.endorsement
        return endorsement.outer_step if endorsement else 0

    def recall(self, steps: Sequence[StepView], refusals: Sequence[RefusalView]) -> None:
        """Add what an earlier dashboard has seen. Refusals that members report again are not duplicated."""
        self.steps.extend(steps)
        recalled = {_key(refusal): refusal for refusal in refusals}
        news = [refusal for refusal in self.refusals if _key(refusal) not in recalled]
        self.refusals = deque([*news, *recalled.values()], maxlen=MAX_REFUSALS)

    def take_records(self, trainers: Listed[TrainerRecord], names: Names, at: float) -> None:
        """Take in what members say in their records."""
        trainers = _admitted(self.file, trainers)
        self.trainers, self.seen_at = trainers, at
        self.since = {peer_id: self.since.get(peer_id, at) for peer_id in active(trainers.records)}
        if self.file is not None and active(trainers.records):
            self.end = end_of(self.file, self.newest.group if self.newest else (), trainers.records)
        self.reported = {peer_id: step for peer_id, step in self.reported.items() if peer_id in trainers.records}
        reports = {peer_id: each.report for peer_id, each in trainers.records.items() if each.report is not None}
        self.links.update(reports)
        changed = {each.outer_step for peer_id, each in reports.items() if self._take_report(peer_id, each, names, at)}
        for peer_id, record in trainers.records.items():
            if record.validation is not None and self._take_validation(peer_id, record.validation):
                changed.add(record.validation.outer_step)
        for outer_step in sorted(changed & self.open_steps.keys()):
            self._show_step(outer_step, at)

    def _take_report(self, peer_id: str, report: RoundReport, names: Names, at: float) -> bool:
        """Take in a member's report. Return whether it is new and belongs to a step that is still open."""
        if self.reported.get(peer_id) == report.outer_step:
            return False
        self.reported[peer_id] = report.outer_step
        for refusal in report.refused:
            name = names.get(refusal.peer_id) or short_id(refusal.peer_id)
            reason = shown(refusal.reason)
            view = RefusalView.of(
                refusal, outer_step=report.outer_step, at=at, name=name, by_peer_id=peer_id, reason=reason
            )
            self.refusals.appendleft(view)
            self.history.record(RefusalFact(self.run_id, view))
        step = self._open_step(report.outer_step)
        if step is not None:
            step.reports[peer_id] = report
        return step is not None

    def take_steps(self, committed: Sequence[CommittedStep], now: float) -> None:
        """Take in the steps that the run has committed since the last call."""
        since = self.steps[-1].at if self.steps else now
        for number, step in enumerate(committed, 1):
            self.newest = step
            self.open_steps.setdefault(step.outer_step, OpenStep()).committed = step
            # certificates do not say when steps were committed: spread them evenly over the time since the last one
            self._show_step(step.outer_step, since + (now - since) * number / len(committed))
        self.open_steps = {number: each for number, each in self.open_steps.items() if self._is_open(number)}

    def _show_step(self, outer_step: int, at: float) -> None:
        """Insert the view of a step in order once it is committed, replacing an earlier view."""
        step = self.open_steps[outer_step]
        if (committed := step.committed) is None:
            return
        known = next((each for each in self.steps if each.outer_step == outer_step), None)
        earlier = [each for each in self.steps if each.outer_step < outer_step]
        before = earlier[-1] if earlier else None
        parameters = num_parameters(self.trainers.records)
        view = step_view(committed, before, step.reports, step.losses, parameters, known.at if known else at)
        later = [each for each in self.steps if each.outer_step > outer_step]
        self.steps = deque([*earlier, view, *later], maxlen=MAX_STEPS)
        file = self.file.text if self.file else ""
        self.history.record(StepFact(run=self.run_id, group=committed.group, step=view, file=file))

    def _take_validation(self, peer_id: str, report: ValidationReport) -> bool:
        """Take in a held-out loss. Return whether it is new and belongs to a step that is still open."""
        step = self._open_step(report.outer_step)
        if step is None or step.losses.get(peer_id) == report.loss:
            return False
        step.losses[peer_id] = report.loss
        return True

    def _open_step(self, outer_step: int) -> OpenStep | None:
        """Return what members report of a step, or None if the step is too old or too far ahead."""
        if not self._is_open(outer_step):
            return None
        step = self.open_steps.setdefault(outer_step, OpenStep())
        while len(self.open_steps) > 2 * MAX_OPEN_STEPS:
            del self.open_steps[min(self.open_steps)]
        return step

    def _is_open(self, outer_step: int) -> bool:
        return self.newest is None or -MAX_OPEN_STEPS < outer_step - self.newest.outer_step <= MAX_OPEN_STEPS


def _admitted(file: SignedRun | None, trainers: Listed[TrainerRecord]) -> Listed[TrainerRecord]:
    """Return the trainers that the run admits, since anyone can announce that it trains a run."""
    if file is None or not file.config.only_named:
        return trainers
    records = {peer_id: trainers.records[peer_id] for peer_id in file.config.only_named if peer_id in trainers.records}
    return Listed(records=records, ages_s=trainers.ages_s)


def _key(refusal: RefusalView) -> tuple[int, str, str]:
    return refusal.outer_step, refusal.peer_id, refusal.by_peer_id


class RunFollower:
    """The runs that were polled, by run id: at most MAX_RUNS, including runs that nobody trains any more. The poller
    limits how many are followed."""

    def __init__(self, network: Network, membership: Membership, history: DashboardHistory, *, fetch: FetchRun) -> None:
        self._network = network
        self._membership = membership
        self._history = history
        self._fetch = fetch
        self.runs: dict[str, FollowedRun] = {}

    def take(
        self, tasks: asyncio.TaskGroup, runs: Mapping[str, Listed[TrainerRecord]], names: Names, at: float
    ) -> None:
        """Take in what the records say, and start jobs that ask the members for news."""
        for run_id, trainers in runs.items():
            run = self.runs.get(run_id)
            if run is None:
                run = FollowedRun(run_id=run_id, history=self._history, trainers=trainers, seen_at=at)
                self.runs[run_id] = run
            run.take_records(trainers, names, at)
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
                run.take_steps(committed, self._network.now())
                if loop.time() >= run.ask_for_bans_at:
                    run.ask_for_bans_at = loop.time() + ASK_FOR_BANS_S
                    members = active(run.trainers.records)
                    run.other_history = await run.observer.look_for_other_history(members)
                    run.bans = await run.observer.look_for_bans(members)
                run.is_lost = run.is_lost and not committed
        except SwarmError as error:
            if not run.is_lost:
                logger.warning("cannot see where the run %s is: %s", run.run_id, error.message)
            run.is_lost = True
        except Exception:
            logger.exception("the dashboard failed to follow the run %s", run.run_id)

    async def _find_file(self, run: FollowedRun) -> None:
        """Ask a few members for the file, and again after a pause. Raises the last member's error if none has it."""
        loop = asyncio.get_running_loop()
        if loop.time() < run.ask_again_at:
            return
        run.ask_again_at = loop.time() + RETRY_FILE_S
        failure: SwarmError | None = None
        members = active(run.trainers.records)
        # members with a digest have the state, so they have had the file for longest
        for peer_id in sorted(members, key=lambda peer_id: (not members[peer_id].digest, peer_id))[:MAX_MEMBERS_ASKED]:
            try:
                signed = await self._fetch(self._network, peer_id, run.run_id)
            except SwarmError as error:
                failure = error
                continue
            run.observer = Observer(self._network, self._membership, signed)
            return
        if failure is not None:
            raise failure
