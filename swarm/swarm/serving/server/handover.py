"""Moves a session's keys and values from a leaving server to its successor, so that nothing is run again.

The client names both sides: it tells the old server which peer may have them (AllowHandover), and the new one where
they are (`OpenSequence.take_over`). Keys and values cannot be verified, so they are used for that client's session
alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerUnreachable
from swarm_protocol.serving_messages import KV_METHOD, KvHeader, KvRequest
from swarm_protocol.session_frames import SequenceRef

from swarm.network.interface import EndOfStream, FailpointHook, Network, Stream
from swarm.serving.engine.sequence import EngineSequence

if TYPE_CHECKING:
    from swarm.serving.server.server_session import ServerSession

MESSAGE_S = 10.0
"""Seconds for a piece of about 1 MiB: over a slower link, running the prompt again is faster."""

TAKE_OVER_S = 120.0
"""Maximum seconds of a hand-over. The client gives up earlier if it expects less."""


async def take_over(network: Network, model: str, source: SequenceRef, client: str, sequence: EngineSequence) -> None:
    """Fill `sequence` with the keys and values of the sequence at `source`. Raises SwarmError, and then it is empty."""
    start, end = sequence.blocks
    request = KvRequest(client_peer_id=client, sequence_id=source.sequence_id, start=start, end=end)
    try:
        async with (
            asyncio.timeout(TAKE_OVER_S),
            network.stream(source.peer_id, f"{KV_METHOD}/{model}", timeout_s=MESSAGE_S) as stream,
            aclosing(_pieces(stream)) as pieces,
        ):
            await stream.send(request.to_bytes())
            header = KvHeader.from_bytes(await stream.receive())
            await sequence.adopt(header.length, pieces)
    except TimeoutError:
        raise PeerTimeout("the session was not handed over in time", peer_id=source.peer_id) from None
    except EndOfStream:
        raise PeerUnreachable("the server ended the hand-over", peer_id=source.peer_id) from None


async def hand_over(
    session: ServerSession | None, request: KvRequest, peer_id: str, stream: Stream, hook: FailpointHook
) -> None:
    """Send the keys and values of the sequence. No steps run meanwhile. Raises PeerRefused unless the client allowed
    this peer to have them."""
    if session is None or peer_id not in session.may_take_over:
        raise PeerRefused("there is no such session here that you may take over", remedy="run it again")
    async with session.lock, aclosing(session.sequence.export(request.start, request.end)) as pieces:
        await stream.send(KvHeader(length=session.sequence.firm_length).to_bytes())
        async for piece in pieces:
            await hook.reached("serve/handover")
            async with asyncio.timeout(MESSAGE_S):
                await stream.send(piece)


async def _pieces(stream: Stream) -> AsyncGenerator[bytes, None]:
    while True:
        try:
            yield await stream.receive()
        except EndOfStream:
            return
