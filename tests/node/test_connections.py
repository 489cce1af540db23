"""Tests of what a node reports about its connected peers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from swarm.network.membership import Membership
from swarm.network.memory.memory_link import LinkModel
from swarm.network.memory.memory_network import MemoryInternet
from swarm.network.relay.relay import RelayCounts
from swarm.network.round_trips import PING_METHOD
from swarm.network.traffic import PeerPath
from swarm.testing import virtual_time
from swarm_node.node import RTT_TIMEOUT_S, list_peers, relay_status
from swarm_protocol import limits
from swarm_protocol.control_messages import MAX_COUNT, PeerStatus, RelayStatus
from swarm_protocol.identity import peer_id_of


def test_peers_are_listed_with_their_round_trips_and_a_silent_one_without() -> None:
    async def main() -> None:
        internet = MemoryInternet(default_link=LinkModel(latency_s=0.03))
        here, near, silent = (internet.network() for _ in range(3))

        async def never(_peer_id: str, _request: bytes) -> bytes:
            await asyncio.Event().wait()
            return b""

        await silent.serve(PING_METHOD, never)
        paths = {
            near.peer_id: PeerPath(kind="punched", sent_bytes=1, received_bytes=20),
            silent.peer_id: PeerPath(kind="relayed", sent_bytes=300, received_bytes=0),
        }
        async with Membership(here) as membership, Membership(near):
            since_s = asyncio.get_running_loop().time()
            peers = await list_peers(paths, membership, {near.peer_id: "attic"})
            assert asyncio.get_running_loop().time() - since_s <= RTT_TIMEOUT_S + 0.01
        assert [peer.peer_id for peer in peers] == [silent.peer_id, near.peer_id], (
            "the peer with the most bytes must be first"
        )
        assert peers[0] == PeerStatus(peer_id=silent.peer_id, path="relayed", sent_bytes=300)
        assert peers[1].rtt_ms == pytest.approx(60, abs=1)
        wants = PeerStatus(peer_id=near.peer_id, name="attic", path="punched", sent_bytes=1, received_bytes=20)
        assert replace(peers[1], rtt_ms=None) == wants
        await internet.close()

    virtual_time.run(main())


def test_peers_with_the_most_bytes_are_listed_when_there_are_many() -> None:
    async def main() -> None:
        internet = MemoryInternet()
        paths = {
            peer_id_of(number.to_bytes(32, "big")): PeerPath(kind="direct", sent_bytes=number, received_bytes=number)
            for number in range(limits.MAX_CONTROL_PEERS + 30)
        }
        async with Membership(internet.network()) as membership:
            peers = await list_peers(paths, membership, {})
        assert [peer.sent_bytes for peer in peers] == list(range(limits.MAX_CONTROL_PEERS + 29, 29, -1))
        await internet.close()

    virtual_time.run(main())


def test_status_of_a_relay_counts_what_it_refused_and_not_what_ended_idle() -> None:
    counts = RelayCounts(reservations=3, circuits=2, relayed_bytes=10**9, throttled_s=1.5)
    counts.refusals |= {"refused": 1, "stranger": 2, "failed": 4, "idle": 100}
    assert relay_status(counts) == RelayStatus(
        num_reservations=3, num_circuits=2, relayed_bytes=10**9, num_refused=7, throttled_s=1.5
    )
    counts.refusals["stranger"] = 2**40
    found = relay_status(counts)
    assert found is not None
    assert found.num_refused == MAX_COUNT
    assert relay_status(None) is None
