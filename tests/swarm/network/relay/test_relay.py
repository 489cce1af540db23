"""Nodes that cannot be dialled are reached through their relay, with any volume and whatever the relay tries."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import uvloop
from support.network_worlds import RelayedWorld, eventually, libp2p_node
from swarm.network.dht import own_records
from swarm.network.interface import Stream
from swarm.network.libp2p import stream_resume
from swarm.network.libp2p.daemon_control import read_delimited
from swarm.network.libp2p.greeting import HELLO, hello_answer
from swarm.network.libp2p.host import Host, RawStream
from swarm.network.libp2p.p2pd_process import DaemonOptions
from swarm.network.libp2p_network import (
    Libp2pNetwork,
)
from swarm.network.multiaddr import peer_id_bytes
from swarm.network.paths import address_survey
from swarm.network.peer_budgets import PeerSlots
from swarm.network.relay import relay, reservations
from swarm.network.relay.circuit_messages import HOP, MAX_MESSAGE_BYTES, CircuitStatus, hop_status, reserve_request
from swarm.network.relay.relay import Circuit, Relay, RelayLimits
from swarm_protocol.errors import PeerUnreachable

MIB = 2**20
SECRET = b"what only the two ends may read!"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trio:
    """Two nodes that listen nowhere; `hidden` is reached through `relay`, and serves "echo" and "hang"."""

    relay: Libp2pNetwork
    hidden: Libp2pNetwork
    caller: Libp2pNetwork
    callers: list[str]  # the callers that the handlers of `hidden` saw
    running: asyncio.Event
    cancelled: asyncio.Event

    async def echoes(self, request: bytes = b"hello") -> bool:
        return await self.caller.call(self.hidden.peer_id, "echo", request, timeout_s=30) == request


async def open_trio(folder: Path, stack: contextlib.AsyncExitStack) -> Trio:
    relay = await stack.enter_async_context(await libp2p_node(folder / "relay", relay="serve"))
    peers = await relay.addrs()
    hidden = await stack.enter_async_context(await libp2p_node(folder / "hidden", peers=peers, listen=(), relay="use"))
    caller = await stack.enter_async_context(await libp2p_node(folder / "caller", peers=peers, listen=()))
    trio = Trio(
        relay=relay, hidden=hidden, caller=caller, callers=[], running=asyncio.Event(), cancelled=asyncio.Event()
    )

    async def echo(peer_id: str, request: bytes) -> bytes:
        trio.callers.append(peer_id)
        return request

    async def hang(_peer_id: str, _stream: Stream) -> None:
        trio.running.set()
        try:
            await asyncio.Event().wait()
        finally:
            trio.cancelled.set()

    await hidden.serve("echo", echo)
    await hidden.serve_stream("hang", hang)
    return trio


Case = Callable[[Trio], Awaitable[None]]


def run(folder: Path, case: Case) -> None:
    """Run a case that breaks what it uses, with its own trio."""

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack, asyncio.timeout(120):
            await case(await open_trio(folder, stack))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@pytest.fixture(scope="module")
def shared_trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Case], None]]:
    """Run cases with one trio.

    At the start of each, its hidden node has a reservation, no circuit, and an empty record of callers.
    """

    async def begin(trio: Trio) -> None:
        async def has_only_its_place() -> bool:
            for node in (trio.hidden, trio.caller):
                for peer_id in (await node._host.connected_peers()).keys() - {trio.relay.peer_id}:
                    await node._host.control.disconnect(peer_id)
            counts = trio.relay.relay_counts
            return (counts.reservations, counts.circuits) == (1, 0)

        await eventually(has_only_its_place)
        trio.callers.clear()

    async def one(trio: Trio, case: Case) -> None:
        async with asyncio.timeout(120):
            await begin(trio)
            await case(trio)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stack = contextlib.AsyncExitStack()
        trio = runner.run(open_trio(tmp_path_factory.mktemp("trio"), stack))
        yield lambda case: runner.run(one(trio, case))
        runner.run(stack.aclose())


Shared = Callable[[Case], None]


class TappedCircuit(Circuit):
    """A circuit that passes on `change` of each piece."""

    change: Callable[[bytes], bytes]

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(2**16):
                writer.write(type(self).change(data))
                await writer.drain()
                self._counts.relayed_bytes += len(data)


def tap(monkeypatch: pytest.MonkeyPatch, change: Callable[[bytes], bytes]) -> None:
    monkeypatch.setattr(relay, "Circuit", type("Tapped", (TappedCircuit,), {"change": staticmethod(change)}))


# --- what goes through ------------------------------------------------------------------------------------------------


def test_node_behind_nat_is_reached_from_the_start_and_announces_only_relayed_addresses(tmp_path: Path) -> None:
    async def case(trio: Trio) -> None:
        (seed,) = await trio.relay.addrs()
        assert await trio.hidden.addrs() == (f"{seed}/p2p-circuit/p2p/{trio.hidden.peer_id}",)
        assert await trio.echoes()
        assert trio.callers == [trio.caller.peer_id]
        assert trio.relay.relay_counts.circuits == 1
        await trio.relay.close()

        async def tells_no_address() -> bool:
            return await trio.hidden.addrs() == ()

        await eventually(tells_no_address)

    run(tmp_path, case)


def test_relay_carries_the_largest_message_and_cannot_read_it(
    shared_trio: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_leaks = 0

    def look(data: bytes) -> bytes:
        nonlocal num_leaks
        num_leaks += SECRET in data
        return data

    async def case(trio: Trio) -> None:
        assert await trio.echoes(SECRET * (64 * MIB // len(SECRET)))
        assert trio.relay.relay_counts.relayed_bytes > 2 * 64 * MIB
        assert num_leaks == 0

    tap(monkeypatch, look)
    shared_trio(case)


def test_lost_reservation_at_a_relay_is_renewed(shared_trio: Shared) -> None:
    async def case(trio: Trio) -> None:
        lost = trio.relay._relay._reserved[trio.hidden.peer_id]
        lost.transport.abort()

        async def has_a_new_place() -> bool:
            return trio.relay._relay._reserved.get(trio.hidden.peer_id, lost) is not lost

        await eventually(has_a_new_place)
        assert await trio.echoes()
        assert trio.relay.relay_counts.reservations == 1

    shared_trio(case)


def test_node_whose_only_relay_dies_is_reached_through_another_and_its_streams_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (reservations, address_survey, own_records):
        monkeypatch.setattr(module, "LOOK_S", 0.1)
    # on this machine nobody has a public address
    monkeypatch.setattr(reservations, "is_public", lambda addr: "p2p-circuit" not in addr)

    async def repeat(_peer_id: str, stream: Stream) -> None:
        while True:
            await stream.send(await stream.receive())

    async def case(trio: Trio) -> None:
        await trio.hidden.serve_stream("repeat", repeat)
        async with (
            trio.caller.stream(trio.hidden.peer_id, "repeat", timeout_s=20) as stream,
            await libp2p_node(tmp_path / "member", peers=await trio.relay.addrs(), relay="serve") as member,
        ):
            await stream.send(b"before")
            assert await stream.receive() == b"before"

            async def is_told() -> bool:
                found = (node._dht.known_addrs(trio.hidden.peer_id) for node in (trio.caller, member))
                return all(any(member.peer_id in addr for addr in addrs) for addrs in found)

            await eventually(is_told)
            os.kill(trio.relay.daemon_pid, signal.SIGKILL)
            await stream.send(b"after")
            assert await stream.receive() == b"after"
            async with await libp2p_node(tmp_path / "late", peers=await member.addrs(), listen=()) as late:
                assert await late.call(trio.hidden.peer_id, "echo", b"hello", timeout_s=20) == b"hello"

    run(tmp_path, case)


@pytest.mark.parametrize("opener", ["a", "b"])
def test_stream_outlives_a_relay_that_closes_the_path_to_one_end(tmp_path: Path, opener: str) -> None:
    async def repeat(_peer_id: str, stream: Stream) -> None:
        while True:
            await stream.send(await stream.receive())

    async def case(world: RelayedWorld) -> None:
        caller, server = (world.a, world.b) if opener == "a" else (world.b, world.a)
        await server.serve_stream("repeat", repeat)
        async with caller.stream(server.peer_id, "repeat", timeout_s=20) as stream:
            await stream.send(b"before")
            assert await stream.receive() == b"before"
            reserved = world.relay._relay._reserved
            lost = reserved[server.peer_id]
            # as when the acceptor's address has changed: it is back soon, and until then the relay has no reservation
            await world.relay._host.control.disconnect(server.peer_id)
            await stream.send(b"after")
            assert await stream.receive() == b"after"
            assert reserved.get(server.peer_id) is not lost

    world = RelayedWorld(tmp_path)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(world.open())
        runner.run(case(world))
        runner.run(world.close())


# --- relays that fail or lie ------------------------------------------------------------------------------------------


def test_relay_that_dies_breaks_a_stream_at_once_for_its_opener_and_later_for_its_handler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_resume, "HOLD_S", 1.0)

    async def case(trio: Trio) -> None:
        async with trio.caller.stream(trio.hidden.peer_id, "hang", timeout_s=20) as stream:
            await trio.running.wait()
            os.kill(trio.relay._host.daemon.pid, signal.SIGKILL)
            async with asyncio.timeout(60):
                with pytest.raises(PeerUnreachable):
                    await stream.receive()
                await trio.cancelled.wait()

    run(tmp_path, case)


def test_connection_only_breaks_when_a_relay_changes_a_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_changed = 0
    may_change = False

    def change(data: bytes) -> bytes:
        nonlocal num_changed
        if not may_change:
            return data
        num_changed += 1
        return data[:-1] + bytes([data[-1] ^ 1])

    async def case(trio: Trio) -> None:
        nonlocal may_change
        assert await trio.echoes()
        may_change = True
        with pytest.raises(PeerUnreachable):
            await trio.echoes()
        assert num_changed
        assert len(trio.callers) == 1  # the second request never reached its handler

    tap(monkeypatch, change)
    run(tmp_path, case)


def test_relay_that_connects_to_another_peer_is_detected(
    shared_trio: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(trio: Trio) -> None:
        peers = await trio.relay.addrs()
        honest, num_swapped = Relay._open, 0
        async with await libp2p_node(tmp_path / "impostor", peers=peers, listen=(), relay="use") as impostor:

            async def swap(self: Relay, source: str, _target: str) -> RawStream:
                nonlocal num_swapped
                num_swapped += 1
                return await honest(self, source, impostor.peer_id)

            monkeypatch.setattr(Relay, "_open", swap)
            async with await libp2p_node(tmp_path / "victim", peers=peers, listen=()) as victim:
                with pytest.raises(PeerUnreachable):
                    await victim.call(trio.hidden.peer_id, "echo", b"", timeout_s=30)
        assert num_swapped
        assert trio.callers == []

    shared_trio(case)


def test_relay_that_names_another_caller_is_not_believed(
    shared_trio: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(trio: Trio) -> None:
        honest, num_lies = relay.stop_request, 0

        def lie(_source: bytes) -> bytes:
            nonlocal num_lies
            num_lies += 1
            return honest(peer_id_bytes(trio.relay.peer_id))

        monkeypatch.setattr(relay, "stop_request", lie)
        async with await libp2p_node(tmp_path / "victim", peers=await trio.relay.addrs(), listen=()) as victim:
            with contextlib.suppress(PeerUnreachable):
                await victim.call(trio.hidden.peer_id, "echo", b"", timeout_s=30)
            assert num_lies
            assert set(trio.callers) <= {victim.peer_id}

    shared_trio(case)


# --- what a relay gives -----------------------------------------------------------------------------------------------


def test_relay_refuses_circuits_beyond_its_bound_and_keeps_the_others(
    shared_trio: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(trio: Trio) -> None:
        monkeypatch.setattr(trio.relay._relay, "_limits", RelayLimits(circuits_per_peer=1))
        num_refused = trio.relay.relay_counts.refusals["refused"]
        assert await trio.echoes()
        late = await libp2p_node(tmp_path / "late", peers=await trio.relay.addrs(), listen=())
        async with late:
            # the refusal may have been sent when `late` joined, and libp2p does not ask again so soon
            with pytest.raises(PeerUnreachable, match=r"relay is full|a dial failed a moment ago"):
                await late.call(trio.hidden.peer_id, "echo", b"", timeout_s=30)
        assert trio.relay.relay_counts.refusals["refused"] > num_refused
        assert await trio.echoes()

    shared_trio(case)


@contextlib.asynccontextmanager
async def bare_host(relay: Libp2pNetwork, network_id: str = "", *, listen: tuple[str, ...] = ()) -> AsyncIterator[Host]:
    """A host that is connected to the relay, and claims to be of `network_id`, or claims nothing."""
    host = await Host.start(DaemonOptions(listen=listen))
    running = asyncio.create_task(host.unary.run())
    try:
        if network_id:
            await host.serve(HELLO, hello_answer(network_id))
        (addr,) = await relay.addrs()
        await host.control.connect(relay.peer_id, [addr.partition("/p2p/")[0]])
        yield host
    finally:
        await host.stop()
        await running


async def ask(host: Host, relay: Libp2pNetwork, request: bytes) -> tuple[CircuitStatus, asyncio.StreamWriter]:
    """Return the relay's answer to a request of `host`."""
    reader, writer = await host.open_stream(relay.peer_id, HOP)
    writer.write(request)
    answer = await read_delimited(reader, MAX_MESSAGE_BYTES)
    return next(each for each in CircuitStatus if answer in hop_status(each)), writer


