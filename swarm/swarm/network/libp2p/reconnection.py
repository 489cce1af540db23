"""Reaches a peer again whose connection was lost, so that streams go on, and finds out whether the peer is gone.

The machine of a peer whose process was killed refuses connections at once; then nothing waits for the peer. A peer that
cannot be reached for another reason may come back: a router restarts, an address has changed, or the peer dials this
node itself.

Both sides of a lost connection dial at the same moment, and go-libp2p dials from the port on which it listens. Two such
dials meet as one connection with two diallers, fail, and are not repeated for 5 s. So the peer with the greater id
waits a moment for the other one, and meanwhile checks whether the other machine refuses connections.

The failure of a relay shows nothing about a peer behind it: the peer may have other relays by now, which are searched
for. Nor does it show anything if the relay holds no connection to the peer now: the relay may have given up the path to
an old address of the peer, and the peer may be about to connect to it again.

State belongs to the network's loop; the daemon's dials end with the tasks that wait for them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable
from typing import Literal
from weakref import WeakValueDictionary

from swarm_protocol.errors import PeerUnreachable

from swarm.ended_tasks import end_tasks
from swarm.network.libp2p.daemon_control import ControlError
from swarm.network.libp2p.daemon_errors import CONTROL_FAILURES, dial_failure, translate, translating
from swarm.network.libp2p.host import Host, connect_somewhere
from swarm.network.multiaddr import ip_of, tcp_endpoint
from swarm.newest_items import NewestItems

logger = logging.getLogger(__name__)

HOLD_S = 10.0
"""Time for which a stream without a connection is kept. The daemon dials an address again 5 s after a failure."""

GRACE_S = 2.0
"""Time to reach a peer again whose connection this node did not close."""

MIN_PAUSE_S = 0.005
MAX_PAUSE_S = 0.5
"""Pause between two attempts; it doubles."""

POLL_S = 0.05
"""Time between two checks whether the peer has connected by itself."""

YIELD_S = 0.4
"""Time for which this node waits for a peer with a smaller id to connect."""

KNOCK_S = 0.4
"""Time for a machine to refuse a TCP connection."""

ACCEPT_S = 3.0
"""Time for a machine to accept a TCP connection: twice across the world, and a lost SYN."""

MAX_REMEMBERED = 1024
"""Maximum peers of which an address is remembered that does not refuse connections: as many as have streams that wait
for them (see `stream_resume`)."""

_NO_RESERVATION = "NO_RESERVATION"
_REFUSED = ("connection refused", _NO_RESERVATION)
"""Parts of errors of a dial that show that the peer is gone: the machine's refusal, and that of the peer's relay."""

_NOT_TRIED = "dial backoff"
"""Part of the daemon's error for an address that it dialled a moment ago and does not dial again yet."""


