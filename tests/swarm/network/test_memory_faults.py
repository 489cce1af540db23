"""Faults of the simulated internet: crashes, restarts, partitions, cancelled callers, and records across a
partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import wraps

import pytest
from swarm.network.interface import EndOfStream, Stream
from swarm.network.memory.memory_link import LinkModel
from swarm.network.memory.memory_network import MemoryInternet, MemoryNetwork
from swarm.network.memory.memory_routes import DETECTION_S
from swarm.testing import virtual_time
from swarm_protocol.envelope import seal_record
from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerUnreachable, PeerViolation
from swarm_protocol.identity import Identity

LATENCY_S = 0.02


def in_virtual_time(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        virtual_time.run(test())

    return run


def now_s() -> float:
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def nodes(num: int, **options: object) -> AsyncIterator[tuple[MemoryInternet, list[MemoryNetwork]]]:
    internet = MemoryInternet(default_link=LinkModel(latency_s=LATENCY_S), **options)
    yield internet, [internet.network() for _ in range(num)]
    await internet.close()


class Waiting:
    """A handler that waits until it is cancelled, and records that."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.cancelled_at_s: float | None = None

    async def unary(self, _peer_id: str, _request: bytes) -> bytes:
        self.started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled_at_s = now_s()
            raise
        raise AssertionError

    async def stream(self, peer_id: str, _stream: Stream) -> None:
        await self.unary(peer_id, b"")


@in_virtual_time
async def test_call_of_crashed_callee_breaks_after_the_detection_time() -> None:
    async with nodes(2) as (internet, [a, b]):
        waiting = Waiting()
        await b.serve("wait", waiting.unary)
        call = asyncio.create_task(a.call(b.peer_id, "wait", b"", timeout_s=60))
        await waiting.started.wait()
        crashed_s = now_s()
        internet.crash(b.peer_id)
        with pytest.raises(PeerUnreachable) as caught:
            await call
        assert caught.value.peer_id == b.peer_id
        assert now_s() - crashed_s == pytest.approx(DETECTION_S)
        assert waiting.cancelled_at_s == pytest.approx(crashed_s)


@in_virtual_time
async def test_call_of_crashed_caller_breaks_at_once_and_cancels_the_handler_after_detection() -> None:
    async with nodes(2) as (internet, [a, b]):
        waiting = Waiting()
        await b.serve("wait", waiting.unary)
        call = asyncio.create_task(a.call(b.peer_id, "wait", b"", timeout_s=60))
        await waiting.started.wait()
        crashed_s = now_s()
        internet.crash(a.peer_id)
        with pytest.raises(PeerUnreachable):
            await call
        assert now_s() == crashed_s
        await asyncio.sleep(DETECTION_S + 0.1)
        assert waiting.cancelled_at_s == pytest.approx(crashed_s + DETECTION_S)


@in_virtual_time
async def test_call_deadline_before_detection_is_a_timeout() -> None:
    async with nodes(2) as (internet, [a, b]):
        waiting = Waiting()
        await b.serve("wait", waiting.unary)
        call = asyncio.create_task(a.call(b.peer_id, "wait", b"", timeout_s=0.5))
        await waiting.started.wait()
        internet.crash(b.peer_id)
        with pytest.raises(PeerTimeout):
            await call


@in_virtual_time
async def test_crash_of_only_the_process_is_noticed_at_once() -> None:
    async with nodes(2) as (internet, [a, b]):
        waiting = Waiting()
        await b.serve_stream("wait", waiting.stream)
        async with a.stream(b.peer_id, "wait", timeout_s=60) as stream:
            crashed_s = now_s()
            internet.crash(b.peer_id, detection_s=0)
            with pytest.raises(PeerUnreachable):
                await stream.receive()
            with pytest.raises(PeerUnreachable):
                await stream.send(b"more")
            assert now_s() == crashed_s


@in_virtual_time
async def test_stream_of_crashed_peer_returns_what_had_arrived_and_then_breaks() -> None:
    async def talk(_peer_id: str, stream: Stream) -> None:
        await stream.send(b"one")
        await stream.send(b"two")
        await asyncio.Event().wait()

    async with nodes(2) as (internet, [a, b]):
        await b.serve_stream("talk", talk)
        async with a.stream(b.peer_id, "talk", timeout_s=60) as stream:
            await asyncio.sleep(1)
            internet.crash(b.peer_id)
            assert [await stream.receive(), await stream.receive()] == [b"one", b"two"]
            with pytest.raises(PeerUnreachable):
                await stream.receive()


