"""A node keeps reservations at three relays of different networks, whatever they do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from swarm.network.libp2p.host import Host, RawStream
from swarm.network.relay import reservations as reservations_module
from swarm.network.relay.circuit_messages import CircuitStatus, hop_status
from swarm.network.relay.reservations import (
    ANSWER_TIMEOUT_S,
    LOOK_S,
    MAX_KNOWN_PAUSE_S,
    MAX_PAUSE_S,
    MIN_PAUSE_S,
    NUM_RELAYS,
    RELEASE_S,
    RelayCandidate,
    Reservations,
)
from swarm.testing import virtual_time
from swarm_protocol.errors import PeerUnreachable


class FakeWriter:
    """The writer of a reservation. Aborting it ends the stream on both sides."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self.transport = self

    def write(self, _data: bytes) -> None: ...

    def writelines(self, _parts: Sequence[bytes]) -> None: ...

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        self._reader.feed_eof()


class Relays:
    """Scripted relays.

    By its state, a relay accepts, refuses ("full"), is away ("gone"), is away and not connected ("off"), never answers
    ("silent"), or accepts and is connected through another relay ("relayed").
    """

    def __init__(self, **kinds: str) -> None:
        self.kinds = kinds
        self.num_asked = dict.fromkeys(kinds, 0)
        self.num_looks = 0
        self._streams: dict[str, FakeWriter] = {}

    async def connected_peers(self) -> dict[str, tuple[str, ...]]:
        relayed = ("/ip4/44.1.0.1/tcp/4001/p2p/x/p2p-circuit",)
        return {
            peer_id: relayed if kind == "relayed" else ("/ip4/44.1.0.1/tcp/4001",)
            for peer_id, kind in self.kinds.items()
            if kind != "off"
        }

    def num_calls(self, _peer_id: str) -> int:
        self.num_looks += 1
        return int(self.num_looks < 3)

    async def drop(self, peer_id: str) -> None:
        assert self.kinds[peer_id] == "relayed"
        self.kinds[peer_id] = "ok"

    async def open_stream(self, peer_id: str, _protocol: str, *, addrs: Sequence[str]) -> RawStream:
        assert addrs == (addr_of(peer_id),)
        self.num_asked[peer_id] += 1
        kind = self.kinds[peer_id]
        await asyncio.sleep(0.01)
        if kind == "gone":
            raise PeerUnreachable("nothing listens there", peer_id=peer_id)
        reader = asyncio.StreamReader()
        writer = self._streams[peer_id] = FakeWriter(reader)
        if kind != "silent":
            reader.feed_data(hop_status(CircuitStatus.OK if kind == "ok" else CircuitStatus.RESERVATION_REFUSED))
        return reader, cast("Any", writer)

    def die(self, peer_id: str) -> None:
        self.kinds[peer_id] = "gone"
        self._streams[peer_id].abort()


def addr_of(peer_id: str) -> str:
    """Return an address. `a1` and `a2` are in one network, `b1` is in another."""
    return f"/ip4/44.{ord(peer_id[0])}.0.{peer_id[1:]}/tcp/4001"


def relay(peer_id: str, *, is_given: bool = True) -> RelayCandidate:
    return RelayCandidate(peer_id=peer_id, addrs=(addr_of(peer_id),), is_given=is_given)


