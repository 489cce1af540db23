"""The arguments of `generate`, made of the flat names under which tests list them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from swarm.client import SamplingParams

_SAMPLING = frozenset(each.name for each in fields(SamplingParams))


def generate_arguments(**options: Any) -> dict[str, Any]:
    """Return `options` with those of `SamplingParams` put together as `sampling`."""
    params = {name: value for name, value in options.items() if name in _SAMPLING}
    others = {name: value for name, value in options.items() if name not in _SAMPLING}
    return {**others, "sampling": SamplingParams(**params)}