@in_virtual_time
async def test_crashed_node_can_do_nothing_and_restarted_one_starts_empty() -> None:
    async def echo(_peer_id: str, request: bytes) -> bytes:
        return request

    async with nodes(2) as (internet, [a, b]):
        await b.serve("echo", echo)
        internet.crash(b.peer_id)
        with pytest.raises(PeerUnreachable):
            await b.call(a.peer_id, "echo", b"", timeout_s=1)
        with pytest.raises(PeerUnreachable):
            await b.publish("key", b"", lifetime_s=10)
        with pytest.raises(PeerUnreachable):
            await a.call(b.peer_id, "echo", b"", timeout_s=5)
        again = internet.restart(b.peer_id)
        with pytest.raises(PeerRefused):
            await a.call(b.peer_id, "echo", b"", timeout_s=5)
        await again.serve("echo", echo)
        assert await a.call(b.peer_id, "echo", b"hi", timeout_s=5) == b"hi"


@in_virtual_time
async def test_restart_and_second_network_of_a_live_identity_are_refused() -> None:
    async with nodes(1) as (internet, [a]):
        with pytest.raises(ValueError, match="live already"):
            internet.restart(a.peer_id)
        with pytest.raises(ValueError, match="live already"):
            internet.network(a._identity)


@in_virtual_time
async def test_call_across_partition_is_unreachable_and_works_when_healed() -> None:
    async def echo(_peer_id: str, request: bytes) -> bytes:
        return request

    async with nodes(3) as (internet, [a, b, c]):
        for node in (a, b, c):
            await node.serve("echo", echo)
        internet.partition([[a.peer_id, b.peer_id]])
        assert await a.call(b.peer_id, "echo", b"same side", timeout_s=5) == b"same side"
        with pytest.raises(PeerUnreachable):
            await a.call(c.peer_id, "echo", b"", timeout_s=5)
        internet.heal()
        assert await a.call(c.peer_id, "echo", b"healed", timeout_s=5) == b"healed"


@in_virtual_time
async def test_call_in_flight_survives_a_partition_shorter_than_detection() -> None:
    async def slow(_peer_id: str, request: bytes) -> bytes:
        await asyncio.sleep(0.1)
        return request

    async with nodes(2) as (internet, [a, b]):
        await b.serve("slow", slow)
        call = asyncio.create_task(a.call(b.peer_id, "slow", b"kept", timeout_s=60))
        await asyncio.sleep(0.05)
        internet.partition([[a.peer_id], [b.peer_id]])
        await asyncio.sleep(DETECTION_S / 2)
        assert not call.done()
        internet.heal()
        assert await call == b"kept"
        await asyncio.sleep(DETECTION_S)  # the timeout of the healed partition must not fire later


@in_virtual_time
async def test_call_in_flight_breaks_at_both_ends_of_a_lasting_partition() -> None:
    async with nodes(2) as (internet, [a, b]):
        waiting = Waiting()
        await b.serve("wait", waiting.unary)
        call = asyncio.create_task(a.call(b.peer_id, "wait", b"", timeout_s=60))
        await waiting.started.wait()
        cut_s = now_s()
        internet.partition([[a.peer_id], [b.peer_id]])
        with pytest.raises(PeerUnreachable):
            await call
        assert now_s() - cut_s == pytest.approx(DETECTION_S)
        assert waiting.cancelled_at_s == pytest.approx(cut_s + DETECTION_S)


@in_virtual_time
async def test_cancelled_call_cancels_the_handler_one_latency_later() -> None:
    async with nodes(2) as (_, [a, b]):
        waiting = Waiting()
        await b.serve("wait", waiting.unary)
        call = asyncio.create_task(a.call(b.peer_id, "wait", b"", timeout_s=60))
        await waiting.started.wait()
        left_s = now_s()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.sleep(1)
        assert waiting.cancelled_at_s == pytest.approx(left_s + LATENCY_S)


@in_virtual_time
async def test_closed_node_breaks_its_conversations_at_the_other_side_at_once() -> None:
    async with nodes(2) as (_, [a, b]):
        waiting = Waiting()
        await b.serve("wait", waiting.unary)
        call = asyncio.create_task(a.call(b.peer_id, "wait", b"", timeout_s=60))
        await waiting.started.wait()
        closed_s = now_s()
        await b.close()
        assert waiting.cancelled_at_s == closed_s
        with pytest.raises(PeerUnreachable):
            await call
        assert now_s() - closed_s == pytest.approx(LATENCY_S)


@in_virtual_time
async def test_handler_that_closes_its_own_node_does_not_wait_for_itself() -> None:
    async with nodes(2) as (_, [a, b]):

        async def stop(_peer_id: str, _request: bytes) -> bytes:
            await b.close()
            return b"never seen"

        await b.serve("stop", stop)
        with pytest.raises(PeerUnreachable):
            await a.call(b.peer_id, "stop", b"", timeout_s=5)


