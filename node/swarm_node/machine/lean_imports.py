"""Importing torch and transformers without what a node never uses of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from swarm.deferred_compiler import defer_compiler
from swarm.heap import absent, uncollected

UNUSED_PACKAGES = ("scipy", "torchao")
"""transformers imports SciPy for losses of object detection and torchao for its own quantizer, and numba imports SciPy
for linear algebra: 45 MB. `swarm.serving.model.quantization` imports torchao itself, where it quantizes by it."""


@contextmanager
def lean_imports() -> Iterator[None]:
    """Import meanwhile what computes. What is imported later still does without torch's compiler."""
    defer_compiler()
    with uncollected(), absent(*UNUSED_PACKAGES):
        yield
