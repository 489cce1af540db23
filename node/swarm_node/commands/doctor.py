"""`swarm-node doctor`: checks this machine for what keeps nodes from working. Exit code 1 if a check fails.

Each check is one function, and each finding that is not ok has a remedy. Checks read and try things, and leave nothing
behind. The network is checked from a temporary host with a temporary identity, so that the doctor can run beside a
daemon. Imports torch, which takes seconds, for the last local check only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Literal

from swarm.ended_tasks import end_tasks
from swarm.network.discovery.dns_lookup import DnsLookup
from swarm.network.discovery.own_networks import kinds_to_dial, own_subnets
from swarm.network.discovery.peer_names import TIMEOUT_S, is_named, resolve
from swarm.network.libp2p.listening import listen_failure
from swarm.network.libp2p.p2pd_process import MORE_MEMORY, p2pd_path
from swarm.network.libp2p_network import Libp2pNetwork
from swarm.network.membership import Membership
from swarm.network.multiaddr import is_loopback
from swarm.network.network_entry import ClockError
from swarm_protocol import limits
from swarm_protocol.errors import SwarmError
from swarm_protocol.identity import Identity
from swarm_protocol.records import NodeRecord
from swarm_protocol.version import PROTOCOL_VERSION, software_version, version_text

from swarm_node import diagnostics, interrupts
from swarm_node.commands.command_options import Flags
from swarm_node.control import ControlClient
from swarm_node.events.emitter import Emitter
from swarm_node.formatting import moment, plural
from swarm_node.machine import reachability
from swarm_node.network_join import LOOPBACK, visiting
from swarm_node.settings.config import Config
from swarm_node.storage import remembered_peers
from swarm_node.storage.home import Home, remove_empty

_MARKS = {"ok": "✓", "warn": "!", "fail": "✗"}

LISTEN_S = 2.0
"""Seconds to listen for local peers. They answer at once, or within a second after they answered another node."""

LIBRARIES = {"torch": (2, 8), "transformers": (5, 0), "hivemind": (1, 1, 12), "grpcio": (1, 70), "protobuf": (7, 35)}
"""The lower bounds of pyproject.toml, for machines where other versions were installed."""

LOW_DISK_BYTES = 5 * 2**30  # a small model and a few of its checkpoints
NO_DISK_BYTES = 200 * 2**20
RELEASED_AT = 1_760_000_000  # October 2025: an earlier time is before this software was written, so the clock is wrong
BINARY_TIMEOUT_S = 10.0
VISITOR_NAME = "doctor"

Result = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `remedy` is empty if the result is ok."""

    check: str
    result: Result
    message: str
    remedy: str = ""


def run(flags: Flags) -> int:
    config = remembered_peers.choose_listen(flags.member())
    diagnostics.quieten_libraries()
    logging.getLogger("swarm").setLevel(logging.CRITICAL)  # findings explain problems better
    emitter = Emitter(json=flags.json)
    code = 0
    for finding in _findings(config, emitter.say):
        code = 1 if finding.result == "fail" else code
        if emitter.json:
            emitter.emit("finding", **asdict(finding))
            continue
        emitter.result(f"{_MARKS[finding.result]} {finding.check:<13} {finding.message}")
        if finding.remedy:
            emitter.result(f"  → {finding.remedy}")
    return code


def _findings(config: Config, say: Callable[[str], None]) -> Iterator[Finding]:
    """Yield the results of all checks. `say` is called with what is done next if it takes seconds."""
    missing = Home(config.home).missing_folders()
    try:
        for check in LOCAL_CHECKS:
            yield from check(config)
    finally:
        remove_empty(missing)
    say("loading torch, to look for a GPU")
    yield from check_gpu()
    interrupts.raise_in_command()
    yield from asyncio.run(check_names(config))
    yield from asyncio.run(check_local_network(config))
    yield from asyncio.run(check_network(config, say))


