from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm.router.block_budget import (
    COMFORTABLE_SESSIONS,
    PAGE_TOKENS,
    SESSION_TOKENS,
    ModelNeeds,
    block_budget,
    kv_bytes_beside,
)
from swarm_protocol.errors import ConfigError

GIB = 2**30
NEEDS = ModelNeeds(num_blocks=32, block_bytes=400 * 2**20, ends_bytes=GIB, kv_bytes=4096, context_tokens=8192)
SESSION_BYTES = SESSION_TOKENS * NEEDS.kv_bytes


def test_room_leaves_cache_for_many_sessions_and_less_when_a_gap_would_remain() -> None:
    room = block_budget(NEEDS, 8 * GIB, 8 * GIB)
    assert room.num_blocks == 7 * GIB // (NEEDS.block_bytes + COMFORTABLE_SESSIONS * SESSION_BYTES)
    assert room.max_blocks == 7 * GIB // (NEEDS.block_bytes + SESSION_BYTES) > room.num_blocks
    assert room.reason == f"{room.num_blocks} blocks fit beside the cache of 9 sessions of 2048 tokens"  # by rounding


def test_room_for_the_whole_model_says_so() -> None:
    room = block_budget(NEEDS, 80 * GIB, 80 * GIB)
    assert (room.num_blocks, room.max_blocks) == (32, 32)
    num_sessions = (80 * GIB - NEEDS.weight_bytes(32)) // (32 * SESSION_BYTES)
    assert room.reason == f"the whole model fits beside the cache of {num_sessions} sessions of 2048 tokens"
    capped = block_budget(NEEDS, 80 * GIB, 32 * SESSION_BYTES)
    assert capped.reason == "the whole model fits beside the cache of 1 session of 2048 tokens"


def test_room_needs_less_cache_when_the_context_is_short() -> None:
    short = replace(NEEDS, context_tokens=128)
    assert block_budget(short, 8 * GIB, 8 * GIB).num_blocks > block_budget(NEEDS, 8 * GIB, 8 * GIB).num_blocks


def test_room_holds_one_block_for_fewer_sessions_when_memory_is_short() -> None:
    three = NEEDS.ends_bytes + NEEDS.block_bytes + 3 * SESSION_BYTES
    assert block_budget(NEEDS, three, three).reason == "1 block fits beside the cache of 3 sessions of 2048 tokens"
    little = NEEDS.ends_bytes + NEEDS.block_bytes + PAGE_TOKENS * NEEDS.kv_bytes
    assert block_budget(NEEDS, little, little).num_blocks == 1
    with pytest.raises(ConfigError, match="not one block fits"):
        block_budget(NEEDS, little - 1, little)


def test_kv_bytes_are_the_remaining_memory_up_to_the_allowed_bytes() -> None:
    assert kv_bytes_beside(NEEDS, 4, 4 * GIB, 10 * GIB) == 4 * GIB - NEEDS.weight_bytes(4)
    assert kv_bytes_beside(NEEDS, 4, 4 * GIB, GIB // 2) == GIB // 2
    with pytest.raises(ConfigError, match="8 blocks with embedding and head take"):
        kv_bytes_beside(NEEDS, 8, 4 * GIB, GIB)


@given(st.integers(1, 60 * GIB), st.integers(1, 60 * GIB), st.integers(1, 2**30), st.integers(1, 2**20))
def test_room_never_takes_more_memory_than_allowed_on_any_machine(
    max_bytes: int, max_kv_bytes: int, block_bytes: int, kv_bytes: int
) -> None:
    needs = replace(NEEDS, block_bytes=block_bytes, kv_bytes=kv_bytes)
    try:
        room = block_budget(needs, max_bytes, max_kv_bytes)
    except ConfigError:
        return
    assert 1 <= room.num_blocks <= room.max_blocks <= needs.num_blocks
    for num_blocks in (room.num_blocks, room.max_blocks):
        try:
            cache_bytes = kv_bytes_beside(needs, num_blocks, max_bytes, max_kv_bytes)
        except ConfigError:
            assert max_kv_bytes < PAGE_TOKENS * kv_bytes * num_blocks  # little cache is allowed
        else:
            assert needs.weight_bytes(num_blocks) + cache_bytes <= max_bytes


def test_room_counts_the_extra_memory_while_a_span_is_loaded() -> None:
    """The cache may use that memory once loading is done, so it takes no room beside a larger cache."""
    needs = replace(NEEDS, loading_bytes=4 * GIB)
    told = NEEDS.weight_bytes(5) + needs.loading_bytes
    assert kv_bytes_beside(needs, 5, told, told) == needs.loading_bytes
    with pytest.raises(ConfigError, match=r"6 blocks .* 4294967296 more while they are loaded"):
        kv_bytes_beside(needs, 6, told, told)
    assert block_budget(needs, told, 1).max_blocks == 5
    assert block_budget(needs, 80 * GIB, 80 * GIB) == block_budget(NEEDS, 80 * GIB, 80 * GIB)
    with pytest.raises(ConfigError, match="and 4294967296 more while it is loaded"):
        block_budget(needs, NEEDS.weight_bytes(1) + needs.loading_bytes - 1, GIB)
