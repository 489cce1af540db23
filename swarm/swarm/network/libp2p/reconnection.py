"""Reaching a peer again whose connection was lost, so that streams go on; and telling whether it is gone for good.

A peer whose process was killed refuses connections at once, and then nobody waits. A peer that cannot be reached for
another reason may be on its way: a router restarts, an address has changed, or the peer dials this node itself.

Both sides of a lost connection want it back at the same moment, and go-libp2p dials from the port on which it listens:
two such dials meet as one connection with two clients, fail, and are not tried again for 5 s. So the peer with the
greater id waits a moment for the other one, and meanwhile asks the machine whether anything listens there.

A relay that is gone tells nothing about a peer behind it, which may have other relays by now: these are searched for.
Nor does one that holds no connection to the peer now: it may have given up the path to an address that the peer has
lost, and the peer be about to connect to it anew.

State belongs to the network's loop; the daemon's dials end with the tasks that wait for them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from weakref import WeakValueDictionary

from swarm_protocol.errors import PeerUnreachable

from swarm.network.libp2p.daemon_control import ControlError
from swarm.network.libp2p.host import CONTROL_FAILURES, Host, connect_somewhere, dial_failure, translate
from swarm.network.multiaddr import ip_of, tcp_endpoint

logger = logging.getLogger(__name__)

HOLD_S = 10.0
"""Time that a stream without a connection is kept. The daemon dials an address again 5 s after a failure."""

GRACE_S = 2.0
"""Time to reach a peer that closed its connection itself or died, where a dial does not tell which."""

MIN_PAUSE_S = 0.005
MAX_PAUSE_S = 0.5
"""Pause between attempts; it grows."""

POLL_S = 0.05
"""Time between two looks whether the peer has connected itself."""

YIELD_S = 0.4
"""Time for the peer with the smaller id to connect."""

KNOCK_S = 0.4
"""Time for a machine to say whether anything listens at an address."""

_NO_RESERVATION = "NO_RESERVATION"
_REFUSED = ("connection refused", _NO_RESERVATION)
"""Answers to a dial from which nobody listens there any more: the machine's own, and that of the peer's relay."""

_NOT_TRIED = "dial backoff"
"""The daemon dialled this address a moment ago, and does not dial it again yet."""


class Reconnector:
    """Closes the connections to a peer, dials it again, and says when it is clear that the peer is gone."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._dropped: dict[str, float] = {}  # when this node closed the connections itself
        self._refused: dict[str, float] = {}  # when the last dial was refused

    async def drop(self, peer_id: str, *, behind: Iterable[str] = ()) -> None:
        """Close the connections to a peer that may well be there, and with it those to peers `behind` it, where it is
        their relay. Their streams look for other ones."""
        for each in (peer_id, *behind):
            self._note(self._dropped, each)
        try:
            await self._host.control.disconnect(peer_id)
        except CONTROL_FAILURES as error:
            raise translate(error, peer_id) from None

    def patience_s(self, peer_id: str) -> float:
        """Return how long the opener of a stream looks for the peer."""
        return HOLD_S if self._was_dropped(peer_id) else GRACE_S

    def may_return(self, peer_id: str) -> bool:
        """Return whether a peer of which `reach` said that it is gone may be there: relays tell only that they do not
        hold a connection to it now."""
        return not any(map(tcp_endpoint, self._host.known_addrs(peer_id)))

    async def reach(self, peer_id: str) -> None:
        """Wait until there is a connection. Raises PeerUnreachable once it is clear that the peer is gone."""
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
        """Do as `reach`, but a peer that may return is looked for until the caller's deadline."""
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
        """Return whether the peer was there, or connected in time. Raises PeerUnreachable if nothing listens where it
        was."""
        known = self._host.known_addrs(peer_id)
        if known and not any(map(tcp_endpoint, known)):
            return False  # dials through relays do not meet
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
        """Return why there is no connection after one attempt, or None if there is. Raises PeerUnreachable if the
        daemon has ended."""
        lock = self._locks.setdefault(peer_id, asyncio.Lock())
        async with lock:
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
                connecting.cancel()
                await asyncio.wait((connecting,))
        return None

    async def _connect(self, peer_id: str) -> None:
        """Dial the addresses that are known, and then, of a peer whose relay broke off, those that others know.

        Where this node gave the path up, nothing says that the relay is gone, and a search would hold up the next dial.
        A peer of which no address is known is searched for anyway: most peers that use each other in a large network
        are in neither's routing table. Raises ControlError or OSError.
        """
        known = self._host.known_addrs(peer_id)
        try:
            # without known addresses the daemon may have some: peers tell them to each other when they connect
            await (self._host.connect(peer_id, known) if known else self._host.control.connect(peer_id))
        except ControlError as error:
            has_direct = any(map(tcp_endpoint, known))
            if known and (has_direct or self._was_dropped(peer_id) or self._is_refusal(peer_id, str(error))):
                raise
            # what the peer told this node comes first: the relay that is gone, and its own network's addresses
            searched = self._host.find_addrs(peer_id)
            if not await connect_somewhere(self._host.connect, peer_id, searched, tried=known):
                raise

    def _is_refusal(self, peer_id: str, failure: str) -> bool:
        """Return whether every address refused the dial. Where this node gave the path up that tells nothing: somebody
        else may have the peer's old address."""
        known = self._host.known_addrs(peer_id)
        signs = _REFUSED if not known or any(map(tcp_endpoint, known)) else (_NO_RESERVATION,)
        reasons = [line for line in failure.splitlines() if line.lstrip().startswith("* ")] or [failure]
        if any(sign in reason for reason in reasons for sign in signs):
            self._note(self._refused, peer_id)
        return _is_recent(self._refused, peer_id) and all(
            any(sign in reason for sign in (*signs, _NOT_TRIED)) for reason in reasons
        )

    async def _refuses(self, peer_id: str) -> bool:
        """Return whether at none of the peer's addresses anything listens, as far as TCP alone tells."""
        # a name is left to the daemon: a peer can announce one that cannot be looked up
        endpoints = [tcp_endpoint(addr) if ip_of(addr) else None for addr in self._host.known_addrs(peer_id)]
        refusals = await asyncio.gather(*map(_refuses, endpoints))
        return bool(refusals) and all(refusals)

    def _was_dropped(self, peer_id: str) -> bool:
        return _is_recent(self._dropped, peer_id)

    def _note(self, times: dict[str, float], peer_id: str) -> None:
        for each in [each for each in times if not _is_recent(times, each)]:
            del times[each]
        times[peer_id] = asyncio.get_running_loop().time()


def _is_recent(times: dict[str, float], peer_id: str) -> bool:
    return asyncio.get_running_loop().time() - times.get(peer_id, -HOLD_S) < HOLD_S


async def _refuses(endpoint: tuple[str, int] | None) -> bool:
    """Return whether the peer refuses connections. None: an endpoint behind a relay or a name, of which TCP alone tells
    nothing."""
    if endpoint is None:
        return False
    try:
        async with asyncio.timeout(KNOCK_S):
            _, writer = await asyncio.open_connection(*endpoint)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.transport.abort()
    return False
