"""Defines the messages between the members of a round before they reduce: reports and groups.

`reduction_messages` has what crosses the streams of a reduction, `commit_messages` votes and certificates, and
`member_messages` requests for states, and the messages of heads and followers.

A round is named by (run, step, attempt): `step` is the outer step that it would commit, one more than the state's. A
group without tokens commits no step; it admits its members to the run (see `swarm.training.round.state_machine`).
Digests of groups are over the bytes of their signed envelopes. Weights and losses are claims, which their users must
bound.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from swarm_protocol import limits, wire
from swarm_protocol.checks import (
    Checked,
    Digest,
    Name,
    are_sorted,
    check_digest,
    distinct,
    number,
    shared_fields,
    sized,
    up_to,
    whole,
)
from swarm_protocol.commit_messages import (
    MAX_SEQUENCE,
    Attempt,
    BytesPerS,
    Lock,
    LockClaim,
    Outcome,
    Peers,
    Reason,
    ResumeOrder,
    Step,
    Vote,
    VoteKind,
)
from swarm_protocol.identity import SIGNATURE_BYTES, PeerId
from swarm_protocol.proto import training_pb2
from swarm_protocol.records import Loss
from swarm_protocol.run_credentials import RunCredential

GROUP_PURPOSE = "group"

ReplyKind: TypeAlias = Literal["group", "pending", "attempt", "behind", "left_out"]

Work: TypeAlias = Annotated[int, whole(limits.MAX_INTERVAL_TOKENS)]
Effects: TypeAlias = Annotated[
    tuple[Annotated[int, whole(limits.MAX_EFFECT, low=-limits.MAX_EFFECT)], ...], up_to(limits.MAX_SCORED)
]
StepsLeft: TypeAlias = Annotated[int, whole(limits.MAX_PROBATION_STEPS)]
PhaseS: TypeAlias = Annotated[float, number(limits.MAX_PHASE_S)]
Newcomers: TypeAlias = Annotated[tuple[PeerId, ...], distinct(limits.MAX_NEWCOMERS)]
Revocation: TypeAlias = Annotated[bytes, up_to(limits.MAX_RUN_REVOCATION_BYTES + limits.MAX_ENVELOPE_OVERHEAD_BYTES)]
Credentials: TypeAlias = Annotated[tuple[RunCredential, ...], up_to(limits.MAX_CREDENTIALS)]


def round_subject(run: str, step: int, attempt: int) -> str:
    """Return the subject of the envelopes of this round's group and statements."""
    return f"{run}/{step}/{attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Follower(Checked):
    """A trainer whose head, a member of the round, brings its work. `place` is its index in the step's leases.

    A `leaving` follower takes part for the last time. With 0 tokens it is present, but contributes nothing.
    `steps_left` is as in `Contribution`.
    """

    place: Annotated[int, whole(limits.MAX_TRAINERS - 1)]
    num_tokens: Work = 0
    num_samples: Work = 0
    leaving: bool = False
    steps_left: StepsLeft = 0

    def __post_init__(self) -> None:
        check_work(self.num_tokens, self.num_samples)


