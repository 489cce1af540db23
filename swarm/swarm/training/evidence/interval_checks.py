"""Draws which intervals of a committed step are validated, and by whom, and measures how far each is from what it gives
when it is computed once more.

The draw is a pure function of the step's outcome, which holds the digests of all parts' results: nobody can choose it
alone, and nobody knew it when members committed to their contributions. All who have the step's certificate draw alike.
The work of members that bring followers is not drawn: it is the sum of several intervals.

Equal devices and software give equal bytes. Others round differently, and training multiplies that: over an interval of
the default run by a few percent in float32, and up to a sixth where one of both computes in bfloat16
(`tests/bench/test_bench_validation.py`). Contributions of other data, of noise, turned round, scaled or repeated are
further away than the run's `validation_tolerance`. Comparing blocks.

Shapes: N values of the flat vector, L of a leaf.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from swarm_compression import Codec, CodecError
from swarm_protocol import limits
from swarm_protocol.commit_messages import Outcome
from swarm_protocol.errors import PeerViolation
from swarm_protocol.proof_messages import AuditedSlice
from swarm_protocol.training_messages import Contribution, Group
from torch import Tensor

from swarm.training.allreduce.committed_slices import is_leaf
from swarm.training.allreduce.parts import check_frame, leaf_at, num_leaves, num_values, part_leaves
from swarm.training.run.run_config import RunConfig
from swarm.training.state.lease import LeaseStripe, SampleIds, lease_of

_DIGEST_VALUES = 1 << 64


def draw_validators(origin: Group, outcome: Outcome, rate: float) -> Mapping[str, str]:
    """Return the validator of each member whose interval is validated, by member.

    Each contributor of `origin` is drawn with probability `rate`. A validator makes a part of the vector, so that it
    has the member's slices of it. It validates one interval only, and at most half of the members validate, so that
    some train in the next step.
    """
    if not rate or not origin.part_values:
        return {}
    seed = _seed(origin, outcome)
    candidates = [peer for peer, count in zip(origin.peer_ids, origin.part_values, strict=True) if count]
    most, found = len(origin.members) // 2, dict[str, str]()
    alone = [member.peer_id for member in origin.contributors if not member.followers]
    for member in sorted(alone, key=lambda peer: _number(seed, "member", peer)):
        if len(found) == most or _number(seed, "member", member) >= rate * _DIGEST_VALUES:
            break
        free = [peer for peer in candidates if peer != member and peer not in found.values()]
        if free:
            found[member] = min(free, key=lambda peer: _number(seed, "validator", member, peer))
    return found


def draw_leaves(origin: Group, outcome: Outcome, member: str, validator: str) -> tuple[int, ...]:
    """Return the leaves of `member`'s slice for the part of `validator` that are compared: MAX_SHOWN_LEAVES, or all."""
    seed = _seed(origin, outcome)
    leaves = part_leaves(origin, origin.peer_ids.index(validator))
    drawn = sorted(leaves, key=lambda leaf: _number(seed, "leaf", member, str(leaf)))
    return tuple(sorted(drawn[: limits.MAX_SHOWN_LEAVES]))


def _seed(origin: Group, outcome: Outcome) -> bytes:
    parts = b"".join(outcome.part_digests)
    return hashlib.sha256(f"swarm-intervals:{origin.run}/{origin.step}:".encode() + parts).digest()


def _number(seed: bytes, *words: str) -> int:
    return int.from_bytes(hashlib.sha256(seed + "/".join(words).encode()).digest()[:8], "big")


Tier: TypeAlias = Literal["exact", "close", "wrong"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """`tier` says whether the leaves are equal, within the run's tolerance, or wrong. `distance` is the norm of their
    difference, relative to that of the recomputed ones; inf if these are zero and the others are not."""

    tier: Tier
    distance: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IntervalStart:
    """Holds what an interval of outer step `step` follows from: the committed weights and the stripes of its leases."""

    step: int
    theta_N: Tensor
    stripes: tuple[LeaseStripe, ...]

    def samples_of(self, member: Contribution, config: RunConfig) -> SampleIds:
        """Return the samples that `member` says it has used, in their order."""
        lease = lease_of(self.stripes, self.step, member.peer_id, config.samples_per_interval)
        return SampleIds(lease)[: member.own_samples]


def likeness(
    group: Group, codec: Codec, leaves: Sequence[int], slices: Sequence[AuditedSlice], delta_N: Tensor, most: float
) -> Likeness:
    """Compare the committed `slices` of `leaves` with the recomputed `delta_N`. `most` is the largest distance that is
    not wrong. A slice that nobody can decode is wrong: the member has committed to it all the same."""
    off = size = 0.0
    is_exact = True
    for leaf, each in zip(leaves, slices, strict=True):
        where = leaf_at(group.num_values, leaf)
        mine = codec.encode(delta_N[where])
        is_exact = is_exact and mine == each.data
        try:
            mine_L, claimed_L = (codec.decode(data, num_values(where)).double() for data in (mine, each.data))
        except CodecError:
            return Likeness(tier="wrong", distance=math.inf)
        off += float((claimed_L - mine_L).square().sum())
        size += float(mine_L.square().sum())
    if is_exact:
        return Likeness(tier="exact", distance=0.0)
    distance = math.sqrt(off / size) if size else (math.inf if off else 0.0)
    return Likeness(tier="close" if distance <= most else "wrong", distance=distance)


def check_slices(
    group: Group, codec: Codec, member: Contribution, leaves: Sequence[int], slices: Sequence[AuditedSlice]
) -> None:
    """Raises PeerViolation unless `slices` are those of `leaves` to which `member` has committed, and can be
    decoded."""
    total = num_leaves(group.num_values)
    if member.commitment is None or len(leaves) != len(slices):
        raise PeerViolation("evidence has other leaves than the step's outcome draws")
    for leaf, each in zip(leaves, slices, strict=True):
        if not is_leaf(member.commitment.root, total, leaf, each.data, each.proof):
            raise PeerViolation("evidence has slices that the member has not committed to")
        try:
            check_frame(codec, each.data, num_values(leaf_at(group.num_values, leaf)))
        except CodecError as error:
            raise PeerViolation(f"evidence has slices that nobody can decode: {error}") from error
