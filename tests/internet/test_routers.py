"""Tests routers that change during use: one that maps ports on request, and a direct path between homes that opens."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bench.report import Report
from internet import namespaces, talker
from internet.lab import HOME_ROUTER, PORT, Lab
from internet.lab_nodes import JOIN, LabNodes
from support.node_process import wait_until
from swarm.network.paths import direct_paths, introductions

pytestmark = [pytest.mark.internet, pytest.mark.timeout(180)]

MAPPED_S = 30.0
"""Time for the daemon to find its router and to be mapped, and for peers to confirm that."""

MAX_PAUSE_S = 5.0

UPNP_CHAINS = """\
*nat
:MINIUPNPD -
:MINIUPNPD-POSTROUTING -
-A PREROUTING -i eth0 -j MINIUPNPD
COMMIT
*filter
:MINIUPNPD -
-A FORWARD -i eth0 -o lan -j MINIUPNPD
COMMIT
"""
UPNP_SETTINGS = """\
ext_ifname=eth0
listening_ip=lan
enable_natpmp=yes
enable_upnp=yes
secure_mode=yes
uuid=00000000-0000-0000-0000-000000000001
allow 1024-65535 0.0.0.0/0 1024-65535
deny 0-65535 0.0.0.0/0 0-65535
"""


@contextmanager
def mapping_router(lab: Lab, host: str, folder: Path) -> Iterator[None]:
    """Have the host's router map ports by UPnP and NAT-PMP, as Debian's miniupnpd-iptables does."""
    router = lab.namespace(HOME_ROUTER[host])
    namespaces.run("ip", "netns", "exec", router, "iptables-legacy-restore", "--noflush", text=UPNP_CHAINS)
    namespaces.run("ip", "netns", "exec", router, "iptables", "-I", "INPUT", "-i", "lan", "-j", "ACCEPT")
    settings, pid, log = folder / "miniupnpd.conf", folder / "miniupnpd.pid", folder / "miniupnpd.log"
    settings.write_text(UPNP_SETTINGS)
    command = ("ip", "netns", "exec", router, "miniupnpd", "-d", "-f", str(settings), "-P", str(pid))
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            yield
        finally:
            process.terminate()
            process.wait()


@contextmanager
def separated(lab: Lab, one: str, other: str) -> Iterator[None]:
    """Drop all packets between two homes that do not go through another host."""
    rules = [
        (lab.namespace(HOME_ROUTER[here]), direction, lab.address(there))
        for here, there in ((one, other), (other, one))
        for direction in ("-s", "-d")
    ]
    for action in ("-I", "-D"):
        for router, direction, address in rules:
            namespaces.run(
                "ip", "netns", "exec", router, "iptables", action, "FORWARD", direction, address, "-j", "DROP"
            )
        if action == "-I":
            yield


def test_node_whose_router_maps_ports_is_reached_directly(nodes: LabNodes, figures: Report, tmp_path: Path) -> None:
    if not (shutil.which("miniupnpd") and shutil.which("iptables-legacy-restore")):
        pytest.skip("this test needs Debian's miniupnpd-iptables")
    seed = nodes.seed()
    with mapping_router(nodes.lab, "home1", tmp_path):
        [home, caller] = nodes.talkers("home1", "sym1", peers=seed.public)
        began_at = time.monotonic()
        outer = f"/ip4/{nodes.lab.address('home1')}/tcp/"

        def is_mapped() -> bool:
            return any(addr.startswith(outer) for addr in home.tell("addrs").result())

        wait_until(is_mapped, "the mapped address is not announced", timeout_s=MAPPED_S)
        figures.row("router maps a port", announced_after_s=time.monotonic() - began_at)
        told = home.tell("addrs").result()
        assert not any(addr.startswith(f"{outer}{PORT}/") for addr in told), "a mapped port, not the NAT's memory"

        def is_direct() -> bool:
            before = nodes.lab.sent("seed").total
            called = caller.tell("call", peer=home.peer_id, num=20, pause_s=0.05, num_bytes=20_000).result()
            # a call may fail while the path is replaced, and is then not among the calls that show a direct path
            return called["failures"] == [] and nodes.lab.sent("seed").total - before < 20 * 20_000 / 5

        # connections that began over a relay move once the address is known
        wait_until(is_direct, "a symmetric NAT reaches it through the relay alone", timeout_s=MAPPED_S)
        figures.row("router maps a port", direct_after_s=time.monotonic() - began_at)


def impatient(namespace: str) -> None:
    """Become a talker that looks at relayed connections every few seconds, since a minute is long for a test."""
    direct_paths.FIRST_S = introductions.RETRY_S = 5.0
    direct_paths.TURN_S = 3.0
    talker.begin(namespace)


def test_stream_moves_from_a_relay_to_the_direct_path_that_opens(nodes: LabNodes, figures: Report) -> None:
    seed = nodes.seed()
    stand_by = (*JOIN, "--take", "nothing")
    with separated(nodes.lab, "home1", "home2"):
        one, other = (
            nodes.start(host, *stand_by, peers=seed.public, begin_with=impatient) for host in ("home1", "home2")
        )
        for node in (one, other):
            nodes.wait_ready(node)
            while node.wait_for("step", MAPPED_S)["title"] != "standing by":
                pass
        talking = one.tell("talk", peer=other.peer_id, seconds=100, pause_s=0.02, num_bytes=1000)
        talking.next()
        before = nodes.lab.sent("seed").total
        time.sleep(2)
        relayed_bytes = nodes.lab.sent("seed").total - before
        assert relayed_bytes > 20 * 1000, "the relay does not carry it"
    opened_at = time.monotonic()

    def is_direct() -> bool:
        before = nodes.lab.sent("seed").total
        time.sleep(2)
        return nodes.lab.sent("seed").total - before < relayed_bytes / 5

    wait_until(is_direct, "the stream stays on the relay", timeout_s=90)
    moved_s = time.monotonic() - opened_at
    talked = talking.end()
    figures.row("a direct path opens", moved_s=moved_s, longest_pause_s=talked["longest_s"])
    assert talked["longest_s"] < MAX_PAUSE_S
