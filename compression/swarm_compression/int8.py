"""int8 with one fp32 scale per block of 256 values: 1.0156 bytes a value.

Layout, little-endian: ceil(N / 256) fp32 scales, then N int8 codes. A block's scale is its largest magnitude / 127,
cut to 16 significant bits. A code has 7 bits, so code * scale is exact in fp32. From this follow:

- the bytes and the decoded values are the same on every machine: no product is rounded, so fusing the
  multiplication into an addition, as compilers and GPUs like to, cannot change a result;
- |x - decoded| <= absmax / 254 plus rounding (1e-5 of it), where the block's absmax is at least 2^-100;
- decoded values encode to the same bytes again: encode(decode(encode(x))) == encode(x).

A block whose absmax is under 2^-100 becomes zeros. That keeps every number normal, so that machines which flush
denormals agree with those that do not. The absmax block format is that of Dettmers et al. 2021 (arXiv 2110.02861,
section 2) with linear instead of dynamic codes.

Shapes: N values, K blocks, C values a block.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from swarm_compression.codec import CodecError, Data, check_size, check_vector

BLOCK_VALUES = 256
MAX_CODE = 127
MIN_ABSMAX = 2.0**-100
_SCALE_MASK = -256  # clears the 8 low bits of an fp32's 24 significant ones
# the bit patterns of positive fp32 numbers are ordered as the numbers are
_MIN_SCALE_BITS = int(np.array(MIN_ABSMAX / MAX_CODE, dtype="<f4").view("<i4")) & _SCALE_MASK
_MAX_SCALE_BITS = int(np.array(np.finfo(np.float32).max / MAX_CODE, dtype="<f4").view("<i4")) & _SCALE_MASK


class Int8Codec:
    """Rounds to nearest, ties to even. Torch's elementwise kernels: about 1 GB/s of fp32 a core."""

    name = "int8"

    def encoded_bytes(self, num_values: int) -> int:
        return num_values + 4 * _num_blocks(num_values)

    def encode(self, x_N: Tensor) -> bytes:
        x_KC = _blocks(check_vector(x_N))
        absmax_K = torch.linalg.vector_norm(x_KC, ord=torch.inf, dim=1)
        if not bool(torch.isfinite(absmax_K).all()):
            raise CodecError("a value is not finite")
        absmax_K = torch.where(absmax_K < MIN_ABSMAX, 0.0, absmax_K)
        scale_K = (absmax_K / MAX_CODE).view(torch.int32).bitwise_and_(_SCALE_MASK).view(torch.float32)
        inverse_K = torch.where(scale_K > 0, scale_K.reciprocal(), 0.0)
        code_KC = (x_KC * inverse_K.unsqueeze(1)).round_().to(torch.int8)
        scales = scale_K.cpu().numpy().astype("<f4", copy=False).tobytes()
        return scales + code_KC.view(-1)[: x_N.numel()].cpu().numpy().tobytes()

    def decode(self, data: Data, num_values: int) -> Tensor:
        view = check_size(data, num_values, self.encoded_bytes(num_values))
        num_blocks = _num_blocks(num_values)
        _check_scales(np.frombuffer(view, dtype="<i4", count=num_blocks))
        scale_K = np.frombuffer(view, dtype="<f4", count=num_blocks)
        code_N = np.frombuffer(view, dtype=np.int8, offset=4 * num_blocks)
        if num_values and code_N.min() < -MAX_CODE:
            raise CodecError("-128 is not a code")
        x_N = np.empty(num_values, dtype=np.float32)
        whole = num_values - num_values % BLOCK_VALUES
        np.multiply(
            code_N[:whole].reshape(-1, BLOCK_VALUES),
            scale_K[: whole // BLOCK_VALUES, None],
            out=x_N[:whole].reshape(-1, BLOCK_VALUES),
        )
        if whole < num_values:
            np.multiply(code_N[whole:], scale_K[-1], out=x_N[whole:])
        return torch.from_numpy(x_N)


def _num_blocks(num_values: int) -> int:
    return -(-num_values // BLOCK_VALUES)


def _blocks(x_N: Tensor) -> Tensor:
    """`x_N` as [K, C], the last block filled with zeros, which change neither absmax nor codes."""
    if gap := -x_N.numel() % BLOCK_VALUES:
        x_N = torch.nn.functional.pad(x_N, (0, gap))
    return x_N.view(-1, BLOCK_VALUES)


def _check_scales(bits_K: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
    """Refuse what no encoder writes: negative, not finite, denormal, or with more than 16 significant bits."""
    in_range_K = (bits_K >= _MIN_SCALE_BITS) & (bits_K <= _MAX_SCALE_BITS)
    if not bool((((bits_K == 0) | in_range_K) & (bits_K & 0xFF == 0)).all()):
        raise CodecError("a scale is negative, not finite, or not one that an encoder writes")
