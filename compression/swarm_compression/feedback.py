"""Error feedback: add what a codec lost of this round's vector to the next round's.

After Karimireddy et al. 2019 (arXiv 1901.09847, algorithm 1, EF-SGD): p = x + e; send C(p); e <- p - C(p). The vectors
sent sum up to the vectors given, up to one residual, so the mean error over R rounds is |e| / R: it vanishes, where
without feedback a codec that always rounds small values to 0 never sends them.

Unlike there, a round may fail: the new residual counts from `commit` on, and `rollback` forgets it. It is bounded: a
codec that errs by at most q < 1 of a block's absmax leaves |e| <= q / (1 - q) times the largest value ever given. One
task owns it; `encode` alone may run in several threads, for ranges that do not overlap.

Shapes: N values of the whole vector, F values of a range of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarm_compression.codec import Codec, CodecError


class ErrorFeedback:
    """Error feedback of one vector of `num_values`. It takes 8 bytes a value: the committed residual and the pending
    one."""

    def __init__(self, codec: Codec, num_values: int) -> None:
        self._codec = codec
        self._residual_N = torch.zeros(num_values)
        self._next_N = torch.zeros(num_values)

    def encode(self, x_F: Tensor, start: int = 0) -> bytes:
        """Encode values [start, start + F) plus what earlier rounds lost of them; the same bytes again until `commit`.
        `x_F` is fp32, on any device. Raises CodecError, and leaves the residual as it was, if a sum is not finite."""
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
        """Make the residuals of ranges encoded since the last `commit` or `rollback` the current ones: the round
        succeeded."""
        self._residual_N.copy_(self._next_N)

    def rollback(self) -> None:
        """Forget these residuals: the round failed, so nothing was sent and nothing lost."""
        self._next_N.copy_(self._residual_N)
