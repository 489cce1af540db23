"""A relay greets each peer once to learn whether it is of the network, and bounds what it remembers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from swarm.network.relay.relay_access import (
    GREETING_TIMEOUT_S,
    MAX_KNOWN,
    NETWORK_PEER_S,
    STRANGER_S,
    NetworkPeers,
)
from swarm.testing import virtual_time
from swarm_protocol.errors import PeerRefused


class Peers:
    """Peers whose names begin with "member" or "stranger", or with "silent" if they never answer."""

    def __init__(self) -> None:
        self.num_greetings: Counter[str] = Counter()

    async def greet(self, peer_id: str) -> None:
        self.num_greetings[peer_id] += 1
        await asyncio.sleep(3600 if peer_id.startswith("silent") else 0.1)
        if peer_id.startswith("stranger"):
            raise PeerRefused("peer is in another network", peer_id=peer_id)


def run(case: Callable[[Peers, NetworkPeers], Awaitable[None]]) -> None:
    async def main() -> None:
        peers = Peers()
        await case(peers, NetworkPeers(peers.greet))

    virtual_time.run(main())


def test_peer_is_greeted_once_for_simultaneous_requests_and_again_later() -> None:
    async def case(peers: Peers, members: NetworkPeers) -> None:
        for hold_s in (0.0, NETWORK_PEER_S + 1):
            await asyncio.sleep(hold_s)
            assert all(await asyncio.gather(*(members.include("member") for _ in range(9))))
            assert await members.include("member")
        assert peers.num_greetings == {"member": 2}

    run(case)


def test_strangers_and_silent_peers_are_refused_in_time_and_asked_again_soon() -> None:
    async def case(peers: Peers, members: NetworkPeers) -> None:
        for _ in range(2):
            async with asyncio.timeout(GREETING_TIMEOUT_S + 0.1):
                assert not any(await asyncio.gather(members.include("stranger"), members.include("silent")))
                assert not await members.include("silent")
            await asyncio.sleep(STRANGER_S)
        assert peers.num_greetings == {"stranger": 2, "silent": 2}

    run(case)


def test_any_number_of_silent_peers_keeps_nobody_out() -> None:
    async def case(_peers: Peers, members: NetworkPeers) -> None:
        silent = [asyncio.create_task(members.include(f"silent {number}")) for number in range(1000)]
        await asyncio.sleep(0)
        assert await members.include("member")
        assert not any(await asyncio.gather(*silent))

    run(case)


def test_kept_answers_are_bounded() -> None:
    async def case(peers: Peers, members: NetworkPeers) -> None:
        for number in range(MAX_KNOWN + 1):
            assert await members.include(f"member {number}")
        assert len(members._known) == MAX_KNOWN
        assert await members.include(f"member {MAX_KNOWN}")
        assert peers.num_greetings[f"member {MAX_KNOWN}"] == 1

    run(case)
