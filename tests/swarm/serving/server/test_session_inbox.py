from __future__ import annotations

import asyncio

import pytest
from swarm.serving.server.session_inbox import Backpressure
from swarm.testing import virtual_time
from swarm_protocol.errors import PeerRefused


def test_backlog_client_that_sends_too_much_keeps_nobody_else_out() -> None:
    backlog = Backpressure(100)
    backlog.take("greedy", 40)
    backlog.take("greedy", 35)
    with pytest.raises(PeerRefused) as refused:
        backlog.take("greedy", 1)
    assert refused.value.retry_after_s > 0
    backlog.take("another", 25)
    with pytest.raises(PeerRefused):
        backlog.take("third", 1)
    backlog.give_back("greedy", 20)
    backlog.take("third", 20)
    for client, num_bytes in (("greedy", 55), ("another", 25), ("third", 20)):
        backlog.give_back(client, num_bytes)
    assert backlog.num_bytes == 0


def test_backlog_one_step_of_any_size_may_wait() -> None:
    backlog = Backpressure(100)
    backlog.take("a", 100)
    with pytest.raises(PeerRefused):
        backlog.take("b", 1)


def test_backlog_has_room_for_those_that_wait_until_half_of_its_share_is_free() -> None:
    async def main() -> None:
        backlog = Backpressure(100)
        backlog.take("a", 38)
        await backlog.room("b")
        waiting = asyncio.create_task(backlog.room("a"))
        await asyncio.sleep(1)
        assert not waiting.done()
        backlog.give_back("a", 1)
        await waiting
        backlog.take("b", 20)
        crowded = asyncio.create_task(backlog.room("a"))
        await asyncio.sleep(1)
        assert not crowded.done()
        await backlog.room("c")
        backlog.give_back("b", 20)
        await crowded

    virtual_time.run(main())
