"""The frames that the peers of one model exchange on a multiplexed connection.

A *sequence* is one session's part on one server: its cache and its length. The client makes up an id for each, which
counts together with the client's peer id. The reader of a frame must check who may send it, and when. `frames` encodes
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from swarm_protocol import limits
from swarm_protocol.checks import check_choice, check_float, check_int, check_name
from swarm_protocol.errors import SwarmError
from swarm_protocol.failure_messages import decode_failure
from swarm_protocol.identity import check_peer_id
from swarm_protocol.rows import CODECS, Rows
from swarm_protocol.sampler import Sampler, check_token_ids

SESSION_METHOD = "serving.lane"
"""A stream of `Frames` both ways. The model's name follows after a slash."""

Spent: TypeAlias = tuple[float, float]
"""Milliseconds that a step was computed, and that it waited for its turn."""

WANTS = ("nothing", "last", "all", "token")
PAGE_KEY_BYTES = 16


def check_sequence_id(value: object) -> bytes:
    if not (isinstance(value, bytes) and len(value) == limits.SEQUENCE_ID_BYTES):
        raise ValueError(f"sequence_id is not {limits.SEQUENCE_ID_BYTES} bytes")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRef:
    """A sequence of the same client on another peer."""

    peer_id: str
    sequence_id: bytes

    def __post_init__(self) -> None:
        check_peer_id(self.peer_id)
        check_sequence_id(self.sequence_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDraw:
    """How to draw a token: the draw at `index`, with the `num_logprobs` likeliest tokens, or None for no probabilities.

    `ahead` more tokens may be drawn after it without being asked for, each of them the next input.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    index: int = 0
    num_logprobs: int | None = None
    ahead: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        check_float(self.temperature, "temperature", high=limits.MAX_TEMPERATURE)
        check_float(self.min_p, "min_p", high=1.0)
        check_float(self.top_p, "top_p", high=1.0)
        if not self.top_p:
            raise ValueError("top_p is 0")
        check_int(self.top_k, "top_k", high=2**31 - 1)
        check_int(self.seed, "seed", low=-(2**63) + 1, high=2**63 - 1)
        check_int(self.index, "index", high=limits.MAX_SESSION_TOKENS)
        if self.num_logprobs is not None:
            check_int(self.num_logprobs, "num_logprobs", high=limits.MAX_LOGPROBS)
        check_int(self.ahead, "ahead", high=limits.MAX_SESSION_TOKENS - self.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """The token that was drawn. `logprob` is its natural logarithmic probability if asked for, `top` the likeliest."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        check_int(self.token_id, "token_id", high=2**31 - 1)
        if self.logprob is not None:
            check_float(self.logprob, "logprob", low=-limits.MAX_LOGPROB, high=limits.MAX_LOGPROB)
        if len(self.top) > limits.MAX_LOGPROBS:
            raise ValueError(f"top has {len(self.top)} items, more than {limits.MAX_LOGPROBS}")
        for token_id, logprob in self.top:
            check_int(token_id, "top_ids", high=2**31 - 1)
            check_float(logprob, "top_logprobs", low=-limits.MAX_LOGPROB, high=limits.MAX_LOGPROB)


# --- from a client ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSequence:
    """Ask for a sequence on blocks `[start, end)` with room for `max_tokens`, whose outputs are sent in `codec`.

    `page_keys` name the full pages of the prompt that the server may still hold. `take_over`: begin with that
    sequence's keys and values instead. `sampler`: how the sequence of the last block changes the logits of its draws.
    Answered by SequenceReady or SequenceEnded.
    """

    sequence_id: bytes
    session_id: str
    revision: str
    start: int
    end: int
    max_tokens: int
    codec: str = "raw"
    page_keys: tuple[bytes, ...] = ()
    previous: SequenceRef | None = None
    next: SequenceRef | None = None
    take_over: SequenceRef | None = None
    sampler: Sampler | None = None

    def __post_init__(self) -> None:
        check_sequence_id(self.sequence_id)
        check_name(self.session_id, "session_id", max_bytes=limits.MAX_SESSION_ID_BYTES)
        check_name(self.revision, "revision", max_bytes=limits.MAX_REVISION_BYTES)
        check_int(self.start, "start", high=limits.MAX_BLOCKS - 1)
        check_int(self.end, "end", low=self.start + 1, high=limits.MAX_BLOCKS)
        check_int(self.max_tokens, "max_tokens", low=1, high=limits.MAX_SESSION_TOKENS)
        check_choice(self.codec, "codec", CODECS)
        if len(self.page_keys) > limits.MAX_PAGE_KEYS:
            raise ValueError(f"page_keys has {len(self.page_keys)} items, more than {limits.MAX_PAGE_KEYS}")
        if any(len(key) != PAGE_KEY_BYTES for key in self.page_keys):
            raise ValueError(f"a page key is not {PAGE_KEY_BYTES} bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """Run these rows, the first one at `position`. Answered by StepResult.

    `want` says which outputs the client needs. `forward`: it needs all of them, and so does the next server if one is
    linked.
    """

    sequence_id: bytes
    position: int
    want: str
    forward: bool = False
    draw: TokenDraw | None = None
    rows: Rows

    def __post_init__(self) -> None:
        check_sequence_id(self.sequence_id)
        _check_ask(self.position, self.want, self.draw)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUpdate:
    """Take pushes from `previous` and push to `next` from now on; None stands for no server. LinkAck answers it.

    The last server pushes the tokens that it draws to the first one or, if it is the first one itself, to the same
    sequence.
    """

    sequence_id: bytes
    previous: SequenceRef | None = None
    next: SequenceRef | None = None

    def __post_init__(self) -> None:
        check_sequence_id(self.sequence_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowHandover:
    """Allow `to_peer_id` to fetch the sequence's keys and values."""

    sequence_id: bytes
    to_peer_id: str

    def __post_init__(self) -> None:
        check_sequence_id(self.sequence_id)
        check_peer_id(self.to_peer_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTokens:
    """The answer's tokens so far, for a sequence with a sampler that takes the answer over. Not answered.

    `token_ids` are 4 bytes each, little-endian.
    """

    sequence_id: bytes
    token_ids: bytes

    def __post_init__(self) -> None:
        check_sequence_id(self.sequence_id)
        check_token_ids(self.token_ids, "token_ids", most=limits.MAX_SESSION_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSequence:
    """Free the sequence. Not answered."""

    sequence_id: bytes

    def __post_init__(self) -> None:
        check_sequence_id(self.sequence_id)


# --- from a server to a client ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceReady:
    """The sequence is open and holds `length` positions; the first step may begin at any of them."""

    sequence_id: bytes
    max_step_tokens: int
    length: int = 0

    def __post_init__(self) -> None:
        check_sequence_id(self.sequence_id)
        check_int(self.max_step_tokens, "max_step_tokens", low=1, high=limits.MAX_STEP_TOKENS)
        check_int(self.length, "length", high=limits.MAX_SESSION_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The sequence holds `position` positions; `rows` are the outputs of the last ones, hidden states or logits, as
    wanted.

    `push_failed`: the next server did not take some of them. `codec_error`: the loss of the codec, relative to the root
    mean square of the rows. `passed_on`: the result is of single tokens that went on to the next server. Their times
    come with the last server's result, whose `upstream_ms` are compute and queue of the servers before, the nearest
    last, as far as they are known. `looped`: the token is on its way to the first server. `num_links`: how many
    LinkUpdates the sequence had received when it passed these rows on.
    """

    sequence_id: bytes
    position: int
    compute_ms: float = 0.0
    queue_ms: float = 0.0
    batch_size: int = 0
    push_failed: bool = False
    codec_error: float = 0.0
    token: SampledToken | None = None
    rows: Rows | None = None
    passed_on: bool = False
    looped: bool = False
    num_links: int = 0
    upstream_ms: tuple[Spent, ...] = ()

    def __post_init__(self) -> None:
        check_sequence_id(self.sequence_id)
        check_int(self.position, "position", high=limits.MAX_SESSION_TOKENS)
        _check_upstream(self.upstream_ms)
        check_float(self.compute_ms, "compute_ms", high=limits.MAX_STEP_MS)
        check_float(self.queue_ms, "queue_ms", high=limits.MAX_STEP_MS)
        check_int(self.batch_size, "batch_size", high=limits.MAX_QUEUE_DEPTH)
        check_float(self.codec_error, "codec_error", high=1.0)
        check_int(self.num_links, "num_links", high=limits.MAX_LINKS)
        if self.rows is not None and self.rows.num_rows > self.position:
            raise ValueError(f"{self.rows.num_rows} rows of {self.position} positions")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAck:
    """The sequence has received `num_links` LinkUpdates. It held inputs up to `position` before the last of them."""

    sequence_id: bytes
    num_links: int
    position: int

    def __post_init__(self) -> None:
        check_sequence_id(self.sequence_id)
        check_int(self.num_links, "num_links", low=1, high=limits.MAX_LINKS)
        check_int(self.position, "position", high=limits.MAX_SESSION_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceEnded:
    """There is no such sequence, or none any more. `failure` says why, see `swarm_protocol.failure_messages`."""

    sequence_id: bytes
    failure: bytes

    def __post_init__(self) -> None:
        check_sequence_id(self.sequence_id)
        _check_failure(self.failure)

    def error(self, sender: str) -> SwarmError:
        """Decode the failure. Raises PeerViolation if it is none."""
        return decode_failure(self.failure, sender)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLeaving:
    """The server takes no new sequences and ends those of this connection after `within_s`."""

    within_s: float

    def __post_init__(self) -> None:
        check_float(self.within_s, "within_s", high=limits.MAX_RETRY_AFTER_S)


# --- from a server to the next one -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """A StepRequest from the server before, with what the client wants; or a drawn token from the last server to the
    first.

    `source_id` is the sequence that it comes from. `upstream_ms` are compute and queue of the servers so far, the
    nearest last, as far as they are known.
    """

    client_peer_id: str
    sequence_id: bytes
    position: int
    want: str
    draw: TokenDraw | None = None
    rows: Rows
    source_id: bytes
    upstream_ms: tuple[Spent, ...] = ()

    def __post_init__(self) -> None:
        check_peer_id(self.client_peer_id)
        check_sequence_id(self.sequence_id)
        check_sequence_id(self.source_id)
        _check_upstream(self.upstream_ms)
        _check_ask(self.position, self.want, self.draw)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushRefused:
    """What was pushed to this sequence from `position` on was not taken."""

    client_peer_id: str
    sequence_id: bytes
    position: int
    failure: bytes

    def __post_init__(self) -> None:
        check_peer_id(self.client_peer_id)
        check_sequence_id(self.sequence_id)
        check_int(self.position, "position", high=limits.MAX_SESSION_TOKENS)
        _check_failure(self.failure)

    def error(self, sender: str) -> SwarmError:
        """Decode the failure. Raises PeerViolation if it is none."""
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
    | SequenceEnded
    | ServerLeaving
    | Push
    | PushRefused
)


def _check_ask(position: int, want: str, draw: TokenDraw | None) -> None:
    check_int(position, "position", high=limits.MAX_SESSION_TOKENS)
    check_choice(want, "want", WANTS)
    if (want == "token") != (draw is not None):
        raise ValueError("a token is wanted where it is said which, and only there")


def _check_upstream(upstream_ms: tuple[Spent, ...]) -> None:
    # two servers may have taken the same time
    if len(upstream_ms) > limits.MAX_UPSTREAM:
        raise ValueError(f"upstream_ms is of {len(upstream_ms)} servers, more than {limits.MAX_UPSTREAM}")
    for spent in upstream_ms:
        for part_ms in spent:
            check_float(part_ms, "upstream_ms", high=limits.MAX_STEP_MS)


def _check_failure(failure: bytes) -> None:
    if not 0 < len(failure) <= limits.MAX_FAILURE_BYTES:
        raise ValueError(f"failure has {len(failure)} bytes")
