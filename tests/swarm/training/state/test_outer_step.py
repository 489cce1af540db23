"""The outer step against two references, and its bits against everything that could change them."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from swarm.training.data.corpus import stream
from swarm.training.run.run_config import OuterConfig
from swarm.training.state.replica import apply_outer_step
from swarm_protocol.errors import RoundError
from torch import Tensor

OUTER = OuterConfig(learning_rate=0.7, momentum=0.9)
NUM_VALUES = (1 << 17) + 12_345  # three blocks, the last one odd


def _known(index: int, num_values: int = NUM_VALUES) -> Tensor:
    """Integer arithmetic only, in [-1, 1)."""
    bits_N = (stream(11, index, num_values) >> np.uint64(40)).astype(np.int64) - (1 << 23)
    return torch.from_numpy(bits_N.astype(np.float32)) * 2.0**-23


def _three_steps(theta_N: Tensor, momentum_N: Tensor, config: OuterConfig = OUTER) -> None:
    for index in range(3):
        apply_outer_step(theta_N, momentum_N, _known(10 + index, theta_N.numel()) * 0.01, config)


@pytest.mark.parametrize("config", [OUTER, OuterConfig(learning_rate=0.4, momentum=0.0), OuterConfig(momentum=0.99)])
def test_apply_outer_step_equals_the_equations_in_float64(config: OuterConfig) -> None:
    theta_N, momentum_N = _known(0), torch.zeros(NUM_VALUES)
    theta, momentum = theta_N.numpy().astype(np.float64), np.zeros(NUM_VALUES)
    for index in range(3):
        delta = (_known(10 + index) * 0.01).numpy().astype(np.float64)
        momentum = config.momentum * momentum + delta
        theta = theta - config.learning_rate * (delta + config.momentum * momentum)
    _three_steps(theta_N, momentum_N, config)
    np.testing.assert_allclose(theta_N.numpy(), theta, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(momentum_N.numpy(), momentum, rtol=1e-5, atol=1e-7)


def test_apply_outer_step_equals_torch_sgd_with_nesterov() -> None:
    theta_N, momentum_N = _known(0), torch.zeros(NUM_VALUES)
    parameter = torch.nn.Parameter(theta_N.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for index in range(3):
        parameter.grad = _known(10 + index) * 0.01
        optimizer.step()
    _three_steps(theta_N, momentum_N)
    torch.testing.assert_close(theta_N, parameter.detach(), rtol=1e-6, atol=1e-7)


def test_apply_outer_step_gives_the_bits_that_every_machine_gives() -> None:
    theta_N, momentum_N = _known(0), torch.zeros(NUM_VALUES)
    _three_steps(theta_N, momentum_N)
    assert hashlib.sha256(theta_N.numpy().tobytes()).hexdigest()[:16] == "c96890d7b1d0599d"


def test_apply_outer_step_average_is_the_mean_of_the_members() -> None:
    theta_N, momentum_N, config = _known(0), torch.zeros(NUM_VALUES), OuterConfig(optimizer="average")
    members = [_known(1), _known(2), _known(3)]
    mean_N = sum((theta_N - each for each in members), torch.zeros(NUM_VALUES)) / 3
    expected_N = torch.stack(members).mean(dim=0)
    apply_outer_step(theta_N, momentum_N, mean_N, config)
    torch.testing.assert_close(theta_N, expected_N, rtol=1e-5, atol=1e-6)
    assert not momentum_N.any()


def test_apply_outer_step_average_of_what_is_not_finite_changes_nothing() -> None:
    theta_N, delta_N = _known(0), _known(2)
    delta_N[0] = float("inf")
    with pytest.raises(RoundError, match="not finite"):
        apply_outer_step(theta_N, torch.zeros(NUM_VALUES), delta_N, OuterConfig(optimizer="average"))
    assert torch.equal(theta_N, _known(0))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_apply_outer_step_rounds_each_operation_whatever_the_threads(num_threads: int) -> None:
    theta_N, momentum_N, delta_N = _known(0), _known(1), _known(2)
    mu, eta = np.float32(0.9), np.float32(0.7)
    # numpy rounds after each operation
    momentum = momentum_N.numpy() * mu + delta_N.numpy()
    theta = theta_N.numpy() - (momentum * mu + delta_N.numpy()) * eta
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        apply_outer_step(theta_N, momentum_N, delta_N, OUTER)
    finally:
        torch.set_num_threads(before)
    assert np.array_equal(momentum_N.numpy(), momentum)
    assert np.array_equal(theta_N.numpy(), theta)


@pytest.mark.parametrize("first", [1, 7, 12_345])
def test_apply_outer_step_of_a_piece_equals_the_piece_of_the_whole(first: int) -> None:
    theta_N, momentum_N = _known(0), _known(1)
    piece_N, piece_momentum_N = theta_N[first:].clone(), momentum_N[first:].clone()
    apply_outer_step(theta_N, momentum_N, _known(2), OUTER)
    apply_outer_step(piece_N, piece_momentum_N, _known(2)[first:].clone(), OUTER)
    assert torch.equal(piece_N, theta_N[first:])
    assert torch.equal(piece_momentum_N, momentum_N[first:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_apply_outer_step_pseudo_gradient_not_finite_changes_nothing(bad: float) -> None:
    theta_N, momentum_N, delta_N = _known(0), _known(1), _known(2)
    delta_N[-1] = bad
    with pytest.raises(RoundError, match="not finite"):
        apply_outer_step(theta_N, momentum_N, delta_N, OUTER)
    assert torch.equal(theta_N, _known(0))
    assert torch.equal(momentum_N, _known(1))


@pytest.mark.parametrize("delta_N", [torch.zeros(3), torch.zeros(4, dtype=torch.float64), torch.zeros(2, 2)])
def test_apply_outer_step_tensors_that_do_not_fit_are_refused(delta_N: Tensor) -> None:
    with pytest.raises(ValueError, match="flat fp32 CPU"):
        apply_outer_step(torch.zeros(4), torch.zeros(4), delta_N, OUTER)
