"""A node's life: lock, log, identity, network, membership, control socket and role, closed in reverse order.

There is one event loop. One task (`_live`) owns all of this. Another (`_until_over`) watches for requests to leave, and
gives the first its time to finish. The role does the node's work.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import resource
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import uvloop
from swarm.network.libp2p.greeting import CLOCK_S, ClockWatch, VersionWatch, clock_skews_s, off_by
from swarm.network.libp2p_network import Libp2pNetwork
from swarm.network.membership import Membership
from swarm.network.multiaddr import is_loopback
from swarm.network.suspension import SuspensionWatch
from swarm.network.traffic import Traffic, TrafficLimits
from swarm.threads import in_own_thread
from swarm_protocol import limits
from swarm_protocol.control_messages import LeaveReply, LeaveRequest, StatusReply, StatusRequest
from swarm_protocol.errors import PeerError, cause, first_few
from swarm_protocol.identity import Identity
from swarm_protocol.version import PROTOCOL_VERSION, Hello, software_version

from swarm_node import control, diagnostics, interrupts
from swarm_node.events.emitter import Emitter
from swarm_node.lending.lending import Lending
from swarm_node.lending.shifts import run_in_shifts
from swarm_node.lending.traffic_count import LinkUse, MonthlyTraffic, keep_counting, keep_sampling
from swarm_node.machine import hardware, reachability
from swarm_node.machine.hardware import Hardware
from swarm_node.metrics.exporter import exporting, measuring
from swarm_node.metrics.metric_registry import Registry
from swarm_node.metrics.readings import read_starting
from swarm_node.network_join import join_network
from swarm_node.node import Node, NodeRole, StartupSteps, starting_status
from swarm_node.settings.config import Config
from swarm_node.shutdown import CTRL_C, FORCED_S, Shutdown, signals_to, watch_stdin
from swarm_node.storage import remembered_peers
from swarm_node.storage.home import Home

logger = logging.getLogger(__name__)

NUM_STEPS = 4  # hardware, network, peers, reachability
REFRESH_S = limits.RECORD_LIFETIME_S / 6
AWAKE_S = 2.0
"""Seconds between two checks whether the machine was suspended."""
COUNTDOWN_S = 5.0
JOIN_S = 3.0  # time to join, or to find no peer, before a starting node tells its status; under control.DEADLINE_S
CLOSE_S = 10.0  # seconds to announce the leaving and close sockets
EXIT_STUCK = 1
MAX_OPEN_FILES = 2**16
"""The systemd unit allows as many open files. Each stream of a peer is a file, and each peer may have hundreds: four
strangers could use up the 1,024 that many systems allow by default."""
MAX_NAMED = 3  # maximum peers named in one line


def run(config: Config, home: Home, emitter: Emitter, role: NodeRole) -> int:
    """Run `role` until it is done or asked to leave. The caller holds the home's lock. Return the exit code.

    A node that cannot start or continue reports the error. `stopped` is always the last event.
    """
    interrupts.raise_in_command()
    _ask_for_open_files()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(config, home, emitter, role))


def _ask_for_open_files() -> None:
    """Let this process open MAX_OPEN_FILES, or about as many as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    while soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError):  # macOS allows fewer than its hard limit says
            wanted //= 2
        else:
            return


async def _run(config: Config, home: Home, emitter: Emitter, role: NodeRole) -> int:
    shutdown = Shutdown()
    loop = asyncio.get_running_loop()

    def orphaned() -> None:
        with suppress(RuntimeError):  # the loop is closed, so the node has left
            loop.call_soon_threadsafe(shutdown.force, "the process that started this node is gone")

    if config.tethered:
        watch_stdin(orphaned)
    with signals_to(shutdown):
        life = asyncio.create_task(_live(config, home, emitter, role, shutdown), name="node")
        try:
            clean = await _until_over(life, shutdown, emitter)
        except Exception as error:
            emitter.error(diagnostics.as_swarm_error(error))
            emitter.emit("stopped", reason=shutdown.reason or "the node cannot continue", clean=False)
            return diagnostics.exit_code(error)
    emitter.emit("stopped", reason=shutdown.reason or "the work is done", clean=clean)
    # a leave that cut off work was still the leave that somebody asked for: systemd would start the node again after 1
    code = interrupts.EXIT_INTERRUPTED if shutdown.reason == CTRL_C else 0 if life.done() else EXIT_STUCK
    if not life.done():
        # closing the loop would wait for this task and its threads forever
        os._exit(code)
    return code


