"""Tests that streams which arrive before the butterfly of their group wait for a bounded time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.round_scripts import COORDINATOR, FIRST, ME
from swarm.testing import virtual_time
from swarm.training.member.reductions import GROUP_WAIT_S, Reductions
from swarm_protocol.errors import RoundError
from swarm_protocol.reduction_messages import ReduceOpening


class Butterfly:
    def __init__(self) -> None:
        self.accepted: list[str] = []
        self.bytes_sent = 0

    async def accept(self, peer: str, _opening: object, stream: object) -> None:
        self.accepted.append(peer)


def accept(reductions: Reductions, peer: str) -> asyncio.Task[None]:
    opening = ReduceOpening(kind="exchange", part=0, step=1, group_digest=FIRST.digest)
    return asyncio.create_task(reductions.accept(peer, opening, cast(Any, None)))


def test_accept_that_times_out_leaves_the_places_of_streams_that_still_wait() -> None:
    async def main() -> None:
        step = SimpleNamespace(context=SimpleNamespace())
        reductions, butterfly = Reductions(cast(Any, step)), Butterfly()
        early = accept(reductions, ME)
        await asyncio.sleep(GROUP_WAIT_S - 1.0)
        late = accept(reductions, COORDINATOR)
        with pytest.raises(RoundError, match="takes no part"):
            await early
        reductions._add(FIRST.digest, cast(Any, SimpleNamespace(butterfly=butterfly)))
        await late
        assert butterfly.accepted == [COORDINATOR]

    virtual_time.run(main())
