"""Defines the events of a round at one member, and the actions that follow: input and output of `state_machine.step`.

The module holds values only. The code that makes an event has verified the envelopes in it. The state machine checks
everything else, such as whether the signer is entitled to what it says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from swarm_protocol.commit_messages import Abort, Outcome, Vote
from swarm_protocol.training_messages import Contribution, Group, Ready, ReadyReply, SignedGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """This member's interval has ended after `interval_s` seconds, with this contribution."""

    contribution: Contribution
    interval_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighted:
    """`peer` is in the run: it called, or has answered. `attempt` is the attempt that it is at, if it is at the same
    step."""

    peer: str
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """`peer` reported ready. It takes this member for the coordinator, and waits for an answer."""

    peer: str
    ready: Ready


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrew:
    """`peer` no longer waits for an answer."""

    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CredentialsExpired:
    """Credentials in this member's report to `attempt`, or in the group of `attempt` that it was about to sign and has
    not signed, expire before `at`, in Unix seconds."""

    attempt: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """`peer` could not be reached, or did not answer in time. If a vote to it was lost, `attempt` is that of the
    vote, else None."""

    peer: str
    reason: str
    attempt: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The coordinator of `attempt` says that the step is at attempt `to` by now, and for which reason, if it gave one
    up."""

    attempt: int
    to: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """The coordinator of `attempt` formed the group without this member."""

    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """A signed group has arrived, from its coordinator or with another member's part."""

    signed: SignedGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """This member has all parts, and applying them gave the state of `outcome`."""

    attempt: int
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceFailed:
    """The reduction failed, because `accused` broke the protocol or `unreachable` could not be reached. If it is only
    `unaudited`, this member has a result, but `unreachable` did not show how they made their parts. A `certain` failure
    was not caused by the end of the attempt, and counts even if the attempt has ended meanwhile."""

    attempt: int
    reason: str
    accused: tuple[str, ...] = ()
    unreachable: tuple[str, ...] = ()
    unaudited: bool = False
    certain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Convicted:
    """Evidence that this member has checked proves that `peer` lied."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Voted:
    """A signed vote of either kind has arrived, or this member has cast its own."""

    peer: str
    vote: Vote


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLeft:
    """`peer` has left its attempt, for the reason in `abort`."""

    peer: str
    abort: Abort


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """A valid certificate for this step or a later one has arrived."""

    certificate: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """The time that `state_machine.wake_at` returned has come."""


Event: TypeAlias = (
    Offered
    | Sighted
    | Reported
    | Withdrew
    | CredentialsExpired
    | Moved
    | LeftOut
    | Grouped
    | Reduced
    | ReduceFailed
    | Convicted
    | Voted
    | AttemptLeft
    | Lost
    | Proven
    | Tick
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Report ready to `peer` until it answers. If it `was_missing` at the end of an attempt, first find out within a
    short time whether it is there."""

    peer: str
    ready: Ready
    was_missing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer `peer`, which reported ready. The driver completes a reply of kind `behind` with where this member is."""

    peer: str
    reply: ReadyReply


def left_out_reply(reason: str) -> ReadyReply:
    return ReadyReply(kind="left_out", reason=reason[:400])


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Ask these absent members where they are, and with `hurry` to end their intervals. If `peers` include this member,
    its own interval ends."""

    peers: tuple[str, ...]
    hurry: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """Sign the group, hand it to its members, and tell the `left_out` why."""

    group: Group
    left_out: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce:
    """Take part in the group's reduction, or refuse it to the others if this member `sits_out`."""

    signed: SignedGroup
    sits_out: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Recover:
    """Get the parts of an outcome that other members have reached from `holders`, in order, and apply them. The outcome
    `is_audited`, and need not be audited again, if a lock or enough votes prove that an honest member audited it."""

    signed: SignedGroup
    outcome: Outcome
    holders: tuple[str, ...]
    is_audited: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CastVote:
    """Sign the vote and send it to `peers`. The promise that the vote makes is on disk before that."""

    vote: Vote
    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Tell `peers` that this member leaves the attempt, before its streams break: the peers would otherwise blame it
    for that."""

    abort: Abort
    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowEvidence:
    """Send the evidence against members of this group to its other members, `peers`."""

    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The attempt is over: stop its work. `missing` members were absent or at fault."""

    step: int
    attempt: int
    reason: str
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """End the step: it is decided, or the run has overtaken this member. `certificate` names the new state."""

    certificate: bytes


Action: TypeAlias = Ask | Reply | Query | Sign | Reduce | Recover | CastVote | Announce | ShowEvidence | GiveUp | Finish
