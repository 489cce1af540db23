"""The history as the collector uses it: what it cannot tell now is empty, and why is said in words, never raised."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterable, Mapping
from typing import TypeVar

from swarm_node.dashboard.history.facts import Contribution, HistoryError, Sample, Step, Turnover
from swarm_node.dashboard.history.history import History
from swarm_node.dashboard.view_sanitizing import shown
from swarm_node.dashboard.views import Happening, PresenceView, RefusalView, Series, StepView

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Remembering:
    """`num_failures` counts readings that the history could not answer."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._turnover = Turnover(joins=0, leaves=0)
        self._happenings: tuple[Happening, ...] = ()
        self.num_failures = 0

    @property
    def problem(self) -> str | None:
        """Why the history is in memory only, in one line; None while all is well."""
        problem = self._history.status.problem
        return None if problem is None else shown(str(problem))

    # --- recording, which never waits -------------------------------------------------------------------------------

    def nodes(self, peer_ids: Iterable[str], at: float) -> None:
        """All that are there now."""
        self._history.record_nodes(set(peer_ids), at)

    def samples(self, values: Mapping[str, tuple[str, float | None]], at: float) -> None:
        """Numbers by name, each with its unit; None: not known now."""
        samples = [
            Sample(name=name, unit=unit, value=value) for name, (unit, value) in values.items() if value is not None
        ]
        self._history.record_samples(samples, at)

    def step(self, step: Step) -> None:
        self._history.record_step(step)

    def refusal(self, run: str, refusal: RefusalView) -> None:
        self._history.record_refusal(run, refusal)

    def happening(self, happening: Happening) -> None:
        self._history.record_happening(happening)

    # --- reading ----------------------------------------------------------------------------------------------------

    async def recent(self) -> tuple[Turnover, tuple[Happening, ...]]:
        """Joins and leaves of 24 h and the newest happenings; as they were while the history cannot tell."""
        self._turnover = await self._read(self._history.turnover(), self._turnover)
        self._happenings = await self._read(self._history.happenings(), self._happenings)
        return self._turnover, self._happenings

    async def presence(self, peer_id: str) -> tuple[PresenceView, ...]:
        return await self._read(self._history.presence(peer_id), ())

    async def series(self, name: str, hours: float) -> Series | None:
        return await self._read(self._history.series(name, hours), None)

    async def steps(self, run: str) -> tuple[StepView, ...]:
        return await self._read(self._history.steps(run), ())

    async def refusals(self, run: str) -> tuple[RefusalView, ...]:
        return await self._read(self._history.refusals(run), ())

    async def contributions(self, run: str) -> tuple[Contribution, ...]:
        return await self._read(self._history.contributions(run), ())

    async def contribution(self, peer_id: str) -> Contribution:
        nothing = Contribution(peer_id=peer_id, tokens=0, rounds=0)
        return await self._read(self._history.contribution(peer_id), nothing)

    async def _read(self, reading: Awaitable[T], instead: T) -> T:
        try:
            return await reading
        except HistoryError as error:
            self.num_failures += 1
            logger.warning("the dashboard's history does not answer: %s", error)
            return instead
