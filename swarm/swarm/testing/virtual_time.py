"""Runs a coroutine in virtual time: hours of timeouts and latencies pass in milliseconds, in the same way each time.

`run` uses an ordinary asyncio loop, except that its clock jumps to the next timer when nothing else is left to do: the
loop then asks its selector to wait, and `_Selector` advances the clock instead.
Executor jobs (torch work in `run_in_executor` or `asyncio.to_thread`) run for real, in the loop's thread or in those of
their executors. Their results arrive in the order in which the jobs were submitted, and only when the loop is idle, so
the speed of the machine has no effect. A job takes no virtual time unless `compute_s` or a call of `charge` gives it
some.

Real sockets and child processes do not work: they know nothing of virtual time, and waiting for them counts as a
deadlock. Results may differ between runs if a job in a thread reads what the loop writes meanwhile, or if the loop's
code starts threads itself. A job that needs the result of a later job hangs until the real timeout ends the run.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import Context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

T = TypeVar("T")

JobPlace = Literal["loop", "threads"]
"""The place where executor jobs run: one after the other in the loop's thread, when nothing else is ready, or in
parallel in their executors' threads. Passing a job to a thread and back takes longer than most jobs of tests."""

ComputeCost = Callable[[Callable[..., object]], float]
"""Returns the virtual seconds that a job takes, given the function that it calls, without partials and contexts."""

START_S = 1000.0
"""The time at which a run starts. It is not 0, so that code that takes 0 for "never" fails."""

REAL_TIMEOUT_S = 240.0
"""Longer than a run takes that begins with importing torch on a machine whose cores ten others share."""

NUM_THREADS = 4
"""Number of threads of the default executor: more than a small machine has cores, so that jobs can wait for each
other."""

THREAD_NAME = "virtual-time"

WIND_DOWN_S = 5.0
"""Real seconds that cancelled tasks have to end after a failure."""


class Deadlock(AssertionError):
    """Nothing is ready, no timer is set and no job runs: the tasks in the message would wait for ever."""


class RealTimeout(AssertionError):
    """The run took longer than `real_timeout_s` of real time: a job hangs, or the virtual time never ends."""


class LeftBehind(AssertionError):
    """The coroutine returned while tasks that it had started still ran."""


def run(
    coro: Coroutine[Any, Any, T],
    *,
    real_timeout_s: float = REAL_TIMEOUT_S,
    compute_s: ComputeCost | None = None,
    jobs: JobPlace = "loop",
    watch_tasks: bool = True,
) -> T:
    """Return the result of `coro`. Jobs that wait for other jobs, or may hang, need `jobs="threads"`. Without
    `watch_tasks`, the error of a task that nobody awaits is noticed only when the task is freed, which is cheaper with
    millions of tasks.

    Raises what `coro` raises, Deadlock, RealTimeout, LeftBehind, and an ExceptionGroup of the errors of tasks and
    callbacks that nobody awaited. `real_timeout_s` is checked between callbacks, so a callback that never returns needs
    the test runner's timeout.
    """
    loop = VirtualTimeLoop(real_timeout_s=real_timeout_s, compute_s=compute_s, jobs=jobs, watch_tasks=watch_tasks)
    try:
        try:
            result = loop.run_until_complete(coro)
        except (Deadlock, RealTimeout) as stuck:
            if unretrieved := loop.unretrieved():
                raise ExceptionGroup(str(stuck), unretrieved) from stuck
            raise
        if pending := asyncio.all_tasks(loop):
            raise LeftBehind(f"still running when the coroutine returned: {_described(pending)}")
        if unretrieved := loop.unretrieved():
            raise ExceptionGroup("raised in tasks or callbacks that nobody awaited", unretrieved)
        return result
    finally:
        loop.wind_down()


def charge(seconds: float) -> None:
    """Delay the result of the executor job that calls this by `seconds` of virtual time. Do nothing elsewhere."""
    job: _Job | None = getattr(_this_thread, "job", None)
    if job is not None:
        job.cost_s += seconds


