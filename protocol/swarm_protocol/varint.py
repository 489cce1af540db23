"""Numbers as protobuf and multiformats write them: 7 bits a byte, least first, the highest bit set but in the last.

Pure.
"""

from __future__ import annotations

MAX_VARINT_BYTES = 10
"""Of 64 bits, protobuf's largest."""


def encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def decode_varint(data: bytes, at: int, *, max_bytes: int = MAX_VARINT_BYTES) -> tuple[int, int]:
    """The number at `at`, and where it ends. Raises ValueError for one that does not end within `max_bytes`."""
    number = 0
    for index, byte in enumerate(data[at : at + max_bytes]):
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return number, at + index + 1
    raise ValueError("a number does not end")
