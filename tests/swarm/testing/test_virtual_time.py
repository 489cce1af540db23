"""Tests of virtual time: it jumps to the next timer, waits for executor jobs and repeats itself exactly. Deadlocks and
tasks that are left behind are reported."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from contextlib import suppress
from contextvars import ContextVar

import pytest
from swarm.testing import virtual_time
from swarm.testing.virtual_time import Deadlock, JobPlace, LeftBehind, RealTimeout


def test_run_with_long_sleeps_takes_no_real_time() -> None:
    async def main() -> float:
        start_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(86400 * 30))
            tasks.create_task(asyncio.sleep(5))
        return asyncio.get_running_loop().time() - start_s

    start_s = time.monotonic()
    assert virtual_time.run(main()) == pytest.approx(86400 * 30)
    assert time.monotonic() - start_s < 5


def test_run_with_timers_fires_them_in_order_at_their_times() -> None:
    async def main() -> list[tuple[float, str]]:
        loop = asyncio.get_running_loop()
        start_s, seen = loop.time(), []

        async def sleeper(name: str, delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            seen.append((round(loop.time() - start_s, 9), name))

        async with asyncio.TaskGroup() as tasks:
            for name, delay_s in (("c", 0.3), ("a", 0.1), ("b", 0.2)):
                tasks.create_task(sleeper(name, delay_s))
        return seen

    assert virtual_time.run(main()) == [(0.1, "a"), (0.2, "b"), (0.3, "c")]


def test_run_with_seeded_randomness_has_the_same_trace_every_time() -> None:
    async def main() -> list[tuple[float, int, int]]:
        rng, trace = random.Random(7), []
        loop = asyncio.get_running_loop()

        def work(index: int) -> int:
            time.sleep(0.0005 * (index % 3))  # real time that must not show in the trace
            return index

        async def worker(index: int) -> None:
            for turn in range(5):
                await asyncio.sleep(rng.random())
                trace.append((loop.time(), index, turn))
                assert await asyncio.to_thread(work, index) == index
                trace.append((loop.time(), index, -turn))

        async with asyncio.TaskGroup() as tasks:
            for index in range(8):
                tasks.create_task(worker(index))
        return trace

    assert virtual_time.run(main()) == virtual_time.run(main()) == virtual_time.run(main(), jobs="threads")


@pytest.mark.parametrize("jobs", ["loop", "threads"])
def test_run_with_executor_job_holds_virtual_time_still(jobs: JobPlace) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        ticking = asyncio.create_task(asyncio.sleep(0.001))
        before_s = loop.time()
        await asyncio.to_thread(time.sleep, 0.05)
        assert loop.time() == before_s
        assert not ticking.done()
        await ticking

    virtual_time.run(main(), jobs=jobs)


def test_run_with_jobs_that_end_out_of_order_delivers_them_in_submission_order() -> None:
    async def main() -> list[str]:
        order, release = [], threading.Event()

        async def job(name: str, work: object) -> None:
            await asyncio.to_thread(work)
            order.append(name)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(job("waits for the second", lambda: release.wait(10)))
            tasks.create_task(job("ends first", release.set))
        return order

    assert virtual_time.run(main(), jobs="threads") == ["waits for the second", "ends first"]


def test_run_with_compute_cost_charges_virtual_seconds() -> None:
    class Engine:
        def step(self) -> str:
            return "done"

    def cost_s(func: object) -> float:
        return 3.0 if getattr(func, "__name__", "") == "step" else 0.0

    async def main() -> None:
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        other = asyncio.create_task(asyncio.sleep(1.0))
        assert await asyncio.to_thread(Engine().step) == "done"
        assert loop.time() - start_s == pytest.approx(3.0)
        assert other.done()
        await asyncio.to_thread(len, "free")
        assert loop.time() - start_s == pytest.approx(3.0)

    virtual_time.run(main(), compute_s=cost_s)


@pytest.mark.parametrize("jobs", ["loop", "threads"])
def test_run_with_cancelled_job_waits_for_its_end_before_time_moves(jobs: JobPlace) -> None:
    ended = threading.Event()

    def work() -> None:
        time.sleep(0.05)
        ended.set()

    async def main() -> None:
        task = asyncio.create_task(asyncio.to_thread(work))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.001)
        assert ended.is_set()

    virtual_time.run(main(), jobs=jobs)


def test_run_with_job_in_the_loops_thread_begins_it_once_nothing_else_is_ready() -> None:
    async def main() -> list[str]:
        seen: list[str] = []
        loop = asyncio.get_running_loop()
        working = loop.run_in_executor(None, seen.append, "the job")
        loop.call_soon(loop.call_soon, seen.append, "a callback of a callback")
        await working
        return seen

    assert virtual_time.run(main()) == ["a callback of a callback", "the job"]


@pytest.mark.parametrize("jobs", ["loop", "threads"])
def test_job_runs_where_no_loop_runs(jobs: JobPlace) -> None:
    async def answer() -> int:
        return 42

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert await asyncio.to_thread(asyncio.run, answer()) == 42
        assert asyncio.get_running_loop() is loop

    virtual_time.run(main(), jobs=jobs)


@pytest.mark.parametrize("jobs", ["loop", "threads"])
def test_run_with_failing_job_raises_in_the_awaiter(jobs: JobPlace) -> None:
    def work() -> None:
        raise ValueError("in the thread")

    async def main() -> None:
        with pytest.raises(ValueError, match="in the thread"):
            await asyncio.to_thread(work)

    virtual_time.run(main(), jobs=jobs)


def test_run_with_deadlock_raises_at_once_and_names_the_tasks() -> None:
    async def stuck() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.create_task(stuck(), name="the one that waits")

    with pytest.raises(Deadlock, match=r"the one that waits at stuck \(test_virtual_time.py:\d+\)"):
        virtual_time.run(main())


def test_run_with_deadlock_after_unretrieved_error_shows_the_error() -> None:
    async def dies() -> None:
        raise ValueError("the cause")

    async def main() -> None:
        task = asyncio.create_task(dies())
        await asyncio.Event().wait()
        await task

    with pytest.raises(ExceptionGroup, match="nothing is left to run") as caught:
        virtual_time.run(main())
    assert str(caught.value.exceptions[0]) == "the cause"


def test_run_with_task_left_behind_fails_and_ends_it() -> None:
    tasks: list[asyncio.Task[None]] = []

    async def main() -> None:
        tasks.append(asyncio.create_task(asyncio.sleep(5), name="forgotten"))

    with pytest.raises(LeftBehind, match="forgotten"):
        virtual_time.run(main())
    assert tasks[0].cancelled()


def test_run_with_task_that_refuses_to_end_still_reports_it_and_returns() -> None:
    async def stubborn() -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async def main() -> None:
        tasks.append(asyncio.create_task(stubborn(), name="stubborn"))
        await asyncio.sleep(0)

    tasks: list[asyncio.Task[None]] = []
    with pytest.raises(LeftBehind, match="stubborn at stubborn"):
        virtual_time.run(main())
    tasks[0].get_coro().close()  # type: ignore[union-attr]


@pytest.mark.parametrize("watch_tasks", [False, True])
def test_run_with_unretrieved_task_error_fails(*, watch_tasks: bool) -> None:
    async def dies() -> None:
        raise ValueError("nobody listens")

    async def main() -> None:
        tasks = {asyncio.create_task(dies())}
        await asyncio.sleep(1)
        tasks.clear()

    with pytest.raises(ExceptionGroup) as caught:
        virtual_time.run(main(), watch_tasks=watch_tasks)
    assert [str(error) for error in caught.value.exceptions] == ["nobody listens"]


def test_run_with_error_in_a_callback_fails() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(1, lambda: {}["absent"])
        await asyncio.sleep(2)

    with pytest.raises(ExceptionGroup) as caught:
        virtual_time.run(main())
    assert isinstance(caught.value.exceptions[0], KeyError)


def test_run_with_awaited_task_error_returns() -> None:
    async def dies() -> None:
        raise ValueError("heard")

    async def main() -> str:
        task = asyncio.create_task(dies())
        with pytest.raises(ValueError, match="heard"):
            await task
        return "fine"

    assert virtual_time.run(main()) == "fine"


def test_run_with_endless_virtual_time_hits_the_real_timeout() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(1)

    with pytest.raises(RealTimeout, match="main"):
        virtual_time.run(main(), real_timeout_s=0.1)


def test_run_with_hung_job_hits_the_real_timeout() -> None:
    release = threading.Event()

    async def main() -> None:
        await asyncio.to_thread(release.wait, 30)

    with pytest.raises(RealTimeout, match=r"to_thread|main"):
        virtual_time.run(main(), real_timeout_s=0.1, jobs="threads")
    release.set()


@pytest.mark.parametrize("jobs", ["loop", "threads"])
def test_run_with_job_that_calls_back_into_the_loop_runs_the_callback(jobs: JobPlace) -> None:
    async def main() -> list[int]:
        loop, progress = asyncio.get_running_loop(), []
        await asyncio.to_thread(lambda: loop.call_soon_threadsafe(progress.append, 1))
        return progress

    assert virtual_time.run(main(), jobs=jobs) == [1]


def test_run_leaves_no_thread_behind() -> None:
    async def main() -> None:
        await asyncio.to_thread(len, "abc")

    before = {*threading.enumerate()}
    virtual_time.run(main(), jobs="threads")
    assert {*threading.enumerate()} <= before, "one of an earlier test may end meanwhile"


@pytest.mark.parametrize("jobs", ["loop", "threads"])
def test_charge_within_a_job_delays_its_result_and_nothing_else(jobs: JobPlace) -> None:
    async def main() -> list[tuple[float, str]]:
        loop = asyncio.get_running_loop()
        start_s, seen = loop.time(), []

        def work(name: str, cost_s: float) -> str:
            for _ in range(2):
                virtual_time.charge(cost_s)
            return name

        async def wait_for(name: str, cost_s: float) -> None:
            done = await asyncio.to_thread(work, name, cost_s)
            seen.append((round(loop.time() - start_s, 9), done))

        async with asyncio.TaskGroup() as tasks:
            for name, cost_s in (("slow", 2.0), ("free", 0.0), ("quick", 0.5)):
                tasks.create_task(wait_for(name, cost_s))
        return seen

    assert virtual_time.run(main(), jobs=jobs) == [(0.0, "free"), (1.0, "quick"), (4.0, "slow")]


def test_timers_of_one_moment_fire_in_the_order_in_which_they_were_set_and_cancelled_ones_never() -> None:
    async def main() -> tuple[list[int], float]:
        loop, seen = asyncio.get_running_loop(), list[int]()
        timers = [loop.call_later(1.0 + number % 2, seen.append, number) for number in range(1000)]
        for number, timer in enumerate(timers):
            if number % 4:
                timer.cancel()
        last = loop.call_later(3600.0, seen.append, 1000)
        await asyncio.sleep(10.0)
        last.cancel()
        return seen, loop.time()

    seen, end_s = virtual_time.run(main())
    assert seen == list(range(0, 1000, 4))
    assert end_s == virtual_time.START_S + 10.0


def test_wait_for_a_cancelled_timer_alone_is_a_deadlock() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(5.0, print, "never").cancel()
        await loop.create_future()

    with pytest.raises(Deadlock):
        virtual_time.run(main())


def test_task_keeps_what_it_set_in_a_context_that_was_empty() -> None:
    known: ContextVar[str] = ContextVar("known", default="nothing")

    async def main() -> str:
        token = known.set("something")
        await asyncio.sleep(1.0)
        found = known.get()
        known.reset(token)
        return found

    assert virtual_time.run(main()) == "something"
