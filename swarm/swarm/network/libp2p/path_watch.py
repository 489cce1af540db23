"""Notices within seconds that the path to a peer in use is dead, and replaces it.

TCP reports a path that vanished only after many seconds, often minutes. So a peer in use from which nothing came for a
second is asked for an echo by libp2p's own ping (`/ipfs/ping/1.0.0`). The peer's daemon answers it by itself, so a
process that is busy or stopped does not look like a dead path. If no echo comes, the daemon's connections to the peer
are closed, the peer is dialled again, and its streams go on (`stream_resume`). If the path leads through a relay, the
relay is asked at the same time, and its path is replaced first. All other paths are then checked at once, as they are
when this node's addresses have changed. Peers that keep this node reachable are asked often enough that a NAT does not
forget the connection.

`run` is a task of the network; it owns the tasks that wait for echoes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

from swarm_protocol.errors import PeerRefused, PeerUnreachable

from swarm.ended_tasks import end_tasks
from swarm.network.discovery.own_networks import source_addresses
from swarm.network.libp2p.daemon_errors import CONTROL_FAILURES
from swarm.network.libp2p.host import Host
from swarm.network.libp2p.libp2p_stream import Libp2pStream
from swarm.network.libp2p.reconnection import HOLD_S, Reconnector
from swarm.network.multiaddr import relay_of
from swarm.network.rate import write
from swarm.network.suspension import SuspensionWatch

logger = logging.getLogger(__name__)

PING = "/ipfs/ping/1.0.0"
PING_BYTES = 32

TICK_S = 0.5
PATH_SILENT_S = 1.0
"""A peer in use is asked for an echo after this time without a byte from it."""

ECHO_S = 2.0
"""Minimum time for an echo. It doubles with each path to the same peer that is given up, up to MAX_ECHO_S, since the
path may only be slow: a connection that is full of other bytes delays an echo, too."""
MAX_ECHO_S = 16.0
FORGIVEN_S = 600.0
"""Time after which a path that was given up is forgotten."""

LATE_FACTOR = 4.0
"""A peer has this many times as long for an echo as one took lately that came later than TICK_S. Over a line that is
full of rows, echoes take one to two seconds, until a lost packet holds all bytes of a connection up for six."""
LATE_S = 60.0
"""Time for which a late echo counts."""

RELAY_S = MAX_ECHO_S + HOLD_S
"""Time for the check of a relay, and for the replacement of its path. Checks of paths through the relay wait for it."""

KEEP_ALIVE_S = 13.0
"""Time between two echoes of a peer that keeps this node reachable. With a tick and a late echo it stays below 15 s,
half of the shortest time for which NATs remember a connection."""


class PathWatch:
    """Asks peers that are in use and silent for an echo, and replaces the connections to those that give none."""

    def __init__(self, host: Host, reconnector: Reconnector, kept: Callable[[], Collection[str]]) -> None:
        """`kept` returns the peers whose connections are kept alive even while they are not in use."""
        self.reconnector = reconnector
        self._host = host
        self._kept = kept
        self._streams: set[Libp2pStream] = set()
        self._heard_at: dict[str, float] = {}  # by peer in use or kept, when something was last heard of it
        self._asking: dict[str, asyncio.Task[bool]] = {}
        self._has_lost_one = False  # whether a path was given up since the last tick
        self._echo_s: dict[str, tuple[float, float]] = {}  # a longer time for an echo, and until when it holds

    @contextmanager
    def watching(self, stream: Libp2pStream) -> Iterator[None]:
        """Count a stream as in use while the context lasts."""
        self._streams.add(stream)
        try:
            yield
        finally:
            self._streams.discard(stream)

    def end_streams(self, peer_id: str, refusal: PeerRefused) -> None:
        """End all streams with a peer, and send it `refusal`."""
        for stream in [stream for stream in self._streams if stream.peer_id == peer_id]:
            stream.give_way(refusal)

    def used_peers(self) -> set[str]:
        """Return the peers with a stream or a call under way, and those kept alive."""
        return {*self._kept(), *self._host.called_peers(), *(stream.peer_id for stream in self._streams)}

    async def replace(self, peer_id: str) -> None:
        """Close the connections to a peer once no small call with it is under way, and dial it again, so that its
        streams go on over the best present path. A call of the peer that has not arrived here yet may fail."""
        while self._host.num_calls(peer_id):  # noqa: ASYNC110 - calls end in many places
            await asyncio.sleep(TICK_S / 10)
        await self.reconnector.drop(peer_id)
        await self.reconnector.reach(peer_id)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        sources, suspension = source_addresses(), SuspensionWatch()
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(TICK_S)
                before, sources = sources, source_addresses()
                are_suspect = suspension.was_suspended() or before != sources or self._has_lost_one
                self._has_lost_one = False
                for peer_id, limit_s in self._look(loop.time()).items():
                    is_silent = loop.time() - self._heard_at[peer_id] >= limit_s
                    if is_silent or are_suspect:
                        self._ask(tasks, peer_id)

    def _look(self, now: float) -> dict[str, float]:
        """Note the peers from which something came, and return by peer the seconds for which it may be silent."""
        limits_s = dict.fromkeys(self._kept(), KEEP_ALIVE_S) | dict.fromkeys(self._host.called_peers(), PATH_SILENT_S)
        heard = set()
        for stream in self._streams:
            if stream.is_carried:
                limits_s[stream.peer_id] = PATH_SILENT_S
                if stream.acknowledge():
                    heard.add(stream.peer_id)
        for peer_id in heard:
            self._host.traffic.links.heard(peer_id)
        self._heard_at = {
            peer_id: now if peer_id in heard else self._heard_at.get(peer_id, now)
            for peer_id in {*limits_s, *self._asking}  # keeps the times of peers under check that are not in use now
        }
        return limits_s

    def _ask(self, tasks: asyncio.TaskGroup, peer_id: str) -> asyncio.Task[bool]:
        """Return the task that checks the path to a peer: the one under way, or a new one."""
        if peer_id not in self._asking:
            self._heard_at.setdefault(peer_id, asyncio.get_running_loop().time())
            self._asking[peer_id] = tasks.create_task(self._check(tasks, peer_id))
        return self._asking[peer_id]

    async def _check(self, tasks: asyncio.TaskGroup, peer_id: str) -> bool:
        """Ask a peer for an echo, and replace the path to it if none comes. Return whether the path was given up."""
        is_given_up = False
        try:
            connected = await self._host.connected_peers()
            relays = [self._ask(tasks, relay) for relay in _relays(connected.get(peer_id, ()))]
            if peer_id in connected and not await self._is_heard(peer_id):
                self._be_patient(peer_id, 2 * self._patience_s(peer_id), FORGIVEN_S)
                self._has_lost_one = True  # the other paths may be dead, too
                are_relays_given_up = await _are_given_up(relays)
                is_given_up = True
                if not are_relays_given_up:  # else the path was closed with the paths to its relays
                    connected = await self._host.connected_peers()
                    behind = [each for each, addrs in connected.items() if _relays(addrs) == {peer_id}]
                    await self.reconnector.drop(peer_id, behind=behind)
                async with asyncio.timeout(HOLD_S):
                    await self.reconnector.reach(peer_id)
        except (PeerUnreachable, TimeoutError):
            pass  # the peer is gone, or the daemon has ended
        finally:
            self._heard_at[peer_id] = asyncio.get_running_loop().time()
            del self._asking[peer_id]
        return is_given_up

    async def _is_heard(self, peer_id: str) -> bool:
        """Return whether an echo or anything else comes from the peer in time. It counts waits of TICK_S instead of
        reading the clock: while the loop stands still, it reads nothing, and that time must not count."""
        began_at = asyncio.get_running_loop().time()
        echo = asyncio.create_task(_echo(self._host, peer_id))
        try:
            for num_waits in range(round(self._patience_s(peer_id) / TICK_S)):
                await asyncio.wait((echo,), timeout=TICK_S)
                if echo.done() or self._heard_at.get(peer_id, began_at) > began_at:
                    if num_waits:
                        self._be_patient(peer_id, LATE_FACTOR * (num_waits + 1) * TICK_S, LATE_S)
                    return True
        finally:
            await end_tasks(echo)
        logger.info("the path to %s is dead", peer_id)
        return False

    def _patience_s(self, peer_id: str) -> float:
        patience_s, until = self._echo_s.get(peer_id, (ECHO_S, 0.0))
        return patience_s if until > asyncio.get_running_loop().time() else ECHO_S

    def _be_patient(self, peer_id: str, echo_s: float, for_s: float) -> None:
        """Give the peer at least `echo_s` for its next echoes, for at least `for_s`."""
        now = asyncio.get_running_loop().time()
        self._echo_s = {each: known for each, known in self._echo_s.items() if known[1] > now}
        known_s, until = self._echo_s.get(peer_id, (ECHO_S, now))
        self._echo_s[peer_id] = (min(max(known_s, echo_s), MAX_ECHO_S), max(until, now + for_s))


def _relays(addrs: Sequence[str]) -> set[str]:
    """Return the relays through which all of a peer's connections lead; none if one connection is direct."""
    relays = {relay_of(addr) for addr in addrs}
    return set() if "" in relays else relays


async def _are_given_up(relays: Collection[asyncio.Task[bool]]) -> bool:
    """Wait for the checks of a peer's relays, and return whether the paths to all of them were given up. Return False
    if it has no relays.

    The wait is needed since a dial over a dead path to a relay fails, and the daemon does not repeat it for 5 s. The
    wait is bounded, since relays can pretend to lead through each other.
    """
    if not relays:
        return False
    done, _ = await asyncio.wait(relays, timeout=RELAY_S)
    return all(relay in done and relay.result() for relay in relays)


async def _echo(host: Host, peer_id: str) -> None:
    """Wait until the peer's daemon has answered. An error counts as an answer: the path works, or is known to be
    lost."""
    with suppress(*CONTROL_FAILURES):
        reader, writer = await host.control.open_stream(peer_id, PING)
        try:
            write(writer, os.urandom(PING_BYTES))
            await reader.readexactly(PING_BYTES)
        finally:
            writer.transport.abort()
