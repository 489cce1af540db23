"""The frames that the peers of one model exchange on a multiplexed connection.

A *sequence* is one session's part on one server: its cache and its length. The client makes up an id for each, which
counts together with the client's peer id. The reader of a frame must check who may send it, and when. `frames` encodes
them.
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
"""Milliseconds that a step was computed, and that it waited for its turn."""

PAGE_KEY_BYTES = 16


SequenceId: TypeAlias = Annotated[bytes, sized(limits.SEQUENCE_ID_BYTES)]
Position: TypeAlias = Annotated[int, whole(limits.MAX_SESSION_TOKENS)]
Revision: TypeAlias = Annotated[str, named(limits.MAX_REVISION_BYTES)]
FirstBlock: TypeAlias = Annotated[int, whole(limits.MAX_BLOCKS - 1)]
StepMs: TypeAlias = Annotated[float, number(limits.MAX_STEP_MS)]
Logprob: TypeAlias = Annotated[float, number(limits.MAX_LOGPROB, low=-limits.MAX_LOGPROB)]
PageKey: TypeAlias = Annotated[bytes, sized(PAGE_KEY_BYTES)]
WantedOutput: TypeAlias = Literal["nothing", "last", "all", "token"]


def check_upstream(upstream_ms: tuple[Spent, ...], field: str) -> None:
    """Raises ValueError. Two servers may have taken the same time."""
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
    """Raises ValueError. The content is checked when it is used."""
    if len(value) % 8 or len(value) > 8 * FINGERPRINT_LOGITS:
        raise ValueError(f"{field} has {len(value)} bytes, and may have 8 for each of {FINGERPRINT_LOGITS} logits")


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRef(Checked):
    """A sequence of the same client on another peer."""

    peer_id: PeerId
    sequence_id: SequenceId


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDraw(Checked):
    """Says how to draw a token: the draw at `index`, with the `num_logprobs` likeliest tokens, or None for no
    probabilities.

    `ahead` more tokens may be drawn after it without being asked for, each of them the next input.
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
    """The token that was drawn. `logprob` is its natural logarithmic probability if asked for, `top` the likeliest.

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
    """Ask for a sequence on blocks `[start, end)` with room for `max_tokens`, whose outputs are sent in `codec`.

    `page_keys` name the full pages of the prompt that the server may still hold. `take_over`: begin with that
    sequence's keys and values instead. `sampler`: how the sequence of the last block changes the logits of its draws.
    Answered by SequenceReady or SequenceEnded.
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

    def __post_init__(self) -> None:
        check_int(self.end, "end", low=self.start + 1, high=limits.MAX_BLOCKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest(Checked):
    """Run these rows, the first one at `position`. Answered by StepResult.

    `want` says which outputs the client needs. `forward`: it needs all of them, and so does the next server if one is
    linked.
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
    """Take pushes from `previous` and push to `next` from now on; None stands for no server. LinkAck answers it.

    The last server pushes the tokens that it draws to the first one or, if it is the first one itself, to the same
    sequence.
    """

    sequence_id: SequenceId
    previous: SequenceRef | None = None
    next: SequenceRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowHandover(Checked):
    """Allow `to_peer_id` to fetch the sequence's keys and values."""

    sequence_id: SequenceId
    to_peer_id: PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTokens(Checked):
    """The answer's tokens so far, for a sequence with a sampler that takes the answer over. Not answered.

    `token_ids` are 4 bytes each, little-endian.
    """

    sequence_id: SequenceId
    token_ids: Annotated[bytes, partial(check_token_ids, most=limits.MAX_SESSION_TOKENS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSequence(Checked):
    """Free the sequence. With `commit_to` Commitment answers it, about the positions before that."""

    sequence_id: SequenceId
    commit_to: Position = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceReady(Checked):
    """The sequence is open and holds `length` positions; the first step may begin at any of them."""

    sequence_id: SequenceId
    max_step_tokens: Annotated[int, whole(limits.MAX_STEP_TOKENS, low=1)]
    length: Position = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult(Checked):
    """The sequence holds `position` positions; `rows` are the outputs of the last ones, hidden states or logits, as
    wanted.

    `push_failed`: the next server did not take some of them. `codec_error`: the loss of the codec, relative to the root
    mean square of the rows. `passed_on`: the result is of single tokens that went on to the next server. Their times
    come with the last server's result, whose `upstream_ms` are compute and queue of the servers before, the nearest
    last, as far as they are known. `looped`: the token is on its way to the first server. `num_links`: how many
    LinkUpdates the sequence had received when it passed these rows on.
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

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows.num_rows > self.position:
            raise ValueError(f"{self.rows.num_rows} rows of {self.position} positions")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAck(Checked):
    """The sequence has received `num_links` LinkUpdates. It held inputs up to `position` before the last of them."""

    sequence_id: SequenceId
    num_links: Annotated[int, whole(limits.MAX_LINK_UPDATES, low=1)]
    position: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Commitment(Checked):
    """Holds what the server of a closed sequence took and gave, as an AnswerCommitment in an envelope. Nothing follows
    it."""

    sequence_id: SequenceId
    signed: Annotated[bytes, filled(limits.MAX_OPEN_BYTES + limits.MAX_ENVELOPE_OVERHEAD_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceEnded(Checked):
    """There is no such sequence, or none any more. `failure` says why, see `swarm_protocol.failure_messages`."""

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
class Push(Checked):
    """A StepRequest from the server before, with what the client wants; or a drawn token from the last server to the
    first.

    `source_id` is the sequence that it comes from. `upstream_ms` are compute and queue of the servers so far, the
    nearest last, as far as they are known.
    """

    client_peer_id: PeerId
    sequence_id: SequenceId
    position: Position
    want: WantedOutput
    draw: TokenDraw | None = None
    rows: Rows
    source_id: SequenceId
    upstream_ms: Upstream = ()

    def __post_init__(self) -> None:
        _check_draw(self.want, self.draw)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushRefused(Checked):
    """What was pushed to this sequence from `position` on was not taken."""

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
    | CloseSequence
    | SequenceReady
    | StepResult
    | LinkAck
    | Commitment
    | SequenceEnded
    | ServerLeaving
    | Push
    | PushRefused
)


def _check_draw(want: WantedOutput, draw: TokenDraw | None) -> None:
    if (want == "token") != (draw is not None):
        raise ValueError("a token is wanted where it is said which, and only there")