@in_virtual_time
async def test_handler_that_cancels_itself_does_not_leave_its_caller_waiting() -> None:
    async def cancelled(_peer_id: str, _request: bytes) -> bytes:
        raise asyncio.CancelledError

    async with nodes(2) as (_, [a, b]):
        await b.serve("cancelled", cancelled)
        with pytest.raises(PeerUnreachable):
            await a.call(b.peer_id, "cancelled", b"", timeout_s=5)


@in_virtual_time
async def test_both_sides_sending_more_than_the_window_before_reading_get_stuck() -> None:
    big = bytes(6 * 2**20)

    async def send_first(_peer_id: str, stream: Stream) -> None:
        await stream.send(big)
        await stream.receive()

    async with nodes(2) as (_, [a, b]):
        await b.serve_stream("exchange", send_first)
        async with a.stream(b.peer_id, "exchange", timeout_s=5) as stream:
            with pytest.raises(PeerTimeout):
                await stream.send(big)


@in_virtual_time
async def test_large_message_takes_its_transmission_time() -> None:
    async def echo(_peer_id: str, request: bytes) -> bytes:
        return request

    async with nodes(2) as (internet, [a, b]):
        fast = LinkModel(latency_s=LATENCY_S)
        internet.link(a.peer_id, b.peer_id, LinkModel(latency_s=LATENCY_S, bandwidth_bytes_per_s=1e6), fast)
        await b.serve("echo", echo)
        start_s = now_s()
        assert len(await a.call(b.peer_id, "echo", bytes(10_000_000), timeout_s=60)) == 10_000_000
        assert now_s() - start_s == pytest.approx(10 + 2 * LATENCY_S, rel=0.03)


@in_virtual_time
async def test_nodes_with_slow_uplinks_share_them_over_all_links() -> None:
    async def swallow(_peer_id: str, _request: bytes) -> bytes:
        return b""

    internet = MemoryInternet()
    home = internet.network(up_bytes_per_s=1e6)
    others = [internet.network() for _ in range(4)]
    for other in others:
        await other.serve("swallow", swallow)
    start_s = now_s()
    async with asyncio.TaskGroup() as tasks:
        for other in others:
            tasks.create_task(home.call(other.peer_id, "swallow", bytes(1_000_000), timeout_s=60))
    assert now_s() - start_s == pytest.approx(4, rel=0.03)
    await internet.close()


@in_virtual_time
async def test_message_arrives_changed_when_its_sender_reuses_the_buffer() -> None:
    """A real connection may send the buffer's later content. A caller that uses a buffer again must notice it here."""

    async def first(_peer_id: str, stream: Stream) -> None:
        await stream.send(await stream.receive())

    async with nodes(2) as (_, [a, b]):
        await b.serve_stream("first", first)
        async with a.stream(b.peer_id, "first", timeout_s=5) as stream:
            message = bytearray(b"before")
            await stream.send(message)  # type: ignore[arg-type]
            message[:] = b"after!"
            assert await stream.receive() == b"after!"
            with pytest.raises(EndOfStream):
                await stream.receive()


@in_virtual_time
async def test_record_published_behind_a_partition_is_seen_once_it_is_healed() -> None:
    async with nodes(4) as (internet, [a, b, c, d]):
        internet.partition([[a.peer_id, b.peer_id], [c.peer_id, d.peer_id]])
        assert await a.publish("key", b"from a", lifetime_s=60)
        assert [record.payload for record in await b.lookup(["key"], timeout_s=5)] == [b"from a"]
        assert await c.lookup(["key"], timeout_s=5) == []
        internet.heal()
        assert [record.payload for record in await c.lookup(["key"], timeout_s=5)] == [b"from a"]


@in_virtual_time
async def test_lookup_after_heal_takes_the_newest_of_two_versions() -> None:
    async with nodes(3) as (internet, [a, b, c]):
        await a.publish("key", b"old", lifetime_s=60)
        internet.partition([[a.peer_id, b.peer_id], [c.peer_id]])
        await asyncio.sleep(1)
        await a.publish("key", b"new", lifetime_s=60)
        assert [record.payload for record in await c.lookup(["key"], timeout_s=5)] == [b"old"]
        internet.heal()
        assert [record.payload for record in await c.lookup(["key"], timeout_s=5)] == [b"new"]


@in_virtual_time
async def test_later_of_two_records_published_at_one_moment_is_found() -> None:
    async with nodes(2) as (_, [a, b]):
        async with asyncio.TaskGroup() as tasks:
            for payload in (b"first", b"second"):
                tasks.create_task(a.publish("key", payload, lifetime_s=60))
        assert [record.payload for record in await b.lookup(["key"], timeout_s=5)] == [b"second"]


@in_virtual_time
async def test_isolated_node_publishes_to_nobody_and_sees_itself() -> None:
    async with nodes(2) as (internet, [a, b]):
        internet.crash(b.peer_id)
        assert not await a.publish("key", b"alone", lifetime_s=60)
        assert [record.payload for record in await a.lookup(["key"], timeout_s=5)] == [b"alone"]


