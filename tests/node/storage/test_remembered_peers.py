"""The peers that a home remembers; a broken or hostile file costs only this memory."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from support.memory_lan import subnets
from support.node_settings import resolve
from swarm.network.libp2p import libp2p_options
from swarm.network.paths import dial_policy
from swarm.testing import virtual_time
from swarm_node.storage import remembered_peers
from swarm_node.storage.home import Home
from swarm_node.storage.remembered_peers import (
    MAX_AGE_S,
    MAX_PEERS,
    RECENT_S,
    RememberedPeer,
    choose_listen,
    join_addrs,
    read,
    select_peers,
    write,
)
from swarm_protocol.dht_messages import Contact
from swarm_protocol.errors import ConfigError
from swarm_protocol.identity import Identity

NOW = 1_800_000_000.0
ADDR = "/ip4/192.0.2.7/tcp/4001"


def peer(number: int) -> str:
    return Identity(number.to_bytes(2, "big") * 16).peer_id


def entry(number: int, *, first_seen: float = NOW, last_seen: float = NOW, relays: bool = False) -> RememberedPeer:
    return RememberedPeer(
        peer_id=peer(number), addrs=(ADDR,), first_seen=first_seen, last_seen=last_seen, relays=relays
    )


def as_json(**changes: Any) -> dict[str, Any]:
    return {"peer_id": peer(1), "addrs": [ADDR], "first_seen": NOW, "last_seen": NOW, "relays": False, **changes}


def test_client_joins_through_the_remembered_addresses_that_can_be_dialled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dial_policy, "own_subnets", lambda: subnets("192.168.1.2/24"))
    config = resolve({"home": str(tmp_path), "network_id": "net"})
    announced = (ADDR, "/ip4/192.168.1.9/tcp/1", "/ip4/10.0.0.1/tcp/22", "/dns4/evil.example/tcp/22")
    write(Home(config.home).peers, "net", [replace(entry(1, last_seen=time.time()), addrs=announced)])
    assert join_addrs(config) == tuple(f"{addr}/p2p/{peer(1)}" for addr in announced[:2])


def test_remembered_peers_are_read_only_by_their_network(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    peers = (entry(1, relays=True), entry(2))
    write(path, "net", peers)
    assert read(path, "net", NOW) == peers
    assert read(path, "other", NOW) == ()
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["peers.json"]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"network_id": "net"}',
        b'{"network_id": "net", "peers": {"a": 1}}',
        b'{"network_id": "net", "peers": ' + b"[" * 50_000,
        b" " * (remembered_peers.MAX_FILE_BYTES + 1),
    ],
    ids=["empty", "cut off", "binary", "a list", "no peers", "a table", "deep", "large"],
)
def test_broken_file_is_a_warning_and_ignored(tmp_path: Path, text: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "peers.json"
    path.write_bytes(text)
    assert read(path, "net", NOW) == ()
    assert "is lost" in caplog.text


def test_place_that_is_no_file_gives_no_peers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read(tmp_path / "none", "net", NOW) == ()
    (tmp_path / "peers.json").mkdir()
    assert read(tmp_path / "peers.json", "net", NOW) == ()
    assert not caplog.records
    write(tmp_path / "peers.json", "net", (entry(1),))
    assert "cannot write" in caplog.text


@pytest.mark.parametrize(
    "bad",
    [
        {"peer_id": "12D3KooWnone"},
        {"peer_id": 7},
        {"addrs": []},
        {"addrs": [ADDR] * 2},
        {"addrs": ["/unix/tmp/x"]},
        {"addrs": [f"{ADDR}/p2p/{peer(2)}"]},
        {"addrs": [7]},
        {"addrs": None},
        {"addrs": [f"/ip4/192.0.2.7/tcp/{port}" for port in range(9)]},
        {"last_seen": float("nan")},
        {"first_seen": -1.0},
        {"first_seen": "yesterday"},
        {"relays": "no"},
        {"more": 1},
    ],
    ids=str,
)
def test_entry_that_no_node_writes_is_left_out(tmp_path: Path, bad: dict[str, Any]) -> None:
    path = tmp_path / "peers.json"
    entries = [as_json(**bad), as_json(peer_id=peer(3)), None, "x"]
    path.write_text(json.dumps({"network_id": "net", "peers": entries}))
    assert [each.peer_id for each in read(path, "net", NOW)] == [peer(3)]


def test_flood_of_newcomers_displaces_nobody_seen_within_a_day() -> None:
    friends = [entry(number, first_seen=NOW - 10, last_seen=NOW - RECENT_S + 60) for number in range(10)]
    flood = {peer(number): (ADDR,) for number in range(100, 300)}
    remembered = select_peers(friends, flood, (), NOW)
    assert len(remembered) == MAX_PEERS
    assert {each.peer_id for each in friends} <= {each.peer_id for each in remembered}


def test_peer_that_is_not_seen_is_displaced_and_dropped() -> None:
    stale, gone = entry(1, last_seen=NOW - RECENT_S), entry(2, last_seen=NOW - MAX_AGE_S)
    assert select_peers([stale, gone], {}, (), NOW) == (stale,)
    newcomers = {peer(number): (ADDR,) for number in range(10, 10 + MAX_PEERS)}
    assert stale.peer_id not in {each.peer_id for each in select_peers([stale], newcomers, (), NOW)}


def test_peer_that_relays_comes_first_and_one_from_the_future_ages() -> None:
    relay, ahead = entry(2), entry(1, first_seen=NOW + 9e9, last_seen=NOW + 9e9)
    found = select_peers([ahead, relay], {relay.peer_id: (ADDR,)}, [relay.peer_id], NOW)
    assert [each.peer_id for each in found] == [relay.peer_id, ahead.peer_id]
    assert found[0].relays
    assert found[1].last_seen == NOW


def test_node_that_remembers_nobody_needs_a_peer(tmp_path: Path) -> None:
    config = resolve({"home": str(tmp_path), "network_id": "net"}, env={})
    with pytest.raises(ConfigError, match="no peer to join through is named, and this home remembers none"):
        remembered_peers.check_can_join(config)
    write(tmp_path / "peers.json", "net", (entry(1, first_seen=0.0, last_seen=4e9),))
    remembered_peers.check_can_join(config)
    (tmp_path / "peers.json").unlink()
    remembered_peers.check_can_join(resolve({"home": str(tmp_path), "peers": [f"{ADDR}/p2p/{peer(1)}"]}, env={}))
    beyond = {"home": str(tmp_path), "listen": ["/ip4/127.0.0.1/tcp/0", "/ip4/0.0.0.0/tcp/4001"]}
    remembered_peers.check_can_join(resolve(beyond, env={}))
    for no_search in ({**beyond, "mdns": "false"}, {**beyond, "listen": ["/ip6/::1/tcp/0"]}):
        with pytest.raises(ConfigError, match="no peer to join through is named"):
            remembered_peers.check_can_join(resolve(no_search, env={}))


class Network:
    """A network whose tables change in the loop's thread, so that only this thread may read them."""

    network_id = "net"
    revocations = b""
    relays: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.contacts: tuple[Contact, ...] = ()
        self._thread = threading.get_ident()

    @property
    def known_peers(self) -> tuple[Contact, ...]:
        assert threading.get_ident() == self._thread
        return self.contacts


