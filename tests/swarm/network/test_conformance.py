"""Tests of what every Network implementation does.

Each test runs on the simulated internet, on real sockets, and on real sockets between two nodes that only a relay
connects.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Awaitable, Iterator
from functools import partial

import pytest
from support.network_worlds import Libp2pWorld, RelayedWorld, Run, World, eventually, libp2p_runner, run_in_memory
from swarm.network import peer_budgets
from swarm.network.interface import EndOfStream, Network, Stream
from swarm_protocol import limits
from swarm_protocol.errors import (
    ConfigError,
    IntegrityError,
    PeerError,
    PeerRefused,
    PeerTimeout,
    PeerUnreachable,
    PeerViolation,
    RoundError,
    SessionError,
    StartError,
    SwarmError,
)
from swarm_protocol.identity import Identity

MIB = 2**20


@pytest.fixture(scope="module")
def libp2p(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with libp2p_runner(Libp2pWorld(tmp_path_factory.mktemp("libp2p"))) as run:
        yield run


@pytest.fixture(scope="module")
def relayed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with libp2p_runner(RelayedWorld(tmp_path_factory.mktemp("relayed"))) as run:
        yield run


@pytest.fixture(params=["memory", "libp2p", "relayed"])
def run(request: pytest.FixtureRequest) -> Run:
    return run_in_memory if request.param == "memory" else request.getfixturevalue(request.param)


async def echo(_peer_id: str, request: bytes) -> bytes:
    return request


async def echo_stream(_peer_id: str, stream: Stream) -> None:
    while True:
        try:
            await stream.send(await stream.receive())
        except EndOfStream:
            return


class Hanging:
    """A handler that never returns, and records when it runs and when it was cancelled."""

    def __init__(self) -> None:
        self.running = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def _hang(self) -> None:
        self.running.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def unary(self, _peer_id: str, _request: bytes) -> bytes:
        await self._hang()
        return b""

    async def stream(self, _peer_id: str, _stream: Stream) -> None:
        await self._hang()


async def soon(event: asyncio.Event) -> None:
    async with asyncio.timeout(30):
        await event.wait()


async def received_late(stream: Stream) -> bytes:
    """The next message, which a busy machine may bring after the stream's own short time."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(PeerTimeout):
                return await stream.receive()


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [0, 1, 4 * MIB - 1, 4 * MIB, 5 * MIB, 32 * MIB])
def test_call_of_any_size_returns_the_same_bytes(run: Run, num_bytes: int) -> None:
    async def case(world: World) -> None:
        method = world.name()
        await world.a.serve(method, echo)
        request = bytes(range(256)) * (num_bytes // 256) + bytes(num_bytes % 256)
        assert await world.b.call(world.a.peer_id, method, request, timeout_s=30) == request

    run(case)


@pytest.mark.parametrize(("num_request_bytes", "num_response_bytes"), [(3, 5 * MIB), (5 * MIB, 3)])
def test_call_with_sides_of_different_size_runs_its_handler_once(
    run: Run, num_request_bytes: int, num_response_bytes: int
) -> None:
    async def case(world: World) -> None:
        requests = []

        async def handler(_peer_id: str, request: bytes) -> bytes:
            requests.append(len(request))
            return bytes(num_response_bytes)

        method = world.name()
        await world.a.serve(method, handler)
        response = await world.b.call(world.a.peer_id, method, bytes(num_request_bytes), timeout_s=30)
        assert response == bytes(num_response_bytes)
        assert requests == [num_request_bytes]

    run(case)


def test_call_over_the_limit_raises_value_error(run: Run) -> None:
    async def case(world: World) -> None:
        method = world.name()
        await world.a.serve(method, echo)
        with pytest.raises(ValueError, match="more than"):
            await world.b.call(world.a.peer_id, method, bytes(limits.MAX_MESSAGE_BYTES + 1), timeout_s=30)

    run(case)


@pytest.mark.parametrize(
    ("num_request_bytes", "num_bytes"), [(3, 100), (3, 2 * MIB), (3, 16 * MIB), (5 * MIB, 100), (5 * MIB, 2 * MIB)]
)
def test_answer_longer_than_its_caller_accepts_is_a_violation(run: Run, num_request_bytes: int, num_bytes: int) -> None:
    async def case(world: World) -> None:
        async def handler(_peer_id: str, _request: bytes) -> bytes:
            return bytes(num_bytes)

        method, request = world.name(), bytes(num_request_bytes)
        await world.a.serve(method, handler)
        ask = partial(world.b.call, world.a.peer_id, method, request, timeout_s=30)
        assert await ask(max_bytes=num_bytes) == bytes(num_bytes)
        for max_bytes in (num_bytes - 1, 0):
            with pytest.raises(PeerViolation, match=f"more than {max_bytes} bytes") as caught:
                await ask(max_bytes=max_bytes)
            assert caught.value.peer_id == world.a.peer_id
        assert await ask() == bytes(num_bytes)

    run(case)


def test_simultaneous_calls_run_in_parallel_and_get_their_own_answers(run: Run) -> None:
    async def case(world: World) -> None:
        num_calls = 40
        all_here = asyncio.Barrier(num_calls)

        async def handler(_peer_id: str, request: bytes) -> bytes:
            await all_here.wait()
            return request * 2

        method = world.name()
        await world.a.serve(method, handler)
        requests = [str(index).encode() for index in range(num_calls)]
        responses = await asyncio.gather(
            *(world.b.call(world.a.peer_id, method, request, timeout_s=30) for request in requests)
        )
        assert responses == [request * 2 for request in requests]

    run(case)


@pytest.mark.parametrize("ending", ["answered", "cancelled"])
def test_calls_of_one_peer_beyond_the_bound_are_refused_until_others_end(
    run: Run, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_CALLS_PER_PEER", 4)

    async def case(world: World) -> None:
        all_here, may_end, slow_method, method = asyncio.Barrier(5), asyncio.Event(), world.name(), world.name()

        async def slow(_peer_id: str, request: bytes) -> bytes:
            await all_here.wait()
            await may_end.wait()
            return request

        await world.a.serve(slow_method, slow)
        await world.a.serve(method, echo)
        await world.b.serve(method, echo)
        slow_calls = [
            asyncio.create_task(world.b.call(world.a.peer_id, slow_method, b"slow", timeout_s=30)) for _ in range(4)
        ]
        async with asyncio.timeout(30):
            await all_here.wait()
        with pytest.raises(PeerRefused) as caught:
            await world.b.call(world.a.peer_id, method, b"", timeout_s=30)
        assert caught.value.retry_after_s > 0
        assert caught.value.remedy
        assert caught.value.peer_id == world.a.peer_id
        assert await world.a.call(world.b.peer_id, method, b"other way", timeout_s=30) == b"other way"

        async def has_room() -> bool:
            try:
                return await world.b.call(world.a.peer_id, method, b"again", timeout_s=30) == b"again"
            except PeerRefused:
                return False

        if ending == "cancelled":
            slow_calls.pop().cancel()
            await eventually(has_room)
        may_end.set()
        assert await asyncio.gather(*slow_calls) == [b"slow"] * len(slow_calls)
        await eventually(has_room)

    run(case)


def test_calls_beyond_the_bound_of_all_are_refused_and_others_get_a_few(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_CALLS_PER_PEER", 12)
    monkeypatch.setattr(peer_budgets, "MAX_CALLS", 8)

    async def case(world: World) -> None:
        server, hold, method = await world.spawn(), world.name(), world.name()
        all_here, may_end = asyncio.Barrier(9), asyncio.Event()

        async def wait(_peer_id: str, request: bytes) -> bytes:
            await all_here.wait()
            await may_end.wait()
            return request

        await server.serve(hold, wait)
        await server.serve(method, echo)
        calls = [asyncio.create_task(world.b.call(server.peer_id, hold, b"held", timeout_s=60)) for _ in range(8)]
        async with asyncio.timeout(30):
            await all_here.wait()
        with pytest.raises(PeerRefused, match="works on as many calls as it takes"):
            await world.b.call(server.peer_id, method, b"", timeout_s=30)
        assert await world.a.call(server.peer_id, method, b"x", timeout_s=30) == b"x"
        may_end.set()
        assert await asyncio.gather(*calls) == [b"held"] * 8
        await server.close()

    run(case)


def test_handler_gets_the_caller_s_peer_id(run: Run) -> None:
    async def case(world: World) -> None:
        async def who(peer_id: str, _request: bytes) -> bytes:
            return peer_id.encode()

        async def who_streams(peer_id: str, stream: Stream) -> None:
            await stream.send(peer_id.encode())

        method = world.name()
        await world.a.serve(method, who)
        await world.a.serve_stream(method, who_streams)
        assert await world.b.call(world.a.peer_id, method, b"", timeout_s=30) == world.b.peer_id.encode()
        async with world.b.stream(world.a.peer_id, method, timeout_s=30) as stream:
            assert await stream.receive() == world.b.peer_id.encode()

    run(case)


@pytest.mark.parametrize("num_bytes", [0, 5 * MIB])
def test_call_past_its_deadline_raises_timeout_and_cancels_the_handler(run: Run, num_bytes: int) -> None:
    async def case(world: World) -> None:
        hanging, method = Hanging(), world.name()
        await world.a.serve(method, hanging.unary)
        with pytest.raises(PeerTimeout) as caught:
            await world.b.call(world.a.peer_id, method, bytes(num_bytes), timeout_s=2)
        assert caught.value.peer_id == world.a.peer_id
        await soon(hanging.cancelled)

    run(case)


@pytest.mark.parametrize("num_bytes", [0, 5 * MIB])
def test_call_cancelled_by_its_caller_cancels_the_handler(run: Run, num_bytes: int) -> None:
    async def case(world: World) -> None:
        hanging, method = Hanging(), world.name()
        await world.a.serve(method, hanging.unary)
        call = asyncio.create_task(world.b.call(world.a.peer_id, method, bytes(num_bytes), timeout_s=30))
        await soon(hanging.running)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await soon(hanging.cancelled)

    run(case)


ERRORS = [
    SwarmError("m", remedy="r"),
    ConfigError("m", remedy="r"),
    StartError("m", remedy="r"),
    PeerError("m", remedy="r"),
    PeerUnreachable("m", remedy="r"),
    PeerTimeout("m", remedy="r"),
    PeerRefused("m", remedy="r", retry_after_s=2.5),
    PeerViolation("m", remedy="r"),
    RoundError("m", remedy="r", missing=(Identity(bytes(32)).peer_id,)),
    SessionError("m", remedy="r", session_id="s1"),
    IntegrityError("m", remedy="r"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.code)
def test_error_of_a_handler_is_raised_again_in_its_caller(run: Run, error: SwarmError) -> None:
    async def case(world: World) -> None:
        async def unary(_peer_id: str, _request: bytes) -> bytes:
            raise error

        async def streaming(_peer_id: str, _stream: Stream) -> None:
            raise error

        method = world.name()
        await world.a.serve(method, unary)
        await world.a.serve_stream(method, streaming)
        with pytest.raises(SwarmError) as by_call:
            await world.b.call(world.a.peer_id, method, b"", timeout_s=30)
        with pytest.raises(SwarmError) as by_stream:
            async with world.b.stream(world.a.peer_id, method, timeout_s=30) as stream:
                await stream.receive()
        for caught in (by_call.value, by_stream.value):
            assert type(caught) is type(error)
            expected = {**error.__dict__, "peer_id": world.a.peer_id}
            assert caught.__dict__.items() >= expected.items()

    run(case)


def test_bug_in_a_handler_is_a_peer_error_without_details(run: Run) -> None:
    async def case(world: World) -> None:
        async def unary(_peer_id: str, _request: bytes) -> bytes:
            raise KeyError("password")

        method = world.name()
        await world.a.serve(method, unary)
        with pytest.raises(PeerError) as caught:
            await world.b.call(world.a.peer_id, method, b"", timeout_s=30)
        assert "password" not in str(caught.value)

    run(case)


def test_method_that_nobody_serves_is_refused_by_name(run: Run) -> None:
    async def case(world: World) -> None:
        with pytest.raises(PeerRefused, match="nonesuch"):
            await world.b.call(world.a.peer_id, "nonesuch", b"", timeout_s=30)
        with pytest.raises(PeerRefused, match="nonesuch"):
            async with world.b.stream(world.a.peer_id, "nonesuch", timeout_s=30) as stream:
                await stream.receive()

    run(case)


def test_unknown_peer_is_unreachable(run: Run) -> None:
    async def case(world: World) -> None:
        stranger = Identity.generate().peer_id
        with pytest.raises(PeerUnreachable) as caught:
            await world.b.call(stranger, "m", b"", timeout_s=30)
        assert caught.value.peer_id == stranger
        with pytest.raises(PeerUnreachable):
            async with world.b.stream(stranger, "m", timeout_s=30):
                pass

    run(case)


def test_serve_twice_raises_value_error(run: Run) -> None:
    async def case(world: World) -> None:
        method = world.name()
        await world.a.serve(method, echo)
        await world.a.serve_stream(method, echo_stream)  # the same name as a stream is another method
        with pytest.raises(ValueError, match=method):
            await world.a.serve(method, echo)
        with pytest.raises(ValueError, match=method):
            await world.a.serve_stream(method, echo_stream)

    run(case)


# --- streams ----------------------------------------------------------------------------------------------------------


def test_stream_carries_messages_of_any_size_in_order_both_ways(run: Run) -> None:
    async def case(world: World) -> None:
        method = world.name()
        await world.a.serve_stream(method, echo_stream)
        messages = [bytes([index]) * size for index, size in enumerate([0, 1, MIB, 4 * MIB, 5 * MIB + 1, 32 * MIB, 0])]
        async with world.b.stream(world.a.peer_id, method, timeout_s=30) as stream:
            for message in messages:
                async with asyncio.TaskGroup() as both:
                    both.create_task(stream.send(message))
                    echoed = both.create_task(stream.receive())
                assert echoed.result() == message

    run(case)


def test_stream_half_closed_still_receives(run: Run) -> None:
    async def case(world: World) -> None:
        async def answer_at_the_end(_peer_id: str, stream: Stream) -> None:
            received = []
            with contextlib.suppress(EndOfStream):
                while True:
                    received.append(await stream.receive())
            for message in received:
                await stream.send(message)

        method = world.name()
        await world.a.serve_stream(method, answer_at_the_end)
        async with world.b.stream(world.a.peer_id, method, timeout_s=30) as stream:
            await stream.send(b"1")
            await stream.send(b"2")
            await stream.finish()
            with pytest.raises(ValueError, match="finish"):
                await stream.send(b"3")
            assert [await stream.receive(), await stream.receive()] == [b"1", b"2"]
            for _ in range(2):
                with pytest.raises(EndOfStream):
                    await stream.receive()

    run(case)


def test_stream_whose_handler_returned_has_ended_both_ways(run: Run) -> None:
    async def case(world: World) -> None:
        async def hello(_peer_id: str, stream: Stream) -> None:
            await stream.send(b"hello")

        method = world.name()
        await world.a.serve_stream(method, hello)
        async with world.b.stream(world.a.peer_id, method, timeout_s=30) as stream:
            assert await stream.receive() == b"hello"
            with pytest.raises(EndOfStream):
                await stream.receive()
            with pytest.raises(PeerUnreachable):
                await stream.send(b"anyone?")

    run(case)


def test_messages_before_a_failure_arrive_before_it(run: Run) -> None:
    async def case(world: World) -> None:
        async def fail_late(_peer_id: str, stream: Stream) -> None:
            await stream.send(bytes(2 * MIB))
            raise SessionError("no more", session_id="s")

        method = world.name()
        await world.a.serve_stream(method, fail_late)
        async with world.b.stream(world.a.peer_id, method, timeout_s=30) as stream:
            assert await stream.receive() == bytes(2 * MIB)
            with pytest.raises(SessionError, match="no more"):
                await stream.receive()
            with pytest.raises(SessionError, match="no more"):
                await stream.send(b"x")

    run(case)


def test_stream_that_ends_before_its_handler_is_done_is_a_violation_by_its_opener(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def case(world: World) -> None:
        async def take_two(_peer_id: str, stream: Stream) -> None:
            await stream.receive()
            await stream.receive()

        method = world.name()
        await world.a.serve_stream(method, take_two)
        for num_messages in range(2):
            async with world.b.stream(world.a.peer_id, method, timeout_s=30) as stream:
                for _ in range(num_messages):
                    await stream.send(b"one")
                await stream.finish()
                with pytest.raises(PeerViolation, match="before the handler had all") as caught:
                    await stream.receive()
            assert caught.value.peer_id == world.b.peer_id

    run(case)
    assert [record for record in caplog.records if record.exc_info] == []


def test_simultaneous_streams_each_get_the_reason_of_their_refusal(run: Run) -> None:
    async def case(world: World) -> None:
        async def refuse(_peer_id: str, _stream: Stream) -> None:
            raise PeerRefused("no room", retry_after_s=2.5)

        method = world.name()
        await world.a.serve_stream(method, refuse)

        async def ask() -> None:
            async with world.b.stream(world.a.peer_id, method, timeout_s=30) as stream:
                await stream.send(b"a request")
                await stream.receive()

        for _ in range(2):
            errors = await asyncio.gather(*(ask() for _ in range(200)), return_exceptions=True)
            assert {(type(error), getattr(error, "retry_after_s", 0.0)) for error in errors} == {(PeerRefused, 2.5)}

    run(case)


def test_leaving_a_stream_cancels_its_handler(run: Run) -> None:
    async def case(world: World) -> None:
        hanging, method = Hanging(), world.name()
        await world.a.serve_stream(method, hanging.stream)
        async with world.b.stream(world.a.peer_id, method, timeout_s=30):
            await soon(hanging.running)
        await soon(hanging.cancelled)

    run(case)


def test_leaving_a_stream_full_of_unread_messages_cancels_its_handler(run: Run) -> None:
    async def case(world: World) -> None:
        hanging, method = Hanging(), world.name()
        await world.a.serve_stream(method, hanging.stream)

        async def fill() -> None:
            async with world.b.stream(world.a.peer_id, method, timeout_s=1.5) as stream:
                while True:
                    await stream.send(bytes(MIB))

        with pytest.raises(PeerTimeout):
            await fill()
        await soon(hanging.cancelled)

    run(case)


@pytest.mark.parametrize("turns", [None, 1, 2, 3])
def test_cancelled_task_leaves_its_stream(run: Run, turns: int | None) -> None:
    """This holds also for a task that is cancelled again while it leaves, some turns of the loop later."""

    async def case(world: World) -> None:
        hanging, method = Hanging(), world.name()
        await world.a.serve_stream(method, hanging.stream)

        async def use() -> None:
            async with world.b.stream(world.a.peer_id, method, timeout_s=30) as stream:
                await stream.receive()

        using = asyncio.create_task(use())
        await soon(hanging.running)
        using.cancel()
        if turns is not None:
            for _ in range(turns):
                await asyncio.sleep(0)
            using.cancel()
        with pytest.raises(asyncio.CancelledError):
            await using
        await soon(hanging.cancelled)

    run(case)


def test_receive_without_a_message_raises_timeout_and_the_stream_stays_usable(run: Run) -> None:
    async def case(world: World) -> None:
        method = world.name()
        await world.a.serve_stream(method, echo_stream)
        async with world.b.stream(world.a.peer_id, method, timeout_s=1.5) as stream:
            with pytest.raises(PeerTimeout):
                await stream.receive()
            await stream.send(b"still here")
            assert await received_late(stream) == b"still here"

    run(case)


def test_handler_waits_for_as_long_as_its_caller_stays(run: Run) -> None:
    async def case(world: World) -> None:
        method = world.name()
        await world.a.serve_stream(method, echo_stream)
        async with world.b.stream(world.a.peer_id, method, timeout_s=1) as stream:
            await asyncio.sleep(1.2)  # the caller's deadline does not count for the handler
            await stream.send(b"late")
            assert await received_late(stream) == b"late"

    run(case)


def test_slow_reader_bounds_what_the_sender_has_in_flight(run: Run) -> None:
    async def case(world: World) -> None:
        may_read, method = asyncio.Event(), world.name()

        async def read_late(_peer_id: str, stream: Stream) -> None:
            await may_read.wait()
            await echo_stream(_peer_id, stream)

        await world.a.serve_stream(method, read_late)
        num_sent = 0

        async def send_all(stream: Stream) -> None:
            nonlocal num_sent
            for _ in range(24):
                await stream.send(bytes(MIB))
                num_sent += 1
            await stream.finish()

        async with world.b.stream(world.a.peer_id, method, timeout_s=30) as stream:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(send_all(stream))
                seen = 0  # as much as it can send to a handler that does not read
                while not num_sent or num_sent != seen:
                    seen = num_sent
                    await asyncio.sleep(0.5)
                assert num_sent <= 8
                may_read.set()
                for _ in range(24):
                    assert len(await stream.receive()) == MIB
            with pytest.raises(EndOfStream):
                await stream.receive()

    run(case)


def test_streams_beyond_the_bound_of_a_peer_or_of_all_are_refused_until_others_end(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_budgets, "MAX_STREAMS_PER_PEER", 8)
    monkeypatch.setattr(peer_budgets, "MAX_STREAMS", 8)

    async def case(world: World) -> None:
        server, method = await world.spawn(), world.name()

        async def hold(_peer_id: str, stream: Stream) -> None:
            await stream.send(b"here")
            await stream.receive()

        async def open_one(opener: Network) -> bytes:
            stream = await held.enter_async_context(opener.stream(server.peer_id, method, timeout_s=30))
            return await stream.receive()

        async def has_room() -> bool:
            try:
                return await open_one(world.b) == b"here"
            except PeerRefused:
                return False

        await server.serve_stream(method, hold)
        async with contextlib.AsyncExitStack() as held:
            for opener, num_streams in ((world.b, 8), (world.a, peer_budgets.NUM_GUARANTEED)):
                for _ in range(num_streams):
                    assert await open_one(opener) == b"here"
                with pytest.raises(PeerRefused, match="too many streams") as caught:
                    await open_one(opener)
                assert caught.value.retry_after_s > 0
                assert caught.value.peer_id == server.peer_id
        async with contextlib.AsyncExitStack() as held:
            await eventually(has_room)
        await server.close()

    run(case)


GAVE_WAY = "gave way"


async def outcome(act: Awaitable[bytes | None]) -> bytes | str | None:
    """Return the result of an act on a stream, or GAVE_WAY."""
    try:
        return await act
    except PeerRefused as refusal:
        unread = refusal.retry_after_s > 0 and "bytes from one peer wait to be read" in refusal.message
        return GAVE_WAY if unread else refusal.message


def test_stream_of_a_peer_that_leaves_too_much_unread_gives_way_and_its_others_go_on(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is within its own window, but together 256 of them would take 1 GiB of a node."""

    async def case(world: World) -> None:
        budget, method, may_read = world.unread(world.a), world.name(), asyncio.Event()
        monkeypatch.setattr(budget, "_max_peer_bytes", 7 * MIB // 2)
        outcomes = []

        async def read_late(_peer_id: str, stream: Stream) -> None:
            await may_read.wait()
            outcomes.append((await outcome(stream.receive()), await outcome(stream.send(b"taken"))))

        async def holds(num_bytes: int) -> bool:
            return num_bytes <= budget.num_bytes < num_bytes + MIB // 2

        await world.a.serve_stream(method, read_late)
        async with contextlib.AsyncExitStack() as held:
            for number in (1, 2, 3, 3):
                stream = await held.enter_async_context(world.b.stream(world.a.peer_id, method, timeout_s=30))
                await stream.send(bytes(MIB))
                await eventually(partial(holds, number * MIB))
            assert await outcome(stream.receive()) == GAVE_WAY
            assert await outcome(stream.send(b"more")) == GAVE_WAY
            assert await holds(3 * MIB)
            may_read.set()
            await eventually(partial(holds, 0))
        assert sorted(outcomes, key=str) == [(GAVE_WAY, GAVE_WAY), *[(bytes(MIB), None)] * 3]

    run(case)


def test_stream_that_this_node_opened_gives_way_when_it_leaves_too_much_of_one_peer_unread(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(world: World) -> None:
        budget, method = world.unread(world.a), world.name()
        monkeypatch.setattr(budget, "_max_peer_bytes", 7 * MIB // 2)

        async def send(_peer_id: str, stream: Stream) -> None:
            await stream.send(bytes(MIB))
            await stream.receive()

        async def holds(num_bytes: int) -> bool:
            return num_bytes <= budget.num_bytes < num_bytes + MIB // 2

        await world.b.serve_stream(method, send)
        async with contextlib.AsyncExitStack() as held:
            streams = []
            for number in (1, 2, 3, 3):
                streams.append(await held.enter_async_context(world.a.stream(world.b.peer_id, method, timeout_s=30)))
                await eventually(partial(holds, number * MIB))
            *others, beyond = streams
            assert await outcome(beyond.receive()) == GAVE_WAY
            assert await outcome(beyond.send(b"more")) == GAVE_WAY
            assert [await outcome(stream.receive()) for stream in others] == [bytes(MIB)] * 3
            assert await holds(0)

    run(case)


def test_deadline_of_a_handler_is_a_timeout_of_its_caller_and_no_defect(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def wait(_peer_id: str, stream: Stream) -> None:
        async with asyncio.timeout(0.01):
            await stream.receive()

    async def wait_in_call(_peer_id: str, _request: bytes) -> bytes:
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()
        return b""

    async def case(world: World) -> None:
        method = world.name()
        await world.a.serve_stream(method, wait)
        await world.a.serve(method, wait_in_call)
        async with world.b.stream(world.a.peer_id, method, timeout_s=30) as stream:
            with pytest.raises(PeerTimeout, match="before its own deadline"):
                await stream.receive()
        for num_bytes in (0, 2 * MIB):
            with pytest.raises(PeerTimeout, match="before its own deadline"):
                await world.b.call(world.a.peer_id, method, bytes(num_bytes), timeout_s=30)

    run(case)
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_message_over_the_limit_raises_value_error(run: Run) -> None:
    async def case(world: World) -> None:
        method = world.name()
        await world.a.serve_stream(method, echo_stream)
        async with world.b.stream(world.a.peer_id, method, timeout_s=30) as stream:
            with pytest.raises(ValueError, match="more than"):
                await stream.send(bytes(limits.MAX_MESSAGE_BYTES + 1))

    run(case)


def test_message_after_one_that_was_cut_off_is_not_sent_as_its_rest(run: Run) -> None:
    async def case(world: World) -> None:
        method, may_read, received = world.name(), asyncio.Event(), []

        async def read_late(_peer_id: str, stream: Stream) -> None:
            await may_read.wait()
            with contextlib.suppress(EndOfStream):
                received.append(await stream.receive())

        await world.a.serve_stream(method, read_late)
        async with world.b.stream(world.a.peer_id, method, timeout_s=30) as stream:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await stream.send(bytes(6 * MIB))
            may_read.set()
            for more in (stream.send(b"next"), stream.finish()):
                with pytest.raises(PeerUnreachable, match="cut off in the middle"):
                    await more
        assert received == []

    run(case)


@pytest.mark.parametrize("finishes", [True, False])
def test_stream_that_its_caller_leaves_has_ended_for_its_handler_only_if_it_was_finished(
    run: Run, finishes: bool
) -> None:
    async def case(world: World) -> None:
        method, seen, ended = world.name(), [], asyncio.Event()

        async def receive_all(_peer_id: str, stream: Stream) -> None:
            try:
                while True:
                    seen.append(await stream.receive())
            except BaseException as end:
                seen.append(type(end))
                ended.set()
                raise

        await world.a.serve_stream(method, receive_all)
        async with world.b.stream(world.a.peer_id, method, timeout_s=30) as stream:
            await stream.send(b"first")
            if finishes:
                await stream.finish()
                with pytest.raises(PeerViolation):
                    await stream.receive()
            else:
                await asyncio.sleep(0.3)  # the handler waits for the next message
        await soon(ended)
        first, end = seen
        assert first == b"first"
        assert end is EndOfStream if finishes else issubclass(end, PeerUnreachable | asyncio.CancelledError)

    run(case)


@pytest.mark.parametrize("num_bytes", [10, 300_000, 5 * MIB])
def test_messages_arrive_once_and_in_order_while_the_path_is_replaced_repeatedly(run: Run, num_bytes: int) -> None:
    async def case(world: World) -> None:
        method = world.name()
        await world.a.serve_stream(method, echo_stream)
        messages = [index.to_bytes(8, "big") + bytes([index]) * num_bytes for index in range(12)]

        async def send(stream: Stream) -> None:
            for index, message in enumerate(messages):
                async with asyncio.TaskGroup() as both:
                    if index % 4 == 2:
                        both.create_task(world.replace_path())
                    both.create_task(stream.send(message))
            await stream.finish()

        async with world.b.stream(world.a.peer_id, method, timeout_s=30) as stream, asyncio.TaskGroup() as tasks:
            await stream.send(b"first")  # the other side knows the stream
            assert await stream.receive() == b"first"
            tasks.create_task(send(stream))
            for message in messages:
                assert await stream.receive() == message
            with pytest.raises(EndOfStream):
                await stream.receive()

    run(case)


def test_idle_stream_stays_usable_after_its_path_was_replaced(run: Run) -> None:
    async def case(world: World) -> None:
        method = world.name()
        await world.a.serve_stream(method, echo_stream)
        async with world.b.stream(world.a.peer_id, method, timeout_s=30) as stream:
            for message in (b"before", b"after", b"and after"):
                await stream.send(message)
                assert await stream.receive() == message
                await world.replace_path()

    run(case)


def test_failure_of_a_handler_arrives_though_the_path_is_replaced(run: Run) -> None:
    async def case(world: World) -> None:
        async def fail(_peer_id: str, stream: Stream) -> None:
            await stream.send(await stream.receive())
            await stream.receive()
            await stream.send(b"last")
            raise SessionError("no more", session_id="s")

        method = world.name()
        await world.a.serve_stream(method, fail)
        async with world.b.stream(world.a.peer_id, method, timeout_s=30) as stream:
            await stream.send(b"first")
            assert await stream.receive() == b"first"
            await world.replace_path()
            await stream.send(b"go")
            assert await stream.receive() == b"last"
            with pytest.raises(SessionError, match="no more"):
                await stream.receive()

    run(case)


def test_call_in_flight_fails_when_its_path_is_replaced_and_the_next_one_succeeds(run: Run) -> None:
    async def case(world: World) -> None:
        hanging, hang, method = Hanging(), world.name(), world.name()
        await world.a.serve(hang, hanging.unary)
        await world.a.serve(method, echo)
        call = asyncio.create_task(world.b.call(world.a.peer_id, hang, b"", timeout_s=30))
        await soon(hanging.running)
        await world.replace_path()
        with pytest.raises(PeerUnreachable):
            await call
        await soon(hanging.cancelled)

        async def is_answered() -> bool:
            with contextlib.suppress(PeerUnreachable):  # the old path may be tried first
                return await world.b.call(world.a.peer_id, method, b"again", timeout_s=30) == b"again"
            return False

        await eventually(is_answered)

    run(case)


# --- records ----------------------------------------------------------------------------------------------------------


def test_published_record_is_found_by_its_owner_and_by_others(run: Run) -> None:
    async def case(world: World) -> None:
        key, other_key = world.name(), world.name()
        assert await world.a.publish(key, b"of a", lifetime_s=30)
        assert await world.b.publish(key, b"of b", lifetime_s=30)
        assert await world.b.publish(other_key, b"more of b", lifetime_s=30)
        for network in (world.a, world.b):
            found = await network.lookup([key, other_key, world.name()], timeout_s=30)
            assert {(envelope.subject, envelope.peer_id, envelope.payload) for envelope in found} == {
                (key, world.a.peer_id, b"of a"),
                (key, world.b.peer_id, b"of b"),
                (other_key, world.b.peer_id, b"more of b"),
            }
            assert {envelope.network_id for envelope in found} == {world.a.network_id}

    run(case)


def test_later_record_replaces_the_earlier_one_even_with_a_shorter_life(run: Run) -> None:
    async def case(world: World) -> None:
        key = world.name()
        await world.b.publish(key, b"old", lifetime_s=300)
        await world.b.publish(key, b"new", lifetime_s=20)
        for network in (world.a, world.b):
            assert [envelope.payload for envelope in await network.lookup([key], timeout_s=30)] == [b"new"]

    run(case)


def test_expired_record_is_not_found(run: Run) -> None:
    async def case(world: World) -> None:
        key = world.name()

        async def is_found() -> bool:  # anew, should a busy machine take as long as it lives
            await world.b.publish(key, b"brief", lifetime_s=2)
            return bool(await world.a.lookup([key], timeout_s=30))

        await eventually(is_found)

        async def gone() -> bool:
            return not await world.a.lookup([key], timeout_s=30) and not await world.b.lookup([key], timeout_s=30)

        await eventually(gone)

    run(case)


def test_own_expired_record_is_not_mistaken_for_a_copy_s(run: Run) -> None:
    async def case(world: World) -> None:
        key = world.name()
        await world.b.publish(key, b"brief", lifetime_s=0.5)
        await asyncio.sleep(0.5)
        await world.b.publish(world.name(), b"", lifetime_s=30)  # expired records are dropped with that
        assert await world.b.lookup([key], timeout_s=30) == []
        assert await world.b.publish(key, b"again", lifetime_s=30)  # it is valid

    run(case)


def test_record_over_the_limits_raises_value_error(run: Run) -> None:
    async def case(world: World) -> None:
        key = world.name()
        with pytest.raises(ValueError, match="more than"):
            await world.a.publish(key, bytes(limits.MAX_RECORD_BYTES + 1), lifetime_s=30)
        with pytest.raises(ValueError, match="lives"):
            await world.a.publish(key, b"", lifetime_s=limits.MAX_RECORD_LIFETIME_S + 1)
        assert await world.a.publish(key, bytes(limits.MAX_RECORD_BYTES), lifetime_s=limits.MAX_RECORD_LIFETIME_S)

    run(case)


def test_publish_without_any_peer_returns_false_and_keeps_the_record(run: Run) -> None:
    async def case(world: World) -> None:
        alone = await world.spawn(alone=True)
        assert not await alone.publish("k", b"mine", lifetime_s=30)
        assert [envelope.payload for envelope in await alone.lookup(["k"], timeout_s=30)] == [b"mine"]
        await alone.close()

    run(case)


# --- the end ----------------------------------------------------------------------------------------------------------


def test_close_ends_calls_and_streams_of_others_to_this_node(run: Run) -> None:
    async def case(world: World) -> None:
        hanging, streaming = Hanging(), Hanging()
        leaver = await world.spawn()
        await leaver.serve("hang", hanging.unary)
        await leaver.serve_stream("hang", streaming.stream)
        call = asyncio.create_task(world.b.call(leaver.peer_id, "hang", b"", timeout_s=30))
        async with world.b.stream(leaver.peer_id, "hang", timeout_s=30) as stream:
            await soon(hanging.running)
            await soon(streaming.running)
            await leaver.close()
            await leaver.close()
            assert hanging.cancelled.is_set()
            assert streaming.cancelled.is_set()
            with pytest.raises(PeerUnreachable):
                await stream.receive()
        with pytest.raises(PeerUnreachable):
            await call

    run(case)


def test_close_ends_this_node_s_calls_and_streams_to_others(run: Run) -> None:
    async def case(world: World) -> None:
        hanging, streaming, method = Hanging(), Hanging(), world.name()
        leaver = await world.spawn()
        await world.b.serve(method, hanging.unary)
        await world.b.serve_stream(method, streaming.stream)
        call = asyncio.create_task(leaver.call(world.b.peer_id, method, b"", timeout_s=30))
        async with leaver.stream(world.b.peer_id, method, timeout_s=30) as stream:
            await soon(hanging.running)
            await soon(streaming.running)
            await leaver.close()
            with pytest.raises(PeerUnreachable):
                await stream.receive()
        with pytest.raises(PeerUnreachable):
            await call
        await soon(hanging.cancelled)
        await soon(streaming.cancelled)
        with pytest.raises(PeerUnreachable):
            await leaver.call(world.b.peer_id, method, b"", timeout_s=30)
        with pytest.raises(PeerUnreachable):
            await leaver.lookup(["k"], timeout_s=30)
        with pytest.raises(PeerUnreachable):
            await leaver.publish("k", b"", lifetime_s=5)

    run(case)


def test_released_method_is_answered_until_another_handler_serves_it(run: Run) -> None:
    async def case(world: World) -> None:
        name = world.name()

        async def say(words: bytes) -> None:
            async def answer(_peer_id: str, _request: bytes) -> bytes:
                return words

            async def greet(_peer_id: str, stream: Stream) -> None:
                await stream.send(words)

            await world.a.serve(name, answer)
            await world.a.serve_stream(name, greet)

        async def said() -> tuple[bytes, bytes]:
            answer = await world.b.call(world.a.peer_id, name, b"", timeout_s=30)
            async with world.b.stream(world.a.peer_id, name, timeout_s=30) as stream:
                return answer, await stream.receive()

        await say(b"first")
        with pytest.raises(ValueError, match="served already"):
            await world.a.serve(name, echo)
        world.a.release(name, "nonesuch")
        assert await said() == (b"first", b"first")
        await say(b"second")
        assert await said() == (b"second", b"second")
        with pytest.raises(ValueError, match="served already"):
            await world.a.serve_stream(name, echo_stream)

    run(case)


def test_released_method_that_is_served_again_ends_no_other(run: Run) -> None:
    async def case(world: World) -> None:
        left, moving = world.name(), world.name()
        await world.a.serve(left, echo)
        world.a.release(left)
        for _ in range(3):
            await world.a.serve(moving, echo)
            world.a.release(moving)
        assert await world.b.call(world.a.peer_id, left, b"still", timeout_s=30) == b"still"

    run(case)


def test_method_released_before_two_others_is_refused_and_kept_alive_by_nothing(run: Run) -> None:
    async def case(world: World) -> None:
        async def answer(_peer_id: str, request: bytes) -> bytes:
            return request

        names, held = [world.name() for _ in range(3)], weakref.ref(answer)
        for name in names:
            await world.a.serve(name, answer)
        for name in names:
            world.a.release(name)
        with pytest.raises(PeerRefused, match="does not serve the method any more"):
            await world.b.call(world.a.peer_id, names[0], b"", timeout_s=30)
        await world.a.serve(names[0], echo)
        for name in names:
            assert await world.b.call(world.a.peer_id, name, b"again", timeout_s=30) == b"again"
        world.a.release(names[0])
        world.a.release("another")
        del answer
        gc.collect()
        assert held() is None

    run(case)
