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

Shapes: N values, S values of a slab, K blocks, C values a block.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_compression.codec import CodecError, Data, check_size, check_vector

BLOCK_VALUES = 256
MAX_CODE = 127
MIN_ABSMAX = 2.0**-100
_SCALE_MASK = -256  # clears the 8 low bits of an fp32's 24 significant ones
_SLAB_VALUES = 1 << 17  # temporaries stay in a core's cache: three times the speed of one pass over everything
# the bit patterns of positive fp32 numbers are ordered as the numbers are
_MIN_SCALE_BITS = int(np.array(MIN_ABSMAX / MAX_CODE, dtype="<f4").view("<i4")) & _SCALE_MASK
_MAX_SCALE_BITS = int(np.array(np.finfo(np.float32).max / MAX_CODE, dtype="<f4").view("<i4")) & _SCALE_MASK


class Int8Codec:
    """Rounds to nearest, ties to even."""

    name = "int8"

    def encoded_bytes(self, num_values: int) -> int:
        return num_values + 4 * _num_blocks(num_values)

    def encode(self, x_N: Tensor) -> bytes:
        x_N = check_vector(x_N)
        wire = np.empty(self.encoded_bytes(x_N.numel()), dtype=np.uint8)
        num_scale_bytes = 4 * _num_blocks(x_N.numel())
        scale_K = torch.from_numpy(wire[:num_scale_bytes].view("<f4"))
        code_N = torch.from_numpy(wire[num_scale_bytes:].view(np.int8))
        for x_S, scale_S, code_S in zip(
            torch.split(x_N, _SLAB_VALUES),
            torch.split(scale_K, _SLAB_VALUES // BLOCK_VALUES),
            torch.split(code_N, _SLAB_VALUES),
            strict=True,
        ):
            _encode_slab(x_S, scale_S, code_S)
        return wire.tobytes()

    def decode(self, data: Data, num_values: int) -> Tensor:
        view = check_size(data, num_values, self.encoded_bytes(num_values))
        num_blocks = _num_blocks(num_values)
        _check_scales(np.frombuffer(view, dtype="<i4", count=num_blocks))
        scale_K = np.frombuffer(view, dtype="<f4", count=num_blocks)
        code_N = np.frombuffer(view, dtype=np.int8, offset=4 * num_blocks)
        if num_values and code_N.min() < -MAX_CODE:
            raise CodecError("-128 is not a code")
        x_N = code_N.astype(np.float32)
        num_whole = num_values // BLOCK_VALUES
        whole_KC = x_N[: num_whole * BLOCK_VALUES].reshape(-1, BLOCK_VALUES)
        np.multiply(whole_KC, scale_K[:num_whole, None], out=whole_KC)
        x_N[num_whole * BLOCK_VALUES :] *= scale_K[num_whole:]
        return torch.from_numpy(x_N)


def _num_blocks(num_values: int) -> int:
    return -(-num_values // BLOCK_VALUES)


def _encode_slab(x_S: Tensor, scale_K: Tensor, code_S: Tensor) -> None:
    """Write the scales and codes of `x_S`, whose last block alone may be short."""
    if gap := -x_S.numel() % BLOCK_VALUES:
        x_S = torch.nn.functional.pad(x_S, (0, gap))  # zeros change neither absmax nor codes
    x_KC = x_S.view(-1, BLOCK_VALUES)
    work_KC = torch.abs(x_KC)
    absmax_K = work_KC.amax(dim=1)
    if not bool(torch.isfinite(absmax_K).all()):
        raise CodecError("a value is not finite")
    absmax_K = torch.where(absmax_K < MIN_ABSMAX, 0.0, absmax_K)
    scale_K.copy_((absmax_K / MAX_CODE).view(torch.int32).bitwise_and_(_SCALE_MASK).view(torch.float32))
    inverse_K = torch.where(scale_K > 0, scale_K.reciprocal(), 0.0)
    torch.mul(x_KC, inverse_K.unsqueeze(1), out=work_KC).round_()
    code_S.copy_(work_KC.view(-1)[: code_S.numel()])


def _check_scales(bits_K: NDArray[np.int32]) -> None:
    """Refuse what no encoder writes: negative, not finite, under the least, or with over 16 significant bits."""
    in_range_K = (bits_K >= _MIN_SCALE_BITS) & (bits_K <= _MAX_SCALE_BITS)
    if not bool((((bits_K == 0) | in_range_K) & (bits_K & 0xFF == 0)).all()):
        raise CodecError("a scale is negative, not finite, or not one that an encoder writes")
