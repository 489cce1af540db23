"""Tensors as rows on the wire, and the checks that make a peer's numbers safe to compute with.

Legend of shapes: T positions, H hidden size.
"""

from __future__ import annotations

import numpy as np
import torch
from swarm_compression import CodecError, get_row_codec
from swarm_protocol.errors import PeerViolation, SessionError
from swarm_protocol.rows import TOKENS, Rows
from torch import Tensor


def rows_of(x_TH: Tensor, codec: str) -> tuple[Rows, float]:
    """float32 [T, H] as rows, and what the codec lost of them relative to their root mean square.

    Raises SessionError for numbers that the codec cannot hold.
    """
    row_codec = get_row_codec(codec)
    num_rows, num_columns = x_TH.shape
    try:
        payload = row_codec.encode(x_TH)
    except CodecError as error:
        raise SessionError(f"the server computed what {codec} cannot carry: {error}") from error
    rows = Rows(codec=codec, num_rows=num_rows, num_columns=num_columns, payload=payload)
    if codec == "raw":
        return rows, 0.0
    lost = torch.linalg.vector_norm(row_codec.decode(payload, num_rows, num_columns) - x_TH)
    return rows, min(1.0, float(lost / torch.linalg.vector_norm(x_TH).clamp(min=1e-30)))


def tokens_of(rows: Rows, vocab_size: int) -> Tensor:
    """int64 [T]. Raises PeerViolation unless all are ids of this vocabulary."""
    if rows.codec != TOKENS:
        raise PeerViolation(f"got rows in {rows.codec}, not token ids")
    tokens_T = np.frombuffer(rows.payload, dtype="<i4").astype(np.int64)
    if tokens_T.min() < 0 or tokens_T.max() >= vocab_size:
        raise PeerViolation(f"token ids are outside this model's vocabulary of {vocab_size}")
    return torch.from_numpy(tokens_T)


def hidden_of(rows: Rows, codec: str, hidden_size: int) -> Tensor:
    """float32 [T, H]. Raises PeerViolation unless all are finite."""
    if rows.codec != codec or rows.num_columns != hidden_size:
        raise PeerViolation(f"got {rows.num_columns} columns in {rows.codec}, not {hidden_size} in {codec}")
    try:
        return get_row_codec(codec).decode(rows.payload, rows.num_rows, hidden_size)
    except CodecError as error:
        raise PeerViolation(f"the rows are damaged: {error}") from None
