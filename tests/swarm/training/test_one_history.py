"""Tests the round machine under random schedules of failing messages, clocks and processes: one outcome at most.

Members are machines without tasks: the schedule is a list of messages under way, of which any may come next, be lost or
come twice. A member may be killed between any two events, and starts again from its promise alone. Every commit vote
that is cast counts, whether or not any member ever counts it. One of four may lie: it forgets its locks, votes for
everything, and signs several groups for one attempt, each with some of the reports. `test_round_model` looks at all
schedules of a smaller model.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import pytest
from support.round_scripts import PEERS, SIGNATURE, contribution, setup
from swarm.training.round import state_machine as machine
from swarm.training.round.group_members import form_group, own_report
from swarm.training.round.promise import Promise
from swarm.training.round.quorum import quorum
from swarm.training.round.round_events import (
    Action,
    Announce,
    Ask,
    AttemptLeft,
    CastVote,
    Event,
    Grouped,
    LeftOut,
    Lost,
    Moved,
    Offered,
    Proven,
    Query,
    Recover,
    Reduce,
    Reduced,
    ReduceFailed,
    Reply,
    Reported,
    Sighted,
    Sign,
    Tick,
    Voted,
)
from swarm.training.round.round_state import RoundSetup, RoundState
from swarm_protocol.commit_messages import Outcome, Vote
from swarm_protocol.identity import Identity
from swarm_protocol.training_messages import Group, ReadyReply, SignedGroup

STRANGERS = tuple(Identity(bytes([40 + number]) * 32).peer_id for number in range(2))
EVENTS_PER_MEMBER = 200
NUM_SCHEDULES = 30
CERTIFICATE = b"certificate"


@dataclass
class Member:
    """Run one process after the other with the same key. `promise` stands for its disk."""

    setup: RoundSetup
    clock_s: float
    state: RoundState = field(init=False)
    promise: Promise | None = None

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.state = machine.begin(self.setup, accused={}, promise=self.promise)


class World:
    """Simulate one schedule. `decided` has the outcomes for which enough commit votes were cast. With `remembers`,
    promises outlive their process. With `lies`, the first member is a liar. `said` has what members have signed, by
    member and subject."""

    def __init__(
        self, seed: int, num_members: int, *, remembers: bool, majority_after_s: float, lies: bool = False
    ) -> None:
        self.random = random.Random(seed)
        self._is_patient = seed % 2 == 1
        self.remembers = remembers
        self.roster = PEERS[:num_members]
        self.liar = self.roster[0] if lies else ""
        self.decided: set[Outcome] = set()
        self.said: dict[tuple[str, object], set[object]] = {}
        self._under_way: list[tuple[str, Event]] = []
        self._groups: dict[bytes, SignedGroup] = {}
        self._votes: dict[tuple[bytes, Outcome, str], set[str]] = {}
        self.members = {
            peer: Member(self._setup_of(peer, majority_after_s), clock_s=self.random.uniform(0, 1000))
            for peer in (*self.roster, *STRANGERS)
        }

    def _setup_of(self, peer: str, majority_after_s: float) -> RoundSetup:
        return setup(peer, roster=self.roster, leased=self.roster, majority_after_s=majority_after_s)

    def run(self) -> None:
        for peer in self.members:
            self._offer(peer)
        for _ in range(EVENTS_PER_MEMBER * len(self.roster)):
            chance = self.random.random()
            if chance < 0.015:
                self._kill(self.random.choice(list(self.members)))
            elif chance < 0.1 or not self._under_way:
                self._let_time_pass(self.random.choice(list(self.members)))
            else:
                self._deliver()

    def _offer(self, peer: str) -> None:
        brings = contribution(peer) if peer in self.roster else replace(contribution(peer), num_tokens=0, num_samples=0)
        self._happen(peer, Offered(contribution=brings))

    def _kill(self, peer: str) -> None:
        member = self.members[peer]
        if not self.remembers:
            member.promise = None
        member.start()
        self._under_way = [(to, event) for to, event in self._under_way if to != peer]
        self._offer(peer)

    def _let_time_pass(self, peer: str) -> None:
        """Advance one member's clock at its own rate. A member that waits for an answer may also get none."""
        member = self.members[peer]
        if member.state.asked and self.random.random() < 0.3:
            self._happen(peer, Lost(peer=member.state.asked, reason="no answer"))
            return
        state = member.state
        if self._is_patient:  # in every second schedule nobody gives up on a coordinator that does not answer
            state = replace(state, timers=replace(state.timers, waits_until=None))
        due_s = machine.wake_at(state)
        member.clock_s = max(member.clock_s, due_s or 0.0) + self.random.uniform(0, 1)
        self._happen(peer, Tick())

    def _deliver(self) -> None:
        index, fate = self.random.randrange(len(self._under_way)), self.random.random()
        to, event = self._under_way[index]
        if fate > 0.08:  # otherwise it will arrive again
            self._under_way.pop(index)
        if fate < 0.9:  # otherwise it is lost
            self._happen(to, event)

    # --- the actions of a member -------------------------------------------------------------------------------------

    def _happen(self, peer: str, event: Event) -> None:
        member = self.members[peer]
        if isinstance(event, Reported) and member.state.phase == "done":
            self._send(event.peer, Proven(certificate=CERTIFICATE))
            return
        if peer == self.liar and member.state.lock is not None:
            member.state = replace(member.state, lock=None, lock_origin=b"")
        member.state, actions = machine.step(member.state, event, member.clock_s)
        for action in actions:
            if isinstance(action, Ask | Sign | CastVote):
                member.promise = Promise(
                    report=own_report(member.state),
                    first_attempt=member.setup.first_attempt,
                    own_prepare_vote=member.state.own_prepare_vote,
                )
            self._act(peer, action)

    def _send(self, to: str, event: Event) -> None:
        self._under_way.append((to, event))

    @property
    def equivocators(self) -> set[str]:
        """Return the peers that have signed two different statements about one attempt, which would convict them."""
        return {peer for (peer, _), things in self.said.items() if len(things) > 1}

    def _note(self, me: str, about: object, content: object) -> None:
        self.said.setdefault((me, about), set()).add(content)

    def _act(self, me: str, action: Action) -> None:  # noqa: C901 - one case an action
        match action:
            case Ask(peer=peer, ready=ready):
                self._note(me, ("report", ready.attempt), ready.contribution_of(me))
                self._send(peer, Reported(peer=me, ready=ready))
            case Reply(peer=peer, reply=reply):
                self._answer(me, peer, reply)
            case Query(peers=peers):
                for peer in peers:
                    self._query(me, peer)
            case Sign(group=group):
                self._sign(me, group)
            case Reduce(signed=signed):
                self._reduce(me, signed)
            case Recover(signed=signed, outcome=outcome):
                self._send(me, Reduced(attempt=signed.group.attempt, outcome=outcome))
            case CastVote(vote=vote, peers=peers):
                self._cast(me, vote, peers)
            case Announce(abort=abort, peers=peers):
                for peer in peers:
                    self._send(peer, AttemptLeft(peer=me, abort=abort))

    def _answer(self, me: str, peer: str, reply: ReadyReply) -> None:
        match reply.kind:
            case "group":
                self._send(peer, Grouped(signed=self._groups[reply.group]))
            case "attempt":
                self._send(peer, Moved(attempt=self.members[peer].state.attempt, to=reply.attempt))
            case "left_out":
                self._send(peer, LeftOut(attempt=self.members[me].state.attempt, reason=reply.reason))

    def _sign(self, me: str, group: Group) -> None:
        self._hand_out(me, group)
        if me == self.liar:
            reports = {**self.members[me].state.reports, me: own_report(self.members[me].state)}
            for _ in range(2):
                some = {peer: each for peer, each in reports.items() if peer == me or self.random.random() < 0.8}
                other, _ = form_group(self.members[me].setup, group.attempt, some)
                self._hand_out(me, other)

    def _hand_out(self, me: str, group: Group) -> None:
        self._note(me, ("group", group.attempt), group)
        own = next(each for each in group.members if each.peer_id == me)
        self._note(me, ("report", group.attempt), replace(own, signature=b""))
        data = f"{me} {len(self._groups)}".encode()
        origin = self._groups.get(group.origin)
        signed = SignedGroup(group=group, signer=me, data=data, digest=hashlib.sha256(data).digest(), origin=origin)
        self._groups[data] = signed
        for peer in group.peer_ids:
            self._send(peer, Grouped(signed=signed))

    def _query(self, me: str, peer: str) -> None:
        there = self.members[peer].state
        is_done = there.phase == "done"
        self._send(me, Proven(certificate=CERTIFICATE) if is_done else Sighted(peer=peer, attempt=there.attempt))

    def _reduce(self, me: str, signed: SignedGroup) -> None:
        attempt = signed.group.attempt
        if self.random.random() < 0.15:
            missing = tuple(peer for peer in signed.group.peer_ids if peer != me)[:1]
            self._send(me, ReduceFailed(attempt=attempt, reason="the connection broke", unreachable=missing))
            return
        parts = tuple(bytes([index]) * 32 for index in range(len(signed.group.part_values)))
        outcome = Outcome(origin_digest=signed.digest, part_digests=parts, state_digest=signed.digest)
        self._send(me, Reduced(attempt=attempt, outcome=outcome))

    def _cast(self, me: str, vote: Vote, peers: Collection[str]) -> None:
        self._note(me, (vote.kind, vote.attempt), (vote.group_digest, vote.outcome))
        voters = self._votes.setdefault((vote.group_digest, vote.outcome, vote.kind), set())
        voters.add(me)
        self._send_vote(me, vote, (me, *peers))
        (signed,) = [each for each in self._groups.values() if each.digest == vote.group_digest]
        if self.liar in signed.group.peer_ids and self.liar not in voters:
            voters.add(self.liar)
            self._send_vote(self.liar, vote, (me, *peers))
        succession = self.members[me].setup.succession
        is_enough = len(voters) >= quorum(len(signed.group.members)) and succession.is_enough(self.roster, voters)
        if is_enough and vote.kind == "commit":
            self.decided.add(vote.outcome)

    def _send_vote(self, voter: str, vote: Vote, peers: Collection[str]) -> None:
        for peer in peers:
            self._send(peer, Voted(peer=voter, vote=replace(vote, signature=SIGNATURE)))


