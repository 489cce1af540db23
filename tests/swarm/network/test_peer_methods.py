"""The methods that a node serves when the libp2p daemon is unavailable for a moment."""

from __future__ import annotations

import asyncio
from functools import partial
from unittest.mock import AsyncMock, MagicMock

import pytest
from swarm.network.interface import Stream
from swarm.network.peer_methods import PeerMethods
from swarm_protocol.errors import PeerUnreachable


async def answer(_peer_id: str, request: bytes) -> bytes:
    return request


async def greet(_peer_id: str, _stream: Stream) -> None: ...


def test_method_that_could_not_be_registered_is_registered_when_it_is_served_again() -> None:
    async def main() -> None:
        gone = PeerUnreachable("no daemon")
        host = MagicMock(accept_streams=AsyncMock(side_effect=[gone, None, gone, None]), serve=AsyncMock())
        methods = PeerMethods(host, MagicMock(), MagicMock(), "test")
        for serve in (partial(methods.serve, "m", answer), partial(methods.serve_stream, "m", greet)):
            with pytest.raises(PeerUnreachable):
                await serve()
            await serve()
            with pytest.raises(ValueError, match="served already"):
                await serve()
        assert host.accept_streams.await_count == 4
        host.serve.assert_awaited_once()

    asyncio.run(main())
