"""Builds the frames that the client of one session sends, and checks and reads the servers' answers.

`session_state` decides which server gets which frame, and `session` sends it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from swarm_protocol.checks import shared_fields
from swarm_protocol.errors import PeerViolation
from swarm_protocol.limits import MAX_DRAFT_TEXT_TOKENS, PAGE_TOKENS
from swarm_protocol.rows import INT8_BLOCK, TOKENS, Data, Rows, row_bytes
from swarm_protocol.sampler import Sampler
from swarm_protocol.session_frames import (
    AnswerTokens,
    CloseSequence,
    DraftText,
    Frame,
    LinkUpdate,
    OpenSequence,
    SampledToken,
    SequenceRef,
    StepRequest,
    StepResult,
    TokenDraw,
)

from swarm.serving.model.shape import ModelShape
from swarm.serving.session.client_state import PrefixStore, SessionOptions
from swarm.serving.session.replay_buffer import ReplayBuffer
from swarm.serving.session.session_actions import Feed, OpenStage
from swarm.serving.session.stage import Stage
from swarm.serving.session.step_reports import StepReport
from swarm.serving.wire.page_keys import PageKeyChain, root_key

GROWTH_TOKENS = 512
"""Number of further tokens for which a sequence has room when it is opened. Most answers are shorter, and one session
of a model's whole context would fill the cache of a server."""

MIN_DRAFTED_TOKENS = 8
"""Minimum tokens of an answer with drafts: a shorter one gains nothing that its servers could measure."""


