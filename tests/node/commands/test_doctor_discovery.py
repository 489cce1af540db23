"""The doctor's checks of names and of the local network, with a real name server and a network in memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.memory_lan import subnets
from support.name_server import NameServer
from swarm.network.discovery import local_discovery, multicast
from swarm.network.discovery.dns_lookup import DnsLookup
from swarm_node.commands import doctor
from swarm_node.commands.doctor import Finding
from swarm_node.settings.config import Config
from swarm_protocol.dht_messages import Contact
from swarm_protocol.identity import Identity

PEER = Identity(bytes(32)).peer_id


def config(home: Path, **more: object) -> Config:
    return Config(home=home, name="test", **more)  # type: ignore[arg-type]


def test_each_name_has_a_finding(tmp_path: Path) -> None:
    texts = ("/dnsaddr/swarm.test", "/dnsaddr/nowhere.test", f"/ip4/203.0.113.1/tcp/1/p2p/{PEER}")
    zone = {"_dnsaddr.swarm.test TXT": [f"dnsaddr=/ip4/203.0.113.{last}/tcp/1/p2p/{PEER}" for last in (1, 2)]}

    async def main() -> list[Finding]:
        async with NameServer(zone).serving() as server:
            lookup = DnsLookup(timeout_s=2, servers=["127.0.0.1"], port=server.port, hosts_path=tmp_path / "none")
            return await doctor.check_names(config(tmp_path, peers=texts), lookup)

    good, bad = asyncio.run(main())
    assert good == Finding("names", "ok", "/dnsaddr/swarm.test leads to 1 peer")
    assert (bad.result, bad.message) == (
        "fail",
        "/dnsaddr/nowhere.test: _dnsaddr.nowhere.test: there is no such name",
    )
    assert bad.remedy


def findings_of(settings: Config) -> list[Finding]:
    return asyncio.run(doctor.check_local_network(settings))


def test_local_peers_are_searched_for_where_a_node_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beyond = ("/ip4/0.0.0.0/tcp/0",)
    assert findings_of(config(tmp_path)) == []
    assert findings_of(config(tmp_path, listen=beyond, mdns=False)) == []
    monkeypatch.setattr(doctor, "own_subnets", lambda: subnets("203.0.113.1/24"))
    assert "not in a private network" in findings_of(config(tmp_path, listen=beyond))[0].message


def test_local_peers_that_answer_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Discovery:
        def __init__(self, *_arguments: object, secret: None) -> None: ...

        async def run(self) -> None:
            await asyncio.Event().wait()

        async def first(self, *, timeout_s: float) -> tuple[Contact, ...]:
            return (Contact(peer_id=PEER, addrs=("/ip4/192.168.1.6/tcp/1",)),)

    class Link:
        def __init__(self, segments: tuple[multicast.Segment, ...]) -> None:
            self.segments = segments

        def close(self) -> None:
            self.segments = ()

    async def opened(*_arguments: object) -> Link:
        return Link(reached)

    reached: tuple[multicast.Segment, ...] = ()
    monkeypatch.setattr(doctor, "own_subnets", lambda: subnets("192.168.1.5/24", "fd00::5/64"))
    monkeypatch.setattr(multicast.MulticastLink, "open", opened)
    monkeypatch.setattr(local_discovery, "LocalDiscovery", Discovery)
    settings = config(tmp_path, listen=("/ip4/0.0.0.0/tcp/0",))
    [finding] = findings_of(settings)
    assert (finding.result, finding.message) == ("warn", "multicast cannot be used on eth0")
    assert "--no-mdns" in finding.remedy
    reached = multicast.segments_of(subnets("192.168.1.5/24", "fd00::5/64"))[:1]
    [finding] = findings_of(settings)
    assert finding == Finding("local network", "ok", "1 node of swarm answered by multicast on eth0")
