"""Refuses to start a node whose identity another running node uses.

The search runs beside the start of the node's own host, from a temporary anonymous one. `OwnRecords` finds a copy that
starts later, or that no asked peer knew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from swarm_protocol.dht_messages import Contact
from swarm_protocol.errors import PeerError, StartError
from swarm_protocol.network_invitation import NetworkInvitation

from swarm.ended_tasks import end_tasks
from swarm.network.dht.record_dht import RecordDht
from swarm.network.dht.record_storage import RecordValidator
from swarm.network.discovery.peer_names import GivenPeers
from swarm.network.libp2p.daemon_errors import CONTROL_FAILURES
from swarm.network.libp2p.greeting import HELLO, greet, hello_answer, method_prefix
from swarm.network.libp2p.host import Host
from swarm.network.libp2p.libp2p_options import Libp2pOptions
from swarm.network.libp2p.p2pd_process import DaemonOptions
from swarm.network.multiaddr import PeerAddr
from swarm.network.network_entry import first_success, succeeded
from swarm.network.paths.dial_policy import DialPolicy
from swarm.network.paths.dialler import judged
from swarm.network.private.member_roll import MemberRoll
from swarm.network.private.private_gate import PrivateGate

COPY_CHECK_S = 1.5
"""Time to find another node with this node's identity. A live one answers in a few round trips."""

NUM_COPY_DIALS = 8
"""Remembered peers that are asked for another node with this identity, besides the given peers."""


async def start_host(options: Libp2pOptions, given: GivenPeers, policy: DialPolicy) -> Host:
    """Start this node's host, unless another running node has its identity. The check runs during the start, before
    this node connects to any peer. Raises StartError."""
    daemon_options = options.for_daemon()
    asked: tuple[PeerAddr | Contact, ...] = (*given.addrs, *options.remembered[:NUM_COPY_DIALS])
    # a network whose invitations are bound admits no anonymous host that could ask
    if not asked or (options.invitation is not None and options.invitation.terms.is_bound):
        return await Host.start(daemon_options)
    checking = check_identity_is_free(asked, given.own_peer_id, options.network_id, policy, options.invitation)
    check = asyncio.create_task(checking)
    host: Host | None = None
    try:
        host = await Host.start(daemon_options)
        await check
    except BaseException:
        await end_tasks(check)
        if host is not None:
            await host.stop()
        raise
    return host


async def check_identity_is_free(
    addrs: Sequence[PeerAddr | Contact],
    peer_id: str,
    network_id: str,
    policy: DialPolicy,
    invitation: NetworkInvitation | None = None,
) -> None:
    """Raises StartError if a running node has the identity `peer_id`.

    A temporary anonymous host asks the network behind `addrs` for the peer id, dials it and greets it. libp2p keeps a
    connection only if the other side proves that it holds the key. So a peer that answers is another node with this
    identity, since this node does not answer yet. If no address of `addrs` was reached, or nothing was found in time,
    the identity counts as free.
    """
    host = await Host.start(DaemonOptions())
    host.connect = judged(host.control.connect, policy)
    unary = asyncio.create_task(host.unary.run())
    try:
        async with asyncio.timeout(COPY_CHECK_S):
            answer = hello_answer(network_id)
            if invitation is not None:
                host.gate = gate = PrivateGate(host, MemberRoll(invitation, host.peer_id, time.time()))
                answer = gate.answer
            await host.serve(HELLO, answer)  # relays carry no peer that does not answer a greeting
            reached = await _reach_any(host, addrs)
            if not reached or not await _is_there(host, reached, peer_id, network_id):
                return
    except TimeoutError:
        return
    finally:
        try:
            await host.stop()
        finally:
            await unary
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
        await end_tasks(*dials)


async def _is_there(host: Host, reached: Sequence[str], peer_id: str, network_id: str) -> bool:
    asking = RecordDht(host, method_prefix(network_id) + "dht/", RecordValidator(network_id, time.time))
    await asyncio.gather(*(asking.ping(each) for each in reached))
    async for addrs in asking.find_addrs(peer_id):
        try:
            await host.connect(peer_id, addrs)
            await greet(host, peer_id, network_id)
        except (*CONTROL_FAILURES, PeerError):
            continue
        return True
    return False
