"""The time per block that a server announces follows the times of its passes, whatever was measured before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from swarm.serving.engine.span_speed import (
    FIRST_TOKENS,
    MEASURED_PASSES,
    MIN_TOKENS,
    PREFILL_TOKENS,
    WINDOW_PASSES,
    ObservedSpeed,
    SpanSpeed,
    StepCost,
    StepTrials,
    thread_counts,
    thread_counts_near,
    worthwhile,
)
from swarm.serving.model.kv_pool import PAGE_TOKENS

MEASURED = SpanSpeed(prefill_ms=2.0, decode_ms=100.0, kv_bytes_per_token=8)


def observed(*passes: tuple[int, int, float], measured: SpanSpeed = MEASURED) -> SpanSpeed:
    """Return the speed after passes over four blocks, each with decodes, prompt tokens and milliseconds."""
    speed = ObservedSpeed(measured)
    for num_decodes, num_prefill_tokens, pass_ms in passes:
        speed.passed(num_decodes, num_prefill_tokens, 4, pass_ms)
    return speed.speed


def test_speed_is_the_measured_one_before_any_pass() -> None:
    assert observed() == MEASURED


def test_speed_follows_single_tokens_once_most_passes_agree() -> None:
    assert observed(*[(1, 0, 8.0)] * (MEASURED_PASSES - 1)).decode_ms == 100
    assert observed(*[(1, 0, 8.0)] * (MEASURED_PASSES + 1)).decode_ms == 2
    assert observed(*[(1, 0, 800.0)] * (MEASURED_PASSES + 1)).decode_ms == 200


def test_speed_is_unchanged_when_the_machine_pauses_once() -> None:
    assert observed(*[(1, 0, 8.0)] * 40, *[(1, 0, 4000.0)] * 10).decode_ms == 2


def test_speed_only_falls_when_passes_have_several_tokens() -> None:
    assert observed(*[(16, 0, 40.0)] * WINDOW_PASSES).decode_ms == 10
    assert observed(*[(16, 0, 4000.0)] * WINDOW_PASSES).decode_ms == 100


@pytest.mark.parametrize(("num_decodes", "num_prefill_tokens", "expected"), [(0, 64, 0.5), (1, 64, 2.0), (0, 8, 2.0)])
def test_speed_follows_prompts_when_they_are_long_and_alone(
    num_decodes: int, num_prefill_tokens: int, expected: float
) -> None:
    pass_ms = 0.5 * num_prefill_tokens * 4
    found = observed(*[(num_decodes, num_prefill_tokens, pass_ms)] * WINDOW_PASSES)
    assert (found.prefill_ms, found.decode_ms) == (expected, 100)


def test_speed_moves_halfway_after_one_new_measurement_and_fully_after_two() -> None:
    speed = ObservedSpeed(MEASURED)
    speed.measured_again(2.0, 0.5)
    assert speed.speed.decode_ms == 51
    speed.measured_again(2.0, 0.5)
    assert (speed.speed.decode_ms, speed.speed.prefill_ms) == (2, 0.5)


def steps(cost: StepCost, step_ms: Callable[[int], float], num_steps: int) -> list[float]:
    """Return the times of successive full steps on a machine that takes `step_ms` for a number of prompt tokens."""
    times = []
    for _ in range(num_steps):
        num_tokens = cost.prefill_tokens()
        times.append(step_ms(num_tokens))
        cost.measured(num_tokens, times[-1])
    return times


@pytest.mark.parametrize("token_ms", [0.5, 2.0, 10.0])
def test_cost_makes_steps_that_fill_the_bound_and_stay_within_it(token_ms: float) -> None:
    cost = StepCost(max_step_ms=200, max_alone_ms=1000, max_step_tokens=1024)
    cost.measured(0, 20.0)
    later = steps(cost, lambda num_tokens: 20 + token_ms * num_tokens, 30)[1:]
    assert max(later) <= 201
    assert later[-1] >= 140


def test_cost_makes_short_steps_before_any_measurement() -> None:
    assert StepCost(max_step_ms=200, max_alone_ms=1000, max_step_tokens=1024).prefill_tokens() == FIRST_TOKENS
    assert StepCost(max_step_ms=200, max_alone_ms=1000, max_step_tokens=8).prefill_tokens() == 8


def test_cost_still_makes_steps_when_a_machine_is_too_slow_for_the_bound() -> None:
    cost = StepCost(max_step_ms=200, max_alone_ms=1000, max_step_tokens=1024)
    steps(cost, lambda num_tokens: 100.0 * num_tokens, 5)
    assert cost.prefill_tokens() == MIN_TOKENS
    cost.measured(0, 300.0)
    assert cost.prefill_tokens() == MIN_TOKENS


def test_cost_fills_a_message_when_the_machine_is_fast() -> None:
    cost = StepCost(max_step_ms=200, max_alone_ms=1000, max_step_tokens=512)
    steps(cost, lambda num_tokens: 0.01 * num_tokens, 5)
    assert cost.prefill_tokens() == 512


def test_cost_makes_shorter_steps_at_once_when_the_context_grows() -> None:
    cost = StepCost(max_step_ms=200, max_alone_ms=1000, max_step_tokens=4096)
    steps(cost, lambda num_tokens: 0.5 * num_tokens, 30)
    assert cost.prefill_tokens() == pytest.approx(400, rel=0.05)
    cost.measured(cost.prefill_tokens(), 400.0)
    assert cost.prefill_tokens() == pytest.approx(200, rel=0.05)


def test_cost_changes_little_when_the_rest_of_a_prompt_is_short() -> None:
    cost = StepCost(max_step_ms=200, max_alone_ms=1000, max_step_tokens=4096)
    steps(cost, lambda num_tokens: 0.5 * num_tokens, 30)
    cost.measured(4, 20.0)
    assert cost.prefill_tokens() == pytest.approx(400, rel=0.2)


def test_cost_allows_longer_steps_when_a_sequence_is_the_only_one() -> None:
    cost = StepCost(max_step_ms=200, max_alone_ms=1000, max_step_tokens=512)
    steps(cost, lambda num_tokens: 4.0 * num_tokens, 30)
    assert cost.prefill_tokens() == pytest.approx(50, rel=0.05)
    assert cost.prefill_tokens(is_alone=True) == 192


@pytest.mark.parametrize(
    ("times_ms", "chosen"),
    [
        ({1: 10.0}, 1),
        ({1: 10.0, 2: 8.5}, 1),  # a second core saves less than a fifth
        ({1: 10.0, 2: 7.5}, 2),
        ({1: 16.0, 2: 8.0, 4: 4.0, 6: 3.6}, 4),
        ({1: 16.0, 2: 8.0, 4: 4.0, 6: 2.5}, 6),
        ({1: 8.0, 2: 9.0, 4: 5.0}, 4),  # each of two doublings saves a fifth
        ({1: 9.0, 2: 8.0, 3: 5.8}, 3),
        ({1: 8.0, 2: 9.0, 4: 5.5, 8: 0.1}, 1),  # give up after two doublings that save too little
    ],
)
def test_worthwhile_threads_stop_where_a_doubling_saves_less_than_a_fifth(
    times_ms: Mapping[int, float], chosen: int
) -> None:
    assert worthwhile(times_ms.__getitem__, list(times_ms)) == chosen


def test_thread_counts_are_powers_of_two_and_all_cores_and_later_the_choice_and_its_neighbours() -> None:
    assert [thread_counts(most) for most in (1, 2, 3, 12)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8, 12]]
    near = {chosen: thread_counts_near(chosen, 12) for chosen in (1, 4, 12)}
    assert near == {1: [1, 2, 4], 4: [2, 4, 8, 12], 12: [8, 12]}


@pytest.mark.parametrize(("device", "num_decodes"), [("cpu", 16), ("cuda", 1)])
def test_trials_take_pages_only_for_the_sequences_that_the_device_is_measured_with(
    device: str, num_decodes: int
) -> None:
    pages = list[int]()
    span: Any = SimpleNamespace(device=torch.device(device), new_pool=pages.append)
    StepTrials(span)
    assert pages == [PREFILL_TOKENS // PAGE_TOKENS + num_decodes]