Followers: TypeAlias = Annotated[tuple[Follower, ...], up_to(limits.MAX_TRAINERS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceCommitment(Checked):
    """A member's commitment to its encoded pseudo-gradient: the `root` of the hash tree over its leaves (see
    `swarm_protocol.hash_tree`), and the member's `signature` of `proof_messages.slices_message`."""

    root: Digest
    signature: Annotated[bytes, sized(SIGNATURE_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution(Checked):
    """One member's contribution: tokens trained on, samples of its lease used, mean training loss. With 0 tokens it
    contributes nothing.

    A `leaving` member takes part for the last time. `bytes_per_s` is the bandwidth that it reported (see `Ready`), from
    which every member computes the same part sizes.

    A head contributes for its cluster: tokens, samples and loss combine those of its `followers` with its own.
    `newcomers` are trainers that ask it for admission to the run.

    `commitment` covers the slices that it will send; a member with tokens has one. `locked` names the lock that it
    holds, if it holds one. `signature` is the member's signature of all this, for one attempt
    (`proof_messages.report_message`).

    A member on probation must contribute to `steps_left` steps, this one included, before it counts fully; 0: it counts
    fully. The state says how many (see `swarm.training.standing.entrance`).

    `credentials` are those of itself and of its newcomers, if they enter the run by an invitation or by vouches.
    `demoted` are members that vouched for a peer that evidence has convicted, or entered by a revoked invitation (see
    `swarm.training.standing.entrance`).

    `effects` are the member's measurements of the contributions that the state names as drawn, in their order: the
    decrease of the held-out loss by its own part of each, in millionths of a nat; empty if it measured nothing. If
    `discounted`, it counts for less by the state's scores (see `swarm.training.standing.held_out_scores`).
    """

    peer_id: PeerId
    num_tokens: Work = 0
    num_samples: Work = 0
    loss: Loss = 0.0
    leaving: bool = False
    bytes_per_s: BytesPerS = 0
    followers: Followers = ()
    newcomers: Newcomers = ()
    commitment: SliceCommitment | None = None
    locked: LockClaim | None = None
    signature: Annotated[bytes, up_to(SIGNATURE_BYTES)] = b""
    steps_left: StepsLeft = 0
    credentials: Credentials = ()
    demoted: Peers = ()
    effects: Effects = ()
    discounted: bool = False

    def __post_init__(self) -> None:
        _check_cluster(self)

    @property
    def is_proven(self) -> bool:
        """Return whether it counts fully once this step is committed."""
        return self.steps_left <= (1 if self.own_samples else 0)

    @property
    def own_tokens(self) -> int:
        """The member's own tokens, without those of its followers."""
        return self.num_tokens - sum(each.num_tokens for each in self.followers)

    @property
    def own_samples(self) -> int:
        return self.num_samples - sum(each.num_samples for each in self.followers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(wire.WireMessage):
    """A member's report to the coordinator: it holds `state_digest`, and makes this contribution.

    `accused` are peers that broke the protocol at this step, or could not be reached. `lock` is the highest lock that
    the member holds at this step, with `origin`, the signed group that its outcome is from: the outcome may have been
    committed, so it takes precedence. `signature` covers the report as a group carries it (see `contribution_of`).
    `bytes_per_s` is the bandwidth that the member has measured in its reductions; 0: not yet. `sequence` belongs to the
    author's last resume order that the member knows (see `ResumeOrder`); 0: none. `followers`, `newcomers`,
    `commitment`, `steps_left`, `credentials`, `demoted`, `effects` and `discounted` are those of the `Contribution`.
    `revocation` is the author's, and not known to the state yet.
    """

    PROTO = training_pb2.Ready
    MAX_BYTES = limits.MAX_READY_BYTES

    run: Name
    step: Step
    attempt: Attempt
    state_digest: Digest
    num_tokens: Work = 0
    num_samples: Work = 0
    loss: Loss = 0.0
    accused: Peers = ()
    leaving: bool = False
    bytes_per_s: BytesPerS = 0
    sequence: Annotated[int, whole(MAX_SEQUENCE)] = 0
    followers: Followers = ()
    newcomers: Newcomers = ()
    commitment: SliceCommitment | None = None
    lock: Lock | None = None
    origin: bytes = b""
    signature: Annotated[bytes, up_to(SIGNATURE_BYTES)] = b""
    steps_left: StepsLeft = 0
    credentials: Credentials = ()
    demoted: Peers = ()
    revocation: Revocation = b""
    effects: Effects = ()
    discounted: bool = False

    def __post_init__(self) -> None:
        _check_cluster(self)
        if (self.lock is None) != (not self.origin):
            raise ValueError("lock and origin come together")
        if self.lock is not None and self.lock.attempt > self.attempt:
            raise ValueError("its lock is of a later attempt")

    def contribution_of(self, peer_id: str) -> Contribution:
        """Return the part of this report of `peer_id` that a group carries."""
        locked = self.lock.claim if self.lock else None
        return Contribution(peer_id=peer_id, locked=locked, **shared_fields(self, Contribution))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyReply(wire.WireMessage):
    """The coordinator's answer. `kind`:

    group     `group` is the signed group
    pending   there is no group yet: ask again
    attempt   this step is at `attempt` now; the `reason` says why the one before was given up, if the sender did so
    behind    the member needs the state `state_digest`, which `certificate` committed (empty: the run's initial state)
    left_out  the group was formed without the member, for this `reason`
    """

    PROTO = training_pb2.ReadyReply
    MAX_BYTES = limits.MAX_CERTIFICATE_BYTES

    kind: ReplyKind
    group: bytes = b""
    attempt: Attempt = 0
    certificate: bytes = b""
    state_digest: bytes = b""
    reason: Reason = ""

    def __post_init__(self) -> None:
        check_digest(self.state_digest, "state_digest", empty=self.kind != "behind")
        if (self.kind == "group") != bool(self.group):
            raise ValueError("a group comes with kind 'group' and only with it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(wire.WireMessage):
    """The fixed members of one round, which all start from `state_digest`. Signed by its coordinator.

    Member i owns part i, of `part_values[i]` values; there are no parts if no member has tokens. `reduce_s` and
    `vote_s` bound the reduction and each of the two votes, from its beginning at each member. A group with a `lock`,
    the highest one that its members report, `resumes` that outcome and reduces nothing: its members fetch the outcome's
    parts and vote on it again; `origin` is the outcome's own signed group. `order` is the author's last resume order
    that the state follows from, if there is one. `revocation` is one of the author's that the state learns with it.
    """

    PROTO = training_pb2.Group
    MAX_BYTES = limits.MAX_READY_BYTES

    run: Name
    step: Step
    attempt: Attempt
    state_digest: Digest
    members: Annotated[tuple[Contribution, ...], up_to(limits.MAX_GROUP_MEMBERS)]
    part_values: tuple[Annotated[int, whole(limits.MAX_PART_VALUES)], ...] = ()
    reduce_s: PhaseS
    vote_s: PhaseS
    lock: Lock | None = None
    origin: bytes = b""
    order: bytes = b""
    revocation: Revocation = b""

    def __post_init__(self) -> None:
        if not self.members:
            raise ValueError("a group has no members")
        if not are_sorted(self.peer_ids):
            raise ValueError("the members are not sorted and distinct")
        reduces = self.num_tokens > 0 and self.resumes is None
        if len(self.part_values) != (len(self.members) if reduces else 0):
            raise ValueError("the parts do not fit the members")
        if (self.lock is None) != (not self.origin):
            raise ValueError("lock and origin come together")

    @property
    def resumes(self) -> Outcome | None:
        """The outcome that the group finishes, or None if it makes a new one."""
        return self.lock.outcome if self.lock else None

    @property
    def peer_ids(self) -> tuple[str, ...]:
        return tuple(member.peer_id for member in self.members)

    @property
    def roster(self) -> tuple[str, ...]:
        """The members that decide after this round: all proven ones that stay, or all proven ones if none stays; in a
        group without proven members, all members."""
        demoted = set(self.demoted)
        proven = [member for member in self.members if member.is_proven and member.peer_id not in demoted]
        proven = proven or list(self.members)
        stay = [member for member in proven if not member.leaving]
        return tuple(member.peer_id for member in stay or proven)

    @property
    def deciding(self) -> tuple[str, ...]:
        """The members whose votes count in this round: those that are not on probation, or all if all are."""
        return tuple(each.peer_id for each in self.members if not each.steps_left) or self.peer_ids

    @property
    def demoted(self) -> tuple[str, ...]:
        """The peers that more than a third of the deciding members demote, so that at least one honest member does."""
        deciding = set(self.deciding)
        named = Counter(peer for each in self.members if each.peer_id in deciding for peer in each.demoted)
        return tuple(sorted(peer for peer, count in named.items() if 3 * count > len(deciding)))

    @property
    def credentials(self) -> tuple[RunCredential, ...]:
        """The credentials of all peers that enter the run with this group."""
        return tuple(each for member in self.members for each in member.credentials)

    @property
    def on_probation(self) -> tuple[str, ...]:
        return tuple(member.peer_id for member in self.members if member.steps_left)

    @property
    def num_tokens(self) -> int:
        return sum(member.num_tokens for member in self.members)

    @property
    def num_values(self) -> int:
        """The number of values of the vector that it reduces."""
        return sum(self.part_values)

    @property
    def contributors(self) -> tuple[Contribution, ...]:
        return tuple(member for member in self.members if member.num_tokens)

    @property
    def num_trainers(self) -> int:
        """The number of members and their followers."""
        return len(self.members) + sum(len(member.followers) for member in self.members)

    @property
    def num_on_probation(self) -> int:
        """The number of members and followers on probation."""
        followers = (each for member in self.members for each in member.followers)
        return len(self.on_probation) + sum(each.steps_left > 0 for each in followers)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedGroup:
    """A group as its coordinator signed it. `data` is the envelope, `digest` the sha256 of `data`.

    `origin` is the group of the outcome that this one resumes, or None. `order` is the resume order of the run's author
    that it names, and `sequence` is that order's number, or 0 if it names none.
    """

    group: Group
    signer: str
    data: bytes
    digest: bytes
    origin: SignedGroup | None = None
    order: ResumeOrder | None = None
    sequence: int = 0

    def vote(self, outcome: Outcome, kind: VoteKind) -> Vote:
        """Return the vote of this kind for `outcome` in this group, which nobody has signed yet."""
        group = self.group
        return Vote(
            run=group.run,
            step=group.step,
            attempt=group.attempt,
            group_digest=self.digest,
            outcome=outcome,
            kind=kind,
            state_digest=group.state_digest,
            sequence=self.sequence,
        )


def _check_cluster(claim: Contribution | Ready) -> None:
    followers = claim.followers
    places = [each.place for each in followers]
    if not are_sorted(places):
        raise ValueError("the followers are not sorted and distinct")
    own_tokens = claim.num_tokens - sum(each.num_tokens for each in followers)
    own_samples = claim.num_samples - sum(each.num_samples for each in followers)
    if own_tokens < 0 or own_samples < 0:
        raise ValueError("the followers bring more than the whole cluster")
    check_work(own_tokens, own_samples)


def check_work(num_tokens: int, num_samples: int) -> None:
    if (num_tokens > 0) != (num_samples > 0):
        raise ValueError("tokens come from samples, and samples have tokens")
