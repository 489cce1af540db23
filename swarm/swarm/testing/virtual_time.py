"""Runs a coroutine in virtual time: hours of timeouts, latencies and outer steps pass in milliseconds, identically
on every run.

`run` drives an ordinary asyncio loop whose clock jumps to the next timer whenever nothing else is left to do.
Executor jobs (torch work in `run_in_executor` or `asyncio.to_thread`) run for real, in the loop's own thread or in
those of their executors, but their results arrive in the order in which the jobs were submitted and only once the loop
is idle, so that the speed of a machine decides nothing. A job costs no virtual time unless `compute_s` charges it some,
or it calls `charge` itself.

Left to others: real sockets and child processes, which know nothing of virtual time and look like a deadlock here.
Two things void the determinism: a job in a thread that reads what the loop writes meanwhile, and threads the loop did
not start. A job that cannot end before a later one has delivered its result hangs, until the real timeout names it.
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
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

T = TypeVar("T")

JobPlace = Literal["loop", "threads"]
"""The place where executor jobs run: the loop's thread, each once nothing else is ready, or their executors' threads,
in parallel. To hand a job to a thread and back costs more than most jobs of tests do."""

ComputeCost = Callable[[Callable[..., object]], float]
"""The virtual seconds that a job costs, given the function it calls (partials and contexts unwrapped)."""

START_S = 1000.0
"""The first time; not zero, so that code that takes 0 for "never" fails."""

NUM_THREADS = 4
"""Threads of the default executor: more than a small machine's cores, so that jobs can wait for each other."""

THREAD_NAME = "virtual-time"

NUM_ROUNDS = 100
"""Rounds of callbacks after which the real time is looked at again."""

_MIN_TIMERS = 100
"""Fewer are not looked through for cancelled ones."""

WIND_DOWN_S = 5.0
"""Real time that cancelled tasks get to end in, after a failure."""


class Deadlock(AssertionError):
    """Nothing is ready, no timer is set, no job runs: the tasks named would have waited for ever."""


class RealTimeout(AssertionError):
    """The run took longer than `real_timeout_s` of real time: a hung job, or virtual time without an end."""


class LeftBehind(AssertionError):
    """The coroutine returned while tasks it had started still ran."""


def run(
    coro: Coroutine[Any, Any, T],
    *,
    real_timeout_s: float = 60.0,
    compute_s: ComputeCost | None = None,
    jobs: JobPlace = "loop",
    watch_tasks: bool = True,
) -> T:
    """Return the result of `coro`, or its exception. A job that waits for another one, or that may hang, needs
    `jobs="threads"`. Without `watch_tasks` the error of a task that nobody awaits is noticed only once the task is
    gone: of millions of tasks that is cheaper.

    Raises Deadlock, RealTimeout and LeftBehind as they say, and an ExceptionGroup of whatever tasks and callbacks
    raised without anyone awaiting them. `real_timeout_s` is checked between callbacks: one that never returns is
    left to the test runner's own timeout.
    """
    loop = VirtualTimeLoop(real_timeout_s=real_timeout_s, compute_s=compute_s, jobs=jobs, watch_tasks=watch_tasks)
    try:
        try:
            result = loop.run_until_complete(coro)
        except (Deadlock, RealTimeout) as stuck:
            if unheard := loop.unheard():
                raise ExceptionGroup(str(stuck), unheard) from stuck
            raise
        if pending := asyncio.all_tasks(loop):
            raise LeftBehind(f"still running when the coroutine returned: {_describe(pending)}")
        if unheard := loop.unheard():
            raise ExceptionGroup("raised in tasks or callbacks that nobody awaited", unheard)
        return result
    finally:
        loop.wind_down()


def charge(seconds: float) -> None:
    """Called in an executor job: its result arrives that much later. Elsewhere it means nothing."""
    job: _Job | None = getattr(_this_thread, "job", None)
    if job is not None:
        job.cost_s += seconds