@in_virtual_time
async def test_records_of_a_crashed_peer_live_on_elsewhere_until_they_expire() -> None:
    async with nodes(3) as (internet, [a, b, c]):
        await a.publish("key", b"last words", lifetime_s=60)
        internet.crash(a.peer_id)
        await asyncio.sleep(50)
        assert len(await b.lookup(["key"], timeout_s=5)) == 1
        await asyncio.sleep(10)
        assert await c.lookup(["key"], timeout_s=5) == []


@in_virtual_time
async def test_offered_bytes_that_are_no_valid_record_are_stored_by_nobody() -> None:
    async with nodes(2) as (_, [a, b]):
        forger, now = Identity.generate(), a.now()
        sealed = [
            seal_record(forger, network_id="other", key="key", payload=b"", issued_at=now, lifetime_s=9),
            seal_record(forger, network_id="test", key="other", payload=b"", issued_at=now, lifetime_s=9),
            seal_record(forger, network_id="test", key="key", payload=b"", issued_at=now - 10, lifetime_s=9),
            seal_record(forger, network_id="test", key="key", payload=b"", issued_at=now + 100, lifetime_s=9),
        ]
        good = seal_record(forger, network_id="test", key="key", payload=b"", issued_at=now, lifetime_s=9).to_bytes()
        for record in (b"", b"garbage", good[:-1], good[:-1] + bytes([good[-1] ^ 1]), *(e.to_bytes() for e in sealed)):
            assert not await a.offer("key", record)
        assert await b.lookup(["key"], timeout_s=5) == []
        assert await a.offer("key", good)
        assert len(await b.lookup(["key"], timeout_s=5)) == 1


@in_virtual_time
async def test_offered_older_record_does_not_replace_a_newer_one() -> None:
    async with nodes(2) as (_, [a, b]):
        peer = Identity.generate()
        for age_s, payload in ((0, b"new"), (5, b"old")):
            record = seal_record(
                peer, network_id="test", key="key", payload=payload, issued_at=a.now() - age_s, lifetime_s=60
            )
            await a.offer("key", record.to_bytes())
        assert [record.payload for record in await b.lookup(["key"], timeout_s=5)] == [b"new"]


@in_virtual_time
async def test_peer_with_a_wrong_clock_or_network_is_refused_by_name() -> None:
    internet = MemoryInternet()
    right, late, foreign = (
        internet.network(),
        internet.network(clock_offset_s=3600),
        internet.network(network_id="other"),
    )
    with pytest.raises(PeerRefused, match="clocks differ by 3600 s"):
        await right.call(late.peer_id, "any", b"", timeout_s=5)
    with pytest.raises(PeerRefused, match="network 'other'"):
        await right.call(foreign.peer_id, "any", b"", timeout_s=5)
    await right.publish("key", b"", lifetime_s=60)
    assert await foreign.lookup(["key"], timeout_s=5) == []
    await internet.close()


@in_virtual_time
async def test_caller_gets_no_details_when_a_handler_fails_with_a_foreign_error() -> None:
    async def broken(_peer_id: str, _request: bytes) -> bytes:
        raise RuntimeError("secret path /home/someone")

    async def violating(_peer_id: str, _request: bytes) -> bytes:
        raise PeerViolation("bad request")

    async with nodes(2) as (_, [a, b]):
        await b.serve("broken", broken)
        await b.serve("violating", violating)
        with pytest.raises(PeerViolation, match="bad request"):
            await a.call(b.peer_id, "violating", b"", timeout_s=5)
        with pytest.raises(Exception, match="failed internally") as caught:
            await a.call(b.peer_id, "broken", b"", timeout_s=5)
        assert "secret" not in str(caught.value)


def test_internet_with_the_same_seed_has_the_same_trace() -> None:
    async def main() -> list[tuple[float, str]]:
        link = LinkModel(latency_s=0.02, jitter_s=0.03, bandwidth_bytes_per_s=1e6, loss=0.05)
        internet, trace = MemoryInternet(seed=5, default_link=link), []
        swarm = [internet.network() for _ in range(5)]

        async def note(peer_id: str, request: bytes) -> bytes:
            trace.append((now_s(), f"{peer_id}:{len(request)}"))
            return request

        async def chat(node: MemoryNetwork, size: int) -> None:
            for other in swarm:
                if other is not node:
                    await node.call(other.peer_id, "note", bytes(size), timeout_s=60)

        for node in swarm:
            await node.serve("note", note)
        async with asyncio.TaskGroup() as tasks:
            for index, node in enumerate(swarm):
                tasks.create_task(chat(node, 10_000 * index))
        await internet.close()
        return trace

    first = virtual_time.run(main())
    assert len(first) == 20
    assert first == virtual_time.run(main())