class SessionMessages:
    """Builds and reads the frames of one session of up to `max_tokens`.

    `prefixes` has rows of earlier sessions, and the servers of their pages; `sampler` is for the last server. `draw`
    says how the request's first token is drawn. There are `num_tokens` so far; those in `drawn` were drawn. With local
    spans, servers get only activations: they do not learn how tokens are drawn, and nobody else can compute the page
    keys from tokens.
    """

    def __init__(
        self,
        model: ModelShape,
        prefixes: PrefixStore,
        options: SessionOptions,
        *,
        session_id: str,
        max_tokens: int,
        sampler: Sampler | None = None,
    ) -> None:
        text_key = options.local_spans.prefix_key if options.local_spans is not None else b""
        self.draw = TokenDraw()
        self.sampler = sampler
        self.drawn: list[int] = []
        self.max_tokens = max_tokens
        self.model = model
        self._prefixes = prefixes
        self.num_tokens = 0
        self.session_id = session_id
        self._hides_text = bool(text_key)
        self._allows_drafts = options.drafts and not text_key
        self.codec = options.codec
        # the first span's pages depend on tokens only; those of the other spans also on the codec of their inputs
        roots = model.revision, f"{model.revision}/{self.codec}" + (f"/{text_key.hex()}" if text_key else "")
        self._chains = [PageKeyChain(root_key(root)) for root in roots]
        self._keys: list[list[bytes]] = [[], []]

    @property
    def has_grammar(self) -> bool:
        return self.sampler is not None and self.sampler.grammar is not None

    def follows_grammar(self, stage: Stage) -> bool:
        """Return whether the stage's server has to follow the session's grammar: it runs the last block."""
        return self.has_grammar and stage.end == self.model.num_blocks

    @property
    def room_tokens(self) -> int:
        """The number of tokens for which a new sequence gets room at once: those so far, and GROWTH_TOKENS more."""
        return min(self.max_tokens, self.num_tokens + GROWTH_TOKENS)

    def append_tokens(self, tokens: Sequence[int]) -> bytes:
        """Record the session's next tokens, and return them as rows."""
        self.num_tokens += len(tokens)
        for known, chain in zip(self._keys, self._chains, strict=True):
            known.extend(chain.extend(tokens))
        return np.asarray(tokens, dtype="<i4").tobytes()

    def row_bytes(self, block: int) -> int:
        return row_bytes(self.codec, self.model.hidden_size) if block else row_bytes(TOKENS, 0)

    def new_buffer(self, block: int) -> ReplayBuffer:
        """Make the buffer of a boundary, filled with the rows that earlier sessions kept for this prefix."""
        buffer = ReplayBuffer(self.row_bytes(block))
        if block:
            self._prefixes.fill(self._keys[1], block, buffer)
        return buffer

    def keep(self, block: int, buffer: ReplayBuffer) -> None:
        """Keep the rows for later sessions."""
        if block:
            self._prefixes.keep(self._keys[1], block, buffer)

    def forget(self) -> None:
        """Forget the rows that earlier sessions kept for this prefix."""
        self._prefixes.forget(self._keys[1])

    def cached_tokens(self) -> tuple[int, dict[str, int]]:
        """Return the number of tokens so far, and for each server how many of the first ones it probably has."""
        first, other = map(self._prefixes.holders.cached_tokens, self._keys)
        return self.num_tokens, other | first

    def note_pages(self, stage: Stage, num_tokens: int) -> None:
        """Record that the server of a stage has the pages of the first `num_tokens`, or is about to compute them."""
        if not stage.is_local:
            self._prefixes.holders.add(stage.peer_id, self._keys[stage.start > 0][: num_tokens // PAGE_TOKENS])

    def open(self, action: OpenStage) -> OpenSequence:
        stage, taken_over = action.stage, action.taken_over
        return OpenSequence(
            sequence_id=stage.sequence_id,
            session_id=self.session_id,
            revision=self.model.revision,
            start=stage.start,
            end=stage.end,
            max_tokens=self.room_tokens,
            grow_to=self.max_tokens,
            codec=self.codec,
            page_keys=() if taken_over else tuple(self._keys[stage.start > 0]),
            may_skip=stage.may_skip,
            previous=_ref(stage.link.neighbours.upstream),
            next=_ref(stage.link.neighbours.downstream),
            take_over=_ref(taken_over),
            sampler=self.sampler if stage.end == self.model.num_blocks else None,
        )

    def tokens_so_far(self, new: Sequence[Stage], tokens: ReplayBuffer) -> Iterator[tuple[Stage, Frame]]:
        """Yield what the last stage must know of the session's `tokens` if it is among the `new` ones: the answer so
        far, and where it may look for drafts."""
        for last in new:
            if last.end < self.model.num_blocks:
                continue
            if self.sampler is not None and self.drawn:
                token_ids = np.asarray(self.drawn, dtype="<i4").tobytes()
                yield last, AnswerTokens(sequence_id=last.sequence_id, token_ids=token_ids)
            if self._allows_drafts and tokens.length and self.max_tokens - tokens.length >= MIN_DRAFTED_TOKENS:
                text = tokens.rows(max(0, tokens.length - MAX_DRAFT_TEXT_TOKENS), tokens.length)
                yield last, DraftText(sequence_id=last.sequence_id, token_ids=text)

    def step(self, feed: Feed, buffer: ReplayBuffer) -> StepRequest:
        stage = feed.stage
        tells_draw = feed.wants_token and (stage.is_local or not self._hides_text)
        return StepRequest(
            sequence_id=stage.sequence_id,
            position=feed.start,
            want="token" if tells_draw else "nothing",
            forward=feed.forward,
            draw=replace(self.draw, index=self.draw.index + feed.num_drawn, ahead=feed.ahead) if tells_draw else None,
            rows=Rows(
                codec=self.codec if stage.start else TOKENS,
                num_rows=feed.end - feed.start,
                num_columns=self.model.hidden_size if stage.start else 0,
                payload=buffer.rows(feed.start, feed.end),
            ),
        )

    def link(self, stage: Stage) -> LinkUpdate:
        neighbours = stage.link.neighbours
        return LinkUpdate(
            sequence_id=stage.sequence_id, previous=_ref(neighbours.upstream), next=_ref(neighbours.downstream)
        )

    def close(self, stage: Stage, commit_to: int) -> CloseSequence:
        """Return the frame that closes the sequence. If `commit_to` is not 0, the server signs its inputs and outputs
        before that position; a local stage does not."""
        return CloseSequence(sequence_id=stage.sequence_id, commit_to=0 if stage.is_local else commit_to)

    def check_result(self, stage: Stage, result: StepResult) -> StepReport:
        """Return the server's result as a report.

        Raises PeerViolation for a result that the stage cannot have, or for numbers that are not finite.
        """
        rows, token = result.rows, result.token
        copy: Data = b""
        if stage.end < self.model.num_blocks:
            if token is not None:
                raise PeerViolation("a token from the middle of the model")
            if rows is not None:
                copy = self._checked_copy(rows)
        elif rows is not None:
            raise PeerViolation("logits in place of a token, or beside it")
        elif token is not None:
            self._check_token(token)
        return StepReport(**shared_fields(result, StepReport) | {"rows": copy})

    def _check_token(self, token: SampledToken) -> None:
        if max(token.token_id, *(token_id for token_id, _ in token.top), 0) >= self.model.vocab_size:
            raise PeerViolation(f"a token is outside the vocabulary of {self.model.vocab_size}")
        asked = self.draw.num_logprobs
        if (token.logprob is None) != (asked is None) or len(token.top) > (asked or 0):
            raise PeerViolation("other probabilities than were asked for")

    def _checked_copy(self, rows: Rows) -> Data:
        if rows.codec != self.codec or rows.num_columns != self.model.hidden_size:
            raise PeerViolation(f"got {rows.num_columns} columns in {rows.codec}, not hidden states in {self.codec}")
        if not are_finite(rows):
            raise PeerViolation("the numbers are not all finite")
        return rows.payload


def are_finite(rows: Rows) -> bool:
    """Return whether all numbers are finite. With int8, only scales can be anything else."""
    if rows.codec == "raw":
        return bool(np.isfinite(np.frombuffer(rows.payload, dtype="<f4")).all())
    if rows.codec == "bf16":
        return _are_finite_bf16(np.frombuffer(rows.payload, dtype="<u2"))
    num_scales = -(-rows.num_columns // INT8_BLOCK)
    bytes_TB = np.frombuffer(rows.payload, dtype=np.uint8).reshape(rows.num_rows, rows.row_bytes)
    return _are_finite_bf16(np.ascontiguousarray(bytes_TB[:, : 2 * num_scales]).view("<u2"))


def _are_finite_bf16(bits: np.ndarray) -> bool:
    """Return whether all bf16 values are finite. An exponent of all ones means infinity or not a number."""
    return bool(((bits & 0x7F80) != 0x7F80).all())


def _ref(stage: Stage | None) -> SequenceRef | None:
    return SequenceRef(peer_id=stage.peer_id, sequence_id=stage.sequence_id) if stage else None