def run(case: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await case()

    virtual_time.run(main())


@asynccontextmanager
async def kept(
    relays: Relays, given: Iterable[str] = (), known: Iterable[str] = (), *, wanted: bool = True
) -> AsyncIterator[Reservations]:
    found = [*map(relay, given), *(relay(each, is_given=False) for each in known)]
    reservations = Reservations(cast("Host", relays), lambda: found, relays.drop, wanted=wanted)
    running = asyncio.create_task(reservations.run())
    yield reservations
    running.cancel()
    await asyncio.wait((running,))
    assert reservations.held == frozenset()


def test_three_relays_are_reserved_and_those_of_other_networks_preferred() -> None:
    async def case() -> None:
        relays = Relays(a1="ok", a2="ok", a3="ok", b1="ok", c1="ok", d1="ok")
        async with kept(relays, given=relays.kinds) as reservations:
            await reservations.wait_answered(relays.kinds)
            assert reservations.held == {"a1", "b1", "c1"}
            assert set(reservations.addrs) == {f"{addr_of(each)}/p2p/{each}/p2p-circuit" for each in ("a1", "b1", "c1")}
            await asyncio.sleep(10 * LOOK_S)
            assert sum(relays.num_asked.values()) == NUM_RELAYS

    run(case)


def test_reservations_are_in_one_network_when_no_other_has_relays() -> None:
    async def case() -> None:
        relays = Relays(a1="ok", a2="ok", a3="ok", a4="ok")
        async with kept(relays, given=relays.kinds) as reservations:
            await asyncio.sleep(1.0)
            assert reservations.held == {"a1", "a2", "a3"}

    run(case)


def test_relay_of_another_network_replaces_one_that_shares_its_network() -> None:
    async def case() -> None:
        relays = Relays(a1="ok", a2="ok", a3="ok", b1="gone", c1="gone")
        async with kept(relays, given=relays.kinds) as reservations:
            await asyncio.sleep(1.0)
            assert reservations.held == {"a1", "a2", "a3"}
            relays.kinds |= {"b1": "ok", "c1": "ok"}
            await asyncio.sleep(2 * MAX_PAUSE_S)
            assert reservations.held == {"a1", "b1", "c1"}
            await asyncio.sleep(10 * LOOK_S)
            assert relays.num_asked["a2"] == relays.num_asked["a3"] == 1

    run(case)


def test_relay_that_leaves_is_replaced_at_once_and_two_others_are_held_meanwhile() -> None:
    async def case() -> None:
        relays = Relays(a1="ok", b1="ok", c1="ok", d1="ok")
        async with kept(relays, given=("a1", "b1"), known=("c1", "d1")) as reservations:
            await asyncio.sleep(1.0)
            assert reservations.held == {"a1", "b1", "c1"}
            relays.die("b1")
            await asyncio.sleep(0.001)
            assert reservations.held == {"a1", "c1"}
            assert len(reservations.addrs) == 2
            await asyncio.sleep(0.05)
            assert reservations.held == {"a1", "c1", "d1"}

    run(case)


def test_relays_that_refuse_or_are_silent_do_not_delay_reservations_at_others() -> None:
    async def case() -> None:
        relays = Relays(a1="full", b1="silent", c1="gone", d1="ok", e1="ok", f1="ok")
        async with kept(relays, given=("a1", "b1", "c1"), known=("d1", "e1", "f1")) as reservations:
            await asyncio.sleep(ANSWER_TIMEOUT_S / 2)
            assert reservations.held == {"d1", "e1"}
            await asyncio.sleep(ANSWER_TIMEOUT_S)
            assert reservations.held == {"d1", "e1", "f1"}

    run(case)


def test_relayed_relay_is_connected_directly_once_no_call_is_in_flight() -> None:
    async def case() -> None:
        relays = Relays(a1="ok", b1="relayed")
        async with kept(relays, given=relays.kinds) as reservations:
            await reservations.wait_answered(relays.kinds)
            assert reservations.held == {"a1", "b1"}
            assert relays.kinds["b1"] == "ok"
            assert relays.num_looks == 3

    run(case)


def test_failing_relays_are_asked_ever_more_rarely_and_given_ones_more_often() -> None:
    async def case() -> None:
        relays = Relays(a1="gone", b1="full")
        async with kept(relays, given=("a1",), known=("b1",)):
            await asyncio.sleep(600.0)
            assert 600 / MAX_PAUSE_S <= relays.num_asked["a1"] <= 600 / MAX_PAUSE_S + 10
            assert 600 / MAX_KNOWN_PAUSE_S <= relays.num_asked["b1"] <= 600 / MAX_KNOWN_PAUSE_S + 10

    run(case)


def test_failing_relay_is_not_asked_sooner_after_it_was_briefly_no_candidate() -> None:
    async def case() -> None:
        relays = Relays(b1="full")
        known = [relay("b1", is_given=False)]
        reservations = Reservations(cast("Host", relays), lambda: list(known), relays.drop, wanted=True)
        running = asyncio.create_task(reservations.run())
        for _ in range(60):  # the routing table loses it and finds it again
            await asyncio.sleep(LOOK_S + 0.1)
            known.clear()
            await asyncio.sleep(LOOK_S + 0.1)
            known.append(relay("b1", is_given=False))
        running.cancel()
        await asyncio.wait((running,))
        assert relays.num_asked["b1"] <= 600 / MAX_KNOWN_PAUSE_S + 10

    run(case)


def test_pauses_of_relays_without_end_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservations_module, "MAX_REMEMBERED", 20)

    async def case() -> None:
        names = [f"{letter}{number}" for letter in "abcde" for number in range(10)]
        relays = Relays(**dict.fromkeys(names, "full"))
        async with kept(relays, known=names) as reservations:
            await asyncio.sleep(600.0)
            assert len(reservations._pauses) < 20 + NUM_RELAYS
            assert max(relays.num_asked.values()) <= 600 / MAX_KNOWN_PAUSE_S + 10

    run(case)


