"""Manifests: one form for one content, and nothing but PeerViolation from any other bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from swarm.training.inner.lease import Cursor, Lane
from swarm.training.state.replica_state import CHUNK_BYTES, MAX_MANIFEST_BYTES, Manifest
from swarm_protocol.errors import PeerViolation
from swarm_protocol.identity import Identity

PEERS = tuple(sorted(Identity(bytes([index]) * 32).peer_id for index in range(3)))
# the roster of a lane is in the order of its leases
LANES = (
    Lane(cursor=Cursor(next_sample=100, holes=(range(3, 5), range(7, 9))), roster=PEERS[:1]),
    Lane(cursor=Cursor(next_sample=50), roster=PEERS[::-1]),
)
MANIFEST = Manifest(
    outer_step=4,
    lanes=LANES,
    roster=PEERS,
    num_values=CHUNK_BYTES // 8 + 1,
    chunk_digests=(bytes(32), bytes([1]) * 32),
)


def _bytes(lane: dict[str, Any] | None = None, **changed: Any) -> bytes:
    """With these changes to the head, and to its first lane."""
    first = {"next_sample": 100, "holes": [[3, 5], [7, 9]], "roster": list(PEERS[:1])} | (lane or {})
    head = {
        "outer_step": 4,
        "lanes": [first, {"next_sample": 50, "holes": [], "roster": list(PEERS[::-1])}],
        "roster": list(PEERS),
        "num_values": MANIFEST.num_values,
    } | changed
    text = json.dumps(head, sort_keys=True, separators=(",", ":")).encode()
    return len(text).to_bytes(4, "little") + text + b"".join(MANIFEST.chunk_digests)


def test_from_bytes_what_to_bytes_wrote_is_equal() -> None:
    assert Manifest.from_bytes(MANIFEST.to_bytes()) == MANIFEST
    assert MANIFEST.to_bytes() == _bytes()


def test_digest_differs_when_any_field_does() -> None:
    others = [
        MANIFEST,
        replace(MANIFEST, outer_step=5),
        replace(MANIFEST, lanes=(Lane(cursor=Cursor(next_sample=100), roster=PEERS[:1]), LANES[1])),
        replace(MANIFEST, lanes=(LANES[0], Lane(cursor=LANES[1].cursor, roster=PEERS))),
        replace(MANIFEST, lanes=LANES[::-1]),
        replace(MANIFEST, lanes=LANES[:1]),
        replace(MANIFEST, roster=PEERS[:2]),
        replace(MANIFEST, num_values=MANIFEST.num_values + 1),
        replace(MANIFEST, chunk_digests=MANIFEST.chunk_digests[::-1]),
    ]
    assert len({manifest.digest() for manifest in others}) == len(others)
    assert all(len(manifest.digest()) == 32 for manifest in others)


@pytest.mark.parametrize(
    "changed",
    [
        {"outer_step": -1},
        {"outer_step": 1 << 41},
        {"outer_step": "4"},
        {"outer_step": 4.0},
        {"outer_step": True},
        {"lane": {"next_sample": 1 << 70}},
        {"lane": {"next_sample": -1}},
        {"lane": {"holes": [[3, 3]]}},
        {"lane": {"holes": [[5, 7], [3, 5]]}},
        {"lane": {"holes": [[3, 200]]}},
        {"lane": {"holes": [[3]]}},
        {"lane": {"holes": [["a", "b"]]}},
        {"lane": {"holes": 3}},
        {"lane": {"roster": [PEERS[0], PEERS[0]]}},
        {"lane": {"roster": ["somebody"]}},
        {"lane": {"more": 1}},
        {"lanes": []},
        {"lanes": [{"next_sample": 0, "holes": [], "roster": []}] * 3},
        {"lanes": 3},
        {"roster": PEERS[::-1]},
        {"roster": [PEERS[0], PEERS[0]]},
        {"roster": ["somebody"]},
        {"roster": [7]},
        {"roster": [[]]},
        {"num_values": 0},
        {"num_values": 1},
        {"num_values": 1 << 40},
        {"num_values": None},
        {"more": 1},
    ],
)
def test_from_bytes_impossible_head_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(PeerViolation):
        Manifest.from_bytes(_bytes(**changed))


def test_from_bytes_other_spacing_is_refused() -> None:
    text = _bytes()[4:].replace(b",", b", ", 1)
    head = text.rindex(b"}") + 1
    with pytest.raises(PeerViolation, match="canonical"):
        Manifest.from_bytes(head.to_bytes(4, "little") + text)


def test_from_bytes_truncated_anywhere_is_refused() -> None:
    data = MANIFEST.to_bytes()
    for size in range(len(data)):
        with pytest.raises(PeerViolation):
            Manifest.from_bytes(data[:size])


def test_from_bytes_deeply_nested_head_is_refused() -> None:
    text = b"[" * 100_000
    with pytest.raises(PeerViolation):
        Manifest.from_bytes(len(text).to_bytes(4, "little") + text)


def test_from_bytes_too_large_is_refused_unread() -> None:
    with pytest.raises(PeerViolation, match="more than"):
        Manifest.from_bytes(bytes(MAX_MANIFEST_BYTES + 1))


@given(data=st.binary(max_size=300))
@example(data=b"\x04\0\0\0null")
@example(data=b"\x10\0\0\0" + b"[" * 16)
def test_from_bytes_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(PeerViolation):
        Manifest.from_bytes(data)


@given(place=st.integers(0, len(MANIFEST.to_bytes()) - 1), flip=st.integers(1, 255))
def test_from_bytes_any_changed_byte_is_refused_or_another_state(place: int, flip: int) -> None:
    data = bytearray(MANIFEST.to_bytes())
    data[place] ^= flip
    try:
        manifest = Manifest.from_bytes(bytes(data))
    except PeerViolation:
        return
    assert manifest.digest() != MANIFEST.digest()
