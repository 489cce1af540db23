"""Computes what follows from the committed slices of one leaf: the arithmetic of an audit, and of evidence.

Pure: equal arguments give equal bytes on every machine, so that an auditor, and anyone who was not there, gets what an
honest owner has got.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from swarm_compression import Codec, CodecError
from swarm_compression.codec import Data
from swarm_protocol.errors import PeerViolation, RoundError
from swarm_protocol.hash_tree import HashTree, leaf_digest, root_above
from swarm_protocol.proof_messages import AuditedSlice
from swarm_protocol.training_messages import Group

from swarm.training.allreduce.made_part import split_digests
from swarm.training.allreduce.part_reduction import PartReducer
from swarm.training.allreduce.parts import (
    ReductionScheme,
    cut_leaves,
    decode_frame,
    leaf_at,
    leaf_values,
    num_leaves,
    num_values,
    part_frames,
    part_leaves,
)
from swarm.trust.kernels import blocks


def are_committed(group: Group, leaf: int, slices: Sequence[AuditedSlice]) -> bool:
    """Return whether `slices` are those of `leaf` to which the group's contributors, in its order, have committed."""
    total = num_leaves(group.num_values)
    if len(slices) != len(group.contributors):
        return False
    for member, each in zip(group.contributors, slices, strict=True):
        if member.commitment is None or not is_leaf(member.commitment.root, total, leaf, each.data, each.proof):
            return False
    return True


def is_leaf(root: bytes, total: int, leaf: int, data: Data, proof: bytes) -> bool:
    """Return whether `proof` shows that `data` is the leaf with this index in the tree of `total` leaves."""
    try:
        return root_above(total, leaf, leaf_digest(data), split_digests(proof)) == root
    except ValueError:
        return False


def reduced_leaf(group: Group, scheme: ReductionScheme, leaf: int, slices: Sequence[AuditedSlice]) -> bytes | None:
    """Return the encoded result of one leaf. None if no honest owner makes one, since a slice cannot be decoded or the
    result not encoded."""
    place = leaf_at(group.num_values, leaf)
    buffer = bytearray(scheme.codec.encoded_bytes(num_values(place)))
    try:
        PartReducer.of_group(scheme, group).reduce([each.data for each in slices], place, buffer)
    except (PeerViolation, RoundError):
        return None
    return bytes(buffer)


def reduced_leaves(
    group: Group, scheme: ReductionScheme, shown: Mapping[int, Sequence[AuditedSlice]]
) -> dict[int, bytes | None]:
    """Return what `reduced_leaf` returns of each leaf, by its index. `shown` are the leaves' slices."""
    reducer = PartReducer.of_group(scheme, group)
    by_size, found = defaultdict[int, list[int]](list), dict[int, bytes | None]()
    for leaf in () if reducer.is_fixed else shown:
        by_size[num_values(leaf_at(group.num_values, leaf))].append(leaf)
    for size, alike in by_size.items():
        for leaves in (alike[block] for block in blocks(len(alike), reducer.leaves_at_once)):
            # a slice or a result that is none makes nothing of its own leaf alone: below each leaf is on its own
            with suppress(PeerViolation, CodecError):
                x_LV = reducer.combined_leaves([[each.data for each in shown[leaf]] for leaf in leaves], leaves, size)
                found |= {leaf: scheme.codec.encode(x_V) for leaf, x_V in zip(leaves, x_LV, strict=True)}
    return {leaf: found.get(leaf) or reduced_leaf(group, scheme, leaf, slices) for leaf, slices in shown.items()}


def part_leaf(codec: Codec, group: Group, part: int, data: Data, index: int) -> bytes:
    """Return leaf `index`, counted within the part, of a part's encoded result."""
    start = (part_leaves(group, part).start + index) * leaf_values(group.num_values)
    for frame, encoded in _frames(codec, group, part, data):
        if frame.start <= start < frame.stop:
            stop = min(start + leaf_values(group.num_values), frame.stop)
            return b"".join(codec.pieces(encoded, num_values(frame), start - frame.start, stop - frame.start))
    raise ValueError(f"part {part} has no leaf {index}")


def hashed_part(codec: Codec, group: Group, part: int, data: Data) -> tuple[HashTree, list[float]]:
    """Return the hash tree over the leaves of a part's encoded result, and the largest magnitude of each leaf's values.
    Raises CodecError if a frame cannot be decoded. Blocks."""
    digests, magnitudes, leaf = list[bytes](), list[float](), leaf_values(group.num_values)
    for frame, encoded in _frames(codec, group, part, data):
        size_F = decode_frame(codec, encoded, num_values(frame)).abs_()
        digests += map(leaf_digest, cut_leaves(codec, encoded, num_values(frame), leaf))
        whole = len(size_F) // leaf * leaf
        magnitudes += size_F[:whole].view(-1, leaf).amax(dim=1).tolist()
        magnitudes += [float(size_F[whole:].max())] if whole < len(size_F) else []
    return HashTree.of(digests), magnitudes


def _frames(codec: Codec, group: Group, part: int, data: Data) -> Iterator[tuple[slice, memoryview]]:
    """Yield the frames of a part's encoded result, each with its place in the step's vector."""
    view, at = memoryview(data), 0
    for frame in part_frames(group, part):
        stop = at + codec.encoded_bytes(num_values(frame))
        yield frame, view[at:stop]
        at = stop
