"""Tensors to bytes and back, for what crosses slow links.

Knows neither peers nor I/O. A codec is a value without state; `get_codec` is the only way to one by name.
"""

from __future__ import annotations

from swarm_compression.codec import Codec, CodecError, Data
from swarm_compression.registry import codec_names, get_codec

__all__ = ["Codec", "CodecError", "Data", "codec_names", "get_codec"]
