"""What a server says that a block takes follows what its passes took, whatever was measured before."""

from __future__ import annotations

import pytest
from swarm.serving.engine.observed_speed import MEASURED_PASSES, WINDOW_PASSES, ObservedSpeed
from swarm.serving.model.measure import SpanSpeed

MEASURED = SpanSpeed(prefill_ms=2.0, decode_ms=100.0, kv_bytes_per_token=8)


def observed(*passes: tuple[int, int, float], measured: SpanSpeed = MEASURED) -> SpanSpeed:
    """After passes over four blocks: decodes, prompt tokens, milliseconds."""
    speed = ObservedSpeed(measured)
    for num_decodes, num_prefill_tokens, pass_ms in passes:
        speed.passed(num_decodes, num_prefill_tokens, 4, pass_ms)
    return speed.speed


def test_before_any_pass_it_is_what_was_measured() -> None:
    assert observed() == MEASURED


def test_single_tokens_are_believed_once_most_passes_say_so() -> None:
    assert observed(*[(1, 0, 8.0)] * (MEASURED_PASSES - 1)).decode_ms == 100
    assert observed(*[(1, 0, 8.0)] * (MEASURED_PASSES + 1)).decode_ms == 2
    assert observed(*[(1, 0, 800.0)] * (MEASURED_PASSES + 1)).decode_ms == 200


def test_a_pause_of_the_machine_moves_nothing() -> None:
    assert observed(*[(1, 0, 8.0)] * 40, *[(1, 0, 4000.0)] * 10).decode_ms == 2


def test_several_tokens_show_only_that_one_takes_less() -> None:
    assert observed(*[(16, 0, 40.0)] * WINDOW_PASSES).decode_ms == 10
    assert observed(*[(16, 0, 4000.0)] * WINDOW_PASSES).decode_ms == 100


@pytest.mark.parametrize(("num_decodes", "num_prefill_tokens", "expected"), [(0, 64, 0.5), (1, 64, 2.0), (0, 8, 2.0)])
def test_prompts_tell_when_they_are_long_and_alone(num_decodes: int, num_prefill_tokens: int, expected: float) -> None:
    pass_ms = 0.5 * num_prefill_tokens * 4
    found = observed(*[(num_decodes, num_prefill_tokens, pass_ms)] * WINDOW_PASSES)
    assert (found.prefill_ms, found.decode_ms) == (expected, 100)


def test_measured_again_once_is_half_believed_and_twice_it_is() -> None:
    speed = ObservedSpeed(MEASURED)
    speed.measured_again(2.0, 0.5)
    assert speed.speed.decode_ms == 51
    speed.measured_again(2.0, 0.5)
    assert (speed.speed.decode_ms, speed.speed.prefill_ms) == (2, 0.5)
