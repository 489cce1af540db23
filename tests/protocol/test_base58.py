from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm_protocol.identity import base58_decode, base58_encode


@pytest.mark.parametrize(
    ("data", "text"),
    [
        # draft-msporny-base58-03, section 5
        (b"Hello World!", "2NEpo7TZRRrLZSi2U"),
        (
            b"The quick brown fox jumps over the lazy dog.",
            "USm3fpXnKG5EUBx2ndxBDMPVciP5hGey2Jh4NDv6gmeo1LkMeiKrLJUUBk6Z",
        ),
        (bytes.fromhex("0000287fb4cd"), "11233QC4"),
        (b"", ""),
    ],
)
def test_base58_of_known_values_is_the_known_text(data: bytes, text: str) -> None:
    assert base58_encode(data) == text
    assert base58_decode(text) == data


@given(st.binary(max_size=64))
def test_base58_round_trips(data: bytes) -> None:
    assert base58_decode(base58_encode(data)) == data


@pytest.mark.parametrize("text", ["0", "O", "I", "l", "é", "a b"])
def test_base58_of_another_character_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a digit"):
        base58_decode(text)
