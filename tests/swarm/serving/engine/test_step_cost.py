"""The number of prompt tokens in a step follows what steps take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from swarm.serving.engine.step_cost import FIRST_TOKENS, MIN_TOKENS, StepCost


def steps(cost: StepCost, step_ms: Callable[[int], float], num_steps: int) -> list[float]:
    """The times of full steps one after another, on a machine that takes `step_ms` for so many prompt tokens."""
    times = []
    for _ in range(num_steps):
        num_tokens = cost.prefill_tokens()
        times.append(step_ms(num_tokens))
        cost.measured(num_tokens, times[-1])
    return times


@pytest.mark.parametrize("token_ms", [0.5, 2.0, 10.0])
def test_cost_steps_fill_the_bound_and_keep_to_it(token_ms: float) -> None:
    cost = StepCost(max_step_ms=200, max_alone_ms=1000, max_step_tokens=1024)
    cost.measured(0, 20.0)
    later = steps(cost, lambda num_tokens: 20 + token_ms * num_tokens, 30)[1:]
    assert max(later) <= 201
    assert later[-1] >= 140


def test_cost_before_any_measurement_a_step_is_short() -> None:
    assert StepCost(max_step_ms=200, max_alone_ms=1000, max_step_tokens=1024).prefill_tokens() == FIRST_TOKENS
    assert StepCost(max_step_ms=200, max_alone_ms=1000, max_step_tokens=8).prefill_tokens() == 8


def test_cost_a_machine_too_slow_for_the_bound_gets_on_nevertheless() -> None:
    cost = StepCost(max_step_ms=200, max_alone_ms=1000, max_step_tokens=1024)
    steps(cost, lambda num_tokens: 100.0 * num_tokens, 5)
    assert cost.prefill_tokens() == MIN_TOKENS
    cost.measured(0, 300.0)
    assert cost.prefill_tokens() == MIN_TOKENS


def test_cost_fast_machine_takes_what_a_message_holds() -> None:
    cost = StepCost(max_step_ms=200, max_alone_ms=1000, max_step_tokens=512)
    steps(cost, lambda num_tokens: 0.01 * num_tokens, 5)
    assert cost.prefill_tokens() == 512


def test_cost_longer_contexts_make_shorter_steps_at_once() -> None:
    cost = StepCost(max_step_ms=200, max_alone_ms=1000, max_step_tokens=4096)
    steps(cost, lambda num_tokens: 0.5 * num_tokens, 30)
    assert cost.prefill_tokens() == pytest.approx(400, rel=0.05)
    cost.measured(cost.prefill_tokens(), 400.0)
    assert cost.prefill_tokens() == pytest.approx(200, rel=0.05)


def test_cost_a_short_rest_of_a_prompt_changes_little() -> None:
    cost = StepCost(max_step_ms=200, max_alone_ms=1000, max_step_tokens=4096)
    steps(cost, lambda num_tokens: 0.5 * num_tokens, 30)
    cost.measured(4, 20.0)
    assert cost.prefill_tokens() == pytest.approx(400, rel=0.2)


def test_cost_the_only_seat_may_have_longer_steps() -> None:
    cost = StepCost(max_step_ms=200, max_alone_ms=1000, max_step_tokens=512)
    steps(cost, lambda num_tokens: 4.0 * num_tokens, 30)
    assert cost.prefill_tokens() == pytest.approx(50, rel=0.05)
    assert cost.prefill_tokens(is_alone=True) == 192
