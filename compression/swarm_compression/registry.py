"""The codecs by name. Adding one is a line here and a row in the tests' table; it has no state."""

from __future__ import annotations

from swarm_compression.codec import Codec, CodecError
from swarm_compression.floats import FloatCodec
from swarm_compression.int8 import Int8Codec

_CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (FloatCodec("fp32"), FloatCodec("fp16"), FloatCodec("bf16"), Int8Codec())
}


def codec_names() -> tuple[str, ...]:
    """From the largest on the wire to the smallest."""
    return tuple(_CODECS)


def get_codec(name: str) -> Codec:
    """Raises CodecError for a name that is not in `codec_names()`."""
    try:
        return _CODECS[name]
    except KeyError:
        raise CodecError(f"no codec {name!r}; there are {', '.join(_CODECS)}") from None
