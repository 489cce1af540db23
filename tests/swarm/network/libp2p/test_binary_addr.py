"""The binary form of peer ids and addresses in the daemon's protocol."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm.network.multiaddr import addr_bytes, addr_text, peer_id_bytes, peer_id_text
from swarm_protocol.identity import Identity

PEER_ID = Identity(b"a" * 32).peer_id
RSA_ID = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"

# by the codes in the protocol table of multiformats
KNOWN = {
    "/ip4/1.2.3.4/tcp/80": "0401020304060050",
    "/ip6/::1/tcp/4001": "2900000000000000000000000000000001060fa1",
    "/dns4/a.example/tcp/1": "3609612e6578616d706c65060001",
    "/ip4/1.2.3.4/tcp/80/p2p-circuit": "0401020304060050a202",
    "/unix/tmp/x.sock": "90030b2f746d702f782e736f636b",
}


@pytest.mark.parametrize("addr", KNOWN)
def test_address_has_its_binary_form(addr: str) -> None:
    assert addr_bytes(addr).hex() == KNOWN[addr]
    assert addr_text(bytes.fromhex(KNOWN[addr])) == addr


@pytest.mark.parametrize(
    "addr",
    [
        f"/ip4/1.2.3.4/tcp/80/p2p/{PEER_ID}/p2p-circuit/p2p/{RSA_ID}",
        "/ip6zone/eth0/ip6/fe80::1/tcp/1",
        "/dns/a.example/tcp/443",
        "",
    ],
)
def test_address_round_trips(addr: str) -> None:
    assert addr_text(addr_bytes(addr)) == addr


def test_peer_inside_an_address_is_its_id_in_bytes() -> None:
    raw = peer_id_bytes(PEER_ID)
    assert addr_bytes(f"/p2p/{PEER_ID}") == b"\xa5\x03" + bytes([len(raw)]) + raw


@pytest.mark.parametrize("peer_id", [PEER_ID, RSA_ID])
def test_peer_id_round_trips(peer_id: str) -> None:
    assert peer_id_text(peer_id_bytes(peer_id)) == peer_id


@pytest.mark.parametrize(
    "addr", ["/ip4/1.2.3", "/ip4", "/tcp/65536", "/tcp/-1", "/tcp/x", "/sctp/1", "/p2p/0OIl", "/dns4//tcp/1", "ip4//"]
)
def test_malformed_address_is_refused(addr: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        addr_bytes(addr)


QUIC = "290000000000000000000000000000000191020fa1cd03"  # /ip6/::1/udp/4001/quic-v1


@pytest.mark.parametrize("raw", ["04010203", "ffff03", "84", "36ff", "360561", "3601ff", QUIC])
def test_bytes_that_encode_no_address_are_refused(raw: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        addr_text(bytes.fromhex(raw))


@given(st.binary(max_size=80))
def test_any_bytes_are_an_address_or_refused(raw: bytes) -> None:
    try:
        addr_text(raw)
    except ValueError:
        return
