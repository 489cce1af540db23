"""Tests one replica's intervals: which samples they use, which results they repeat bit for bit, and how they fail."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.moments import whole
from swarm.training.data.corpus import Corpus
from swarm.training.inner.inner_loop import InnerLoop
from swarm.training.inner.one_device import LocalOptions
from swarm.training.run.layout import Layout
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_model import build_model, initial_theta
from swarm.training.run.run_tables import InnerConfig
from swarm_protocol.errors import IntegrityError, RoundError


@pytest.fixture
def theta_N(tiny_run: RunConfig) -> torch.Tensor:
    return initial_theta(tiny_run)


def _loop(run: RunConfig, corpus: Corpus, theta_N: torch.Tensor, inner: InnerConfig | None = None) -> InnerLoop:
    loop = InnerLoop(replace(run, inner=inner or run.inner), build_model(run.model), corpus)
    loop.load(theta_N)
    return loop


def test_flat_gives_the_bits_that_were_loaded(tiny_run: RunConfig, tiny_corpus: Corpus, theta_N: torch.Tensor) -> None:
    assert torch.equal(_loop(tiny_run, tiny_corpus, theta_N).flat(), theta_N)


def test_train_lowers_the_validation_loss(tiny_run: RunConfig, tiny_corpus: Corpus, theta_N: torch.Tensor) -> None:
    loop = _loop(tiny_run, tiny_corpus, theta_N, replace(tiny_run.inner, learning_rate=1e-2))
    before = loop.held_out_loss(theta_N, 64)
    result = loop.train(range(400), 200)
    assert abs(before - math.log(256)) < 0.1
    assert result.mean_loss < before
    assert loop.held_out_loss(loop.flat(), 64) < before - 1.0


def test_train_gives_the_same_bits_from_the_same_start(
    tiny_run: RunConfig, tiny_corpus: Corpus, theta_N: torch.Tensor
) -> None:
    results = []
    for _ in range(2):
        loop = _loop(tiny_run, tiny_corpus, theta_N)
        results.append((loop.train(range(8), 4).mean_loss, loop.flat()))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_train_gives_the_same_bits_again_for_a_model_with_dropout(tiny_run: RunConfig, tiny_corpus: Corpus) -> None:
    """GPT-2's configs set dropout by default."""
    model = {"model_type": "gpt2", "vocab_size": 256, "n_embd": 16, "n_layer": 2, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    run = replace(tiny_run, model={**model, **ends, "resid_pdrop": 0.5})
    theta_N = initial_theta(run)
    first, second = (_loop(run, tiny_corpus, theta_N) for _ in range(2))
    assert first.train(range(8), 4).mean_loss == second.train(range(8), 4).mean_loss
    assert torch.equal(first.flat(), second.flat())


def test_train_gives_another_result_for_other_samples(
    tiny_run: RunConfig, tiny_corpus: Corpus, theta_N: torch.Tensor
) -> None:
    loops = [_loop(tiny_run, tiny_corpus, theta_N) for _ in range(2)]
    loops[0].train(range(8), 4)
    loops[1].train(range(8, 16), 4)
    assert not torch.equal(loops[0].flat(), loops[1].flat())


def test_train_counts_the_steps_samples_and_tokens_of_a_full_interval(
    tiny_run: RunConfig, tiny_corpus: Corpus, theta_N: torch.Tensor
) -> None:
    result = _loop(tiny_run, tiny_corpus, theta_N).train(range(100), 4)
    assert (result.num_steps, result.num_samples, result.num_tokens) == (4, 8, 8 * 16)
    assert result.seconds > 0
    assert result.tokens_per_s == result.num_tokens / result.seconds


def test_train_uses_only_whole_batches_when_samples_are_too_few(
    tiny_run: RunConfig, tiny_corpus: Corpus, theta_N: torch.Tensor
) -> None:
    assert _loop(tiny_run, tiny_corpus, theta_N).train(range(5), 4).num_samples == 4


def test_train_uses_a_prefix_of_the_samples_when_it_is_stopped(
    tiny_run: RunConfig, tiny_corpus: Corpus, theta_N: torch.Tensor
) -> None:
    stopped, whole = (_loop(tiny_run, tiny_corpus, theta_N) for _ in range(2))
    answers = iter([False, False, True])
    result = stopped.train(range(100), 4, lambda: next(answers))
    assert (result.num_steps, result.num_samples) == (2, 4)
    whole.train(range(result.num_samples), 4)
    assert torch.equal(stopped.flat(), whole.flat())


def test_train_changes_nothing_when_it_is_stopped_at_once(
    tiny_run: RunConfig, tiny_corpus: Corpus, theta_N: torch.Tensor
) -> None:
    loop = _loop(tiny_run, tiny_corpus, theta_N)
    result = loop.train(range(100), 4, lambda: True)
    assert (result.num_steps, result.num_samples, result.num_tokens) == (0, 0, 0)
    assert math.isnan(result.mean_loss)
    assert torch.equal(loop.flat(), theta_N)


def test_train_raises_round_error_and_keeps_the_moments_when_the_loss_is_not_finite(
    tiny_run: RunConfig, tiny_corpus: Corpus, theta_N: torch.Tensor
) -> None:
    broken, sound = (_loop(tiny_run, tiny_corpus, theta_N) for _ in range(2))
    for loop in (broken, sound):
        loop.train(range(8), 4)
    broken.load(torch.full_like(theta_N, float("nan")))
    with pytest.raises(RoundError, match="training diverged: the loss is nan"):
        broken.train(range(8), 4)
    for loop in (broken, sound):
        loop.load(theta_N)
        loop.train(range(8), 4)
    assert torch.equal(broken.flat(), sound.flat())


def test_train_starts_with_small_steps_during_warm_up(
    tiny_run: RunConfig, tiny_corpus: Corpus, theta_N: torch.Tensor
) -> None:
    moved = []
    for warmup_steps in (0, 9):
        loop = _loop(tiny_run, tiny_corpus, theta_N, replace(tiny_run.inner, warmup_steps=warmup_steps))
        loop.train(range(2), 1)
        moved.append(float((loop.flat() - theta_N).abs().max()))
    assert moved[1] == pytest.approx(moved[0] / 10, rel=0.01)


def test_train_decays_matrices_but_not_norms(tiny_run: RunConfig, tiny_corpus: Corpus, theta_N: torch.Tensor) -> None:
    pieces = []
    for weight_decay in (0.0, 1.0):
        loop = _loop(tiny_run, tiny_corpus, theta_N, replace(tiny_run.inner, weight_decay=weight_decay))
        loop.train(range(2), 1)
        pieces.append(Layout.of(build_model(tiny_run.model)).unflatten(loop.flat()))
    for name, plain in pieces[0].items():
        assert torch.equal(plain, pieces[1][name]) == (plain.dim() < 2), name


def test_new_loop_with_loaded_state_continues_bit_for_bit(
    tiny_run: RunConfig, tiny_corpus: Corpus, theta_N: torch.Tensor
) -> None:
    first = _loop(tiny_run, tiny_corpus, theta_N)
    first.train(range(6), 3)
    state, middle_N = whole(first.state()), first.flat()
    second = _loop(tiny_run, tiny_corpus, middle_N)
    second.load_state(state)
    for loop in (first, second):
        loop.train(range(6, 12), 3)
    assert torch.equal(first.flat(), second.flat())


def test_load_state_accepts_a_state_from_before_the_first_step(
    tiny_run: RunConfig, tiny_corpus: Corpus, theta_N: torch.Tensor
) -> None:
    loops = [_loop(tiny_run, tiny_corpus, theta_N) for _ in range(2)]
    loops[1].load_state(whole(loops[0].state()))
    for loop in loops:
        loop.train(range(4), 2)
    assert torch.equal(loops[0].flat(), loops[1].flat())


def test_load_state_refuses_the_state_of_another_model(
    tiny_run: RunConfig, tiny_corpus: Corpus, theta_N: torch.Tensor
) -> None:
    loop = _loop(tiny_run, tiny_corpus, theta_N)
    moments = torch.zeros(theta_N.numel() - 1)
    state = {"num_steps": torch.tensor([3]), "adamw.exp_avg": moments, "adamw.exp_avg_sq": moments}
    with pytest.raises(IntegrityError, match="these moments are not of this model's adamw"):
        loop.load_state(state)


def test_validate_does_not_change_the_parameters_that_are_trained(
    tiny_run: RunConfig, tiny_corpus: Corpus, theta_N: torch.Tensor
) -> None:
    loop = _loop(tiny_run, tiny_corpus, theta_N)
    loop.train(range(8), 4)
    local_N = loop.flat()
    first = loop.held_out_loss(theta_N, 32)
    assert torch.equal(loop.flat(), local_N)
    assert loop.held_out_loss(theta_N, 32) == first
    assert loop.held_out_loss(local_N, 32) != first
    assert loop.held_out_loss(theta_N, 2, draw=3) != loop.held_out_loss(theta_N, 2)


def test_validate_uses_all_batches_when_more_are_asked_for(
    tiny_run: RunConfig, tiny_corpus: Corpus, theta_N: torch.Tensor
) -> None:
    loop = _loop(tiny_run, tiny_corpus, theta_N)
    assert loop.held_out_loss(theta_N, 16000) == loop.held_out_loss(theta_N, 32000)


def test_train_continues_with_a_fragment_that_was_taken_in_and_the_rest(
    tiny_run: RunConfig, tiny_corpus: Corpus, theta_N: torch.Tensor
) -> None:
    run = replace(tiny_run, fragments=2)
    loop = _loop(run, tiny_corpus, theta_N)
    loop.train(range(4), 2)
    local_N = loop.flat()
    first, second = (Layout.of(build_model(run.model), 2).slice(fragment) for fragment in range(2))
    loop.take_in(first, theta_N[first], 0.5)
    torch.testing.assert_close(loop.flat(first), 0.5 * local_N[first] + 0.5 * theta_N[first])
    assert torch.equal(loop.flat(second), local_N[second])
    other = _loop(run, tiny_corpus, loop.flat())
    other.load_state(whole(loop.state()))
    for each in (loop, other):
        each.train(range(4, 8), 2)
    assert torch.equal(loop.flat(), other.flat())


@pytest.mark.parametrize("done_steps", [0, 6, 11])
def test_train_follows_the_schedule_by_the_progress_of_the_run(
    tiny_run: RunConfig, tiny_corpus: Corpus, theta_N: torch.Tensor, done_steps: int
) -> None:
    """The run has 3 outer steps of 4 inner ones. AdamW's first step moves by the learning rate, whatever the loss."""
    moved = []
    for schedule in ("constant", "linear"):
        inner = replace(tiny_run.inner, schedule=schedule, final_ratio=0.2, weight_decay=0.0)
        loop = _loop(tiny_run, tiny_corpus, theta_N, inner)
        loop.train(range(2), 1, done_steps=done_steps)
        moved.append(float((loop.flat() - theta_N).abs().max()))
    assert moved[1] / moved[0] == pytest.approx(1.0 - 0.8 * done_steps / 11, rel=0.01)


def test_train_gives_the_same_result_in_two_stretches_as_in_one(
    tiny_run: RunConfig, tiny_corpus: Corpus, theta_N: torch.Tensor
) -> None:
    inner = replace(tiny_run.inner, schedule="cosine", optimizer="muon")
    whole, parts = (_loop(tiny_run, tiny_corpus, theta_N, inner) for _ in range(2))
    whole.train(range(8), 4)
    parts.train(range(8), 1)
    parts.train(range(2, 8), 3, done_steps=1)
    assert torch.equal(whole.flat(), parts.flat())


def test_train_with_muon_lowers_the_validation_loss(
    tiny_run: RunConfig, tiny_corpus: Corpus, theta_N: torch.Tensor
) -> None:
    loop = _loop(tiny_run, tiny_corpus, theta_N, replace(tiny_run.inner, optimizer="muon", learning_rate=1e-2))
    loop.train(range(200), 100)
    assert loop.held_out_loss(loop.flat(), 64) < loop.held_out_loss(theta_N, 64) - 1.0


def test_restarted_member_continues_bit_for_bit_with_muon(
    tiny_run: RunConfig, tiny_corpus: Corpus, theta_N: torch.Tensor
) -> None:
    inner = replace(tiny_run.inner, optimizer="muon", schedule="linear")
    uninterrupted = _loop(tiny_run, tiny_corpus, theta_N, inner)
    uninterrupted.train(range(6), 3)
    restarted = _loop(tiny_run, tiny_corpus, uninterrupted.flat(), inner)
    restarted.load_state(whole(uninterrupted.state()))
    for loop in (uninterrupted, restarted):
        loop.train(range(6, 12), 3, done_steps=3)
    assert torch.equal(uninterrupted.flat(), restarted.flat())


def test_train_raises_round_error_with_a_remedy_when_device_is_out_of_memory(
    tiny_run: RunConfig, tiny_corpus: Corpus
) -> None:
    def fill(model: torch.nn.Module, x_BT: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    loop = InnerLoop(tiny_run, build_model(tiny_run.model), tiny_corpus, loss=fill)
    with pytest.raises(RoundError, match="no memory left for a step: CUDA out of memory") as caught:
        loop.train(range(8), 4)
    assert "micro_batch_windows" in caught.value.remedy


@pytest.mark.parametrize(
    "options", [{"micro_batch_windows": 1}, {"autocast": True}, {"activation_checkpointing": True}], ids=str
)
def test_train_of_a_transformers_model_gives_nearly_the_same_result_with_each_option(
    tiny_run: RunConfig, tiny_corpus: Corpus, theta_N: torch.Tensor, options: dict[str, Any]
) -> None:
    plain = _loop(tiny_run, tiny_corpus, theta_N)
    special = InnerLoop(tiny_run, build_model(tiny_run.model), tiny_corpus, LocalOptions(**options))
    special.load(theta_N)
    expected = plain.train(range(8), 4).mean_loss
    assert special.train(range(8), 4).mean_loss == pytest.approx(expected, rel=1e-3)
    assert special.held_out_loss(theta_N, 32) == pytest.approx(plain.held_out_loss(theta_N, 32), rel=1e-6)
    special.close()


def test_load_state_refuses_the_state_of_another_optimizer(
    tiny_run: RunConfig, tiny_corpus: Corpus, theta_N: torch.Tensor
) -> None:
    loops = [
        _loop(tiny_run, tiny_corpus, theta_N, replace(tiny_run.inner, optimizer=each)) for each in ("adamw", "muon")
    ]
    for loop in loops:
        loop.train(range(2), 1)
    with pytest.raises(IntegrityError, match="not of this model's adamw"):
        loops[0].load_state(whole(loops[1].state()))