async def _until_over(life: asyncio.Task[None], shutdown: Shutdown, emitter: Emitter) -> bool:
    """Wait until `life` has ended, by itself or after a request to leave. Return whether its work was finished.

    A task that does not end within CLOSE_S of its cancellation is abandoned, with a warning.
    """
    await _first(life, shutdown.leaving)
    if shutdown.leaving.is_set():
        await _count_down(life, shutdown, emitter)
    clean = life.done() or shutdown.finished.is_set()
    if clean:
        await asyncio.wait({life}, timeout=CLOSE_S)
    life.cancel()
    await asyncio.wait({life}, timeout=CLOSE_S)
    if not life.done():
        emitter.warning(f"the node did not close within {CLOSE_S:.0f} s and is ended")
        return False
    if not life.cancelled() and (error := life.exception()) is not None:
        raise cause(error)
    return clean


async def _count_down(life: asyncio.Task[None], shutdown: Shutdown, emitter: Emitter) -> None:
    """Wait while the role finishes, within the grace period, and print how much time is left."""
    now_s = asyncio.get_running_loop().time
    grace_s = FORCED_S if shutdown.forced.is_set() else max(FORCED_S, shutdown.grace_s)
    until_s = now_s() + grace_s
    emitter.emit("draining", reason=shutdown.reason, seconds=grace_s)
    told_s = now_s()
    while not (life.done() or shutdown.finished.is_set()) and now_s() < until_s:
        wake = [shutdown.finished]
        if shutdown.forced.is_set():
            until_s = min(until_s, now_s() + FORCED_S)
        else:
            wake.append(shutdown.forced)
            if now_s() - told_s >= COUNTDOWN_S:
                told_s = now_s()
                emitter.say(f"  {until_s - now_s():.0f} s left")
        await _first(life, *wake, timeout_s=min(COUNTDOWN_S, until_s - now_s()))