def test_given_relay_is_used_again_when_it_is_back() -> None:
    async def case() -> None:
        relays = Relays(a1="ok")
        async with kept(relays, given=("a1",)) as reservations:
            await reservations.wait_answered(("a1",))
            relays.die("a1")
            await asyncio.sleep(1.0)
            assert reservations.held == frozenset()
            relays.kinds["a1"] = "ok"
            await asyncio.sleep(2 * (1.0 + MIN_PAUSE_S))
            assert reservations.held == {"a1"}

    run(case)


def test_relays_that_leave_as_soon_as_they_are_held_are_asked_ever_more_rarely() -> None:
    async def case() -> None:
        relays = Relays(a1="ok", b1="ok")
        async with kept(relays, given=("a1",), known=("b1",)) as reservations:
            until = asyncio.get_running_loop().time() + 600.0
            while asyncio.get_running_loop().time() < until:
                for each in reservations.held:
                    relays._streams[each].abort()
                await asyncio.sleep(0.1)
            assert relays.num_asked["a1"] <= 600 / MAX_PAUSE_S + 10
            assert relays.num_asked["b1"] <= 600 / MAX_KNOWN_PAUSE_S + 10
            await asyncio.sleep(600.0)
            assert reservations.held == {"a1", "b1"}

    run(case)


def test_given_relay_is_not_dialled_while_its_machine_accepts_no_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    async def accepts_connections(_addr: str) -> bool:
        return False

    monkeypatch.setattr(reservations_module, "accepts_connections", accepts_connections)

    async def case() -> None:
        relays = Relays(a1="off")
        async with kept(relays, given=["a1"]) as reservations:
            await asyncio.sleep(3600.0)
            assert not relays.num_asked["a1"], "go-libp2p would leave the address alone for minutes after so many"
            relays.kinds["a1"] = "ok"  # it has dialled this node
            await asyncio.sleep(MAX_PAUSE_S + LOOK_S)
            assert reservations.held == {"a1"}

    run(case)


def test_waiting_for_answers_ends_when_the_named_relays_have_answered_or_failed() -> None:
    async def case() -> None:
        relays = Relays(a1="full", b1="ok", c1="silent")
        async with kept(relays, given=relays.kinds) as reservations:
            loop = asyncio.get_running_loop()
            start = loop.time()
            await reservations.wait_answered(("a1", "b1", "who is no candidate"))
            assert loop.time() - start < 1.0
            assert reservations.held == {"b1"}

    run(case)


def test_no_relay_is_asked_before_relays_are_wanted() -> None:
    async def case() -> None:
        relays = Relays(a1="ok")
        async with kept(relays, given=("a1",), wanted=False) as reservations:
            await reservations.wait_answered(("a1",))
            await asyncio.sleep(600.0)
            assert relays.num_asked == {"a1": 0}
            assert not reservations.wanted
            reservations.wanted = True
            await asyncio.sleep(1.0)
            assert reservations.held == {"a1"}

    run(case)


def test_unwanted_relays_are_no_longer_announced_and_released_later() -> None:
    async def case() -> None:
        relays = Relays(a1="ok", b1="ok")
        async with kept(relays, given=relays.kinds) as reservations:
            await asyncio.sleep(1.0)
            reservations.wanted = False
            assert reservations.addrs == ()
            await asyncio.sleep(RELEASE_S - 1.0)
            assert reservations.held == {"a1", "b1"}
            reservations.wanted = True
            await asyncio.sleep(2 * RELEASE_S)
            assert len(reservations.addrs) == 2
            assert relays.num_asked == {"a1": 1, "b1": 1}
            reservations.wanted = False
            relays.die("a1")
            relays.kinds["a1"] = "ok"
            await asyncio.sleep(RELEASE_S - 1.0)
            assert reservations.held == {"b1"}
            await asyncio.sleep(2.0)
            assert reservations.held == frozenset()
            reservations.wanted = True
            await asyncio.sleep(1.0)
            assert reservations.held == {"a1", "b1"}

    run(case)
