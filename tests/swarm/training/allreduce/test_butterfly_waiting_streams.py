"""Streams that arrive before their group's butterfly wait for a bounded time, and leave nothing behind."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.round_scripts import COORDINATOR, FIRST, ME
from swarm.testing import virtual_time
from swarm.training.member.reductions import GROUP_WAIT_S, Reductions
from swarm_protocol.errors import RoundError
from swarm_protocol.training_messages import ReduceOpening


class Butterfly:
    def __init__(self) -> None:
        self.accepted: list[str] = []

    async def accept(self, peer: str, _opening: object, stream: object) -> None:
        self.accepted.append(peer)


def accept(reductions: Reductions, peer: str) -> asyncio.Task[None]:
    opening = ReduceOpening(kind="exchange", part=0, step=1, group_digest=FIRST.digest)
    return asyncio.create_task(reductions.accept(peer, opening, cast(Any, None)))


def make_reductions() -> Reductions:
    async def convict(_evidence: object) -> None:
        pass

    return Reductions(
        cast(Any, SimpleNamespace()),
        feed=lambda event: None,
        on_reduced_weight=lambda peer, how: None,
        convict=convict,
    )


def test_accept_whose_caller_is_cancelled_leaves_no_entry() -> None:
    async def main() -> None:
        reductions = make_reductions()
        waiting = accept(reductions, ME)
        await asyncio.sleep(1.0)
        assert len(reductions._entries) == 1
        waiting.cancel()
        await asyncio.wait({waiting})
        assert not reductions._entries

    virtual_time.run(main())


def test_accept_that_waits_too_long_takes_the_place_from_nobody_who_still_waits() -> None:
    async def main() -> None:
        reductions, butterfly = make_reductions(), Butterfly()
        early = accept(reductions, ME)
        await asyncio.sleep(GROUP_WAIT_S - 1.0)
        late = accept(reductions, COORDINATOR)
        with pytest.raises(RoundError, match="takes no part"):
            await early
        reductions._entry(FIRST.digest).butterfly.set_result(cast(Any, butterfly))
        await late
        assert butterfly.accepted == [COORDINATOR]

    virtual_time.run(main())
