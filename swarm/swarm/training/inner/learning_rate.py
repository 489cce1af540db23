"""The inner learning rate's factor: a pure function of the run's progress and of the replica's own steps."""

from __future__ import annotations

import math

from swarm.training.run.run_config import InnerConfig


def schedule_factor(config: InnerConfig, done_steps: int, total_steps: int) -> float:
    """For the run's inner step `done_steps`, from 0 on, of `total_steps`: from 1 down to `final_ratio` in the last one.

    "cosine" is half a period (Loshchilov and Hutter 2017, arXiv 1608.03983, without restarts). Steps after the last
    one, which members that are overtaken may take, have the last one's.
    """
    progress = min(1.0, done_steps / max(1, total_steps - 1))
    match config.schedule:
        case "linear":
            left = 1.0 - progress
        case "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * progress))
        case _:
            return 1.0
    return config.final_ratio + (1.0 - config.final_ratio) * left


def warmup_factor(config: InnerConfig, own_steps: int) -> float:
    """For a replica that has taken `own_steps` steps: its optimizer has to find its moments first."""
    return min(1.0, (own_steps + 1) / (config.warmup_steps + 1))
