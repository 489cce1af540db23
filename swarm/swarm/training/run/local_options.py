"""How one member computes its inner steps: its own choice, which no other member needs to know or share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from swarm_protocol.errors import ConfigError

MAX_DEVICES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """All `devices` are one replica: more than one share each step's windows, in a process each.

    A step goes through `micro_batch_windows` windows at a time and adds their gradients up (0: all at once), which
    bounds memory. `autocast` computes matrix products in bfloat16; weights, gradients and moments stay fp32.
    `activation_checkpointing` keeps only the layers' inputs, and computes the rest again for the gradient (Chen et al.
    2016, arXiv 1604.06174). `compile` is torch.compile's default mode: a minute that pays in long runs on a GPU.

    Every choice changes the last bits of what is contributed; the committed state is the same for all members anyway.
    Raises ConfigError for what cannot be, a device that is not there included.
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
        raise ConfigError(f"{name!r} is no device", remedy="use cpu, or cuda:0 and the like") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"there is no device {name}: {torch.cuda.device_count()} CUDA devices are here", remedy="use cpu"
        )
    return device


ONE_CPU = LocalOptions()
