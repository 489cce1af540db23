from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from swarm.serving.sampling import drawing
from swarm.serving.sampling.drawing import edited, pick, pick_all
from swarm.serving.sampling.sampling import LogitEdits, Pick, Sampling, uniform
from swarm_protocol.errors import ConfigError
from swarm_protocol.sampler import Grammar, Sampler
from swarm_protocol.session_frames import SampledToken, TokenDraw
from torch import Tensor
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

LOGITS = torch.tensor([1.0, 3.0, 2.0, 3.0, -1.0])
GRAMMAR = Grammar(kind="lark", text='start: "a"')
PINNED = [2, 1, 3, 3, 1, 3, 3, 1, 1, 1, 1, 1]


def shares(draw: TokenDraw, num_draws: int = 4000) -> dict[int, float]:
    counts = Counter(pick(LOGITS, replace(draw, index=index)) for index in range(num_draws))
    return {token_id: count / num_draws for token_id, count in counts.items()}


def test_greedy_takes_the_largest_and_of_equals_the_first() -> None:
    assert pick(LOGITS, TokenDraw()) == 1


def test_sampling_follows_the_probabilities() -> None:
    expected = torch.softmax(LOGITS.double(), 0)
    found = shares(TokenDraw(temperature=1.0, seed=3))
    for token_id, probability in enumerate(expected):
        assert found.get(token_id, 0.0) == pytest.approx(float(probability), abs=0.03)


def test_sampling_low_temperature_sharpens() -> None:
    assert set(shares(TokenDraw(temperature=0.01, seed=3), 200)) == {1, 3}


def test_top_k_keeps_the_k_likeliest() -> None:
    assert set(shares(TokenDraw(temperature=2.0, top_k=3, seed=1), 500)) == {1, 2, 3}
    assert set(shares(TokenDraw(temperature=2.0, top_k=99, seed=1), 2000)) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    # 0.397, 0.397, 0.146, 0.054, 0.007
    assert set(shares(TokenDraw(temperature=1.0, top_p=0.79, seed=1), 500)) == {1, 3}
    assert set(shares(TokenDraw(temperature=1.0, top_p=0.80, seed=1), 500)) == {1, 2, 3}
    assert set(shares(TokenDraw(temperature=1.0, top_p=1e-9, seed=1), 500)) == {1}


def test_seed_gives_the_same_tokens_again_from_any_position() -> None:
    draw = TokenDraw(temperature=1.0, seed=42)
    tokens = [pick(LOGITS, replace(draw, index=index)) for index in range(50)]
    assert [pick(LOGITS, replace(draw, index=index)) for index in range(49, -1, -1)] == tokens[::-1]
    assert [pick(LOGITS, TokenDraw(temperature=1.0, seed=43, index=index)) for index in range(50)] != tokens


def drawn_from_all(logits_V: Tensor, draw: TokenDraw) -> int:
    """Draw from all sorted tokens, without trying the likeliest first."""
    sorted_V, ids_V = torch.sort(logits_V.double() / draw.temperature, descending=True, stable=True)
    if draw.min_p:
        sorted_V = sorted_V[sorted_V >= sorted_V[0] + math.log(draw.min_p)]
    shares_V = torch.softmax(sorted_V[: draw.top_k or None], 0)
    reached_V = shares_V.cumsum(0)
    reached_V = reached_V[: int((reached_V < draw.top_p).sum()) + 1]
    goal = uniform(draw.seed, draw.index) * float(reached_V[-1])
    return int(ids_V[int((reached_V <= goal).sum())])


@pytest.mark.parametrize("spread", [0.3, 2.0, 8.0])
@pytest.mark.parametrize(
    "how",
    [{}, {"top_p": 0.9}, {"top_p": 0.3}, {"top_k": 5}, {"top_k": 300}, {"min_p": 0.05}, {"top_p": 0.9, "top_k": 40}],
    ids=str,
)
def test_draw_among_the_likeliest_gives_the_token_of_a_draw_from_all(
    how: dict[str, Any], spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "NUM_LIKELIEST", 30)
    generator = torch.Generator().manual_seed(0)
    # few different numbers, so that some are equal
    logits = [(spread * torch.randn(1000, generator=generator)).bfloat16() for _ in range(40)]
    draws = [TokenDraw(temperature=0.8, seed=1, index=index, **how) for index in range(40)]
    assert [*map(pick, logits, draws)] == [*map(drawn_from_all, logits, draws)]


