"""A server that failed and is back: how soon it is used again, and which error users get while no other server can
answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from swarm.router.routing import NoChain
from swarm.serving.session.peer_health import GONE_REST_S, REST_S
from swarm.testing import virtual_time
from swarm_protocol.errors import SwarmError

HALVES = [(0, 3), (3, 6)]


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def ask_in_vain(box: Any, until_s: float) -> None:
    """Run failing requests again and again, for four users at once."""

    async def ask() -> None:
        while now_s() < until_s:
            with pytest.raises(SwarmError):
                await box.tokens(2)
            await asyncio.sleep(0.5)

    await asyncio.gather(*[ask() for _ in range(4)])


async def answered_s(box: Any, within_s: float) -> float:
    """Return how long a user who retries twice a second waits for an answer. Raises the error of the last attempt."""
    since_s = now_s()
    while True:
        try:
            assert await box.tokens() == box.expected()
        except SwarmError:
            if now_s() - since_s > within_s:
                raise
            await asyncio.sleep(0.5)
        else:
            return now_s() - since_s


@pytest.mark.parametrize("frozen_s", [5.0, 25.0, 45.0])
def test_recovery_gives_answers_within_seconds_when_the_only_server_was_frozen(
    boxes: Any, llama_dir: Path, frozen_s: float
) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES, detection_s=1e6) as box:
            assert await box.tokens() == box.expected()
            box.internet.partition([[box.who["s1"]]])
            await ask_in_vain(box, now_s() + frozen_s)
            box.internet.heal()
            assert await answered_s(box, within_s=2.0) <= 2.5

    virtual_time.run(scenario())


def test_recovery_continues_an_answer_when_its_only_server_is_back(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES, detection_s=1e6) as box, asyncio.TaskGroup() as tasks:
            assert await box.tokens() == box.expected()
            for _ in range(6):  # it has failed before
                box.client._state.health.failed(box.who["s1"], SwarmError("late"))
            await asyncio.sleep(3)
            healed_s = [0.0]

            async def freeze() -> None:
                box.internet.partition([[box.who["s1"]]])
                await asyncio.sleep(15)
                box.internet.heal()
                healed_s[0] = now_s()

            tokens = []
            async for token in box.generate():
                tokens.append(token.token_id)
                if len(tokens) == 5:
                    tasks.create_task(freeze())
            assert tokens == box.expected()
            assert now_s() - healed_s[0] <= 6

    virtual_time.run(scenario(), compute_s=lambda function: 0.1)


@contextmanager
def slow_lookups(box: Any, lookup_s: float) -> Iterator[None]:
    """Have each lookup of servers take that long."""
    look_up = box.membership.servers

    async def slow(model: str) -> object:
        await asyncio.sleep(lookup_s)
        return await look_up(model)

    with patch.object(box.membership, "servers", slow):
        yield


async def longest_pause_s(box: Any, outage_s: float) -> float:
    """Return the longest pause of an answer from whose only server nothing comes for a while."""
    times_s, tokens = list[float](), list[int]()
    async with asyncio.TaskGroup() as tasks:

        async def cut_off() -> None:
            box.internet.partition([[box.who["s0"]]])
            await asyncio.sleep(outage_s)
            box.internet.heal()

        async for token in box.generate():
            times_s.append(now_s())
            tokens.append(token.token_id)
            if len(tokens) == 5:
                tasks.create_task(cut_off())
    assert tokens == box.expected()
    return max(later - earlier for earlier, later in pairwise(times_s))


@pytest.mark.parametrize("lookup_s", [0.0, 5.0])
@pytest.mark.parametrize("outage_s", [3.2, 4.0, 9.1, 12.0])
def test_answer_goes_on_as_soon_as_the_connection_to_its_only_server_does(
    boxes: Any, llama_dir: Path, outage_s: float, lookup_s: float
) -> None:
    """It gives the server up after 3 s, and the connection outlives the outage. Lookups may hang as long."""

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)], detection_s=1e6) as box:
            assert await box.tokens() == box.expected()
            with slow_lookups(box, lookup_s):
                assert await longest_pause_s(box, outage_s) < outage_s + 0.5

    virtual_time.run(scenario(), compute_s=lambda function: 0.1)


def test_answer_dials_its_only_server_again_soon_when_the_connection_is_lost(boxes: Any, llama_dir: Path) -> None:
    detection_s = 1.0  # the connection is lost after as long, and a dial ends in vain

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)], detection_s=detection_s) as box:
            assert await box.tokens() == box.expected()
            for outage_s, limit_s in ((1.1, detection_s + 2 * GONE_REST_S), (10.0, detection_s + REST_S)):
                assert await longest_pause_s(box, outage_s) < outage_s + limit_s + 0.2

    virtual_time.run(scenario(), compute_s=lambda function: 0.1)


@pytest.mark.parametrize("lookup_s", [0.0, 5.0])
def test_recovery_continues_a_forward_call_when_its_only_server_is_back(
    boxes: Any, llama_dir: Path, lookup_s: float
) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)], detection_s=0.5) as box, asyncio.TaskGroup() as tasks:
            x = torch.tensor([1, 2, 3])
            expected = await box.client.forward(x, model="tiny")
            with slow_lookups(box, lookup_s):
                box.internet.partition([[box.who["s0"]]])
                asked = tasks.create_task(box.client.forward(x, model="tiny"))
                await asyncio.sleep(7)
                assert not asked.done()
                box.internet.heal()
                await asyncio.sleep(3)
                assert torch.equal(asked.result(), expected)

    virtual_time.run(scenario())


def test_answer_finds_a_new_server_though_a_lookup_takes_longer_than_the_dead_one_rests(
    boxes: Any, llama_dir: Path
) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)], detection_s=0.2) as box:
            assert await box.tokens() == box.expected()
            with slow_lookups(box, 2.5):
                tokens = list[int]()
                async for token in box.generate():
                    tokens.append(token.token_id)
                    if len(tokens) == 5:
                        box.internet.crash(box.who["s0"], detection_s=0)
                        await box.add(0, 6)
                        lost_s = now_s()
                    if len(tokens) == 6:
                        assert now_s() - lost_s < 5
                assert tokens == box.expected()

    virtual_time.run(scenario(), compute_s=lambda function: 0.1)


@pytest.mark.parametrize("lookup_s", [2.5, 4.0])
def test_forward_call_finds_a_new_server_though_a_lookup_takes_longer_than_the_dead_one_rests(
    boxes: Any, llama_dir: Path, lookup_s: float
) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)], detection_s=0.2) as box, asyncio.TaskGroup() as tasks:
            x = torch.tensor([1, 2, 3])
            expected = await box.client.forward(x, model="tiny")
            with slow_lookups(box, lookup_s):
                box.internet.crash(box.who["s0"], detection_s=0)
                asked = tasks.create_task(box.client.forward(x, model="tiny"))
                await asyncio.sleep(0.1)
                await box.add(0, 6)
                assert torch.equal(await asked, expected)

    virtual_time.run(scenario())


def test_new_requests_wait_for_the_only_server_when_it_has_just_failed(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            assert await box.tokens() == box.expected()
            for ask in (box.tokens, lambda: box.client.pooled([1, 2, 3], model="tiny")):
                box.client._state.health.failed(box.who["s1"], SwarmError("late"))
                await asyncio.sleep(0.1)
                since_s = now_s()
                await ask()
                assert 0.5 < now_s() - since_s < 2

    virtual_time.run(scenario())


@pytest.mark.parametrize("lookup_s", [0.0, 0.6])
def test_recovery_search_ends_in_time_when_the_only_server_is_dead(
    boxes: Any, llama_dir: Path, lookup_s: float
) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES, detection_s=1.0) as box:
            assert await box.tokens() == box.expected()
            box.internet.crash(box.who["s1"], detection_s=0)
            with slow_lookups(box, lookup_s):
                for limit_s in (3, 6):  # the second request waits until the server may be asked again
                    since_s = now_s()
                    with pytest.raises(NoChain, match=r"blocks 3:6 are not available: their servers just failed"):
                        await box.tokens()
                    assert now_s() - since_s < limit_s

    virtual_time.run(scenario())


def test_recovery_error_says_when_only_servers_of_other_weights_have_the_blocks(
    boxes: Any, llama_dir: Path, tmp_path: Path, write_tiny: Any
) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3), (0, 3)]) as box:
            box.directory = write_tiny(tmp_path / "other", "llama", seed=1)
            other = await box.add(3, 6)
            await box.known(3)
            with pytest.raises(NoChain) as caught:
                await box.tokens()
            own = box.servers[box.who["s0"]].revision
            assert caught.value.message == (
                f"blocks 3:6 are not available: nobody serves them (weights of revision {own[:12]}); "
                f"1 server serves them with other weights, revision {other.revision[:12]}"
            )

    virtual_time.run(scenario())
