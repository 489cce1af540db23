"""The slices from which a member has made a part: it checks them, signs what it made, and shows them to auditors.

A member commits to its encoded pseudo-gradient before there is a group (`committed_tree`). A member that sends slices
shows first where they are under the committed root (`leaves_proof`). An owner keeps the slices, a byte a value of its
part for each member in int8, until the step is over. Before it signs, it hashes them all, which with the proof must
give the root: an honest owner never signs for what a sender did not commit to.

Functions here block. Shapes: N values of the vector, F of the part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from swarm_compression import Codec
from swarm_compression.codec import Data
from swarm_protocol import limits
from swarm_protocol.errors import PeerViolation, RoundError
from swarm_protocol.hash_tree import HashTree, leaf_digest
from swarm_protocol.proof_messages import AuditedSlice
from swarm_protocol.training_messages import Group
from torch import Tensor

from swarm.training.allreduce.parts import (
    PartResult,
    check_frame,
    cut_leaves,
    decode_frame,
    frames_of,
    leaf_at,
    leaf_values,
    num_leaves,
    num_values,
    part_leaves,
)

_DIGEST_BYTES = limits.DIGEST_BYTES


def committed_tree(encode: Callable[[slice], Data], codec: Codec, total_values: int) -> HashTree:
    """Return the hash tree over the leaves of a vector of `total_values`, of which `encode` encodes a frame. Raises
    CodecError if a frame cannot be encoded, or is one that its receivers would refuse."""
    leaf = leaf_values(total_values)

    def encoded() -> Iterator[tuple[Data, int]]:
        for frame in frames_of(total_values, leaf=leaf):
            data = encode(frame)
            # a commitment to what nobody can decode convicts its signer
            check_frame(codec, data, num_values(frame))
            yield data, num_values(frame)

    return HashTree.of(_leaf_digests(codec, leaf, encoded()))


def leaves_proof(tree: HashTree, group: Group, part: int) -> bytes:
    """Return what shows that the leaves of `part` are under the root of `tree`, together with their digests."""
    leaves = part_leaves(group, part)
    return b"".join(tree.proof(leaves.start, leaves.stop))


def split_digests(data: bytes) -> list[bytes]:
    """Return the digests that `data` joins. Raises ValueError."""
    if len(data) % _DIGEST_BYTES:
        raise ValueError("digests of a wrong size")
    return [data[at : at + _DIGEST_BYTES] for at in range(0, len(data), _DIGEST_BYTES)]


class MadePart:
    """The slices of `part` of all contributors, as they came. One task owns it until the part is complete."""

    def __init__(self, group: Group, part: PartResult, codec: Codec) -> None:
        self._group = group
        self._part = part
        self._codec = codec
        self._leaf = leaf_values(group.num_values)
        self._proofs: dict[str, bytes] = {}
        self._trees: dict[str, HashTree] = {}
        self._slices: dict[str, list[bytes]] = {member.peer_id: [] for member in group.contributors}

    def commit(self, peer: str, proof: bytes) -> None:
        """Record the `proof` that `peer`'s slices are under its committed root (see `leaves_proof`)."""
        self._proofs[peer] = proof

    def keep(self, peer: str, data: bytes) -> None:
        """Keep the next frame of `peer`'s slices. Raises RoundError after `drop`: a slice may arrive when the step is
        over."""
        if not self._slices:
            raise RoundError("the step is over")
        self._slices[peer].append(data)

    def drop(self) -> None:
        self._slices.clear()

    def check(self) -> None:
        """Raises PeerViolation, which names a member whose slices are not those that it committed to. What it has
        found right is not hashed again."""
        leaves, total = part_leaves(self._group, self._part.index), num_leaves(self._group.num_values)
        for member in self._group.contributors:
            peer = member.peer_id
            if peer in self._trees or peer not in self._slices:
                continue
            sizes = zip(self._slices[peer], map(num_values, self._part.frames), strict=True)
            digests = _leaf_digests(self._codec, self._leaf, sizes)
            try:
                tree = HashTree.proven(total, leaves.start, digests, split_digests(self._proofs.get(peer, b"")))
            except ValueError as error:
                raise PeerViolation(f"it shows no proof of its slices: {error}", peer_id=peer) from error
            if member.commitment is None or tree.root != member.commitment.root:
                raise PeerViolation("it sent other slices than it committed to", peer_id=peer)
            self._trees[peer] = tree

    def values_of(self, peer: str) -> tuple[slice, Tensor]:
        """Return the place of the part in the step's vector, and what `peer` contributes to it [F]. Raises RoundError
        after `drop`, and CodecError."""
        if not self._slices:
            raise RoundError("the step is over")
        slices = zip(self._part.frames, self._slices[peer], strict=True)
        x_F = torch.cat([decode_frame(self._codec, data, num_values(frame)) for frame, data in slices])
        return slice(self._part.frames[0].start, self._part.frames[-1].stop), x_F

    def slices_of(self, leaf: int) -> list[AuditedSlice]:
        """Return all contributors' slices of one leaf of the part, with their proofs. Raises RoundError after
        `drop`."""
        place, frames = leaf_at(self._group.num_values, leaf), self._part.frames
        index = next(index for index, frame in enumerate(frames) if frame.start <= place.start < frame.stop)
        frame, found = frames[index], []
        for member in self._group.contributors:
            if not self._slices:
                raise RoundError("the step is over")
            pieces = self._codec.pieces(
                self._slices[member.peer_id][index],
                num_values(frame),
                place.start - frame.start,
                place.stop - frame.start,
            )
            proof = b"".join(self._trees[member.peer_id].proof(leaf, leaf + 1))
            found.append(AuditedSlice(data=b"".join(pieces), proof=proof))
        return found


def _leaf_digests(codec: Codec, leaf: int, frames: Iterable[tuple[Data, int]]) -> list[bytes]:
    """Return the digests of the leaves of encoded frames, each with the number of its values."""
    return [leaf_digest(each) for data, count in frames for each in cut_leaves(codec, data, count, leaf)]
