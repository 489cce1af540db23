"""Determines how others reach this node, by asking a seed to dial back.

The seed dials the addresses of the asker's signed record from a temporary host, because its own has a connection
already; libp2p lets a dial succeed only if the asker's key answers. So a node cannot claim another's address, and the
seed dials no more than any peer dials that has read the record.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence

from swarm.network.interface import Network
from swarm.network.libp2p.host import CONTROL_FAILURES, Host
from swarm.network.libp2p.p2pd_process import DaemonOptions
from swarm.network.membership import Membership
from swarm.network.multiaddr import parse_peer_addr
from swarm_protocol.errors import ConfigError, PeerRefused, StartError, SwarmError
from swarm_protocol.records import Reachability

from swarm_node.formatting import Reach, reach

METHOD = "node.dial_back"
ASK_TIMEOUT_S = 6.0
DIAL_TIMEOUT_S = 4.0
MAX_RETRIES = 3
MAX_WAITING = 16  # each costs the seed a short-lived process

_MEANINGS: Mapping[Reach, str] = {
    "public": "others reach this node directly",
    "local network only": "only from this machine and its local network; --announce of a forwarded port lets others in",
    "this machine only": "only from this machine; --listen /ip4/0.0.0.0/tcp/4001 lets others in",
    "relay": "others reach this node through a seed, which costs time; a forwarded port and --announce would avoid it",
    "unknown": "nobody has confirmed that others reach this node; if they do not, forward a port and give --announce",
}

logger = logging.getLogger(__name__)


def explain(found: Reachability, addrs: Sequence[str]) -> str:
    """Return the meaning of `found` for people, with what they can do about it."""
    return _MEANINGS[reach(found, addrs)]


async def measure(network: Network, peer_ids: Sequence[str]) -> Reachability:
    """Ask the peers that this node joined through; the first that dials back decides."""
    for peer_id in peer_ids:
        try:
            answer = await _ask(network, peer_id)
        except SwarmError as error:  # of any kind, for the seed chooses which
            logger.info("no dial back by %s: %s", peer_id, error)
            continue
        if answer == b"reached":
            return "public"
        break
    relayed = any("/p2p-circuit" in addr for addr in await network.addrs())
    return "relay" if relayed else "unknown"


async def _ask(network: Network, peer_id: str) -> bytes:
    """Ask one seed to dial back. Raises PeerError, or the error that the seed answers.

    The seed refuses while our record is on its way to it or while it dials others; then ask again.
    """
    for _ in range(MAX_RETRIES):
        try:
            return await network.call(peer_id, METHOD, b"", timeout_s=ASK_TIMEOUT_S)
        except PeerRefused as error:
            if not error.retry_after_s:
                raise
            await asyncio.sleep(min(error.retry_after_s, 1.0))
    return await network.call(peer_id, METHOD, b"", timeout_s=ASK_TIMEOUT_S)


async def serve(network: Network, membership: Membership) -> None:
    """Dial back the peers that ask, one after the other."""
    turn = asyncio.Lock()
    waiting: set[str] = set()

    async def dial_back(peer_id: str, _request: bytes) -> bytes:
        if peer_id in waiting or len(waiting) >= MAX_WAITING:
            raise PeerRefused("too many nodes ask to be dialled", remedy="ask again later", retry_after_s=10.0)
        waiting.add(peer_id)
        try:
            async with turn, asyncio.timeout(DIAL_TIMEOUT_S):
                return b"reached" if await _reaches(membership, peer_id) else b"not reached"
        except TimeoutError:
            return b"not reached"
        except StartError as error:
            logger.warning("cannot dial back: %s", error)
            raise PeerRefused("this node cannot dial back now", remedy="ask another") from None
        finally:
            waiting.remove(peer_id)

    await network.serve(METHOD, dial_back)


async def _reaches(membership: Membership, peer_id: str) -> bool:
    record = (await membership.nodes()).get(peer_id)
    if record is None:
        raise PeerRefused("this node's record has not arrived yet", remedy="ask again later", retry_after_s=1.0)
    direct = list(_direct(record.addrs, peer_id))
    if not direct:
        return False
    host = await Host.start(DaemonOptions())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(host.unary.run(), name="dial back")
        try:
            await host.control.connect(peer_id, direct)
            return True
        except CONTROL_FAILURES as error:
            logger.info("%s is not reached: %s", peer_id, error)
            return False
        finally:
            await host.stop()  # which ends its calls, too


def _direct(addrs: Sequence[str], peer_id: str) -> Iterator[str]:
    """Return the valid addresses that lead to `peer_id` without a relay; a peer can write anything there."""
    for text in addrs:
        try:
            found = parse_peer_addr(text)
        except ConfigError:
            continue
        if found.peer_id == peer_id and "/p2p-circuit" not in found.addr:
            yield found.addr
