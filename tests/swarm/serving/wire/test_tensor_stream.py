from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from swarm.serving.wire.tensor_stream import hidden_of, rows_of, tokens_of
from swarm_compression import row_codec_names
from swarm_protocol.errors import PeerViolation, SessionError
from swarm_protocol.rows import Rows

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def tokens(*token_ids: int) -> Rows:
    payload = b"".join(token_id.to_bytes(4, "little", signed=True) for token_id in token_ids)
    return Rows(codec="tokens", num_rows=len(token_ids), num_columns=0, payload=payload)


@given(st.lists(st.lists(FINITE, min_size=3, max_size=3), min_size=1, max_size=9))
def test_rows_in_raw_come_back_bit_for_bit(values: list[list[float]]) -> None:
    x_TH = torch.tensor(values, dtype=torch.float32)
    rows, error = rows_of(x_TH, "raw")
    assert error == 0
    assert torch.equal(hidden_of(rows, "raw", 3), x_TH)


def test_rows_are_little_endian_on_the_wire() -> None:
    assert rows_of(torch.tensor([[1.0]]), "raw")[0].payload == b"\x00\x00\x80\x3f"


@pytest.mark.parametrize("codec", row_codec_names())
def test_rows_report_the_error_of_their_codec(codec: str) -> None:
    x_TH = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    rows, error = rows_of(x_TH, codec)
    lost = (hidden_of(rows, codec, 128) - x_TH).square().mean().sqrt() / x_TH.square().mean().sqrt()
    assert error == pytest.approx(float(lost), abs=1e-6)
    assert rows_of(torch.zeros(1, 4), codec)[1] == 0


@pytest.mark.parametrize("codec", row_codec_names())
def test_rows_with_numbers_that_cannot_be_sent_are_the_server_s_own_error(codec: str) -> None:
    with pytest.raises(SessionError, match="cannot carry"):
        rows_of(torch.tensor([[1.0, float("nan")]]), codec)


def test_rows_in_another_codec_or_of_another_width_are_refused() -> None:
    rows, _ = rows_of(torch.zeros(2, 4), "bf16")
    with pytest.raises(PeerViolation, match="bf16"):
        hidden_of(rows, "raw", 4)
    with pytest.raises(PeerViolation, match="4 columns"):
        hidden_of(rows, "bf16", 5)
    with pytest.raises(PeerViolation, match="not token ids"):
        tokens_of(rows, 10)
    with pytest.raises(PeerViolation, match="tokens"):
        hidden_of(tokens(1), "raw", 4)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=50))
def test_tokens_round_trip_for_any_ids(token_ids: list[int]) -> None:
    assert tokens_of(tokens(*token_ids), 100).tolist() == token_ids


@pytest.mark.parametrize("token_id", [-1, 100, 2**31 - 1])
def test_tokens_outside_the_vocabulary_are_refused(token_id: int) -> None:
    with pytest.raises(PeerViolation, match="vocabulary of 100"):
        tokens_of(tokens(5, token_id), 100)
