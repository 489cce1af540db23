"""The streams that are dropped when more bytes wait unread than a host may hold."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from support.network_worlds import eventually, libp2p_node
from swarm.network import framing
from swarm.network.interface import Stream
from swarm.network.peer_budgets import HOST_BYTES, PEER_BYTES, UnreadBudget
from swarm_protocol import limits
from swarm_protocol.errors import PeerRefused


class OneStream:
    def __init__(self, peer_id: str) -> None:
        self.peer_id = peer_id
        self.refusals: list[PeerRefused] = []

    def give_way(self, refusal: PeerRefused) -> None:
        self.refusals.append(refusal)


def test_stream_beyond_its_peer_s_budget_is_dropped_and_others_stay() -> None:
    budget = UnreadBudget(max_peer_bytes=10, max_host_bytes=100)
    first, second, other = OneStream("a"), OneStream("a"), OneStream("b")
    assert budget.charge(first, 6)
    assert budget.charge(other, 6)
    assert not budget.charge(second, 5)
    [refusal] = second.refusals
    assert refusal.retry_after_s > 0
    assert "bytes from one peer wait to be read" in refusal.message
    assert not first.refusals
    assert not other.refusals
    assert budget.num_bytes == 12
    budget.release(first, 6)
    assert budget.charge(OneStream("a"), 10)
    assert budget.num_refused == 1


def test_full_host_drops_the_largest_stream_of_the_greediest_peer() -> None:
    budget = UnreadBudget(max_peer_bytes=100, max_host_bytes=20)
    small, large, honest = OneStream("greedy"), OneStream("greedy"), OneStream("honest")
    assert budget.charge(small, 5)
    assert budget.charge(large, 9)
    assert budget.charge(honest, 7)
    assert large.refusals
    assert not small.refusals
    assert not honest.refusals
    assert budget.num_bytes == 12
    assert not budget.charge(small, 9)
    assert small.refusals


def test_full_host_drops_streams_of_the_network_whose_keys_hold_most_together() -> None:
    budget = UnreadBudget(lambda peer_id: peer_id[:5], max_peer_bytes=100, max_host_bytes=50)
    keys = [OneStream(f"cloud {number}") for number in range(6)]
    honest = OneStream("home")
    for each in keys[:5]:
        assert budget.charge(each, 8)
    assert budget.charge(honest, 10)
    assert not budget.charge(keys[5], 9)
    assert not honest.refusals, "it holds more than any other key"
    assert [bool(each.refusals) for each in keys] == [False] * 5 + [True]


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["charge", "release", "drop"]), st.integers(0, 30))))
def test_budget_under_any_events_is_kept_and_counts_what_is_held(events: list[tuple[int, str, int]]) -> None:
    budget = UnreadBudget(max_peer_bytes=40, max_host_bytes=60)
    streams = [OneStream(f"peer {number % 2}") for number in range(6)]
    held = dict.fromkeys(range(6), 0)
    for number, event, num_bytes in events:
        stream = streams[number]
        if event == "charge":
            held[number] += num_bytes
            budget.charge(stream, num_bytes)
            held = {each: 0 if streams[each].refusals else kept for each, kept in held.items()}
            for each in streams:
                each.refusals.clear()
        elif event == "release":
            budget.release(stream, num_bytes)
            held[number] -= min(held[number], num_bytes)
        else:
            budget.drop(stream)
            held[number] = 0
        assert budget.num_bytes == sum(held.values()) <= 60
        for peer in (0, 1):
            assert sum(held[each] for each in range(6) if each % 2 == peer) <= 40
    for stream in streams:
        budget.drop(stream)
    assert budget.num_bytes == 0
    assert not budget._held
    assert not budget._by_peer


def test_keys_of_one_network_displace_each_other_and_not_a_peer_of_another_network(tmp_path: Path) -> None:
    """Each key holds a little less than the honest peer."""
    num_bytes, num_keys = framing.WINDOW_BYTES // 2, 4

    async def hang(_peer_id: str, stream: Stream) -> None:
        assert await stream.receive() == b"here"
        await asyncio.Event().wait()

    async def main() -> None:
        async with AsyncExitStack() as stack:
            host = await stack.enter_async_context(await libp2p_node(tmp_path / "host", listen=("/ip4/0.0.0.0/tcp/0",)))
            addrs = [f"/ip4/127.0.0.1/tcp/{host._paths.own.listen_endpoints[4].bind[1]}/p2p/{host.peer_id}"]
            await host.serve_stream("hang", hang)
            budget = host._host.unread = UnreadBudget(host._host.provider_of, max_host_bytes=num_keys * num_bytes)

            async def holding(name: str, num_bytes: int, ip: str) -> Stream:
                node = await libp2p_node(tmp_path / name, peers=addrs, listen=(f"/ip4/{ip}/tcp/0",))
                await stack.enter_async_context(node)
                await host._host.look()
                stream = await stack.enter_async_context(node.stream(host.peer_id, "hang", timeout_s=30))
                await stream.send(b"here")
                before = budget.num_bytes + budget.num_refused
                await stream.send(bytes(num_bytes))

                async def is_there() -> bool:
                    return budget.num_bytes + budget.num_refused > before

                await eventually(is_there)
                return stream

            honest = await holding("honest", num_bytes, "127.1.0.1")
            keys = [await holding(f"key{number}", num_bytes - 1000, "127.0.0.1") for number in range(num_keys)]

            async def has_given_way() -> bool:
                return budget.num_refused == 1

            await eventually(has_given_way)
            refused = [each for each in (honest, *keys) if each._error is not None]  # type: ignore[attr-defined]
            assert honest not in refused

    asyncio.run(main())


def test_budgets_admit_the_largest_message_and_the_windows_of_a_group() -> None:
    num_pieces = -(-limits.MAX_MESSAGE_BYTES // framing.CHUNK_BYTES)
    assert limits.MAX_MESSAGE_BYTES + num_pieces * framing.FRAME_COST_BYTES + 3 * framing.WINDOW_BYTES <= PEER_BYTES
    assert HOST_BYTES >= 16 * 4 * framing.WINDOW_BYTES
