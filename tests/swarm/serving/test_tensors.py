from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from swarm.serving.tensors import pack, unpack_floats, unpack_tokens
from swarm_protocol.errors import PeerViolation
from swarm_protocol.serving_messages import TensorBytes


@given(
    st.lists(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=3, max_size=3), min_size=1)
)
def test_floats_any_values_come_back_bit_for_bit(rows: list[list[float]]) -> None:
    x = torch.tensor(rows, dtype=torch.float32)
    assert torch.equal(unpack_floats(pack(x), len(rows), 3), x)


@given(st.lists(st.integers(0, 99), min_size=1))
def test_tokens_any_ids_come_back(ids: list[int]) -> None:
    assert unpack_tokens(pack(torch.tensor(ids)), 100).tolist() == ids


def test_floats_are_little_endian_on_the_wire() -> None:
    assert pack(torch.tensor([[1.0]])).payload == b"\x00\x00\x80\x3f"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_floats_not_finite_are_refused(value: float) -> None:
    with pytest.raises(PeerViolation, match="not all finite"):
        unpack_floats(pack(torch.tensor([[1.0, value]])), 1, 2)


@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1)])
def test_floats_of_another_shape_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(PeerViolation, match="of shape"):
        unpack_floats(pack(torch.zeros(shape)), 1, 2)


def test_floats_where_tokens_belong_are_refused() -> None:
    with pytest.raises(PeerViolation, match="not int64"):
        unpack_tokens(pack(torch.zeros(3)), 10)
    with pytest.raises(PeerViolation, match="not one side"):
        unpack_tokens(pack(torch.zeros(3, 3)), 10)
    with pytest.raises(PeerViolation, match="not float32"):
        unpack_floats(TensorBytes(dtype="int64", shape=(1, 2), payload=bytes(16)), 1, 2)


@pytest.mark.parametrize("token_id", [-1, 100, 2**62])
def test_tokens_outside_the_vocabulary_are_refused(token_id: int) -> None:
    with pytest.raises(PeerViolation, match="vocabulary of 100"):
        unpack_tokens(pack(torch.tensor([5, token_id])), 100)
