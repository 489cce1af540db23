"""Evidence that a server gave a wrong answer, as it lies on a disk: what the server signed, and what that is of.

Everyone with the model's files can compute it once more: see `swarm.serving.server.answer_replay`. It holds the inputs
of a client's request, which for a model's first blocks are its prompt, so nobody sends it to others by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from swarm_protocol import limits, wire
from swarm_protocol.checks import Checked, number, one_of, up_to, whole
from swarm_protocol.proof_messages import WRONG_ANSWER, Evidence
from swarm_protocol.proto import served_evidence_pb2
from swarm_protocol.rows import CODECS
from swarm_protocol.session_frames import Position, SampledToken, TokenDraw, check_fingerprint


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
        return cls(
            position=position,
            index=draw.index,
            seed=draw.seed,
            temperature=draw.temperature,
            top_p=draw.top_p,
            top_k=draw.top_k,
            min_p=draw.min_p,
            token_id=token.token_id,
            fingerprint=token.fingerprint,
        )

    @property
    def draw(self) -> TokenDraw:
        """Raises ValueError for one that nobody can have asked for."""
        return TokenDraw(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            index=self.index,
            min_p=self.min_p,
        )

    @property
    def token(self) -> SampledToken:
        return SampledToken(token_id=self.token_id, fingerprint=self.fingerprint)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEvidence(wire.WireMessage):
    """What a server signed, and the rows that it is of. It is the body of Evidence of the kind `wrong_answer`.

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
