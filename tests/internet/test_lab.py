"""Tests that the lab's hosts and routers behave as docs/guides/small-internet.md says, and that nothing of a lab is
left behind."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from internet import namespaces
from internet.lab import BACKBONE, HOSTS, PORT, Lab, address6, remove_abandoned
from internet.lab_nodes import LabNodes
from internet.paths import PairMeter
from support.node_process import wait_until
from support.site_pages import DOCS

pytestmark = [pytest.mark.internet, pytest.mark.quick]

SHORT_S = 1.0
"""Longer than anything takes to arrive in the lab."""


def listening(lab: Lab, host: str, *, family: socket.AddressFamily = socket.AF_INET) -> socket.socket:
    return namespaces.inside(
        lab.namespace(host), lambda: socket.create_server(("", PORT), family=family, reuse_port=True)
    )


def dial(lab: Lab, host: str, address: str, *, port: int = PORT, own_port: int = 0) -> socket.socket:
    """Raises TimeoutError if nobody answers."""

    def connect() -> socket.socket:
        connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        connection.settimeout(SHORT_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        connection.bind(("", own_port))
        try:
            connection.connect((address, port))
        except OSError:
            connection.close()
            raise
        return connection

    return namespaces.inside(lab.namespace(host), connect)


def seen_from(lab: Lab, host: str, public: str) -> tuple[str, int]:
    """Dial a public host from PORT, and return the address that the host sees."""
    with listening(lab, public) as server, dial(lab, host, lab.address(public), own_port=PORT):
        connection, seen = server.accept()
        connection.close()
        return str(seen[0]), int(seen[1])


@pytest.mark.parametrize(("host", "keeps_port"), [("home1", True), ("home2", True), ("sym1", False), ("sym2", False)])
def test_router_keeps_ports_or_gives_each_destination_another(lab: Lab, host: str, keeps_port: bool) -> None:
    seen = [seen_from(lab, host, public) for public in ("open1", "open2", "seed")]
    assert {address for address, _ in seen} == {lab.address(host)}
    assert len({port for _, port in seen}) == (1 if keeps_port else 3)
    assert (seen[0][1] == PORT) == keeps_port


def test_carriers_customer_is_seen_at_the_carriers_address(lab: Lab) -> None:
    assert seen_from(lab, "cgn1", "open1")[0] == f"{BACKBONE}.25"


def test_routers_drop_unsolicited_packets_unless_they_forward_them(lab: Lab) -> None:
    with listening(lab, "home1"), pytest.raises(TimeoutError):
        dial(lab, "open1", lab.address("home1"))
    with listening(lab, "fwd1") as server, dial(lab, "home1", lab.address("fwd1")):
        connection, seen = server.accept()
        connection.close()
        assert seen[0] == lab.address("home1")
    with listening(lab, "home1b") as server, dial(lab, "home1", "192.168.1.3"):
        server.accept()[0].close()


def test_ip6_homes_have_public_addresses_and_drop_unsolicited_packets(lab: Lab) -> None:
    assert [host for host in HOSTS if not address6(host)] == ["home2", "sym2", "fwd1"]
    for host in ("home1", "sym1", "cgn1"):
        with listening(lab, "open1", family=socket.AF_INET6) as server, dial(lab, host, address6("open1")):
            connection, seen = server.accept()
            connection.close()
            assert seen[0] == address6(host)
        with listening(lab, host, family=socket.AF_INET6), pytest.raises(TimeoutError):
            dial(lab, "open1", address6(host))
    with listening(lab, "home1b", family=socket.AF_INET6) as server, dial(lab, "home1", address6("home1b")):
        server.accept()[0].close()
    assert lab.sent("home1").to[address6("home1b")] > 0


def exchange(one: socket.socket, other: socket.socket) -> bool:
    """Return whether a byte arrives."""
    other.settimeout(SHORT_S)
    try:
        one.sendall(b"x")
        return other.recv(1) == b"x"
    except TimeoutError:
        return False


CHANGES: dict[str, Callable[[Lab], None]] = {
    "reboot": lambda lab: lab.reboot_router("home1", down_s=0.1),
    "address": lambda lab: lab.change_address("home1"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_connection_is_dead_after_its_router_rebooted_or_moved_and_new_ones_work(lab: Lab, change: str) -> None:
    before = lab.address("home1")
    with listening(lab, "open1") as server, dial(lab, "home1", lab.address("open1")) as ours:
        theirs, _ = server.accept()
        with theirs:
            assert exchange(ours, theirs)
            CHANGES[change](lab)
            assert not exchange(ours, theirs)
            assert not exchange(theirs, ours)
    assert (lab.address("home1") == before) == (change == "reboot")
    assert seen_from(lab, "home1", "open2")[0] == lab.address("home1")


@pytest.mark.parametrize("host", ["home1", "cgn1"])
def test_router_that_rebooted_routes_both_versions_again(lab: Lab, host: str) -> None:
    lab.reboot_router(host, down_s=0.1)
    with listening(lab, "open1"), listening(lab, "open1", family=socket.AF_INET6):
        for address in (lab.address("open1"), address6("open1")):
            wait_until(partial(reaches, lab, host, address), f"{host} does not reach {address}", timeout_s=20)


def reaches(lab: Lab, host: str, address: str) -> bool:
    try:
        dial(lab, host, address).close()
    except TimeoutError:  # an interface that has just come up loses packets for a moment
        return False
    return True


def test_router_forgets_a_silent_connection_after_its_time(lab: Lab) -> None:
    lab.forget_after("home1", 1)
    with listening(lab, "open1") as server, dial(lab, "home1", lab.address("open1")) as ours:
        theirs, _ = server.accept()
        with theirs:
            assert exchange(ours, theirs)
            time.sleep(0.5)
            assert exchange(theirs, ours)
            time.sleep(2.5)  # the kernel's clock for connections is coarse
            assert not exchange(theirs, ours)


def transfer_s(sender: socket.socket, receiver: socket.socket, num_bytes: int) -> float:
    """Return how long so many bytes take."""
    for each in (sender, receiver):
        each.settimeout(10)
    began_at = time.monotonic()
    sending = threading.Thread(target=sender.sendall, args=(bytes(num_bytes),))
    sending.start()
    while num_bytes:
        num_bytes -= len(receiver.recv(65536))
    sending.join()
    return time.monotonic() - began_at


def test_limited_line_carries_its_rate_each_way(lab: Lab) -> None:
    mbit, num_bytes = 40, 2_500_000
    lab.limit("home1", mbit)
    with listening(lab, "open1") as server, dial(lab, "home1", lab.address("open1")) as ours:
        theirs, _ = server.accept()
        with theirs:
            for sender, receiver in ((ours, theirs), (theirs, ours)):
                sender.settimeout(10)
                receiver.settimeout(10)
                seconds = transfer_s(sender, receiver, num_bytes)
                assert seconds == pytest.approx(8 * num_bytes / mbit / 1e6, rel=0.3)


def test_removed_labs_and_labs_of_dead_processes_are_gone(lab: Lab) -> None:
    alive = [lab.namespace(host) for host in HOSTS]
    dead = f"swarm-lab-{2**22 + 1}-seed"  # beyond what the kernel gives as process ids
    namespaces.add(dead)
    remove_abandoned()
    assert namespaces.named(dead) == []
    assert set(alive) <= set(namespaces.named(rf"swarm-lab-{os.getpid()}-\w+"))
    lab.remove()
    assert namespaces.named(rf"swarm-lab-{os.getpid()}-\w+") == []


def test_meter_separates_direct_from_relayed_bytes(nodes: LabNodes) -> None:
    """Two public nodes that announce their addresses reach each other without the seed's relay."""
    seed = nodes.seed()
    one, other = (
        nodes.talkers(host, peers=seed.public, options=("--announce", f"/ip4/{nodes.lab.address(host)}/tcp/{PORT}"))[0]
        for host in ("open1", "open2")
    )
    meter = PairMeter(nodes.lab, "open1", "open2")
    talking = one.tell("talk", peer=other.peer_id, seconds=20, pause_s=0.05, num_bytes=2000)
    direct_s = meter.wait_direct(within_s=5)
    assert direct_s is not None
    assert direct_s <= 1.5
    assert one.tell("drink", peer=other.peer_id, num=20).result()["num"] == 20
    assert talking.end()["num"] > 5
    assert meter.shares().seed_share < 0.02


def test_example_of_the_guide_passes(nodes: LabNodes) -> None:
    page = (DOCS / "guides" / "small-internet.md").read_text("utf-8")
    [example] = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, "small-internet.md", "exec"), names)
    names["test_home_reaches_a_public_host"](nodes)
