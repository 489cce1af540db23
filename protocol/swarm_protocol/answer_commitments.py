"""Defines what a server signs of one answer: which rows it took, and which rows or tokens it made of them.

A server signs when the client closes the sequence, before it can know whether the answer is checked. Each position has
a digest of its own, so that what was run ahead of the client can be left out. `swarm.serving.checking` compares a
commitment with what the client has.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from swarm_protocol import limits, wire
from swarm_protocol.checks import Digest, Name, check_int
from swarm_protocol.identity import PeerId
from swarm_protocol.proto import session_pb2
from swarm_protocol.rows import Data
from swarm_protocol.session_frames import FirstBlock, Position, Revision, SampledToken, SequenceId, TokenDraw

COMMITMENT_PURPOSE = "answer"

COMMITMENT_LIFETIME_S = 30 * 86400.0
"""Time for which a commitment can convict its signer: as long as a client remembers a failed check, and more."""

POSITION_BYTES = 16
"""Bytes of the digest of one position's row or draw: nobody looks for two rows with one digest within a session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCommitment(wire.WireMessage):
    """Its signer ran blocks `[start, end)` for one sequence.

    It took the rows of positions `[inputs_from, inputs_to)` as they came, and gave those of `[outputs_from,
    outputs_to)`; the server of the last block drew the tokens that follow these positions. What it held before
    `inputs_from` came from its cache.
    """

    PROTO = session_pb2.AnswerCommitment
    MAX_BYTES = limits.MAX_OPEN_BYTES

    client_peer_id: PeerId
    sequence_id: SequenceId
    model: Name
    revision: Revision
    start: FirstBlock
    end: int
    inputs_from: Position
    inputs_to: int
    inputs_digest: Digest
    outputs_from: Position
    outputs_to: int
    outputs_digest: Digest

    def __post_init__(self) -> None:
        check_int(self.end, "end", low=self.start + 1, high=limits.MAX_BLOCKS)
        check_int(self.inputs_to, "inputs_to", low=self.inputs_from, high=limits.MAX_SESSION_TOKENS)
        check_int(self.outputs_to, "outputs_to", low=self.outputs_from, high=limits.MAX_SESSION_TOKENS)


@dataclass(slots=True)
class PositionDigests:
    """The digests of consecutive positions, the first of them `start`.

    Positions that come again take the place of those that were there; a gap begins all anew.
    """

    start: int = 0
    _digests: bytearray = field(default_factory=bytearray)

    @property
    def end(self) -> int:
        return self.start + len(self._digests) // POSITION_BYTES

    def add_rows(self, position: int, rows: Data, row_bytes: int) -> None:
        """Add the rows from `position` on, as they are on the wire."""
        self._begin(position)
        with memoryview(rows) as view:
            for at in range(0, len(view), row_bytes):
                self._digests += hashlib.blake2b(view[at : at + row_bytes], digest_size=POSITION_BYTES).digest()

    def add_draw(self, position: int, draw: TokenDraw, token: SampledToken) -> None:
        """Add the token that was drawn after the input at `position`, with how it was drawn and its fingerprint."""
        self._begin(position)
        asked = (draw.index, draw.seed, float(draw.temperature), float(draw.top_p), draw.top_k, float(draw.min_p))
        content = f"{asked!r}{token.token_id}/".encode() + token.fingerprint
        self._digests += hashlib.blake2b(content, digest_size=POSITION_BYTES).digest()

    def digest(self, until: int) -> bytes:
        """Return the digest of all positions before `until`."""
        num_positions = max(0, min(until, self.end) - self.start)
        return hashlib.sha256(self._digests[: num_positions * POSITION_BYTES]).digest()

    def add_digests(self, position: int, digests: bytes) -> None:
        """Add positions by their digests, as `between` returns them."""
        self._begin(position)
        self._digests += digests

    def between(self, start: int, end: int) -> bytes:
        """Return the digests of positions that are all there."""
        assert self.start <= start <= end <= self.end
        return bytes(self._digests[(start - self.start) * POSITION_BYTES : (end - self.start) * POSITION_BYTES])

    def _begin(self, position: int) -> None:
        if self.start <= position <= self.end:
            del self._digests[(position - self.start) * POSITION_BYTES :]
        else:
            self._digests.clear()
        if not self._digests:
            self.start = position
