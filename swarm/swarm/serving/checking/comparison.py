"""Compares a server's outputs with those that another server computes from the same inputs.

Honest servers of one revision differ only by rounding: they use different batches, kernels and numbers of threads, and
decode step by step where a check runs the whole sequence. As in TOPLOC (Ong et al. 2025, arXiv 2501.16007), thresholds
say how far values may be off. Two things are simpler here. The client has all rows between servers, so whole rows are
compared, not only their largest values. Errors are relative to a row's norm, where TOPLOC counts equal exponents and
averages differences of mantissas.

A draw depends on the logits, and on a number that follows from the client's seed and the token's place in the answer
(`swarm.serving.sampling.drawing`). Honest servers' logits differ a little, so if the number is near the edge of a
token's range, servers may draw different tokens. `draw_noise` is the least bound on the error of each logit with which
the token can be drawn. It never exceeds the true error: a token drawn from logits that are off by at most d has a
`draw_noise` of at most d.

Pure, and without torch, which clients lack. Shapes: T positions, H hidden size, K largest logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from swarm_protocol.rows import INT8_BLOCK
from swarm_protocol.session_frames import TokenDraw

from swarm.serving.checking.finished_answer import Draw
from swarm.serving.sampling.sampling import uniform

Floats = NDArray[np.float64]

MAX_OUTLIERS = 0.02
"""Share of rows whose error may exceed `Tolerance.row`: in half precision, a router sends single rows to another
expert."""

MAX_DEPTH = 64.0
"""Number of blocks after which errors are not expected to grow."""

NUM_STEPS = 24
"""Bisection steps of the search for the noise, which give a precision of a millionth of the logits' spread."""

SLACK = 1e-9
"""Relative rounding error of sums in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """The largest difference of honest servers after one block; after n blocks it is sqrt(n) times as large.

    `median_row` and `row` are norms of a row's difference relative to the row's norm. `fingerprint` is the mean
    difference of the largest logits, and `draw` the noise that a draw needs, both relative to the largest logit.
    """

    median_row: float
    row: float
    fingerprint: float
    draw: float

    def after(self, num_blocks: int) -> Tolerance:
        factor = math.sqrt(min(max(1, num_blocks), MAX_DEPTH))
        return Tolerance(
            median_row=factor * self.median_row,
            row=factor * self.row,
            fingerprint=factor * self.fingerprint,
            draw=factor * self.draw,
        )

    def with_codec(self, codec: str) -> Tolerance:
        """Return the tolerance for rows that were encoded with `codec`, whose loss is added."""
        lost = CODEC_LOSS[codec]
        return Tolerance(
            median_row=self.median_row + lost, row=self.row + 2 * lost, fingerprint=self.fingerprint, draw=self.draw
        )


_HALF = Tolerance(median_row=1.5e-2, row=4e-2, fingerprint=5e-3, draw=2e-2)

TOLERANCES: Mapping[str, Tolerance] = {
    "float32": Tolerance(median_row=1e-4, row=1e-3, fingerprint=1e-4, draw=1e-3),
    "float16": Tolerance(median_row=4e-3, row=2e-2, fingerprint=2e-3, draw=1e-2),
    "bfloat16": _HALF,
    # few rows use another matrix product than many
    "int8": Tolerance(median_row=3e-2, row=6e-2, fingerprint=7e-3, draw=2e-2),
    "int4": _HALF,
}
"""By the dtype of the revision's weights. int8 and int4 compute in bfloat16.

`tests/bench/test_bench_spot_checks.py` measures the differences of honest servers, in 100,000 comparisons of each kind:
see docs/explanation/measurements.md, "Spot checks". Each limit is at least twice the largest difference seen.
"""

CODEC_LOSS: Mapping[str, float] = {"raw": 0.0, "bf16": 4e-3, "int8": 2e-2}
"""Maximum error of a codec in a row, relative to the row's norm, with a margin: 2^-9, and 1/254 of a block's largest
value."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The difference of two servers' outputs of one span. `share` is relative to the tolerance: above 1 is a mismatch.

    `what` names the measure that is largest.
    """

    share: float
    what: str

    @property
    def is_mismatch(self) -> bool:
        return not self.share <= 1.0


def row_errors(given_TH: Floats, expected_TH: Floats) -> Floats:
    """Return [T]: the norm of each row's difference, relative to the norm of the expected row."""
    norms_T = np.linalg.norm(expected_TH, axis=1)
    errors_T: Floats = np.linalg.norm(given_TH - expected_TH, axis=1) / np.maximum(norms_T, 1e-30)
    return errors_T


