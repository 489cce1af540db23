"""The watch over a node's connection to its network goes on when the process lacks resources for a while, in virtual
time.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast
from unittest.mock import AsyncMock, MagicMock

import pytest
from swarm.network import partition_watch
from swarm.network.discovery.peer_names import GivenPeers
from swarm.network.libp2p.host import Host
from swarm.network.partition_watch import CHECK_S, MAX_AGAIN_S, MAX_PAUSE_S, REFRESH_S, PartitionWatch
from swarm.testing import virtual_time
from swarm_protocol.dht_messages import Contact
from swarm_protocol.errors import PeerRefused
from swarm_protocol.identity import Identity

NODE, SEED, LOST = (Identity(bytes([number]) * 32).peer_id for number in (1, 2, 3))
SEED_ADDR, LOST_ADDR = "/ip4/192.0.2.7/tcp/4001", "/ip4/192.0.2.8/tcp/4001"


@pytest.fixture(autouse=True)
def in_reach(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The addresses that accept TCP connections."""
    addrs = {SEED_ADDR}

    async def accepts_connections(addr: str) -> bool:
        return addr in addrs

    monkeypatch.setattr(partition_watch, "accepts_connections", accepts_connections)
    return addrs


class Control:
    """A daemon's control socket, which this process cannot open while it has too many open files."""

    def __init__(self) -> None:
        self.has_too_many_files = False
        self.connections: dict[str, tuple[str, ...]] = {}

    async def connected_peers(self) -> dict[str, tuple[str, ...]]:
        if self.has_too_many_files:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return dict(self.connections)

    async def connect(self, peer_id: str, addrs: Sequence[str] = ()) -> None:
        """Stands in for `Control.connect`, which a host takes; this one dials nobody."""


class Dht:
    """A routing table with the seed in it. Checking its members takes as long as they are silent."""

    def __init__(self, silent_s: float = 0.0) -> None:
        self._silent_s = silent_s
        self.members = {SEED: (SEED_ADDR,)}
        self.in_reach = {SEED}

    def peers(self) -> tuple[str, ...]:
        return tuple(self.members)

    def contacts(self) -> tuple[Contact, ...]:
        return tuple(Contact(peer_id=peer_id, addrs=addrs) for peer_id, addrs in self.members.items())

    async def ping(self, peer_id: str, addrs: Sequence[str] = ()) -> bool:
        if peer_id in self.in_reach and addrs:
            self.members[peer_id] = tuple(addrs)
        return peer_id in self.in_reach

    async def refresh(self) -> None: ...

    async def tend(self) -> None: ...

    async def make_room(self) -> None:
        await asyncio.sleep(self._silent_s)


@asynccontextmanager
async def watching(
    control: Control, on_healed: Callable[[], Awaitable[None]] | None = None, *, dht: Dht | None = None
) -> AsyncIterator[asyncio.Task[None]]:
    """Run the watch of a node that is connected to its seed."""
    host = Host(MagicMock(), cast("Any", control), MagicMock(), NODE)
    given = GivenPeers([f"{SEED_ADDR}/p2p/{SEED}"], own_peer_id=NODE, listen=())
    await given.look_up()
    healed = on_healed or AsyncMock()
    watch = PartitionWatch(host, cast("Any", dht or Dht()), given, "test", healed, met=[SEED], known=[])
    control.connections = {SEED: (SEED_ADDR,)}
    running = asyncio.create_task(watch.run())
    yield running
    running.cancel()
    await asyncio.wait((running,))


