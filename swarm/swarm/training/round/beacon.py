"""Draws of one attempt: which member coordinates it, and who has a seat in a group that is full.

A draw is by the lowest hash of a beacon and the peer id. The beacon of an attempt begins with the digest of the state
that the step follows from, which nobody knew when the members of that state were chosen. So no member can have made its
key for the attempts that it wants to coordinate. Keys cost nothing, however, and a newcomer can make one after it has
seen the state. The beacon of the seats therefore also holds the members' commitments to their slices, which nobody but
their makers and the attempt's coordinator knows before there is a group.

In a run's first round the beacon is the run's id and its initial state. Both are known beforehand: a party that makes
enough keys coordinates that round, and takes its seats.

Pure functions. A beacon of the last state for drawing the members of a round is that of MoDeST (de Vos et al. 2023,
arXiv 2302.13837).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from swarm_protocol.training_messages import Contribution


def attempt_beacon(run: str, state_digest: bytes, step: int, attempt: int) -> bytes:
    """Return the beacon of `attempt` at the `step` that follows from `state_digest`."""
    return hashlib.sha256(f"{run}/{state_digest.hex()}/{step}/{attempt}".encode()).digest()


def seat_beacon(beacon: bytes, reports: Iterable[Contribution]) -> bytes:
    """Return the beacon of the seats of the attempt with this `beacon`, whose members report `reports`."""
    roots = sorted(each.commitment.root for each in reports if each.commitment)
    return hashlib.sha256(beacon + b"".join(roots)).digest()


def coordinator_of(beacon: bytes, candidates: Iterable[str]) -> str:
    """Return the coordinator: another candidate for each attempt, and the same for all members."""
    return min(candidates, key=lambda peer: drawn(beacon, peer))


def drawn(beacon: bytes, peer: str) -> bytes:
    """Return the number that `peer` has drawn: the lowest one comes first."""
    return hashlib.sha256(beacon + peer.encode()).digest()
