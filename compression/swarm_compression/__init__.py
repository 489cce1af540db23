"""Encodes tensors as few bytes, and decodes them, for slow links.

The package knows neither peers nor I/O. `get_codec` returns a codec by name, and `get_row_codec` one that encodes each
row by itself. Codecs have no state; only `ErrorFeedback` has. To add a codec, add it to the tables here, its name to
`run_config.CODECS`, and a row to the tests' table.
"""

from __future__ import annotations

from swarm_compression.codec import Codec, CodecError, Data, FloatCodec
from swarm_compression.feedback import ErrorFeedback
from swarm_compression.four_bits import E3M0, INT4, FourBitCodec
from swarm_compression.int8 import Int8Codec, warm_up
from swarm_compression.row_codecs import FlatRows, Int8Rows, RawRows, RowCodec

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

_CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        FloatCodec("fp32"),
        FloatCodec("fp16"),
        FloatCodec("bf16"),
        Int8Codec(),
        FourBitCodec("int4", INT4),
        FourBitCodec("e3m0", E3M0),
    )
}

_ROW_CODECS: dict[str, RowCodec] = {
    codec.name: codec for codec in (RawRows(), FlatRows("bf16", FloatCodec("bf16")), Int8Rows())
}


def codec_names() -> tuple[str, ...]:
    """Return the names, from the most bytes on the wire to the fewest."""
    return tuple(_CODECS)


def get_codec(name: str) -> Codec:
    """Return a codec by its name. Raises CodecError for a name that is not in `codec_names()`."""
    try:
        return _CODECS[name]
    except KeyError:
        raise CodecError(f"no codec {name!r}; there are {', '.join(_CODECS)}") from None


def row_codec_names() -> tuple[str, ...]:
    """Return the names, from the most bytes on the wire to the fewest."""
    return tuple(_ROW_CODECS)


def get_row_codec(name: str) -> RowCodec:
    """Return a row codec by its name. Raises CodecError for a name that is not in `row_codec_names()`."""
    try:
        return _ROW_CODECS[name]
    except KeyError:
        raise CodecError(f"no codec {name!r} of rows; there are {', '.join(_ROW_CODECS)}") from None
