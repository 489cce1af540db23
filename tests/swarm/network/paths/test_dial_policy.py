"""Which addresses of peers a node dials, and which of its own it tells first."""

from __future__ import annotations

import pytest
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
        ((FAR,), (), (CIRCUIT,), (FAR,)),
        (("/ip6/fd00:1::2/tcp/1",), (FAR,), (), (FAR, IP6_LANS[0])),
    ],
)
def test_private_addresses_are_dialled_only_where_the_network_is(
    own: tuple[str, ...], given: tuple[str, ...], met: tuple[str, ...], dialled: tuple[str, ...]
) -> None:
    named = (FAR, LAN, OTHER_LAN, HERE, CIRCUIT, *IP6_LANS, "/nonsense")
    policy = DialPolicy(own=own, given=given, met=met)
    assert set(policy.worth_dialling(named)) == set(dialled)
    assert set(policy.worth_knowing(named)) == {*dialled, CIRCUIT}


def test_public_addresses_are_told_first_and_relayed_ones_before_private_ones() -> None:
    told = to_announce((HERE, LAN, FAR, FAR, "/unix/x"), (CIRCUIT,))
    assert told == (FAR, CIRCUIT, LAN, HERE)
    many = [f"/ip4/44.7.7.7/tcp/{port}" for port in range(1, 100)]
    assert len(to_announce(many, (CIRCUIT,))) == limits.MAX_CONTACT_ADDRS
