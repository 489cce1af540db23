"""Measures by how much drawn contributions of other members change the loss on held-out data.

A member holds every contribution's slice of its own part, which it has checked against the sender's commitment, but no
other member's whole contribution. So it measures the effect of its own part of a contribution, which sends nothing
more: the loss of the state that the step began from, minus the loss of that state after an outer step whose mean is the
slice. Effects are scaled from the part to the whole vector, and the median of several members' effects counts
(`standing.held_out_scores`). Each member draws its own held-out samples, which nobody knew when contributions were
made.

The training thread measures before its next interval, which takes some percent of an interval's time. `OuterSteps` owns
the measurement; `round_driver` puts the effects into the next report. Shapes: N values of the flat vector, F of a part.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from swarm_protocol import limits
from swarm_protocol.errors import RoundError
from torch import Tensor

from swarm.training.evidence.wrong_interval import IntervalStart
from swarm.training.inner.interval import Intervals
from swarm.training.run.run_config import RunConfig
from swarm.training.standing.held_out_scores import MICRO
from swarm.training.state.run_context import RunContext

logger = logging.getLogger(__name__)

LEAST_WINDOWS, MOST_WINDOWS = 2, 64
SAMPLES_A_WINDOW = 40
"""Samples of an interval for each held-out window. Each of these samples takes a gradient."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnSlices:
    """Holds the slices [F] of drawn contributions that a member has, by peer. `where` is the place of its part in the
    vector that the step moves."""

    where: slice
    slices: Mapping[str, Tensor]


class HeldOutEffects:
    """Measures and keeps the effects for one member. `of` returns those for a state's report."""

    def __init__(self, context: RunContext, intervals: Intervals) -> None:
        self._context = context
        self._intervals = intervals
        self._measured: tuple[bytes, tuple[int, ...]] = (b"", ())

    def of(self, state_digest: bytes) -> tuple[int, ...]:
        """Return the effects of the contributions that the state with this digest names as drawn; empty if they have
        not been measured, or not yet."""
        digest, effects = self._measured
        return effects if digest == state_digest else ()

    def measure_soon(self, start: IntervalStart | None, held: DrawnSlices | None, tasks: asyncio.TaskGroup) -> None:
        """Measure the contributions in `held` to the step that began from `start` and led to the committed state,
        before all later requests to the training thread."""
        replica = self._context.replica
        drawn, config = replica.current.manifest.drawn, replica.config
        is_last = replica.outer_step == config.outer_steps  # no report follows, and the run's end would wait
        if is_last or start is None or held is None or not {*held.slices} <= {*drawn}:
            return
        fragment, digest = replica.fragment(replica.outer_step), replica.digest
        where = slice(fragment.start + held.where.start, fragment.start + held.where.stop)
        scale = (fragment.stop - fragment.start) / (where.stop - where.start)
        draw = int.from_bytes(hashlib.sha256(digest + self._context.network.peer_id.encode()).digest()[:8], "big")
        loss = partial(self._intervals.inner.held_out_loss, num_windows=num_held_out_windows(config), draw=draw)
        measuring = self._intervals.off_loop(_effects, loss, config, start.theta_N, where, scale, held.slices)
        tasks.create_task(self._keep(digest, drawn, measuring), name="measure contributions")

    async def _keep(self, digest: bytes, drawn: tuple[str, ...], measuring: asyncio.Future[dict[str, int]]) -> None:
        try:
            found = await measuring
        except (RoundError, torch.OutOfMemoryError) as error:  # the device may have just enough memory for training
            logger.warning("contributions could not be measured: %s", error)
            return
        # a member does not measure its own contribution, and the others ignore the 0 in its place
        self._measured = digest, tuple(found.get(peer, 0) for peer in drawn)


def _effects(
    loss: Callable[[Tensor], float],
    config: RunConfig,
    theta_N: Tensor,
    where: slice,
    scale: float,
    slices: Mapping[str, Tensor],
) -> dict[str, int]:
    """Return the effect of each of the `slices`, which are at `where` in the weights `theta_N`. `loss` returns the loss
    of weights on drawn held-out samples. `scale` is the length of the contributions over that of the slices. Blocks for
    one forward pass per slice, and one more."""
    step = 1.0 if config.outer.optimizer == "average" else config.outer.learning_rate
    before, moved_N, found = loss(theta_N), theta_N.clone(), dict[str, int]()
    for peer, slice_F in slices.items():
        torch.sub(theta_N[where], slice_F, alpha=step, out=moved_N[where])
        found[peer] = effect_of(before - loss(moved_N), scale)
    return found


def effect_of(fall: float, scale: float) -> int:
    """Return the effect of a slice that lowers the loss by `fall` nats, of a vector `scale` times as long. A loss that
    is not finite is the worst effect."""
    effect = fall * scale * MICRO
    return round(max(-limits.MAX_EFFECT, min(effect, limits.MAX_EFFECT))) if math.isfinite(fall) else -limits.MAX_EFFECT


def num_held_out_windows(config: RunConfig) -> int:
    """Return the number of windows on which effects are measured: two forward passes over them take some percent of an
    interval."""
    return max(LEAST_WINDOWS, min(MOST_WINDOWS, config.samples_per_interval // SAMPLES_A_WINDOW))
