"""Unpacks a program that UPX has packed (ELF of 64 bits, method NRV2E, no filter), as hivemind's wheel has its daemon.

The packed file has the program's own headers and segments as blocks, one after another, of which each says how long it
is packed and unpacked. NRV2E is Markus Oberhumer's (UCL, 1998): literal bytes and copies of what is there already, told
apart by bits that stand in words of four bytes between them.
"""

from __future__ import annotations

import struct
from typing import Any

import numba
import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

ELF_HEADER = 64
SEGMENT = struct.Struct("<IIQQQQQQ")
"""One of the program's headers: type, flags, offset, two addresses, bytes in the file, bytes in memory, alignment."""

LOADED = 1
"""The type of a segment that is in memory when the program runs."""

BLOCK = struct.Struct("<IIBBBB")
"""Before each block: bytes unpacked and packed, method, filter, and two more of the filter."""

NRV2E = 8
END = 0xFFFFFFFF
FAR = 0x500
"""A copy from further back than this is one byte longer than it says."""


class NotPacked(Exception):
    """The file is not packed, or not in this way."""


def unpack(packed: bytes) -> bytes:
    """Return the program. Raises NotPacked."""
    num_headers = struct.unpack_from("<H", packed, 56)[0] if packed[:5] == b"\x7fELF\x02" else 0
    at = ELF_HEADER + num_headers * SEGMENT.size
    if packed[at + 4 : at + 8] != b"UPX!":
        raise NotPacked
    at += 24  # behind what the file says about itself as a whole
    headers, at = _block(packed, at)
    segments = [SEGMENT.unpack_from(headers, place) for place in range(ELF_HEADER, len(headers), SEGMENT.size)]
    program, contents = bytearray(), headers
    for kind, _, offset, _, _, num_bytes, *_ in segments:
        if kind != LOADED:
            continue
        while len(contents) < num_bytes:  # the first segment begins with the headers
            block, at = _block(packed, at)
            contents += block
        program.extend(bytes(offset - len(program)) + contents)
        contents = b""
    return bytes(program)


def _block(packed: bytes, at: int) -> tuple[bytes, int]:
    num_unpacked, num_packed, method, filtered, *_ = BLOCK.unpack_from(packed, at)
    at += BLOCK.size
    if method != NRV2E or filtered:
        raise NotPacked
    unpacked = np.zeros(num_unpacked, np.uint8)
    try:
        lengths = _decompress(np.frombuffer(packed, np.uint8, num_packed, at), unpacked)
    except IndexError:
        raise NotPacked from None
    if lengths != (num_packed, num_unpacked):  # the block is not what it says
        raise NotPacked
    return unpacked.tobytes(), at + num_packed


@numba.njit(boundscheck=True)
def _bit(packed: Bytes, state: Any) -> int:
    """The next bit. `state`: the place of the next byte, the word that has the next bits, and how many these are."""
    if state[2] == 0:
        for index in range(4):
            state[1] = state[1] >> 8 | np.int64(packed[state[0] + index]) << 24
        state[0] += 4
        state[2] = 32
    state[2] -= 1
    return state[1] >> state[2] & 1


@numba.njit(boundscheck=True)
def _decompress(packed: Bytes, unpacked: Bytes) -> tuple[int, int]:
    """Fill `unpacked`; return how many bytes of both were used."""
    state = np.zeros(3, np.int64)
    num_unpacked, distance = 0, 1
    while True:
        while _bit(packed, state):  # a byte as it is
            unpacked[num_unpacked] = packed[state[0]]
            num_unpacked += 1
            state[0] += 1
        far = 2 + _bit(packed, state)
        while not _bit(packed, state):
            far = ((far - 1) * 2 + _bit(packed, state)) * 2 + _bit(packed, state)
        if far == 2:  # from as far back as the copy before
            is_short = _bit(packed, state)
        else:
            far = (far - 3) * 256 + np.int64(packed[state[0]])
            state[0] += 1
            if far == END:
                return state[0], num_unpacked
            is_short = 1 - far % 2
            distance = far // 2 + 1
        if is_short:
            length = 1 + _bit(packed, state)
        elif _bit(packed, state):
            length = 3 + _bit(packed, state)
        else:
            length = 2 + _bit(packed, state)
            while not _bit(packed, state):
                length = length * 2 + _bit(packed, state)
            length += 3
        for _ in range(length + 1 + (distance > FAR)):
            unpacked[num_unpacked] = unpacked[num_unpacked - distance]
            num_unpacked += 1
