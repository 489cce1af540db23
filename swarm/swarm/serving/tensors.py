"""Tensors as bytes on the wire, and the checks that make a peer's numbers safe to compute with.

Legend of shapes: T positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from swarm_protocol.errors import PeerViolation
from swarm_protocol.serving_messages import TensorBytes
from torch import Tensor

_NUMPY: dict[str, np.dtype[Any]] = {"int64": np.dtype("<i8"), "float32": np.dtype("<f4")}


def pack(x: Tensor) -> TensorBytes:
    """Token ids as int64, anything else as float32."""
    dtype = "float32" if x.is_floating_point() else "int64"
    array = x.to("cpu", torch.float32 if dtype == "float32" else torch.int64).contiguous().numpy()
    payload = array.astype(_NUMPY[dtype], copy=False).tobytes()
    return TensorBytes(dtype=dtype, shape=tuple(x.shape), payload=payload)


def unpack_tokens(data: TensorBytes, vocab_size: int) -> Tensor:
    """int64 [T]. Raises PeerViolation unless all are ids of this vocabulary."""
    if len(data.shape) != 1:
        raise PeerViolation(f"token ids have shape {data.shape}, not one side")
    tokens_T = _unpack(data, "int64", data.shape)
    if int(tokens_T.min()) < 0 or int(tokens_T.max()) >= vocab_size:
        raise PeerViolation(f"token ids are outside this model's vocabulary of {vocab_size}")
    return tokens_T


def unpack_floats(data: TensorBytes, num_rows: int, num_columns: int) -> Tensor:
    """float32 [num_rows, num_columns]: hidden states or logits. Raises PeerViolation unless all are finite."""
    x = _unpack(data, "float32", (num_rows, num_columns))
    if not torch.isfinite(x).all():
        raise PeerViolation("the numbers are not all finite")
    return x


def _unpack(data: TensorBytes, dtype: str, shape: tuple[int, ...]) -> Tensor:
    if data.dtype != dtype or data.shape != shape:
        raise PeerViolation(f"got {data.dtype} of shape {data.shape}, not {dtype} of shape {shape}")
    # a copy in the machine's own byte order, which torch may write to
    array = np.frombuffer(data.payload, dtype=_NUMPY[dtype]).astype(_NUMPY[dtype].newbyteorder("="), copy=True)
    return torch.from_numpy(array).reshape(shape)
