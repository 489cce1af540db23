"""Tests a state's digest and chunks: every bit counts, any peer may send a chunk, and wrong chunks are named."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.replica_states import state_of, with_head
from swarm.training.state.lease import MAX_HOLES, Cursor, LeaseStripe
from swarm.training.state.replica_state import (
    CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    Assembly,
    Manifest,
    ReplicaState,
    StateHasher,
)
from swarm_protocol.errors import IntegrityError, PeerViolation
from swarm_protocol.identity import Identity

# momentum starts within the second chunk, and the third is short
NUM_VALUES = CHUNK_BYTES // 4 + 70_001
PEER = Identity(bytes(32)).peer_id


def _state(seed: int = 0, num_values: int = NUM_VALUES) -> ReplicaState:
    generator = torch.Generator().manual_seed(seed)
    return state_of(
        torch.randn(num_values, generator=generator),
        torch.randn(num_values, generator=generator),
        outer_step=3,
        stripes=(LeaseStripe(cursor=Cursor(next_sample=9, holes=(range(2, 3),)), roster=(PEER,)),),
        roster=(PEER,),
    )


STATE = _state()
MANIFEST = STATE.manifest
CHUNKS = [STATE.chunk(index) for index in range(len(MANIFEST.chunk_digests))]


def _equal(one: ReplicaState, other: ReplicaState) -> bool:
    tensors = torch.equal(one.theta_N, other.theta_N) and torch.equal(one.momentum_N, other.momentum_N)
    return tensors and one.manifest == other.manifest


def _assembled(state: ReplicaState) -> Assembly:
    assembly = Assembly(state.manifest)
    for index in sorted(assembly.missing):
        assembly.put(index, state.chunk(index))
    return assembly


def test_chunks_are_those_of_theta_followed_by_momentum() -> None:
    assert [len(chunk) for chunk in CHUNKS] == [CHUNK_BYTES, CHUNK_BYTES, 8 * NUM_VALUES - 2 * CHUNK_BYTES]
    assert [MANIFEST.chunk_size(index) for index in range(3)] == [len(chunk) for chunk in CHUNKS]
    assert b"".join(CHUNKS) == STATE.theta_N.numpy().tobytes() + STATE.momentum_N.numpy().tobytes()


@pytest.mark.parametrize("num_values", [1, 2, CHUNK_BYTES // 8, CHUNK_BYTES // 8 + 1, CHUNK_BYTES // 4, CHUNK_BYTES])
def test_assembly_gives_the_state_for_any_size(num_values: int) -> None:
    state = _state(num_values=num_values)
    assert _equal(_assembled(state).finish(), state)


def _copy() -> ReplicaState:
    return replace(STATE, theta_N=STATE.theta_N.clone(), momentum_N=STATE.momentum_N.clone())


@pytest.mark.parametrize("index", [-1, 3, 1 << 40])
def test_chunk_out_of_range_raises_index_error(index: int) -> None:
    with pytest.raises(IndexError):
        STATE.chunk(index)


def test_equal_states_have_equal_digests() -> None:
    assert _copy().hashed_again().manifest == MANIFEST
    assert _state().digest == MANIFEST.digest()


@given(place=st.integers(0, 2 * NUM_VALUES - 1), bit=st.integers(0, 31))
def test_digest_changes_when_any_bit_is_flipped(place: int, bit: int) -> None:
    state = _copy()
    tensor = state.theta_N if place < NUM_VALUES else state.momentum_N
    tensor.view(torch.int32)[place % NUM_VALUES] ^= (1 << bit) if bit < 31 else -(1 << 31)
    assert state.hashed_again().digest != MANIFEST.digest()


def test_digest_changes_when_step_stripe_or_roster_differ() -> None:
    others = (
        with_head(STATE, outer_step=4),
        with_head(STATE, stripes=(LeaseStripe(),)),
        with_head(STATE, roster=()),
    )
    assert len({state.digest for state in (STATE, *others)}) == 4


@pytest.mark.parametrize("num_values", [1, 1000, CHUNK_BYTES // 8, CHUNK_BYTES // 4, CHUNK_BYTES // 4 + 1, NUM_VALUES])
@pytest.mark.parametrize("piece_values", [999_983, 1 << 16, 70_001])
def test_hasher_gives_the_manifests_chunks_for_pieces_of_any_size(num_values: int, piece_values: int) -> None:
    state, hasher = _state(num_values=num_values), StateHasher(num_values)
    for theta_C, momentum_C in zip(
        state.theta_N.split(piece_values), state.momentum_N.split(piece_values), strict=True
    ):
        hasher.add(theta_C, momentum_C)
        hasher.add(theta_C[:0], momentum_C[:0])
    chunks = [state.chunk(index) for index in range(-(-8 * num_values // CHUNK_BYTES))]
    digests = hasher.chunk_digests()
    assert digests == state.manifest.chunk_digests == tuple(hashlib.sha256(chunk).digest() for chunk in chunks)


@given(order=st.permutations(range(len(CHUNKS))))
def test_assembly_gives_the_state_for_chunks_in_any_order(order: list[int]) -> None:
    assembly = Assembly(MANIFEST)
    for index in order:
        assert index in assembly.missing
        assembly.put(index, CHUNKS[index])
    assert not assembly.missing
    assert _equal(assembly.finish(), STATE)


def test_assembly_refuses_wrong_chunks_and_still_takes_right_ones() -> None:
    assembly = Assembly(MANIFEST)
    flipped = bytes([CHUNKS[0][0] ^ 1]) + CHUNKS[0][1:]
    for index, data, reason in (
        (0, flipped, "chunk 0 does not match its digest"),
        (0, CHUNKS[1], "chunk 0 does not match its digest"),
        (0, CHUNKS[0][:-1], "chunk 0 has"),
        (0, CHUNKS[0] + b"\0", "chunk 0 has"),
        (2, b"", "chunk 2 has 0 bytes"),
    ):
        with pytest.raises(IntegrityError, match=reason):
            assembly.put(index, data)
    assert assembly.missing == {0, 1, 2}
    for index, data in enumerate(CHUNKS):
        assembly.put(index, data)
    assert _equal(assembly.finish(), STATE)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_assembly_does_not_finish_when_values_are_not_finite(bad: float) -> None:
    state = _copy()
    state.momentum_N[5] = bad
    assembly = _assembled(state.hashed_again())
    with pytest.raises(IntegrityError, match="not finite"):
        assembly.finish()


def test_assembly_misses_only_the_differing_chunk_after_reuse_of_a_diverged_state() -> None:
    diverged = _copy()
    diverged.momentum_N[0] += 1.0
    assembly = Assembly(MANIFEST)
    assembly.reuse(diverged)
    assert assembly.missing == {1}
    assembly.put(1, CHUNKS[1])
    assert _equal(assembly.finish(), STATE)


def test_assembly_reuses_nothing_of_another_model() -> None:
    assembly = Assembly(MANIFEST)
    assembly.reuse(_state(num_values=NUM_VALUES - 1))
    assert assembly.missing == {0, 1, 2}


@pytest.mark.parametrize(
    "momentum_N", [torch.zeros(3), torch.zeros(4, dtype=torch.float64), torch.zeros(2, 2), torch.zeros(8)[::2]]
)
def test_replica_state_refuses_tensors_that_do_not_fit(momentum_N: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="flat fp32 CPU"):
        replace(ReplicaState.initial(torch.zeros(4)), momentum_N=momentum_N)


def test_initial_state_has_step_zero_and_no_momentum() -> None:
    state = ReplicaState.initial(STATE.theta_N)
    assert (state.outer_step, state.manifest.stripes, state.manifest.roster) == (0, (LeaseStripe(),), ())
    assert ReplicaState.initial(STATE.theta_N, overlap_steps=2).manifest.stripes == (LeaseStripe(), LeaseStripe())
    assert not state.momentum_N.any()


PEERS = tuple(sorted(Identity(bytes([index]) * 32).peer_id for index in range(3)))
# a stripe's roster has the order of its leases
STRIPES = (
    LeaseStripe(cursor=Cursor(next_sample=100, holes=(range(3, 5), range(7, 9))), roster=PEERS[:1]),
    LeaseStripe(cursor=Cursor(next_sample=50), roster=PEERS[::-1]),
)
TWO_STRIPES = Manifest(
    outer_step=4,
    stripes=STRIPES,
    roster=PEERS,
    num_values=CHUNK_BYTES // 8 + 1,
    chunk_digests=(bytes(32), bytes([1]) * 32),
)


def _bytes(stripe: dict[str, Any] | None = None, **changed: Any) -> bytes:
    """Return the bytes of a manifest with these changes to its head and to its first stripe."""
    first = {"next_sample": 100, "holes": [[3, 5], [7, 9]], "roster": list(PEERS[:1])} | (stripe or {})
    head = {
        "outer_step": 4,
        "lanes": [first, {"next_sample": 50, "holes": [], "roster": list(PEERS[::-1])}],
        "roster": list(PEERS),
        "num_values": TWO_STRIPES.num_values,
    } | changed
    text = json.dumps(head, sort_keys=True, separators=(",", ":")).encode()
    return len(text).to_bytes(4, "little") + text + b"".join(TWO_STRIPES.chunk_digests)


def test_from_bytes_gives_the_manifest_that_to_bytes_wrote() -> None:
    assert Manifest.from_bytes(TWO_STRIPES.to_bytes()) == TWO_STRIPES
    assert TWO_STRIPES.to_bytes() == _bytes()


def test_manifest_has_the_field_of_probation_only_when_somebody_is_on_probation() -> None:
    fresh = replace(TWO_STRIPES, probation=((PEERS[0], 3), (PEERS[2], 1)))
    assert fresh.to_bytes() == _bytes(probation=[[PEERS[0], 3], [PEERS[2], 1]])
    assert Manifest.from_bytes(fresh.to_bytes()) == fresh
    for wrong in (
        [],
        [[PEERS[0], 0]],
        [[PEERS[0], 1001]],
        [[PEERS[0], True]],
        [[PEERS[2], 1], [PEERS[0], 1]],
        [[PEERS[0], 1], [PEERS[0], 1]],
        [["stranger", 1]],
        [[PEERS[0]]],
        7,
    ):
        with pytest.raises(PeerViolation):
            Manifest.from_bytes(_bytes(probation=wrong))


def test_digest_differs_when_any_field_does() -> None:
    others = [
        TWO_STRIPES,
        replace(TWO_STRIPES, outer_step=5),
        replace(TWO_STRIPES, stripes=(LeaseStripe(cursor=Cursor(next_sample=100), roster=PEERS[:1]), STRIPES[1])),
        replace(TWO_STRIPES, stripes=(STRIPES[0], LeaseStripe(cursor=STRIPES[1].cursor, roster=PEERS))),
        replace(TWO_STRIPES, stripes=STRIPES[::-1]),
        replace(TWO_STRIPES, stripes=STRIPES[:1]),
        replace(TWO_STRIPES, roster=PEERS[:2]),
        replace(TWO_STRIPES, probation=((PEERS[0], 3),)),
        replace(TWO_STRIPES, probation=((PEERS[0], 2),)),
        replace(TWO_STRIPES, num_values=TWO_STRIPES.num_values + 1),
        replace(TWO_STRIPES, chunk_digests=TWO_STRIPES.chunk_digests[::-1]),
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
        {"stripe": {"next_sample": 1 << 70}},
        {"stripe": {"next_sample": -1}},
        {"stripe": {"holes": [[3, 3]]}},
        {"stripe": {"holes": [[5, 7], [3, 5]]}},
        {"stripe": {"holes": [[3, 200]]}},
        {"stripe": {"holes": [[3]]}},
        {"stripe": {"holes": [["a", "b"]]}},
        {"stripe": {"holes": 3}},
        {"stripe": {"roster": [PEERS[0], PEERS[0]]}},
        {"stripe": {"roster": ["somebody"]}},
        {"stripe": {"more": 1}},
        {"lanes": []},
        {"lanes": [{"next_sample": 0, "holes": [], "roster": []}] * 3},
        {"lanes": 3},
        {"roster": PEERS[::-1]},
        {"credits": [[PEERS[1], 1], [PEERS[0], 1]]},
        {"credits": [[PEERS[0], 1], [PEERS[0], 1]]},
        {"credits": [[PEERS[0]]]},
        {"credits": {PEERS[0]: 1}},
        {"credits": 3},
        {"uses": [["0000000000000002", 1], ["0000000000000001", 1]]},
        {"uses": [["1", 1]]},
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
def test_from_bytes_refuses_an_impossible_head(changed: dict[str, Any]) -> None:
    with pytest.raises(PeerViolation):
        Manifest.from_bytes(_bytes(**changed))


def test_from_bytes_refuses_other_spacing() -> None:
    text = _bytes()[4:].replace(b",", b", ", 1)
    head = text.rindex(b"}") + 1
    with pytest.raises(PeerViolation, match="canonical"):
        Manifest.from_bytes(head.to_bytes(4, "little") + text)


def test_from_bytes_refuses_a_manifest_truncated_anywhere() -> None:
    data = TWO_STRIPES.to_bytes()
    for size in range(len(data)):
        with pytest.raises(PeerViolation):
            Manifest.from_bytes(data[:size])


def test_from_bytes_refuses_a_deeply_nested_head() -> None:
    text = b"[" * 100_000
    with pytest.raises(PeerViolation):
        Manifest.from_bytes(len(text).to_bytes(4, "little") + text)


def test_from_bytes_refuses_a_large_manifest_without_parsing_it() -> None:
    with pytest.raises(PeerViolation, match="more than"):
        Manifest.from_bytes(bytes(MAX_MANIFEST_BYTES + 1))


@given(data=st.binary(max_size=300))
@example(data=b"\x04\0\0\0null")
@example(data=b"\x10\0\0\0" + b"[" * 16)
def test_from_bytes_refuses_random_bytes(data: bytes) -> None:
    with pytest.raises(PeerViolation):
        Manifest.from_bytes(data)


@given(place=st.integers(0, len(TWO_STRIPES.to_bytes()) - 1), flip=st.integers(1, 255))
def test_from_bytes_with_a_changed_byte_is_refused_or_gives_another_digest(place: int, flip: int) -> None:
    data = bytearray(TWO_STRIPES.to_bytes())
    data[place] ^= flip
    try:
        manifest = Manifest.from_bytes(bytes(data))
    except PeerViolation:
        return
    assert manifest.digest() != TWO_STRIPES.digest()


def test_manifest_has_room_for_all_holes_of_both_stripes() -> None:
    """Sample numbers go up to a million million."""
    first = 10**12 - 4 * MAX_HOLES
    holes = tuple(range(first + 4 * index, first + 4 * index + 2) for index in range(MAX_HOLES))
    stripe = LeaseStripe(cursor=Cursor(next_sample=10**12, holes=holes), roster=(PEER,))
    manifest = replace(MANIFEST, stripes=(stripe, stripe))
    data = manifest.to_bytes()
    assert Manifest.from_bytes(data) == manifest
    assert len(data) - len(MANIFEST.to_bytes()) < 2 * 225 * 1024