def check_versions(_config: Config) -> list[Finding]:
    lacking = []
    for name, least in LIBRARIES.items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            lacking.append(f"{name} is not installed")
            continue
        numbers = tuple(int(part) for part in found.split("+")[0].split(".") if part.isdigit())
        if numbers < least:
            lacking.append(f"{name} {found} is older than {'.'.join(map(str, least))}")
    if lacking:
        remedy = f"{sys.executable} -m pip install --upgrade swarm-node"
        return [Finding("versions", "fail", "; ".join(lacking), remedy)]
    ours = version_text(software_version(), PROTOCOL_VERSION)
    message = f"swarm-node {ours}, Python {platform.python_version()}, torch {metadata.version('torch')}"
    return [Finding("versions", "ok", message)]


def check_libp2p(_config: Config) -> list[Finding]:
    """Check that the libp2p daemon that comes with hivemind runs on this machine."""
    path = p2pd_path()
    try:
        done = subprocess.run(  # noqa: S603 the binary of our own dependency
            [path, "-help"], capture_output=True, timeout=BINARY_TIMEOUT_S, check=False
        )
        said = (done.stdout + done.stderr).decode(errors="replace").strip()
        first = said.partition("\n")[0]
        reason = "" if "-listen" in said else f"it ended with status {done.returncode}{first and f': {first}'}"
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    if reason:
        remedy = MORE_MEMORY if "memory" in reason else "reinstall hivemind from its wheel for this machine"
        return [Finding("libp2p", "fail", f"{path} does not run: {reason}", remedy)]
    return [Finding("libp2p", "ok", f"{path} runs")]


def check_home(config: Config) -> list[Finding]:
    home = Home(config.home)
    try:
        home.create()
        peer_id = Identity.load(home.identity).peer_id if os.path.lexists(home.identity) else "no identity yet"
        owner = home.owner()
    except SwarmError as error:
        return [Finding("home", "fail", error.message, error.remedy)]
    running = "" if owner is None else f", its daemon runs (pid {owner})"
    return [Finding("home", "ok", f"{home.path} is writable, {peer_id}{running}")]


def check_daemon(config: Config) -> list[Finding]:
    """Ask the home's daemon, if one runs, whether it is in its network."""
    if not _is_running(config):
        return []
    try:
        reply = ControlClient(Home(config.home)).status()
    except SwarmError as error:
        return [Finding("daemon", "fail", error.message, error.remedy)]
    if reply.num_peers:
        return [Finding("daemon", "ok", f"in {reply.network_id}, which has {plural(reply.num_peers, 'node')}")]
    reason = f": {reply.not_joined}" if reply.not_joined else ""
    remedy = "run the doctor with the --peers or --config of this daemon, to check the way into its network"
    return [Finding("daemon", "warn", f"it has not joined {reply.network_id} yet{reason}", remedy)]


def check_disk(config: Config) -> list[Finding]:
    """Check the free space for the home, if it exists and is not read-only. `check_home` creates it for a while, or
    says why it cannot."""
    if not os.path.isdir(config.home):  # noqa: PTH112 (Path.is_dir raises where one may not look)
        return []
    if os.statvfs(config.home).f_flag & os.ST_RDONLY:
        return []
    free_bytes = shutil.disk_usage(config.home).free
    result: Result = "ok" if free_bytes >= LOW_DISK_BYTES else "warn" if free_bytes >= NO_DISK_BYTES else "fail"
    remedy = "" if result == "ok" else "free some space, or choose another disk with --home"
    return [Finding("disk", result, f"{free_bytes / 2**30:.1f} GiB free for {config.home}", remedy)]


def check_clock() -> Finding:
    """Check that the clock is not before this software was written. `check_network` compares it with the seeds'."""
    now = time.time()
    shown = moment(max(0.0, now))
    if now < RELEASED_AT:
        remedy = "set the clock, for example by turning on network time: timedatectl set-ntp true"
        return Finding("clock", "fail", f"the clock is wrong: {shown}", remedy)
    return Finding("clock", "ok", shown)


def check_ports(config: Config) -> list[Finding]:
    """Check that each address that the node would listen on is free."""
    if _is_running(config):
        return [Finding("ports", "ok", "in use by this home's own daemon")]
    return [_port_finding(addr) for addr in config.listen]


