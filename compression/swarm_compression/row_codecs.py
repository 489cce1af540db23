"""Codecs of activations: each row is encoded by itself, so that rows can be split anywhere and sent again unchanged.

`raw` is fp32, `bf16` half of that. `int8` has a scale for each block of 64 columns: a row is its scales as bf16, then
its codes, 1.03 bytes a value if 64 divides the columns. A scale is the block's largest magnitude / 127, rounded up to
bf16, so that no code exceeds 127. With 7 bits of code and 8 of scale, code * scale is exact in fp32, so decoded values
are the same on every machine. |x - decoded| <= absmax / 254 * (1 + 2^-7), if absmax is at least 2^-100. A smaller block
becomes zeros, so that all numbers are normal; one over 127 * 2^114 is refused. Everything is little-endian; rounding is
to nearest, ties to even. (Absmax blocks as in Dettmers et al. 2021, arXiv 2110.02861, section 2, with linear codes.)

Shapes: R rows, C columns, K blocks of a row, B columns of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from swarm_compression.codec import Codec, CodecError, Data, check_size

BLOCK_COLUMNS = 64
MAX_CODE = 127
MIN_ABSMAX = 2.0**-100
MAX_SCALE = 2.0**114
_FLOAT = np.dtype("<f4")
_MAX_SCALE_BITS = (114 + 127) << 7  # bit patterns of positive numbers have their order


class RowCodec(Protocol):
    """Encodes rows. A row gives the same bytes, whatever rows are beside it."""

    @property
    def name(self) -> str: ...

    def row_bytes(self, num_columns: int) -> int:
        """Return the exact size of each row."""

    def encode(self, x_RC: Tensor) -> bytes:
        """Encode `x_RC`: fp32, on any device. Raises CodecError otherwise, and if it is not finite."""

    def decode(self, data: Data, num_rows: int, num_columns: int) -> Tensor:
        """Return a new fp32 CPU tensor [num_rows, num_columns], all finite. Raises CodecError; for a wrong size before
        it allocates memory."""


@dataclass(frozen=True, slots=True)
class FlatRows:
    """Rows of a codec that encodes each value independently."""

    name: str
    codec: Codec

    def row_bytes(self, num_columns: int) -> int:
        return self.codec.encoded_bytes(num_columns)

    def encode(self, x_RC: Tensor) -> bytes:
        return self.codec.encode(x_RC.reshape(-1))

    def decode(self, data: Data, num_rows: int, num_columns: int) -> Tensor:
        return self.codec.decode(data, num_rows * num_columns).reshape(num_rows, num_columns)


class RawRows:
    """Unchanged fp32. Only numpy, since calls are most of the cost for a single row, which decoding sends."""

    name = "raw"

    def row_bytes(self, num_columns: int) -> int:
        return 4 * num_columns

    def encode(self, x_RC: Tensor) -> bytes:
        if x_RC.dtype != torch.float32 or x_RC.dim() != 2:
            raise CodecError(f"expected float32 rows, got {tuple(x_RC.shape)} of {x_RC.dtype}")
        values = x_RC.detach().cpu().numpy()
        if not np.isfinite(values).all():
            raise CodecError("a value is not finite")
        return values.astype(_FLOAT, copy=False).tobytes()

    def decode(self, data: Data, num_rows: int, num_columns: int) -> Tensor:
        view = check_size(data, num_rows * num_columns, num_rows * self.row_bytes(num_columns))
        # astype copies: torch accepts neither foreign byte orders nor memory that is read-only or unaligned
        values = np.frombuffer(view, dtype=_FLOAT).reshape(num_rows, num_columns).astype(np.float32)
        if not np.isfinite(values).all():
            raise CodecError("a value is not finite")
        return torch.from_numpy(values)


class Int8Rows:
    """Rows with one byte a value, and one bf16 scale for each block of 64 columns."""

    name = "int8"

    def row_bytes(self, num_columns: int) -> int:
        return num_columns + 2 * _num_blocks(num_columns)

    def encode(self, x_RC: Tensor) -> bytes:
        if x_RC.dtype != torch.float32 or x_RC.dim() != 2:
            raise CodecError(f"expected float32 rows, got {tuple(x_RC.shape)} of {x_RC.dtype}")
        num_rows, num_columns = x_RC.shape
        num_blocks = _num_blocks(num_columns)
        x_RC = x_RC.detach().cpu()
        if gap := -num_columns % BLOCK_COLUMNS:
            x_RC = torch.nn.functional.pad(x_RC, (0, gap))  # zeros change neither absmax nor codes
        x_RKB = x_RC.reshape(num_rows, num_blocks, BLOCK_COLUMNS)
        absmax_RK = x_RKB.abs().amax(dim=2)
        if not bool((absmax_RK <= MAX_CODE * MAX_SCALE).all()):
            raise CodecError("a value is not finite, or larger than int8 rows can hold")
        scale_RK = _rounded_up(torch.where(absmax_RK < MIN_ABSMAX, 0.0, absmax_RK / MAX_CODE))
        code_RKB = (x_RKB / torch.where(scale_RK > 0, scale_RK, torch.inf).unsqueeze(2)).round_().to(torch.int8)
        wire = np.empty((num_rows, self.row_bytes(num_columns)), dtype=np.uint8)
        wire[:, : 2 * num_blocks] = (scale_RK.view(torch.int32).numpy() >> 16).astype("<u2").view(np.uint8)
        wire[:, 2 * num_blocks :] = code_RKB.reshape(num_rows, -1)[:, :num_columns].numpy().view(np.uint8)
        return wire.tobytes()

    def decode(self, data: Data, num_rows: int, num_columns: int) -> Tensor:
        row_bytes, num_blocks = self.row_bytes(num_columns), _num_blocks(num_columns)
        view = check_size(data, num_rows, num_rows * row_bytes)
        wire = np.frombuffer(view, dtype=np.uint8).reshape(num_rows, row_bytes)
        bits_RK = np.ascontiguousarray(wire[:, : 2 * num_blocks]).view("<u2")
        if bool((bits_RK > _MAX_SCALE_BITS).any()):
            raise CodecError("a scale is negative, not finite, or larger than any that an encoder writes")
        code_RC = wire[:, 2 * num_blocks :].view(np.int8)
        if code_RC.size and code_RC.min() < -MAX_CODE:
            raise CodecError("-128 is not a code")
        scale_RK = (bits_RK.astype(np.uint32) << 16).view(np.float32)
        scale_RC = np.repeat(scale_RK, BLOCK_COLUMNS, axis=1)[:, :num_columns]
        return torch.from_numpy(code_RC * scale_RC)


def _num_blocks(num_columns: int) -> int:
    return -(-num_columns // BLOCK_COLUMNS)


def _rounded_up(x: Tensor) -> Tensor:
    """Round up to the next fp32 that bf16 can represent. `x` is not negative, and far below the maximum."""
    return ((x.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
