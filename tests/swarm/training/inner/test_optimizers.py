"""Tests which parameters the inner optimizers move, and that moments continue bit for bit or are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.moments import whole
from swarm.training.inner.optimizers import InnerOptimizer, schedule_factor, warmup_factor
from swarm.training.run.run_tables import InnerConfig
from swarm_protocol.errors import IntegrityError
from torch import Tensor, nn

ADAMW = InnerConfig(warmup_steps=2)
MUON = replace(ADAMW, optimizer="muon")
HIDDEN = ("layers.0.weight", "layers.1.weight")


def _parameters() -> dict[str, nn.Parameter]:
    noise = torch.Generator().manual_seed(3)
    shapes = {
        "embed.weight": (6, 4),
        "layers.0.bias": (4,),
        "layers.0.weight": (4, 5),
        "layers.1.weight": (5, 4),
        "head": (4, 6),
    }
    return {name: nn.Parameter(torch.randn(shape, generator=noise)) for name, shape in shapes.items()}


def _take_steps(optimizer: InnerOptimizer, parameters: dict[str, nn.Parameter], first: int, last: int) -> None:
    for step in range(first, last):
        noise = torch.Generator().manual_seed(step)
        for each in parameters.values():
            each.grad = torch.randn(each.shape, generator=noise)
        optimizer.step(0.5)


def _values(parameters: dict[str, nn.Parameter]) -> Tensor:
    return torch.cat([each.detach().flatten() for each in parameters.values()])


def test_muon_moves_hidden_matrices_and_adamw_the_rest() -> None:
    moved = {}
    for config in (ADAMW, MUON):
        parameters = _parameters()
        _take_steps(InnerOptimizer(config, parameters), parameters, 0, 3)
        moved[config.optimizer] = parameters
    for name, by_muon in moved["muon"].items():
        assert torch.equal(by_muon, moved["adamw"][name]) == (name not in HIDDEN), name


def test_muon_moves_a_matrix_by_a_nearly_orthogonal_one() -> None:
    """Its singular values are near one, times the learning rate and 0.2 sqrt(max(rows, columns)), which is the size of
    AdamW's steps."""
    config = replace(MUON, weight_decay=0.0, warmup_steps=0, muon_momentum=0.0, learning_rate=0.01)
    before, after = _parameters(), _parameters()
    _take_steps(InnerOptimizer(config, after), after, 0, 1)
    for name in HIDDEN:
        sizes = torch.linalg.svdvals((after[name] - before[name]).detach()) / (0.01 * 0.5 * 0.2 * 5**0.5)
        assert bool((sizes > 0.6).all()), name
        assert bool((sizes < 1.3).all()), name


