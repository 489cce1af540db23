"""Imports torch and transformers without the packages that nodes never use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from swarm.heap import absent, uncollected

UNUSED_PACKAGES = ("scipy", "torchao")
"""Packages that are not imported, to save 45 MB: transformers imports SciPy for object detection losses and torchao for
its quantizer, and numba imports SciPy for linear algebra. `swarm.serving.model.quantization` imports torchao if it
needs it."""


@contextmanager
def lean_imports() -> Iterator[None]:
    """Make imports in the block lean."""
    with uncollected(), absent(*UNUSED_PACKAGES):
        yield
