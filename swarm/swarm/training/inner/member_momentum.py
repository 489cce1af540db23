"""Member momentum: a member contributes the moving average of its pseudo-gradients instead of the last one alone.

Averages of honest members lie closer together than single pseudo-gradients, so that liars have less room to hide
between them (Karimireddy et al. 2021, arXiv 2012.10333, section 5). What a member contributes then follows from its
past intervals, too: nobody can compute it from one interval again. The averages are in no state and no checkpoint;
after a restart they start anew. They take 4 bytes for each value that the member has contributed to.

Shapes: F values of a fragment.
"""

from __future__ import annotations

import torch
from torch import Tensor


class MemberMomentum:
    """The moving averages of one member, one for each fragment. `momentum` is at least 0 and less than 1."""

    def __init__(self, momentum: float) -> None:
        self._momentum = momentum
        self._averages: dict[int, tuple[int, Tensor]] = {}

    def averaged(self, where: slice, delta_F: Tensor) -> Tensor:
        """Take in `delta_F`, the pseudo-gradient of the fragment at `where`, and return the average of that fragment's
        so far, in which the one before counts `momentum` times as much. The first averages are not biased towards zero.
        """
        count, average_F = self._averages.get(where.start, (0, torch.zeros_like(delta_F)))
        average_F = average_F.mul_(self._momentum).add_(delta_F, alpha=1 - self._momentum)
        self._averages[where.start] = (count + 1, average_F)
        return average_F / (1 - self._momentum ** (count + 1))