_this_thread = threading.local()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """The loop under `run`. `time()` is virtual.

    Timers are in a heap of tuples, which compare in C: a simulation has a hundred thousand of them. Timers of one
    moment fire in the order in which they were set.
    """

    _ready: deque[_Handle]
    _stopping: bool
    _timer_cancelled_count: int
    _clock_resolution: float
    _process_events: Callable[[list[Any]], None]

    def __init__(
        self, *, real_timeout_s: float, compute_s: ComputeCost | None, jobs: JobPlace, watch_tasks: bool
    ) -> None:
        self._has_threads = jobs == "threads"
        self._watches_tasks = watch_tasks
        self._now_s = START_S
        self._real_deadline_s = time.monotonic() + real_timeout_s
        self._compute_s = compute_s
        self._jobs: set[_Job] = set()
        self._due: list[tuple[int, _Job]] = []  # a heap of the jobs that are not held back, with when they came
        self._num_jobs = itertools.count()
        self._timers: list[tuple[float, int, _Timer]] = []
        self._num_timers = itertools.count()
        self._failed: list[asyncio.Task[Any]] = []
        self._callback_errors: list[Exception] = []
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix=THREAD_NAME)
        self._sockets = selectors.DefaultSelector()
        super().__init__(self._sockets)
        self.set_exception_handler(self._keep_error)

    def time(self) -> float:
        return self._now_s

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _Timer((callback, args, copy_context() if context is None else context, self, when))
        heapq.heappush(self._timers, (when, next(self._num_timers), timer))
        return timer  # type: ignore[return-value]  # it has what callers use of theirs, and so have handles

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = _Handle((callback, args, copy_context() if context is None else context, None, 0.0))
        self._ready.append(handle)
        return handle  # type: ignore[return-value]

    def _call_soon(self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None) -> Any:
        return self.call_soon(callback, *args, context=context)

    def _add_callback(self, handle: Any) -> None:
        if not handle._cancelled:
            self.call_soon(handle._run)

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
        if self._has_threads:  # the last, for it may be done
            job.running.add_done_callback(lambda _: self._wake())
        return job.result

    def unheard(self) -> list[Exception]:
        """Return the exceptions of tasks and callbacks that nobody has retrieved, and mark them as retrieved."""
        errors = [task.exception() for task in self._failed if task._log_traceback]
        self._callback_errors, kept = [], self._callback_errors
        return [error for error in errors if isinstance(error, Exception)] + kept

    def wind_down(self) -> None:
        """End what is left, so that a failed run leaves nothing to the next test."""
        self._real_deadline_s = time.monotonic() + WIND_DOWN_S
        try:
            if left := asyncio.all_tasks(self):
                for task in left:
                    task.cancel()
                self.run_until_complete(asyncio.wait(left))
            self.run_until_complete(self.shutdown_asyncgens())
        except (Deadlock, RealTimeout):
            pass  # a task that refuses to end: the failure that brought us here is the one to report
        finally:
            self._threads.shutdown(wait=all(job.running.done() for job in self._jobs), cancel_futures=True)
            self.unheard()
            self.close()

    def _run_once(self) -> None:
        """Run what is ready, and first wait for it as `_idle` does, if nothing is. Do so NUM_ROUNDS times, or until the
        loop is stopped."""
        timers, ready = self._timers, self._ready
        if time.monotonic() > self._real_deadline_s:
            raise RealTimeout(f"out of real time; still there: {_describe(asyncio.all_tasks(self))}")
        for _ in range(NUM_ROUNDS):
            # the system, which costs as much to ask as anything else, is asked once nothing is ready
            if not ready and not self._stopping and (events := self._idle()):
                self._process_events(events)
            due_s = self._now_s + self._clock_resolution
            while timers and timers[0][0] < due_s:
                timer = heapq.heappop(timers)[2]
                if timer[0] is None:
                    self._timer_cancelled_count -= 1
                else:
                    timer[3] = None
                    ready.append(timer)
            for _ in range(len(ready)):  # what these make ready has its turn afterwards
                handle = ready.popleft()
                callback, args, context, _, _ = handle
                if callback is not None:
                    try:  # as `Handle._run` does, without a call for each of a hundred million events
                        context.run(callback, *args)
                    except (Exception, asyncio.CancelledError) as error:
                        told = {"message": "a callback failed", "exception": error, "handle": handle}
                        self.call_exception_handler(told)
            if self._stopping:
                return

    def _forget_cancelled(self) -> None:
        """Remove cancelled timers that are due first, and all of them if they are more than half."""
        timers = self._timers
        if self._timer_cancelled_count * 2 > len(timers) > _MIN_TIMERS:
            timers[:] = [each for each in timers if each[2][0] is not None]
            heapq.heapify(timers)
            self._timer_cancelled_count = 0
        while timers and timers[0][2][0] is None:
            heapq.heappop(timers)
            self._timer_cancelled_count -= 1

    def _idle(self) -> list[Any]:
        """Deliver a job's result, wait for one, or advance time to the next timer. Return what the sockets bring."""
        if (timers := self._timers) and timers[0][2][0] is None:
            self._forget_cancelled()
        # threads of jobs wake the loop through a socket, which costs as much to ask as a round of callbacks
        if self._jobs and self._has_threads and (events := self._sockets.select(0)):
            return events
        if self._due:
            _, job = self._due[0]
            if not self._has_threads:
                job.run_here(self)
            elif not job.running.done():
                return self._sockets.select(self._real_deadline_s - time.monotonic())
            heapq.heappop(self._due)
            if job.cost_s:
                self.call_later(job.cost_s, self._fall_due, job)
                job.cost_s = 0.0
            else:
                self._jobs.remove(job)
                job.deliver()
        elif not timers:
            raise Deadlock(f"nothing will ever happen; waiting: {_describe(asyncio.all_tasks(self))}")
        else:
            self._now_s = max(self._now_s, timers[0][0])
        return []

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


