"""What a safetensors file says of itself: which tensors it holds, of which kind and shape, and where. Blocking."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from swarm_protocol.errors import IntegrityError


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """`kind` is the file's word for its numbers, as "BF16". `offset` in bytes is from the file's beginning."""

    kind: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


def read_header(path: Path) -> Mapping[str, TensorEntry]:
    """All tensors of a file, by name. Raises IntegrityError for a truncated file or none of this kind."""
    try:
        with safe_open(path, framework="pt"), path.open("rb") as file:  # the library checks sizes and offsets
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
    except (SafetensorError, OSError, ValueError) as error:
        raise IntegrityError(f"{path} is damaged: {one_line(error)}", remedy="download it again") from error
    header.pop("__metadata__", None)
    return {
        name: TensorEntry(
            kind=entry["dtype"], shape=tuple(entry["shape"]), offset=8 + header_bytes + entry["data_offsets"][0]
        )
        for name, entry in header.items()
    }


def one_line(error: BaseException) -> str:
    """What a library or a file has to say, as part of a message of ours."""
    return " ".join(str(error).split())[:200]