def test_draw_does_not_sort_the_vocabulary_when_the_token_is_among_the_likeliest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sort, sizes = torch.argsort, []
    monkeypatch.setattr(torch, "argsort", lambda values, **how: (sizes.append(len(values)), sort(values, **how))[1])
    logits = 8 * torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    for how in ({}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.01}):
        pick(logits, TokenDraw(temperature=1.0, seed=1, **how))
    assert len(sizes) >= 4
    assert max(sizes) < 10_000


def test_seed_draws_are_pinned() -> None:
    """Draws are the same on every machine and with every torch. A change here changes all seeded answers."""
    draw = TokenDraw(temperature=1.0, seed=7)
    assert [pick(LOGITS, replace(draw, index=index)) for index in range(12)] == PINNED


class OnApplesDevice(Tensor):
    """A stand-in for a tensor of a device without float64."""

    @property
    def device(self) -> torch.device:
        return torch.device("mps")

    def double(self) -> Tensor:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    def cpu(self) -> Tensor:
        return self.as_subclass(Tensor)


def test_seed_draws_are_the_same_on_a_device_without_float64() -> None:
    draw, logits_V = TokenDraw(temperature=1.0, seed=7), LOGITS.as_subclass(OnApplesDevice)
    assert [pick(logits_V, replace(draw, index=index)) for index in range(12)] == PINNED


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20),
    st.floats(0, 2),
    st.floats(1e-6, 1),
    st.integers(0, 30),
    st.integers(-(2**63) + 1, 2**63 - 1),
)
def test_pick_gives_a_token_for_any_logits_and_settings(
    logits: list[float], temperature: float, top_p: float, top_k: int, seed: int
) -> None:
    draw = TokenDraw(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, index=3)
    assert 0 <= pick(torch.tensor(logits), draw) < len(logits)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": 2.1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"top_k": -1},
        {"top_k": 1.5},
        {"temperature": "1"},
        {"seed": True},
        {"seed": 2**63},
        {"min_p": 1.1},
        {"presence_penalty": 2.1},
        {"frequency_penalty": math.nan},
        {"repetition_penalty": 0},
        {"logit_bias": ((1, 101.0),)},
        {"logit_bias": ((-1, 1.0),)},
        {"logit_bias": ((1, 1.0), (1, 2.0))},
        {"stop_token_ids": (-1,)},
        {"stop_token_ids": tuple(range(65))},
        {"min_tokens": -1},
        {"grammar": GRAMMAR, "min_tokens": 1},
        {"grammar": GRAMMAR, "ignore_eos": True},
        {"stop": ("",)},
        {"stop": ("x" * 300,)},
        {"stop": tuple("abcdefghijklmnopqrstuvwxyzABCDEFG")},
    ],
    ids=str,
)
def test_sampling_settings_outside_their_bounds_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Sampling(**values)


def test_penalty_outside_its_bounds_is_refused_with_these() -> None:
    with pytest.raises(ConfigError, match="up to 100"):
        Sampling(repetition_penalty=101)
    Sampling(repetition_penalty=100)


