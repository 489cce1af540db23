from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm.router.placement import ENOUGH_SERVERS, Capacity, choose_move, choose_span, rank
from swarm_protocol.records import ServeRecord, ServeState


def record(start: int, end: int, num_blocks: int = 4, ms: float = 1.0, state: ServeState = "serving") -> ServeRecord:
    return ServeRecord(
        model="m",
        revision="r",
        num_blocks=num_blocks,
        start=start,
        end=end,
        state=state,
        prefill_ms_per_token=1.0,
        decode_ms_per_block=ms,
        free_kv_tokens=100,
    )


def proposal(start: int, end: int, num_blocks: int = 4, ms: float = 1.0) -> ServeRecord:
    return ServeRecord(
        model="m",
        revision="r",
        num_blocks=num_blocks,
        start=start,
        end=end,
        state="joining",
        prefill_ms_per_token=1.0,
        decode_ms_per_block=ms,
        free_kv_tokens=0,
    )


def me(num_blocks: int = 2, ms: float = 1.0, peer_id: str = "me") -> Capacity:
    return Capacity(peer_id=peer_id, num_blocks=num_blocks, block_ms=ms)


def span(servers: dict[str, ServeRecord], num_blocks: int = 4, capacity: Capacity | None = None) -> tuple[int, int]:
    decision = choose_span(servers, num_blocks, capacity or me())
    assert decision.reason
    return decision.start, decision.end


def throughput(servers: dict[str, ServeRecord], num_blocks: int) -> list[float]:
    totals = [0.0] * num_blocks
    for server in servers.values():
        for block in range(server.start, server.end):
            totals[block] += 1000 / ((server.end - server.start) * server.decode_ms_per_block)
    return sorted(round(total, 6) for total in totals)


def test_span_first_node_takes_the_first_blocks() -> None:
    assert span({}) == (0, 2)


def test_span_gap_is_filled_first() -> None:
    assert span({"a": record(0, 2), "b": record(0, 2), "c": record(0, 2)}) == (2, 4)


def test_span_slowest_blocks_get_help() -> None:
    assert span({"fast": record(0, 2, ms=1.0), "slow": record(2, 4, ms=9.0)}) == (2, 4)
    twice = {"a": record(0, 4), "b": record(0, 4), "fast": record(0, 2, ms=1.0), "slow": record(2, 4, ms=9.0)}
    assert span(twice) == (2, 4)


def test_span_block_with_one_server_gets_a_second_before_speed_counts() -> None:
    slow = {"a": record(0, 2, ms=9.0), "b": record(0, 2, ms=9.0), "fast": record(2, 4, ms=0.1)}
    assert span(slow) == (2, 4)
    assert "one server only" in choose_span(slow, 4, me()).reason


def test_span_four_nodes_of_very_different_speed_cover_twice() -> None:
    servers: dict[str, ServeRecord] = {}
    for i, ms in enumerate((0.1, 5.0, 50.0, 1.0)):
        start, end = span(servers, 4, me(ms=ms, peer_id=f"p{i}"))
        servers[f"p{i}"] = record(start, end, ms=ms)
    assert sorted((server.start, server.end) for server in servers.values()) == [(0, 2), (0, 2), (2, 4), (2, 4)]


def test_span_capacity_over_the_model_takes_it_whole() -> None:
    assert span({}, capacity=me(99)) == (0, 4)


def test_span_draining_servers_do_not_count() -> None:
    assert span({"a": record(0, 2), "b": record(2, 4, state="draining")}) == (2, 4)


def test_span_settled_joiners_count_as_if_they_served() -> None:
    assert span({"a": record(0, 2, state="joining")}) == (2, 4)


def test_span_own_old_record_does_not_count() -> None:
    assert span({"me": record(0, 2)}) == (0, 2)


def test_span_unequal_capacities_cover_everything() -> None:
    servers: dict[str, ServeRecord] = {}
    for i, capacity in enumerate((3, 5, 2, 4, 3)):
        start, end = span(servers, 8, me(capacity, peer_id=f"p{i}"))
        servers[f"p{i}"] = record(start, end, 8)
    assert throughput(servers, 8)[0] > 0


def test_span_four_equal_nodes_one_after_another_cover_twice() -> None:
    servers: dict[str, ServeRecord] = {}
    for i in range(4):
        start, end = span(servers, 4, me(peer_id=f"p{i}"))
        servers[f"p{i}"] = record(start, end)
    assert len(set(throughput(servers, 4))) == 1


