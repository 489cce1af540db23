"""Follows runs from outside: their signed files, the steps that they commit, what their members measure and refuse.

Each run has one job at a time, which asks its members; a slow one holds up no other and no look. A file is believed if
it is the one that the run's id names, a step if its certificate holds (see `swarm.training.member.observer`). Owned by
the collector's task, which gives the task group that the jobs run in.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.training.member.observer import CommittedStep, Observer
from swarm.training.run.signed_run import SignedRun
from swarm_protocol.errors import SwarmError
from swarm_protocol.records import RoundReport, TrainerRecord, ValidationReport

from swarm_node.dashboard.history.facts import Step
from swarm_node.dashboard.remembering import Remembering
from swarm_node.dashboard.run_views import Names, RunEnd, RunFacts, RunFile, active, end_of, num_parameters, step_view
from swarm_node.dashboard.view_sanitizing import ending, shown
from swarm_node.dashboard.views import RefusalView, StepView
from swarm_node.network_snapshot import Listed

MAX_RUNS = 48
"""Kept, those that nobody trains any more with them; `looking` bounds how many are followed."""

MAX_STEPS = 500
MAX_REFUSALS = 100
MAX_OPEN_STEPS = 8
"""Of the newest, for which members may still tell what they measured: their records follow a step by seconds."""

RETRY_FILE_S = 30.0
MAX_ASKED = 4
"""Members that are asked for the file before the next pause."""

FetchRun = Callable[[Network, str, str], Awaitable[SignedRun]]
"""`fetch(network, peer_id, run_id)`: the run's file from one member, checked against its id. Raises SwarmError."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class RunSeen:
    """One run, as far as this dashboard has seen it."""

    run: str
    trainers: Listed[TrainerRecord]
    seen_at: float
    observer: Observer | None = None
    file: RunFile | None = None
    steps: deque[StepView] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    refusals: deque[RefusalView] = field(default_factory=lambda: deque(maxlen=MAX_REFUSALS))
    since: dict[str, float] = field(default_factory=dict)
    committed: dict[int, CommittedStep] = field(default_factory=dict)
    end: RunEnd | None = None
    reports: dict[int, dict[str, RoundReport]] = field(default_factory=dict)
    reported: dict[str, int] = field(default_factory=dict)
    validation: dict[int, dict[str, float]] = field(default_factory=dict)
    ask_again_at: float = 0.0
    has_remembered: bool = False
    complaint: str = ""
    job: asyncio.Task[None] | None = None

    @property
    def facts(self) -> RunFacts:
        is_proved = self.file is not None and bool(self.steps) and self.steps[-1].outer_step >= self.file.outer_steps
        end = None if is_proved else self.end
        return RunFacts(run=self.run, file=self.file, trainers=self.trainers, steps=tuple(self.steps), end=end)