def compare_rows(given_TH: Floats, expected_TH: Floats, tolerance: Tolerance) -> Difference:
    """Compare the rows that a span gave with recomputed ones."""
    errors_T = row_errors(given_TH, expected_TH)
    # the largest error without outliers
    num_outliers = int(MAX_OUTLIERS * len(errors_T))
    largest = float(np.sort(errors_T)[len(errors_T) - 1 - num_outliers])
    return _worst(
        ("the median row", float(np.median(errors_T)) / tolerance.median_row),
        ("a row", largest / tolerance.row),
    )


def compare_draws(
    draws: Sequence[Draw], logits: Sequence[LargestLogits], tolerance: Tolerance, *, has_plain_draws: bool
) -> Difference:
    """Compare drawn tokens and their fingerprints with recomputed logits.

    Without `has_plain_draws`, only the fingerprints are compared, which are of the unchanged logits.
    """
    measures = [("a token", 0.0)]
    if has_plain_draws:
        for each, found in zip(draws, logits, strict=True):
            noise = draw_noise(found, each.draw, each.token.token_id)
            measures.append(("a token", noise / found.scale / tolerance.draw))
    errors = [
        fingerprint_error(each.token.fingerprint, found)
        for each, found in zip(draws, logits, strict=True)
        if each.token.fingerprint
    ]
    if errors:
        measures.append(("the logits", float(np.median(errors)) / tolerance.fingerprint))
    return _worst(*measures)


def fingerprint_error(fingerprint: bytes, logits: LargestLogits) -> float:
    """Return the mean difference of the fingerprint's logits, relative to the largest one.

    A token that is not among the largest logits counts as the last of them.
    """
    half = len(fingerprint) // 2
    ids_K = np.frombuffer(fingerprint[:half], dtype="<i4")
    values_K = np.frombuffer(fingerprint[half:], dtype="<f4").astype(np.float64)
    known = dict(zip(logits.ids_K.tolist(), logits.values_K.tolist(), strict=True))
    last = float(logits.values_K[-1])
    expected_K = np.array([known.get(token_id, last) for token_id in ids_K.tolist()])
    error = float(np.abs(values_K - expected_K).mean()) / logits.scale
    return error if math.isfinite(error) and len(set(ids_K.tolist())) == len(ids_K) else math.inf


def decoded_rows(rows: bytes, codec: str, num_columns: int) -> Floats:
    """Decode rows of activations to [T, H]. The caller has checked the size. The formats are those of
    `swarm_compression`, which needs torch."""
    if codec == "raw":
        return np.frombuffer(rows, dtype="<f4").reshape(-1, num_columns).astype(np.float64)
    if codec == "bf16":
        bits = np.frombuffer(rows, dtype="<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(-1, num_columns).astype(np.float64)
    num_blocks = -(-num_columns // INT8_BLOCK)
    bytes_TB = np.frombuffer(rows, dtype=np.uint8).reshape(-1, num_columns + 2 * num_blocks)
    scales_TK = (np.ascontiguousarray(bytes_TB[:, : 2 * num_blocks]).view("<u2").astype(np.uint32) << 16).view(
        np.float32
    )
    codes_TH = bytes_TB[:, 2 * num_blocks :].view(np.int8).astype(np.float64)
    return codes_TH * np.repeat(scales_TK, INT8_BLOCK, axis=1)[:, :num_columns].astype(np.float64)


def _worst(*measures: tuple[str, float]) -> Difference:
    what, share = max(measures, key=lambda measure: math.inf if math.isnan(measure[1]) else measure[1])
    return Difference(share=math.inf if math.isnan(share) else share, what=what)


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
