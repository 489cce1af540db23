"""A client's record of a finished answer: for each span its inputs, the server's outputs or draws, and the result of
its check.

The rows are those of the replay buffers, as they were on the wire. The previous server sent them to the client, and
pushed the same rows to the span's server. Only the commitment of a server says which inputs it took. Plain values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from swarm_protocol.session_frames import SampledToken, TokenDraw

from swarm.serving.model.shape import ModelShape
from swarm.trust.reputation import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The token that was drawn after the input at `position`, and the parameters of the draw."""

    position: int
    draw: TokenDraw
    token: SampledToken


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredSpan:
    """Blocks `[start, end)` that `peer_id` ran on `num_rows` inputs from position 0.

    `outputs` are this server's rows from position `outputs_from`; the last server has `draws` in their place.
    `previous_peer_id` is the server whose outputs were the inputs. `signed` is the server's commitment in its envelope,
    or empty; `was_cut_off`: the connection ended before it came.

    `is_taken_over`: the server began with another server's keys and values. Its first input came at position
    `begins_at`. `dtype` is the one in which it says that it computes, or "".
    """

    peer_id: str
    previous_peer_id: str
    start: int
    end: int
    sequence_id: bytes
    inputs: bytes
    num_rows: int
    outputs: bytes
    outputs_from: int
    draws: tuple[Draw, ...]
    signed: bytes
    was_cut_off: bool = False
    is_taken_over: bool = False
    begins_at: int = 0
    dtype: str = ""


Result: TypeAlias = Literal["passed", "failed", "disputed", "unchecked"]
"""`unchecked`: the span was not compared; see `Reason`."""

Reason: TypeAlias = Literal[
    "",
    "rows",
    "draws",
    "commitment",
    "withheld",
    "inputs",
    "alone",
    "nothing",
    "no inputs",
    "replayed",
    "busy",
    "cut off",
    "taken over",
    "no dtype",
]
"""Why a span has its result, for people; "" if it passed everywhere. `rows`, `draws`: these differ. `commitment`: the
server signed other outputs than it gave. `withheld`: its commitment or rows are missing, incomplete or unusable.
`inputs`: it signed other inputs than the client knows, or outputs of inputs that the client did not give it. `alone`:
no other server has the blocks. `nothing`: the server gave nothing new. `no inputs`: the previous server did not give
all inputs. `replayed`: the server did not sign what the client knows, and a server of the answer was replaced. `busy`:
other servers did not compute the blocks. `cut off`: the connection ended before the server signed. `taken over`: it
began with another server's cache. `no dtype`: its dtype is not known."""


Outcomes: TypeAlias = tuple[tuple[str, Outcome], ...]
"""The outcomes to note in reputations, by peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The result of checking blocks `[start, end)` of `peer_id`. `outcomes` are to be noted in reputations.

    `named` is the server that, for this client, is proved to have lied. `evidence` is the ServedEvidence with which
    others that have the model's files can check this; it may be empty.
    """

    peer_id: str
    start: int
    end: int
    result: Result
    reason: Reason = ""
    detail: str = ""
    named: str = ""
    outcomes: Outcomes = ()
    evidence: bytes = b""

    @classmethod
    def unchecked(cls, span: AnsweredSpan, reason: Reason) -> CheckReport:
        return cls(peer_id=span.peer_id, start=span.start, end=span.end, result="unchecked", reason=reason)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a trace."""
        names = ("peer_id", "start", "end", "result", "reason", "detail", "named")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedAnswer:
    """`codec` is that of the rows. `has_plain_draws`: no penalty, bias or grammar changed the logits before draws.
    `was_replayed`: a server was replaced, so other servers may have received its rows, while the client has those of
    its replacement.

    `on_report` is called with the report of each span.
    """

    model: ModelShape
    codec: str
    has_plain_draws: bool
    was_replayed: bool
    spans: tuple[AnsweredSpan, ...]
    on_report: Callable[[CheckReport], None] = field(default=lambda _report: None)


class AnswerToCheck(Protocol):
    """An ended answer of `num_bytes`. `finished` waits for the last messages of its servers."""

    @property
    def num_bytes(self) -> int: ...

    async def finished(self) -> FinishedAnswer: ...
