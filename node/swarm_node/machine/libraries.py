"""The packages that a node's libraries import where they are installed, and that no node uses through them."""

from __future__ import annotations

UNUSED_PACKAGES = ("scipy", "torchao")
"""transformers imports SciPy for losses of object detection and torchao for its own quantizer, and numba imports SciPy
for linear algebra: 45 MB. `swarm.serving.model.quantization` imports torchao itself, where it quantizes by it."""
