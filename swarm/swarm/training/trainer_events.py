"""The events that a member of a run reports as they happen. Values only; digests are hexadecimal, times in seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from swarm_protocol.errors import first_few

MAX_NAMED = 8
"""Peers that the text of an event names; it counts the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFetched:
    """This member has fetched the run's committed state from `donors`: `num_bytes` of it."""

    step: int
    digest: str
    donors: tuple[str, ...]
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalDone:
    """Inner steps towards outer step `step` are done. `loss` is the mean training loss of this member."""

    step: int
    num_steps: int
    num_tokens: int
    loss: float
    seconds: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalFailed:
    """This member contributes nothing to outer step `step`, for `reason`."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """These members hold the leases for outer step `step`."""

    step: int
    group: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterStep:
    """Outer step `step` is committed and applied. `loss` is the group's mean training loss, weighted by tokens.

    `num_trainers` are the group's members and the trainers whose work they brought, and `num_tokens` those of all of
    these. `tokens_per_s` are this member's in its interval. `bytes_sent` is what this member sent
    for the step, `seconds` the time since it had the state before, of which `round_s` passed after its interval.
    """

    step: int
    loss: float
    digest: str
    group: tuple[str, ...]
    num_trainers: int
    num_tokens: int
    bytes_sent: int
    seconds: float
    round_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundAborted:
    """An attempt at outer step `step` failed; nothing is lost. `missing` members did not answer, or were at fault."""

    step: int
    attempt: int
    reason: str
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberConvicted:
    """Evidence of this `kind` proves that `peer_id` lied in the round of outer step `step`. It takes part in no round
    of this member up to that of outer step `until`; None: ever."""

    step: int
    peer_id: str
    kind: str
    reason: str
    until: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalValidated:
    """This member has computed the interval of `peer_id` for outer step `step` once more. `tier` and `distance` are
    those of `wrong_interval.Likeness`."""

    step: int
    peer_id: str
    tier: Literal["exact", "close", "wrong"]
    distance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FalselyAccused:
    """`accuser` says that `peer_id` did not train what it sent for outer step `step`, and this member, which computed
    the interval once more, finds that it did. Its accusations are not listened to any more."""

    step: int
    peer_id: str
    accuser: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionLate:
    """Outer step `step` was committed without this member's contribution. That work is lost, and its samples are leased
    again.

    `late_s`: how long after the round's group was formed its `num_tokens` were ready, by the clocks of two machines;
    None: its interval still ran.
    """

    step: int
    num_tokens: int
    late_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResumed:
    """The run's author lets `roster` go on from the state after outer step `step` without the other members."""

    step: int
    digest: str
    roster: tuple[str, ...]
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OnProbation:
    """After outer step `step` this member has to contribute to `steps_left` more before it counts fully; 0: it does
    from now on."""

    step: int
    steps_left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InvitationRefused:
    """The state after outer step `step` does not honour this member's invitation with the `serial`, in hexadecimal, for
    the `reason` given: it will not let this member in any more."""

    step: int
    serial: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntered:
    """The state says that this member entered the run with outer step `step`, and `how`, in words: by an invitation or
    by vouches."""

    step: int
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEndorsed:
    """The run's author has endorsed the state of outer step `step`, as this member now knows. `is_other`: this member's
    own history has another state there, so that it does not belong to the run."""

    step: int
    digest: str
    sequence: int
    is_other: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherHistory:
    """`peers` show another committed state of outer step `step` than this member, or observer, has: the run was begun
    twice, or they made that state up."""

    remedy: ClassVar = "the run's author can name the history that goes on: swarm-node run resume FILE --peers ADDR"

    step: int
    peers: tuple[str, ...]

    def is_news(self, num_told: int) -> bool:
        """Return whether to tell of these peers after `num_told` were told of: the first ones, or twice as many."""
        return len(self.peers) >= max(1, 2 * num_told)

    def words(self, name_of: Callable[[str], str]) -> str:
        """Return this in words; `name_of` names a peer."""
        peers = first_few(self.peers, MAX_NAMED, name_of)
        return f"another state of outer step {self.step} is shown by {peers}: the run was begun twice, or it is made up"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutScored:
    """The trainers' scores after outer step `step`, in nats, by peer (see `held_out_scores`). `own` is that of this
    member; None: it has none yet."""

    step: int
    scores: Mapping[str, float]
    own: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutMeasured:
    """The committed state's loss on held-out data."""

    step: int
    loss: float


TrainingEvent: TypeAlias = (
    StateFetched
    | IntervalDone
    | IntervalFailed
    | Admitted
    | OuterStep
    | RoundAborted
    | MemberConvicted
    | IntervalValidated
    | FalselyAccused
    | ContributionLate
    | RunResumed
    | OnProbation
    | InvitationRefused
    | RunEntered
    | StateEndorsed
    | OtherHistory
    | HeldOutScored
    | HeldOutMeasured
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Holds what a member waits for since its interval ended `seconds` ago, or since it has asked for its first state:
    its own disk if `is_for_disk`, or else `peers`, as far as it knows, or else as many newcomers as `num_lacking` says.
    Without any, it computes with the others."""

    peers: tuple[str, ...]
    seconds: float
    num_lacking: int = 0
    is_for_disk: bool = False
