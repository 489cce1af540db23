"""A running node compares its clock and its protocol version with those of its peers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from support.network_worlds import eventually, libp2p_node
from swarm.network import libp2p_network
from swarm.network.libp2p.greeting import (
    ClockWatch,
    Greeting,
    VersionWatch,
    ask_greetings,
    clock_skews_s,
    hello_of,
)
from swarm.network.libp2p.unary_connection import UnaryAnswer
from swarm_protocol.errors import PeerUnreachable
from swarm_protocol.limits import MAX_CLOCK_SKEW_S
from swarm_protocol.version import PROTOCOL_VERSION

SAME = hello_of("swarm")
NEWER = replace(SAME, protocol_version=PROTOCOL_VERSION + 1)
OLDER = replace(SAME, protocol_version=PROTOCOL_VERSION - 1)


def test_wrong_clock_is_reported_once_and_so_is_its_correction() -> None:
    watch, wrong = ClockWatch(), [MAX_CLOCK_SKEW_S + 5] * 3
    assert watch.look([0.1, -0.2, 0.0]) is None
    assert (watch.look(wrong), watch.is_wrong) == (MAX_CLOCK_SKEW_S + 5, True)
    assert watch.look(wrong) is None
    assert watch.look([MAX_CLOCK_SKEW_S - 1] * 3) is None, "at the limit it would otherwise be reported again and again"
    assert (watch.look([0.5] * 3), watch.is_wrong) == (0.5, False)
    assert watch.look([0.5] * 3) is None


def test_clock_is_not_reported_when_a_minority_of_peers_differs() -> None:
    watch = ClockWatch()
    assert watch.look([3600.0]) is None
    assert watch.look([3600.0, 3600.0]) is None, "too few peers to decide"
    assert watch.look([3600.0, 0.0, 0.0]) is None
    assert watch.look([-3600.0, -3600.0, 0.1, 0.2, 0.3]) is None
    assert not watch.is_wrong


def test_clocks_of_connected_peers_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer_ahead(network_id: str) -> UnaryAnswer:
        async def answer(_peer_id: str, _request: bytes) -> bytes:
            return hello_of(network_id, time.time() + 10).to_bytes()

        return answer

    async def main() -> None:
        seed = await libp2p_node(tmp_path / "seed")
        monkeypatch.setattr(libp2p_network, "hello_answer", answer_ahead)
        nodes = [await libp2p_node(tmp_path / name, peers=await seed.addrs()) for name in "abc"]

        async def found() -> bool:
            return len(await seed.ask_greetings()) == len(nodes)

        await eventually(found)
        assert clock_skews_s(await seed.ask_greetings()) == [pytest.approx(10, abs=2)] * 3
        for network in (*nodes, seed):
            await network.close()

    asyncio.run(main())


def test_greetings_of_other_networks_and_peers_that_do_not_answer_are_left_out() -> None:
    hellos = {"a": hello_of("swarm", 7.0), "b": hello_of("other", 7.0)}

    async def greet(peer_id: str, **_: object) -> Greeting:
        if peer_id not in hellos:
            raise PeerUnreachable("it has left", peer_id=peer_id)
        return Greeting(hello=hellos[peer_id], skew_s=0.0)

    asked = ask_greetings(MagicMock(**{"gate.greet": greet}), ["a", "b", "c"], "swarm")
    assert [each.hello for each in asyncio.run(asked)] == [hellos["a"]]


def test_bug_in_a_greeting_is_not_taken_for_a_peer_that_does_not_answer() -> None:
    async def greet(_peer_id: str, **_: object) -> Greeting:
        raise LookupError("a bug")

    with pytest.raises(LookupError):
        asyncio.run(ask_greetings(MagicMock(**{"gate.greet": greet}), ["a"], "swarm"))


def test_other_versions_are_reported_once_each_way() -> None:
    watch = VersionWatch()
    assert watch.look([]) is None
    assert watch.look([SAME]) is None
    assert watch.look([OLDER]) == OLDER
    assert watch.look([OLDER]) is None
    assert watch.look([OLDER, NEWER, SAME]) == NEWER
    assert watch.look([NEWER]) is None


def test_other_version_of_a_minority_is_not_reported() -> None:
    watch = VersionWatch()
    assert watch.look([NEWER, SAME, SAME]) is None
    assert watch.look([NEWER, SAME]) == NEWER
