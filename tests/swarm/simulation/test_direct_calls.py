"""Calls without tasks do what tasks do: they go on with their answer, end with their group, and tell of failures."""

from __future__ import annotations

import asyncio

import pytest
from swarm.simulation.direct_calls import Answer, DirectCalls
from swarm.testing import virtual_time


def answer_after(seconds: float, response: bytes = b"") -> Answer:
    loop = asyncio.get_running_loop()
    answer = Answer(loop=loop)
    loop.call_later(seconds, answer.resolve, response)
    return answer


def test_calls_run_side_by_side_and_go_on_in_the_moment_of_their_answer() -> None:
    async def main() -> None:
        loop, ends = asyncio.get_running_loop(), list[tuple[str, float]]()
        began_s = loop.time()

        async def call(name: str, seconds: float) -> str:
            await asyncio.sleep(0)
            await answer_after(seconds)
            await asyncio.sleep(seconds)
            ends.append((name, loop.time() - began_s))
            return name

        async with DirectCalls() as group:
            running = [group.create_task(call("slow", 2)), group.create_task(call("quick", 1))]
        assert [each.result() for each in running] == ["slow", "quick"]
        assert ends == [("quick", pytest.approx(2)), ("slow", pytest.approx(4))]

    virtual_time.run(main())


def test_call_goes_on_before_what_else_is_due_in_the_turn_of_its_answer() -> None:
    async def main() -> None:
        order = list[str]()

        async def call() -> None:
            await answer
            order.append("call")

        answer = Answer(loop=asyncio.get_running_loop())
        async with DirectCalls() as group:
            group.create_task(call())
            await asyncio.sleep(1)
            asyncio.get_running_loop().call_soon(order.append, "next turn")
            answer.resolve(b"")
            assert order == ["call"]

    virtual_time.run(main())


def test_answer_wakes_a_task_too_and_only_the_first_one_counts() -> None:
    async def main() -> None:
        answer = answer_after(1, b"first")
        asyncio.get_running_loop().call_later(1, answer.resolve, b"second")
        asyncio.get_running_loop().call_later(1, answer.reject, TimeoutError())
        assert await asyncio.create_task(asyncio.wait_for(answer, 5)) == b"first"
        refused = Answer(loop=asyncio.get_running_loop())
        asyncio.get_running_loop().call_later(1, refused.reject, TimeoutError())
        with pytest.raises(TimeoutError):
            await refused

    virtual_time.run(main())


def test_group_that_is_cancelled_ends_its_calls_wherever_they_wait() -> None:
    async def main() -> None:
        one_at_a_time, ended, went_on = asyncio.Semaphore(1), list[str](), list[str]()
        late = answer_after(9)

        async def call(name: str) -> None:
            try:
                if name == "answer":
                    await late
                elif name == "sleep":
                    await asyncio.sleep(9)
                else:
                    async with one_at_a_time:
                        await asyncio.sleep(9)
                went_on.append(name)
            finally:
                ended.append(name)

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1), DirectCalls() as group:
                calls = [group.create_task(call(name)) for name in ("answer", "sleep", "has place", "has none")]
        assert sorted(ended) == ["answer", "has none", "has place", "sleep"]
        assert {each.cancelling() for each in calls} == {1}
        await asyncio.sleep(20)
        assert went_on == []
        assert late.cancelled()
        async with asyncio.timeout(1), one_at_a_time:
            pass  # the place of the one that had it is free, and only that one
        assert one_at_a_time._value == 1

    virtual_time.run(main())


def test_call_that_is_cancelled_before_it_begins_does_nothing() -> None:
    async def main() -> None:
        begun = list[bool]()

        async def call() -> None:
            begun.append(True)

        async with DirectCalls() as group:
            group.create_task(call()).cancel()
        assert begun == []

    virtual_time.run(main())


def test_call_that_raises_cancels_the_others_and_its_group_raises() -> None:
    async def main() -> None:
        ended = list[str]()

        async def fail() -> None:
            await answer_after(1)
            raise ZeroDivisionError

        async def wait() -> None:
            try:
                await answer_after(9)
            finally:
                ended.append("waiting")

        async def both() -> None:
            async with DirectCalls() as group:
                group.create_task(wait())
                group.create_task(fail())

        began_s = asyncio.get_running_loop().time()
        with pytest.raises(ZeroDivisionError):
            await both()
        assert ended == ["waiting"]
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(1)

    virtual_time.run(main())
