"""Defines servers' commitments to their answers, and evidence about servers: a wrong proof of possession, which nodes
pass on, and a wrong answer, which they do not.

When the client closes the sequence, a server signs digests of its inputs and of its outputs or tokens, before it can
know whether the answer is checked. Each position has its own digest, so that positions run ahead of the client can be
left out. `swarm.serving.checking` compares a commitment with the client's rows.

A `wrong_possession` holds a server's signed statement and the manifest that it contradicts, so anybody can check it
(`swarm.serving.manifest.possession`). Nodes pass it on.

A `wrong_answer` holds a server's signed commitment to an answer, and the rows of that answer. Anyone with the model's
files can recompute them (`swarm.serving.server.answer_replay`). It holds the inputs of a client's request, which for a
model's first blocks are its prompt, so nodes never pass it on.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Annotated

from swarm_protocol import limits, wire
from swarm_protocol.checks import (
    Checked,
    Digest,
    Name,
    check_int,
    distinct,
    number,
    one_of,
    shared_fields,
    up_to,
    whole,
)
from swarm_protocol.identity import PeerId
from swarm_protocol.proof_messages import WRONG_ANSWER, WRONG_POSSESSION, Evidence
from swarm_protocol.proto import served_evidence_pb2, session_pb2
from swarm_protocol.rows import CODECS, Data
from swarm_protocol.session_frames import (
    FirstBlock,
    Position,
    Revision,
    SampledToken,
    SequenceId,
    TokenDraw,
    check_fingerprint,
)

SERVER_EVIDENCE_METHOD = "serving.evidence"
"""A call: Evidence of the kind `wrong_possession` / empty. The model's name follows after a slash."""

SERVER_BANS_METHOD = "serving.bans"
"""A stream: ServerBansRequest / Evidence, one message each. The model's name follows after a slash."""


COMMITMENT_PURPOSE = "answer"

COMMITMENT_LIFETIME_S = 30 * 86400.0
"""Seconds for which a commitment can convict its signer: longer than a client remembers a failed check."""

POSITION_BYTES = 16
"""Bytes of the digest of one position's row or draw: nobody can find two rows with one digest within a session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCommitment(wire.WireMessage):
    """A statement of its signer that it ran blocks `[start, end)` for one sequence.

    It received the rows of positions `[inputs_from, inputs_to)`, and sent those of `[outputs_from, outputs_to)`; the
    server of the last block drew the tokens that follow these positions. Positions before `inputs_from` came from its
    cache.
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

    Positions that are added again replace the old ones; after a gap, only the new positions are kept.
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
        """Add the token that was drawn after the input at `position`, with the draw's parameters and fingerprint."""
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

    def cut(self, position: int) -> None:
        """Drop the positions from `position` on."""
        del self._digests[max(0, position - self.start) * POSITION_BYTES :]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownDraw(Checked):
    """The token that a server drew after the input at `position`, the parameters of the draw, and its fingerprint."""

    position: Position
    index: Position = 0
    seed: Annotated[int, whole(2**63 - 1, low=-(2**63) + 1)] = 0
    temperature: Annotated[float, number(limits.MAX_TEMPERATURE)] = 0.0
    top_p: Annotated[float, number(1.0)] = 1.0
    top_k: Annotated[int, whole(2**31 - 1)] = 0
    min_p: Annotated[float, number(1.0)] = 0.0
    token_id: Annotated[int, whole(2**31 - 1)]
    fingerprint: Annotated[bytes, check_fingerprint] = b""

    @classmethod
    def of(cls, position: int, draw: TokenDraw, token: SampledToken) -> ShownDraw:
        return cls(position=position, **shared_fields(draw, cls), **shared_fields(token, cls))

    @property
    def draw(self) -> TokenDraw:
        """Return the requested draw. Raises ValueError for an impossible one."""
        return TokenDraw(**shared_fields(self, TokenDraw))

    @property
    def token(self) -> SampledToken:
        return SampledToken(**shared_fields(self, SampledToken))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEvidence(wire.WireMessage):
    """A server's commitment with the rows that it covers: the body of Evidence of the kind `wrong_answer`.

    `commitment` is its AnswerCommitment in the envelope. `inputs` are all rows from position 0 on to which it commits,
    in `codec` (token ids for the first block), and `outputs` its output rows; the server of the last block has `draws`
    instead.
    """

    PROTO = served_evidence_pb2.ServedEvidence
    MAX_BYTES = limits.MAX_SERVED_EVIDENCE_BYTES

    commitment: bytes
    codec: Annotated[str, one_of(CODECS)]
    inputs: bytes
    outputs: bytes = b""
    draws: Annotated[tuple[ShownDraw, ...], up_to(limits.MAX_SHOWN_DRAWS)] = ()

    def evidence(self) -> Evidence:
        return Evidence(kind=WRONG_ANSWER, body=self.to_bytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongPossession(wire.WireMessage):
    """A server's signed PossessionStatement with a path that leads elsewhere than to the root in `manifest`.

    `manifest` is a SignedManifest. It is the body of Evidence of the kind `wrong_possession`.
    """

    PROTO = served_evidence_pb2.WrongPossession
    MAX_BYTES = limits.MAX_WRONG_POSSESSION_BYTES

    manifest: bytes
    statement: bytes

    def evidence(self) -> Evidence:
        return Evidence(kind=WRONG_POSSESSION, body=self.to_bytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerBansRequest(wire.WireMessage):
    """Asks a server for the evidence about servers that it holds, except about those in `known`. Each answer is one
    Evidence; then the stream ends."""

    PROTO = served_evidence_pb2.ServerBansRequest
    MAX_BYTES = limits.MAX_SERVER_BANS_REQUEST_BYTES

    known: Annotated[tuple[PeerId, ...], distinct(limits.MAX_SERVER_BANS)] = ()