def picked_all(logits: Sequence[Tensor], picks: Sequence[Pick]) -> list[SampledToken]:
    found = pick_all(logits, picks)
    assert None not in found
    return [picked for picked in found if picked]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pick_all_gives_each_row_what_it_gets_alone(dtype: torch.dtype) -> None:
    logits = torch.randn(12, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    draws = [TokenDraw(temperature=0.7 * (row % 3), seed=row, top_p=0.8, index=row) for row in range(12)]
    found = [picked.token_id for picked in picked_all(list(logits), list(map(Pick, draws)))]
    assert found == [pick(logits[row].float(), draws[row]) for row in range(12)]


def test_pick_all_of_equal_logits_takes_the_first() -> None:
    assert picked_all([LOGITS], [Pick(TokenDraw())])[0].token_id == 1


def test_pick_all_probabilities_are_of_the_models_own_logits() -> None:
    """They do not depend on temperature and cuts."""
    expected = torch.log_softmax(LOGITS, dim=0).tolist()
    for num_logprobs, ids in ((0, []), (2, [1, 3]), (3, [1, 3, 2]), (20, [1, 3, 2, 0, 4])):
        picked = picked_all([LOGITS], [Pick(TokenDraw(temperature=2.0, top_k=1, num_logprobs=num_logprobs))])[0]
        assert picked.token_id == 1
        assert picked.logprob == pytest.approx(expected[1])
        assert [token_id for token_id, _ in picked.top] == ids
        assert [value for _, value in picked.top] == pytest.approx([expected[token_id] for token_id in ids])


def test_pick_all_returns_no_probabilities_unless_asked() -> None:
    picked = picked_all([LOGITS], [Pick(TokenDraw())])[0]
    assert (picked.logprob, picked.top) == (None, ())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_pick_all_finds_no_token_in_numbers_that_are_not_finite(temperature: float) -> None:
    rows = [torch.tensor(row) for row in ([1.0, math.nan], [math.inf, 1.0], [-math.inf, -math.inf], [-math.inf, 2.0])]
    found = pick_all(rows, [Pick(TokenDraw(temperature=temperature))] * 4)
    assert [picked and picked.token_id for picked in found] == [None, None, None, 1]


VOCAB = 40
VOCAB_LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 3


def ids(*token_ids: int) -> bytes:
    return np.array(token_ids, dtype="<i4").tobytes()


def test_repetition_penalty_equals_transformers_over_prompt_and_answer() -> None:
    sampler = Sampler(repetition_penalty=1.7, prompt_ids=ids(3, 4, 3))
    found = edited(VOCAB_LOGITS, LogitEdits(sampler=sampler, counts={4: 2, 9: 1}))
    seen = torch.tensor([[3, 4, 3, 4, 4, 9]])
    assert torch.equal(found, RepetitionPenaltyLogitsProcessor(1.7)(seen, VOCAB_LOGITS[None].clone())[0])


def test_presence_and_frequency_penalties_follow_openais_formula() -> None:
    sampler = Sampler(presence_penalty=0.5, frequency_penalty=-0.25, prompt_ids=ids(1))
    found = edited(VOCAB_LOGITS, LogitEdits(sampler=sampler, counts={4: 3, 9: 1}))
    expected = VOCAB_LOGITS.clone()
    expected[4] -= 0.5 - 0.25 * 3
    expected[9] -= 0.5 - 0.25
    assert torch.equal(found, expected)


def test_bias_is_added_and_forbidden_tokens_never_come() -> None:
    sampler = Sampler(bias_ids=(7, 8), bias_values=(100.0, -100.0))
    found = edited(VOCAB_LOGITS, LogitEdits(sampler=sampler, banned=(7,)))
    assert found[7] == -torch.inf
    assert found[8] == VOCAB_LOGITS[8] - 100
    only = edited(VOCAB_LOGITS, LogitEdits(sampler=Sampler(), allowed=bytes([0, 0b100, 0, 0, 0])))
    assert only.isfinite().nonzero().flatten().tolist() == [10]
    assert VOCAB_LOGITS.isfinite().all(), "the model's own logits must stay as they are"


def test_edited_draws_use_the_remaining_tokens_and_report_the_models_probabilities() -> None:
    edits = LogitEdits(sampler=Sampler(), allowed=bytes([0b1110, 0, 0, 0, 0]))
    for temperature in (0.0, 1.5):
        picks = [
            Pick(TokenDraw(temperature=temperature, seed=3, index=index, num_logprobs=1), edits) for index in range(30)
        ]
        found = pick_all([VOCAB_LOGITS] * 30, picks)
        assert {picked.token_id for picked in found if picked} <= {1, 2, 3}
        for picked in found:
            assert picked is not None
            assert picked.logprob == pytest.approx(float(VOCAB_LOGITS.log_softmax(0)[picked.token_id]))


def test_draw_finds_no_token_when_none_is_left() -> None:
    logits = torch.tensor([1.0, -torch.inf])
    edits = LogitEdits(sampler=Sampler(), allowed=bytes([0b10]))
    assert pick_all([logits], [Pick(TokenDraw(), edits)]) == [None]


@pytest.mark.parametrize("temperature", [0.5, 1.3])
def test_min_p_keeps_the_tokens_that_transformers_keeps(temperature: float) -> None:
    kept = MinPLogitsWarper(0.1)(torch.empty(1, 0), VOCAB_LOGITS[None] / temperature)[0].isfinite().nonzero().flatten()
    draw = TokenDraw(temperature=temperature, min_p=0.1, seed=5)
    drawn = {pick(VOCAB_LOGITS, replace(draw, index=index)) for index in range(2000)}
    assert drawn <= set(kept.tolist())
    assert len(drawn) >= len(kept) - 1, "all of them must be kept"
    assert pick(VOCAB_LOGITS, TokenDraw(temperature=1.0, min_p=1.0, seed=5, index=3)) == int(VOCAB_LOGITS.argmax())
