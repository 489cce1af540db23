"""Silent paths between real daemons are replaced, and those whose other end only computes are not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from support.free_ports import free_port
from support.network_worlds import eventually, libp2p_node
from support.proxied_pair import Pair, PairRun, echo_stream, pair_runner
from support.wan_proxy import LINKS, WanProxy
from swarm.network.libp2p import path_watch
from swarm.network.libp2p.host import Host
from swarm.network.suspension import SuspensionWatch
from swarm_protocol.errors import PeerUnreachable

MIB = 2**20


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PairRun]:
    with pair_runner(tmp_path_factory.mktemp("pair")) as run:
        yield run


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the peers that were asked for an echo, with all times a tenth."""
    monkeypatch.setattr(path_watch, "TICK_S", 0.05)
    monkeypatch.setattr(path_watch, "PATH_SILENT_S", 0.1)
    monkeypatch.setattr(path_watch, "ECHO_S", 0.3)
    asked = []
    ask = path_watch._echo

    async def noted(host: Host, peer_id: str) -> None:
        asked.append(peer_id)
        await ask(host, peer_id)

    monkeypatch.setattr(path_watch, "_echo", noted)
    return asked


def forgive(pair: Pair) -> None:
    """Drop the memory of paths that earlier cases gave up."""
    for node in (pair.a, pair.b):
        node._watch._echo_s.clear()


def test_stream_continues_when_its_connection_swallows_everything(run: PairRun) -> None:
    async def case(pair: Pair) -> None:
        forgive(pair)
        async with pair.b.stream(pair.a.peer_id, "echo", timeout_s=30) as stream:
            await stream.send(b"before")
            assert await stream.receive() == b"before"
            num_connections = pair.swallow()
            await stream.send(bytes(MIB))
            assert await stream.receive() == bytes(MIB)
            assert pair.proxy.num_connections > num_connections
            # it might only have been slow, so that it gets more time from now on; and yet more on a busy machine
            assert pair.b._watch._patience_s(pair.a.peer_id) >= 2 * path_watch.ECHO_S

    run(case)


def test_call_fails_and_the_next_one_succeeds_when_a_connection_swallows_everything(run: PairRun) -> None:
    async def case(pair: Pair) -> None:
        forgive(pair)
        pair.may_answer.set()
        pair.swallow()
        with pytest.raises(PeerUnreachable):
            await pair.b.call(pair.a.peer_id, "wait", b"lost", timeout_s=30)
        assert await pair.b.call(pair.a.peer_id, "wait", b"next", timeout_s=30) == b"next"

    run(case)


def test_peer_that_only_computes_is_not_mistaken_for_a_dead_path(
    run: PairRun, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path_watch, "ECHO_S", 30.0)  # other programs may use this machine

    async def case(pair: Pair) -> None:
        forgive(pair)
        num_connections = pair.proxy.num_connections
        async with pair.b.stream(pair.a.peer_id, "hang", timeout_s=30):

            async def has_answered_often() -> bool:
                return asked.count(pair.a.peer_id) >= 5

            await eventually(has_answered_often)
        assert pair.proxy.num_connections == num_connections

    run(case)


def test_no_path_is_given_up_when_the_loop_stood_still(run: PairRun, monkeypatch: pytest.MonkeyPatch) -> None:
    given_up: list[str] = []
    monkeypatch.setattr(path_watch.Reconnector, "drop", lambda _self, peer_id: given_up.append(peer_id))

    async def case(pair: Pair) -> None:
        forgive(pair)
        async with pair.b.stream(pair.a.peer_id, "hang", timeout_s=30):
            for _ in range(4):
                await asyncio.sleep(0.12)  # an echo may be in flight
                time.sleep(2 * path_watch.ECHO_S)
        assert not given_up

    run(case)


def test_unused_peers_that_keep_a_node_reachable_are_asked_for_an_echo(
    run: PairRun, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path_watch, "KEEP_ALIVE_S", 0.2)

    async def case(pair: Pair) -> None:
        forgive(pair)

        async def is_asked_again() -> bool:
            return asked.count(pair.a.peer_id) >= 2

        await eventually(is_asked_again)
        assert set(asked) == {pair.a.peer_id}  # `b` uses it as a seed, and not the other way round
        num_connections = pair.swallow()

        async def is_dialled_again() -> bool:
            return pair.proxy.num_connections > num_connections

        await eventually(is_dialled_again)

    run(case)


@pytest.mark.parametrize("what", ["address", "suspension"])
def test_paths_in_use_are_checked_at_once_after_a_change_of_address_or_a_suspension(
    run: PairRun, asked: list[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(path_watch, "PATH_SILENT_S", 60.0)
    addresses = ["192.0.2.1"]
    monkeypatch.setattr(path_watch, "source_addresses", lambda: tuple(addresses))
    asleep: list[bool] = []
    monkeypatch.setattr(SuspensionWatch, "was_suspended", lambda _self: bool(asleep))

    async def case(pair: Pair) -> None:
        forgive(pair)
        async with pair.b.stream(pair.a.peer_id, "hang", timeout_s=30):
            await pair.until_running(1)
            await asyncio.sleep(4 * path_watch.TICK_S)  # the old address was seen

            async def is_quiet() -> bool:
                return not (pair.a._watch._asking or pair.b._watch._asking)

            await eventually(is_quiet)
            asked.clear()
            if what == "address":
                addresses[:] = ["192.0.2.2"]
            else:
                asleep.append(True)

            async def are_asked() -> bool:
                return set(asked) == {pair.a.peer_id, pair.b.peer_id}

            await eventually(are_asked)

    run(case)


def test_dead_path_to_a_relay_is_found_with_the_paths_through_it(tmp_path: Path, asked: list[str]) -> None:
    """A dial through a relay whose own connection is dead would take 5 s to fail."""

    async def answered_after_s() -> float:
        port = free_port()
        async with (
            WanProxy(target=("127.0.0.1", port), connection=LINKS["lan"]) as proxy,
            await libp2p_node(tmp_path / "relay", listen=(f"/ip4/127.0.0.1/tcp/{port}",), relay="serve") as relay,
        ):
            addr = f"/ip4/127.0.0.1/tcp/{proxy.address[1]}/p2p/{relay.peer_id}"
            options = {"listen": (), "relay": "use"}
            async with (
                await libp2p_node(tmp_path / "moving", peers=(addr,), **options) as moving,
                await libp2p_node(tmp_path / "other", peers=await relay.addrs(), **options) as other,
            ):
                await other.serve_stream("echo", echo_stream)
                async with moving.stream(other.peer_id, "echo", timeout_s=30) as stream:
                    await stream.send(b"before")
                    assert await stream.receive() == b"before"
                    asked.clear()
                    for pipe in proxy._pipes():
                        pipe.hold()
                    since_s = time.monotonic()
                    await stream.send(b"after")
                    assert await stream.receive() == b"after"
                    took_s = time.monotonic() - since_s
                assert {relay.peer_id, other.peer_id} <= set(asked)
                return took_s

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        # a busy machine only takes longer
        assert any(runner.run(answered_after_s()) < 3 for _ in range(5))
