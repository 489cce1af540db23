"""The inner loop of a run that trains an author's own module, with the author's optimizer, data and loss.

Only parameters are shared. The optimizer's state, buffers (such as a batch norm's means) and everything else in the
module stay on this replica. `interval` calls the inner loop in the one thread that trains, so the author's functions
run there too. An exception of theirs ends the training, and is raised unchanged to the author.

Shapes: N values of the flat parameter vector, F of a slice of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from swarm_protocol.errors import ConfigError, RoundError
from torch import Tensor, nn
from torch.utils.data import default_collate

from swarm.training.data.corpus import windows_of
from swarm.training.inner.inner_loop import IntervalResult, take_steps
from swarm.training.inner.optimizers import NO_MOMENTS
from swarm.training.run.layout import Layout, mix_in
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_model import check_weights, refuse_module_run

OptimizerFactory: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
LossOf: TypeAlias = Callable[[nn.Module, Any], Tensor]
"""Takes the module and a batch, and returns the loss, a scalar."""
Evaluate: TypeAlias = Callable[[nn.Module], float | Tensor]
"""Takes the module with the committed weights, and returns its loss on held-out data, one number."""


@runtime_checkable
class Dataset(Protocol):
    """A map-style data set, such as a `torch.utils.data.Dataset` with a length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Batches: TypeAlias = Iterable[Any] | Callable[[], Iterable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnModule:
    """A module, and what its training needs.

    With a map-style data set (`__len__` and `__getitem__`), the members share its samples, so that each is used exactly
    once in an epoch. A batch is `collate` of `inner.batch_windows` samples. With an iterable of batches, or a function
    that makes one, each member iterates over its own, again and again. Leases then only count the work, and each member
    chooses its batches.

    `evaluate` measures the held-out loss of committed weights at the run's start and end, and every
    `validation_interval` steps. It is called in evaluation mode and without gradients, and must not change parameters.
    The member publishes the number, as it does for a model that the run's file describes.
    """

    module: nn.Module
    optimizer: OptimizerFactory
    data: Dataset | Batches
    loss: LossOf
    evaluate: Evaluate | None = None
    collate: Callable[[list[Any]], Any] = default_collate


def given_module(
    run: RunConfig, given: Mapping[str, Any], evaluate: Evaluate | None, collate: Callable[[list[Any]], Any]
) -> OwnModule | None:
    """Return the author's module, or None if nothing of it is given. Raises ConfigError if some of it is missing."""
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given) and evaluate is None:
        refuse_module_run(run.model)
        return None
    if missing:
        raise ConfigError(
            f"a module of your own lacks {' and '.join(missing)}", remedy="give model, optimizer, data and loss"
        )
    return OwnModule(
        module=given["model"],
        optimizer=given["optimizer"],
        data=given["data"],
        loss=given["loss"],
        evaluate=evaluate,
        collate=collate,
    )


