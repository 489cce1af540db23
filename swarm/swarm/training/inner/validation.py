"""Measures the committed state on held-out data: at the run's start and end, and every `validation_interval` steps.

All members hold the same state and the same held-out data, so all measure the same loss, up to their devices' rounding.
The measurement takes a turn in the thread that trains. Owned by `trainer`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from swarm_protocol import limits
from swarm_protocol.errors import RoundError
from swarm_protocol.records import ValidationReport

from swarm.training.inner.interval import Intervals
from swarm.training.member.trainer_events import Validated
from swarm.training.run.run_config import RunConfig
from swarm.training.state.replica_state import ReplicaState

logger = logging.getLogger(__name__)

VALIDATION_BATCHES = 4


class Validating:
    """`newest` is the last measurement that is a number. `on_done` hears of each in the event loop."""

    def __init__(self, config: RunConfig, intervals: Intervals, on_done: Callable[[Validated], None]) -> None:
        self.newest: ValidationReport | None = None
        self._config = config
        self._intervals = intervals
        self._on_done = on_done

    async def now(self, state: ReplicaState) -> None:
        """Raises what the inner loop raises."""
        self._done(state.outer_step, await self._intervals.validated(state.theta_N, VALIDATION_BATCHES))

    def soon(self, state: ReplicaState, tasks: asyncio.TaskGroup) -> None:
        """Measure `state`, if it is due, ahead of all that the thread that trains is asked for later."""
        every = self._config.validation_interval
        if every and state.outer_step % every == 0 and state.outer_step < self._config.outer_steps:
            loss = self._intervals.validated(state.theta_N, VALIDATION_BATCHES)
            tasks.create_task(self._tell(state.outer_step, loss), name="validate")

    async def _tell(self, step: int, loss: asyncio.Future[float]) -> None:
        try:
            self._done(step, await loss)
        except RoundError as error:
            logger.warning("the state of outer step %d could not be validated: %s", step, error)

    def _done(self, step: int, loss: float) -> None:
        if abs(loss) <= limits.MAX_LOSS:
            self.newest = ValidationReport(outer_step=step, loss=loss)
        self._on_done(Validated(step=step, loss=loss))