class RunsSeen:
    """What `look` has been told of, by run id. `num_failures` counts jobs that ended in a way that nobody planned."""

    def __init__(self, network: Network, membership: Membership, remembering: Remembering, *, fetch: FetchRun) -> None:
        self._network = network
        self._membership = membership
        self._remembering = remembering
        self._fetch = fetch
        self.runs: dict[str, RunSeen] = {}
        self.num_failures = 0

    def look(
        self, tasks: asyncio.TaskGroup, runs: Mapping[str, Listed[TrainerRecord]], names: Names, at: float
    ) -> None:
        """Take in what the records say, and set off to ask the members what is new."""
        for run, trainers in runs.items():
            seen = self.runs.get(run) or RunSeen(run=run, trainers=trainers, seen_at=at)
            self.runs[run] = seen
            self._take_records(seen, trainers, names, at)
        for run, seen in self.runs.items():
            if run not in runs:
                seen.trainers = Listed(records={}, ages_s={})
            elif seen.job is None or seen.job.done():
                seen.job = tasks.create_task(self._follow(seen), name=f"follow run {run}")
        self._forget()

    def _forget(self) -> None:
        """Of too many runs those go that have been without members for longest."""
        while len(self.runs) > MAX_RUNS:
            oldest = min(self.runs.values(), key=lambda seen: seen.seen_at)
            if oldest.job is not None:
                oldest.job.cancel()
            del self.runs[oldest.run]

    # --- what the records say ---------------------------------------------------------------------------------------

    def _take_records(self, seen: RunSeen, trainers: Listed[TrainerRecord], names: Names, at: float) -> None:
        seen.trainers, seen.seen_at = trainers, at
        seen.since = {peer_id: seen.since.get(peer_id, at) for peer_id in active(trainers.records)}
        if seen.file is not None and active(trainers.records):
            group = seen.committed[max(seen.committed)].group if seen.committed else ()
            seen.end = end_of(seen.file, group, trainers.records)
        seen.reported = {peer_id: step for peer_id, step in seen.reported.items() if peer_id in trainers.records}
        changed = {
            record.report.outer_step
            for peer_id, record in trainers.records.items()
            if record.report is not None and self._take_report(seen, peer_id, record.report, names, at)
        }
        changed |= {
            record.validation.outer_step
            for peer_id, record in trainers.records.items()
            if record.validation is not None and _take_validation(seen, peer_id, record.validation)
        }
        for outer_step in sorted(changed & seen.committed.keys()):
            self._show_step(seen, outer_step, at)

    def _take_report(self, seen: RunSeen, peer_id: str, report: RoundReport, names: Names, at: float) -> bool:
        """Whether it is news."""
        if seen.reported.get(peer_id) == report.outer_step:
            return False
        seen.reported[peer_id] = report.outer_step
        for refusal in report.refused:
            view = RefusalView(
                outer_step=report.outer_step,
                at=at,
                peer_id=refusal.peer_id,
                name=names.get(refusal.peer_id) or ending(refusal.peer_id),
                by_peer_id=peer_id,
                reason=shown(refusal.reason),
            )
            seen.refusals.appendleft(view)
            self._remembering.refusal(seen.run, view)
        newest = max(seen.committed, default=0)
        if newest and not newest - MAX_OPEN_STEPS < report.outer_step <= newest + MAX_OPEN_STEPS:
            return False
        seen.reports.setdefault(report.outer_step, {})[peer_id] = report
        while len(seen.reports) > 2 * MAX_OPEN_STEPS:
            del seen.reports[min(seen.reports)]
        return True

    # --- what the members prove -------------------------------------------------------------------------------------

    async def _follow(self, seen: RunSeen) -> None:
        try:
            if not seen.has_remembered:
                seen.has_remembered = True
                await self._remember(seen)
            if seen.observer is None:
                await self._find_file(seen)
            if seen.observer is not None:
                committed = await seen.observer.look(active(seen.trainers.records))
                self._take_steps(seen, committed)
                seen.complaint = ""
        except SwarmError as error:
            self._complain(seen, error)
        except Exception:
            self.num_failures += 1
            logger.exception("the dashboard failed to follow the run %s", seen.run)

    def _complain(self, seen: RunSeen, error: SwarmError) -> None:
        if error.message != seen.complaint:
            logger.warning("cannot see where the run %s is: %s", seen.run, error.message)
        seen.complaint = error.message

    async def _remember(self, seen: RunSeen) -> None:
        """What an earlier dashboard has seen. Members tell their newest report again to a new one."""
        seen.steps.extend(await self._remembering.steps(seen.run))
        remembered = {_key(refusal): refusal for refusal in await self._remembering.refusals(seen.run)}
        news = [refusal for refusal in seen.refusals if _key(refusal) not in remembered]
        seen.refusals = deque([*news, *remembered.values()], maxlen=MAX_REFUSALS)

    async def _find_file(self, seen: RunSeen) -> None:
        """Ask a few members, again after a pause if none of them has it. Raises what the last one did."""
        if self._network.now() < seen.ask_again_at:
            return
        seen.ask_again_at = self._network.now() + RETRY_FILE_S
        failure: SwarmError | None = None
        members = active(seen.trainers.records)
        # those with a digest have the state, so they have had the file for longest
        for peer_id in sorted(members, key=lambda peer_id: (not members[peer_id].digest, peer_id))[:MAX_ASKED]:
            try:
                run = await self._fetch(self._network, peer_id, seen.run)
            except SwarmError as error:
                failure = error
                continue
            seen.observer = Observer(self._network, self._membership, run)
            config = run.config
            seen.file = RunFile(
                name=config.name, signed_by=run.peer_id, outer_steps=config.outer_steps, min_group=config.min_group
            )
            return
        if failure is not None:
            raise failure

    def _take_steps(self, seen: RunSeen, committed: list[CommittedStep]) -> None:
        now = self._network.now()
        since = seen.steps[-1].at if seen.steps else now
        for number, step in enumerate(committed, 1):
            seen.committed[step.outer_step] = step
            # when each of those that came since the last look was committed, no certificate says
            self._show_step(seen, step.outer_step, since + (now - since) * number / len(committed))
        while len(seen.committed) > MAX_OPEN_STEPS:
            del seen.committed[min(seen.committed)]

    def _show_step(self, seen: RunSeen, outer_step: int, at: float) -> None:
        """Put the step among the others, in place of what was known of it before."""
        committed = seen.committed[outer_step]
        known = next((step for step in seen.steps if step.outer_step == outer_step), None)
        earlier = [step for step in seen.steps if step.outer_step < outer_step]
        view = step_view(
            committed,
            earlier[-1] if earlier else None,
            seen.reports.get(outer_step, {}),
            seen.validation.get(outer_step, {}),
            num_parameters(seen.trainers.records),
            known.at if known else at,
        )
        later = [step for step in seen.steps if step.outer_step > outer_step]
        seen.steps = deque([*earlier, view, *later], maxlen=MAX_STEPS)
        self._remembering.step(
            Step(
                run=seen.run,
                group=committed.group,
                tokens=_shares(committed),
                **view.model_dump(exclude={"num_members"}),
            )
        )


def _take_validation(seen: RunSeen, peer_id: str, told: ValidationReport) -> bool:
    """Whether it is news, and may be of a step that is shown."""
    newest = max(seen.committed, default=0)
    if newest and not newest - MAX_OPEN_STEPS < told.outer_step <= newest + MAX_OPEN_STEPS:
        return False
    losses = seen.validation.setdefault(told.outer_step, {})
    is_news = losses.get(peer_id) != told.loss
    losses[peer_id] = told.loss
    while len(seen.validation) > 2 * MAX_OPEN_STEPS:
        del seen.validation[min(seen.validation)]
    return is_news


def _key(refusal: RefusalView) -> tuple[int, str, str]:
    return refusal.outer_step, refusal.peer_id, refusal.by_peer_id


def _shares(step: CommittedStep) -> dict[str, int]:
    """A certificate says what the group did together: each gets the same part of it."""
    return dict.fromkeys(step.group, step.num_tokens // len(step.group)) if step.group else {}