def test_lack_of_open_files_is_reported_once_and_the_seed_is_dialled_afterwards(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    control, dialled, healed = Control(), [], []

    async def connect(_host: object, peer_id: str, _addrs: Sequence[str], _network_id: str) -> None:
        dialled.append(peer_id)
        control.connections = {SEED: (SEED_ADDR,)}

    async def on_healed() -> None:
        healed.append(True)

    monkeypatch.setattr(partition_watch, "connect", connect)

    async def main() -> None:
        async with watching(control, on_healed) as running:
            await asyncio.sleep(2 * CHECK_S)
            assert not dialled
            control.has_too_many_files = True
            await asyncio.sleep(100.0)
            control.connections = {}
            control.has_too_many_files = False
            await asyncio.sleep(2 * MAX_PAUSE_S)
            assert not running.done()
            assert dialled == [SEED]
            assert healed == [True]
            assert caplog.text.count("Too many open files") == 1

    virtual_time.run(main())


def test_seed_that_refuses_this_node_is_told_once_for_each_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    control, reason = Control(), "it is in another network"

    async def connect(_host: object, peer_id: str, _addrs: Sequence[str], _network_id: str) -> None:
        raise PeerRefused(reason, remedy="give another peer", peer_id=peer_id)

    monkeypatch.setattr(partition_watch, "connect", connect)

    async def main() -> None:
        nonlocal reason
        async with watching(control):
            control.connections = {}
            await asyncio.sleep(100.0)
            assert caplog.text.count("another network") == 1
            reason = "it has an older version"
            await asyncio.sleep(100.0)
            assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
            assert SEED_ADDR in caplog.text

    virtual_time.run(main())


def test_silent_members_of_the_routing_table_do_not_delay_rejoining_the_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    control, dialled_at = Control(), []

    async def connect(_host: object, _peer_id: str, _addrs: Sequence[str], _network_id: str) -> None:
        dialled_at.append(asyncio.get_running_loop().time())
        control.connections = {SEED: (SEED_ADDR,)}

    monkeypatch.setattr(partition_watch, "connect", connect)

    async def main() -> None:
        async with watching(control, dht=Dht(silent_s=100.0)):
            await asyncio.sleep(2 * CHECK_S)
            control.connections = {}
            lost_at = asyncio.get_running_loop().time()
            await asyncio.sleep(100.0)
            assert dialled_at[0] - lost_at <= CHECK_S + 0.1

    virtual_time.run(main())


def test_seed_that_closes_the_connection_again_and_again_is_dialled_more_and_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    control, dialled_at, is_full = Control(), list[float](), True

    async def connect(_host: object, _peer_id: str, _addrs: Sequence[str], _network_id: str) -> None:
        dialled_at.append(asyncio.get_running_loop().time())
        control.connections = {SEED: (SEED_ADDR,)}
        if is_full:
            asyncio.get_running_loop().call_later(1.0, control.connections.clear)

    monkeypatch.setattr(partition_watch, "connect", connect)

    async def main() -> None:
        nonlocal is_full
        async with watching(control):
            control.connections = {}
            await asyncio.sleep(300.0)
            pauses = [later - earlier for earlier, later in itertools.pairwise(dialled_at)]
            assert pauses[:5] == pytest.approx([CHECK_S, 6.0, 12.0, 24.0, 48.0])
            assert max(pauses) == pytest.approx(MAX_AGAIN_S)
            is_full = False
            await asyncio.sleep(100.0)
            control.connections = {}
            lost_at = asyncio.get_running_loop().time()
            await asyncio.sleep(100.0)
            assert dialled_at[-1] - lost_at <= CHECK_S + 0.1, "a seed that stays is watched closely again"

    virtual_time.run(main())


def test_seed_is_dialled_only_while_its_machine_accepts_connections(
    monkeypatch: pytest.MonkeyPatch, in_reach: set[str]
) -> None:
    control, dialled_at = Control(), list[float]()

    async def connect(_host: object, _peer_id: str, _addrs: Sequence[str], _network_id: str) -> None:
        dialled_at.append(asyncio.get_running_loop().time())
        control.connections = {SEED: (SEED_ADDR,)}

    monkeypatch.setattr(partition_watch, "connect", connect)

    async def main() -> None:
        async with watching(control):
            await asyncio.sleep(2 * CHECK_S)
            in_reach.clear()
            control.connections = {}
            await asyncio.sleep(3600.0)
            assert not dialled_at, "go-libp2p would leave the address alone for minutes after so many failures"
            in_reach.add(SEED_ADDR)
            back_at = asyncio.get_running_loop().time()
            await asyncio.sleep(2 * MAX_PAUSE_S)
            assert dialled_at[0] - back_at <= MAX_PAUSE_S + 0.1

    virtual_time.run(main())


def test_seed_behind_a_nat_that_has_connected_by_itself_counts_as_met(
    monkeypatch: pytest.MonkeyPatch, in_reach: set[str]
) -> None:
    control, healed = Control(), []

    async def on_healed() -> None:
        healed.append(True)

    monkeypatch.setattr(partition_watch, "connect", AsyncMock())

    async def main() -> None:
        async with watching(control, on_healed):
            in_reach.clear()
            control.connections = {}
            await asyncio.sleep(100.0)
            control.connections = {SEED: ("/ip4/192.0.2.7/tcp/50000",)}
            await asyncio.sleep(100.0)
            assert healed == [True]

    virtual_time.run(main())


@pytest.mark.parametrize("num_others", [0, 500])
def test_lost_peer_is_met_again_although_no_seed_is_missing(num_others: int) -> None:
    control, dht, healed = Control(), Dht(), []

    async def on_healed() -> None:
        healed.append(True)

    async def main() -> None:
        async with watching(control, on_healed, dht=dht):
            dht.members[LOST] = (LOST_ADDR,)
            dht.members |= {
                Identity(number.to_bytes(32)).peer_id: (LOST_ADDR,) for number in range(100, 100 + num_others)
            }
            await asyncio.sleep(2 * CHECK_S)
            del dht.members[LOST]  # as after a partition
            await asyncio.sleep(3 * REFRESH_S)
            assert not healed
            dht.in_reach.add(LOST)
            await asyncio.sleep(REFRESH_S + CHECK_S)
            assert dht.members[LOST] == (LOST_ADDR,)
            assert healed == [True]

    virtual_time.run(main())