def connect_request(peer_id: str) -> bytes:
    target = peer_id_bytes(peer_id)
    body = b"\x08\x01\x12" + bytes([len(target) + 2]) + b"\x0a" + bytes([len(target)]) + target
    return bytes([len(body)]) + body


def test_member_with_all_circuits_that_it_may_have_keeps_nobody_out(
    shared_trio: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(trio: Trio) -> None:
        monkeypatch.setattr(trio.relay._relay, "_limits", RelayLimits(circuits_per_peer=4, circuits_per_pair=1))
        async with bare_host(trio.relay, "test") as greedy:
            answers = [await ask(greedy, trio.relay, connect_request(trio.hidden.peer_id)) for _ in range(3)]
            statuses = [status for status, _ in answers]
            assert statuses.count(CircuitStatus.RESOURCE_LIMIT_EXCEEDED) >= 2
            assert await trio.echoes()
            for _, writer in answers:
                writer.transport.abort()

    shared_trio(case)


def test_requests_that_one_peer_leaves_open_keep_no_other_from_a_relay(
    shared_trio: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(trio: Trio) -> None:
        requests = PeerSlots[str](per_peer=lambda: 65, in_all=8)
        monkeypatch.setattr(trio.relay._relay, "_requests", requests)
        request = connect_request(trio.hidden.peer_id)
        async with bare_host(trio.relay, "test") as greedy, bare_host(trio.relay, "test") as honest:
            num_refused = trio.relay.relay_counts.refusals["refused"]
            writers = [(await greedy.open_stream(trio.relay.peer_id, HOP))[1] for _ in range(9)]
            for writer in writers:
                writer.write(request[:1])

            async def are_open() -> bool:
                is_one_refused = trio.relay.relay_counts.refusals["refused"] == num_refused + 1
                return is_one_refused and requests.held_by(greedy.peer_id) == 8

            await eventually(are_open)
            status, writer = await ask(honest, trio.relay, request)
            assert status == CircuitStatus.OK
            for each in (*writers, writer):
                each.transport.abort()

    shared_trio(case)


@pytest.mark.parametrize("limits", [RelayLimits(circuits=3), RelayLimits(circuits_per_peer=3)])
def test_keys_of_one_network_keep_no_peer_of_another_network_from_a_circuit(
    shared_trio: Shared, monkeypatch: pytest.MonkeyPatch, limits: RelayLimits
) -> None:
    async def case(trio: Trio) -> None:
        monkeypatch.setattr(trio.relay._relay, "_limits", limits)
        async with contextlib.AsyncExitStack() as stack:
            greedy = [await stack.enter_async_context(bare_host(trio.relay, "test")) for _ in range(4)]
            elsewhere = ("/ip4/127.1.0.1/tcp/0",)
            honest = await stack.enter_async_context(bare_host(trio.relay, "test", listen=elsewhere))
            request = connect_request(trio.hidden.peer_id)
            answers = [await ask(each, trio.relay, request) for each in (*greedy, honest, honest)]
            assert [status for status, _ in answers] == [
                *3 * [CircuitStatus.OK],
                CircuitStatus.RESOURCE_LIMIT_EXCEEDED,
                CircuitStatus.OK,
                CircuitStatus.RESOURCE_LIMIT_EXCEEDED,  # else the two networks would take it from each other for ever
            ]
            assert {trio.hidden.peer_id, honest.peer_id} <= trio.relay._used_peers()
            openers = [source for source, _ in trio.relay._relay._circuits.values()]
            assert openers == [greedy[0].peer_id, greedy[1].peer_id, honest.peer_id]
            for _, writer in answers:
                writer.transport.abort()

    shared_trio(case)


def test_keys_of_one_network_keep_no_peer_of_another_network_from_a_reservation(
    shared_trio: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(trio: Trio) -> None:
        monkeypatch.setattr(trio.relay._relay, "_limits", RelayLimits(reservations=4))
        async with contextlib.AsyncExitStack() as stack:
            greedy = [await stack.enter_async_context(bare_host(trio.relay, "test")) for _ in range(4)]
            elsewhere = ("/ip4/127.1.0.1/tcp/0",)
            honest = await stack.enter_async_context(bare_host(trio.relay, "test", listen=elsewhere))
            reserved = trio.relay._relay.reserved
            answers = [await ask(each, trio.relay, reserve_request()) for each in (*greedy, honest)]
            assert [status for status, _ in answers] == [
                *3 * [CircuitStatus.OK],
                CircuitStatus.RESERVATION_REFUSED,
                CircuitStatus.OK,
            ]
            assert set(reserved) == {trio.hidden.peer_id, honest.peer_id, greedy[0].peer_id, greedy[1].peer_id}
            answers.append(await ask(greedy[3], trio.relay, reserve_request()))
            assert answers[-1][0] == CircuitStatus.RESERVATION_REFUSED
            for _, writer in answers:
                writer.transport.abort()

    shared_trio(case)


@pytest.mark.parametrize("network_id", ["", "another"])
def test_stranger_gets_neither_a_reservation_nor_a_circuit(shared_trio: Shared, network_id: str) -> None:
    async def case(trio: Trio) -> None:
        before = dict(trio.relay.relay_counts.refusals)
        async with bare_host(trio.relay, network_id) as stranger:
            for request in (reserve_request(), connect_request(trio.hidden.peer_id)):
                status, writer = await ask(stranger, trio.relay, request)
                assert status == CircuitStatus.PERMISSION_DENIED
                writer.transport.abort()
            assert stranger.peer_id not in {*trio.relay._relay._reserved, *chain(*trio.relay._relay._circuits.values())}
        assert trio.relay.relay_counts.refusals == {**before, "stranger": before["stranger"] + 2}
        assert await trio.echoes()

    shared_trio(case)


def test_relay_keeps_its_budget_and_counts_how_long_circuits_waited(tmp_path: Path) -> None:
    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack, asyncio.timeout(120):
            relay = await stack.enter_async_context(
                await libp2p_node(tmp_path / "relay", relay="serve", relay_bytes_per_s=MIB // 2)
            )
            options: dict[str, Any] = {"peers": await relay.addrs(), "listen": ()}
            hidden = await stack.enter_async_context(await libp2p_node(tmp_path / "hidden", relay="use", **options))
            caller = await stack.enter_async_context(await libp2p_node(tmp_path / "caller", **options))

            async def swallow(_peer_id: str, _request: bytes) -> bytes:
                return b""

            await hidden.serve("swallow", swallow)
            began_at = time.monotonic()
            await caller.call(hidden.peer_id, "swallow", bytes(MIB // 2), timeout_s=20)
            assert time.monotonic() - began_at > 0.8
            assert relay.relay_counts.throttled_s > 0.5

    asyncio.run(main())


def test_silent_circuit_is_closed_and_opened_again_when_needed(
    shared_trio: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(trio: Trio) -> None:
        monkeypatch.setattr(trio.relay._relay, "_limits", RelayLimits(idle_s=1.0))
        num_idle = trio.relay.relay_counts.refusals["idle"]
        assert await trio.echoes()

        async def is_closed() -> bool:
            counts = trio.relay.relay_counts
            return counts.refusals["idle"] > num_idle and counts.circuits == 0

        async def echoes() -> bool:
            # on a busy machine a circuit may be silent for a second in the middle of a call
            with contextlib.suppress(PeerUnreachable):
                return await trio.echoes()
            return False

        await eventually(is_closed)
        await eventually(echoes)

    shared_trio(case)


def test_node_that_does_not_serve_as_a_relay_relays_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with await libp2p_node(tmp_path / "seed") as seed:
            (addr,) = await seed.addrs()
            async with await libp2p_node(tmp_path / "hidden", peers=(addr,), listen=(), relay="use") as hidden:
                assert await hidden.addrs() == ()
                assert seed.relay_counts.refusals["refused"] > 0
                assert seed.relay_counts.reservations == 0

    asyncio.run(main())


FAR = "/ip4/192.0.2.7/tcp/4001"


def test_node_relays_once_it_is_public_and_is_relayed_while_it_is_not(tmp_path: Path) -> None:
    async def main() -> None:
        async with await libp2p_node(tmp_path / "seed", relay="auto") as seed:
            (addr,) = await seed.addrs()
            async with await libp2p_node(tmp_path / "hidden", peers=(addr,), listen=(), relay="auto") as hidden:
                assert seed.relay_counts.refusals["refused"] == 0
                assert hidden.relays == frozenset()
                seed._paths.own.confirmed = seed._paths.own.daemons  # as if peers had dialled it back
                seed._paths.update()
                far = (f"{FAR}/p2p/{seed.peer_id}",)  # as if the network were not all on this machine
                hidden._paths._options = replace(hidden._paths._options, relays=far)
                hidden._paths.update()

                async def is_held() -> bool:
                    return seed.peer_id in hidden.relays

                async def is_lost() -> bool:
                    return not hidden.relays

                await eventually(is_held)
                assert await hidden.addrs() == (f"{addr}/p2p-circuit/p2p/{hidden.peer_id}",)
                seed.allow_relaying(False)  # its owner's hours are over
                await eventually(is_lost)
                seed.allow_relaying(True)
                await eventually(is_held)
                seed._paths.own.confirmed = ()
                seed._paths.update()
                await eventually(is_lost)

    asyncio.run(main())


def test_malformed_requests_are_refused_and_do_no_harm(shared_trio: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "OPENING_TIMEOUT_S", 2)

    async def refused(stranger: Host, relay: str, request: bytes) -> None:
        reader, writer = await stranger.open_stream(relay, HOP)
        writer.write(request)
        with contextlib.suppress(ConnectionError):
            assert len(await reader.read()) <= 16  # at most a status, and then the end
        writer.transport.abort()

    async def case(trio: Trio) -> None:
        counts = trio.relay.relay_counts
        num_refused = counts.refusals["refused"]
        async with bare_host(trio.relay) as stranger:
            senseless = (b"\x00", b"\x02\x08\x07", b"\x02\x12\x7f", b"\xff\xff\x7f", b"\x02\x08", b"")
            await asyncio.gather(*(refused(stranger, trio.relay.peer_id, request) for request in senseless))
            assert (counts.reservations, counts.circuits, counts.refusals["refused"]) == (1, 0, num_refused + 3)

    shared_trio(case)
