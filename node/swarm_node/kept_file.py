"""Small JSON files that a node keeps in its home for its next life: read with a bound, replaced in one step."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def read_json(path: Path, *, max_bytes: int) -> Any:
    """None where there is no file. Raises OSError, ValueError, RecursionError for one that no node wrote."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        text = file.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise ValueError(f"it has more than {max_bytes} bytes")
    return json.loads(text)


def replace_json(path: Path, value: Any) -> None:
    """Raises OSError; then the file is as it was."""
    beside = path.with_name(f"{path.name}.new")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        with suppress(OSError):
            beside.unlink()
        raise
