from __future__ import annotations

import pytest
from swarm.training.inner.optimizers import schedule_factor, warmup_factor
from swarm.training.run.run_config import InnerConfig


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [1.0, 0.2 + 0.8 * 0.853553, 0.6, 0.2 + 0.8 * 0.146447, 0.2]),
    ],
)
def test_schedule_factor_goes_from_one_to_the_final_ratio(schedule: str, expected: list[float]) -> None:
    config = InnerConfig(schedule=schedule, final_ratio=0.2)
    assert [schedule_factor(config, step, 5) for step in range(5)] == pytest.approx(expected, abs=1e-5)


def test_schedule_factor_beyond_the_last_step_is_the_last_one() -> None:
    config = InnerConfig(schedule="cosine", final_ratio=0.1)
    assert schedule_factor(config, 1000, 5) == schedule_factor(config, 4, 5) == pytest.approx(0.1)


def test_schedule_factor_of_a_single_step_is_one() -> None:
    assert schedule_factor(InnerConfig(schedule="linear"), 0, 1) == 1.0


def test_warmup_factor_rises_to_one_and_stays() -> None:
    assert [warmup_factor(InnerConfig(warmup_steps=3), step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert warmup_factor(InnerConfig(warmup_steps=0), 0) == 1.0
