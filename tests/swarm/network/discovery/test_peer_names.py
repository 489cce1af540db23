"""Names of peers, looked up at a real DNS server: which addresses they may and may not resolve to."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from ipaddress import ip_address
from pathlib import Path

import pytest
from support.name_server import NameServer, Zone
from swarm.network.discovery import own_networks, peer_names
from swarm.network.discovery.dns_lookup import DnsLookup
from swarm.network.discovery.own_networks import kinds_to_dial
from swarm.network.discovery.peer_names import MAX_ADDRS, MAX_LOOKUPS, GivenPeers, Resolved, check_peer, resolve
from swarm.network.ip_kinds import IpKind
from swarm.network.multiaddr import PeerAddr
from swarm_protocol.errors import ConfigError
from swarm_protocol.identity import Identity

PEER, OTHER = (Identity(bytes([number] * 32)).peer_id for number in (1, 2))
PUBLIC: frozenset[IpKind] = frozenset({"public"})
TIMEOUT_S = 2.0


def found_at(
    texts: list[str],
    zone: Zone,
    tmp_path: Path,
    *,
    kinds: frozenset[IpKind] = PUBLIC,
    hosts: str = "",
    timeout_s: float = TIMEOUT_S,
    **faults: list[str],
) -> tuple[Resolved, list[str]]:
    """Return what the names resolve to, and what the server was asked."""

    async def main() -> tuple[Resolved, list[str]]:
        async with NameServer(zone, **faults).serving() as server:
            lookup = DnsLookup(
                timeout_s=timeout_s, servers=["127.0.0.1"], port=server.port, hosts_path=hosts_file(tmp_path, hosts)
            )
            return await resolve(texts, lookup, kinds, timeout_s=timeout_s), server.asked

    return asyncio.run(main())


def hosts_file(folder: Path, text: str) -> Path:
    path = folder / "hosts"
    path.write_text(text)
    return path


def addrs(resolved: Resolved) -> list[str]:
    return [str(addr) for addr in resolved.addrs]


def reason(resolved: Resolved) -> str:
    assert resolved.addrs == ()
    [failure] = resolved.failures.values()
    assert "\n" not in failure.message
    return failure.message


def test_host_names_resolve_to_addresses_of_their_ip_version(tmp_path: Path) -> None:
    zone = {"seed.test A": ["198.51.100.7", "198.51.100.8"], "seed.test AAAA": ["2001:db8::7"]}
    v4 = [f"/ip4/198.51.100.{last}/tcp/4001/p2p/{PEER}" for last in (7, 8)]
    v6 = [f"/ip6/2001:db8::7/tcp/4001/p2p/{PEER}"]
    for form, expected in (("dns4", v4), ("dns6", v6), ("dns", v4 + v6)):
        resolved, _ = found_at([f"/{form}/Seed.test/tcp/4001/p2p/{PEER}"], zone, tmp_path)
        assert sorted(addrs(resolved)) == expected
        assert not resolved.failures
    relayed, _ = found_at([f"/dns6/seed.test/tcp/1/p2p/{OTHER}/p2p-circuit/p2p/{PEER}"], zone, tmp_path)
    assert addrs(relayed) == [f"/ip6/2001:db8::7/tcp/1/p2p/{OTHER}/p2p-circuit/p2p/{PEER}"]


def test_network_s_name_resolves_to_all_its_seeds_through_other_names(tmp_path: Path) -> None:
    zone = {
        "_dnsaddr.swarm.test TXT": [
            f"dnsaddr=/ip4/198.51.100.1/tcp/4001/p2p/{PEER}",
            "dnsaddr=/dnsaddr/more.test",
            "v=spf1 -all",
        ],
        "_dnsaddr.more.test TXT": [f"dnsaddr=/dns4/seed.test/tcp/4002/p2p/{OTHER}"],
        "seed.test A": ["198.51.100.2"],
    }
    expected = [f"/ip4/198.51.100.1/tcp/4001/p2p/{PEER}", f"/ip4/198.51.100.2/tcp/4002/p2p/{OTHER}"]
    for text in ("swarm.test", "/dnsaddr/swarm.test"):
        assert addrs(found_at([text], zone, tmp_path)[0]) == expected
    assert addrs(found_at([f"/dnsaddr/swarm.test/p2p/{OTHER}"], zone, tmp_path)[0]) == expected[1:]


def test_long_list_is_fetched_over_tcp_and_cut(tmp_path: Path) -> None:
    zone = {"_dnsaddr.swarm.test TXT": [f"dnsaddr=/ip4/198.51.100.{last}/tcp/1/p2p/{PEER}" for last in range(1, 60)]}
    resolved, asked = found_at(["swarm.test"], zone, tmp_path)
    assert len(resolved.addrs) == MAX_ADDRS
    assert asked == ["_dnsaddr.swarm.test TXT"] * 2  # once more over TCP


def test_plain_addresses_are_neither_looked_up_nor_checked(tmp_path: Path) -> None:
    plain = [f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}", f"/ip6/::1/tcp/1/p2p/{PEER}"]
    resolved, asked = found_at(plain, {}, tmp_path)
    assert addrs(resolved) == plain
    assert asked == []


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["dnsaddr=/dnsaddr/a.test"], "the name leads to no address of a peer"),
        ([f"dnsaddr=/ip4/198.51.100.1/tcp/1/p2p/{PEER[:-1]}"], "/p2p: "),
        (["dnsaddr=/ip4/198.51.100.1/tcp/1"], "does not end in /p2p/"),
        (["dnsaddr=nonsense"], "does not start with /"),
        (["dnsaddr=seed.test"], "does not start with /"),
        (["dnsaddr="], "does not start with /"),
        (["dnsaddr=/dns4/a..test/tcp/1/p2p/" + PEER], "not a host name"),
        (["v=spf1 -all"], "has no TXT record of the form dnsaddr="),
        ([], "has no TXT record"),
    ],
)
def test_unusable_dns_records_are_reported_with_one_line(texts: list[str], said: str, tmp_path: Path) -> None:
    assert said in reason(found_at(["a.test"], {"_dnsaddr.a.test TXT": texts}, tmp_path)[0])


def test_loops_and_trees_of_names_end(tmp_path: Path) -> None:
    loop = {"_dnsaddr.a.test TXT": ["dnsaddr=/dnsaddr/b.test"], "_dnsaddr.b.test TXT": ["dnsaddr=/dnsaddr/a.test"]}
    resolved, asked = found_at(["a.test"], loop, tmp_path)
    assert resolved.failures
    assert len(asked) == 2
    deep = {f"_dnsaddr.d{level}.test TXT": [f"dnsaddr=/dnsaddr/d{level + 1}.test"] for level in range(20)}
    resolved, asked = found_at(["d0.test"], deep, tmp_path)
    assert "the chain of names is longer than" in reason(resolved)
    assert len(asked) == peer_names.MAX_DEPTH
    wide = {"_dnsaddr.w.test TXT": [f"dnsaddr=/dns4/w{each}.test/tcp/1/p2p/{PEER}" for each in range(32)]}
    resolved, asked = found_at(["w.test"], wide, tmp_path)
    assert f"more than {MAX_LOOKUPS} lookups" in reason(resolved)
    assert len(set(asked)) == MAX_LOOKUPS


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({}, "_dnsaddr.swarm.test: there is no such name"),
        ({"broken": ["_dnsaddr.swarm.test"]}, "no name server could answer"),
        ({"silent": ["_dnsaddr.swarm.test"]}, "no name server answered within 0.5 s"),
    ],
)
def test_silent_name_server_is_reported_in_time(faults: dict[str, list[str]], said: str, tmp_path: Path) -> None:
    def took_s() -> float:
        since = time.monotonic()
        resolved, _ = found_at(["swarm.test"], {}, tmp_path, timeout_s=0.5, **faults)
        assert said in reason(resolved)
        return time.monotonic() - since

    # a busy machine only takes longer; the DNS library's own limit would be 5 s
    assert any(took_s() < 3 for _ in range(5))


def test_name_without_an_address_is_reported_and_delays_no_other(tmp_path: Path) -> None:
    zone = {"a.test TXT": ["x"], "b.test A": ["198.51.100.2"]}
    texts = [f"/dns4/{name}.test/tcp/1/p2p/{PEER}" for name in ("a", "b", "c")]
    resolved, _ = found_at(texts, zone, tmp_path)
    assert addrs(resolved) == [f"/ip4/198.51.100.2/tcp/1/p2p/{PEER}"]
    assert {text: failure.message for text, failure in resolved.failures.items()} == {
        texts[0]: "a.test: the name has no A record",
        texts[2]: "c.test: there is no such name",
    }


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1", "this machine itself"),
        ("127.1.2.3", "this machine itself"),
        ("10.0.0.5", "a private network"),
        ("192.168.1.1", "a private network"),
        ("100.64.3.4", "a private network"),
        ("169.254.169.254", "a link-local address"),
        ("0.0.0.0", "cannot be dialled"),
        ("224.0.0.251", "cannot be dialled"),
        ("255.255.255.255", "cannot be dialled"),
    ],
)
def test_name_that_resolves_into_a_network_of_another_kind_is_refused(address: str, said: str, tmp_path: Path) -> None:
    zone = {
        "evil.test A": [address],
        "_dnsaddr.direct.test TXT": [f"dnsaddr=/ip4/{address}/tcp/4001/p2p/{PEER}"],
        "_dnsaddr.named.test TXT": [f"dnsaddr=/dns4/evil.test/tcp/4001/p2p/{PEER}"],
    }
    for text in (f"/dns4/evil.test/tcp/4001/p2p/{PEER}", "direct.test", "named.test"):
        told = reason(found_at([text], zone, tmp_path)[0])
        assert f"leads to {address}, " in told
        assert said in told


@pytest.mark.parametrize(
    "address", ["::1", "::", "fe80::1", "fd00::1", "ff02::fb", "::ffff:127.0.0.1", "::ffff:10.0.0.1"]
)
def test_name_that_resolves_into_an_ipv6_network_of_another_kind_is_refused(address: str, tmp_path: Path) -> None:
    resolved, _ = found_at([f"/dns6/evil.test/tcp/1/p2p/{PEER}"], {"evil.test AAAA": [address]}, tmp_path)
    assert "leads to " in reason(resolved)


def test_ipv6_link_local_address_is_refused_whatever_the_machine_has(tmp_path: Path) -> None:
    every: frozenset[IpKind] = frozenset({"public", "private", "link-local", "loopback"})
    zone = {
        "seed.test AAAA": ["fe80::7"],
        "_dnsaddr.zone.test TXT": [f"dnsaddr=/ip6/fe80::7%eth0/tcp/1/p2p/{PEER}"],
    }
    for text in (f"/dns6/seed.test/tcp/1/p2p/{PEER}", "zone.test"):
        assert "which cannot be dialled" in reason(found_at([text], zone, tmp_path, kinds=every)[0])


def test_valid_addresses_beside_an_invalid_one_are_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    zone = {"seed.test A": ["127.0.0.1", "198.51.100.7"]}
    resolved, _ = found_at([f"/dns4/seed.test/tcp/1/p2p/{PEER}"], zone, tmp_path)
    assert addrs(resolved) == [f"/ip4/198.51.100.7/tcp/1/p2p/{PEER}"]
    assert "seed.test leads to 127.0.0.1" in caplog.text


def test_kinds_to_dial_follow_the_networks_that_the_node_is_in() -> None:
    home, server = ip_address("192.168.1.5"), ip_address("198.51.100.7")
    local, everywhere = ("/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/0"), ("/ip4/0.0.0.0/tcp/4001",)
    assert kinds_to_dial(everywhere, [server]) == {"public"}
    assert kinds_to_dial(everywhere, [server, home, ip_address("127.0.0.1")]) == {"public", "private"}
    assert kinds_to_dial((*local, *everywhere), [ip_address("fd00::5")]) == {"public", "private"}
    assert kinds_to_dial(local, [server]) == {"public", "loopback"}
    assert kinds_to_dial(everywhere, [ip_address("fe80::5")]) == {"public"}, "169.254.169.254 is in no local network"
    assert kinds_to_dial(everywhere, [ip_address("169.254.7.7")]) == {"public", "link-local"}


def test_localhost_written_by_the_user_is_this_machine_but_not_in_a_record(tmp_path: Path) -> None:
    zone = {"_dnsaddr.evil.test TXT": [f"dnsaddr=/dns4/localhost/tcp/1/p2p/{PEER}"]}
    resolved, asked = found_at([f"/dns/seed.localhost/tcp/1/p2p/{PEER}"], zone, tmp_path)
    assert addrs(resolved) == [f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}", f"/ip6/::1/tcp/1/p2p/{PEER}"]
    assert asked == []
    assert "localhost leads to 127.0.0.1" in reason(found_at(["evil.test"], zone, tmp_path)[0])


def test_hosts_file_is_read_first(tmp_path: Path) -> None:
    hosts = "# comment\n198.51.100.9 other SEED.test # seed.test\nnonsense seed.test\n\n2001:db8::9 seed.test\n"
    zone = {"seed.test A": ["198.51.100.1"]}
    resolved, asked = found_at([f"/dns/seed.test/tcp/1/p2p/{PEER}"], zone, tmp_path, hosts=hosts)
    assert addrs(resolved) == [f"/ip4/198.51.100.9/tcp/1/p2p/{PEER}", f"/ip6/2001:db8::9/tcp/1/p2p/{PEER}"]
    assert asked == []


@pytest.mark.parametrize(
    "text",
    [
        *(
            "nonsense",
            "203.0.113.7",
            "seed.example.org:4001",
            "https://seed.example.org",
            "-a.example",
            "a..b",
            ".",
            "::1",
        ),
        *(
            "/dnsaddr",
            "/dnsaddr/",
            "/dnsaddr/a b.test",
            "/dnsaddr/a.test/tcp/1",
            "/dnsaddr/a.test/p2p",
            "/dnsaddr/1.2.3.4",
        ),
        *("/dnsaddr/a.test/p2p/Qm", f"/dnsaddr/{'a' * 64}.test", "/dnsaddr/" + "a." * 130, "/dnsaddr/bücher.example"),
        *(f"/dns4/a_b .test/tcp/1/p2p/{PEER}", f"/dns4/{'a.' * 127}test/tcp/1/p2p/{PEER}", "/dns4/a.test/tcp/1"),
        *(f"/dns4/127.0.0.1/tcp/1/p2p/{PEER}", f"/dns6/::1/tcp/1/p2p/{PEER}"),
    ],
)
def test_malformed_names_are_refused_with_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_peer(text)
    assert caught.value.remedy
    assert "\n" not in caught.value.message


def test_moved_seed_is_found_again_and_a_missing_answer_removes_no_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_names, "AGAIN_S", 0.0)
    monkeypatch.setattr(peer_names, "own_subnets", tuple)

    def at(last: int) -> PeerAddr:
        return PeerAddr(peer_id=PEER, addr=f"/ip4/198.51.100.{last}/tcp/1")

    async def main() -> None:
        async with NameServer({"seed.test A": ["198.51.100.1"]}).serving() as server:
            lookup = DnsLookup(timeout_s=1, servers=["127.0.0.1"], port=server.port, hosts_path=tmp_path / "none")
            texts = (f"/dns4/seed.test/tcp/1/p2p/{PEER}", f"/dns4/me.test/tcp/1/p2p/{OTHER}")
            given = GivenPeers(texts, own_peer_id=OTHER, listen=("/ip4/0.0.0.0/tcp/0",), lookup=lookup)
            await given.look_up()
            assert given.addrs == (at(1),)
            assert "me.test A" not in server.asked
            server.zone = {"seed.test A": ["198.51.100.2"]}
            await given.look_up_again()
            assert given.addrs == (at(2),)
            server.zone = {}
            await given.look_up_again()
            assert given.addrs == (at(2),)
            assert given.are_missing

    asyncio.run(main())


def test_names_are_not_looked_up_again_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_names, "own_subnets", tuple)

    async def main() -> None:
        async with NameServer({}).serving() as server:
            lookup = DnsLookup(timeout_s=1, servers=["127.0.0.1"], port=server.port, hosts_path=tmp_path / "none")
            given = GivenPeers(["swarm.test"], own_peer_id=PEER, listen=(), lookup=lookup)
            await given.look_up()
            await given.look_up_again()
            assert len(server.asked) == 1

    asyncio.run(main())


def test_network_is_imported_without_the_dns_library() -> None:
    code = "import sys, swarm.network.libp2p_network; assert 'dns' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_own_subnets_have_loopback_and_64_bits_for_ipv6() -> None:
    subnets = own_networks.own_subnets()
    loopback = next(subnet for subnet in subnets if subnet.address.is_loopback)
    assert loopback.index == socket.if_nametoindex(loopback.interface)
    assert {subnet.network.prefixlen for subnet in subnets if subnet.address.version == 6} <= {64}
