"""The packets that nodes of a local network exchange, and what a liar can put into them."""

from __future__ import annotations

import struct

import pytest
from dns import message, rdatatype, rrset
from hypothesis import given
from hypothesis import strategies as st
from support.memory_lan import subnets
from support.work_count import num_lines
from swarm.network.discovery.mdns_messages import (
    MAX_PACKET_BYTES,
    MAX_QUESTIONS,
    MAX_RECORDS,
    MAX_TXT_STRINGS,
    MdnsQuery,
    answer,
    is_near,
    query,
    read_message,
    service_of,
)
from swarm.network.multiaddr import ip_of
from swarm_protocol import limits
from swarm_protocol.dht_messages import Contact
from swarm_protocol.identity import Identity
from swarm_protocol.network_invitation import NetworkSecret

PEER, OTHER = (Identity(bytes([number] * 32)).peer_id for number in (1, 2))
SERVICE = service_of("swarm")
HERE = subnets("192.168.1.5/24", "fd00:1::5/64", "fe80::5/64")
ADDR = "/ip4/192.168.1.7/tcp/4001"


def said(*strings: str, peer_id: str = PEER, service: str = SERVICE, ttl: int = 120) -> bytes:
    """Return an answer with these strings in its TXT record."""
    instance = f"{peer_id}.{service}"
    telling = message.from_wire(answer(service, peer_id, [ADDR]))
    telling.additional = [rrset.from_text(instance, ttl, "IN", "TXT", " ".join(f'"{text}"' for text in strings))]
    return telling.to_wire()


def test_service_is_named_by_the_network_in_fifteen_characters() -> None:
    assert service_of("swarm2") != SERVICE
    for network_id in ("swarm", "a" * limits.MAX_NETWORK_ID_BYTES, "._:@+-"):
        label = service_of(network_id).split(".")[0]
        assert len(label) <= 16
        assert label.startswith("_swarm-")


def test_query_and_answer_round_trip() -> None:
    assert read_message(query(SERVICE), SERVICE, HERE) == MdnsQuery()
    addrs = (ADDR, "/ip6/fd00:1::7/tcp/4001")
    assert read_message(answer(SERVICE, PEER, addrs), SERVICE, HERE) == Contact(peer_id=PEER, addrs=addrs)


def test_packets_are_readable_by_other_programs() -> None:
    [asked] = message.from_wire(query(SERVICE)).question
    assert (str(asked.name), asked.rdtype) == (SERVICE, rdatatype.PTR)
    told = message.from_wire(answer(SERVICE, PEER, [ADDR]))
    assert [each.to_text().lower() for each in told.answer] == [f"{SERVICE} 120 IN PTR {PEER}.{SERVICE}".lower()]
    assert [each.to_text() for each in told.additional] == [f'{PEER}.{SERVICE} 120 IN TXT "dnsaddr={ADDR}/p2p/{PEER}"']


def test_answer_with_the_most_and_longest_addresses_fits() -> None:
    addrs = [f"/ip6/fd00:1::{'ffff:' * 3}{number:x}/tcp/65535" for number in range(1, 20)]
    packet = answer(SERVICE, PEER, addrs)
    assert len(packet) <= MAX_PACKET_BYTES
    read = read_message(packet, SERVICE, subnets("fd00:1::5/64"))
    assert isinstance(read, Contact)
    assert len(read.addrs) == limits.MAX_CONTACT_ADDRS


def test_other_networks_and_services_are_ignored() -> None:
    other = service_of("other")
    for packet in (query(other), answer(other, PEER, [ADDR]), query("_http._tcp.local."), b"", b"\0" * 11, b"x" * 100):
        assert read_message(packet, SERVICE, HERE) is None