async def _first(life: asyncio.Task[None], *events: asyncio.Event, timeout_s: float | None = None) -> None:
    """Wait until `life` has ended, one of `events` is set, or `timeout_s` is over."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait({life, *waits}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _live(config: Config, home: Home, emitter: Emitter, role: NodeRole, shutdown: Shutdown) -> None:
    """Run the node: start it, let it work, and close it."""
    identity = Identity.load(home.identity)
    node: Node | None = None
    not_joined = ""
    has_tried = asyncio.Event()  # whether the node has joined, or knows why not
    now_s = asyncio.get_running_loop().time
    since_s = now_s()

    async def status(_request: StatusRequest) -> StatusReply:
        with suppress(TimeoutError):  # scripts ask a node that they have just started for its address
            async with asyncio.timeout(JOIN_S):
                await has_tried.wait()
        if node is None:
            return starting_status(config, identity.peer_id, now_s() - since_s, not_joined)
        return await node.status()

    def nobody_answers(reason: str) -> None:
        nonlocal not_joined
        not_joined = reason
        has_tried.set()

    metrics = Registry()
    async with (
        control.serving(home.socket, status, partial(_leave, shutdown)),
        exporting(metrics, config, emitter),
    ):
        steps = StartupSteps(emitter, NUM_STEPS + role.num_steps)
        with metrics.reading(partial(read_starting, config.network_id, identity.peer_id)):
            machine = await _machine(config, home, role)
            steps.done("hardware", str(machine))
            limits = TrafficLimits(
                up_bytes_per_s=config.max_upload or math.inf, down_bytes_per_s=config.max_download or math.inf
            )
            traffic = Traffic(limits)
            month = MonthlyTraffic(home.traffic, time.time())
            network = await join_network(config, home, role, traffic, emitter, shutdown, on_nobody=nobody_answers)
        if network is None:
            return
        async with network, Membership(network) as membership:
            node = Node(
                config=config,
                home=home,
                identity=identity,
                emitter=emitter,
                shutdown=shutdown,
                hardware=machine,
                network=network,
                membership=membership,
                steps=steps,
                metrics=metrics,
                limits=limits,
                lending=Lending(config.hours, config.monthly_traffic, month),
                link_use=LinkUse(traffic, now_s()),
                role=role.name,
                peer_paths=network.traffic.peer_paths,
                relay_counts=network.active_relay_counts,
            )
            has_tried.set()
            await _work(node, network, role, month)


async def _work(node: Node, network: Libp2pNetwork, role: NodeRole, month: MonthlyTraffic) -> None:
    """Arrive on the network and run the role to its end, with all that goes on beside it."""
    shutdown, lending = node.shutdown, node.lending
    async with (
        remembered_peers.remembering(node.home, network),
        measuring(node, network),
        asyncio.TaskGroup() as tasks,
    ):
        await _arrive(node, network)

        async def failed() -> None:
            raise await network.wait_failed()

        watches = [
            tasks.create_task(keep_sampling(node.link_use), name="measure the use of the link"),
            tasks.create_task(_keep_announced(node, network), name="announce"),
            tasks.create_task(_keep_renewed(node), name="watch for suspensions"),
            tasks.create_task(_keep_compared_with_peers(node, network), name="compare clock and version with peers"),
            tasks.create_task(failed(), name="watch libp2p"),
        ]
        if role.computes and node.config.probe != "off":
            from swarm_node.machine import probe  # noqa: PLC0415 - torch

            watches.append(tasks.create_task(probe.keep_measuring(node), name="measure"))
        if lending.budget_bytes:
            counting = keep_counting(month, network.traffic)
            watches.append(tasks.create_task(counting, name="count the month's traffic"))
        shutdown.grace_s = node.config.drain_s
        await (run_in_shifts(node, role, network.allow_relaying) if lending.is_limited else role.run(node))
        shutdown.finished.set()
        for watch in watches:
            watch.cancel()


async def _machine(config: Config, home: Home, role: NodeRole) -> Hardware:
    """Return the hardware that the role computes with, and apply `--threads` to this thread. Raises ConfigError."""
    machine = await in_own_thread(_examine, config, home, role)
    if role.computes and config.threads:
        import torch  # noqa: PLC0415 - as `probe`

        # OpenMP counts threads per calling thread, and this one, which tries models out earlier, already has a number
        torch.set_num_threads(config.threads)
    return machine


def _examine(config: Config, home: Home, role: NodeRole) -> Hardware:
    """Examine the machine. Blocks, for seconds if the role computes. Raises ConfigError."""
    if not role.computes:
        return hardware.describe_machine()
    # imports torch: seconds of CPU time and 250 MB, which only a node that computes should spend
    from swarm_node.machine import probe  # noqa: PLC0415

    return probe.examine(config.device, home.cache, probe=config.probe, threads=config.threads)


async def _arrive(node: Node, network: Libp2pNetwork) -> None:
    """Report the steps that every node takes, and that the node is ready."""
    entry = network.entry
    addrs = await network.addrs()
    node.steps.done(
        "network",
        f"{node.network.network_id}, listening on {', '.join(addrs) or 'no address: reached through relays only'}",
    )
    await _look_around(node)
    way_in = _way_in("remembered peers", entry.remembered) or _way_in("nodes of the local network", entry.nearby)
    node.steps.done("peers", f"{node.num_peers} live, this one included{way_in}")
    own = f"/p2p/{node.network.peer_id}"  # the invitation of the owner's own seed names that seed as its peer
    if way_in and not all(peer.endswith(own) for peer in node.config.peers):
        others = "peers that it remembers" if entry.remembered else "nodes of the local network"
        node.emitter.warning(
            f"none of the given peers answered, so this node joined through {others}",
            remedy="give --peers the address of a running node",
        )
    node.reachability = await network.reachability(timeout_s=reachability.MEASURE_TIMEOUT_S)
    addrs = await network.addrs()
    meaning = reachability.explain(
        node.reachability,
        addrs,
        listens=not all(map(is_loopback, node.config.listen)),
        was_tested=network.was_dialled_back,
        is_symmetric=network.is_behind_symmetric_nat,
        peer_addrs=[addr for contact in network.known_peers for addr in contact.addrs],
    )
    node.steps.done("reachability", str(meaning))
    await node.announce()
    node.emitter.emit(
        "ready",
        peer_id=node.network.peer_id,
        addrs=addrs,
        name=node.config.name,
        network_id=node.network.network_id,
        home=str(node.home.path),
    )


def _way_in(what: str, peer_ids: Sequence[str]) -> str:
    """Return a clause that names the peers that a node joined through, or "" if there are none."""
    if not peer_ids:
        return ""
    return f"; joined through {what}: {first_few(peer_ids, MAX_NAMED)}"


async def _keep_announced(node: Node, network: Libp2pNetwork) -> None:
    """Keep the node's own record and the count of peers fresh, and announce at once that the node leaves."""
    while True:
        if node.shutdown.leaving.is_set():
            await asyncio.sleep(REFRESH_S)
        else:
            await node.shutdown.wait(REFRESH_S)
        node.reachability = await network.reachability()
        await _look_around(node)


