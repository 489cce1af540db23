from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from swarm.serving.sampling import Sampling, pick
from swarm_protocol.errors import ConfigError

LOGITS = torch.tensor([1.0, 3.0, 2.0, 3.0, -1.0])
PINNED = [2, 1, 3, 3, 1, 3, 3, 1, 1, 1, 1, 1]


def shares(sampling: Sampling, num_draws: int = 4000) -> dict[int, float]:
    counts = Counter(pick(LOGITS, sampling, index) for index in range(num_draws))
    return {token_id: count / num_draws for token_id, count in counts.items()}


def test_greedy_takes_the_largest_and_of_equals_the_first() -> None:
    assert pick(LOGITS, Sampling(), 0) == 1


def test_sampling_follows_the_probabilities() -> None:
    expected = torch.softmax(LOGITS.double(), 0)
    found = shares(Sampling(temperature=1.0, seed=3))
    for token_id, probability in enumerate(expected):
        assert found.get(token_id, 0.0) == pytest.approx(float(probability), abs=0.03)


def test_sampling_low_temperature_sharpens() -> None:
    assert set(shares(Sampling(temperature=0.01, seed=3), 200)) == {1, 3}


def test_top_k_keeps_the_k_likeliest() -> None:
    assert set(shares(Sampling(temperature=5.0, top_k=3, seed=1), 500)) == {1, 2, 3}
    assert set(shares(Sampling(temperature=5.0, top_k=99, seed=1), 2000)) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    # 0.397, 0.397, 0.146, 0.054, 0.007
    assert set(shares(Sampling(temperature=1.0, top_p=0.79, seed=1), 500)) == {1, 3}
    assert set(shares(Sampling(temperature=1.0, top_p=0.80, seed=1), 500)) == {1, 2, 3}
    assert set(shares(Sampling(temperature=1.0, top_p=1e-9, seed=1), 500)) == {1}


def test_seed_gives_the_same_tokens_again_from_any_position() -> None:
    sampling = Sampling(temperature=1.0, seed=42)
    tokens = [pick(LOGITS, sampling, index) for index in range(50)]
    assert [pick(LOGITS, sampling, index) for index in range(49, -1, -1)] == tokens[::-1]
    assert [pick(LOGITS, Sampling(temperature=1.0, seed=43), index) for index in range(50)] != tokens


def test_seed_draws_are_pinned() -> None:
    """The same on every machine and with every torch: a change here changes everyone's seeded answers."""
    sampling = Sampling(temperature=1.0, seed=7)
    assert [pick(LOGITS, sampling, index) for index in range(12)] == PINNED


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20),
    st.floats(0, 100),
    st.floats(1e-6, 1),
    st.integers(0, 30),
    st.integers(-(2**63) + 1, 2**63 - 1),
)
def test_pick_any_logits_and_settings_is_a_token(
    logits: list[float], temperature: float, top_p: float, top_k: int, seed: int
) -> None:
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    assert 0 <= pick(torch.tensor(logits), sampling, 3) < len(logits)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": 101},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"top_k": -1},
        {"seed": 2**63},
        {"stop": ("",)},
        {"stop": ("x" * 300,)},
        {"stop": tuple("abcdefghijklmnopq")},
    ],
    ids=str,
)
def test_settings_without_meaning_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Sampling(**values)
