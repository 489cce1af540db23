"""Bounds of a call on blocks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from protocol.serving_examples import EXAMPLES
from swarm_protocol import limits
from swarm_protocol.errors import PeerViolation
from swarm_protocol.rows import Rows
from swarm_protocol.serving_messages import Compute, TensorPiece

COMPUTE, EMBED, TOP = (example for example in EXAMPLES if isinstance(example, Compute))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"start": 8}, "end"),
        ({"start": -1}, "start"),
        ({"end": limits.MAX_BLOCKS + 1}, "end"),
        ({"num_sequences": 0}, "num_sequences"),
        ({"num_positions": 0}, "num_positions"),
        ({"num_sequences": limits.MAX_FORWARD_ROWS // 100 + 1}, "num_sequences"),
        ({"codec": "int8"}, "codec"),
        ({"codec": "tokens"}, "codec"),
        ({"deadline_s": float("nan")}, "deadline_s"),
        ({"deadline_s": 1e9}, "deadline_s"),
        ({"of_tokens": True}, "first block"),
        ({"revision": "../x"}, "revision"),
    ],
)
def test_compute_with_impossible_values_is_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        dataclasses.replace(COMPUTE, **changes)


def test_compute_of_no_blocks_is_for_tokens_only() -> None:
    with pytest.raises(ValueError, match="token ids"):
        dataclasses.replace(EMBED, of_tokens=False)


def test_piece_whose_bytes_are_not_its_rows_is_refused() -> None:
    piece = TensorPiece(rows=Rows(codec="bf16", num_rows=2, num_columns=3, payload=bytes(12)))
    for data in (piece.to_bytes()[:-1], piece.to_bytes() + b"x", piece.to_bytes().replace(b"bf16", b"nums")):
        with pytest.raises(PeerViolation):
            TensorPiece.from_bytes(data)


def test_compute_chosen_logits_have_the_shape_that_both_sides_expect() -> None:
    assert TOP.answer_shape(1000, has_logits=True) == (1, 20, 2 * 64 + 2)
    assert TOP.answer_shape(30, has_logits=True) == (1, 20, 62), "no more than the vocabulary has"
    untargeted = dataclasses.replace(TOP, has_targets=False)
    assert untargeted.answer_shape(1000, has_logits=True) == (1, 20, 2 * 64 + 1)
    assert dataclasses.replace(TOP, num_top=0).answer_shape(1000, has_logits=True) == (1, 20, 2)
    assert TOP.answer_shape(32, has_logits=False) == (1, 100, 32), "a server in the middle"
    assert COMPUTE.answer_shape(1000, has_logits=True) == (2, 100, 1000)
    with pytest.raises(ValueError, match="has_targets"):
        dataclasses.replace(COMPUTE, head=False, has_targets=True)
    for changes in ({"head": False}, {"num_last": 101}, {"num_top": limits.MAX_TOP_LOGITS + 1}):
        with pytest.raises(ValueError, match=r"num_top|num_last"):
            dataclasses.replace(TOP, **changes)
