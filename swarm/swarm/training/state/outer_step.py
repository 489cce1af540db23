"""The arithmetic of the outer step, which applies a group's aggregated pseudo-gradient to parameters and momentum.

Pure. The results are bit-identical on all machines. Shapes: N values, C values of a block.
"""

from __future__ import annotations

import torch
from swarm_protocol.errors import RoundError
from torch import Tensor

from swarm.training.run.run_tables import OuterConfig

_BLOCK_VALUES = 1 << 16  # the temporary fits a core's cache, whatever the size of the model


def apply_outer_step(theta_N: Tensor, momentum_N: Tensor, delta_N: Tensor, config: OuterConfig) -> None:
    """Take the outer step: m <- mu m + delta, then theta <- theta - eta (delta + mu m), in place, all fp32 on the CPU.

    "average" is theta <- theta - delta, and does not change the momentum. With the aggregator `mean` it is local SGD
    (FedAvg, McMahan et al. 2017, arXiv 1602.05629, algorithm 1).

    `delta_N` is the run's aggregate of the members' theta_start - theta_local. The step is that of DiLoCo (Douillard et
    al. 2023, arXiv 2311.08105, algorithm 1), with the Nesterov form of torch.optim.SGD. Equal inputs give equal bits,
    on any machine and with any number of threads, since each product and each sum is rounded separately. (With an
    `alpha`, torch fuses them in some SIMD lanes and not in others.) Raises RoundError, with both tensors untouched, if
    `delta_N` is not finite.
    """
    for x_N in (theta_N, momentum_N, delta_N):
        if x_N.dtype != torch.float32 or x_N.device.type != "cpu" or x_N.shape != (theta_N.numel(),):
            raise ValueError("the outer step needs three flat fp32 CPU tensors of one size")
    blocks = [torch.split(x_N, _BLOCK_VALUES) for x_N in (theta_N, momentum_N, delta_N)]
    if not all(bool(torch.isfinite(delta_C).all()) for delta_C in blocks[2]):
        raise RoundError("the group's pseudo-gradient is not finite", remedy="the round is tried again")
    if config.optimizer == "average":
        theta_N.sub_(delta_N)
        return
    for theta_C, momentum_C, delta_C in zip(*blocks, strict=True):
        momentum_C.mul_(config.momentum).add_(delta_C)
        step_C = (momentum_C * config.momentum).add_(delta_C).mul_(config.learning_rate)
        theta_C.sub_(step_C)
