"""Tests of how much noise in the logits explains a drawn token, given the client's seed."""

from __future__ import annotations

import random

import pytest
import torch
from swarm.serving.checking.comparison import LargestLogits, draw_noise
from swarm.serving.sampling.drawing import pick
from swarm_protocol.session_frames import TokenDraw
from torch import Tensor


def largest(logits_V: Tensor, draw: TokenDraw, num: int = 64) -> LargestLogits:
    values, ids = logits_V.topk(min(num, len(logits_V)))
    log_sum = float((logits_V.double() / (draw.temperature or 1.0)).logsumexp(0))
    return LargestLogits(values_K=values.double().numpy(), ids_K=ids.numpy(), log_sum=log_sum)


def some_draw(rng: random.Random, temperature: float) -> TokenDraw:
    return TokenDraw(
        temperature=temperature,
        top_p=rng.choice([1.0, 0.95, 0.5, 0.1]),
        top_k=rng.choice([0, 0, 5, 40, 100]),
        min_p=rng.choice([0.0, 0.05, 0.5]),
        seed=rng.randrange(2**40),
        index=rng.randrange(100),
    )


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("noise", [0.0, 1e-5, 1e-2])
def test_draw_needs_at_most_the_noise_that_was_added_to_its_logits(temperature: float, noise: float) -> None:
    rng, generator = random.Random(f"{temperature} {noise}"), torch.Generator().manual_seed(0)
    for _ in range(150):
        logits_V = torch.randn(rng.choice([10, 100, 1000]), generator=generator)
        off_V = logits_V + (2 * torch.rand(len(logits_V), generator=generator) - 1) * noise
        draw = some_draw(rng, temperature)
        found = draw_noise(largest(logits_V, draw), draw, pick(off_V, draw))
        assert found <= noise * (1 + 1e-4) + 1e-6


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_most_tokens_that_were_not_drawn_need_more_noise_than_honest_servers_have(temperature: float) -> None:
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    needed = []
    for _ in range(200):
        logits_V = 2 * torch.randn(300, generator=generator)
        draw = TokenDraw(temperature=temperature, seed=rng.randrange(2**40), index=3)
        other = pick(logits_V, TokenDraw(temperature=1.0, seed=rng.randrange(2**40), index=4))
        needed.append(draw_noise(largest(logits_V, draw), draw, other))
    assert sum(noise > 0.05 for noise in needed) > 120


def test_each_draw_of_an_answer_can_be_recomputed_alone() -> None:
    logits_V = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    draws = [TokenDraw(temperature=1.0, seed=99, index=index) for index in range(50)]
    tokens = [pick(logits_V, draw) for draw in draws]
    assert [pick(logits_V, draw) for draw in reversed(draws)] == tokens[::-1], "a draw must not depend on other draws"
    assert len(set(tokens)) > 30
