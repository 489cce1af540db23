"""Holds what a dashboard has seen of one run: its members' newest records, its committed steps, refusals and bans.

Takes in what it is given, makes views of it, and records them in the history. Asks nobody: see `run_follower`, whose
task owns it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from swarm.network.link_diagnosis import LinkWatch
from swarm.training.evidence.bans import Ban
from swarm.training.outside.observer import CommittedStep, Observer
from swarm.training.run.signed_run import SignedRun
from swarm_protocol.identity import short_id
from swarm_protocol.records import RoundReport, TrainerRecord, ValidationReport

from swarm_node.dashboard.history.facts import StepFact
from swarm_node.dashboard.history.history import DashboardHistory
from swarm_node.dashboard.run_views import Names, RunEnd, RunFacts, active, end_of, num_parameters, step_view
from swarm_node.dashboard.views import RefusalView, StepView
from swarm_node.formatting import shown
from swarm_node.network_snapshot import Listed

MAX_STEPS = 500
MAX_REFUSALS = 100
MAX_OPEN_STEPS = 8
"""The newest steps whose members may still report measurements: their records come seconds after a step."""

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class FollowedRun:
    """One run, as far as this dashboard has seen it."""

    run_id: str
    trainers: Listed[TrainerRecord]
    seen_at: float
    observer: Observer | None = None
    file: SignedRun | None = None
    steps: deque[StepView] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    refusals: deque[RefusalView] = field(default_factory=lambda: deque(maxlen=MAX_REFUSALS))
    bans: tuple[Ban, ...] = ()
    ask_for_bans_at: float = 0.0
    since: dict[str, float] = field(default_factory=dict)
    committed: dict[int, CommittedStep] = field(default_factory=dict)
    newest: CommittedStep | None = None
    end: RunEnd | None = None
    reports: dict[int, dict[str, RoundReport]] = field(default_factory=dict)
    reported: dict[str, int] = field(default_factory=dict)
    validation: dict[int, dict[str, float]] = field(default_factory=dict)
    ask_again_at: float = 0.0
    has_recalled: bool = False
    last_problem: str = ""
    links: LinkWatch = field(default_factory=LinkWatch)
    job: asyncio.Task[None] | None = None

    @property
    def facts(self) -> RunFacts:
        is_proved = (
            self.file is not None and bool(self.steps) and self.steps[-1].outer_step >= self.file.config.outer_steps
        )
        end = None if is_proved else self.end
        return RunFacts(
            run=self.run_id,
            file=self.file,
            trainers=self.trainers,
            steps=tuple(self.steps),
            end=end,
            slow_links=self.links.named,
            endorsed_step=self.endorsed_step,
            newest=self.newest,
            roster=self.observer.roster if self.observer else (),
        )

    @property
    def endorsed_step(self) -> int | None:
        """The newest outer step that the run's author has endorsed; 0: none was seen, None: its file is not known."""
        if self.observer is None:
            return None
        endorsement = self.observer.endorsement
        return endorsement.outer_step if endorsement else 0

    def recall(self, steps: Sequence[StepView], refusals: Sequence[RefusalView]) -> None:
        """Take what an earlier dashboard has seen. Members report their newest step again to a new one."""
        self.steps.extend(steps)
        recalled = {_key(refusal): refusal for refusal in refusals}
        news = [refusal for refusal in self.refusals if _key(refusal) not in recalled]
        self.refusals = deque([*news, *recalled.values()], maxlen=MAX_REFUSALS)

    def take_records(self, trainers: Listed[TrainerRecord], names: Names, at: float, history: DashboardHistory) -> None:
        """Take in what members say in their records."""
        trainers = _admitted(self.file, trainers)
        self.trainers, self.seen_at = trainers, at
        self.since = {peer_id: self.since.get(peer_id, at) for peer_id in active(trainers.records)}
        if self.file is not None and active(trainers.records):
            group = self.committed[max(self.committed)].group if self.committed else ()
            self.end = end_of(self.file, group, trainers.records)
        self.reported = {peer_id: step for peer_id, step in self.reported.items() if peer_id in trainers.records}
        changed = {
            record.report.outer_step
            for peer_id, record in trainers.records.items()
            if record.report is not None and self._take_report(peer_id, record.report, names, at, history)
        }
        self.links.update(
            {peer_id: each.report for peer_id, each in trainers.records.items() if each.report is not None}
        )
        changed |= {
            record.validation.outer_step
            for peer_id, record in trainers.records.items()
            if record.validation is not None and self._take_validation(peer_id, record.validation)
        }
        for outer_step in sorted(changed & self.committed.keys()):
            self._show_step(outer_step, at, history)

    def _take_report(
        self, peer_id: str, report: RoundReport, names: Names, at: float, history: DashboardHistory
    ) -> bool:
        """Return whether the report is new."""
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
            history.record_refusal(self.run_id, view)
        reports = self._open_step(self.reports, report.outer_step)
        if reports is None:
            return False
        reports[peer_id] = report
        return True

    def take_steps(self, committed: Sequence[CommittedStep], now: float, history: DashboardHistory) -> None:
        """Take in steps that the run has committed since the last ones."""
        since = self.steps[-1].at if self.steps else now
        for number, step in enumerate(committed, 1):
            self.committed[step.outer_step] = self.newest = step
            # no certificate says when each of the steps since the last poll was committed
            self._show_step(step.outer_step, since + (now - since) * number / len(committed), history)
        while len(self.committed) > MAX_OPEN_STEPS:
            del self.committed[min(self.committed)]

    def _show_step(self, outer_step: int, at: float, history: DashboardHistory) -> None:
        """Put the step among the others, in place of its earlier view."""
        committed = self.committed[outer_step]
        known = next((step for step in self.steps if step.outer_step == outer_step), None)
        earlier = [step for step in self.steps if step.outer_step < outer_step]
        view = step_view(
            committed,
            earlier[-1] if earlier else None,
            self.reports.get(outer_step, {}),
            self.validation.get(outer_step, {}),
            num_parameters(self.trainers.records),
            known.at if known else at,
        )
        later = [step for step in self.steps if step.outer_step > outer_step]
        self.steps = deque([*earlier, view, *later], maxlen=MAX_STEPS)
        history.record_step(
            StepFact(
                run=self.run_id,
                group=committed.group,
                # a certificate says what the group did together, so each member gets the same part
                tokens=dict.fromkeys(committed.group, committed.num_tokens // max(1, committed.num_trainers)),
                step=view,
            )
        )

    def _take_validation(self, peer_id: str, report: ValidationReport) -> bool:
        """Return whether the loss is new, and may belong to a step that is shown."""
        losses = self._open_step(self.validation, report.outer_step)
        if losses is None:
            return False
        is_news = losses.get(peer_id) != report.loss
        losses[peer_id] = report.loss
        return is_news

    def _open_step(self, by_step: dict[int, dict[str, T]], outer_step: int) -> dict[str, T] | None:
        """Return what members reported of a step; None for one that is too old or too far ahead. Bounds `by_step`."""
        newest = max(self.committed, default=0)
        if newest and not newest - MAX_OPEN_STEPS < outer_step <= newest + MAX_OPEN_STEPS:
            return None
        reports = by_step.setdefault(outer_step, {})
        while len(by_step) > 2 * MAX_OPEN_STEPS:
            del by_step[min(by_step)]
        return reports


def _admitted(file: SignedRun | None, trainers: Listed[TrainerRecord]) -> Listed[TrainerRecord]:
    """Return the trainers that the run admits: anyone can announce that it trains it."""
    if file is None or not file.config.only_named:
        return trainers
    records = {peer_id: trainers.records[peer_id] for peer_id in file.config.only_named if peer_id in trainers.records}
    return Listed(records=records, ages_s=trainers.ages_s)


def _key(refusal: RefusalView) -> tuple[int, str, str]:
    return refusal.outer_step, refusal.peer_id, refusal.by_peer_id
