"""What a client says to its servers in one session, and what their answers mean, once they have been checked.

Leaves who is told what to `course`, and sending to `pilot`. Legend of shapes: T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from swarm_protocol.errors import PeerViolation, SwarmError
from swarm_protocol.limits import PAGE_TOKENS
from swarm_protocol.rows import INT8_BLOCK, TOKENS, Data, Rows, row_bytes
from swarm_protocol.sampler import Sampler
from swarm_protocol.session_frames import (
    AllowHandover,
    AnswerTokens,
    CloseSequence,
    Frame,
    LinkAck,
    LinkUpdate,
    OpenSequence,
    SampledToken,
    SequenceEnded,
    SequenceReady,
    SequenceRef,
    ServerLeaving,
    StepRequest,
    StepResult,
    TokenDraw,
)
from torch import Tensor

from swarm.serving.model.shape import ModelShape
from swarm.serving.session.actions import Feed, Hand, OpenSeat
from swarm.serving.session.hop import Hop, Ran
from swarm.serving.session.replay_buffer import Ledger, PrefixStore
from swarm.serving.wire.page_keys import PageKeyChain, root_key

Output: TypeAlias = SampledToken | Tensor
"""A token, or logits [T, V]."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A step's result. `output` only from the last hop."""

    ran: Ran
    output: Output | None
    codec_error: float


@dataclass(frozen=True, slots=True)
class Opened:
    length: int
    max_step_tokens: int


@dataclass(frozen=True, slots=True)
class Left:
    """The server leaves, or with an `error` the seat is gone."""

    error: SwarmError | None


