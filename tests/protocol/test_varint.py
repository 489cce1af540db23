"""Numbers of 7 bits a byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm_protocol.wire import decode_varint, encode_varint


@given(st.integers(0, 2**35 - 1), st.binary(max_size=3))
def test_varint_round_trips(value: int, rest: bytes) -> None:
    encoded = encode_varint(value)
    assert decode_varint(encoded + rest, 0) == (value, len(encoded))


def test_decode_varint_that_does_not_end_in_time_is_refused() -> None:
    encoded = encode_varint(2**35)
    assert decode_varint(encoded, 0, max_bytes=6) == (2**35, 6)
    for data, max_bytes in ((encoded, 5), (encoded[:-1], 6), (b"", 6)):
        with pytest.raises(ValueError, match="does not end"):
            decode_varint(data, 0, max_bytes=max_bytes)
