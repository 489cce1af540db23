"""Keeps the slices of a part to which their senders have committed, checks them, and shows them to others.

A member commits to its encoded pseudo-gradient before there is a group (`committed_tree`). Before it sends slices, it
proves where they are under the committed root (`PartStreams.own_proof`). An owner keeps the slices until the step is
over (`MadePart`): with int8, a byte for each value of its part and each member. Before it signs, it hashes all of them,
which with the proof must give the root: an honest owner never signs for slices that a sender did not commit to.

A frame's slices have no proofs of their own. The proof of the whole part needs all frames, and a sender holds back
those far ahead of the result. So an owner, or its backup, that cannot decode a slice asks its sender for the path of
that leaf, by a stream of the kind `proof` (`proved`). With that path the sender's own commitment convicts it, for
anyone who has the run's file (`evidence.wrong_reduction`). A sender that sends no path, sent other bytes than it
committed to, or ends the attempt meanwhile, is only accused. A maker that has signed a result made from such a slice
shows the path itself to its auditors: then both are convicted (`undecodable`).

Functions that are no coroutines block. Shapes: F values of the part.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

import torch
from swarm_compression import Codec, CodecError
from swarm_compression.codec import Data
from swarm_protocol import limits
from swarm_protocol.errors import PeerViolation, RoundError, SwarmError
from swarm_protocol.hash_tree import HashTree, leaf_digest, root_above
from swarm_protocol.identity import short_id
from swarm_protocol.proof_messages import BadSlice
from swarm_protocol.reduction_messages import AuditDraw, AuditedSlice
from swarm_protocol.training_messages import Contribution, Group
from torch import Tensor

from swarm.network.interface import Stream
from swarm.training.allreduce.part_streams import PartStreams
from swarm.training.allreduce.parts import (
    FRAME_VALUES,
    CaughtLying,
    PartResult,
    UndecodableSlice,
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

logger = logging.getLogger(__name__)

PROOF_S = 5.0
"""Seconds for which the maker of a part waits for the path of a leaf: the attempt has failed already, and the others
wait to hear why."""

_DIGEST_BYTES = limits.DIGEST_BYTES


def committed_tree(encode: Callable[[slice], Data], codec: Codec, total_values: int) -> HashTree:
    """Return the hash tree over the leaves of a vector of `total_values`, whose frames `encode` encodes. Raises
    CodecError if a frame cannot be encoded, or if its receivers would refuse it."""
    leaf = leaf_values(total_values)

    def encoded() -> Iterator[tuple[Data, int]]:
        for frame in frames_of(total_values, leaf=leaf):
            data = encode(frame)
            # a commitment to bytes that nobody can decode convicts its signer
            check_frame(codec, data, num_values(frame))
            yield data, num_values(frame)

    return HashTree.of(_leaf_digests(codec, leaf, encoded()))


def split_digests(data: bytes) -> list[bytes]:
    """Return the digests that `data` joins. Raises ValueError."""
    if len(data) % _DIGEST_BYTES:
        raise ValueError("digests of a wrong size")
    return [data[at : at + _DIGEST_BYTES] for at in range(0, len(data), _DIGEST_BYTES)]


def are_committed(group: Group, leaf: int, slices: Sequence[AuditedSlice]) -> bool:
    """Return whether `slices`, in the order of the group's contributors, are those of `leaf` that the contributors
    committed to."""
    total = num_leaves(group.num_values)
    if len(slices) != len(group.contributors):
        return False
    for member, each in zip(group.contributors, slices, strict=True):
        if member.commitment is None or not is_leaf(member.commitment.root, total, leaf, each.data, each.proof):
            return False
    return True


def is_leaf(root: bytes, total: int, leaf: int, data: Data, proof: bytes) -> bool:
    """Return whether `proof` shows that `data` is the leaf with this index in the tree of `total` leaves under
    `root`."""
    try:
        return root_above(total, leaf, leaf_digest(data), split_digests(proof)) == root
    except ValueError:
        return False


class MadePart:
    """The slices of `part` of all contributors, as received. One task owns it until the part is complete."""

    def __init__(self, group: Group, part: PartResult, codec: Codec) -> None:
        self._group = group
        self._part = part
        self._codec = codec
        self._leaf = leaf_values(group.num_values)
        self._proofs: dict[str, bytes] = {}
        self._trees: dict[str, HashTree] = {}
        self._slices: dict[str, list[bytes]] = {member.peer_id: [] for member in group.contributors}

    def commit(self, peer: str, proof: bytes) -> None:
        """Record the `proof` that `peer`'s slices are under its committed root (see `PartStreams.own_proof`)."""
        self._proofs[peer] = proof

    def keep(self, peer: str, data: bytes) -> None:
        """Keep the next frame of `peer`'s slices. Raises RoundError after `drop`: a slice may arrive when the step is
        over."""
        self._held()[peer].append(data)

    def drop(self) -> None:
        self._slices.clear()

    def check(self) -> None:
        """Check all slices against the commitments. Raises PeerViolation, which names a member whose slices are not
        those that it committed to. Slices that were found right are not hashed again."""
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
        """Return the place of the part in the step's vector, and the values [F] that `peer` contributes to it. Raises
        RoundError after `drop`, and CodecError."""
        slices = zip(self._part.frames, self._held()[peer], strict=True)
        x_F = torch.cat([decode_frame(self._codec, data, num_values(frame)) for frame, data in slices])
        return slice(self._part.frames[0].start, self._part.frames[-1].stop), x_F

    def slices_of(self, leaf: int) -> list[AuditedSlice]:
        """Return all contributors' slices of one leaf of the part, with their proofs. Raises RoundError after
        `drop`."""
        place, frames = leaf_at(self._group.num_values, leaf), self._part.frames
        index = next(index for index, frame in enumerate(frames) if frame.start <= place.start < frame.stop)
        frame, found = frames[index], []
        for member in self._group.contributors:
            data = self._held()[member.peer_id][index]
            pieces = self._codec.pieces(data, num_values(frame), place.start - frame.start, place.stop - frame.start)
            proof = b"".join(self._trees[member.peer_id].proof(leaf, leaf + 1))
            found.append(AuditedSlice(data=b"".join(pieces), proof=proof))
        return found

    def _held(self) -> dict[str, list[bytes]]:
        if not self._slices:
            raise RoundError("the step is over")
        return self._slices


