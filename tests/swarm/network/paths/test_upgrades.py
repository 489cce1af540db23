"""Tests of when a direct connection is attempted in place of a relayed one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any, cast

import pytest
from swarm.network.libp2p.host import Host
from swarm.network.paths import direct_paths
from swarm.network.paths.direct_paths import Upgrades
from swarm.testing import virtual_time
from swarm_protocol.errors import PeerUnreachable

FAR = "/ip4/44.7.7.7/tcp/4001"
CIRCUIT = f"{FAR}/p2p/relay/p2p-circuit"


class World:
    """A host with one peer, "b", on a relay."""

    def __init__(self, peer_id: str, *, is_able: bool) -> None:
        self.peer_id = peer_id
        self.kinds = {"b": "relayed"}
        self.known: dict[str, tuple[str, ...]] = {}
        self.tried_at: list[float] = []
        self.pause_s = 0.0
        self.upgrades = Upgrades(cast(Host, self), self._replace, lambda: is_able)
        self.leads_nowhere = True

    def path_kinds(self) -> dict[str, str]:
        return self.kinds

    def known_addrs(self, peer_id: str) -> tuple[str, ...]:
        return self.known.get(peer_id, ())

    async def _replace(self, peer_id: str) -> None:
        self.tried_at.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.pause_s)
        if self.leads_nowhere:
            raise PeerUnreachable("it is away", peer_id=peer_id)
        self.kinds[peer_id] = "punched"


def run(case: Callable[[World], Coroutine[Any, Any, None]], *, peer_id: str = "a", is_able: bool = True) -> None:
    async def main() -> None:
        world = World(peer_id, is_able=is_able)
        running = asyncio.create_task(world.upgrades.run())
        await case(world)
        running.cancel()
        await asyncio.wait((running,))

    virtual_time.run(main())


@pytest.mark.parametrize(("peer_id", "turn_s"), [("a", 0.0), ("c", direct_paths.TURN_S)])
def test_attempts_become_rarer_and_the_two_sides_take_turns(peer_id: str, turn_s: float) -> None:
    async def case(world: World) -> None:
        began_at = asyncio.get_running_loop().time()
        await asyncio.sleep(3 * 3600)
        since = [at - began_at for at in world.tried_at]
        assert since[0] == pytest.approx(direct_paths.FIRST_S + turn_s, abs=2 * direct_paths.LOOK_S)
        pauses = [after - before for before, after in pairwise(since)]
        wanted = [4 * direct_paths.FIRST_S, 16 * direct_paths.FIRST_S, direct_paths.MAX_S]
        assert pauses[:3] == pytest.approx(wanted, abs=2 * direct_paths.LOOK_S)

    run(case, peer_id=peer_id)


def test_direct_address_that_a_peer_announces_is_tried_at_once_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case(world: World) -> None:
        await asyncio.sleep(10)
        world.known["b"] = (CIRCUIT,)
        await asyncio.sleep(10)
        assert world.tried_at == [], "another relay must not count as a new address"
        world.known["b"] = (CIRCUIT, FAR)
        await asyncio.sleep(50)
        assert len(world.tried_at) == 1

    run(case, is_able=False)


def test_peer_that_keeps_announcing_new_addresses_is_soon_ignored_even_when_it_reconnects() -> None:
    async def case(world: World) -> None:
        for number in range(200):
            world.known["b"] = tuple(f"/ip4/44.7.{number}.{last}/tcp/1" for last in range(8))
            if number % 2:
                del world.kinds["b"]
            await asyncio.sleep(direct_paths.LOOK_S)
            world.kinds["b"] = "relayed"
            await asyncio.sleep(direct_paths.LOOK_S)
        assert len(world.tried_at) <= direct_paths.MAX_TRIED / 8
        assert len(world.upgrades._relayed["b"].tried) <= direct_paths.MAX_TRIED
        del world.kinds["b"]
        await asyncio.sleep(direct_paths.FORGET_S + 2 * direct_paths.LOOK_S)
        assert not world.upgrades._relayed

    run(case, is_able=False)


def test_bounded_number_of_peers_is_tried_at_once() -> None:
    async def case(world: World) -> None:
        world.pause_s = direct_paths.ATTEMPT_S
        world.kinds = {f"b{number}": "relayed" for number in range(20)}
        await asyncio.sleep(direct_paths.FIRST_S + 3 * (direct_paths.LOOK_S + direct_paths.ATTEMPT_S))
        began = Counter(world.tried_at)
        assert list(began.values()) == [direct_paths.MAX_AT_ONCE, direct_paths.MAX_AT_ONCE, 4]

    run(case)


def test_connection_that_became_direct_is_left_alone() -> None:
    async def case(world: World) -> None:
        world.leads_nowhere = False
        await asyncio.sleep(4 * 3600)
        assert len(world.tried_at) == 1

    run(case)


def test_peer_counts_as_relayed_while_it_is_away_and_not_in_an_attempt_to_change_that() -> None:
    async def case(world: World) -> None:
        assert not world.upgrades.was_relayed("b"), "it has not been looked at"
        await asyncio.sleep(2 * direct_paths.LOOK_S)
        assert world.upgrades.was_relayed("b")
        del world.kinds["b"]
        await asyncio.sleep(2 * direct_paths.LOOK_S)
        assert world.upgrades.was_relayed("b"), "its connection was lost"
        world.kinds["b"] = "relayed"
        world.pause_s = 10.0
        await asyncio.sleep(direct_paths.FIRST_S - 2 * direct_paths.LOOK_S)
        assert world.tried_at
        assert not world.upgrades.was_relayed("b"), "an attempt is in flight"
        await asyncio.sleep(10.0)
        assert world.upgrades.was_relayed("b"), "the attempt failed"
        world.kinds["b"] = "punched"
        await asyncio.sleep(2 * direct_paths.LOOK_S)
        assert not world.upgrades.was_relayed("b")

    run(case)


def test_attempt_is_repeated_when_an_own_address_changes() -> None:
    async def case(world: World) -> None:
        await asyncio.sleep(100)
        assert len(world.tried_at) == 1
        world.upgrades.expect_news()
        await asyncio.sleep(10)
        assert len(world.tried_at) == 2

    run(case)