class ModuleInner:
    """Implements `interval.Inner`. Raises ConfigError or IntegrityError if `own` is not what the run trains."""

    def __init__(self, run: RunConfig, own: OwnModule) -> None:
        if not run.trains_module:
            raise ConfigError(
                f"the run trains a {run.model.get('model_type')} that its file describes, not a module of your own",
                remedy="leave out model, optimizer and loss, or make a run for the module: swarm.trainer.module_run",
            )
        check_weights(run, own.module)
        make: Any = own.optimizer
        made: Any = make([each for each in own.module.parameters() if each.requires_grad]) if callable(make) else None
        if not hasattr(made, "zero_grad"):
            found = f"a function that returns {made!r:.40}" if callable(make) else f"of type {type(make).__name__}"
            raise ConfigError(
                f"the optimizer is {found}, and not a function that makes one for the parameters",
                remedy="give optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)",
            )
        self._run = run
        self.own = own
        self.layout = Layout.of(own.module, run.fragments)
        self._optimizer: torch.optim.Optimizer = made
        self._batches = _batches_of(own, run)

    def load(self, theta_N: Tensor) -> None:
        """Raises ValueError if N differs, as `take_in` does for F."""
        self.layout.set_parameters(self.own.module, theta_N)

    def take_in(self, where: slice, theta_F: Tensor, mixing: float) -> None:
        theta_N = self.layout.flatten(self.own.module)
        mix_in(theta_N[where], theta_F, mixing)
        self.layout.set_parameters(self.own.module, theta_N)

    def flat(self, where: slice = slice(None)) -> Tensor:
        theta_N = self.layout.flatten(self.own.module)
        theta_F = theta_N[where]
        return theta_F if len(theta_F) == len(theta_N) else theta_F.clone()  # a view would keep the whole vector

    def train(
        self,
        sample_ids: Sequence[int],
        num_steps: int,
        stop: Callable[[], bool] = lambda: False,
        *,
        done_steps: int = 0,  # noqa: ARG002 - the author's optimizer has its own schedule
    ) -> IntervalResult:
        """See `InnerLoop.train`. Raises RoundError, and changes nothing, if the loss or a gradient is not finite."""
        try:
            result = take_steps(lambda ids, _: self._step(self._batches(ids)), sample_ids, num_steps, stop, self._run)
        except StopIteration as error:
            raise _carriable() from error
        self._optimizer.zero_grad()  # a round needs the memory for the pseudo-gradient
        return result

    def held_out_loss(self, theta_N: Tensor, num_windows: int, draw: int = 0) -> float:  # noqa: ARG002
        """Return what the author's `evaluate` does for `theta_N`, or nan without it, since the author decides what is
        held out. The trained parameters and the modules' modes do not change."""
        if self.own.evaluate is None:
            return math.nan
        local_N, modes = self.flat(), [(each, each.training) for each in self.own.module.modules()]
        self.load(theta_N)
        self.own.module.eval()
        try:
            with torch.no_grad():
                return float(self.own.evaluate(self.own.module))
        except StopIteration as error:
            raise _carriable() from error
        finally:
            self.load(local_N)
            for each, mode in modes:
                each.training = mode

    def state(self) -> dict[str, list[Tensor]]:
        """Return that there are no moments: the author's optimizer begins anew after a restart."""
        return {name: [x] for name, x in NO_MOMENTS.items()}

    def close(self) -> None:
        """Do nothing."""

    def _gradients(self) -> Iterator[Tensor]:
        for parameter in self.own.module.parameters():
            if parameter.grad is not None:
                grad = parameter.grad
                yield grad.coalesce().values() if grad.is_sparse else grad

    def _step(self, batch: Any) -> float:
        self._optimizer.zero_grad()
        loss: Any = self.own.loss(self.own.module, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"of type {type(loss).__name__}"
            raise ConfigError(
                f"the module's loss is {found}, and not one number", remedy="return a tensor of one value: loss.mean()"
            )
        value = loss.item()
        if not math.isfinite(value):
            raise RoundError(f"training diverged: the loss is {value}", remedy="lower the learning rate")
        loss.backward()  # type: ignore[no-untyped-call]
        if not all(bool(torch.isfinite(grad).all()) for grad in self._gradients()):
            raise RoundError("training diverged: a gradient is not finite", remedy="lower the learning rate")
        self._optimizer.step()
        return value


def _carriable() -> RuntimeError:
    """Return the error in place of StopIteration, which a future cannot carry: its caller would wait forever."""
    return RuntimeError("a function of the module's author raised StopIteration")


def _batches_of(own: OwnModule, run: RunConfig) -> Callable[[Sequence[int]], Any]:
    """Return a function that makes the batch of given samples. Raises ConfigError if the run trains on other data."""
    data, num_samples = own.data, int(run.model.get("num_samples", 0))
    if not num_samples:
        stream = _endless(data)
        return lambda _: next(stream)
    if not isinstance(data, Dataset) or len(data) != num_samples:
        found = f"one of {len(data)}" if isinstance(data, Dataset) else "none with a length"
        raise ConfigError(
            f"the run trains on a data set of {num_samples} samples, but this is {found}",
            remedy="bring the data set that the run was made for",
        )
    return lambda sample_ids: own.collate([data[int(at)] for at in windows_of(sample_ids, num_samples, run.seed)])


def _endless(data: Any) -> Iterator[Any]:
    """Iterate over the data again and again. Raises ValueError, which ends the training, if it yields no batches."""
    while True:
        empty = True
        for batch in data() if callable(data) else data:
            empty = False
            yield batch
        if empty:
            raise ValueError("the data yields no batches, or no more: bring data that can be iterated again")