def _leaf_digests(codec: Codec, leaf: int, frames: Iterable[tuple[Data, int]]) -> list[bytes]:
    """Return the digests of the leaves of encoded frames, which come with their numbers of values."""
    return [leaf_digest(each) for data, count in frames for each in cut_leaves(codec, data, count, leaf)]


def is_encoding(codec: Codec, data: Data) -> bool:
    """Return whether `data` may be a leaf that an honest member committed to: the encoding of some number of values.
    The number itself is not checked, since the coordinator signs the vector's size, not the member."""
    counts = range(1, FRAME_VALUES + 1)
    low, high = (bisect_left(counts, size, key=codec.encoded_bytes) for size in (len(data), len(data) + 1))
    return any(_decodes(codec, data, count) for count in counts[low:high])


def _decodes(codec: Codec, data: Data, count: int) -> bool:
    try:
        check_frame(codec, data, count)
    except CodecError:
        return False
    return True


async def proved(
    streams: PartStreams, part: int, error: SwarmError, *, on_cut_off: Callable[[SwarmError], Awaitable[None]]
) -> SwarmError:
    """Return an error that convicts the sender of the slice with which the reduction of `part` failed, or `error`
    itself if nothing can be proved. Takes at most PROOF_S. `on_cut_off` is called with `error` if the wait is
    cancelled: a sender that ends the attempt meanwhile could otherwise not be named."""
    if not isinstance(error, UndecodableSlice):
        return error
    limit_s = min(PROOF_S, streams.group.reduce_s / 4)
    try:
        async with asyncio.timeout(limit_s):
            evidence = await _evidence(streams, part, error)
    except asyncio.CancelledError:
        await on_cut_off(error)
        raise
    except TimeoutError:
        logger.info("%s does not say within %.0f s where its bad slice is", short_id(error.peer_id), limit_s)
    except SwarmError as failure:
        logger.info("the bad slice of %s is no evidence: %s", short_id(error.peer_id), failure)
    else:
        reason = f"it committed to a slice that nobody can decode, and {error.message}"
        return CaughtLying(reason, peer_id=error.peer_id, evidence=(evidence.evidence(),))
    return error


