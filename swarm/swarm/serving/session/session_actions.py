"""The actions of a session's state machine, which `SessionState` and `Pipeline` ask `Session` to do, and the request
that the pipeline answers. Without I/O.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from swarm_protocol.errors import SwarmError
from swarm_protocol.session_frames import SampledToken

from swarm.serving.session.stage import Repair, Stage, StepReport
from swarm.serving.session.trace import Replay


@dataclass(slots=True, kw_only=True)
class PendingRequest:
    """Holds what the caller asked for last: the token after the last position. Positions before `answered` are
    answered.

    `num_drawn` tokens were drawn without being asked for and `ahead` more may be; `may_draw`: a server was asked to.
    `is_timed`: a single token is under way since `asked_s`, through stages that have not changed, of which `num_timed`
    have said that they spent `spent_ms` on it.
    """

    answered: int = 0
    ahead: int = 0
    num_drawn: int = 0
    may_draw: bool = False
    asked_s: float = 0.0
    is_timed: bool = False
    num_timed: int = 0
    spent_ms: float = 0.0

    def goes_on(self, now_s: float) -> None:
        """Note that the next token, which was drawn ahead, is asked for now."""
        self.ahead -= 1
        self.num_drawn += 1
        self.asked_s, self.is_timed, self.num_timed, self.spent_ms = now_s, True, 0, 0.0

    def note_spent(self, report: StepReport) -> None:
        """Note what the token took on the server that reports, and on those that pushed it there."""
        self.num_timed += 1 + len(report.upstream_ms)
        self.spent_ms += report.compute_ms + report.queue_ms + sum(map(sum, report.upstream_ms))


@dataclass(slots=True)
class LostToken:
    """A token that a lost server may have drawn and that the client never heard of, at `position` or later.

    The `suspects` have until `due_s` to say whether they received it; `is_held`: one of them did.
    """

    position: int = 0
    suspects: set[Stage] = field(default_factory=set)
    due_s: float = math.inf
    is_held: bool = False

    def check(self, reached: int) -> bool:
        """Note how far a stage was given inputs; return whether one of them holds the token."""
        self.is_held = self.is_held or (bool(self.suspects) and reached > self.position)
        return self.is_held


@dataclass(frozen=True, slots=True)
class Feed:
    """Send rows `[start, end)` of the stage's inputs. `forward`: the stages after it need their outputs.

    Where the token that follows is wanted, it is the one after `num_drawn` others of this request, and `ahead` more may
    come after it without being asked for.
    """

    stage: Stage
    start: int
    end: int
    wants_token: bool
    forward: bool
    num_drawn: int = 0
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class UpdateLink:
    """Tell the server its neighbours, as `stage.link` has them. It answers how much it had been given before."""

    stage: Stage


@dataclass(frozen=True, slots=True)
class TakeToken:
    """The token is the answer. `goes_on`: it is also the next input; report that at once by `follow`."""

    token: SampledToken
    goes_on: bool


class FailureCause(Enum):
    """The way a server was lost: it went silent, it said so itself, or the client saw it break the protocol."""

    SILENT = "silent"
    REPORTED = "reported"
    VIOLATION = "violation"


@dataclass(frozen=True, slots=True)
class FindServers:
    """Look for servers, and report them by `on_found` or `on_not_found`."""

    repair: Repair


@dataclass(frozen=True, slots=True)
class OpenStage:
    """Ask the stage's server for a sequence, which takes over that of `taken_over` if there is one."""

    stage: Stage
    taken_over: Stage | None


@dataclass(frozen=True, slots=True)
class GrantHandover:
    """Allow `to_peer_id` to fetch the keys and values of the stage's sequence."""

    stage: Stage
    to_peer_id: str


@dataclass(frozen=True, slots=True)
class CloseStage:
    """End the stage's sequence on its server."""

    stage: Stage


@dataclass(frozen=True, slots=True)
class ReportFailure:
    """Avoid the peer for a while."""

    peer_id: str
    error: SwarmError
    cause: FailureCause


@dataclass(frozen=True, slots=True)
class ForgetRows:
    """Forget what earlier sessions left of these rows, too, and prefer others to `peers`: one of them gave bad rows."""

    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Repaired:
    """Others have taken over the blocks of a lost or leaving server; they run `num_tokens` positions again."""

    repair: Repair
    num_tokens: int

    def replay(self, now_s: float) -> Replay:
        """Return what the request's trace says of it."""
        repair = self.repair
        return Replay(
            lost_peer=repair.lost_peer,
            start=repair.start,
            end=repair.end,
            reason=repair.error.message if repair.error else "",
            new_peers=tuple(stage.peer_id for stage in repair.new),
            num_tokens=self.num_tokens,
            was_handed_over=repair.is_handover,
            failover_ms=(now_s - repair.since_s) * 1000,
        )


@dataclass(frozen=True, slots=True)
class Fail:
    """The session cannot go on."""

    error: SwarmError


Action: TypeAlias = (
    FindServers
    | OpenStage
    | GrantHandover
    | Feed
    | UpdateLink
    | CloseStage
    | ReportFailure
    | ForgetRows
    | Repaired
    | TakeToken
    | Fail
)
