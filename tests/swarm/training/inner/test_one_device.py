"""Tests that each option of one device changes how steps are computed and not their results."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch
from support.small_net import SmallNet, loss_that_fails_on_the_last_token, small_loss, windows
from swarm.training.inner.one_device import LocalOptions, OneDevice
from swarm.training.run.layout import Layout
from swarm.training.run.run_tables import InnerConfig
from swarm_protocol.errors import ConfigError
from torch import Tensor, nn

CONFIG = InnerConfig(batch_windows=6, warmup_steps=0, learning_rate=1e-2)
NUM_VALUES = Layout.of(SmallNet()).num_values


def _device(**options: Any) -> OneDevice:
    return OneDevice(CONFIG, SmallNet(), device="cpu", local=LocalOptions(**options), loss=small_loss)


def _train(device: OneDevice, num_steps: int = 4) -> tuple[list[float], Tensor]:
    losses = [device.step(windows(6, seed), 1.0) for seed in range(num_steps)]
    return losses, device.flat()


@pytest.mark.parametrize("micro_batch_windows", [1, 4, 6, 99])
def test_step_in_micro_batches_equals_the_whole_batch_up_to_rounding(micro_batch_windows: int) -> None:
    losses, theta_N = _train(_device())
    in_parts, parts_N = _train(_device(micro_batch_windows=micro_batch_windows))
    assert in_parts == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(parts_N, theta_N, rtol=1e-3, atol=1e-4)


def test_step_computes_one_micro_batch_of_windows_at_a_time() -> None:
    sizes = []

    def loss(model: nn.Module, x_BT: Tensor) -> Tensor:
        sizes.append(len(x_BT))
        return small_loss(model, x_BT)

    local = LocalOptions(micro_batch_windows=4)
    device = OneDevice(CONFIG, SmallNet(), device="cpu", local=local, loss=loss)
    device.step(windows(6), 1.0)
    assert sizes == [4, 2]


def test_step_under_autocast_is_close_and_keeps_fp32_weights() -> None:
    losses, theta_N = _train(_device())
    roughly, rough_N = _train(_device(autocast=True))
    assert roughly != losses
    assert roughly == pytest.approx(losses, rel=0.02)
    assert rough_N.dtype == torch.float32
    assert not torch.equal(rough_N, rough_N.bfloat16().float())
    torch.testing.assert_close(rough_N, theta_N, rtol=0.1, atol=0.05)


def test_step_with_activation_checkpointing_gives_the_same_bits_and_computes_layers_twice() -> None:
    calls, results = [], []
    for checkpointing in (False, True):
        model = SmallNet()
        local = LocalOptions(activation_checkpointing=checkpointing)
        device = OneDevice(CONFIG, model, device="cpu", local=local, loss=small_loss)
        results.append(_train(device))
        calls.append([layer.calls for layer in model.layers])
    assert calls == [[4, 4], [8, 8]]
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_activation_checkpointing_is_refused_for_a_model_without_layers() -> None:
    with pytest.raises(ConfigError, match="the model has no list of layers"):
        OneDevice(CONFIG, nn.Linear(2, 2), device="cpu", local=LocalOptions(activation_checkpointing=True))


def test_compiled_step_equals_the_eager_one_up_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.utils.counters.clear()
    losses, theta_N = _train(_device())
    compiled, compiled_N = _train(_device(compile=True, micro_batch_windows=6))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert compiled == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(compiled_N, theta_N, rtol=1e-3, atol=1e-4)


def test_step_continues_with_a_warning_when_compilation_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> object:
        raise OSError("no compiler in this place")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=refuse))
    losses, theta_N = _train(_device())
    with caplog.at_level(logging.WARNING, "swarm.training.inner.one_device"):
        uncompiled, uncompiled_N = _train(_device(compile=True))
    assert uncompiled == losses
    assert torch.equal(uncompiled_N, theta_N)
    warned = [each.message for each in caplog.records if "the model cannot be compiled here" in each.message]
    assert len(warned) == 1
    assert "no compiler in this place" in warned[0]


def test_compiled_step_raises_an_error_of_the_model_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    device = OneDevice(
        CONFIG, SmallNet(), device="cpu", local=LocalOptions(compile=True), loss=loss_that_fails_on_the_last_token
    )
    with pytest.raises(RuntimeError, match="no token of these is known"):
        device.step(torch.full((2, 5), 31), 1.0)


def test_step_factor_scales_the_move_of_the_weights() -> None:
    moved = []
    for factor in (1.0, 0.1):
        device = _device()
        before_N = device.flat()
        device.step(windows(6), factor)
        moved.append(float((device.flat() - before_N).abs().max()))
    assert moved[1] == pytest.approx(moved[0] / 10, rel=0.01)


def test_steps_of_shares_add_up_to_the_step_of_the_whole_batch() -> None:
    """This is what worker processes do, in one process. A share without windows contributes no gradient."""
    sums = torch.zeros(NUM_VALUES + 1)
    for share in torch.tensor_split(windows(5), 6):
        model = SmallNet()

        def collect(gradient_M: Tensor) -> None:
            sums.add_(gradient_M)

        OneDevice(CONFIG, model, device="cpu", loss=small_loss, all_reduce=collect).step(share, 1.0, 5)
    whole: list[Tensor] = []
    device = OneDevice(
        CONFIG,
        SmallNet(),
        device="cpu",
        loss=small_loss,
        all_reduce=lambda gradient_M: whole.append(gradient_M.clone()),
    )
    device.step(windows(5), 1.0)
    torch.testing.assert_close(sums, whole[0], rtol=1e-4, atol=1e-6)


def test_take_in_mixes_the_slice_and_leaves_the_rest_unchanged() -> None:
    device = _device()
    local_N = device.flat()
    theta_F = torch.randn(10, generator=torch.Generator().manual_seed(1))
    where = slice(20, 30)
    device.take_in(where, theta_F, 0.25)
    torch.testing.assert_close(device.flat(where), 0.25 * local_N[where] + 0.75 * theta_F)
    device.take_in(where, theta_F, 0.0)
    assert torch.equal(device.flat(where), theta_F)
    rest = torch.cat([device.flat(slice(20)), device.flat(slice(30, None))])
    assert torch.equal(rest, torch.cat([local_N[:20], local_N[30:]]))


@pytest.mark.parametrize("num_values", [0, 9, 11])
def test_take_in_refuses_a_slice_of_another_size(num_values: int) -> None:
    device = _device()
    before_N = device.flat()
    with pytest.raises(ValueError, match="the slice has 10 values"):
        device.take_in(slice(20, 30), torch.ones(num_values), 0.0)
    with pytest.raises(ValueError, match="the model has"):
        device.load(torch.ones(num_values))
    assert torch.equal(device.flat(), before_N)


def test_model_computes_with_the_weights_that_were_taken_in() -> None:
    one, other = _device(), _device()
    theta_N = torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(1)) / 3
    one.take_in(slice(None), theta_N, 0.0)
    other.load(theta_N)
    assert one.step(windows(6), 1.0) == other.step(windows(6), 1.0)
    assert torch.equal(one.flat(), other.flat())


def test_loss_is_summed_over_windows_and_leaves_the_trained_weights_unchanged() -> None:
    device = _device(micro_batch_windows=4)
    before_N = device.flat()
    theta_N = torch.zeros_like(before_N)
    assert device.loss(theta_N, windows(10)) == pytest.approx(10 * torch.log(torch.tensor(32.0)).item(), rel=1e-5)
    assert torch.equal(device.flat(), before_N)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": ()}, "0 devices to train on"),
        ({"devices": ("cpu",) * 65}, "65 devices"),
        ({"devices": ("gpu:0",)}, "'gpu:0' is not a device"),
        ({"devices": (3.5,)}, "3.5 is not a device"),
        ({"devices": ("cuda:99",)}, "there is no device cuda:99"),
        ({"devices": ("cpu", "meta")}, "devices of several kinds: cpu, meta"),
        ({"devices": ("meta:0", "meta:0")}, "a device is named twice"),
        ({"micro_batch_windows": -1}, "micro_batch_windows = -1"),
        ({"micro_batch_windows": 1.5}, "micro_batch_windows = 1.5"),
        ({"micro_batch_windows": True}, "micro_batch_windows = True"),
    ],
)
def test_options_are_refused_when_they_are_impossible(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        LocalOptions(**options)
    assert caught.value.remedy


def test_options_accept_one_cpu_as_several_devices() -> None:
    assert LocalOptions(devices=("cpu", "cpu")).devices == ("cpu", "cpu")
