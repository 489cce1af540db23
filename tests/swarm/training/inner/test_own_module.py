"""Tests an author's own module in a run: which data members share out, what is refused, and that replicas stay
equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.training_swarm import Swarm, assert_equal_steps, config
from swarm.testing import virtual_time
from swarm.training.inner.interval import TrainingSetup
from swarm.training.inner.own_module import ModuleInner, OwnModule
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_model import build_model, check_model, module_run
from swarm.training.run.run_tables import InnerConfig
from swarm.training.run.signed_run import from_mapping, to_mapping
from swarm.training.trainer_events import HeldOutMeasured
from swarm_protocol.errors import ConfigError, IntegrityError, RoundError
from torch import Tensor, nn

NUM_SAMPLES = 100


def make_module(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


class Points:
    """A map-style data set that notes the requested indices."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.x_B3 = torch.randn(num_samples, 3, generator=torch.Generator().manual_seed(5))
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.x_B3)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.asked.append(index)
        return self.x_B3[index], self.x_B3[index].sum().sin()


def squared(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x_B3, y_B = batch
    return (module(x_B3).squeeze(1) - y_B).square().mean()


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def own(module: nn.Module | None = None, data: object = None, loss: Callable[..., Tensor] = squared) -> OwnModule:
    return OwnModule(
        module=module or make_module(),
        optimizer=sgd,
        data=Points() if data is None else data,  # type: ignore[arg-type]
        loss=loss,
    )


def run_of(num_samples: int = NUM_SAMPLES, **changes: object) -> RunConfig:
    return module_run(config(**changes), make_module(), num_samples=num_samples)


@pytest.mark.parametrize("fragments", [1, 2])
def test_members_of_a_module_run_stay_equal_and_use_each_sample_once(fragments: int) -> None:
    run = run_of(outer_steps=4, min_group=2, fragments=fragments, inner=InnerConfig(batch_windows=2))
    data = {name: Points() for name in "ab"}

    async def main() -> list[str]:
        async with Swarm(run) as swarm:
            for name in "ab":
                inner = ModuleInner(run, own(data=data[name]))
                setup = TrainingSetup(inner=inner, theta_N=inner.flat(), bounds=inner.layout.bounds)
                await swarm.join(name, setup=setup)
            members = await swarm.finish()
            assert_equal_steps(members, 4)
            return [member.digest for member in members]

    assert len(set(virtual_time.run(main()))) == 1
    asked = data["a"].asked + data["b"].asked
    # two members, four intervals of five steps of two samples; 100 samples are one epoch
    assert len(asked) == len(set(asked)) == 2 * 4 * 5 * 2


def test_train_uses_the_leased_samples_and_the_authors_optimizer() -> None:
    run, data = run_of(), Points()
    inner = ModuleInner(run, own(data=data))
    before_N = inner.flat()
    result = inner.train(range(7), 5)
    assert (result.num_steps, result.num_samples, result.num_tokens) == (3, 6, 6)
    assert result.mean_loss > 0
    assert not torch.equal(inner.flat(), before_N)
    again = ModuleInner(run, own(data=data))
    assert again.train(range(7), 5).mean_loss == result.mean_loss
    assert data.asked[:6] == data.asked[6:]
    assert torch.equal(again.flat(), inner.flat())
    assert inner.train(range(7), 5, lambda: True).num_steps == 0


def test_loss_can_accumulate_gradients_and_the_optimizer_can_step_its_own_schedule() -> None:
    def in_halves(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        first, last = (squared(module, half) / 2 for half in zip(*(each.chunk(2) for each in batch), strict=True))
        first.backward()  # type: ignore[no-untyped-call]
        return last + first.detach()

    def scheduled(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = sgd(parameters)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        optimizer.register_step_post_hook(lambda *_: schedule.step())
        made.append(optimizer)
        return optimizer

    made: list[torch.optim.Optimizer] = []
    inners = [ModuleInner(run_of(), replace(own(loss=loss), optimizer=scheduled)) for loss in (squared, in_halves)]
    losses = [inner.train(range(8), 2).mean_loss for inner in inners]
    assert losses[0] == pytest.approx(losses[1])
    torch.testing.assert_close(inners[0].flat(), inners[1].flat())
    assert made[0].param_groups[0]["lr"] == 0.1 / 4


def test_train_leaves_no_gradient_and_flat_is_a_copy() -> None:
    module = make_module()
    inner = ModuleInner(run_of(), own(module))
    inner.train(range(8), 2)
    assert all(parameter.grad is None for parameter in module.parameters())
    for where in (slice(None), slice(3, 7)):
        before_F = inner.flat(where)
        inner.flat(where).zero_()
        assert torch.equal(inner.flat(where), before_F)
        assert before_F.untyped_storage().nbytes() == 4 * before_F.numel()


def test_train_on_a_stream_takes_its_batches_in_order_and_starts_again_at_the_end() -> None:
    batches = [(torch.full((2, 3), float(index)), torch.zeros(2)) for index in range(3)]
    seen: list[float] = []

    def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.append(batch[0][0, 0].item())
        return squared(module, batch)

    def make() -> Iterator[tuple[Tensor, Tensor]]:
        return iter(batches)

    for data in (batches, make):
        seen.clear()
        inner = ModuleInner(run_of(num_samples=0), own(data=data, loss=loss))
        assert inner.train(range(100), 5).num_samples == 10
        assert seen == [0.0, 1.0, 2.0, 0.0, 1.0]


def test_train_raises_an_error_for_the_author_when_a_new_stream_is_empty() -> None:
    inner = ModuleInner(run_of(num_samples=0), own(data=iter([(torch.zeros(2, 3), torch.zeros(2))])))
    with pytest.raises(ValueError, match="or no more"):
        inner.train(range(100), 5)


def test_stop_iteration_of_the_authors_function_becomes_an_error_that_a_future_can_carry() -> None:
    def loss(_module: nn.Module, _batch: object) -> Tensor:
        return next(iter([]))

    with pytest.raises(RuntimeError, match="raised StopIteration"):
        ModuleInner(run_of(), own(loss=loss)).train(range(7), 5)


def test_members_publish_what_the_authors_function_measures_of_committed_weights() -> None:
    run = run_of(outer_steps=4, min_group=2, validation_interval=2)
    measured: list[dict[int, float]] = []

    def evaluate(module: nn.Module) -> Tensor:
        assert not module.training
        return squared(module, (Points().x_B3, Points().x_B3.sum(dim=1).sin()))

    async def main() -> None:
        async with Swarm(run) as swarm:
            for name in "ab":
                inner = ModuleInner(run, replace(own(), evaluate=evaluate))
                setup = TrainingSetup(inner=inner, theta_N=inner.flat(), bounds=inner.layout.bounds)
                await swarm.join(name, setup=setup)
            members = await swarm.finish()
            measured.extend({event.step: event.loss for event in each.of(HeldOutMeasured)} for each in members)

    virtual_time.run(main())
    assert sorted(measured[0]) == [0, 2, 4]
    assert measured[0] == measured[1]
    assert measured[0][4] < measured[0][2] < measured[0][0]


@pytest.mark.parametrize("fails", [False, True])
def test_evaluation_leaves_trained_weights_and_modes_unchanged(fails: bool) -> None:
    def evaluate(module: nn.Module) -> float:
        assert not torch.is_grad_enabled()
        assert not any(each.training for each in module.modules())
        return next(iter([])) if fails else float(sum(each.sum() for each in module.parameters()))

    module = make_module()
    inner = ModuleInner(run_of(), replace(own(module), evaluate=evaluate))
    module[0].eval()
    local_N = inner.flat()
    with pytest.raises(RuntimeError, match="raised StopIteration") if fails else nullcontext():
        assert inner.held_out_loss(torch.ones_like(local_N), 64) == len(local_N)
    assert torch.equal(inner.flat(), local_N)
    assert [each.training for each in module] == [False, True, True]


@pytest.mark.parametrize(
    ("loss", "found"),
    [(None, "of type NoneType"), (0.5, "of type float"), (torch.ones(4, requires_grad=True), r"of shape \(4,\)")],
)
def test_loss_that_is_not_one_number_is_named(loss: Any, found: str) -> None:
    inner = ModuleInner(run_of(), own(loss=lambda _module, _batch: loss))
    with pytest.raises(ConfigError, match=f"the module's loss is {found}, and not one number"):
        inner.train([0, 1], 1)


def test_optimizer_that_is_made_already_is_refused() -> None:
    module = make_module()
    made: Any = sgd(list(module.parameters()))
    with pytest.raises(ConfigError, match="the optimizer is of type SGD, and not a function"):
        ModuleInner(run_of(), replace(own(module), optimizer=made))


def test_optimizer_function_that_returns_none_is_refused() -> None:
    forgot_to_return: Any = lambda _parameters: None  # noqa: E731 - a function, as an author writes it
    with pytest.raises(ConfigError, match="the optimizer is a function that returns None, and not a function that"):
        ModuleInner(run_of(), replace(own(), optimizer=forgot_to_return))


def test_take_in_mixes_a_slice_and_leaves_the_rest_unchanged() -> None:
    inner = ModuleInner(run_of(fragments=2), own())
    where, before_N = inner.layout.slice(1), inner.flat()
    theirs_F = torch.randn(where.stop - where.start)
    inner.take_in(where, theirs_F, 0.25)
    torch.testing.assert_close(inner.flat(where), 0.25 * before_N[where] + 0.75 * theirs_F)
    assert torch.equal(inner.flat(inner.layout.slice(0)), before_N[inner.layout.slice(0)])
    inner.take_in(where, theirs_F, 0.0)
    assert torch.equal(inner.flat(where), theirs_F)
    with pytest.raises(ValueError, match="has"):
        inner.take_in(where, theirs_F[1:], 0.5)


def test_train_moves_nothing_when_the_loss_is_not_finite() -> None:
    inner = ModuleInner(run_of(), own(loss=lambda module, batch: squared(module, batch) * math.nan))
    before_N = inner.flat()
    with pytest.raises(RoundError, match="diverged"):
        inner.train(range(7), 5)
    assert torch.equal(inner.flat(), before_N)


def test_train_leaves_weights_and_optimizer_unchanged_when_a_gradient_is_not_finite() -> None:
    """The gradient of a square root at 0 is infinite, while the value is finite."""
    is_bad = [True]

    def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        value = squared(module, batch)
        return (value * 0).sqrt() if is_bad[0] else value

    inner = ModuleInner(run_of(), own(loss=loss))
    before_N = inner.flat()
    with pytest.raises(RoundError, match="a gradient is not finite"):
        inner.train(range(7), 5)
    assert torch.equal(inner.flat(), before_N)
    is_bad[0] = False
    inner.train(range(7), 5)
    assert inner.flat().isfinite().all()


def test_module_is_refused_when_it_is_not_the_runs() -> None:
    with pytest.raises(IntegrityError, match="starts from other weights"):
        ModuleInner(run_of(), own(make_module(seed=2)))
    with pytest.raises(IntegrityError, match="has 4 parameters, but the run's has 41"):
        ModuleInner(run_of(), own(nn.Linear(3, 1)))
    with pytest.raises(ConfigError, match="trains a llama that its file describes"):
        ModuleInner(RunConfig(name="x"), own())


@pytest.mark.parametrize("data", [Points(99), [], iter([])], ids=["other length", "empty", "no length"])
def test_data_is_refused_when_it_is_not_the_runs(data: object) -> None:
    with pytest.raises(ConfigError, match="a data set of 100 samples"):
        ModuleInner(run_of(), own(data=data))


def test_module_run_is_valid_and_its_model_cannot_be_built_from_its_file() -> None:
    run = run_of()
    assert check_model(run) == 41
    assert from_mapping(to_mapping(run)) == run
    with pytest.raises(ConfigError, match="fragments = 3: the model has 2 layers"):
        run_of(fragments=3)
    with pytest.raises(ConfigError, match=r"a module of its author's own.*swarm.Trainer"):
        build_model(run.model)


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("num_values", 0, "num_values = 0"),
        ("num_values", True, "num_values = true"),
        ("num_values", 1 << 40, "num_values"),
        ("digest", "", "digest"),
        ("digest", 7, "digest"),
        ("num_samples", -1, "num_samples = -1"),
        ("num_sample", 1, "did you mean 'num_samples'"),
    ],
)
def test_check_model_refuses_an_impossible_module(key: str, value: object, complaint: str) -> None:
    run = run_of()
    with pytest.raises(ConfigError, match=complaint):
        check_model(replace(run, model={**run.model, key: value}))
