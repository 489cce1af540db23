"""What a check of `swarm-node doctor` has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Result = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; `remedy` is empty if it is ok."""

    check: str
    result: Result
    message: str
    remedy: str = ""