def worlds(num_members: int, *, remembers: bool = True, majority_after_s: float, lies: bool = False) -> list[World]:
    """Return one world for each schedule, after its last event."""
    ended = []
    for seed in range(NUM_SCHEDULES):
        world = World(seed, num_members, remembers=remembers, majority_after_s=majority_after_s, lies=lies)
        world.run()
        ended.append(world)
    return ended


TWO_THIRDS, MAJORITY = 0.0, 5.0
"""The seconds after which a majority is enough, or 0 for never."""


@pytest.mark.parametrize(
    ("num_members", "majority_after_s"),
    # two thirds of three members are a majority
    [(2, TWO_THIRDS), (2, MAJORITY), (3, MAJORITY), (4, TWO_THIRDS), (4, MAJORITY)],
)
def test_any_schedule_decides_at_most_one_outcome(num_members: int, majority_after_s: float) -> None:
    ended = worlds(num_members, majority_after_s=majority_after_s)
    assert all(len(world.decided) <= 1 for world in ended)
    assert not any(world.equivocators for world in ended)
    # enough schedules reach a decision
    assert sum(len(world.decided) for world in ended) > NUM_SCHEDULES / 8


def test_one_liar_of_four_decides_no_second_outcome() -> None:
    ended = worlds(4, majority_after_s=0.0, lies=True)
    assert all(len(world.decided) <= 1 for world in ended)
    assert set.union(*(world.equivocators for world in ended)) == {PEERS[0]}
    assert sum(len(world.decided) for world in ended) > NUM_SCHEDULES / 8


def test_two_outcomes_are_decided_in_some_schedule_when_a_restart_forgets_promises() -> None:
    """This shows that the schedules find such faults."""
    ended = worlds(2, remembers=False, majority_after_s=5.0)
    assert any(len(world.decided) > 1 for world in ended)
    assert any(world.equivocators for world in ended), "honest members must have signed two statements, too"
