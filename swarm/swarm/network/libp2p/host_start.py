"""Starts the host of an identity, if no other running node has that identity.

Holds no state; the throwaway host that looks for a copy ends with the check.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from swarm_protocol.dht_messages import Contact
from swarm_protocol.errors import PeerError, StartError

from swarm.network.dht.record_dht import RecordDht
from swarm.network.dht.record_validator import RecordValidator
from swarm.network.libp2p.host import CONTROL_FAILURES, Host
from swarm.network.libp2p.libp2p_options import Libp2pOptions
from swarm.network.libp2p.network_entry import first_success, greet, method_prefix, succeeded
from swarm.network.libp2p.p2pd_process import DaemonOptions
from swarm.network.multiaddr import PeerAddr

COPY_CHECK_S = 1.5
"""For finding a peer by its id through others; a live one answers in a few round trips."""

NUM_COPY_DIALS = 8
"""Remembered peers that are asked for a copy of this node, besides the given ones."""


async def start_host(options: Libp2pOptions, peer_id: str) -> Host:
    """Our host, if nobody else has our identity; the check runs beside the start, before we connect to anyone."""
    daemon_options = options.for_daemon(peer_id)
    asked: tuple[PeerAddr | Contact, ...] = (*options.seeds(peer_id), *options.remembered[:NUM_COPY_DIALS])
    if not asked:
        return await Host.start(daemon_options)
    check = asyncio.create_task(check_identity_is_free(asked, peer_id, options.network_id))
    host: Host | None = None
    try:
        host = await Host.start(daemon_options)
        await check
    except BaseException:
        check.cancel()
        await asyncio.wait((check,))
        if host is not None:
            await host.stop()
        raise
    return host


async def check_identity_is_free(addrs: Sequence[PeerAddr | Contact], peer_id: str, network_id: str) -> None:
    """Raises StartError if a running node has this identity, wherever it is.

    A throwaway anonymous host asks the network behind `addrs` for the peer id, dials it and says hello. libp2p lets a
    connection stand only if the other side proves that it holds the key, so a peer that answers is a copy: this node
    itself, which starts meanwhile, does not answer yet. None of `addrs` reached, or nothing found in time: free, as
    far as can be told. (A later sign is a record of ours that we did not write.)
    """
    host = await Host.start(DaemonOptions())
    lane = asyncio.create_task(host.lane.run())
    try:
        async with asyncio.timeout(COPY_CHECK_S):
            reached = await _reach_any(host, addrs)
            if not reached or not await _is_there(host, reached, peer_id, network_id):
                return
    except TimeoutError:
        return
    finally:
        try:
            await host.stop()
        finally:
            await lane
    raise StartError(
        f"the identity {peer_id} is in use by another running node",
        remedy="stop that node, or give this one its own identity (another home folder)",
    )


async def _reach_any(host: Host, addrs: Sequence[PeerAddr | Contact]) -> list[str]:
    dials = {
        asyncio.create_task(
            host.control.connect(each.peer_id, [each.addr] if isinstance(each, PeerAddr) else each.addrs)
        ): each.peer_id
        for each in addrs
    }
    try:
        await first_success(set(dials))
        return [peer_id for dial, peer_id in dials.items() if succeeded(dial)]
    finally:
        for dial in dials:
            dial.cancel()
        await asyncio.wait(dials)


async def _is_there(host: Host, reached: Sequence[str], peer_id: str, network_id: str) -> bool:
    asking = RecordDht(host, method_prefix(network_id) + "dht/", RecordValidator(network_id, time.time))
    await asyncio.gather(*(asking.ping(each) for each in reached))
    async for addrs in asking.find_addrs(peer_id):
        try:
            await host.control.connect(peer_id, addrs)
            await greet(host, peer_id, network_id)
        except (*CONTROL_FAILURES, PeerError):
            continue
        return True
    return False
