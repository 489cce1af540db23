"""How long an accepted stream is kept once its handler has ended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from swarm.network.interface import Stream
from swarm.network.libp2p.stream_server import MAX_LINGER_S, QUIET_S, StreamServer
from swarm.testing import virtual_time

TAKES_S = 60.0


def _server() -> StreamServer:
    host, resumable = SimpleNamespace(gate=None, wire_name=lambda name: name), SimpleNamespace(protocol="resume")
    return StreamServer(host, None, resumable)  # type: ignore[arg-type]


class Caller:
    """The stream of a caller that says every second, for a while, that it takes what was sent, and then leaves, if at
    all."""

    def __init__(self, *, signs_s: float, leaves_s: float) -> None:
        self.peer_id = "caller"
        self.num_signs = 0
        self.has_left = False
        self._signs_s = signs_s
        self._leaves_s = leaves_s

    def end(self, _error: BaseException | None) -> None: ...

    async def pump(self) -> None:
        began_s = asyncio.get_running_loop().time()
        while (passed_s := asyncio.get_running_loop().time() - began_s) < self._leaves_s:
            await asyncio.sleep(1)
            self.num_signs += passed_s < self._signs_s
        self.has_left = True


@pytest.mark.parametrize(
    ("signs_s", "leaves_s", "has_left", "most_s"),
    [
        (TAKES_S, TAKES_S, True, TAKES_S + 1),
        (0.0, QUIET_S - 2, True, QUIET_S),
        (TAKES_S, MAX_LINGER_S, False, TAKES_S + 2 * QUIET_S + 1),
        (2 * MAX_LINGER_S, 2 * MAX_LINGER_S, False, MAX_LINGER_S + QUIET_S),
    ],
)
def test_caller_is_waited_for_while_it_takes_what_its_handler_has_sent(
    signs_s: float, leaves_s: float, has_left: bool, most_s: float
) -> None:
    async def handler(_peer_id: str, _stream: Stream) -> None: ...

    async def main() -> None:
        caller: Any = Caller(signs_s=signs_s, leaves_s=leaves_s)
        async with asyncio.timeout(most_s):
            await _server()._handle(caller, handler)
        assert caller.has_left == has_left

    virtual_time.run(main())
