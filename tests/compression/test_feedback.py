"""Error feedback loses nothing for good, bounds the residual, and is unchanged by a failed round."""

from __future__ import annotations

import pytest
import torch
from compression.vectors import any_vectors
from hypothesis import given
from swarm_compression import CodecError, ErrorFeedback, get_codec

NUM_VALUES = 1000


def rounds(num_rounds: int) -> list[torch.Tensor]:
    """Return rounds around a mean with values far below a 4-bit step, which a codec alone rounds to 0 every time."""
    generator = torch.Generator().manual_seed(0)
    mean_N = torch.randn(NUM_VALUES, generator=generator) ** 3
    return [mean_N + 0.1 * torch.randn(NUM_VALUES, generator=generator) for _ in range(num_rounds)]


@pytest.mark.parametrize("name", ["int8", "int4", "e3m0"])
def test_mean_error_over_many_rounds_vanishes_as_one_over_their_number(name: str) -> None:
    codec, vectors = get_codec(name), rounds(256)
    feedback, sent_N, errors = ErrorFeedback(codec, NUM_VALUES), torch.zeros(NUM_VALUES, dtype=torch.float64), {}
    for index, x_N in enumerate(vectors, start=1):
        sent_N += codec.decode(feedback.encode(x_N), NUM_VALUES)
        feedback.commit()
        errors[index] = float((sent_N - torch.stack(vectors[:index]).double().sum(0)).norm()) / index
    plain_N = torch.stack([codec.decode(codec.encode(x_N), NUM_VALUES) - x_N for x_N in vectors])
    assert errors[256] < errors[1] / 50
    assert errors[256] < float(plain_N.double().mean(0).norm()) / 5


@pytest.mark.parametrize(("name", "loss"), [("int8", 1 / 254), ("int4", 1 / 14), ("e3m0", 1 / 3)])
def test_residual_stays_under_its_bound(name: str, loss: float) -> None:
    feedback, codec = ErrorFeedback(get_codec(name), NUM_VALUES), get_codec(name)
    owed_N = torch.zeros(NUM_VALUES)
    largest = 0.0
    for x_N in rounds(100):
        largest = max(largest, float(x_N.abs().max()))
        owed_N += x_N - codec.decode(feedback.encode(x_N), NUM_VALUES)
        feedback.commit()
        assert float(owed_N.abs().max()) <= loss / (1 - loss) * largest * (1 + 1e-4)


@given(x_N=any_vectors)
def test_rollback_restores_the_state_before_the_round(x_N: torch.Tensor) -> None:
    x_N = x_N.clamp(-1e30, 1e30)
    feedback = ErrorFeedback(get_codec("int4"), x_N.numel())
    feedback.encode(x_N)
    feedback.commit()
    second = feedback.encode(x_N)
    assert feedback.encode(x_N) == second
    feedback.rollback()
    feedback.encode(-x_N)
    feedback.rollback()
    feedback.commit()  # nothing is pending
    assert feedback.encode(x_N) == second


def test_ranges_in_any_order_equal_the_whole() -> None:
    codec, (first_N, second_N) = get_codec("int4"), rounds(2)
    whole, cut = ErrorFeedback(codec, NUM_VALUES), ErrorFeedback(codec, NUM_VALUES)
    for x_N in (first_N, second_N):
        expected = codec.decode(whole.encode(x_N), NUM_VALUES)
        tail = codec.decode(cut.encode(x_N[640:], 640), NUM_VALUES - 640)
        assert torch.equal(torch.cat([codec.decode(cut.encode(x_N[:640]), 640), tail]), expected)
        whole.commit()
        cut.commit()


def test_encode_refuses_what_is_not_finite_or_outside_and_keeps_the_residual() -> None:
    feedback, x_N = ErrorFeedback(get_codec("int4"), NUM_VALUES), rounds(1)[0]
    feedback.encode(x_N)
    feedback.commit()
    expected = feedback.encode(x_N)
    for bad_N, start in [
        (torch.full((NUM_VALUES,), float("nan")), 0),
        (x_N, 1),
        (x_N[:10], -1),
        (torch.zeros(2, 2), 0),
    ]:
        with pytest.raises(CodecError):
            feedback.encode(bad_N, start)
    feedback.rollback()
    assert feedback.encode(x_N) == expected
