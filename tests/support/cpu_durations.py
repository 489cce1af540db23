"""`--cpu-durations N`: the tests and the files that take most time of the processor, and the sum of all.

A test's time is that of its worker process and of the child processes that have ended and been waited for meanwhile,
with its fixtures. Where other programs run beside the tests it tells more than the time on the clock. What forks of a
fork server take is not in it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator

import pytest

PROPERTY = "cpu_s"


def cpu_s() -> float:
    return sum(os.times()[:4])


class CpuDurations:
    """A plugin. Workers of xdist measure; the process that they report to adds up."""

    def __init__(self, num_shown: int) -> None:
        self._num_shown = num_shown
        self._began_s = 0.0
        self._tests: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, object, object]:
        self._began_s = cpu_s()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            item.user_properties.append((PROPERTY, cpu_s() - self._began_s))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self._tests[report.nodeid] += dict(report.user_properties).get(PROPERTY, 0.0)  # type: ignore[assignment, operator]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        files: Counter[str] = Counter()
        for name, seconds in self._tests.items():
            files[name.partition("::")[0]] += seconds
        terminalreporter.section(f"{self._tests.total():.1f} s of the processor in {len(self._tests)} tests")
        for counted in (files, self._tests):
            for name, seconds in counted.most_common(self._num_shown):
                terminalreporter.write_line(f"{seconds:8.2f} s  {name}")
