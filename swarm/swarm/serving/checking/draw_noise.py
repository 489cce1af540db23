"""Checks a draw against recomputed logits: how far would the logits have to be off for this token to be drawn?

A draw depends on the logits, and on a number that follows from the client's seed and the token's place in the answer
(`swarm.serving.sampling.drawing`). Honest servers' logits differ a little, so if the number is near the edge of a
token's range, servers may draw different tokens. `draw_noise` is the least bound on the error of each logit with which
the token can be drawn. It never exceeds the true error: a token drawn from logits that are off by at most d has a
`draw_noise` of at most d.

Pure, and without torch, which clients lack. Shapes: K largest logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from swarm_protocol.session_frames import TokenDraw

from swarm.serving.sampling.sampling import uniform

NUM_STEPS = 24
"""Bisection steps of the search for the noise, which give a precision of a millionth of the logits' spread."""

SLACK = 1e-9
"""Relative rounding error of sums in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestLogits:
    """The largest logits of one position in descending order, their token ids, and the `log_sum` of all logits: the
    logarithm of the sum of exp(logit / temperature), with the draw's temperature.
    """

    values_K: NDArray[np.float64]
    ids_K: NDArray[np.int64]
    log_sum: float

    @property
    def scale(self) -> float:
        """The largest magnitude, to which noise is relative."""
        return float(np.abs(self.values_K).max()) or 1.0


def draw_noise(logits: LargestLogits, draw: TokenDraw, token_id: int) -> float:
    """Return the least noise of the logits with which `draw` gives the token; infinity if none up to the logits' range
    does."""
    at = np.flatnonzero(logits.ids_K == token_id)
    own = float(logits.values_K[at[0]]) if len(at) else float(logits.values_K[-1])
    if not draw.temperature:
        return (float(logits.values_K[0]) - own) / 2
    weighed = _Weighed(logits, draw, own, is_known=bool(len(at)))
    if weighed.can_draw(0.0):
        return 0.0
    high = max(logits.scale, float(logits.values_K[0] - logits.values_K[-1]))
    if not weighed.can_draw(high):
        return math.inf
    low = 0.0
    for _ in range(NUM_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if weighed.can_draw(middle) else (middle, high)
    return high


class _Weighed:
    """The logits as weights exp((logit - largest) / temperature), and the range that they leave for the draw's number.

    `own` is the token's logit, or the least of the largest logits if it is not among them.
    """

    def __init__(self, logits: LargestLogits, draw: TokenDraw, own: float, *, is_known: bool) -> None:
        self._draw = draw
        self._own = own
        self._is_known = is_known
        self._values_K = logits.values_K
        self._scaled_K = (logits.values_K - logits.values_K[0]) / draw.temperature
        self._weights_K = np.exp(self._scaled_K)
        rest = math.exp(min(700.0, logits.log_sum - float(logits.values_K[0]) / draw.temperature))
        self._tail = max(0.0, rest - float(self._weights_K.sum()))

    def can_draw(self, noise: float) -> bool:
        """Return whether the token can be drawn from logits that are off by at most `noise` each."""
        draw, weights_K, values_K = self._draw, self._weights_K, self._values_K
        ratio = math.exp(min(700.0, 2 * noise / draw.temperature)) * (1 + SLACK)
        sure_K = values_K > self._own + 2 * noise
        before = float(weights_K[sure_K].sum())
        if not self._is_kept(noise, ratio, int(sure_K.sum()), before):
            return False
        low, high = self._kept_mass(noise, ratio)
        beside = float(weights_K[~sure_K & (values_K >= self._own - 2 * noise)].sum())
        if not self._is_known or values_K[-1] >= self._own - 2 * noise:
            beside += self._tail
        number = uniform(draw.seed, draw.index)
        return number * high * ratio >= before * (1 - SLACK) and number * low <= (before + beside) * ratio

    def _is_kept(self, noise: float, ratio: float, num_before: int, before: float) -> bool:
        """Return whether the token may pass top_k, min_p and top_p."""
        draw = self._draw
        if draw.top_k and num_before >= draw.top_k:
            return False
        if draw.min_p and (self._own + 2 * noise - self._values_K[0]) / draw.temperature < math.log(draw.min_p) - SLACK:
            return False
        return before <= draw.top_p * self._mass(noise)[1] * ratio * (1 + SLACK)

    def _mass(self, noise: float) -> tuple[float, float]:
        """Return bounds of the total weight that min_p and top_k keep."""
        draw, spread = self._draw, 2 * noise / self._draw.temperature
        cut = math.log(draw.min_p) if draw.min_p else -math.inf
        num_sure = int((self._scaled_K >= cut + spread + SLACK).sum())
        num_maybe = int((self._scaled_K >= cut - spread - SLACK).sum())
        size = len(self._scaled_K)
        tail_low, tail_high = (self._tail if num_sure == size and not draw.min_p else 0.0), 0.0
        if num_maybe == size:
            tail_high = self._tail
        if draw.top_k:
            num_sure, num_maybe = min(num_sure, draw.top_k), min(num_maybe, draw.top_k)
            if draw.top_k <= size:
                tail_low = tail_high = 0.0
            else:
                tail_low, tail_high = 0.0, min(tail_high, (draw.top_k - size) * float(self._weights_K[-1]))
        low = max(float(self._weights_K[:num_sure].sum()), float(self._weights_K[0]))
        return low + tail_low, max(low, float(self._weights_K[:num_maybe].sum())) + tail_high

    def _kept_mass(self, noise: float, ratio: float) -> tuple[float, float]:
        """Return bounds of the total weight that min_p, top_k and top_p keep."""
        low, high = self._mass(noise)
        top_p = self._draw.top_p
        if top_p == 1.0:
            return low, high
        # top_p keeps the fewest tokens that reach it: at most one token's weight above that share
        reached = int(np.searchsorted(np.cumsum(self._weights_K), top_p * low / ratio))
        last = float(self._weights_K[min(reached, len(self._weights_K) - 1)])
        return min(low, top_p * low), min(high, top_p * high + last * ratio)
