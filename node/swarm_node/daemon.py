"""A node's life: lock, log, identity, network, membership, control socket, role; and back down in that order.

One event loop, and one task that owns all of this (`_live`). Another (`_until_over`) watches for requests to leave and
gives it its time. What the node does in between is its role's.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvloop
from swarm.network.libp2p import Libp2pNetwork, Libp2pOptions
from swarm.network.membership import Membership
from swarm_protocol import limits
from swarm_protocol.control_messages import LeaveReply, LeaveRequest, StatusReply, StatusRequest
from swarm_protocol.errors import PeerError
from swarm_protocol.identity import Identity

from swarm_node import control, probe, reachability
from swarm_node.config import Config
from swarm_node.control import ControlHandlers
from swarm_node.departure import Departure, signals_to
from swarm_node.events import Emitter
from swarm_node.home import Home
from swarm_node.node import Node, Role, Steps

logger = logging.getLogger(__name__)

NUM_STEPS = 4  # hardware, network, peers, reachability
REFRESH_S = limits.RECORD_LIFETIME_S / 6
COUNTDOWN_S = 5.0
EXIT_UNCLEAN = 1


def run(config: Config, home: Home, emitter: Emitter, role: Role) -> int:
    """Live as `role` until it is done or told to leave; the caller holds the home's lock. Returns the exit code.

    Raises SwarmError if the node cannot start or cannot go on.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(config, home, emitter, role))


async def _run(config: Config, home: Home, emitter: Emitter, role: Role) -> int:
    departure = Departure()
    with signals_to(departure):
        life = asyncio.create_task(_live(config, home, emitter, role, departure), name="node")
        clean = await _until_over(life, departure, emitter)
    emitter.emit("stopped", reason=departure.reason or "its work is done", clean=clean)
    return 0 if clean else EXIT_UNCLEAN


async def _until_over(life: asyncio.Task[None], departure: Departure, emitter: Emitter) -> bool:
    """Wait for `life` to end, by itself or after a request to leave. Whether it ended by itself."""
    leaving = asyncio.create_task(departure.leaving.wait(), name="departure")
    try:
        await asyncio.wait({life, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
    if not life.done():
        await _count_down(life, departure, emitter)
    clean = life.done()
    life.cancel()
    await asyncio.wait({life})
    if not life.cancelled() and (error := life.exception()) is not None:
        raise _cause(error)
    return clean


async def _count_down(life: asyncio.Task[None], departure: Departure, emitter: Emitter) -> None:
    """Give `life` the time it has to finish, and tell how much is left."""
    loop = asyncio.get_running_loop()
    until = loop.time() + departure.grace_s
    emitter.emit("draining", reason=departure.reason, seconds=departure.grace_s)
    forced = asyncio.create_task(departure.forced.wait(), name="force")
    try:
        while not (life.done() or forced.done()) and (left_s := until - loop.time()) > 0:
            await asyncio.wait({life, forced}, timeout=min(COUNTDOWN_S, left_s), return_when=asyncio.FIRST_COMPLETED)
            if not life.done() and until - loop.time() > 1:
                emitter.say(f"  {until - loop.time():.0f} s left")
    finally:
        forced.cancel()


async def _live(config: Config, home: Home, emitter: Emitter, role: Role, departure: Departure) -> None:
    """The node's task: up, work, down."""
    steps = Steps(emitter, NUM_STEPS + role.num_steps)
    when = config.probe if role.computes else "off"
    hardware = await asyncio.to_thread(probe.examine, config.device, home.cache, probe=when, threads=config.threads)
    steps.done("hardware", str(hardware))
    identity = Identity.load(home.identity)
    async with _on_network(config, home, role) as network, Membership(network) as membership:
        node = Node(
            config=config,
            home=home,
            identity=identity,
            emitter=emitter,
            departure=departure,
            hardware=hardware,
            network=network,
            membership=membership,
            steps=steps,
        )
        async with control.serving(home.socket, _handlers(node)), asyncio.TaskGroup() as tasks:
            await _arrive(node)
            watches = [
                tasks.create_task(_keep_announced(node), name="announce"),
                tasks.create_task(_until_failed(network), name="watch libp2p"),
            ]
            departure.grace_s = config.drain_s
            await role.run(node)
            for watch in watches:
                watch.cancel()


@asynccontextmanager
async def _on_network(config: Config, home: Home, role: Role) -> AsyncIterator[Libp2pNetwork]:
    network = await Libp2pNetwork.create(
        Libp2pOptions(
            identity_path=home.identity,
            network_id=config.network_id,
            peers=config.peers,
            listen=config.listen,
            announce=config.announce,
            relay=role.relay(config),
        )
    )
    try:
        yield network
    finally:
        await network.close()


async def _until_failed(network: Libp2pNetwork) -> None:
    raise await network.wait_failed()


async def _arrive(node: Node) -> None:
    """Report the steps that every node takes, and say that it is ready."""
    addrs = await node.network.addrs()
    node.steps.done(
        "network", f"{node.network.network_id}, listening on {', '.join(addrs) or 'nothing: through relays only'}"
    )
    await _look_around(node)
    node.steps.done("peers", f"{node.num_peers} live, this one included")
    node.reachability = await reachability.measure(node.network, node.config.peers)
    node.steps.done("reachability", reachability.explain(node.reachability, addrs))
    await node.announce()
    node.emitter.emit(
        "ready",
        peer_id=node.network.peer_id,
        addrs=addrs,
        name=node.config.name,
        network_id=node.network.network_id,
        home=str(node.home.path),
    )


async def _keep_announced(node: Node) -> None:
    """Keep the node's own record and the count of peers fresh."""
    while True:
        await asyncio.sleep(REFRESH_S)
        await _look_around(node)


async def _look_around(node: Node) -> None:
    await node.announce()
    try:
        node.num_peers = len({node.network.peer_id, *await node.membership.nodes()})
    except PeerError as error:
        logger.info("cannot see the other nodes: %s", error)


def _handlers(node: Node) -> ControlHandlers:
    async def status(_request: StatusRequest) -> StatusReply:
        return await node.status()

    async def leave(request: LeaveRequest) -> LeaveReply:
        if request.drain:
            node.departure.request("drain")
        else:
            node.departure.force("stop")
        return LeaveReply(pid=os.getpid(), seconds=node.departure.grace_s if request.drain else 0.0)

    return ControlHandlers(status=status, leave=leave)


def _cause(error: BaseException) -> BaseException:
    """The one failure inside the groups that tasks wrap it in; of several the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
