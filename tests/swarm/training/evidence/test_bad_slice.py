"""Tests that a commitment to an undecodable slice convicts its signer and no honest member, even when the leaves'
places are misstated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from support.wrong_reduction import IDENTITIES, RUN, STRANGER, shown_leaf, signatures
from swarm.training.allreduce.committed_slices import committed_tree, is_encoding, is_leaf
from swarm.training.allreduce.parts import cut_leaves
from swarm.training.evidence.evidence import accused, check
from swarm_compression import codec_names, get_codec
from swarm_compression.codec import CodecError
from swarm_protocol import limits
from swarm_protocol.errors import IntegrityError, PeerViolation
from swarm_protocol.hash_tree import leaf_digest
from swarm_protocol.proof_messages import BadSlice, Evidence
from swarm_protocol.reduction_messages import AuditedSlice
from torch import Tensor

LIAR = IDENTITIES[0]
INT8 = get_codec("int8")
NAN = b"\x00\x00\xc0\x7f"


def vector(num_values: int) -> Tensor:
    return torch.randn(num_values, generator=torch.Generator().manual_seed(1))


def encoded_leaves() -> list[bytes]:
    """Return five encoded leaves of 256 values; the last one has 100."""
    return [INT8.encode(leaf_L) for leaf_L in vector(1124).split(256)]


def case_of(leaves: list[bytes], leaf: int) -> BadSlice:
    """Return the evidence that `leaf` of `leaves`, to which the liar has committed, cannot be decoded."""
    return shown_leaf(LIAR, 3, leaves, leaf)


@cache
def bad() -> BadSlice:
    leaves = encoded_leaves()
    leaves[2] = NAN + leaves[2][4:]
    return case_of(leaves, 2)


def verdict(case: BadSlice) -> str:
    evidence = Evidence.from_bytes(case.evidence().to_bytes())
    assert accused(evidence, signatures()) == (case.peer, case.step)
    found = check(evidence, signatures(), RUN)
    assert (found.peer_id, found.step, found.kind) == (case.peer, case.step, "bad_slice")
    return found.reason


def test_commitment_to_an_undecodable_leaf_convicts_its_signer() -> None:
    assert verdict(bad()) == "it committed to a slice that cannot be decoded, at outer step 3"
    far = INT8.encode(torch.full((256,), 1.1e12))
    verdict(case_of([far], 0))  # it moves a parameter further than the protocol allows
    verdict(case_of([b"\x00"], 0))  # no number of values is encoded in one byte


def said_to_be_whole() -> BadSlice:
    """Return an honest last leaf of 100 values, presented as if three more leaves followed. The root is the same, since
    a missing node counts as zeros."""
    honest = case_of(encoded_leaves(), 4)
    shown = replace(honest.shown, proof=bytes(2 * limits.DIGEST_BYTES) + honest.shown.proof)
    forged = replace(honest, num_leaves=8, shown=shown)
    assert is_leaf(forged.root, forged.num_leaves, forged.leaf, forged.shown.data, forged.shown.proof)
    return forged


FALSE: dict[str, Callable[[], BadSlice]] = {
    "a leaf that can be decoded": lambda: case_of(encoded_leaves(), 2),
    "the last leaf, said to be one of eight": said_to_be_whole,
    "a leaf that was changed": lambda: replace(
        bad(), shown=replace(bad().shown, data=NAN + bad().shown.data[4:-1] + b"!")
    ),
    "another leaf": lambda: replace(bad(), leaf=3),
    "a leaf without its path": lambda: replace(bad(), shown=replace(bad().shown, proof=b"")),
    "a path with a broken digest": lambda: replace(bad(), shown=replace(bad().shown, proof=bad().shown.proof[:-1])),
    "a root that was not signed": lambda: replace(bad(), root=bytes(32)),
    "another step": lambda: replace(bad(), step=4),
    "another state": lambda: replace(bad(), state_digest=b"s" * 32),
    "another member": lambda: replace(bad(), peer=STRANGER.peer_id),
    "an inner node as a leaf": lambda: replace(
        case_of(encoded_leaves(), 0),
        num_leaves=3,
        shown=AuditedSlice(
            data=b"\x01" + b"".join(leaf_digest(each) for each in encoded_leaves()[:2]),
            proof=case_of(encoded_leaves(), 0).shown.proof[32:],
        ),
    ),
}


@pytest.mark.parametrize("what", FALSE)
def test_bad_slice_convicts_nobody_when_it_proves_nothing(what: str) -> None:
    with pytest.raises((PeerViolation, IntegrityError)):
        verdict(FALSE[what]())


def test_bad_slice_counts_only_in_its_own_run_and_network() -> None:
    for foreign in (signatures(run="other"), signatures(network="other")):
        with pytest.raises(IntegrityError):
            check(bad().evidence(), foreign, RUN)


@pytest.mark.parametrize("name", codec_names())
@pytest.mark.parametrize("num_values", [1, 2, 99, 100, 255, 256, 257, 1000])
def test_every_leaf_of_an_honest_frame_is_a_valid_encoding_of_any_size(name: str, num_values: int) -> None:
    """The accuser states the number of leaves, so the last one may be presented with another number of values. A frame
    is encoded, and checked by its sender, as a whole."""
    codec = get_codec(name)
    data = codec.encode(vector(num_values))
    assert all(is_encoding(codec, leaf) for leaf in cut_leaves(codec, data, num_values, 256))


def test_honest_member_commits_only_to_slices_that_receivers_accept() -> None:
    x_N = vector(1000)
    x_N[700] = 2 * limits.MAX_PARAMETER_MOVE
    with pytest.raises(CodecError, match="moves"):
        committed_tree(lambda frame: INT8.encode(x_N[frame]), INT8, 1000)
