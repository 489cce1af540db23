"""Tests hosts with IPv6 beside IPv4. They need no NAT for IPv6, but their routers drop packets that nobody behind them
has asked for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from bench.report import Report
from internet import namespaces
from internet.lab import address6
from internet.lab_nodes import LISTEN_BOTH, LabNodes
from internet.pairs import MAX_DIRECT_S, MAX_SEED_SHARE
from internet.paths import PairMeter
from support.node_process import wait_until

pytestmark = [pytest.mark.internet, pytest.mark.timeout(180)]

BY_DEFAULT: Sequence[str] = ()
PAIRS = [
    # only one version has a direct path: IPv6 if the NATs of IPv4 allow none, IPv4 if one of the hosts has nothing else
    pytest.param("sym1", "cgn1", BY_DEFAULT, id="symmetric+carrier", marks=pytest.mark.quick),
    pytest.param("sym1", "home1", BY_DEFAULT, id="symmetric+NAT"),
    pytest.param("home1", "home2", LISTEN_BOTH, id="two versions+IPv4", marks=pytest.mark.quick),
    pytest.param("home2", "home1", BY_DEFAULT, id="IPv4+two versions"),
    pytest.param("home1", "home1b", BY_DEFAULT, id="behind one router"),
    pytest.param("cgn1", "open1", LISTEN_BOTH, id="carrier+public"),
]


@pytest.mark.parametrize(("one", "other", "listen"), PAIRS)
@pytest.mark.parametrize("seeds_versions", ["IPv4", "both"])
def test_pair_finds_the_version_that_has_a_direct_path(
    nodes: LabNodes, figures: Report, one: str, other: str, listen: Sequence[str], seeds_versions: str
) -> None:
    seed = nodes.seed(listen=LISTEN_BOTH)
    peers = seed.public if seeds_versions == "IPv4" else (*seed.public6, *seed.public)
    caller, called = nodes.talkers(one, other, peers=peers, listen=listen)
    meter = PairMeter(nodes.lab, one, other)
    calling = caller.tell("call", peer=called.peer_id, num=10_000, pause_s=0.1, num_bytes=2000)
    direct_s = meter.wait_direct(within_s=1.2 * MAX_DIRECT_S)
    meter = PairMeter(nodes.lab, one, other)
    assert caller.tell("drink", peer=called.peer_id, num=32).result()["num"] == 32
    shares = meter.shares()
    ip6_bytes = nodes.lab.sent(one).to.get(address6(other), 0)
    figures.row(
        f"{one} + {other}, seed {seeds_versions}",
        direct_after_s="never" if direct_s is None else direct_s,
        seed_share=shares.seed_share,
        ip6_bytes=ip6_bytes,
    )
    assert calling.end()["failures"] == []
    assert direct_s is not None
    assert shares.seed_share <= MAX_SEED_SHARE


@pytest.mark.parametrize(("lacking", "other", "is_direct"), [("home1", "sym1", True), ("open2", "home2", False)])
def test_host_without_ip4_reaches_dual_hosts_directly_and_ip4_only_hosts_over_a_relay(
    nodes: LabNodes, figures: Report, lacking: str, other: str, is_direct: bool
) -> None:
    namespaces.run(*f"ip -4 -n {nodes.lab.namespace(lacking)} addr flush dev eth0".split())
    seed = nodes.seed(listen=LISTEN_BOTH)
    caller, called = nodes.talkers(lacking, other, peers=(*seed.public6, *seed.public), listen=BY_DEFAULT)
    meter = PairMeter(nodes.lab, lacking, other)
    calling = caller.tell("call", peer=called.peer_id, num=10_000, pause_s=0.1, num_bytes=2000)
    direct_s = meter.wait_direct(within_s=1.2 * MAX_DIRECT_S if is_direct else 2.0)
    told = calling.end()
    figures.row(f"{lacking} without IPv4 + {other}", direct_after_s=direct_s or "never", first_call_s=told["first_s"])
    assert told["failures"] == []
    assert told["num"] > 1
    assert (direct_s is not None) == is_direct


def test_public_hosts_without_a_common_version_reach_each_other_over_a_relay(nodes: LabNodes) -> None:
    for lacking, version in (("open1", 6), ("open2", 4)):
        namespaces.run(*f"ip -{version} -n {nodes.lab.namespace(lacking)} addr flush dev eth0".split())
    seed = nodes.seed(listen=LISTEN_BOTH)
    [by_ip6] = nodes.talkers("open2", peers=seed.public6, listen=("--listen", "/ip6/::/tcp/{port}"))
    [by_ip4] = nodes.talkers("open1", peers=seed.public)

    def is_public() -> bool:
        return any(address6("open2") in addr for addr in by_ip6.tell("addrs").result())

    wait_until(is_public, "peers do not confirm the address of the host with IPv6", timeout_s=60)
    for caller, called in ((by_ip4, by_ip6), (by_ip6, by_ip4)):
        told = caller.tell("call", peer=called.peer_id, num=3, pause_s=0.1, num_bytes=100).result()
        assert told["failures"] == []
