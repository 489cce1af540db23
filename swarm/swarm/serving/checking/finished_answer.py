"""Holds what a client has of an answer that ended: of each span its inputs, the outputs or draws of its server, and
what came of checking it.

The rows are those of the replay buffers, as they were on the wire. They come from the server before, which pushed the
same rows on; what a server took is known by its commitment only. Plain values.
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
    """The token that was drawn after the input at `position`, and how."""

    position: int
    draw: TokenDraw
    token: SampledToken


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredSpan:
    """Blocks `[start, end)` as `peer_id` ran them: `num_rows` inputs from position 0 on.

    `outputs` are the rows from position `outputs_from` on that this server gave, or else `draws` its draws.
    `previous_peer_id` is the server whose outputs were the inputs. `signed` is the server's commitment in its envelope,
    or no bytes if none came; `was_cut_off`: its connection ended before that.

    `is_taken_over`: the server began with keys and values of another one. Without that its first input came at position
    `takes_from` at the latest. `dtype` is what it said that it computes in, or "".
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
    takes_from: int = 0
    dtype: str = ""


Result: TypeAlias = Literal["passed", "failed", "disputed", "unchecked"]
"""`unchecked`: no other server has the blocks, or none of them would compute them."""

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
"""Why a span has its result, for people; "" for one that passed. `alone`: no other server has the blocks; `nothing`:
the server gave nothing new; `no inputs`: the server before it did not give all; `replayed`: it got inputs from a server
that was replaced; `busy`: others have the blocks, and would not compute them; `cut off`: its connection ended before it
had signed; `taken over`: it began with what another server had computed; `no dtype`: it does not say what it computes
in."""


Outcomes: TypeAlias = tuple[tuple[str, Outcome], ...]
"""Lists what reputations are to note, by peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """Holds what came of checking blocks `[start, end)` of `peer_id`. `outcomes` are what reputations are to note, by
    peer.

    `named` is the server that was proved to have lied: to this client. `evidence` is the ServedEvidence by which others
    that have the model's files can find the same, if there is any.
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
    `was_replayed`: a server was replaced, so that others may have got rows from it that the client has from another.

    `on_report` hears of each span that was checked.
    """

    model: ModelShape
    codec: str
    has_plain_draws: bool
    was_replayed: bool
    spans: tuple[AnsweredSpan, ...]
    on_report: Callable[[CheckReport], None] = field(default=lambda _report: None)


class AnswerToCheck(Protocol):
    """An answer that has ended, of `num_bytes`, of which servers still send the last."""

    @property
    def num_bytes(self) -> int: ...

    async def finished(self) -> FinishedAnswer: ...
