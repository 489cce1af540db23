"""Evidence about servers: a wrong proof of possession, which travels, and a wrong answer, which does not.

A `wrong_possession` is what a server signed and the manifest that it contradicts, so anybody can judge it:
`swarm.serving.evidence.wrong_possession`. Nodes pass it on.

A `wrong_answer` is what a server signed of an answer, and what that is of. Everyone with the model's files can compute
it once more: `swarm.serving.server.answer_replay`. It holds the inputs of a client's request, which for a model's first
blocks are its prompt, so nobody sends it to others by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from swarm_protocol import limits, wire
from swarm_protocol.checks import Checked, distinct, number, one_of, shared_fields, up_to, whole
from swarm_protocol.identity import PeerId
from swarm_protocol.proof_messages import WRONG_ANSWER, WRONG_POSSESSION, Evidence
from swarm_protocol.proto import served_evidence_pb2
from swarm_protocol.rows import CODECS
from swarm_protocol.session_frames import Position, SampledToken, TokenDraw, check_fingerprint

SERVER_EVIDENCE_METHOD = "serving.evidence"
"""A call: Evidence of the kind `wrong_possession` / empty. The model's name follows after a slash."""

SERVER_BANS_METHOD = "serving.bans"
"""A stream: ServerBansRequest / Evidence, one message each. The model's name follows after a slash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownDraw(Checked):
    """The token that a server drew after the input at `position`, how it was asked to, and the draw's fingerprint."""

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
        """Raises ValueError for one that nobody can have asked for."""
        return TokenDraw(**shared_fields(self, TokenDraw))

    @property
    def token(self) -> SampledToken:
        return SampledToken(**shared_fields(self, SampledToken))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEvidence(wire.WireMessage):
    """Holds what a server signed, and the rows that it is of. It is the body of Evidence of the kind `wrong_answer`.

    `commitment` is its AnswerCommitment in the envelope. `inputs` are all rows from position 0 on that it says it took,
    in `codec` (token ids for the first block), and `outputs` those that it gave; the server of the last block gave
    `draws` in their place.
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
    """Asks a server for the evidence about servers that it holds, without that against `known`. Each answer is one
    Evidence; then the stream ends."""

    PROTO = served_evidence_pb2.ServerBansRequest
    MAX_BYTES = limits.MAX_SERVER_BANS_REQUEST_BYTES

    known: Annotated[tuple[PeerId, ...], distinct(limits.MAX_SERVER_BANS)] = ()
