"""Holds what came of checking one span of an answer. Plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from swarm.trust.reputation import Outcome

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

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a trace."""
        names = ("peer_id", "start", "end", "result", "reason", "detail", "named")
        return {name: getattr(self, name) for name in names}
