"""Represents rows of numbers as bytes: token ids or activations of consecutive positions, each encoded on its own.

So rows can be cut anywhere and sent again as they are. The decoding side must check that the numbers are finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from swarm_protocol import limits
from swarm_protocol.checks import Checked, check_int, whole

Data: TypeAlias = bytes | bytearray | memoryview

TOKENS = "tokens"
"""The codec of token ids: int32, no columns."""

CODECS = ("raw", "bf16", "int8")
"""Codecs of activations: fp32; bf16; int8 with a bf16 scale for each INT8_BLOCK columns, a row's scales before its
codes."""

INT8_BLOCK = 64


def row_bytes(codec: str, num_columns: int) -> int:
    """Return the bytes of one row. Raises ValueError for an unknown codec."""
    match codec:
        case "raw":
            return 4 * num_columns
        case "bf16":
            return 2 * num_columns
        case "int8":
            return num_columns + 2 * -(-num_columns // INT8_BLOCK)
        case "tokens" if num_columns == 0:
            return 4
    raise ValueError(f"rows of {num_columns} columns in an unknown codec {codec!r:.40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows(Checked):
    """`num_rows` rows of `num_columns`, one after another. `payload` may be a view of a larger message: keep a copy."""

    codec: str
    num_rows: Annotated[int, whole(limits.MAX_STEP_TOKENS, low=1)]
    num_columns: int
    payload: Data

    def __post_init__(self) -> None:
        check_int(self.num_columns, "num_columns", low=int(self.codec != TOKENS), high=limits.MAX_COLUMNS)
        if len(self.payload) != self.num_rows * self.row_bytes:
            raise ValueError(f"{self.num_rows} rows of {self.row_bytes} bytes are not {len(self.payload)} bytes")

    @classmethod
    def sized(cls, codec: str, num_rows: int, num_columns: int, data: memoryview) -> Rows:
        """Return rows over the first bytes of `data`. Raises ValueError if there are too few."""
        payload = data[: num_rows * row_bytes(codec, num_columns)]
        return cls(codec=codec, num_rows=num_rows, num_columns=num_columns, payload=payload)

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.codec, self.num_columns)

    def first(self, num_rows: int) -> Rows:
        """Return the first `num_rows`, in the same memory."""
        if num_rows == self.num_rows:
            return self
        return Rows.sized(self.codec, num_rows, self.num_columns, memoryview(self.payload))

    def without(self, num_rows: int) -> Rows:
        """Return all but the first `num_rows`, in the same memory."""
        if not num_rows:
            return self
        rest = memoryview(self.payload)[num_rows * self.row_bytes :]
        return Rows(codec=self.codec, num_rows=self.num_rows - num_rows, num_columns=self.num_columns, payload=rest)