@pytest.mark.parametrize(
    "text",
    [
        f"dnsaddr=/ip4/192.168.2.7/tcp/4001/p2p/{PEER}",  # from another subnet
        f"dnsaddr=/ip4/8.8.8.8/tcp/4001/p2p/{PEER}",
        f"dnsaddr=/ip4/127.0.0.1/tcp/22/p2p/{PEER}",
        f"dnsaddr=/ip6/fd00:2::7/tcp/4001/p2p/{PEER}",
        f"dnsaddr=/ip6/::1/tcp/4001/p2p/{PEER}",
        f"dnsaddr=/ip6/::ffff:192.168.1.7/tcp/4001/p2p/{PEER}",
        f"dnsaddr=/ip6/fe80::7/tcp/4001/p2p/{PEER}",
        f"dnsaddr=/ip6/fd00:1::7%eth0/tcp/4001/p2p/{PEER}",
        f"dnsaddr=/ip6/fd00:1::7%\\010/tcp/4001/p2p/{PEER}",
        f"dnsaddr=/dns4/evil.example/tcp/4001/p2p/{PEER}",
        f"dnsaddr=/dnsaddr/evil.example/p2p/{PEER}",
        f"dnsaddr={ADDR}/p2p/{OTHER}/p2p-circuit/p2p/{PEER}",
        f"dnsaddr={ADDR}",
        f"dnsaddr={ADDR}/p2p/{PEER[:-1]}",
        f"{ADDR}/p2p/{PEER}",
        "dnsaddr=",
        "dnsaddr=\\255\\254",
    ],
)
def test_address_outside_this_subnet_is_left_out(text: str) -> None:
    assert read_message(said(text), SERVICE, HERE) is None
    assert read_message(said(text, f"dnsaddr={ADDR}/p2p/{PEER}"), SERVICE, HERE) == Contact(peer_id=PEER, addrs=(ADDR,))


def test_answer_that_names_two_peers_is_dropped() -> None:
    packet = said(f"dnsaddr={ADDR}/p2p/{PEER}", f"dnsaddr={ADDR}/p2p/{OTHER}")
    assert read_message(packet, SERVICE, HERE) is None


def test_too_many_addresses_and_oversized_records_are_cut() -> None:
    many = [f"dnsaddr=/ip4/192.168.1.7/tcp/{port}/p2p/{PEER}" for port in range(1, 30)]
    read = read_message(said(*many), SERVICE, HERE)
    assert isinstance(read, Contact)
    assert len(read.addrs) == limits.MAX_CONTACT_ADDRS
    assert read_message(said(*["x"] * MAX_TXT_STRINGS, many[0]), SERVICE, HERE) is None
    assert read_message(said(many[0], *["x" * 255] * 16), SERVICE, HERE) is None  # more than MAX_PACKET_BYTES


def test_addresses_are_near_in_private_subnets_only() -> None:
    public = subnets("198.51.100.5/24", "2001:db8::5/64")
    assert not is_near("/ip4/198.51.100.7/tcp/1", public)
    assert not is_near("/ip6/2001:db8::7/tcp/1", public)
    assert is_near("/ip4/169.254.3.4/tcp/1", subnets("169.254.1.1/16"))
    assert is_near("/ip6/fd00:1::7/tcp/1", HERE)
    assert not is_near("nonsense", HERE)


@given(st.binary(max_size=300))
def test_any_bytes_are_read_without_an_error(noise: bytes) -> None:
    read_message(noise, SERVICE, HERE)


@given(st.data())
def test_any_damage_to_an_answer_is_read_without_an_error(data: st.DataObject) -> None:
    packet = bytearray(said(f"dnsaddr={ADDR}/p2p/{PEER}"))
    for _ in range(data.draw(st.integers(1, 8))):
        packet[data.draw(st.integers(0, len(packet) - 1))] = data.draw(st.integers(0, 255))
    read = read_message(bytes(packet), SERVICE, HERE)
    assert read is None or isinstance(read, MdnsQuery) or all(is_near(addr, HERE) for addr in read.addrs)


def test_question_of_another_type_is_not_answered() -> None:
    asking = message.make_query(SERVICE, rdatatype.A)
    assert read_message(asking.to_wire(), SERVICE, HERE) is None


