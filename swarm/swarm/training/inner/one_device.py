"""A replica's weights, gradient and moments on one device, and the inner steps that change them.

Blocks; one call at a time. The parameters are views of one flat vector on the device, so a fragment is a slice here
too. If several devices share a step, the gradients are views of another flat vector, so that one call sums them. On a
single device, each parameter's gradient is allocated by itself, in memory that activations have just freed. Gradients
are freed after an interval, since a round needs the memory for the pseudo-gradient.

Shapes: B windows of a step, T tokens a window, N values of the flat vector, F of a fragment's slice of it, M = N + 1.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from swarm_protocol.errors import ConfigError, RoundError
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from swarm.heap import give_back
from swarm.training.inner.optimizers import InnerOptimizer
from swarm.training.run.layout import Layout, mix_in
from swarm.training.run.run_tables import InnerConfig

logger = logging.getLogger(__name__)


MAX_DEVICES = 64

HELD_OUT_WINDOWS = 16
"""Held-out windows that are measured at a time, unless `micro_batch_windows` is less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """Options of how one member computes its inner steps; each member chooses its own.

    All `devices` are one replica: several share each step's windows, each in its own process. A step processes
    `micro_batch_windows` windows at a time and sums their gradients (0: all at once), to bound memory. `autocast`
    computes matrix products in bfloat16; weights, gradients and moments stay fp32. `activation_checkpointing` keeps
    only the layers' inputs, and recomputes the rest for the gradient (Chen et al. 2016, arXiv 1604.06174). `compile` is
    torch.compile's default mode: it takes a minute, which pays off in long runs on a GPU.

    Each option changes the last bits of a contribution, but all members still commit the same state. Raises ConfigError
    for impossible values, and for a device that does not exist.
    """

    devices: tuple[str, ...] = ("cpu",)
    micro_batch_windows: int = 0
    autocast: bool = False
    activation_checkpointing: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        if not 1 <= len(self.devices) <= MAX_DEVICES:
            raise ConfigError(f"{len(self.devices)} devices to train on", remedy=f"name 1 to {MAX_DEVICES}")
        if type(self.micro_batch_windows) is not int or self.micro_batch_windows < 0:
            raise ConfigError(
                f"micro_batch_windows = {self.micro_batch_windows!r}", remedy="use a whole number, 0 for whole batches"
            )
        kinds = {_checked(device).type for device in self.devices}
        if len(kinds) > 1:
            raise ConfigError(f"devices of several kinds: {', '.join(sorted(kinds))}", remedy="use those of one kind")
        accelerators = [device for device in self.devices if torch.device(device).type != "cpu"]
        if len(set(accelerators)) < len(accelerators):
            raise ConfigError(f"a device is named twice: {', '.join(accelerators)}", remedy="name each once")


def _checked(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{name!r} is not a device", remedy="use cpu, or cuda:0 and the like") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"there is no device {name}: this machine has {torch.cuda.device_count()} CUDA devices", remedy="use cpu"
        )
    return device


ONE_CPU = LocalOptions()

LossFunction: TypeAlias = Callable[[nn.Module, Tensor], Tensor]
"""Takes a model and windows (int64 [B, T+1] for tokens), and returns the mean loss, a scalar."""


def next_token_loss(model: nn.Module, x_BT: Tensor) -> Tensor:
    """Cross entropy in nats of a transformers language model; `x_BT` is [B, T+1]."""
    logits_BTV = model(input_ids=x_BT[:, :-1], use_cache=False).logits
    return cross_entropy(logits_BTV.flatten(0, 1).float(), x_BT[:, 1:].flatten())


