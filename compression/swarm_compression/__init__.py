"""Tensors to bytes and back, for what crosses slow links.

Knows neither peers nor I/O. A codec is a value without state; `get_codec` is the only way to one by name,
`get_row_codec` to those that encode each row on its own. What has state is `ErrorFeedback`.
"""

from __future__ import annotations

from swarm_compression.codec import Codec, CodecError, Data
from swarm_compression.codec_registry import codec_names, get_codec, get_row_codec, row_codec_names
from swarm_compression.feedback import ErrorFeedback
from swarm_compression.int8_kernels import warm_up
from swarm_compression.row_codecs import RowCodec

__all__ = [
    "Codec",
    "CodecError",
    "Data",
    "ErrorFeedback",
    "RowCodec",
    "codec_names",
    "get_codec",
    "get_row_codec",
    "row_codec_names",
    "warm_up",
]