class Speech:
    """Of one session. `store` has rows of earlier ones, `sampler` is for whoever draws.

    `draw` says how the question's first token is taken; None: logits are wanted. `drawn` are the tokens so far.
    """

    def __init__(
        self,
        model: ModelShape,
        store: PrefixStore,
        *,
        session_id: str,
        max_tokens: int,
        codec: str,
        sampler: Sampler | None = None,
    ) -> None:
        self.draw: TokenDraw | None = None
        self.sampler = sampler
        self.drawn: list[int] = []
        self.model = model.name
        self._model = model
        self._store = store
        self._session_id = session_id
        self.max_tokens = max_tokens
        self._codec = codec
        # the first span computes from tokens; what the others hold depends on the codec before them, too
        roots = model.revision, f"{model.revision}/{codec}"
        self._chains = [PageKeyChain(root_key(root)) for root in roots]
        self._keys: list[list[bytes]] = [[], []]

    @property
    def has_grammar(self) -> bool:
        return self.sampler is not None and self.sampler.grammar is not None

    # --- what is kept -----------------------------------------------------------------------------------------------

    def know(self, tokens: Sequence[int]) -> bytes:
        """Tokens that follow in this session, as rows."""
        for known, chain in zip(self._keys, self._chains, strict=True):
            known.extend(chain.extend(tokens))
        return np.asarray(tokens, dtype="<i4").tobytes()

    def row_bytes(self, block: int) -> int:
        return row_bytes(self._codec, self._model.hidden_size) if block else row_bytes(TOKENS, 0)

    def new_ledger(self, block: int) -> Ledger:
        """With what earlier sessions left for this prefix."""
        ledger = Ledger(self.row_bytes(block))
        if block:
            self._store.fill(self._keys[1], block, ledger)
        return ledger

    def keep(self, block: int, ledger: Ledger) -> None:
        """For later sessions."""
        if block:
            self._store.keep(self._keys[1], block, ledger)

    # --- what is said -----------------------------------------------------------------------------------------------

    def open(self, action: OpenSeat) -> OpenSequence:
        hop, taken_over = action.hop, action.taken_over
        num_pages = 0 if taken_over else hop.max_length // PAGE_TOKENS
        return OpenSequence(
            sequence_id=hop.sequence_id,
            session_id=self._session_id,
            revision=self._model.revision,
            start=hop.start,
            end=hop.end,
            max_tokens=self.max_tokens,
            codec=self._codec,
            page_keys=tuple(self._keys[hop.start > 0][:num_pages]),
            previous=_previous(hop),
            next=_next(hop),
            take_over=SequenceRef(peer_id=taken_over.peer_id, sequence_id=taken_over.sequence_id)
            if taken_over
            else None,
            sampler=self.sampler if hop.end == self._model.num_blocks else None,
        )

    def recall(self, fresh: Sequence[Hop]) -> tuple[Hop, AnswerTokens] | None:
        """What the one that draws from now on, if it is among `fresh`, has to know of the answer so far."""
        last = next((hop for hop in fresh if hop.end == self._model.num_blocks), None)
        if last is None or self.sampler is None or not self.drawn:
            return None
        return last, AnswerTokens(sequence_id=last.sequence_id, token_ids=np.asarray(self.drawn, dtype="<i4").tobytes())

    def step(self, feed: Feed, ledger: Ledger) -> StepRequest:
        hop = feed.hop
        return StepRequest(
            sequence_id=hop.sequence_id,
            position=feed.start,
            want=feed.want,
            forward=feed.forward,
            draw=self._draw(feed) if feed.want == "token" else None,
            rows=Rows(
                codec=self._codec if hop.start else TOKENS,
                num_rows=feed.end - feed.start,
                num_columns=self._model.hidden_size if hop.start else 0,
                payload=ledger.rows(feed.start, feed.end),
            ),
        )

    def link(self, hop: Hop) -> LinkUpdate:
        return LinkUpdate(sequence_id=hop.sequence_id, previous=_previous(hop), next=_next(hop))

    def hand(self, action: Hand) -> AllowHandover:
        return AllowHandover(sequence_id=action.hop.sequence_id, to_peer_id=action.to_peer_id)

    def close(self, hop: Hop) -> CloseSequence:
        return CloseSequence(sequence_id=hop.sequence_id)

    def _draw(self, feed: Feed) -> TokenDraw:
        assert self.draw is not None
        return replace(self.draw, index=self.draw.index + feed.num_drawn, ahead=feed.ahead)

    # --- what is heard ----------------------------------------------------------------------------------------------

    def understand(self, hop: Hop, frame: Frame) -> Heard | Opened | LinkAck | Left:
        """Raises PeerViolation for what no server has reason to send."""
        match frame:
            case StepResult():
                return self._result(hop, frame)
            case SequenceReady():
                return Opened(frame.length, frame.max_step_tokens)
            case LinkAck():
                return frame
            case SequenceEnded():
                return Left(frame.error(hop.peer_id))
            case ServerLeaving():
                return Left(None)
        raise PeerViolation(f"a server does not send {type(frame).__name__} to a client")

    def _result(self, hop: Hop, result: StepResult) -> Heard:
        rows, output = result.rows, result.token
        copy: Data = b""
        num_outputs = 0
        logits: Output | None = output
        if hop.end < self._model.num_blocks:
            if output is not None:
                raise PeerViolation("a token from the middle of the model")
            if rows is not None:
                copy = self._checked_copy(rows)
        elif output is not None:
            self._check_picked(output, rows)
            num_outputs = 1
        elif rows is not None:
            logits, num_outputs = self._logits(rows), rows.num_rows
        ran = Ran(
            position=result.position,
            rows=copy,
            num_outputs=num_outputs,
            compute_ms=result.compute_ms,
            queue_ms=result.queue_ms,
            push_failed=result.push_failed,
            passed_on=result.passed_on,
            looped=result.looped,
            num_links=result.num_links,
            upstream_ms=result.upstream_ms,
        )
        return Heard(ran, logits, result.codec_error)

    def _check_picked(self, picked: SampledToken, rows: Rows | None) -> None:
        if self.draw is None or rows is not None:
            raise PeerViolation("a token in place of logits, or beside them")
        if max(picked.token_id, *(token_id for token_id, _ in picked.top), 0) >= self._model.vocab_size:
            raise PeerViolation(f"a token is outside the vocabulary of {self._model.vocab_size}")
        asked = self.draw.num_logprobs
        if (picked.logprob is None) != (asked is None) or len(picked.top) > (asked or 0):
            raise PeerViolation("other probabilities than were asked for")

    def _checked_copy(self, rows: Rows) -> Data:
        if rows.codec != self._codec or rows.num_columns != self._model.hidden_size:
            raise PeerViolation(f"got {rows.num_columns} columns in {rows.codec}, not hidden states in {self._codec}")
        if not are_finite(rows):
            raise PeerViolation("the numbers are not all finite")
        return rows.payload

    def _logits(self, rows: Rows) -> Tensor:
        if self.draw is not None:
            raise PeerViolation("logits in place of a token")
        if rows.codec != "raw" or rows.num_columns != self._model.vocab_size:
            raise PeerViolation(f"got {rows.num_columns} columns in {rows.codec}, not logits of the vocabulary")
        # a copy in the machine's own byte order, which torch may write to
        logits = np.frombuffer(rows.payload, dtype="<f4").astype(np.float32, copy=True)
        if not np.isfinite(logits).all():
            raise PeerViolation("the numbers are not all finite")
        return torch.from_numpy(logits).reshape(rows.num_rows, rows.num_columns)


def are_finite(rows: Rows) -> bool:
    """Whether all numbers are, as far as their codec can express others."""
    if rows.codec == "raw":
        return bool(np.isfinite(np.frombuffer(rows.payload, dtype="<f4")).all())
    if rows.codec == "bf16":
        return _are_finite_bf16(np.frombuffer(rows.payload, dtype="<u2"))
    num_scales = -(-rows.num_columns // INT8_BLOCK)
    bytes_TB = np.frombuffer(rows.payload, dtype=np.uint8).reshape(rows.num_rows, rows.row_bytes)
    return _are_finite_bf16(np.ascontiguousarray(bytes_TB[:, : 2 * num_scales]).view("<u2"))


def _are_finite_bf16(bits: np.ndarray) -> bool:
    """An exponent of all ones is infinity or not a number."""
    return bool(((bits & 0x7F80) != 0x7F80).all())


def _next(hop: Hop) -> SequenceRef | None:
    return _seat(hop.told.next_peer_id, hop.told.next_sequence_id)


def _previous(hop: Hop) -> SequenceRef | None:
    return _seat(hop.told.previous_peer_id, hop.told.previous_sequence_id)


def _seat(peer_id: str, sequence_id: bytes) -> SequenceRef | None:
    return SequenceRef(peer_id=peer_id, sequence_id=sequence_id) if sequence_id else None
