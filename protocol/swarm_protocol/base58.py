"""Base58 as Bitcoin and libp2p write it: bytes as a number in 58 digits, each leading zero byte as a leading "1".

Pure.
"""

from __future__ import annotations

_DIGITS = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_VALUES = {digit: value for value, digit in enumerate(_DIGITS)}


def encode(data: bytes) -> str:
    number = int.from_bytes(data, "big")
    digits = []
    while number:
        number, digit = divmod(number, 58)
        digits.append(_DIGITS[digit])
    num_zeros = len(data) - len(data.lstrip(b"\0"))
    return "1" * num_zeros + "".join(reversed(digits))


def decode(text: str) -> bytes:
    """Raises ValueError for a character that is no digit. Quadratic in the length, which the caller bounds."""
    number = 0
    for character in text:
        if character not in _VALUES:
            raise ValueError(f"{character!r} is not a digit of base58")
        number = number * 58 + _VALUES[character]
    num_zeros = len(text) - len(text.lstrip("1"))
    return bytes(num_zeros) + number.to_bytes((number.bit_length() + 7) // 8, "big")
