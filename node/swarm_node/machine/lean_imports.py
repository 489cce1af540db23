"""Prepares the import of torch: sets how its threads wait, and leaves out packages that nodes never use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from swarm.heap import absent, uncollected

UNUSED_PACKAGES = ("scipy", "torchao")
"""Packages that are not imported, to save 45 MB: transformers imports SciPy for object detection losses and torchao for
its quantizer, and numba imports SciPy for linear algebra. `swarm.serving.model.quantization` imports torchao if it
needs it."""

SPINS = 5_000
"""Rounds for which a thread of GNU's OpenMP waits awake for more work, some 0.06 ms. A step has many parallel regions
with less than that between them, and waking a thread takes longer than that. On a processor with AVX-512 a server of a
44M Llama decodes 8 % faster than with threads that sleep at once; on one without, nothing is gained
(`tests/bench/test_bench_serving.py`)."""


@contextmanager
def lean_imports() -> Iterator[None]:
    """Make imports in the block lean."""
    with uncollected(), absent(*UNUSED_PACKAGES):
        yield


def let_threads_sleep() -> None:
    """Let torch's threads sleep soon after a step, unless the environment says otherwise. Call it before torch is
    imported: otherwise they spin for milliseconds, on cores that other threads need."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))
