"""Finds the smallest number of nodes of one class with which a scenario meets the goals of its [plan].

The search simulates the scenario with different numbers of this class, the same numbers of the other classes and the
same seed. It assumes that goals which a number meets are met by each larger number, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from swarm.simulation.report import ANSWERED, COVERED, TOKENS_PER_S, UTILIZATION, Figures, Report
from swarm.simulation.scenario import Plan, Scenario

PRECISION = 0.05
"""The search ends when the smallest number that is enough and the largest that is not differ by at most this share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One simulation of the search. `missed` has the goals that were missed with `num_nodes` of the class, with the
    figures that were reached instead."""

    num_nodes: int
    report: Report
    missed: Mapping[str, object]


def plan_capacity(scenario: Scenario, run: Callable[[Scenario], Report], on_try: Callable[[Try], None]) -> Report:
    """Return the report of the smallest number that is enough, or of the largest number tried if none is. Its section
    "Plan" lists all tries. `on_try` is called after each."""
    assert scenario.plan is not None
    goals, tries = scenario.plan, list[Try]()
    for num_nodes in _numbers(scenario, goals, tries):
        report = run(with_number(scenario, num_nodes))
        tries.append(Try(num_nodes=num_nodes, report=report, missed=missed_goals(goals, report)))
        on_try(tries[-1])
    enough = [each for each in tries if not each.missed]
    best = min(enough, key=lambda each: each.num_nodes) if enough else max(tries, key=lambda each: each.num_nodes)
    return replace(best.report, sections={"Plan": _figures(goals, tries, enough), **best.report.sections})


def with_number(scenario: Scenario, num_nodes: int) -> Scenario:
    """Return the scenario with `num_nodes` of the planned class and unchanged numbers of the others."""
    assert scenario.plan is not None
    each_share = scenario.nodes / sum(kind.share for kind in scenario.classes)
    classes = tuple(
        replace(kind, share=num_nodes if kind.name == scenario.plan.vary else kind.share * each_share)
        for kind in scenario.classes
    )
    return replace(scenario, classes=classes, nodes=max(2, round(sum(kind.share for kind in classes))))


def missed_goals(goals: Plan, report: Report) -> dict[str, object]:
    """Return the figures of `report` that are unknown or below the plan's goals. Goals of 0 are ignored, and so are
    those for a section that the report does not have."""
    serving, training = report.sections.get("Serving"), report.sections.get("Training")
    figures: list[tuple[Figures | None, str, float]] = [
        (serving, ANSWERED, goals.share_answered),
        (serving, COVERED, goals.share_covered),
        (training, UTILIZATION, goals.utilization),
        (serving, TOKENS_PER_S, goals.answer_tokens_per_s),
    ]
    reached = [(name, _median(part[name]), goal) for part, name, goal in figures if part is not None and goal]
    return {name: value for name, value, goal in reached if not isinstance(value, int | float) or value < goal}


def _median(figure: object) -> object:
    """Return a figure, or its median if it is a distribution."""
    return figure.get("median") if isinstance(figure, dict) else figure


def _numbers(scenario: Scenario, goals: Plan, tries: list[Try]) -> Iterator[int]:
    """Yield the next number to try, given the `tries` so far: numbers are doubled until one is enough, and then the
    interval between too few and enough is halved."""
    share = next(kind.share for kind in scenario.classes if kind.name == goals.vary)
    first = round(scenario.nodes * share / sum(kind.share for kind in scenario.classes))
    number = min(goals.most, max(1, first))
    too_few, enough = 0, goals.most + 1  # the latter stands for no number that is enough
    while True:
        yield number
        if tries[-1].missed:
            too_few = number
        else:
            enough = number
        if enough - too_few <= max(1, PRECISION * enough) or too_few == goals.most:
            return
        number = min(goals.most, 2 * number) if enough > goals.most else (too_few + enough) // 2


def _figures(goals: Plan, tries: list[Try], enough: list[Try]) -> Figures:
    fewest = min((each.num_nodes for each in enough), default=None)
    return {
        f"fewest {goals.vary} nodes that are enough": fewest if fewest is not None else f"more than {goals.most}",
        **{
            f"with {each.num_nodes}": "enough"
            if not each.missed
            else "; ".join(f"{name} {_reached(value)}" for name, value in each.missed.items())
            for each in sorted(tries, key=lambda each: each.num_nodes)
        },
    }


def _reached(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "-" if value is None else str(value)