def _is_running(config: Config) -> bool:
    with suppress(SwarmError):  # `check_home` reports a home that this user may not open
        return Home(config.home).owner() is not None
    return False


def check_gpu() -> list[Finding]:
    import torch  # noqa: PLC0415 - the checks before it need not wait for it

    if torch.cuda.is_available():
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        kind = "ROCm" if torch.version.hip else "CUDA"
        memory = f"{free_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB free"
        return [Finding("gpu", "ok", f"{kind} {torch.cuda.get_device_name()}, {memory}")]
    if torch.backends.mps.is_available():
        return [Finding("gpu", "ok", "Apple MPS")]
    if shutil.which("nvidia-smi"):
        remedy = "install the torch build for your driver: https://pytorch.org/get-started/locally"
        message = f"there is an NVIDIA driver, but torch {torch.__version__} cannot use it"
        return [Finding("gpu", "warn", message, remedy)]
    return [Finding("gpu", "ok", "none: this node computes on the CPU")]


LOCAL_CHECKS = (check_versions, check_libp2p, check_home, check_daemon, check_disk, check_ports)
"""The checks that need neither torch nor another node, in the order in which they are printed."""


def _port_finding(addr: str) -> Finding:
    error = listen_failure(addr)
    if error is None:
        return Finding("ports", "ok", f"{addr} is free")
    message = f"cannot listen on {addr}: {(error.strerror or str(error)).lower()}"
    return Finding("ports", "fail", message, "choose another address with --listen; port 0 takes any free port")


async def check_network(config: Config, say: Callable[[str], None] = lambda _text: None) -> list[Finding]:
    """Join with a temporary identity, and check peers, clock and reachability. `say` is called with what is done."""
    clock = check_clock()
    known = tuple(each.contact for each in remembered_peers.remembered(config))
    if not (config.peers or known or config.finds_local_peers):
        if _is_running(config):
            return [clock]  # `check_daemon` says whether it is in its network
        remedy = "give --peers the address of a seed"
        return [clock, Finding("seeds", "warn", "no seed is given, so no node was contacted", remedy)]
    say(f"joining the network {config.network_id}")
    try:
        async with visiting(
            config, listen=_usable(config), announce=config.announce, remembered=known, relay=config.relay
        ) as (network, membership):
            if clock.result == "ok" and (wrong := network.entry.clock_error):
                clock = Finding("clock", "warn", wrong.message, wrong.remedy)
            say(f"asking other nodes whether they reach this one, for up to {reachability.EXAMINE_TIMEOUT_S:.0f} s")
            return await _look_around(config, network, membership, clock)
    except ClockError as error:
        return [Finding("clock", "fail", error.message, error.remedy)]
    except SwarmError as error:
        # a user who names no peer may be about to start a network
        result: Result = "fail" if config.peers or known else "warn"
        return [clock, Finding("seeds", result, error.message, error.remedy)]


def _usable(config: Config) -> tuple[str, ...]:
    """Return the node's addresses, with a free port where another program, or the home's own daemon, has theirs.

    `check_ports` names what is wrong with an address; the seeds are asked in any case.
    """
    is_running = _is_running(config)
    usable = []
    for addr in config.listen:
        free = re.sub(r"(?<=/tcp/)\d+", "0", addr)
        if listen_failure(free) is None:
            usable.append(free if is_running or listen_failure(addr) else addr)
    return tuple(usable) or LOOPBACK


def _way_in(config: Config, network: Libp2pNetwork) -> str:
    entry = network.entry
    if entry.given:
        return f"through {plural(len(entry.given), 'given peer')}"
    if entry.remembered:
        why = ", as no given peer answered" if config.peers else ""
        return f"through {plural(len(entry.remembered), 'remembered peer')}{why}"
    return f"through {plural(len(entry.nearby), 'node')} of the local network"


