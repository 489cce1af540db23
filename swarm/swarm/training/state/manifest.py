"""What a replica's state consists of: the small, canonical document whose digest is the state's name.

Layout: the length of the head as 4 bytes little-endian; the head, canonical JSON; 32 bytes of digest for each chunk.
Values only; `state` has the chunks.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from swarm_protocol import limits
from swarm_protocol.checks import check_digest, check_int
from swarm_protocol.errors import PeerViolation
from swarm_protocol.identity import check_peer_id

from swarm.training.inner.lease import Cursor
from swarm.training.inner.lease_stripe import MAX_LANES, Lane

CHUNK_BYTES = 1 << 20
"""Small enough that a lying donor costs little, large enough that requests for chunks cost less than chunks."""
MAX_STATE_VALUES = 1 << 34
"""128 GiB of state, beyond what any volunteer holds."""
MAX_HEAD_BYTES = 1 << 20
"""256 members take 14 KiB, here and up to twice that in each lane; the rest is for holes, of which there are at most a
few for each member."""
MAX_MANIFEST_BYTES = MAX_HEAD_BYTES + 8 * MAX_STATE_VALUES // CHUNK_BYTES * limits.DIGEST_BYTES + 4
_MAX_SAMPLES = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """`roster` and `lanes`: see ReplicaState. `num_values` are those of theta, and of momentum as well."""

    outer_step: int
    lanes: tuple[Lane, ...]
    roster: tuple[str, ...]
    num_values: int
    chunk_digests: tuple[bytes, ...]

    def __post_init__(self) -> None:
        check_int(self.outer_step, "outer_step", high=limits.MAX_OUTER_STEP)
        if not 1 <= len(self.lanes) <= MAX_LANES:
            raise ValueError(f"a state has no {len(self.lanes)} lanes")
        check_int(self.num_values, "num_values", low=1, high=MAX_STATE_VALUES)
        if list(self.roster) != sorted(set(self.roster)):
            raise ValueError("the roster is not sorted and distinct")
        for peer_id in (*self.roster, *(peer_id for lane in self.lanes for peer_id in lane.roster)):
            check_peer_id(peer_id)
        if len(self.chunk_digests) != -(-self.num_bytes // CHUNK_BYTES):
            raise ValueError(f"{len(self.chunk_digests)} chunks do not hold {self.num_bytes} bytes")
        for digest in self.chunk_digests:
            check_digest(digest, "chunk_digests")

    @property
    def num_bytes(self) -> int:
        return 8 * self.num_values

    def chunk_size(self, index: int) -> int:
        return min(CHUNK_BYTES, self.num_bytes - index * CHUNK_BYTES)

    def digest(self) -> bytes:
        """The name of the state: 32 bytes, equal on all replicas that hold the same bits."""
        return hashlib.sha256(self.to_bytes()).digest()

    def to_bytes(self) -> bytes:
        """Equal manifests have equal bytes."""
        head = {
            "outer_step": self.outer_step,
            "lanes": [_lane_to_json(lane) for lane in self.lanes],
            "roster": self.roster,
            "num_values": self.num_values,
        }
        text = json.dumps(head, sort_keys=True, separators=(",", ":")).encode()
        return len(text).to_bytes(4, "little") + text + b"".join(self.chunk_digests)

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Raises PeerViolation for anything that `to_bytes` does not write."""
        if len(data) > MAX_MANIFEST_BYTES:
            raise PeerViolation(f"a state's manifest has {len(data)} bytes, more than {MAX_MANIFEST_BYTES}")
        try:
            manifest = cls._parse(data)
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise PeerViolation(f"a state's manifest is malformed: {error}") from error
        if manifest.to_bytes() != data:
            raise PeerViolation("a state's manifest is not in its canonical form")
        return manifest

    @classmethod
    def _parse(cls, data: bytes) -> Manifest:
        head_end = 4 + int.from_bytes(data[:4], "little")
        if not 4 < head_end <= min(len(data), 4 + MAX_HEAD_BYTES):
            raise ValueError("its head is truncated or too large")
        head: dict[str, Any] = json.loads(data[4:head_end])
        return cls(
            outer_step=head["outer_step"],
            lanes=tuple(_lane_from_json(lane) for lane in head["lanes"]),
            roster=tuple(head["roster"]),
            num_values=head["num_values"],
            chunk_digests=tuple(
                data[start : start + limits.DIGEST_BYTES] for start in range(head_end, len(data), limits.DIGEST_BYTES)
            ),
        )


def _lane_to_json(lane: Lane) -> dict[str, Any]:
    holes = [[hole.start, hole.stop] for hole in lane.cursor.holes]
    return {"next_sample": lane.cursor.next_sample, "holes": holes, "roster": lane.roster}


def _lane_from_json(lane: dict[str, Any]) -> Lane:
    """Raises what `json` and the checks raise."""
    holes = [(check_int(start, "hole", high=_MAX_SAMPLES), stop) for start, stop in lane["holes"]]
    cursor = Cursor(
        next_sample=check_int(lane["next_sample"], "next_sample", high=_MAX_SAMPLES),
        holes=tuple(range(start, check_int(stop, "hole", high=_MAX_SAMPLES)) for start, stop in holes),
    )
    return Lane(cursor=cursor, roster=tuple(lane["roster"]))
