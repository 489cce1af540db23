"""Defines the frames that the peers of one model exchange on a multiplexed connection.

A *sequence* is one session's part on one server: its cache and its length. The client chooses a random id for each,
which is unique together with the client's peer id. The reader of a frame must check who may send it, and when. `frames`
encodes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal, TypeAlias

from swarm_protocol import limits
from swarm_protocol.checks import Checked, check_float, check_int, filled, named, number, one_of, sized, up_to, whole
from swarm_protocol.errors import SwarmError
from swarm_protocol.failure_messages import decode_failure
from swarm_protocol.identity import PeerId
from swarm_protocol.rows import CODECS, Rows
from swarm_protocol.sampler import Sampler, check_token_ids

SESSION_METHOD = "serving.lane"
"""A stream of `Frames` both ways. The model's name follows after a slash."""

Spent: TypeAlias = tuple[float, float]
"""The milliseconds of a step's computation, and of its wait before that."""

PAGE_KEY_BYTES = 16


SequenceId: TypeAlias = Annotated[bytes, sized(limits.SEQUENCE_ID_BYTES)]
Position: TypeAlias = Annotated[int, whole(limits.MAX_SESSION_TOKENS)]
Revision: TypeAlias = Annotated[str, named(limits.MAX_REVISION_BYTES)]
FirstBlock: TypeAlias = Annotated[int, whole(limits.MAX_BLOCKS - 1)]
StepMs: TypeAlias = Annotated[float, number(limits.MAX_STEP_MS)]
Logprob: TypeAlias = Annotated[float, number(limits.MAX_LOGPROB, low=-limits.MAX_LOGPROB)]
PageKey: TypeAlias = Annotated[bytes, sized(PAGE_KEY_BYTES)]
NumDrafts: TypeAlias = Annotated[int, whole(limits.MAX_DRAFTS)]
WantedOutput: TypeAlias = Literal["nothing", "last", "all", "token"]


def check_upstream(upstream_ms: tuple[Spent, ...], field: str) -> None:
    """Check the times of servers before. Raises ValueError. Equal times are valid."""
    if len(upstream_ms) > limits.MAX_UPSTREAM:
        raise ValueError(f"{field} is of {len(upstream_ms)} servers, more than {limits.MAX_UPSTREAM}")
    for spent in upstream_ms:
        for part_ms in spent:
            check_float(part_ms, field, high=limits.MAX_STEP_MS)


Failure: TypeAlias = Annotated[bytes, filled(limits.MAX_FAILURE_BYTES)]
Upstream: TypeAlias = Annotated[tuple[Spent, ...], check_upstream]


FINGERPRINT_EVERY = 16
FINGERPRINT_LOGITS = 16


