"""Tests of how long silent peers can delay a private network's gate, in virtual time and with a fake host."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import cast

from support.private_networks import Owner
from swarm.network.libp2p.host import Host
from swarm.network.peer_budgets import NUM_GUARANTEED
from swarm.network.private.member_roll import MemberRoll
from swarm.network.private.private_gate import CHECK_S, EXCHANGE_S, MAX_WAITING, STRANGER_S, PrivateGate
from swarm.network.relay.relay_access import GREETING_TIMEOUT_S
from swarm.testing import virtual_time
from swarm_protocol import limits
from swarm_protocol.errors import PeerRefused
from swarm_protocol.identity import Identity
from swarm_protocol.network_invitation import PrivateGreeting
from swarm_protocol.version import Hello, software_version

OWNER = Owner()
SELF = Identity(bytes([41]) * 32).peer_id


class SilentPeers:
    """Connected peers that do not answer a greeting. Closing a connection takes no time."""

    def __init__(self) -> None:
        self.peer_id = SELF
        self.connected: set[str] = set()
        self.closed_s: dict[str, float] = {}
        self.greeted: list[str] = []
        self.control = self

    async def connected_peers(self) -> list[str]:
        return sorted(self.connected)

    async def disconnect(self, peer_id: str) -> None:
        self.connected.discard(peer_id)
        self.closed_s[peer_id] = asyncio.get_running_loop().time()

    async def call(self, peer_id: str, _method: str, _request: bytes, *, addrs: object = None) -> bytes:
        self.greeted.append(peer_id)
        await asyncio.Event().wait()
        return b""


class Scene:
    def __init__(self) -> None:
        self.peers = SilentPeers()
        self.gate = PrivateGate(cast(Host, self.peers), MemberRoll(OWNER.invite(), SELF, time.time()))
        self.ended: list[str] = []

    def members(self, num: int) -> dict[str, int]:
        """Connect members that have shown their chains, and return the serials of their invitations."""
        return {peer_id: self.member(peer_id) for peer_id in (Identity.generate().peer_id for _ in range(num))}

    def member(self, peer_id: str) -> int:
        """Connect a member with a new invitation that it has shown, and return its serial."""
        self.peers.connected.add(peer_id)
        return self.shown(peer_id)

    def shown(self, peer_id: str) -> int:
        """Receive a peer's new invitation, and return its serial."""
        invitation = OWNER.invite()
        hello = Hello(network_id=OWNER.network_id, software_version=software_version())
        shown = PrivateGreeting(hello=hello, chain=invitation.chain_for(peer_id))
        self.gate._roll.take_in(peer_id, shown, time.time())
        return invitation.terms.serial

    def strangers(self, num: int) -> set[str]:
        found = {Identity.generate().peer_id for _ in range(num)}
        self.peers.connected |= found
        return found

    def revoke(self, *serials: int, number: int) -> float:
        """Receive a list of revocations, and return when."""
        self.gate._roll._hear(OWNER.revoke(*serials, number=number), time.time())
        return asyncio.get_running_loop().time()

    def end_streams(self, peer_id: str, _error: PeerRefused) -> None:
        self.ended.append(peer_id)


def watched(case: Callable[[Scene], Awaitable[None]]) -> None:
    async def scenario() -> None:
        scene = Scene()
        running = asyncio.create_task(scene.gate.run(scene.end_streams))
        await case(scene)
        assert not running.done()
        running.cancel()
        await asyncio.wait({running})

    virtual_time.run(scenario())


def test_revoked_member_is_disconnected_in_time_when_strangers_are_silent() -> None:
    async def case(scene: Scene) -> None:
        strangers, began_s = scene.strangers(100), asyncio.get_running_loop().time()
        [(peer_id, serial)] = scene.members(1).items()
        await asyncio.sleep(STRANGER_S + CHECK_S / 2)
        since_s = scene.revoke(serial, number=1)
        await asyncio.sleep(4 * CHECK_S)
        assert scene.ended[0] == peer_id
        assert scene.peers.closed_s[peer_id] - since_s <= CHECK_S
        assert strangers <= scene.peers.closed_s.keys()
        assert max(scene.peers.closed_s.values()) - began_s <= STRANGER_S + 3 * CHECK_S
        assert strangers.isdisjoint(scene.peers.greeted), "they have had their time"

    watched(case)


def test_revoked_member_is_disconnected_in_time_when_other_members_are_slow() -> None:
    async def case(scene: Scene) -> None:
        scene.members(100)
        first, second = scene.members(2).items()
        scene.revoke(first[1], number=1)
        await asyncio.sleep(1.5 * CHECK_S)
        assert len(scene.peers.greeted) >= 16, "members are being notified"
        since_s = scene.revoke(first[1], second[1], number=2)
        await asyncio.sleep(2 * EXCHANGE_S)
        assert scene.peers.closed_s[second[0]] - since_s <= CHECK_S
        assert len(scene.peers.greeted) > 150, "and notified of the second list"

    watched(case)


def test_revoked_member_is_disconnected_in_time_each_time_that_it_connects_again() -> None:
    async def case(scene: Scene) -> None:
        [(peer_id, serial)] = scene.members(1).items()
        await asyncio.sleep(1.5 * CHECK_S)
        scene.revoke(serial, number=1)
        await asyncio.sleep(CHECK_S)
        for pause_s in (0.0, CHECK_S / 2, 10 * STRANGER_S):
            await asyncio.sleep(pause_s)
            assert peer_id not in scene.peers.connected
            scene.peers.connected.add(peer_id)
            again_s = asyncio.get_running_loop().time()
            await asyncio.sleep(2 * CHECK_S)
            assert scene.peers.closed_s[peer_id] - again_s <= 2 * CHECK_S

    watched(case)


def test_revoked_member_has_time_to_show_a_new_invitation() -> None:
    async def case(scene: Scene) -> None:
        [(peer_id, serial)] = scene.members(1).items()
        await asyncio.sleep(1.5 * CHECK_S)
        scene.revoke(serial, number=1)
        await asyncio.sleep(2 * CHECK_S)
        scene.peers.connected.add(peer_id)
        await asyncio.sleep(0.9 * CHECK_S)
        scene.shown(peer_id)
        await asyncio.sleep(2 * STRANGER_S)
        assert peer_id in scene.peers.connected

    watched(case)


def test_strangers_that_do_not_answer_greetings_hold_few_slots_of_members() -> None:
    async def case(scene: Scene) -> None:
        method = f"/swarm/1/{OWNER.network_id}/stream/serving.lane/m"
        async with asyncio.TaskGroup() as asking:
            asked = [
                asking.create_task(scene.gate.admits(peer_id, method))
                for peer_id in scene.strangers(64)
                for _ in range(limits.MAX_CALLS_PER_PEER)
            ]
            await asyncio.sleep(GREETING_TIMEOUT_S / 2)
            assert sum(not each.done() for each in asked) <= MAX_WAITING + 64 * NUM_GUARANTEED
            [member] = scene.members(1)
            assert all([await scene.gate.admits(member, method) for _ in range(100)])
        assert not any(each.result() for each in asked)

    watched(case)
