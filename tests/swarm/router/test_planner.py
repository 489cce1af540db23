from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm.router.block_budget import ModelNeeds, comfortable_bytes
from swarm.router.planner import PlannedNode, plan

GIB = 2**30
NEEDS = ModelNeeds(num_blocks=12, block_bytes=GIB, ends_bytes=GIB, kv_bytes=2**13, context_tokens=4096)


def node(name: str, memory: float, ms: float = 1.0, **more: object) -> PlannedNode:
    return PlannedNode(name=name, memory_bytes=int(memory * GIB), decode_ms=ms, **more)  # type: ignore[arg-type]


def test_plan_shares_the_model_between_two_nodes_and_the_chain_uses_both() -> None:
    found = plan(NEEDS, [node("a", 8), node("b", 8)])
    assert [taken.span for taken in found.taken] == [(0, 6), (6, 12)]
    assert found.lacking == ()
    assert found.tokens_per_s == pytest.approx(1000 / 6)
    assert found.chain is not None
    assert [(hop.peer_id, hop.start, hop.end) for hop in found.chain.hops] == [("a", 0, 6), ("b", 6, 12)]
    assert all(taken.kv_tokens > 8 * 2048 and "6 blocks fit" in taken.reason for taken in found.taken)


def test_plan_names_the_memory_that_closes_a_gap_and_that_memory_does() -> None:
    nodes = [node("a", 8), node("poor", 1)]
    found = plan(NEEDS, nodes)
    assert found.taken[1].span is None
    assert "not one block fits" in found.taken[1].reason
    assert (found.tokens_per_s, found.chain) == (0.0, None)
    [(span, memory_bytes)] = found.lacking
    assert (span, memory_bytes) == ((6, 12), comfortable_bytes(NEEDS, 6))
    assert plan(NEEDS, [*nodes, replace(node("new", 1), memory_bytes=memory_bytes)]).lacking == ()


def test_plan_closes_a_gap_of_one_block_with_less_cache() -> None:
    found = plan(NEEDS, [node("a", 8), node("b", 7.5)])
    assert found.lacking == ()
    assert "closing the gap is worth less cache" in found.taken[1].reason


def test_plan_routes_the_request_over_faster_and_nearer_nodes() -> None:
    nodes = [
        node("slow", 20, ms=8.0, client_rtt_ms=5.0),
        node("fast", 20, client_rtt_ms=5.0),
        node("far", 20, client_rtt_ms=300.0),
    ]
    found = plan(NEEDS, nodes)
    assert found.chain is not None
    assert [hop.peer_id for hop in found.chain.hops] == ["fast"]
    assert found.chain.cost_ms == pytest.approx(5 + 12 + 1, abs=0.1)


@given(
    st.lists(
        st.tuples(st.floats(0.5, 20), st.sampled_from([0.5, 1.0, 8.0, 40.0]), st.booleans()), min_size=1, max_size=8
    )
)
@settings(max_examples=40, deadline=None)
def test_plan_of_any_nodes_has_a_chain_exactly_when_no_block_is_missing(
    machines: list[tuple[float, float, bool]],
) -> None:
    nodes = [node(f"n{i}", memory, ms, relayed=relayed) for i, (memory, ms, relayed) in enumerate(machines)]
    found = plan(NEEDS, nodes)
    assert found == plan(NEEDS, nodes)
    served = {block for taken in found.taken if taken.span for block in range(*taken.span)}
    missing = {block for span, _ in found.lacking for block in range(*span)}
    assert served | missing == set(range(12))
    assert not served & missing
    assert (found.chain is None) == (found.tokens_per_s == 0.0) == bool(missing)