class _Handle(list[Any]):
    """A callback that is due now: its function, arguments and context, and two items that a timer has. Has what the
    loop and its callers use of an `asyncio.Handle`. A list is made in C, in a third of the time: a simulation makes a
    hundred million."""

    __slots__ = ()
    _source_traceback = None

    def cancel(self) -> None:
        self[0] = self[1] = None  # what they hold is free now

    def cancelled(self) -> bool:
        return self[0] is None


class _Timer(_Handle):
    """A callback that is due at a time: the last item. The one before is the loop that waits for this time, and counts
    what is cancelled meanwhile; None once the time has come."""

    __slots__ = ()

    def cancel(self) -> None:
        if self[0] is not None:
            self[0] = self[1] = None
            if self[3] is not None:
                self[3]._timer_cancelled_count += 1

    def when(self) -> float:
        return self[4]  # type: ignore[no-any-return]


@dataclass(slots=True, eq=False)
class _Job:
    """One executor job: its thread's future, and the loop's, which hears of it when the job is due and done. `number`
    counts the jobs in the order in which they were submitted.

    `cost_s` is what it has charged itself, and not yet been held back for.
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
        """Run the job in the thread of `loop`, unless it has run. It does not see that a loop runs in its thread."""
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
    """Return the function that partials and `contextvars.Context.run` (which `to_thread` adds) call in the end."""
    while True:
        if isinstance(func, functools.partial):
            args = (*func.args, *args)
            func = func.func
        elif isinstance(getattr(func, "__self__", None), Context) and args:
            func, args = args[0], args[1:]
        else:
            return func


def _describe(tasks: Iterable[asyncio.Task[Any]]) -> str:
    """Return each task's name and the line it waits at, sorted so that the message is the same on every run."""
    return "; ".join(sorted(f"{task.get_name()} at {_where(task)}" for task in tasks)) or "no task"


def _where(task: asyncio.Task[Any]) -> str:
    """Return the innermost line of the await chain that is not asyncio's own."""
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