class OneDevice:
    """Trains `model`, which it then owns, in fp32 and without dropout. Dropout draws from torch's global generator, so
    a step with it could not be repeated.

    `all_reduce` replaces a vector by its sum over all devices of the replica; None: there is only this device. Raises
    ConfigError if the options do not fit the model.
    """

    def __init__(
        self,
        config: InnerConfig,
        model: nn.Module,
        *,
        device: str,
        fragments: int = 1,
        local: LocalOptions = ONE_CPU,
        loss: LossFunction = next_token_loss,
        all_reduce: Callable[[Tensor], None] | None = None,
    ) -> None:
        check_fits(local, model)
        self._config = config
        self._local = local
        self._device = torch.device(device)
        self._all_reduce = all_reduce
        self._model = model.float().to(self._device).eval()
        self._layout = Layout.of(model, fragments)
        self._theta_N = self._layout.flatten(self._model).to(self._device)
        self._point_at(self._theta_N)
        self._gradient_M: Tensor | None = None
        self._parameters = [each for each in self._layout.parameters(model) if each.requires_grad]
        self._optimizer = InnerOptimizer(config, dict(model.named_parameters()))
        if local.activation_checkpointing:
            _checkpoint_layers(self._model)
        self._eager = loss
        self._compiled: Callable[..., Any] | None = torch.compile(loss) if local.compile else None

    def load(self, theta_N: Tensor) -> None:
        """Set the parameters; moments and warm-up do not change. Raises ValueError if N differs."""
        self._layout.require(theta_N)
        self._theta_N.copy_(theta_N)

    def take_in(self, where: slice, theta_F: Tensor, mixing: float) -> None:
        """Replace the slice `where` by `mixing` times itself plus 1 - `mixing` times `theta_F`. Raises ValueError if F
        differs."""
        mix_in(self._theta_N[where], theta_F.to(self._device), mixing)

    def flat(self, where: slice = slice(None)) -> Tensor:
        """Return fp32 CPU [F]: a copy of the slice."""
        return self._theta_N[where].to("cpu", copy=True)

    def step(self, x_BT: Tensor, factor: float, num_windows: int = 0) -> float:
        """Take one optimizer step on the gradient of all devices' `num_windows` windows. `x_BT` are this device's (0:
        all are).

        The learning rate is multiplied by `factor`. Returns the mean loss before the step. Raises RoundError, and
        changes nothing, if the loss or the gradient is not finite.
        """
        loss_share = self._gradient(x_BT, num_windows or len(x_BT))
        if self._all_reduce is not None:
            assert self._gradient_M is not None
            self._gradient_M[-1] = loss_share
            self._all_reduce(self._gradient_M)
            loss_share = self._gradient_M[-1]
        norm = nn.utils.clip_grad_norm_(self._parameters, self._config.clip_norm).item()
        loss = loss_share.item()
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise RoundError(
                f"training diverged: the loss is {loss}, the norm of the gradient {norm}",
                remedy="if this happens again, the run needs a lower inner.learning_rate",
            )
        self._optimizer.step(factor)
        return loss

    def loss(self, theta_N: Tensor, x_VT: Tensor) -> float:
        """Return the sum of the losses of `theta_N` on V windows, in fp32. The trained parameters do not change."""
        self._layout.require(theta_N)
        total = 0.0
        if not len(x_VT):  # this device's share of fewer windows than there are devices
            return total
        try:
            self._point_at(theta_N.to(self._device))
            with torch.no_grad():
                for x_BT in torch.split(x_VT, self._at_a_time(HELD_OUT_WINDOWS)):
                    total += self._eager(self._model, x_BT.to(self._device)).item() * len(x_BT)
        finally:
            self._point_at(self._theta_N)
        return total

    def release_gradient(self) -> None:
        """Free the memory of gradients and activations, which glibc would keep. The next step allocates it again."""
        self._gradient_M = None
        for parameter in self._parameters:
            parameter.grad = None
        give_back()

    def state(self) -> dict[str, list[Tensor]]:
        return self._optimizer.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self._optimizer.load_state(state)

    def close(self) -> None:
        """Do nothing."""

    def _point_at(self, theta_N: Tensor) -> None:
        """Make the model's parameters views of `theta_N`."""
        pieces = self._layout.unflatten(theta_N)
        for name, parameter in zip(self._layout.names, self._layout.parameters(self._model), strict=True):
            parameter.data = pieces[name]

    def _clear_gradient(self) -> None:
        """Free the gradients, or, with several devices, make them views of zeros [M]. The last value of that vector is
        the loss."""
        if self._all_reduce is None:
            for parameter in self._parameters:
                parameter.grad = None
            return
        if self._gradient_M is not None:
            self._gradient_M.zero_()
            return
        self._gradient_M = torch.zeros(self._layout.num_values + 1, device=self._device)
        gradients = self._layout.unflatten(self._gradient_M[:-1])
        for name, parameter in zip(self._layout.names, self._layout.parameters(self._model), strict=True):
            if parameter.requires_grad:
                parameter.grad = gradients[name]

    def _at_a_time(self, num_windows: int) -> int:
        return min(num_windows, self._local.micro_batch_windows or num_windows)

    def _gradient(self, x_BT: Tensor, num_windows: int) -> Tensor:
        """Compute this device's share of the gradient, and return the same share of the mean loss."""
        if self._compiled is not None:
            try:
                return self._accumulate(self._compiled, x_BT, num_windows)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a compiler raises many kinds, for its own bugs too
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                logger.warning("the model cannot be compiled here, and trains without compilation: %s", reason)
                self._compiled = None
        return self._accumulate(self._eager, x_BT, num_windows)

    def _accumulate(self, loss_of: LossFunction, x_BT: Tensor, num_windows: int) -> Tensor:
        self._clear_gradient()
        total = torch.zeros((), device=self._device)
        if not len(x_BT):
            return total
        for part_BT in torch.split(x_BT, self._at_a_time(len(x_BT))):
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._local.autocast):
                loss = loss_of(self._model, part_BT.to(self._device))
            share = loss if len(part_BT) == num_windows else loss * (len(part_BT) / num_windows)
            share.backward()  # type: ignore[no-untyped-call]
            total += share.detach()
        for parameter in self._parameters:
            if parameter.grad is None:  # the loss does not depend on it: weight decay still applies
                parameter.grad = torch.zeros_like(parameter)
        return total


def check_fits(local: LocalOptions, model: nn.Module) -> None:
    """Raises ConfigError if the options do not fit the model."""
    if local.activation_checkpointing and not _layers(model):
        raise ConfigError("activation_checkpointing: the model has no list of layers", remedy="leave it out")


def _checkpoint_layers(model: nn.Module) -> None:
    """Checkpoint the layers' activations. transformers' own option works only in training mode."""
    for layer in _layers(model):
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def _layers(module: nn.Module) -> list[nn.Module]:
    """Return the members of the outermost lists of modules."""
    if isinstance(module, nn.ModuleList | nn.Sequential):
        return [child for child in module if any(True for _ in child.parameters())]
    return [layer for child in module.children() for layer in _layers(child)]