def check_fingerprint(value: bytes, field: str) -> None:
    """Check the size of a fingerprint. Raises ValueError. Its content is checked when it is used."""
    if len(value) % 8 or len(value) > 8 * FINGERPRINT_LOGITS:
        raise ValueError(f"{field} has {len(value)} bytes, and may have 8 for each of {FINGERPRINT_LOGITS} logits")


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRef(Checked):
    """A sequence of the same client on another peer."""

    peer_id: PeerId
    sequence_id: SequenceId


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDraw(Checked):
    """The parameters of the draw of a token at `index`, with the `num_logprobs` likeliest tokens, or None for no
    probabilities.

    The server may draw `ahead` more tokens after it without another request, each of them the next input.
    """

    temperature: Annotated[float, number(limits.MAX_TEMPERATURE)] = 0.0
    top_p: Annotated[float, number(1.0)] = 1.0
    top_k: Annotated[int, whole(2**31 - 1)] = 0
    seed: Annotated[int, whole(2**63 - 1, low=-(2**63) + 1)] = 0
    index: Position = 0
    num_logprobs: Annotated[int, whole(limits.MAX_LOGPROBS)] | None = None
    ahead: int = 0
    min_p: Annotated[float, number(1.0)] = 0.0

    def __post_init__(self) -> None:
        if not self.top_p:
            raise ValueError("top_p is 0")
        check_int(self.ahead, "ahead", high=limits.MAX_SESSION_TOKENS - self.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken(Checked):
    """A drawn token. If asked for, `logprob` is its natural log probability, and `top` has the likeliest tokens.

    Each draw at an index that FINGERPRINT_EVERY divides has a `fingerprint`: up to FINGERPRINT_LOGITS token ids of 4
    bytes and then their logits, float32, little-endian. A spot check compares it with what another server computes.
    """

    token_id: Annotated[int, whole(2**31 - 1)]
    logprob: Logprob | None = None
    top: Annotated[tuple[tuple[int, float], ...], up_to(limits.MAX_LOGPROBS)] = ()
    fingerprint: Annotated[bytes, check_fingerprint] = field(default=b"", compare=False)

    def __post_init__(self) -> None:
        for token_id, logprob in self.top:
            check_int(token_id, "top_ids", high=2**31 - 1)
            check_float(logprob, "top_logprobs", low=-limits.MAX_LOGPROB, high=limits.MAX_LOGPROB)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSequence(Checked):
    """Asks for a sequence on blocks `[start, end)` with room for `max_tokens`, whose outputs are sent in `codec`.

    With `grow_to`, the sequence may grow to that many positions: those beyond `max_tokens` get their room when they
    come. `page_keys` name the full pages of the prompt. The server may still hold some: the sequence begins after those
    of the first `may_skip` positions, of which the client needs no outputs. With `take_over`, it begins with the keys
    and values of that sequence instead. `sampler` says how the sequence of the last block changes the logits of its
    draws. SequenceReady or SequenceEnded answers it.
    """

    sequence_id: SequenceId
    session_id: Annotated[str, named(limits.MAX_SESSION_ID_BYTES)]
    revision: Revision
    start: FirstBlock
    end: int
    max_tokens: Annotated[int, whole(limits.MAX_SESSION_TOKENS, low=1)]
    codec: Annotated[str, one_of(CODECS)] = "raw"
    page_keys: Annotated[tuple[PageKey, ...], up_to(limits.MAX_PAGE_KEYS)] = ()
    previous: SequenceRef | None = None
    next: SequenceRef | None = None
    take_over: SequenceRef | None = None
    sampler: Sampler | None = None
    grow_to: Position = 0
    may_skip: Position = 0

    def __post_init__(self) -> None:
        check_int(self.end, "end", low=self.start + 1, high=limits.MAX_BLOCKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest(Checked):
    """A request to run these rows, the first one at `position`. StepResult answers it.

    `want` says which outputs the client needs. With `forward`, it needs all of them, and so does the next server if one
    is linked.
    """

    sequence_id: SequenceId
    position: Position
    want: WantedOutput
    forward: bool = False
    draw: TokenDraw | None = None
    rows: Rows

    def __post_init__(self) -> None:
        _check_draw(self.want, self.draw)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUpdate(Checked):
    """A request to take pushes from `previous` and to push to `next` from now on; None means no server. LinkAck answers
    it.

    The last server pushes the tokens that it draws to the first one or, if it is the first one itself, to the same
    sequence.
    """

    sequence_id: SequenceId
    previous: SequenceRef | None = None
    next: SequenceRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowHandover(Checked):
    """Allows `to_peer_id` to fetch the sequence's keys and values."""

    sequence_id: SequenceId
    to_peer_id: PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTokens(Checked):
    """The answer's tokens so far, for a new sequence with a sampler that continues the answer. No frame answers it.

    `token_ids` are 4 bytes each, little-endian.
    """

    sequence_id: SequenceId
    token_ids: Annotated[bytes, partial(check_token_ids, most=limits.MAX_SESSION_TOKENS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftText(Checked):
    """The last tokens of the session, for a new sequence of the last block, whose server may take drafts from them. No
    frame answers it.

    `token_ids` are 4 bytes each, little-endian.
    """

    sequence_id: SequenceId
    token_ids: Annotated[bytes, partial(check_token_ids, most=limits.MAX_DRAFT_TEXT_TOKENS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSequence(Checked):
    """Frees the sequence. With `commit_to`, a Commitment to the positions before that answers it."""

    sequence_id: SequenceId
    commit_to: Position = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceReady(Checked):
    """The sequence is open and holds `length` positions. It begins there: rows before are dropped."""

    sequence_id: SequenceId
    max_step_tokens: Annotated[int, whole(limits.MAX_STEP_TOKENS, low=1)]
    length: Position = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult(Checked):
    """The result of a step: the sequence holds `position` positions, and `rows` are the wanted outputs of the last
    ones, hidden states or logits.

    `push_failed` is set if the next server did not take some of the rows. `codec_error` is the error of the codec,
    relative to the root mean square of the rows. `passed_on` is set if the result is of single tokens that were pushed
    to the next server. Their times come with the last server's result, whose `upstream_ms` are the compute and queue
    times of the servers before, the nearest last, as far as they are known. `looped` is set if the token was pushed to
    the first server, and `drafted` if the servers have run it as the next input already. `num_links` is the number of
    LinkUpdates that the sequence had received when it pushed these rows. The last `num_drafts` positions are drafts.
    """

    sequence_id: SequenceId
    position: Position
    compute_ms: StepMs = 0.0
    queue_ms: StepMs = 0.0
    batch_size: Annotated[int, whole(limits.MAX_QUEUE_DEPTH)] = 0
    push_failed: bool = False
    codec_error: Annotated[float, number(1.0)] = 0.0
    token: SampledToken | None = None
    rows: Rows | None = None
    passed_on: bool = False
    looped: bool = False
    num_links: Annotated[int, whole(limits.MAX_LINK_UPDATES)] = 0
    upstream_ms: Upstream = ()
    drafted: bool = False
    num_drafts: NumDrafts = 0

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows.num_rows > self.position:
            raise ValueError(f"{self.rows.num_rows} rows of {self.position} positions")
        if self.drafted and self.token is None:
            raise ValueError("a draft is said to be right without the token that it is")
        if self.num_drafts and (self.rows is None or self.rows.num_rows <= self.num_drafts):
            raise ValueError(f"{self.num_drafts} drafts without the row of the token before them")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAck(Checked):
    """The sequence has received `num_links` LinkUpdates. It held inputs up to `position` before the last of them."""

    sequence_id: SequenceId
    num_links: Annotated[int, whole(limits.MAX_LINK_UPDATES, low=1)]
    position: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Commitment(Checked):
    """A signed AnswerCommitment to the inputs and outputs of a closed sequence. It is the last frame of the
    sequence."""

    sequence_id: SequenceId
    signed: Annotated[bytes, filled(limits.MAX_OPEN_BYTES + limits.MAX_ENVELOPE_OVERHEAD_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceEnded(Checked):
    """Says that the sequence does not exist, or has ended. `failure` is the reason (see
    `swarm_protocol.failure_messages`)."""

    sequence_id: SequenceId
    failure: Failure

    def error(self, sender: str) -> SwarmError:
        """Decode the failure. Raises PeerViolation if it is malformed."""
        return decode_failure(self.failure, sender)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLeaving(Checked):
    """The server takes no new sequences and ends those of this connection after `within_s`."""

    within_s: Annotated[float, number(limits.MAX_RETRY_AFTER_S)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomFreed(Checked):
    """Tells a client that was refused for lack of room that a sequence has ended, so that it may ask again now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Push(Checked):
    """A StepRequest from the previous server, with the outputs that the client wants, or a drawn token from the last
    server to the first.

    `source_id` is the sequence that pushes. `upstream_ms` are the compute and queue times of the servers so far, the
    nearest last, as far as they are known. The last `num_drafts` rows are drafts, which follow a single token.
    """

    client_peer_id: PeerId
    sequence_id: SequenceId
    position: Position
    want: WantedOutput
    draw: TokenDraw | None = None
    rows: Rows
    source_id: SequenceId
    upstream_ms: Upstream = ()
    num_drafts: NumDrafts = 0

    def __post_init__(self) -> None:
        _check_draw(self.want, self.draw)
        if self.num_drafts and (self.draw is None or self.rows.num_rows != 1 + self.num_drafts):
            raise ValueError(
                f"{self.num_drafts} drafts in {self.rows.num_rows} rows, which follow no single drawn token"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PushRefused(Checked):
    """Says that the rows pushed to this sequence from `position` on were refused."""

    client_peer_id: PeerId
    sequence_id: SequenceId
    position: Position
    failure: Failure

    def error(self, sender: str) -> SwarmError:
        """Decode the failure. Raises PeerViolation if it is malformed."""
        return decode_failure(self.failure, sender)


Frame: TypeAlias = (
    OpenSequence
    | StepRequest
    | LinkUpdate
    | AllowHandover
    | AnswerTokens
    | DraftText
    | CloseSequence
    | SequenceReady
    | StepResult
    | LinkAck
    | Commitment
    | SequenceEnded
    | ServerLeaving
    | RoomFreed
    | Push
    | PushRefused
)


def _check_draw(want: WantedOutput, draw: TokenDraw | None) -> None:
    if (want == "token") != (draw is not None):
        raise ValueError("a token is wanted where it is said which, and only there")