class _PeerSearch:
    """The search for one peer, and how the last one ended. Callers hold it only while they wait."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.ended_at = -math.inf
        self.failure: PeerUnreachable | None = None


class Reconnector:
    """Closes the connections to a peer, dials it again, and decides whether the peer is gone."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._searches: WeakValueDictionary[str, _PeerSearch] = WeakValueDictionary()
        self._dropped: dict[str, float] = {}  # by peer, when this node closed the connections itself
        self._refused: dict[str, float] = {}  # by peer, when the last dial was refused
        self._not_refusing = NewestItems[str, tuple[str, int] | None](MAX_REMEMBERED)

    async def drop(self, peer_id: str, *, behind: Iterable[str] = ()) -> None:
        """Close the connections to a peer that may be alive. If it is a relay, that also closes the connections to the
        peers `behind` it. Their streams look for other connections. Raises PeerUnreachable if the daemon cannot be
        asked."""
        for each in (peer_id, *behind):
            self._note(self._dropped, each)
        with translating(peer_id):
            await self._host.control.disconnect(peer_id)

    def patience_s(self, peer_id: str) -> float:
        """Return the seconds for which the opener of a stream looks for the peer."""
        return HOLD_S if self._was_dropped(peer_id) else GRACE_S

    def may_return(self, peer_id: str) -> bool:
        """Return whether a peer that `reach` found gone may come back: it is known only through relays, which only say
        that they hold no connection to it now."""
        return not any(map(tcp_endpoint, self._host.known_addrs(peer_id)))

    async def reach(self, peer_id: str) -> None:
        """Wait until there is a connection to the peer. Raises PeerUnreachable once the peer is found gone.

        Simultaneous callers share one search: a peer may have many streams, and announce a stranger's addresses.
        """
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        search = self._searches.setdefault(peer_id, _PeerSearch())
        async with search.lock:
            if search.ended_at < asked_at:
                search.failure = None
                try:
                    await self._search(peer_id)
                except PeerUnreachable as failure:
                    search.failure = failure
                search.ended_at = loop.time()
        if search.failure is not None:
            raise search.failure.with_traceback(None)

    async def _search(self, peer_id: str) -> None:
        if self._host.peer_id > peer_id and await self._connects_itself(peer_id):
            return
        pause_s = MIN_PAUSE_S
        while (failure := await self._dial(peer_id)) is not None:
            logger.debug("%s is not reached again: %s", peer_id, failure)
            if not self._was_dropped(peer_id) and (self._is_refusal(peer_id, failure) or await self._refuses(peer_id)):
                raise PeerUnreachable(f"peer {peer_id} is gone ({dial_failure(failure)})", peer_id=peer_id)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def reach_patiently(self, peer_id: str) -> None:
        """Do as `reach`, but look for a peer that may return until the caller's deadline."""
        pause_s = MIN_PAUSE_S
        while True:
            try:
                return await self.reach(peer_id)
            except PeerUnreachable:
                if not self.may_return(peer_id):
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _connects_itself(self, peer_id: str) -> bool:
        """Return whether the peer is connected, or connects within YIELD_S. Raises PeerUnreachable if all its machines
        refuse connections."""
        known = self._host.known_addrs(peer_id)
        if known and not any(map(tcp_endpoint, known)):
            return False  # dials through relays cannot meet
        loop, pause_s = asyncio.get_running_loop(), MIN_PAUSE_S
        until = loop.time() + YIELD_S
        while loop.time() < until:
            if peer_id in await self._host.connected_peers():
                return True
            if not self._was_dropped(peer_id) and await self._refuses(peer_id):
                raise PeerUnreachable(f"peer {peer_id} is gone (connection refused)", peer_id=peer_id)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S)
        return False

    async def _dial(self, peer_id: str) -> str | None:
        """Dial once. Return None if there is a connection then, else the daemon's error. Raises PeerUnreachable if the
        daemon cannot be asked."""
        connecting = asyncio.create_task(self._connect(peer_id))
        try:
            while not connecting.done():
                await asyncio.wait((connecting,), timeout=POLL_S)
                if not connecting.done() and peer_id in await self._host.connected_peers():
                    return None
            connecting.result()
        except ControlError as error:
            return str(error)
        except CONTROL_FAILURES as error:
            raise translate(error, peer_id) from None
        finally:
            await end_tasks(connecting)
        return None

    async def _connect(self, peer_id: str) -> None:
        """Dial the known addresses. If these are only relayed ones and fail, also dial those that other nodes know.

        Other nodes are not asked if this node closed the connection itself, since a search would delay the next dial,
        or if the dial was refused. But a peer without known addresses is always searched for: in a large network most
        peers that use each other are not in each other's routing tables. Raises ControlError, OSError or
        IncompleteReadError.
        """
        known = self._host.known_addrs(peer_id)
        try:
            # without known addresses the daemon may have some, which the peer sent when it connected
            await (self._host.connect(peer_id, known) if known else self._host.control.connect(peer_id))
        except ControlError as error:
            has_direct = any(map(tcp_endpoint, known))
            if known and (has_direct or self._was_dropped(peer_id) or self._is_refusal(peer_id, str(error))):
                raise
            # the search first yields the addresses that the peer gave this node, which were just tried
            searched = self._host.find_addrs(peer_id)
            if not await connect_somewhere(self._host.connect, peer_id, searched, tried=known):
                raise

    def _is_refusal(self, peer_id: str, failure: str) -> bool:
        """Return whether every address refused the dial, now or a moment ago. The caller ignores this if it closed the
        connection itself, since another machine may now have the peer's old address."""
        known = self._host.known_addrs(peer_id)
        signs = _REFUSED if not known or any(map(tcp_endpoint, known)) else (_NO_RESERVATION,)
        reasons = [line for line in failure.splitlines() if line.lstrip().startswith("* ")] or [failure]
        if any(sign in reason for reason in reasons for sign in signs):
            self._note(self._refused, peer_id)
        return _is_recent(self._refused, peer_id) and all(
            any(sign in reason for sign in (*signs, _NOT_TRIED)) for reason in reasons
        )

    async def _refuses(self, peer_id: str) -> bool:
        """Return whether all of the peer's addresses refuse TCP connections. They are asked one by one until one does
        not, which is asked first the next time: the peer may have announced a stranger's."""
        # names are not looked up here, since a peer could announce one whose lookup hangs
        endpoints = [tcp_endpoint(addr) if ip_of(addr) else None for addr in self._host.known_addrs(peer_id)]
        for endpoint in sorted(endpoints, key=lambda each: each != self._not_refusing.get(peer_id)):
            if not await _refuses(endpoint):
                self._not_refusing[peer_id] = endpoint
                return False
        return bool(endpoints)

    def _was_dropped(self, peer_id: str) -> bool:
        return _is_recent(self._dropped, peer_id)

    def _note(self, times: dict[str, float], peer_id: str) -> None:
        for each in [each for each in times if not _is_recent(times, each)]:
            del times[each]
        times[peer_id] = asyncio.get_running_loop().time()


def _is_recent(times: dict[str, float], peer_id: str) -> bool:
    return asyncio.get_running_loop().time() - times.get(peer_id, -HOLD_S) < HOLD_S


async def _refuses(endpoint: tuple[str, int] | None) -> bool:
    """Return whether an endpoint refuses TCP connections. False for None, which is an address with a relay or a
    name."""
    return endpoint is not None and await _knock(endpoint, KNOCK_S) == "refused"


async def accepts_connections(addr: str) -> bool:
    """Return whether a program accepts TCP connections at an address. True for an address with a relay or a name.

    To be asked before the daemon dials a peer that may be away for long. After each dial that fails go-libp2p leaves
    the address alone for longer, up to five minutes, and so would notice late that the peer is back.
    """
    endpoint = tcp_endpoint(addr) if ip_of(addr) else None
    return endpoint is None or await _knock(endpoint, ACCEPT_S) == "accepted"


async def _knock(endpoint: tuple[str, int], within_s: float) -> Literal["accepted", "refused", "silent"]:
    try:
        async with asyncio.timeout(within_s):
            _, writer = await asyncio.open_connection(*endpoint)
    except ConnectionRefusedError:
        return "refused"
    except (OSError, TimeoutError):
        return "silent"
    writer.transport.abort()
    return "accepted"