async def _evidence(streams: PartStreams, part: int, bad: UndecodableSlice) -> BadSlice:
    """Return what convicts the sender of `bad`. Raises PeerError if the sender shows no path, and PeerViolation if the
    slice is not the one that it committed to."""
    group = streams.group
    member = next(each for each in group.contributors if each.peer_id == bad.peer_id)
    leaf, data = await streams.off_loop(_bad_leaf, streams, bad)
    async with streams.open(bad.peer_id, streams.opening("proof", part)) as stream:
        await streams.send(stream, AuditDraw(leaf=leaf).to_bytes())
        await stream.finish()
        shown = AuditedSlice(data=data, proof=AuditedSlice.from_bytes(await stream.receive()).proof)
    total = num_leaves(group.num_values)
    if member.commitment is None or not is_leaf(member.commitment.root, total, leaf, shown.data, shown.proof):
        raise PeerViolation("it sent other slices than it committed to", peer_id=bad.peer_id)
    return _against(group, member, leaf, shown)


def undecodable(group: Group, codec: Codec, leaf: int, slices: Sequence[AuditedSlice]) -> tuple[BadSlice, ...]:
    """Return the proofs against the contributors of `group` whose `slices` of `leaf` are no valid encodings. The slices
    are in the order of the contributors, which have committed to them. Blocks."""
    return tuple(
        _against(group, member, leaf, shown)
        for member, shown in zip(group.contributors, slices, strict=True)
        if member.commitment is not None and not is_encoding(codec, shown.data)
    )


def _against(group: Group, member: Contribution, leaf: int, shown: AuditedSlice) -> BadSlice:
    assert member.commitment is not None
    return BadSlice(
        peer=member.peer_id,
        step=group.step,
        state_digest=group.state_digest,
        root=member.commitment.root,
        signature=member.commitment.signature,
        num_leaves=num_leaves(group.num_values),
        leaf=leaf,
        shown=shown,
    )


def _bad_leaf(streams: PartStreams, bad: UndecodableSlice) -> tuple[int, bytes]:
    """Return the index and bytes of the frame's first leaf that is no valid encoding. Blocks. Raises RoundError if
    there is none, or if the frame has a wrong size."""
    codec, size = streams.scheme.codec, leaf_values(streams.group.num_values)
    try:
        for index, leaf in enumerate(cut_leaves(codec, bad.data, num_values(bad.frame), size)):
            if not is_encoding(codec, leaf):
                return bad.frame.start // size + index, leaf
    except CodecError as error:
        raise RoundError(str(error)) from error
    raise RoundError("each of its leaves can be decoded")


async def show_path(streams: PartStreams, part: int, stream: Stream) -> None:
    """Send the owner of `part`, or its backup, which asks over `stream`, the path from a leaf of this member's slice to
    its committed root."""
    leaf = AuditDraw.from_bytes(await stream.receive()).leaf
    if leaf not in part_leaves(streams.group, part):
        raise PeerViolation("it asks for a leaf of another part")
    if streams.tree is None:
        raise RoundError("this member has committed to nothing")
    await streams.send(stream, AuditedSlice(data=b"", proof=b"".join(streams.tree.proof(leaf, leaf + 1))).to_bytes())
