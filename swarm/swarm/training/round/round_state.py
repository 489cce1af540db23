"""Holds what a member knows of a round, and the transitions that `group_formation` and `state_machine` share.

The coordinator of an attempt, and the members that get seats in a full group, are drawn by the lowest hash of a beacon
and the peer id. The beacon of an attempt includes the digest of the state that the step follows from, which nobody knew
when the members of that state were chosen. So no member can have chosen its key for the attempts that it wants to
coordinate. Keys cost nothing, however, and a newcomer can make one after it has seen the state, so the beacon of the
seats includes more (see `group_members`). In a run's first round the beacon depends only on the run's id and its
initial state. Both are known beforehand: a party that makes enough keys coordinates that round, and takes its seats.
Drawing the members of a round from a beacon of the last state comes from MoDeST (de Vos et al. 2023, arXiv 2302.13837).

The module has values and pure functions. `state_machine` explains the phases.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from swarm_protocol import limits
from swarm_protocol.commit_messages import Lock, Vote, VoteKind
from swarm_protocol.run_credentials import RunCredential
from swarm_protocol.training_messages import Contribution, Ready, ReadyReply, SignedGroup

from swarm.training.round.clusters import Clusters, drawn
from swarm.training.round.quorum import Succession
from swarm.training.round.round_events import Action, GiveUp, Reply
from swarm.training.standing.held_out_scores import HeldOutScores
from swarm.training.standing.standings import TrainerStandings

Phase: TypeAlias = Literal["forming", "signing", "left_out", "reducing", "preparing", "committing", "resting", "done"]

FIRST_REST_S = 0.05
MAX_REST_S = 5.0
"""The pause after a failed attempt doubles from the first value up to the second, so that repeated failures do not
cause a busy loop."""

PATIENCE_S = 10.0
"""Time after the grace until a coordinator reports that too few members are ready."""
DOUBTED_S = 10.0
"""For this time after a peer was missing at the end of an attempt, a later attempt that it coordinates waits only
shortly for it: the peer was waited for at length already. After that it is waited for as long as any other peer again,
since it may be there and slow."""

MAX_BELIEVED_ATTEMPT = limits.MAX_ATTEMPT // 2
"""The highest attempt to which others can move this member. The other half of the range is left for the attempts that
follow."""

NO_VOTES: Mapping[VoteKind, Mapping[str, Vote]] = {"prepare": {}, "commit": {}}

MAX_HEARD = 1024
"""Maximum peers whose reports or votes are kept: four full groups, so that strangers cannot fill the memory. Members of
the state, and of a group, are heard beyond this limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSetup:
    """Holds what is fixed while a member `me` tries to make outer step `step` of `run` from the state `state_digest`.

    `roster` are the members of the committed state; `leased` hold leases of `samples_per_member` samples of
    `tokens_per_sample` tokens for this step. The run admits only the peers of `admission`; empty: anyone. The fragment
    that the step moves has `num_values`. `first_attempt` is the attempt after the one that committed the state. Times
    are in seconds: once enough members are ready, a coordinator waits at least `grace_s` for more (see `grace_after`),
    and a group that does not form is given up after `patience_s`. A reduction has `reduce_s`, and each vote `vote_s`.

    `clusters` say which trainers take part through another member; without them, all take part themselves. `standings`
    say who is on probation, and `held_out` whose work counts for less. `bytes_per_s` is this member's bandwidth (see
    `peer_connections`). `order` is the author's last resume order as it was signed, and `sequence` its number; empty
    and 0 if there was none. This member shows its `credential` when it enters the run. Its report names the peers in
    `demoted`, which vouched for convicted peers or entered by a revoked invitation, and carries a `revocation` of the
    author that the state does not know yet.
    """

    run: str
    me: str
    step: int
    first_attempt: int
    state_digest: bytes
    roster: tuple[str, ...]
    leased: tuple[str, ...]
    admission: tuple[str, ...]
    succession: Succession
    max_group: int
    samples_per_member: int
    tokens_per_sample: int
    num_values: int
    grace_s: float
    reduce_s: float
    vote_s: float
    clusters: Clusters = field(default_factory=Clusters)
    standings: TrainerStandings = field(default_factory=TrainerStandings)
    held_out: HeldOutScores = field(default_factory=HeldOutScores)
    bytes_per_s: int = 0
    sequence: int = 0
    order: bytes = b""
    credential: RunCredential | None = None
    demoted: tuple[str, ...] = ()
    revocation: bytes = b""

    @property
    def follows(self) -> bool:
        """Return whether another member brings this one's work to the round."""
        return self.clusters.follows(self.me)

    @property
    def patience_s(self) -> float:
        return self.grace_s + PATIENCE_S

    def admits(self, peer: str) -> bool:
        return not self.admission or peer in self.admission

    def beacon(self, attempt: int) -> bytes:
        return attempt_beacon(self.run, self.state_digest, self.step, attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPrepareVote:
    """The last prepare vote that this member has cast at this step. The parts of its outcome, which this member keeps,
    come from the signed group `origin`."""

    vote: Vote
    origin: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Holds what has gone wrong with other peers at this step, as this member saw it.

    `accused` broke the protocol, each with the reason, and `unreachable` could not be reached. Of the `accused`,
    `convicted` are those whom evidence convicts: no group with them is accepted. `suspects` spoiled an attempt, and are
    left out up to and including the attempt that each maps to, whatever they send meanwhile. `disputes` counts for each
    peer how often it left a group during the reduction or was accused by a peer that left. `doubted` were missing at
    the end of an attempt, as this member or another one said, and have not been heard since; each maps to the time
    until which the doubt lasts. A doubt is no reason to leave a peer out of a group.
    """

    accused: Mapping[str, str] = field(default_factory=dict)
    convicted: frozenset[str] = frozenset()
    unreachable: frozenset[str] = frozenset()
    suspects: Mapping[str, int] = field(default_factory=dict)
    disputes: Mapping[str, int] = field(default_factory=dict)
    doubted: Mapping[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> set[str]:
        """The peers that broke the protocol or could not be reached: the `accused` of this member's report."""
        return self.accused.keys() | self.unreachable


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """Counts the attempts at this step. `num_failed` have failed. Single peers have moved this member to later attempts
    `num_moved` times, and may move it again from `movable_at` on, to `later`. `named` maps members of the
    roster (without one, known peers) to the latest attempt at which they were seen ahead of this member. Since
    `short_since`, too few members of the state for a group have been there."""

    num_failed: int = 0
    num_moved: int = 0
    movable_at: float = 0.0
    later: int = 0
    named: Mapping[str, int] = field(default_factory=dict)
    short_since: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timers:
    """The times at which this member acts without an event from others. As the coordinator, it waits for absent members
    until `grace_until`, and asks them to hurry at `hurry_at`. As another member, it waits for the coordinator's group
    until `waits_until`, however often the coordinator puts it off. The phase ends at `deadline`."""

    grace_until: float | None = None
    hurry_at: float | None = None
    waits_until: float | None = None
    deadline: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundState:
    """One member's state of one step. `begin_attempt` resets `phase` and the fields from `coordinator` on.

    The step began at `began_at`, and the member's newest interval took `interval_s`; 0: unknown. `mine` is its
    contribution. `known` are peers seen in the run, `reports` what peers reported to it, and `heard` the members of the
    state that have answered or called in this attempt. `lock` is the highest lock that it holds at this step, whose
    outcome comes from the signed group `lock_origin`. A member that `abstains` takes part in no group (see `promise`).
    It has yielded in the attempt `yields_after` (see `disputes`), and `sits_out` the reduction of this attempt's group.
    `asked` is the coordinator that it reports to. A member that is `recovering` gets the parts from others instead of
    reducing. `votes` are those of this attempt, by kind and peer; `silent` members will not vote any more.
    """

    setup: RoundSetup
    attempt: int
    phase: Phase = "forming"
    began_at: float = 0.0
    interval_s: float = 0.0
    mine: Contribution | None = None
    known: tuple[str, ...] = ()
    reports: Mapping[str, Ready] = field(default_factory=dict)
    lock: Lock | None = None
    lock_origin: bytes = b""
    own_prepare_vote: OwnPrepareVote | None = None
    abstains: bool = False
    yields_after: int | None = None
    faults: Faults = field(default_factory=Faults)
    attempts: Attempts = field(default_factory=Attempts)
    coordinator: str = ""
    asked: str = ""
    heard: frozenset[str] = frozenset()
    timers: Timers = field(default_factory=Timers)
    signed: SignedGroup | None = None
    sits_out: bool = False
    recovering: bool = False
    votes: Mapping[VoteKind, Mapping[str, Vote]] = field(default_factory=lambda: NO_VOTES)
    silent: frozenset[str] = frozenset()


Transition: TypeAlias = tuple[RoundState, list[Action]]


def attempt_beacon(run: str, state_digest: bytes, step: int, attempt: int) -> bytes:
    """Return the beacon of `attempt` at the `step` that follows from `state_digest`."""
    return hashlib.sha256(f"{run}/{state_digest.hex()}/{step}/{attempt}".encode()).digest()


def coordinator_of(beacon: bytes, candidates: Iterable[str]) -> str:
    """Return the candidate with the lowest number drawn from `beacon`. All members compute the same one, and each
    attempt draws anew."""
    return min(candidates, key=lambda peer: drawn(beacon, peer))


def with_coordinator(state: RoundState) -> RoundState:
    """Return `state` with the attempt's coordinator, as this member sees it.

    The coordinator is a member of the roster, which all members share, so that they agree on it. If the roster has no
    usable member, as at a run's beginning, the coordinator is one of the peers that this member has seen.
    """
    candidates = roster_left(state) or (set(state.known) - state.faults.failed) | {state.setup.me}
    return replace(state, coordinator=coordinator_of(state.setup.beacon(state.attempt), candidates))


def roster_left(state: RoundState) -> set[str]:
    return set(state.setup.roster) - state.faults.failed


def is_waiting(state: RoundState) -> bool:
    return state.phase in {"forming", "left_out", "resting"}


def may_leave_now(state: RoundState) -> bool:
    """Return whether this member can leave in the middle of a step. It can if it is in no group and bound by no vote,
    and either the others do not wait for it, or too few of them are there for the step to end soon."""
    setup = state.setup
    if not is_waiting(state) or state.lock is not None or state.own_prepare_vote is not None:
        return False
    # a coordinator has waited in vain for members that are busy with their intervals, too, but they are there
    there = roster_left(state) - state.faults.doubted.keys()
    is_short = state.attempts.short_since is not None and not setup.succession.is_usual(setup.roster, there)
    return is_short or setup.me not in (*setup.roster, *setup.leased)


def moves_at(state: RoundState) -> float | None:
    """Return when to move to the later attempt that others have named, or None if they have named none."""
    return state.attempts.movable_at if is_waiting(state) and state.attempts.later > state.attempt else None


def accuse(state: RoundState, peers: tuple[str, ...], reason: str) -> RoundState:
    """Return `state` with `peers` at fault for this step and later ones. A member does not accuse itself."""
    accused = {**state.faults.accused, **{peer: reason for peer in peers if peer != state.setup.me}}
    return replace(state, faults=replace(state.faults, accused=accused))


def with_unreachable(state: RoundState, peers: tuple[str, ...]) -> RoundState:
    unreachable = (state.faults.unreachable | {*peers}) - {state.setup.me}
    return replace(state, faults=replace(state.faults, unreachable=unreachable))


def suspect(state: RoundState, peers: tuple[str, ...]) -> RoundState:
    """Count `peers`, which have spoiled this attempt, as unreachable, and leave them out of the next attempt, whatever
    they send meanwhile."""
    state = with_unreachable(state, peers)
    until = {peer: state.attempt + 1 for peer in peers if peer != state.setup.me}
    return replace(state, faults=replace(state.faults, suspects={**state.faults.suspects, **until}))


def is_doubted(state: RoundState, peer: str, now: float) -> bool:
    return now < state.faults.doubted.get(peer, now)


def without_doubt(state: RoundState, peer: str) -> RoundState:
    """Return `state` without a doubt about `peer`, which has been heard."""
    if peer not in state.faults.doubted:
        return state
    doubted = {other: until for other, until in state.faults.doubted.items() if other != peer}
    return replace(state, faults=replace(state.faults, doubted=doubted))


def reached_again(state: RoundState, peer: str, attempt: int) -> RoundState:
    """Return `state` with `peer` reachable again, because it was heard at its `attempt`. Nothing changes while the peer
    is left out for an attempt that it spoiled."""
    faults = state.faults
    if peer not in faults.unreachable or attempt <= faults.suspects.get(peer, -1):
        return state
    return replace(state, faults=replace(faults, unreachable=faults.unreachable - {peer}))


def with_sighted(state: RoundState, peer: str, attempt: int) -> RoundState:
    """Return `state` with `peer` known and heard, and reachable again if it is not left out of its `attempt`."""
    if peer not in state.known and len(state.known) < MAX_HEARD and state.setup.admits(peer):
        state = replace(state, known=(*state.known, peer))
    if peer in state.setup.roster and peer not in state.heard:
        state = replace(state, heard=state.heard | {peer})
    return reached_again(without_doubt(state, peer), peer, attempt)


def rest_after(num_times: int) -> float:
    """Return the seconds to pause after something that has happened `num_times` before."""
    # other peers can raise `num_times` without limit, so the power is bounded
    return min(FIRST_REST_S * 2.0 ** min(num_times, 16), MAX_REST_S)


def is_overdue(state: RoundState, now: float) -> bool:
    """Return whether the majority rule applies by now."""
    after_s, since = state.setup.succession.majority_after_s, state.attempts.short_since
    return after_s > 0 and since is not None and now >= since + after_s


def note_shortage(state: RoundState, now: float) -> RoundState:
    """Record that too few members are there from `now` on, unless that is recorded already."""
    if state.attempts.short_since is not None:
        return state
    return replace(state, attempts=replace(state.attempts, short_since=now))


def give_up(state: RoundState, reason: str, missing: tuple[str, ...], now: float) -> Transition:
    """End this attempt, and begin the next one after a pause."""
    attempt = state.attempt
    state, actions = rest(state, reason, missing, now)
    timers = state.timers
    state, replies = begin_attempt(state, attempt + 1, reason)
    return replace(state, phase="resting", timers=timers), [*actions, *replies]


def rest(state: RoundState, reason: str, missing: tuple[str, ...], now: float) -> Transition:
    """Report to the coordinator of this attempt again after a pause."""
    missing = tuple(sorted(set(missing)))
    notice = GiveUp(step=state.setup.step, attempt=state.attempt, reason=reason, missing=missing)
    num_failed = state.attempts.num_failed
    # a running doubt is not prolonged, so that a peer that is there but slow gets the full time eventually
    lasting = {peer: until for peer, until in state.faults.doubted.items() if now < until}
    doubted = {**dict.fromkeys(missing, now + DOUBTED_S), **lasting}
    state = replace(
        state,
        phase="resting",
        asked="",
        attempts=replace(state.attempts, num_failed=num_failed + 1),
        faults=replace(state.faults, doubted=doubted),
        timers=Timers(deadline=now + rest_after(num_failed)),
    )
    return state, [notice]


def begin_attempt(state: RoundState, attempt: int, reason: str = "") -> Transition:
    """Begin `attempt`, and tell the peers that still wait for an earlier one, and for which `reason` it failed."""
    why = reason[: limits.MAX_FAILURE_TEXT_CHARS]
    replies: list[Action] = [
        Reply(peer=peer, reply=ReadyReply(kind="attempt", attempt=attempt, reason=why))
        for peer, each in state.reports.items()
        if each.attempt < attempt
    ]
    setup, faults = state.setup, state.faults
    faults = replace(
        faults,
        suspects={peer: until for peer, until in faults.suspects.items() if attempt <= until},
        # if too few reachable members are left for any group, retry the others: without them the run waits anyway
        unreachable=faults.unreachable if setup.succession.is_enough(setup.roster, roster_left(state)) else frozenset(),
    )
    state = replace(
        state,
        attempt=attempt,
        phase="forming",
        reports={peer: each for peer, each in state.reports.items() if each.attempt >= attempt},
        faults=faults,
        asked="",
        heard=frozenset(),
        timers=Timers(),
        signed=None,
        # a liar could otherwise refuse one member after the other, and have all of them yield
        yields_after=state.yields_after if faults.failed & {*setup.roster} else None,
        sits_out=False,
        recovering=False,
        votes=NO_VOTES,
        silent=frozenset(),
    )
    return with_coordinator(state), replies
