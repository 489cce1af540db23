"""Decides what becomes of a slice that nobody can decode: who makes the part asks its sender where it is in the
sender's committed tree.

The slices of a frame come without proofs of their own, and the proof of the whole part needs all frames, of which a
sender holds back those far ahead of the result. So an owner, or its backup, asks for the path of the one leaf that it
cannot decode, by a stream of the kind `proof`. With that path the member's own commitment convicts it, before anyone
who has the run's file (`evidence.wrong_reduction`). A sender that gives no path, or sent something else than it
committed to, or ends the attempt meanwhile, is named by that word alone.

A maker that has signed a result of such a slice shows the path itself, to who audits it: then both are convicted
(`undecodable`).

Shapes: F values of a frame.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence

from swarm_compression import Codec, CodecError
from swarm_compression.codec import Data
from swarm_protocol.errors import PeerViolation, RoundError, SwarmError
from swarm_protocol.identity import short_id
from swarm_protocol.proof_messages import AuditDraw, AuditedSlice, BadSlice
from swarm_protocol.training_messages import Group, SliceCommitment

from swarm.network.interface import Stream
from swarm.training.allreduce.leaf_checks import is_leaf
from swarm.training.allreduce.part_streams import PartStreams
from swarm.training.allreduce.parts import (
    FRAME_VALUES,
    CaughtLying,
    UndecodableSlice,
    check_frame,
    cut_leaves,
    leaf_values,
    num_leaves,
    num_values,
    part_leaves,
)

logger = logging.getLogger(__name__)

PROOF_S = 5.0
"""Time for which the maker of a part waits for the path of a leaf; the attempt has failed already, and the others wait
to hear why."""


def is_encoding(codec: Codec, data: Data) -> bool:
    """Return whether `data` is what an honest member may have committed to as a leaf: the encoding of some number of
    values. How many a leaf has is not asked, since the vector's size is signed by a coordinator, not by the member."""
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
    """Return `error`, with which the reduction of `part` failed, as one that convicts its sender if it can be proved.
    Takes PROOF_S at most. `on_cut_off` is called with `error` if this is cancelled before: a sender that ends the
    attempt meanwhile could otherwise not be named."""
    if not isinstance(error, UndecodableSlice) or not streams.proves:
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
    """Raises PeerError if the sender shows no path, and PeerViolation if the slice is not what it committed to."""
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
    return _against(group, member.peer_id, member.commitment, leaf, shown)


def undecodable(group: Group, codec: Codec, leaf: int, slices: Sequence[AuditedSlice]) -> tuple[BadSlice, ...]:
    """Return what convicts those of `group`'s contributors whose `slices` of `leaf` are no encodings. They are in the
    order of the contributors, which have committed to them. Blocks."""
    return tuple(
        _against(group, member.peer_id, member.commitment, leaf, shown)
        for member, shown in zip(group.contributors, slices, strict=True)
        if member.commitment is not None and not is_encoding(codec, shown.data)
    )


def _against(group: Group, peer: str, commitment: SliceCommitment, leaf: int, shown: AuditedSlice) -> BadSlice:
    return BadSlice(
        peer=peer,
        step=group.step,
        state_digest=group.state_digest,
        root=commitment.root,
        signature=commitment.signature,
        num_leaves=num_leaves(group.num_values),
        leaf=leaf,
        shown=shown,
    )


def _bad_leaf(streams: PartStreams, bad: UndecodableSlice) -> tuple[int, bytes]:
    """Return the first leaf of the frame that no encoder writes, and its bytes. Blocks. Raises RoundError if there is
    none: the frame as a whole has another size than its values take."""
    codec, size = streams.scheme.codec, leaf_values(streams.group.num_values)
    try:
        for index, leaf in enumerate(cut_leaves(codec, bad.data, num_values(bad.frame), size)):
            if not is_encoding(codec, leaf):
                return bad.frame.start // size + index, leaf
    except CodecError as error:
        raise RoundError(str(error)) from error
    raise RoundError("each of its leaves can be decoded")


async def show_path(streams: PartStreams, part: int, stream: Stream) -> None:
    """Answer the owner of `part`, or its backup, that asks by `stream` where a leaf of this member's slice of it is
    under its root."""
    leaf = AuditDraw.from_bytes(await stream.receive()).leaf
    if leaf not in part_leaves(streams.group, part):
        raise PeerViolation("it asks for a leaf of another part")
    if streams.tree is None:
        raise RoundError("this member has committed to nothing")
    await streams.send(stream, AuditedSlice(data=b"", proof=b"".join(streams.tree.proof(leaf, leaf + 1))).to_bytes())