def raw_packet(*, questions: list[bytes], records: list[bytes], is_answer: bool) -> bytes:
    """Return a packet of encoded questions and records, cut at the size limit."""
    header = struct.pack("!6H", 0, 0x8400 if is_answer else 0, len(questions), len(records), 0, 0)
    return b"".join((header, *questions, *records))[:MAX_PACKET_BYTES]


def raw_record(name: bytes, kind: int, data: bytes = b"") -> bytes:
    return name + struct.pack("!HHIH", kind, 1, 1, len(data)) + data


@pytest.mark.parametrize("num_labels", [1, 15, 16, 120])
def test_any_packet_takes_little_work(num_labels: int) -> None:
    """Packets that keep general parsers busy within the size limit, and those that come nearest to this parser's
    bounds.
    """
    honest = answer(SERVICE, PEER, [f"/ip6/fd00:1::{'ffff:' * 3}{number:x}/tcp/1" for number in range(1, 9)])
    ip_of.cache_clear()
    usual = num_lines(lambda: read_message(honest, SERVICE, HERE))
    is_ptr = struct.pack("!HH", 12, 1)
    long_name = b"\1a" * num_labels + b"\0"
    again = b"\xc0\x0c"  # the first name of the packet
    service = message.from_wire(query(SERVICE)).question[0].name.to_wire()
    named = raw_record(service, 12)
    lie = f"dnsaddr=/ip6/fd00:1::1/tcp/{{}}/p2p/{OTHER}"
    lies = b"".join(bytes([len(lie) + 3]) + lie.format(port).encode() for port in range(10001, 10038))
    many_names = b"\x10\x02\0\x08" + bytes(24) + again * 1800  # of the servers in a HIP record
    worst = [
        raw_packet(questions=[long_name + is_ptr, *[again + is_ptr] * 600], records=[], is_answer=False),
        raw_packet(questions=[], records=[raw_record(long_name, 12), *[raw_record(again, 12)] * 320], is_answer=True),
        raw_packet(
            questions=[long_name + is_ptr, *[again + is_ptr] * (MAX_QUESTIONS - 1)],
            records=[raw_record(again, 12)] * MAX_RECORDS,
            is_answer=False,
        ),
        raw_packet(
            questions=[], records=[raw_record(long_name, 12), raw_record(again, 55, many_names)], is_answer=True
        ),
        raw_packet(questions=[], records=[named, raw_record(service, 16, bytes(3900))], is_answer=True),
        raw_packet(questions=[], records=[named, raw_record(service, 16, lies)], is_answer=True),
    ]
    for packet in worst:
        ip_of.cache_clear()
        assert num_lines(lambda packet=packet: read_message(packet, SERVICE, HERE)) < 3 * usual  # type: ignore[misc]


def test_private_network_shows_strangers_neither_its_name_nor_its_members() -> None:
    secret, stranger = NetworkSecret(bytes(32)), NetworkSecret(bytes([1]) * 32)
    service = service_of("private-name", secret)
    assert service not in (service_of("private-name"), service_of("private-name", stranger))
    packet = answer(service, PEER, ["/ip4/192.168.1.7/tcp/4001"], secret)
    for word in (b"private", b"dnsaddr", b"192.168", b"4001", PEER.encode()):
        assert word not in packet
    assert read_message(packet, service, HERE, secret) == Contact(peer_id=PEER, addrs=("/ip4/192.168.1.7/tcp/4001",))
    assert read_message(packet, service, HERE) is None
    assert read_message(packet, service, HERE, stranger) is None
    open_answer = answer(service, PEER, ["/ip4/192.168.1.7/tcp/4001"])
    assert read_message(open_answer, service, HERE, secret) is None, "a stranger's answer must not be accepted"


def test_private_network_can_announce_its_longest_address() -> None:
    secret = NetworkSecret(bytes(32))
    addr = "/ip6/fd12:3456:789a:1111:2222:3333:4444:5555/tcp/65535"
    here = subnets("fd12:3456:789a:1111::1/64")
    service = service_of("private-name", secret)
    said = read_message(answer(service, PEER, [addr], secret), service, here, secret)
    assert said == Contact(peer_id=PEER, addrs=(addr,))
