"""Runs a coroutine in virtual time: hours of timeouts and latencies pass in milliseconds, in the same way each time.

`run` uses an ordinary asyncio loop, except that its clock jumps to the next timer when nothing else is left to do.
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
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

from swarm.testing.waiting_tasks import describe

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

NUM_PASSES = 100
"""Number of passes over the ready callbacks between two checks of the real time."""

_MIN_TIMERS = 100
"""Number of timers up to which cancelled ones are not removed together."""

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
            raise LeftBehind(f"still running when the coroutine returned: {describe(pending)}")
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
    """The loop of `run`, whose `time()` is virtual.

    Timers are in a heap of tuples, which are compared in C, since a simulation has a hundred thousand of them. Timers
    for the same time fire in the order in which they were set.
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
        self._due: list[tuple[int, _Job]] = []  # a heap of the jobs whose cost has passed, by number
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
        return timer  # type: ignore[return-value]  # it has the methods that callers use, and so do handles

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

    def _run_once(self) -> None:
        """Make NUM_PASSES passes over the ready callbacks, or fewer if the loop is stopped. Each pass calls `_idle` if
        nothing is ready, and then runs the callbacks that are ready or due."""
        timers, ready = self._timers, self._ready
        if time.monotonic() > self._real_deadline_s:
            raise RealTimeout(f"out of real time; still running: {describe(asyncio.all_tasks(self))}")
        for _ in range(NUM_PASSES):
            # sockets are asked only when nothing is ready, because a system call takes as long as a pass
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
            for _ in range(len(ready)):  # callbacks that these add run in the next pass
                handle = ready.popleft()
                callback, args, context, _, _ = handle
                if callback is not None:
                    try:  # as `Handle._run` does, but without a call for each of a hundred million events
                        context.run(callback, *args)
                    except (Exception, asyncio.CancelledError) as error:
                        failure = {"message": "a callback failed", "exception": error, "handle": handle}
                        self.call_exception_handler(failure)
            if self._stopping:
                return

    def _remove_cancelled(self) -> None:
        """Remove the cancelled timers at the top of the heap, or all of them if they are more than half of it."""
        timers = self._timers
        if self._timer_cancelled_count * 2 > len(timers) > _MIN_TIMERS:
            timers[:] = [each for each in timers if each[2][0] is not None]
            heapq.heapify(timers)
            self._timer_cancelled_count = 0
        while timers and timers[0][2][0] is None:
            heapq.heappop(timers)
            self._timer_cancelled_count -= 1

    def _idle(self) -> list[Any]:
        """Deliver the result of a job, wait for one, or advance the time to the next timer. Return the events of
        sockets."""
        if (timers := self._timers) and timers[0][2][0] is None:
            self._remove_cancelled()
        # threads of jobs wake the loop through a socket
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
            raise Deadlock(f"nothing is left to run, but tasks wait: {describe(asyncio.all_tasks(self))}")
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
    """A callback that is ready: its function, arguments and context, and two items for timers. It has the part of
    `asyncio.Handle` that the loop and its callers use. A list is made in C, in a third of the time of a Handle, and a
    simulation makes a hundred million of them."""

    __slots__ = ()
    _source_traceback = None

    def cancel(self) -> None:
        self[0] = self[1] = None  # so that function and arguments can be freed

    def cancelled(self) -> bool:
        return self[0] is None


class _Timer(_Handle):
    """A callback that is due at a time, the last item. The item before is the loop, which counts the cancelled timers
    in its heap, or None once the timer is out of the heap."""

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
