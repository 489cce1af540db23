"""Error feedback: what a codec lost of this round's vector is added to the next round's.

After Karimireddy et al. 2019 (arXiv 1901.09847, algorithm 1, EF-SGD): p = x + e; send C(p); e <- p - C(p). The sum of
the vectors sent differs from the sum of the vectors given by one residual, so the mean error over R rounds is |e| / R,
which vanishes. Without feedback, a codec that rounds small values to 0 never sends them.

Unlike in the paper, a round may fail: `commit` makes the new residual the current one, and `rollback` drops it. The
residual is bounded: if a codec's error is at most q < 1 of a block's absmax, |e| <= q / (1 - q) times the largest value
ever given. One task owns it; `encode` alone may run in several threads, for ranges that do not overlap.

Shapes: N values of the whole vector, F values of a range of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarm_compression.codec import Codec, CodecError


class ErrorFeedback:
    """Error feedback of one vector of `num_values`. Takes 8 bytes a value, for the committed and the pending
    residual."""

    def __init__(self, codec: Codec, num_values: int) -> None:
        self._codec = codec
        self._residual_N = torch.zeros(num_values)
        self._next_N = torch.zeros(num_values)

    def encode(self, x_F: Tensor, start: int = 0) -> bytes:
        """Encode values [start, start + F) plus what earlier rounds lost of them. Repeated calls give the same bytes
        until `commit`. `x_F` is fp32, on any device. Raises CodecError if a sum is not finite, and then leaves the
        residual unchanged."""
        stop = start + x_F.numel()
        if not 0 <= start <= stop <= self._residual_N.numel():
            raise CodecError(f"values {start} to {stop} of {self._residual_N.numel()}")
        if x_F.dim() != 1:
            raise CodecError(f"expected a flat vector, got {tuple(x_F.shape)}")
        owed_F = self._residual_N[start:stop] + x_F.detach().cpu()
        data = self._codec.encode(owed_F)
        torch.sub(owed_F, self._codec.decode(data, owed_F.numel()), out=self._next_N[start:stop])
        return data

    def commit(self) -> None:
        """After a round succeeded, make the residuals of ranges encoded since the last `commit` or `rollback` the
        current ones."""
        self._residual_N.copy_(self._next_N)

    def rollback(self) -> None:
        """After a round failed, drop these residuals, since nothing was sent and nothing lost."""
        self._next_N.copy_(self._residual_N)