@pytest.mark.parametrize("config", [ADAMW, MUON], ids=["adamw", "muon"])
def test_step_has_the_same_bits_as_torchs_own_optimizers(config: InnerConfig) -> None:
    config = replace(config, warmup_steps=0, fresh_moments=True)
    ours, theirs = _parameters(), _parameters()
    optimizer = InnerOptimizer(config, ours)
    by_muon = HIDDEN if config.optimizer == "muon" else ()
    rest = [each for name, each in theirs.items() if name not in by_muon]
    rate, decay = config.learning_rate * 0.5, config.weight_decay
    groups = [
        {"params": [each for each in rest if each.dim() >= 2], "weight_decay": decay},
        {"params": [each for each in rest if each.dim() < 2], "weight_decay": 0.0},
    ]
    expected: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=rate, betas=(config.beta1, config.beta2), fused=True)
    ]
    if matrices := [theirs[name] for name in by_muon]:
        momentum = config.muon_momentum
        expected.append(
            torch.optim.Muon(matrices, lr=rate, momentum=momentum, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        )
    for step in range(4):
        _take_steps(optimizer, ours, step, step + 1)
        for name, each in theirs.items():
            each.grad = ours[name].grad
        for each_optimizer in expected:
            each_optimizer.step()
    assert torch.equal(_values(ours), _values(theirs))


def test_step_leaves_frozen_parameters_unchanged() -> None:
    parameters = _parameters()
    parameters["layers.0.weight"].requires_grad_(False)
    before = parameters["layers.0.weight"].clone()
    optimizer = InnerOptimizer(MUON, parameters)
    _take_steps(optimizer, {name: each for name, each in parameters.items() if each.requires_grad}, 0, 2)
    assert torch.equal(parameters["layers.0.weight"], before)
    assert whole(optimizer.state())["muon.momentum_buffer"].numel() == 20


@pytest.mark.parametrize("config", [ADAMW, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("num_before", [0, 1, 4])
def test_loaded_state_continues_bit_for_bit(config: InnerConfig, num_before: int) -> None:
    parameters = _parameters()
    optimizer = InnerOptimizer(config, parameters)
    _take_steps(optimizer, parameters, 0, num_before)
    restarted = {name: nn.Parameter(each.detach().clone()) for name, each in parameters.items()}
    successor = InnerOptimizer(config, restarted)
    successor.load_state(whole(optimizer.state()))
    _take_steps(optimizer, parameters, num_before, 6)
    _take_steps(successor, restarted, num_before, 6)
    assert torch.equal(_values(parameters), _values(restarted))
    assert all(torch.equal(value, whole(successor.state())[key]) for key, value in whole(optimizer.state()).items())


def test_load_state_forgets_the_moments_when_the_loaded_replica_took_no_step() -> None:
    parameters, fresh = _parameters(), _parameters()
    optimizer, untouched = InnerOptimizer(MUON, parameters), InnerOptimizer(MUON, fresh)
    state = whole(optimizer.state())
    _take_steps(optimizer, parameters, 0, 3)
    for name, each in fresh.items():
        parameters[name].data.copy_(each)
    optimizer.load_state(state)
    _take_steps(optimizer, parameters, 0, 2)
    _take_steps(untouched, fresh, 0, 2)
    assert torch.equal(_values(parameters), _values(fresh))


@pytest.mark.parametrize(("theirs", "ours"), [(ADAMW, MUON), (MUON, ADAMW)], ids=["adamw in muon", "muon in adamw"])
def test_load_state_refuses_another_optimizers_state_and_changes_nothing(
    theirs: InnerConfig, ours: InnerConfig
) -> None:
    foreign = _parameters()
    other = InnerOptimizer(theirs, foreign)
    _take_steps(other, foreign, 0, 2)
    parameters = _parameters()
    optimizer = InnerOptimizer(ours, parameters)
    _take_steps(optimizer, parameters, 0, 1)
    before = whole(optimizer.state())
    with pytest.raises(IntegrityError, match=f"these moments are not of this model's {ours.optimizer}") as caught:
        optimizer.load_state(whole(other.state()))
    assert caught.value.remedy
    assert all(torch.equal(value, whole(optimizer.state())[key]) for key, value in before.items())


@given(
    key=st.sampled_from(["num_steps", "adamw.exp_avg", "adamw.exp_avg_sq", "muon.momentum_buffer", "more"]),
    damage=st.sampled_from(["missing", "shorter", "longer", "square", "negative"]),
)
def test_load_state_refuses_a_damaged_state(key: str, damage: str) -> None:
    parameters = _parameters()
    optimizer = InnerOptimizer(MUON, parameters)
    _take_steps(optimizer, parameters, 0, 1)
    state = whole(optimizer.state())
    piece = state.pop(key, torch.ones(1))
    if key == "more" or damage == "longer":
        state[key] = torch.cat([piece, piece])
    elif damage == "shorter":
        state[key] = piece[1:]
    elif damage == "square":
        state[key] = piece[None]
    elif damage == "negative":
        state |= {key: piece, "num_steps": torch.tensor([-3])}
    with pytest.raises(IntegrityError):
        optimizer.load_state(state)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [1.0, 0.2 + 0.8 * 0.853553, 0.6, 0.2 + 0.8 * 0.146447, 0.2]),
    ],
)
def test_schedule_factor_falls_from_one_to_the_final_ratio(schedule: str, expected: list[float]) -> None:
    config = InnerConfig(schedule=schedule, final_ratio=0.2)
    assert [schedule_factor(config, step, 5) for step in range(5)] == pytest.approx(expected, abs=1e-5)


def test_schedule_factor_stays_at_the_last_value_after_the_last_step() -> None:
    config = InnerConfig(schedule="cosine", final_ratio=0.1)
    assert schedule_factor(config, 1000, 5) == schedule_factor(config, 4, 5) == pytest.approx(0.1)


def test_schedule_factor_of_a_single_step_is_one() -> None:
    assert schedule_factor(InnerConfig(schedule="linear"), 0, 1) == 1.0


def test_warmup_factor_rises_to_one_and_stays_there() -> None:
    assert [warmup_factor(InnerConfig(warmup_steps=3), step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert warmup_factor(InnerConfig(warmup_steps=0), 0) == 1.0
