"""Tests how often a member in its first interval looks where others are, with and without a head that shows it what is
committed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest
from swarm.testing import virtual_time
from swarm.training.member.members_watch import (
    LIST_S,
    MAX_LIST_S,
    MAX_WATCH_S,
    NUM_WATCHED,
    WATCH_S,
    MembersWatch,
)
from swarm_protocol.records import TrainerRecord

MINUTES = 20
HEADS = tuple(f"head {number}" for number in range(8))


def watch_for(
    seconds: float,
    look_at: Callable[[str], None],
    some_trainers: Callable[[str], Awaitable[dict[str, TrainerRecord]]],
    *,
    is_led: bool,
    looking_at: Collection[str] = (),
    **driver: Any,
) -> None:
    """Let a member of the state of outer step 3 watch others for so long. `driver` are attributes of its driver."""

    async def main() -> None:
        membership: Any = SimpleNamespace(some_trainers=some_trainers)
        driving: Any = SimpleNamespace(
            setup=SimpleNamespace(roster=HEADS),
            queries=SimpleNamespace(look_at=look_at, looking_at=looking_at),
            is_led=is_led,
            intervals=SimpleNamespace(interval_s=0.0),
            **{"waiting": None, **driver},
        )
        driving.context = SimpleNamespace(
            run="run",
            network=SimpleNamespace(peer_id="me"),
            signatures=SimpleNamespace(admits=lambda _peer: True),
            replica=SimpleNamespace(outer_step=3, is_new=False),
        )
        watch = MembersWatch(membership, random.Random(0), lambda: None)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await watch.run(driving)

    virtual_time.run(main())


def asked_a_minute(*, is_led: bool, waits: bool) -> tuple[float, float]:
    """Return how many others a member asks per minute, and how many times per minute it reads the membership."""
    num = Counter[str]()

    async def some_trainers(run: str) -> dict[str, TrainerRecord]:
        num["reads"] += 1
        return {"another": TrainerRecord(run=run, state="training", outer_step=0)}

    watch_for(
        MINUTES * 60,
        lambda _peer: num.update(looks=1),
        some_trainers,
        known=HEADS,
        is_led=is_led,
        waiting=SimpleNamespace(seconds=1.0) if waits else None,
    )
    return num["looks"] / MINUTES, num["reads"] / MINUTES


def test_member_asks_no_peer_that_it_still_asks() -> None:
    """A stopped peer is silent for seconds, while another one may know more."""
    asked = list[str]()

    async def some_trainers(run: str) -> dict[str, TrainerRecord]:
        return {peer: TrainerRecord(run=run, state="training", outer_step=4, digest=b"d" * 32) for peer in HEADS}

    watch_for(WATCH_S * len(HEADS), asked.append, some_trainers, known=(), looking_at=asked, is_led=False)
    assert sorted(asked) == sorted(HEADS)


@pytest.mark.parametrize("waits", [False, True])
def test_follower_asks_others_most_rarely_while_a_head_leads_it(waits: bool) -> None:
    expected = 60 / MAX_WATCH_S * NUM_WATCHED, 60 / MAX_LIST_S
    assert asked_a_minute(is_led=True, waits=waits) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("waits", [False, True])
def test_member_without_a_head_asks_others_often_before_its_first_interval_has_ended(waits: bool) -> None:
    expected = 60 / WATCH_S * NUM_WATCHED, 60 / LIST_S
    assert asked_a_minute(is_led=False, waits=waits) == pytest.approx(expected, rel=0.1)