async def _look_around(config: Config, network: Libp2pNetwork, membership: Membership, clock: Finding) -> list[Finding]:
    addrs = await network.addrs()
    membership.announce(
        NodeRecord(
            name=VISITOR_NAME,
            version=software_version(),
            addrs=addrs[: limits.MAX_ADDRS],
            device=VISITOR_NAME,
            memory_bytes=0,
            free_memory_bytes=0,
            reachability="unknown",
            started_at=time.time(),
            role="visitor",
        )
    )
    num_nodes = sum(record.role != "visitor" for record in (await membership.nodes()).values())
    found = await network.reachability(timeout_s=reachability.EXAMINE_TIMEOUT_S)
    addrs = await network.addrs()
    is_local = all(map(is_loopback, (*config.listen, *config.peers)))
    is_reached = found == "public" or is_local
    listens = not all(map(is_loopback, config.listen))
    meaning = reachability.explain(
        found,
        addrs,
        listens=listens,
        was_tested=network.was_dialled_back,
        is_symmetric=network.is_behind_symmetric_nat,
        peer_addrs=config.peers,
    )
    if is_reached:
        reached = Finding("reachability", "ok", str(meaning))
    else:
        was_late = listens and not network.was_dialled_back
        again = f"{meaning.remedy}; if this machine was busy, run the doctor again" if was_late else meaning.remedy
        reached = Finding("reachability", "warn", meaning.meaning, again)
    joined = f"joined {config.network_id}, which has {plural(num_nodes, 'node')}"
    return [
        Finding("seeds", "ok", f"{joined}, {_way_in(config, network)}"),
        replace(clock, message=f"{clock.message}, within {limits.MAX_CLOCK_SKEW_S:.0f} s of the seeds' clocks"),
        reached,
    ]


async def check_names(config: Config, lookup: DnsLookup | None = None) -> list[Finding]:
    """Check that each domain name among the peers leads to addresses that this node may dial."""
    lookup = lookup or DnsLookup(timeout_s=TIMEOUT_S)
    named = [text for text in config.peers if is_named(text)]
    kinds = kinds_to_dial(config.listen, [subnet.address for subnet in own_subnets()] if named else ())
    found = await asyncio.gather(*(resolve([text], lookup, kinds, timeout_s=TIMEOUT_S) for text in named))
    findings = []
    for text, resolved in zip(named, found, strict=True):
        if resolved.addrs:
            num_peers = len({addr.peer_id for addr in resolved.addrs})
            findings.append(Finding("names", "ok", f"{text} leads to {plural(num_peers, 'peer')}"))
        for failure in resolved.failures.values():
            remedy = "check the name and this machine's name servers, or give an address with --peers"
            findings.append(Finding("names", "fail", f"{text}: {failure.message}", remedy))
    return findings


async def check_local_network(config: Config) -> list[Finding]:
    """Report which nodes of the network answer in the local network, if the node would look for them there."""
    if not config.finds_local_peers:
        return []
    # imported only if the local network is searched
    from swarm.network.discovery.local_discovery import LocalDiscovery  # noqa: PLC0415
    from swarm.network.discovery.multicast import MulticastLink, segments_of  # noqa: PLC0415

    segments = segments_of(own_subnets())
    if not segments:
        return [Finding("local network", "ok", "not searched: this machine is not in a private network")]
    link = await MulticastLink.open(segments, lambda _segment, _sender, _packet: None)
    opened = {each.interface for each in link.segments}
    link.close()
    if closed := {each.interface for each in segments} - opened:
        message = f"multicast cannot be used on {', '.join(sorted(closed))}"
        return [Finding("local network", "warn", message, "free UDP port 5353, or turn this search off with --no-mdns")]
    discovery = LocalDiscovery(
        config.network_id,
        Identity.generate().peer_id,
        lambda _subnets: (),
        secret=config.invite.network_secret if config.invite else None,
    )
    running = asyncio.create_task(discovery.run())
    found = await discovery.first(timeout_s=LISTEN_S)
    await end_tasks(running)
    where = ", ".join(sorted({each.interface for each in segments}))
    who = plural(len(found), "node") if found else "no node"
    return [Finding("local network", "ok", f"{who} of {config.network_id} answered by multicast on {where}")]
