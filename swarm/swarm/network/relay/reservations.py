"""Being reached through relays: a place at each of them, kept for as long as we run, and asked for again once lost.

The daemon's own client does not come back to a relay that was restarted. `Reservations.run` is the task; its state is
which relays hold a place for us now.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Sequence

from swarm_protocol.errors import PeerError, PeerRefused, PeerTimeout, PeerUnreachable

from swarm.network.libp2p.daemon_control import read_delimited
from swarm.network.libp2p.host import CONTROL_FAILURES, Host, NotServed, RawStream
from swarm.network.relay.circuit_messages import HOP, MAX_MESSAGE_BYTES, check_hop_accepted, reserve_request

ANSWER_TIMEOUT_S = 5.0
MIN_PAUSE_S = 0.25
MAX_PAUSE_S = 10.0
"""Between attempts, growing: we are reachable again this long after a relay is back."""

logger = logging.getLogger(__name__)


class Reservations:
    def __init__(self, host: Host, relays: Sequence[str]) -> None:
        """`relays`: their peer ids, which the host can dial."""
        self._host = host
        self._answered = {peer_id: asyncio.Event() for peer_id in relays}
        self._held: set[str] = set()

    @property
    def held(self) -> frozenset[str]:
        return frozenset(self._held)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for peer_id in self._answered:
                tasks.create_task(self._keep(peer_id))

    async def wait_answered(self, peer_ids: Collection[str]) -> None:
        """Until each of these relays has answered once, or has not in time."""
        await asyncio.gather(*(event.wait() for peer_id, event in self._answered.items() if peer_id in peer_ids))

    async def _keep(self, peer_id: str) -> None:
        pause_s = MIN_PAUSE_S
        warned = False
        while True:
            try:
                reader, writer = await _reserve(self._host, peer_id)
            except PeerError as error:
                logger.log(logging.DEBUG if warned else logging.WARNING, "not reached through %s: %s", peer_id, error)
                warned = True
            else:
                await self._hold(peer_id, reader, writer)
                pause_s, warned = MIN_PAUSE_S, False
            self._answered[peer_id].set()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _hold(self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the relay leaves."""
        self._held.add(peer_id)
        self._answered[peer_id].set()
        try:
            with contextlib.suppress(ConnectionError):
                await reader.read(1)
        finally:
            self._held.discard(peer_id)
            writer.transport.abort()


async def _reserve(host: Host, relay: str) -> RawStream:
    """The stream that stands for our place at `relay`. Raises PeerError."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await host.open_stream(relay, HOP)
            try:
                writer.write(reserve_request())
                check_hop_accepted(await read_delimited(reader, MAX_MESSAGE_BYTES))
            except BaseException:
                writer.transport.abort()
                raise
    except TimeoutError:
        raise PeerTimeout(f"no answer within {ANSWER_TIMEOUT_S:.0f} s", peer_id=relay) from None
    except NotServed:
        raise PeerRefused("it does not relay", peer_id=relay) from None
    except ValueError as error:
        raise PeerRefused(f"it does not relay for us: {error}", peer_id=relay) from None
    except CONTROL_FAILURES:
        raise PeerUnreachable("it broke off", peer_id=relay) from None
    return reader, writer
