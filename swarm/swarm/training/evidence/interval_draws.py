"""Which intervals of a committed step are validated, by whom, and on which leaves: a pure function of its outcome.

The outcome holds the digests of all parts' results, so nobody can choose it alone, and nobody knew it when members
committed to their contributions. All who have the step's certificate draw alike.

The work of members that bring followers is not drawn: it is the sum of several intervals.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from swarm_protocol import limits
from swarm_protocol.training_messages import Group, Outcome

from swarm.training.allreduce.parts import part_leaves

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
