"""Defines the actions of a session's state machine, which `SessionState` and `Pipeline` return and `Session` carries
out. The module does no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from swarm_protocol.errors import SwarmError
from swarm_protocol.session_frames import SampledToken

from swarm.serving.session.repair import Repair
from swarm.serving.session.stage import Stage
from swarm.serving.session.trace import Replay


@dataclass(frozen=True, slots=True)
class Feed:
    """Send rows `[start, end)` of the stage's inputs. If `forward`, the server pushes their outputs to the next stage.

    If `wants_token`, the token that follows is wanted. It comes after `num_drawn` others of this request, and the
    servers may draw `ahead` more after it without being asked.
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
    """Tell the server its neighbours, which are in `stage.link`. It answers up to which position it had got inputs
    before."""

    stage: Stage


@dataclass(frozen=True, slots=True)
class TakeToken:
    """Return the token as the answer, after `num_drawn` others of this request. If it `goes_on`, it is also the next
    input."""

    token: SampledToken
    num_drawn: int
    goes_on: bool


class FailureCause(Enum):
    """The way a server was lost: it did not answer, it reported the failure, the client saw it break the protocol, or
    it answers much slower than others."""

    SILENT = "silent"
    REPORTED = "reported"
    VIOLATION = "violation"
    SLOW = "slow"


@dataclass(frozen=True, slots=True)
class FindServers:
    """Look for servers, and report the result by `on_found` or `on_not_found`."""

    repair: Repair


@dataclass(frozen=True, slots=True)
class OpenStage:
    """Ask the stage's server for a sequence. It takes over the sequence of `taken_over`, if that is not None, whose
    server is told first that this one may fetch the keys and values."""

    stage: Stage
    taken_over: Stage | None


@dataclass(frozen=True, slots=True)
class CloseStage:
    """End the stage's sequence on its server."""

    stage: Stage


@dataclass(frozen=True, slots=True)
class AvoidPeer:
    """Avoid the peer for a while."""

    peer_id: str
    error: SwarmError
    cause: FailureCause


@dataclass(frozen=True, slots=True)
class PingServers:
    """Ask the servers of these stages whether they are there, within `timeout_s`, and report the result by
    `on_pinged`."""

    stages: tuple[Stage, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class ForgetRows:
    """Forget the rows that earlier sessions kept, too, and prefer other servers to `peers`, one of which sent bad
    rows."""

    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Repaired:
    """Record that other servers have taken over the blocks of a lost or leaving server, and run `num_tokens` positions
    again."""

    repair: Repair
    num_tokens: int

    def replay(self, now_s: float) -> Replay:
        """Return the repair as an entry of the request's trace."""
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
    """Fail the session with `error`."""

    error: SwarmError


Action: TypeAlias = (
    FindServers
    | OpenStage
    | Feed
    | UpdateLink
    | CloseStage
    | AvoidPeer
    | PingServers
    | ForgetRows
    | Repaired
    | TakeToken
    | Fail
)