@given(st.lists(st.text(min_size=1, max_size=8), min_size=4, max_size=4, unique=True), st.integers(2, 12))
def test_span_four_equal_nodes_in_the_same_second_cover_twice(peer_ids: list[str], half: int) -> None:
    """All have proposed the same first span; none has seen another decide."""
    num_blocks = 2 * half
    proposals = {peer_id: proposal(0, half, num_blocks) for peer_id in peer_ids}
    chosen = {peer_id: span(proposals, num_blocks, me(half, peer_id=peer_id)) for peer_id in peer_ids}
    assert sorted(chosen.values()) == [(0, half), (0, half), (half, num_blocks), (half, num_blocks)]


def test_span_late_joiner_chooses_around_those_who_have_settled() -> None:
    """Though it ranks before them and would have chosen first."""
    late, early = sorted(("x", "y"), key=rank)
    assert span({early: record(0, 2, state="joining")}, 4, me(peer_id=late)) == (2, 4)
    assert span({early: proposal(0, 2)}, 4, me(peer_id=late)) == (0, 2)


@st.composite
def swarms(draw: st.DrawFn) -> tuple[dict[str, ServeRecord], int, Capacity]:
    num_blocks = draw(st.integers(1, 10))
    servers = {}
    for i in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, num_blocks - 1))
        end = draw(st.integers(start + 1, num_blocks))
        servers[f"p{i}"] = record(start, end, num_blocks, ms=draw(st.sampled_from([0.5, 1.0, 3.0, 20.0])))
    return servers, num_blocks, me(draw(st.integers(1, 12)), draw(st.sampled_from([0.5, 1.0, 7.0])))


@given(swarms())
@settings(max_examples=150, deadline=None)
def test_span_any_swarm_no_other_window_is_better(swarm: tuple[dict[str, ServeRecord], int, Capacity]) -> None:
    servers, num_blocks, capacity = swarm
    start, end = span(servers, num_blocks, capacity)
    length = min(capacity.num_blocks, num_blocks)
    assert end - start == length

    def after(window: int) -> tuple[list[int], list[float]]:
        all_servers = {**servers, "me": record(window, window + length, num_blocks, ms=capacity.block_ms)}
        counts = [sum(s.start <= block < s.end for s in all_servers.values()) for block in range(num_blocks)]
        return sorted(min(count, ENOUGH_SERVERS) for count in counts), throughput(all_servers, num_blocks)

    assert all(after(start) >= after(window) for window in range(num_blocks - length + 1))


def test_move_balanced_swarm_stays() -> None:
    servers = {"a": record(0, 2), "b": record(2, 4), "me": record(0, 2)}
    assert choose_move(servers, 4, me(), (0, 2)) is None


def test_move_blocks_nobody_serves_are_worth_it() -> None:
    decision = choose_move({"a": record(0, 2), "me": record(0, 2)}, 4, me(), (0, 2))
    assert decision is not None
    assert (decision.start, decision.end) == (2, 4)
    assert "0.0 to 500.0 tokens/s" in decision.reason


def test_move_small_gain_is_not_worth_it() -> None:
    """From 1.0 to 1.2 of the slowest block's throughput: below the hysteresis."""
    servers = {"a": record(0, 2, ms=1.0), "b": record(2, 4, ms=1.0)}
    assert choose_move(servers, 4, me(ms=5.0), (0, 2)) is None
    slow = {"a": record(0, 2, ms=1.0), "b": record(2, 4, ms=4.0)}
    assert choose_move(slow, 4, me(ms=1.0), (0, 2)) is not None


def test_move_that_would_open_a_gap_is_refused() -> None:
    assert choose_move({"a": record(2, 4, ms=50.0)}, 4, me(), (0, 2)) is None


@pytest.mark.parametrize("num_servers", [1000])
def test_span_a_thousand_servers_is_chosen_in_milliseconds(num_servers: int) -> None:
    rng = random.Random(0)
    servers = {}
    for i in range(num_servers):
        start = rng.randrange(0, 122)
        servers[f"p{i}"] = record(start, rng.randint(start + 4, 126), 126, ms=rng.uniform(1, 9))
    times = []
    for _ in range(3):
        since = time.perf_counter()
        choose_span(servers, 126, me(20))
        times.append(time.perf_counter() - since)
    assert min(times) < 0.2  # many times what the bench shows, for a machine that is busy with other tests
