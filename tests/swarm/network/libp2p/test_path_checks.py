"""Checks of paths that depend on each other, of peers behind one relay, in virtual time and without daemons."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, cast
from unittest.mock import Mock

import pytest
from swarm.network.libp2p import path_watch
from swarm.network.libp2p.path_watch import ECHO_S, LATE_FACTOR, LATE_S, RELAY_S, TICK_S, PathWatch
from swarm.network.traffic import Traffic
from swarm.testing import virtual_time
from swarm_protocol.identity import Identity

RELAY, OTHER_RELAY, ONE, TWO = (Identity(bytes([number]) * 32).peer_id for number in range(1, 5))
DIRECT = ("/ip4/192.0.2.7/tcp/4001",)


def through(relay: str) -> tuple[str, ...]:
    return (f"/ip4/192.0.2.8/tcp/4001/p2p/{relay}/p2p-circuit",)


class World:
    """A stand-in for `Host` and `Reconnector`. Peers in `dead` send nothing until they are dialled again."""

    def __init__(self, connections: dict[str, tuple[str, ...]]) -> None:
        self.connections = connections
        self.dead = set(connections)
        self.called: set[str] = set()
        self.traffic = Traffic()
        self.dropped: dict[str, set[str]] = {}  # the peers behind each relay
        self.reached: list[str] = []
        self.echo_s = 0.0
        self.watch = PathWatch(cast("Any", self), cast("Any", self), lambda: ())

    async def connected_peers(self) -> dict[str, tuple[str, ...]]:
        return dict(self.connections)

    def called_peers(self) -> Iterable[str]:
        return self.called

    async def drop(self, peer_id: str, *, behind: Iterable[str] = ()) -> None:
        assert peer_id not in self.dropped
        self.dropped[peer_id] = set(behind)

    async def reach(self, peer_id: str) -> None:
        self.reached.append(peer_id)
        self.dead.discard(peer_id)

    async def echo(self, _host: object, peer_id: str) -> None:
        if peer_id in self.dead:
            await asyncio.Event().wait()
        await asyncio.sleep(self.echo_s)


Watched = Callable[[World, Callable[[], Awaitable[None]]], None]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Return a function that runs a case while the paths of a world are watched."""
    monkeypatch.setattr(path_watch, "source_addresses", lambda: ())

    def run(world: World, case: Callable[[], Awaitable[None]]) -> None:
        monkeypatch.setattr(path_watch, "_echo", world.echo)

        async def main() -> None:
            running = asyncio.create_task(world.watch.run())
            await case()
            assert not running.done()
            running.cancel()
            await asyncio.wait((running,))

        virtual_time.run(main())

    return run


def test_dead_relay_of_two_peers_is_dropped_once_and_the_peers_are_dialled_after_it(watched: Watched) -> None:
    world = World({RELAY: DIRECT, ONE: through(RELAY), TWO: through(RELAY)})
    world.called = {ONE, TWO}

    async def case() -> None:
        await asyncio.sleep(10 * ECHO_S)
        assert world.dropped == {RELAY: {ONE, TWO}}
        assert world.reached[0] == RELAY
        assert sorted(world.reached[1:]) == sorted((ONE, TWO))

    watched(world, case)


def test_dead_path_through_a_relay_that_answers_is_dropped_alone(watched: Watched) -> None:
    world = World({RELAY: DIRECT, ONE: through(RELAY), TWO: through(RELAY)})
    world.dead, world.called = {ONE}, {ONE, TWO}

    async def case() -> None:
        await asyncio.sleep(10 * ECHO_S)
        assert world.dropped == {ONE: set()}
        assert world.reached == [ONE]

    watched(world, case)


def test_checks_end_when_peers_seem_to_relay_for_each_other(watched: Watched) -> None:
    world = World({RELAY: through(OTHER_RELAY), OTHER_RELAY: through(RELAY)})
    world.called = {RELAY}

    async def case() -> None:
        await asyncio.sleep(2 * RELAY_S)
        assert set(world.reached) == {RELAY, OTHER_RELAY}
        world.called = set()
        await asyncio.sleep(RELAY_S)
        assert not world.watch._asking

    watched(world, case)


def test_dead_path_is_found_when_short_calls_follow_one_another(watched: Watched) -> None:
    world = World({ONE: DIRECT})

    async def case() -> None:
        for _ in range(4):
            world.called = {ONE}
            await asyncio.sleep(ECHO_S + 0.2)  # a check has begun, and is not over
            world.called = set()
            await asyncio.sleep(TICK_S + 0.1)
        assert set(world.dropped) == {ONE}

    watched(world, case)


def test_peer_is_noted_as_heard_while_its_bytes_come(watched: Watched) -> None:
    world = World({ONE: DIRECT})
    comes = [True, True, False, False, False]
    stream = Mock(peer_id=ONE, is_carried=True, acknowledge=Mock(side_effect=lambda: bool(comes) and comes.pop(0)))

    async def case() -> None:
        with world.watch.watching(stream):
            await asyncio.sleep(2.5 * TICK_S)
            assert world.traffic.links.was_heard(ONE, within_s=TICK_S)
            await asyncio.sleep(2 * TICK_S)
            assert not world.traffic.links.was_heard(ONE, within_s=TICK_S)

    watched(world, case)


def test_path_with_late_echoes_is_given_longer_until_they_are_forgotten(watched: Watched) -> None:
    world = World({ONE: DIRECT})
    world.dead, world.called, world.echo_s = set(), {ONE}, 0.9 * ECHO_S

    async def case() -> None:
        await asyncio.sleep(4 * ECHO_S)
        world.echo_s = (LATE_FACTOR - 1) * ECHO_S
        await asyncio.sleep(10 * ECHO_S)
        assert not world.dropped, "a lost packet holds up what comes after it"
        world.called = set()
        await asyncio.sleep(LATE_S + RELAY_S)
        world.called, world.dead = {ONE}, {ONE}
        await asyncio.sleep(2 * ECHO_S)
        assert set(world.dropped) == {ONE}

    watched(world, case)
