"""Draws the leaves of an audit, and computes the result of a leaf from its committed slices.

Checks of evidence use the same arithmetic. Equal arguments give equal bytes on every machine, so that an auditor, or
anyone who checks the evidence later, gets the same result as an honest owner. All functions here are pure.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress

from swarm_compression import Codec, CodecError
from swarm_compression.codec import Data
from swarm_protocol import limits
from swarm_protocol.errors import PeerViolation, RoundError
from swarm_protocol.hash_tree import HashTree, leaf_digest
from swarm_protocol.reduction_messages import AuditedSlice
from swarm_protocol.training_messages import Group

from swarm.training.allreduce.part_reduction import PartReducer
from swarm.training.allreduce.parts import (
    ReductionScheme,
    cut_leaves,
    decode_frame,
    encoded_frames,
    leaf_at,
    leaf_values,
    num_leaves,
    num_values,
    part_leaves,
)
from swarm.trust.kernels import blocks

BYTES_SHARE = 0.011
"""Maximum share that the audits of one member add to the bytes of a reduction, proofs included. Votes, reports, groups
and openings take up to 0.9 % in groups of ten with a million values, and all of it has to fit 2 %."""
MOST_BY_SIZE = 0.9
"""Maximum probability that the first draw is by the results' sizes: a lie may also make results small."""
LEAST_BYTES = 1 << 14
"""Bytes that audits may fetch in any case: for a small vector, BYTES_SHARE is less than one leaf of each member."""


def audit_plan(group: Group, me: str, codec: Codec, chance: random.Random) -> dict[int, int]:
    """Return how many leaves `me` draws from which parts. It audits the parts of all others if BYTES_SHARE or
    LEAST_BYTES allow, else some of them, drawn anew each time."""
    others = [part for part, count in enumerate(group.part_values) if count and group.peer_ids[part] != me]
    if not others:
        return {}
    size, total = leaf_values(group.num_values), num_leaves(group.num_values)
    proof_bytes = limits.DIGEST_BYTES * (total - 1).bit_length()
    shown_bytes = len(group.contributors) * (codec.encoded_bytes(min(size, group.num_values)) + proof_bytes)
    num_shown = max(BYTES_SHARE * 2 * codec.encoded_bytes(group.num_values), LEAST_BYTES) / shown_bytes
    num_parts = min(len(others), max(1, int(num_shown)))
    num_draws = min(limits.MAX_DRAWS, max(1, int(num_shown / num_parts)))
    chance.shuffle(others)
    return dict.fromkeys(others[:num_parts], num_draws)


def draw_audited_leaves(sizes: Sequence[float], num_draws: int, chance: random.Random) -> list[int]:
    """Return distinct indices of leaves whose results have these `sizes` (see `hashed_part`).

    Two kinds of draw alternate: with weights by the square of the size, since a lie that moves the model far has large
    results, and with equal weights. Which kind comes first is random: a draw by size comes first more often, the more
    one leaf stands out.
    """
    largest = max(sizes)
    squares = [1.0 if size == largest else (size / largest) ** 2 for size in sizes]
    drawn, by_size = list[int](), chance.random() < min(MOST_BY_SIZE, max(0.5, 1.0 / sum(squares)))
    while len(drawn) < min(num_draws, len(sizes)):
        left = [index for index in range(len(sizes)) if index not in drawn]
        weights = [squares[index] for index in left] if by_size else [1.0] * len(left)
        drawn += chance.choices(left, weights if any(weights) else None)
        by_size = not by_size
    return drawn


def reduced_leaf(group: Group, scheme: ReductionScheme, leaf: int, slices: Sequence[AuditedSlice]) -> bytes | None:
    """Return the encoded result of one leaf, or None if no honest owner makes one, because a slice cannot be decoded or
    the result cannot be encoded."""
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
    """Return the result of `reduced_leaf` for each leaf, by its index. `shown` are the leaves' slices."""
    reducer = PartReducer.of_group(scheme, group)
    by_size, found = defaultdict[int, list[int]](list), dict[int, bytes | None]()
    for leaf in () if reducer.is_fixed else shown:
        by_size[num_values(leaf_at(group.num_values, leaf))].append(leaf)
    for size, alike in by_size.items():
        for leaves in (alike[block] for block in blocks(len(alike), reducer.leaves_at_once)):
            # a bad slice or result fails only its own leaf: leaves without a result are reduced one by one below
            with suppress(PeerViolation, CodecError):
                x_LV = reducer.combined_leaves([[each.data for each in shown[leaf]] for leaf in leaves], leaves, size)
                found |= {leaf: scheme.codec.encode(x_V) for leaf, x_V in zip(leaves, x_LV, strict=True)}
    return {leaf: found.get(leaf) or reduced_leaf(group, scheme, leaf, slices) for leaf, slices in shown.items()}


def part_leaf(codec: Codec, group: Group, part: int, data: Data, index: int) -> bytes:
    """Return leaf `index`, counted within the part, of a part's encoded result."""
    start = (part_leaves(group, part).start + index) * leaf_values(group.num_values)
    for frame, encoded in encoded_frames(group, part, data, codec):
        if frame.start <= start < frame.stop:
            stop = min(start + leaf_values(group.num_values), frame.stop)
            return b"".join(codec.pieces(encoded, num_values(frame), start - frame.start, stop - frame.start))
    raise ValueError(f"part {part} has no leaf {index}")


def hashed_part(codec: Codec, group: Group, part: int, data: Data) -> tuple[HashTree, list[float]]:
    """Return the hash tree over the leaves of a part's encoded result, and the largest magnitude of each leaf's values.
    Raises CodecError if a frame cannot be decoded. Blocks."""
    digests, magnitudes, leaf = list[bytes](), list[float](), leaf_values(group.num_values)
    for frame, encoded in encoded_frames(group, part, data, codec):
        size_F = decode_frame(codec, encoded, num_values(frame)).abs_()
        digests += map(leaf_digest, cut_leaves(codec, encoded, num_values(frame), leaf))
        whole = len(size_F) // leaf * leaf
        magnitudes += size_F[:whole].view(-1, leaf).amax(dim=1).tolist()
        magnitudes += [float(size_F[whole:].max())] if whole < len(size_F) else []
    return HashTree.of(digests), magnitudes
