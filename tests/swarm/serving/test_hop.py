from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from swarm.serving.hop import FACTOR, FLOOR_S, MAX_COMPUTE_S, SLOWEST_BYTES_PER_S, Ledger, StepTimer
from swarm_protocol.records import ServeRecord


@given(st.lists(st.integers(1, 70), min_size=1, max_size=20), st.data())
def test_ledger_any_appends_read_back_as_one(lengths: list[int], data: st.DataObject) -> None:
    ledger, parts = Ledger(), []
    for length in lengths:
        parts.append(torch.randn(length, 3))
        ledger.append(parts[-1])
    whole = torch.cat(parts)
    assert ledger.length == len(whole)
    start = data.draw(st.integers(0, len(whole) - 1))
    end = data.draw(st.integers(start + 1, len(whole)))
    assert torch.equal(ledger.rows(start, end), whole[start:end])


def timer(**changes: float) -> StepTimer:
    record = ServeRecord(
        model="m",
        revision="r",
        num_blocks=4,
        start=0,
        end=4,
        state="serving",
        prefill_ms_per_token=1.0,
        decode_ms_per_block=100.0,
        free_kv_tokens=1,
        **changes,  # type: ignore[arg-type]
    )
    return StepTimer(record, 4)


def test_timer_first_comes_from_the_claim_and_the_crowd() -> None:
    assert timer().timeout_s(1, 0) == pytest.approx(FLOOR_S + FACTOR * 0.4)
    assert timer(queue_depth=2).timeout_s(1, 0) == pytest.approx(FLOOR_S + FACTOR * 1.2)
    assert timer().timeout_s(100, 0) == pytest.approx(FLOOR_S + FACTOR * 0.4)


def test_timer_follows_what_steps_took() -> None:
    steps = timer()
    for _ in range(60):
        steps.took(1, 2.0)
        steps.took(100, 30.0)
    assert steps.timeout_s(1, 0) == pytest.approx(FLOOR_S + FACTOR * 2.0, rel=0.01)
    assert steps.timeout_s(100, 0) == pytest.approx(FLOOR_S + FACTOR * 30.0, rel=0.01)


def test_timer_is_bounded_whatever_the_server_claims() -> None:
    assert timer(queue_depth=2**20).timeout_s(1, 0) == FLOOR_S + MAX_COMPUTE_S


def test_timer_leaves_slow_links_time_for_the_bytes() -> None:
    ten_s = int(10 * SLOWEST_BYTES_PER_S)
    assert timer().timeout_s(1, ten_s) - timer().timeout_s(1, 0) == pytest.approx(10)