def test_peers_are_saved_soon_and_when_the_node_leaves(tmp_path: Path) -> None:
    home = Home(tmp_path)

    def kept_peers() -> list[str]:
        return [each.peer_id for each in read(home.peers, "net", time.time())]

    async def main() -> None:
        network = Network()
        network.contacts = (Contact(peer_id=peer(1), addrs=(ADDR,)),)
        async with remembered_peers.remembering(home, cast("Any", network)):
            await asyncio.sleep(2 * remembered_peers.FIRST_SAVE_S)
            assert kept_peers() == [peer(1)]
            network.contacts = (*network.contacts, Contact(peer_id=peer(2), addrs=(ADDR,)))
            await asyncio.sleep(2 * remembered_peers.FIRST_SAVE_S)
            assert kept_peers() == [peer(1), peer(2)], "it was met a moment after the first save"
            await asyncio.sleep(2 * remembered_peers.SAVE_S)
            network.contacts = (*network.contacts, Contact(peer_id=peer(3), addrs=(ADDR,)))
            await asyncio.sleep(remembered_peers.SAVE_S / 2)
            assert len(kept_peers()) == 2, "a node that has been up for a while saves once a minute"
        assert kept_peers() == [peer(1), peer(2), peer(3)]

    virtual_time.run(main())


LOCAL = f"/ip4/127.0.0.1/tcp/4001/p2p/{peer(1)}"
PUBLIC = f"{ADDR}/p2p/{peer(2)}"
ON_LOOPBACK, EVERYWHERE = ("/ip4/127.0.0.1/tcp/0",), ("/ip4/0.0.0.0/tcp/0",)


@pytest.mark.parametrize(
    ("peers", "listen"),
    [([], ON_LOOPBACK), ([LOCAL], ON_LOOPBACK), ([PUBLIC], EVERYWHERE), (["swarm.example.org"], EVERYWHERE)],
)
def test_node_listens_on_all_interfaces_when_a_given_peer_is_on_another_machine(
    monkeypatch: pytest.MonkeyPatch, peers: list[str], listen: tuple[str, ...], tmp_path: Path
) -> None:
    monkeypatch.setattr(libp2p_options, "has_public_ip6", lambda: False)
    assert choose_listen(resolve({"home": str(tmp_path), "peers": peers}, env={})).listen == listen


def test_node_listens_at_the_given_addresses(tmp_path: Path) -> None:
    given = resolve({"home": str(tmp_path), "peers": [PUBLIC], "listen": list(ON_LOOPBACK)}, env={})
    assert choose_listen(given).listen == ON_LOOPBACK
    (tmp_path / "config.toml").write_text("listen = []\n")
    assert choose_listen(resolve({"home": str(tmp_path), "peers": [PUBLIC]}, env={})).listen == ()


def test_node_without_given_peers_listens_for_its_remembered_peers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(libp2p_options, "has_public_ip6", lambda: False)
    config = resolve({"home": str(tmp_path)}, env={})
    path = Home(config.home).peers
    write(path, config.network_id, [replace(entry(1, first_seen=time.time(), last_seen=time.time()), addrs=(ADDR,))])
    assert choose_listen(config).listen == EVERYWHERE
    assert choose_listen(resolve({"home": str(tmp_path), "peers": [LOCAL]}, env={})).listen == ON_LOOPBACK
    write(path, config.network_id, [replace(entry(1, last_seen=time.time()), addrs=("/ip4/127.0.0.1/tcp/9",))])
    assert choose_listen(config).listen == ON_LOOPBACK