_this_thread = threading.local()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """The loop of `run`, whose `time()` is virtual. Timers for the same time fire in the order in which they were set.

    The timers are in a heap of tuples of its own, which are compared in C: a simulation has a hundred thousand timers.
    """

    _ready: deque[asyncio.Handle]
    _timer_cancelled_count: int
    _clock_resolution: float

    def __init__(
        self, *, real_timeout_s: float, compute_s: ComputeCost | None, jobs: JobPlace, watch_tasks: bool
    ) -> None:
        self._has_threads = jobs == "threads"
        self._watches_tasks = watch_tasks
        self._now_s = START_S
        self._real_deadline_s = time.monotonic() + real_timeout_s
        self._compute_s = compute_s
        self._jobs: set[_Job] = set()
        self._due: list[tuple[int, _Job]] = []  # a heap of the jobs whose cost has passed, by number
        self._num_jobs = itertools.count()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._num_timers = itertools.count()
        self._failed: list[asyncio.Task[Any]] = []
        self._callback_errors: list[Exception] = []
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix=THREAD_NAME)
        self._sockets = _Selector(self)
        super().__init__(self._sockets)
        self.set_exception_handler(self._keep_error)

    def time(self) -> float:
        return self._now_s

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        timer._scheduled = True  # type: ignore[attr-defined]
        heapq.heappush(self._timers, (when, next(self._num_timers), timer))
        return timer

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Without asyncio's checks of threads and callbacks: a simulation has a hundred thousand of these, too."""
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def create_task(self, coro: Any, *, name: object = None, context: Context | None = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=cast("str | None", name), context=context)
        if self._watches_tasks:
            task.add_done_callback(self._keep_failed)
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        job = _Job(next(self._num_jobs), self.create_future(), functools.partial(func, *args))
        if self._has_threads:
            job.running = (executor or self._threads).submit(job.work)
            job.result.add_done_callback(lambda result: result.cancelled() and job.running.cancel())
        self._jobs.add(job)
        if self._compute_s and (cost_s := self._compute_s(_innermost(func, args))):
            self.call_later(cost_s, self._fall_due, job)
        else:
            self._fall_due(job)
        if self._has_threads:  # last, because the job may already be done
            job.running.add_done_callback(lambda _: self._wake())
        return job.result

    def unretrieved(self) -> list[Exception]:
        """Return the exceptions of tasks and callbacks that nobody has retrieved, and mark them as retrieved."""
        task_errors = [task.exception() for task in self._failed if task._log_traceback]
        self._callback_errors, callback_errors = [], self._callback_errors
        return [error for error in task_errors if isinstance(error, Exception)] + callback_errors

    def wind_down(self) -> None:
        """End the tasks and threads that are left, so that a failed run does not affect the next test."""
        self._real_deadline_s = time.monotonic() + WIND_DOWN_S
        try:
            if left := asyncio.all_tasks(self):
                for task in left:
                    task.cancel()
                self.run_until_complete(asyncio.wait(left))
            self.run_until_complete(self.shutdown_asyncgens())
        except (Deadlock, RealTimeout):
            pass  # a task does not end; `run` already raises the failure that led here
        finally:
            self._threads.shutdown(wait=all(job.running.done() for job in self._jobs), cancel_futures=True)
            self.unretrieved()
            self.close()

    def fire(self) -> None:
        """Make the timers ready that are due."""
        timers, until_s = self._timers, self._now_s + self._clock_resolution
        while timers and timers[0][0] < until_s:
            self._ready.append(self._next_timer())

    def _next_timer(self) -> asyncio.TimerHandle:
        timer = heapq.heappop(self._timers)[2]
        timer._scheduled = False  # type: ignore[attr-defined]
        self._timer_cancelled_count -= timer.cancelled()
        return timer

    def _drop_cancelled(self) -> None:
        """Drop the cancelled timers at the top of the heap, or all of them if they are more than half of it."""
        if self._timer_cancelled_count * 2 > len(self._timers):
            self._timers = [each for each in self._timers if not each[2].cancelled()]
            heapq.heapify(self._timers)
            self._timer_cancelled_count = 0
        while self._timers and self._timers[0][2].cancelled():
            self._next_timer()

    def idle(self) -> list[Any]:
        """Deliver the result of a job, wait for one, or advance the time to the next timer. Called when nothing is
        ready. Return the events of sockets."""
        if self._timers and self._timers[0][2].cancelled():
            self._drop_cancelled()
        # threads of jobs wake the loop through a socket
        if self._jobs and self._has_threads and (events := self._sockets.poll(0)):
            return events
        if self._due:
            _, job = self._due[0]
            if not self._has_threads:
                job.run_here(self)
            elif not job.running.done():
                return self._sockets.poll(self._real_deadline_s - time.monotonic())
            heapq.heappop(self._due)
            if job.cost_s:
                self.call_later(job.cost_s, self._fall_due, job)
                job.cost_s = 0.0
            else:
                self._jobs.remove(job)
                job.deliver()
        elif not self._timers:
            raise Deadlock(f"nothing is left to run, but tasks wait: {_described(asyncio.all_tasks(self))}")
        else:
            self._now_s = max(self._now_s, self._timers[0][0])
        return []

    def check_real_time(self) -> None:
        """Raises RealTimeout once the run has taken too long."""
        if time.monotonic() > self._real_deadline_s:
            raise RealTimeout(f"out of real time; still running: {_described(asyncio.all_tasks(self))}")

    def _fall_due(self, job: _Job) -> None:
        heapq.heappush(self._due, (job.number, job))

    def _wake(self) -> None:
        if not self.is_closed():
            self.call_soon_threadsafe(lambda: None)

    def _keep_failed(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task._log_traceback:
            self._failed.append(task)

    def _keep_error(self, _loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        error = context.get("exception")
        self._callback_errors.append(error if isinstance(error, Exception) else RuntimeError(context["message"]))


class _Selector(selectors.DefaultSelector):
    """Asks sockets only when nothing is ready, because a system call takes as long as a pass over the callbacks."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        self._loop.check_real_time()
        events = [] if timeout == 0 else self._loop.idle()
        self._loop.fire()
        return events

    def poll(self, timeout_s: float) -> list[Any]:
        return super().select(timeout_s)


@dataclass(slots=True, eq=False)
class _Job:
    """One executor job. `number` is its position in the order of submission. `running` is the future of the job itself,
    and `result` that of the loop, which is set when the job is done and its cost has passed. `cost_s` is the virtual
    time that it has charged, until the loop delays the result by it.
    """

    number: int
    result: asyncio.Future[Any]
    function: Callable[[], Any]
    running: Future[Any] = field(default_factory=Future)
    cost_s: float = 0.0

    def work(self) -> Any:
        """Run the job in this thread."""
        _this_thread.job = self
        try:
            return self.function()
        finally:
            _this_thread.job = None

    def run_here(self, loop: VirtualTimeLoop) -> None:
        """Run the job in the thread of `loop`, unless it has run. Meanwhile asyncio reports no running loop, as in a
        thread of an executor."""
        if self.running.done():
            return
        asyncio._set_running_loop(None)
        try:
            self.running.set_result(self.work())
        except Exception as error:
            self.running.set_exception(error)
        finally:
            asyncio._set_running_loop(loop)

    def deliver(self) -> None:
        if self.result.done():
            return
        if self.running.cancelled():
            self.result.cancel()
        elif error := self.running.exception():
            self.result.set_exception(error)
        else:
            self.result.set_result(self.running.result())


def _innermost(func: Callable[..., object], args: tuple[Any, ...]) -> Callable[..., object]:
    """Return the function that is called through partials and `contextvars.Context.run`, which `to_thread` adds."""
    while True:
        if isinstance(func, functools.partial):
            args = (*func.args, *args)
            func = func.func
        elif isinstance(getattr(func, "__self__", None), Context) and args:
            func, args = args[0], args[1:]
        else:
            return func


def _described(tasks: Iterable[asyncio.Task[Any]]) -> str:
    """Return the name of each task and the line at which it waits, sorted so that the message is always the same."""
    return "; ".join(sorted(f"{task.get_name()} at {_where(task)}" for task in tasks)) or "no task"


def _where(task: asyncio.Task[Any]) -> str:
    """Return the innermost line at which a task waits outside asyncio."""
    awaited: Any = task.get_coro()
    frames = []
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
        if frame is not None:
            frames.append(frame)
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
    own = [frame for frame in frames if f"{os.sep}asyncio{os.sep}" not in frame.f_code.co_filename] or frames
    if not own:
        return "an unknown place"
    return f"{own[-1].f_code.co_name} ({Path(own[-1].f_code.co_filename).name}:{own[-1].f_lineno})"
