"""The join command that a dashboard shows names a peer that is reachable."""

from __future__ import annotations

import pytest
from support.plain_records import node_record
from swarm_node.dashboard.view_builder import invitation
from swarm_protocol.identity import Identity
from swarm_protocol.records import NodeRecord

SEED, MEMBER, OTHER = (Identity(bytes([number] * 32)).peer_id for number in (1, 2, 3))


def at(host: str, peer_id: str) -> str:
    return f"/{host}/tcp/4001/p2p/{peer_id}"


GIVEN = (at("ip4/203.0.113.1", SEED),)


def command(addr: str) -> str:
    return f"swarm-node join --peers {addr}"


def invited(nodes: dict[str, NodeRecord], given: tuple[str, ...] = GIVEN) -> str:
    return invitation(given, nodes, "swarm")


def test_given_seed_is_shown_while_it_is_present_or_no_other_is_known() -> None:
    member = node_record(addrs=(at("ip4/203.0.113.2", MEMBER),))
    assert invited({SEED: node_record(), MEMBER: member}) == command(GIVEN[0])
    assert invited({}) == command(GIVEN[0])
    assert invited({}, ()) == "swarm-node join"


def test_given_name_is_shown_whichever_seeds_are_present() -> None:
    name = "/dnsaddr/swarm.example.org"
    assert invited({SEED: node_record()}, (*GIVEN, name)) == command(name)


def test_other_seed_replaces_those_that_are_gone_and_no_volunteer_is_named() -> None:
    nodes = {
        SEED: node_record(state="leaving"),
        MEMBER: node_record(addrs=(at("ip4/203.0.113.2", MEMBER),)),
    }
    assert invited(nodes) == command(GIVEN[0])
    nodes[OTHER] = node_record(addrs=(at("ip4/192.168.1.3", OTHER),), role="seed")
    assert invited(nodes) == command(at("ip4/192.168.1.3", OTHER))
    addrs = (at("ip6/2001:4860::1", MEMBER), at("ip4/192.168.1.2", MEMBER))
    nodes[MEMBER] = node_record(addrs=addrs, role="seed", started_at=2.0)
    assert invited(nodes) == command(addrs[0])


@pytest.mark.parametrize(
    "addr",
    [
        at("ip4/203.0.113.9", OTHER),  # another node's
        at("ip4/203.0.113.9", f"{OTHER}/p2p-circuit/p2p/{MEMBER}"),  # through a relay
        at("dns4/a..example", MEMBER),
        "/dnsaddr/evil.example",
        "/nonsense",
    ],
)
def test_address_that_leads_elsewhere_is_not_shown(addr: str) -> None:
    assert invited({MEMBER: node_record(addrs=(addr,), role="seed")}) == command(GIVEN[0])
