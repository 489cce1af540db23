"""Holds what the parts of one step share: the state of its state machine, the events that wait, its tasks and its log.

`RoundDriver` is the step, and alone changes its state. The other parts of the driver read the state, feed events, and
start their tasks here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from swarm.training.evidence.convictions import Convictions
from swarm.training.member.interval_loop import IntervalLoop
from swarm.training.member.progress_reports import DOWNWEIGHTED, RoundLog
from swarm.training.round.round_events import AttemptLeft, Event, GiveUp, Proven, Reported, Sighted, Voted
from swarm.training.round.round_state import RoundSetup, RoundState
from swarm.training.state.run_context import RunContext

MAX_EVENTS = 4096
"""Maximum events that wait, as they do while the disk is full. Beyond it, what peers tell is dropped: they tell it
again, or are asked again."""


@dataclass(kw_only=True, eq=False)
class CurrentStep:
    """One step of the member of `context`. `state` is the newest one of the state machine.

    `intervals` makes this member's contribution. `background` outlives the step. `on_abort` is called with each failed
    attempt, and with what else keeps this member from the step.
    """

    context: RunContext
    state: RoundState
    intervals: IntervalLoop
    convictions: Convictions
    background: asyncio.TaskGroup
    on_abort: Callable[[GiveUp], None]
    log: RoundLog = field(default_factory=RoundLog)
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    _tasks: dict[asyncio.Task[None], bool] = field(default_factory=dict)  # whether it ends with the attempt
    _group: asyncio.TaskGroup | None = None

    @property
    def setup(self) -> RoundSetup:
        return self.state.setup

    def feed(self, event: Event) -> None:
        is_told = isinstance(event, Sighted | Reported | Voted | AttemptLeft | Proven)
        if not is_told or self.events.qsize() < MAX_EVENTS:
            self.events.put_nowait(event)

    def hurry(self) -> None:
        """End this member's interval."""
        self.intervals.hurry(self.setup.step)

    def note_reduced(self, kept_shares: Mapping[str, float], where: str) -> None:
        """Record the peers whose weight an aggregation reduced notably, each with the share that it keeps."""
        for peer, kept in kept_shares.items():
            if peer != self.setup.me:  # the owners of the other parts say so, too: nobody refuses its own contribution
                how = f"keeps {kept:.0%} of its weight" if kept else "is left out"
                self.log.refuse(peer, f"its contribution {how} {where}", DOWNWEIGHTED)

    def open(self, group: asyncio.TaskGroup) -> None:
        """Let tasks start in `group`, until `end_tasks`. Before and after that, none is started."""
        self._group = group

    def start(self, work: Coroutine[Any, Any, None], name: str, *, in_attempt: bool = False) -> None:
        """Start a task of the step, or `in_attempt` one that ends with the attempt."""
        if self._group is None:
            work.close()
            return
        task = self._group.create_task(work, name=name)
        self._tasks[task] = in_attempt
        task.add_done_callback(self._tasks.pop)

    def end_attempt(self) -> None:
        for task, in_attempt in self._tasks.items():
            if in_attempt:
                task.cancel()

    def end_tasks(self) -> None:
        self._group = None
        for task in self._tasks:
            task.cancel()
