"""Addresses as users type them."""

import tracemalloc

import pytest
from swarm.network.multiaddr import (
    MAX_REMEMBERED_CHARS,
    PeerAddr,
    check_announce_addr,
    check_listen_addr,
    dialable,
    is_loopback,
    is_tcp_by_ip,
    parse_peer_addr,
    tcp_endpoint,
)
from swarm_protocol.errors import ConfigError
from swarm_protocol.identity import Identity

PEER = Identity(bytes(32)).peer_id
RELAY = Identity(bytes(31) + b"1").peer_id


@pytest.mark.parametrize(
    "addr",
    [
        "/ip4/127.0.0.1/tcp/4001",
        "/ip6/::1/tcp/4001",
        "/dns4/seed.example.org/tcp/31337",
        "/dns/seed.example.org/tcp/31337",
        f"/ip4/10.0.0.1/tcp/4001/p2p/{RELAY}/p2p-circuit",
    ],
)
def test_valid_peer_addr_is_returned_unchanged(addr: str) -> None:
    parsed = parse_peer_addr(f"{addr}/p2p/{PEER}")
    assert parsed == PeerAddr(peer_id=PEER, addr=addr)
    assert str(parsed) == f"{addr}/p2p/{PEER}"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "does not start with /"),
        ("nonsense", "does not start with /"),
        ("127.0.0.1:4001", "does not start with /"),
        ("/", "'' is not a known part"),
        ("/ip4", "/ip4"),
        ("/ip4/300.0.0.1/tcp/4001", "300.0.0.1"),
        ("/ip6/1.2.3.4/tcp/4001", "1.2.3.4"),
        ("/dns4//tcp/4001", "/dns4 has no value"),
        ("/ip4/1.2.3.4", "a port is missing"),
        ("/ip4/1.2.3.4/tcp", "'' is not a port"),
        ("/ip4/1.2.3.4/tcp/99999", "'99999' is not a port"),
        ("/ip4/1.2.3.4/tcp/http", "'http' is not a port"),
        ("/ip4/1.2.3.4/udp/4001/quic-v1", "QUIC (/udp) is not used"),
        ("/ip4/1.2.3.4/sctp/4001", "'sctp' is not a known part"),
        ("/tcp/4001", "starts with /tcp"),
        ("/ip4/1.2.3.4/tcp/4001", "does not end in /p2p/"),
        ("/ip4/1.2.3.4/tcp/4001/p2p/Qmfoo", "Qmfoo"),
        ("/ip4/1.2.3.4/tcp/4001/p2p/", "/p2p"),
        ("/ip4/1.2.3.4/tcp/4001/" + "p2p-circuit/" * 30, "too long"),
        (f"/ip4/1.2.3.4/tcp/4001/p2p-circuit/p2p/{PEER}", "may follow the port"),
        (f"/ip4/1.2.3.4/tcp/4001/tcp/22/p2p/{PEER}", "may follow the port"),
        (f"/ip4/1.2.3.4/tcp/4001/p2p/{RELAY}/p2p-circuit/ip4/1.2.3.5/tcp/22/p2p/{PEER}", "may follow the port"),
        (f"/ip4/1.2.3.4/tcp/4001/p2p/{RELAY}/p2p-circuit/p2p/{RELAY}/p2p-circuit/p2p/{PEER}", "may follow the port"),
    ],
)
def test_invalid_peer_addr_error_names_the_part(text: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_peer_addr(text)
    assert fault in caught.value.message
    example = caught.value.remedy.split()[-1]
    assert str(parse_peer_addr(example)) == example  # whole, with the /p2p/<peer id> that a listen address lacks


def test_listen_addr_accepts_port_0_and_no_peer_or_name() -> None:
    assert check_listen_addr("/ip4/0.0.0.0/tcp/0") == "/ip4/0.0.0.0/tcp/0"
    with pytest.raises(ConfigError, match="names no peer"):
        check_listen_addr(f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}")
    with pytest.raises(ConfigError, match="IP address"):
        check_listen_addr("/dns4/localhost/tcp/1")
    with pytest.raises(ConfigError) as caught:
        check_listen_addr("nonsense")
    example = caught.value.remedy.split()[-1]
    assert check_listen_addr(example) == example


def test_loopback_is_distinguished_from_addresses_that_others_can_use() -> None:
    assert is_loopback("/ip4/127.0.0.1/tcp/4001")
    assert is_loopback(f"/ip6/::1/tcp/4001/p2p/{PEER}")
    assert is_loopback("/ip6/0:0:0:0:0:0:0:1/tcp/4001")
    assert is_loopback("/ip6/::ffff:127.0.0.1/tcp/4001")
    assert not is_loopback("/ip4/192.168.1.7/tcp/4001")
    assert not is_loopback("/dns4/localhost/tcp/4001")
    assert not is_loopback("nonsense")


def test_announce_addr_needs_a_port_that_can_be_dialled() -> None:
    assert check_announce_addr("/dns4/localhost/tcp/1") == "/dns4/localhost/tcp/1"
    with pytest.raises(ConfigError, match="port 0"):
        check_announce_addr("/ip4/1.2.3.4/tcp/0")


def test_is_tcp_by_ip_is_false_for_names_relays_and_other_transports() -> None:
    assert is_tcp_by_ip("/ip6/2a00::1/tcp/80")
    others = (
        "/dns4/a.example/tcp/80",
        f"/ip4/1.2.3.4/tcp/1/p2p/{RELAY}/p2p-circuit",
        "/ip4/1.2.3.4/udp/1/quic-v1",
        "x",
    )
    assert not any(map(is_tcp_by_ip, others))


def test_tcp_endpoint_is_none_for_a_transport_that_only_the_daemon_knows() -> None:
    assert tcp_endpoint("/ip4/1.2.3.4/tcp/80") == ("1.2.3.4", 80)
    assert tcp_endpoint("/ip4/1.2.3.4/tcp/80/ws") is None


def test_long_addresses_from_strangers_are_not_cached() -> None:
    host = f"{'a' * MAX_REMEMBERED_CHARS}.example"
    tracemalloc.start()
    try:
        before_bytes, _ = tracemalloc.get_traced_memory()
        for index in range(2**12):
            addrs = (f"/dns4/{index}.{host}/tcp/1", f"/dns4/{index}.{host}/tcp/2/p2p/nobody")
            assert dialable(addrs) == addrs[:1]
        after_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after_bytes - before_bytes < 2**20