async def _keep_renewed(node: Node) -> None:
    """Publish records again as soon as the machine wakes up, instead of when they are next due."""
    suspension = SuspensionWatch()
    while True:
        await asyncio.sleep(AWAKE_S)
        if suspension.was_suspended():
            logger.info("the machine was suspended, or its clock was set: publishing records again")
            node.membership.renew()


async def _keep_compared_with_peers(node: Node, network: Libp2pNetwork) -> None:
    """Tell once that this machine's clock differs from those of its peers, and once that it does no more. Tell once,
    too, that the peers speak another version of the protocol."""
    clock, version = ClockWatch(), VersionWatch()
    while True:
        await asyncio.sleep(CLOCK_S)
        greetings = await network.ask_greetings()
        if (theirs := version.look([each.hello for each in greetings])) is not None:
            _warn_of_version(node, theirs)
        skew_s = clock.look(clock_skews_s(greetings))
        if skew_s is None:
            continue
        if clock.is_wrong:
            message = f"this machine's clock is {off_by(skew_s)} those of its peers, so that they judge records wrongly"
            node.emitter.warning(message, remedy="set the clock, for example by turning on network time")
        else:
            node.emitter.emit("clock_right", seconds=abs(skew_s))


def _warn_of_version(node: Node, theirs: Hello) -> None:
    is_newer = theirs.protocol_version > PROTOCOL_VERSION
    node.emitter.warning(
        f"connected peers speak protocol {theirs.protocol_version} (software {theirs.software_version}), and this node "
        f"{PROTOCOL_VERSION} (software {software_version()}): they and this node cannot work together",
        remedy="update this node" if is_newer else "ask their operators to update",
    )


async def _look_around(node: Node) -> None:
    await node.announce()
    try:
        nodes = await node.membership.nodes()
        alive = {peer_id for peer_id, record in nodes.items() if record.state == "alive" and record.role != "visitor"}
        node.names = {peer_id: record.name for peer_id, record in nodes.items()}
        node.num_peers = len(alive | {node.network.peer_id})
    except PeerError as error:
        logger.info("cannot see the other nodes: %s", error)


async def _leave(shutdown: Shutdown, request: LeaveRequest) -> LeaveReply:
    if request.drain:
        shutdown.request("drain")
    else:
        shutdown.force("stop")
    return LeaveReply(pid=os.getpid(), seconds=shutdown.grace_s if request.drain else 0.0)
