"""The addresses of peers that a node dials, and the order in which it announces its own."""

from __future__ import annotations

import pytest
from support.memory_lan import subnets
from swarm.network.paths import dial_policy
from swarm.network.paths.dial_policy import DialPolicy, to_announce
from swarm_protocol import limits
from swarm_protocol.identity import Identity

RELAY = Identity(bytes(32)).peer_id
CIRCUIT = f"/ip4/44.1.1.1/tcp/4001/p2p/{RELAY}/p2p-circuit"
FAR, LAN, OTHER_LAN, HERE = (
    "/ip4/44.7.7.7/tcp/4001",
    "/ip4/192.168.1.9/tcp/4001",
    "/ip4/10.0.0.9/tcp/4001",
    "/ip4/127.0.0.1/tcp/4001",
)
IP6_LANS = ("/ip6/fd00:1::9/tcp/1", "/ip6/fd00:2::9/tcp/1")
OWN_LAN = "/ip4/192.168.1.2/tcp/4001"


@pytest.mark.parametrize(
    ("own", "given", "met", "dialled"),
    [
        ((OWN_LAN,), (FAR,), (), (FAR, LAN)),
        ((OWN_LAN,), (OTHER_LAN,), (), (FAR, LAN, OTHER_LAN, *IP6_LANS)),
        ((OWN_LAN,), (HERE,), (), (FAR, LAN, HERE)),
        ((FAR,), (), (OTHER_LAN,), (FAR, OTHER_LAN)),
        ((FAR,), (), (HERE,), (FAR, HERE)),
        ((HERE,), (), (), (FAR, HERE)),
        ((HERE,), (FAR,), (), (FAR,)),
        ((), (FAR,), (), (FAR,)),
        ((), (), (), (FAR,)),
        ((), (), (HERE,), (FAR, HERE)),
        ((FAR,), (), (CIRCUIT,), (FAR,)),
        (("/ip6/fd00:1::2/tcp/1",), (FAR,), (), (FAR, IP6_LANS[0])),
    ],
)
def test_private_addresses_are_dialled_only_where_the_network_is(
    own: tuple[str, ...], given: tuple[str, ...], met: tuple[str, ...], dialled: tuple[str, ...]
) -> None:
    named = (FAR, LAN, OTHER_LAN, HERE, CIRCUIT, *IP6_LANS, "/nonsense")
    policy = DialPolicy(own=own, given=given, met=met)
    assert set(policy.worth_knowing(named)) == {*dialled, CIRCUIT}


def through(inner: str) -> str:
    return f"{inner}/p2p/{RELAY}/p2p-circuit"


@pytest.mark.parametrize("inner", ["/ip4/192.168.1.1/tcp/22", HERE, "/dns4/evil.example/tcp/22", "/ip4/0.0.0.0/tcp/22"])
def test_relay_at_a_refused_address_is_used_only_while_it_is_connected(inner: str) -> None:
    apart = DialPolicy(own=(FAR,), given=())
    assert not apart.takes(through(inner))
    connected = DialPolicy(own=(FAR,), given=(), connected={RELAY})
    assert connected.takes(through(inner))
    assert connected.told_daemon(through(inner)) == f"/p2p/{RELAY}/p2p-circuit"
    assert connected.told_daemon(CIRCUIT) == CIRCUIT
    assert DialPolicy(own=(FAR,), given=(OTHER_LAN, HERE)).takes(through(OTHER_LAN))


@pytest.mark.parametrize(
    "addr",
    [
        *("/dns/a.example/tcp/1", "/dns4/a.example/tcp/1", "/dns6/a.example/tcp/1", "/dnsaddr/a.example"),
        *("/ip4/0.0.0.0/tcp/1", "/ip4/0.1.2.3/tcp/1", "/ip4/224.0.0.1/tcp/1", "/ip4/255.255.255.255/tcp/1"),
        *("/ip4/240.0.0.1/tcp/1", "/ip4/192.0.0.8/tcp/1", "/ip4/169.254.169.254/tcp/80", "/ip6/fe80::1/tcp/1"),
        *("/ip6/::/tcp/1", "/ip6/ff02::1/tcp/1", "/ip6/fec0::1/tcp/1", "/ip6/100::1/tcp/1", "/ip6/::10.0.0.1/tcp/1"),
        *("/ip6/::ffff:192.168.1.9/tcp/1", "/ip6/::ffff:44.1.1.1/tcp/1", "/ip6/64:ff9b::c0a8:109/tcp/1"),
        *("/ip6/64:ff9b:1::1/tcp/1", "/ip6/2002:c0a8:109::1/tcp/1", "/ip6/2001:0:1::1/tcp/1"),
        *(
            "/ip6/2a00:1450::1%eth0/tcp/1",
            "/ip4/44.1.1.1/tcp/1/ip4/192.168.1.1/tcp/22",
            "/ip4/44.1.1.1/tcp/1/p2p-circuit",
        ),
    ],
)
def test_address_that_no_peer_can_have_is_never_dialled(addr: str) -> None:
    everywhere = DialPolicy(own=(OWN_LAN, "/ip6/fd00:1::2/tcp/1"), given=(OTHER_LAN, HERE), met=("/ip6/fe80::2/tcp/1",))
    assert everywhere.worth_knowing([addr, FAR]) == (FAR,)


def test_neighbour_by_link_local_addresses_is_dialled() -> None:
    assert DialPolicy(own=("/ip4/169.254.7.7/tcp/1",), given=()).takes("/ip4/169.254.7.8/tcp/1")


@pytest.mark.parametrize(
    ("listen", "takes_loopback"), [(("/ip4/127.0.0.1/tcp/0",), True), (("/ip4/0.0.0.0/tcp/0",), False)]
)
def test_policy_uses_the_machine_s_networks_before_the_start(
    listen: tuple[str, ...], takes_loopback: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dial_policy, "own_subnets", lambda: subnets("127.0.0.1/8", "192.168.1.2/16"))
    policy = DialPolicy.of_machine(listen=listen, given=())
    assert policy.worth_knowing((FAR, LAN, OTHER_LAN, HERE)) == ((FAR, LAN, HERE) if takes_loopback else (FAR, LAN))
    assert DialPolicy.of_machine(listen=listen, given=(OTHER_LAN,)).takes(OTHER_LAN)


def test_public_addresses_are_announced_first_and_relayed_ones_before_private_ones() -> None:
    told = to_announce((HERE, LAN, FAR, FAR, "/unix/x"), (CIRCUIT,))
    assert told == (FAR, CIRCUIT, LAN, HERE)
    many = [f"/ip4/44.7.7.7/tcp/{port}" for port in range(1, 100)]
    assert len(to_announce(many, (CIRCUIT,))) == limits.MAX_CONTACT_ADDRS
