"""The share of a memory limit that the model gets; the memory bench checks the sum on a real node."""

from __future__ import annotations

import mmap

import pytest
from swarm_node.formatting import size
from swarm_node.machine.hardware import MAX_CACHE_BYTES, WORKING_BYTES, resident_bytes, share_of_free, share_of_limit
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError

MIB = 2**20


@pytest.mark.parametrize("told", [700 * MIB, 2**30, 6 * 2**30, 2**40])
def test_share_of_a_memory_limit_leaves_the_held_and_the_working_memory(told: int) -> None:
    held = 480 * MIB
    share = share_of_limit(told, held)
    assert share.cache_bytes == share.model_bytes
    assert 0 < share.model_bytes <= told - held - WORKING_BYTES
    assert share.waiting_bytes >= limits.MAX_MESSAGE_BYTES  # otherwise no message of the largest kind is ever accepted
    assert share_of_limit(told + MIB, held).model_bytes > share.model_bytes


@pytest.mark.parametrize("told", [1, 480 * MIB, 480 * MIB + WORKING_BYTES, 586 * MIB])
def test_share_of_less_than_the_node_itself_takes_is_refused_with_both_sizes(told: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"of {size(told)} of memory the node itself takes 480 MiB and needs 107 MiB"
    ) as e:
        share_of_limit(told, 480 * MIB)
    assert e.value.remedy == "allow 587 MiB with --max-memory, and what the model takes"
    assert share_of_limit(587 * MIB, 480 * MIB).model_bytes > 0
    with pytest.raises(ConfigError, match="of 1 KiB of memory the node needs 107 MiB to work: none is left"):
        share_of_limit(1024, 0)


def test_share_of_a_limit_names_all_that_a_model_needs_at_once() -> None:
    with pytest.raises(ConfigError, match="needs 107 MiB to work: the model needs 90 MiB more") as e:
        share_of_limit(640 * MIB, 480 * MIB, 90 * MIB)
    assert e.value.remedy == "allow 687 MiB with --max-memory"
    assert share_of_limit(687 * MIB, 480 * MIB, 90 * MIB).model_bytes >= 90 * MIB


def test_share_of_free_memory_leaves_some_to_the_owner() -> None:
    share = share_of_free(2**40)
    assert share.model_bytes < 0.9 * 2**40
    assert share.cache_bytes == MAX_CACHE_BYTES
    assert share_of_free(0).cache_bytes > 0


def test_held_memory_grows_with_what_is_allocated() -> None:
    before = resident_bytes()
    with mmap.mmap(-1, 64 * MIB) as kept:  # not from the heap, which may have free room
        kept.write(b"x" * (64 * MIB))
        assert resident_bytes() - before > 48 * MIB
