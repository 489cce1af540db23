"""Histories of a round at one member, among members and strangers who say what they like.

`play_round` draws one from the bytes it is given. Votes, reports, groups and aborts pass through their encoding, often
with a field or three changed; whether they are signed is checked before, so whatever a peer may sign is taken here.
What the member decides comes back to it as its driver would bring it: its own group, its own votes.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from support.fuzzing import Target
from support.hostile_values import altered
from support.round_scripts import ME, PEERS, RUN, STEP, contribution, locked, outcome, ready, setup
from swarm.training.round.group_formation import awaited_peers, num_lacking
from swarm.training.round.group_members import form_group, own_report
from swarm.training.round.round_events import (
    Action,
    Announce,
    Ask,
    AttemptLeft,
    CastVote,
    Convicted,
    CredentialsExpired,
    Event,
    Grouped,
    LeftOut,
    Lost,
    Moved,
    Offered,
    Proven,
    Reduced,
    ReduceFailed,
    Reply,
    Reported,
    Sighted,
    Sign,
    Tick,
    Voted,
    Withdrew,
)
from swarm.training.round.round_state import MAX_HEARD, RoundState
from swarm.training.round.state_machine import begin, step, wake_at
from swarm.training.standing.entrance import Probation
from swarm.training.standing.standings import TrainerStandings
from swarm_protocol.commit_messages import Abort, Outcome, Vote
from swarm_protocol.errors import PeerViolation
from swarm_protocol.identity import Identity
from swarm_protocol.training_messages import Group, Ready, SignedGroup

NUM_EVENTS = 40
STRANGERS = tuple(Identity(bytes([number]) * 32).peer_id for number in range(100, 112))
M = TypeVar("M", Abort, Group, Ready, Vote)
EVERYONE = (*PEERS, *STRANGERS)
OTHERS = tuple(peer for peer in EVERYONE if peer != ME)
NAMES = (*EVERYONE, RUN, "other")


class RoundHistory:
    """One history: `happened` counts the events by name, and the phases that the member was in."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.now = 0.0
        self.happened: Counter[str] = Counter()
        rule = Probation(steps=chance.choice((0, 0, 3)))
        start = setup(
            min_group=chance.choice((1, 2, 2, 2)),
            majority_after_s=chance.choice((0.0, 0.0, 5.0)),
            roster=chance.choice((PEERS, PEERS, PEERS, ())),
            admission=chance.choice(((), (), (*PEERS, *STRANGERS[:2]))),
            max_group=chance.choice((2, 8, 8)),
            standings=TrainerStandings(rule=rule, known=PEERS, outer_step=STEP),
        )
        accused = {STRANGERS[0]: "it lied"} if chance.random() < 0.2 else {}
        self.state = begin(start, accused=accused, convicted=frozenset(accused))
        self._groups: dict[bytes, SignedGroup] = {}
        self._own: list[Event] = []

    def play(self, num_events: int) -> None:
        for _ in range(num_events):
            self.now += self.chance.choice((0.0, 0.0, 0.01, 0.3, 2.0, 12.0))
            event = self._own.pop(0) if self._own and self.chance.random() < 0.7 else self._drawn()
            if event is not None:
                self.take(event)

    def take(self, event: Event) -> None:
        self.happened[type(event).__name__] += 1
        self.state, actions = step(self.state, event, self.now)
        self.happened[self.state.phase] += 1
        for action in actions:
            self._carry_out(action)
        wake_at(self.state)
        awaited_peers(self.state)
        num_lacking(self.state)
        own_report(self.state).to_bytes()
        check_bounded(self.state)

    def _carry_out(self, action: Action) -> None:
        """Say what it says, as the driver would: it can be encoded whatever led to it."""
        match action:
            case Sign(group=group):
                self._own.append(Grouped(signed=self._signed(group, self.state.setup.me)))
            case CastVote(vote=vote):
                vote.to_bytes()
                self._own.append(Voted(peer=self.state.setup.me, vote=replace(vote, signature=bytes(64))))
            case Ask(ready=report):
                report.to_bytes()
            case Reply(reply=reply):
                reply.to_bytes()
            case Announce(abort=abort):
                abort.to_bytes()

    def _drawn(self) -> Event | None:
        return self.chance.choice(_DRAWS)(self)

    def sighted(self) -> Event:
        return Sighted(peer=self._peer(), attempt=self._attempt())

    def reported(self) -> Event | None:
        report = ready(self._attempt())
        if self._groups and self.chance.random() < 0.3:
            held = self.chance.choice(list(self._groups.values()))
            report = replace(report, attempt=max(report.attempt, held.group.attempt))
            report = replace(report, lock=locked(held), origin=held.data)
        sent = self._sent(report)
        return Reported(peer=self._peer(), ready=sent) if sent else None

    def withdrew(self) -> Event:
        return Withdrew(peer=self._peer())

    def expired(self) -> Event:
        return CredentialsExpired(attempt=self._attempt(), at=self.chance.random() * 100)

    def lost(self) -> Event:
        return Lost(peer=self._peer(), reason="it broke")

    def moved(self) -> Event:
        return Moved(attempt=self._attempt(), to=self._attempt())

    def left_out(self) -> Event:
        return LeftOut(attempt=self._attempt(), reason="full")

    def grouped(self) -> Event | None:
        state, chance = self.state, self.chance
        signer = state.coordinator if chance.random() < 0.8 else self._peer()
        others = chance.sample(OTHERS, chance.randrange(4)) if chance.random() < 0.5 else PEERS
        reports = {peer: ready(state.attempt) for peer in {*others, signer}}
        reports |= {peer: each for peer, each in state.reports.items() if each.attempt == state.attempt}
        reports[state.setup.me] = own_report(state)
        group, _ = form_group(state.setup, state.attempt, reports)
        sent = self._sent(group, unchanged=0.7)
        if sent is None or (sent.lock is not None and sent.origin not in self._groups):
            return None  # every reader of such a group refuses it
        return Grouped(signed=self._signed(sent, signer))

    def reduced(self) -> Event | None:
        signed = self.state.signed
        if signed is None:
            return None
        return Reduced(attempt=self.state.attempt, outcome=signed.group.resumes or self._outcome(signed))

    def reduce_failed(self) -> Event | None:
        if self.state.signed is None:
            return None
        peers = self.state.signed.group.peer_ids
        return ReduceFailed(
            attempt=max(0, self.state.attempt - (self.chance.random() < 0.2)),
            reason="it broke",
            accused=tuple(self.chance.sample(peers, self.chance.randrange(2))),
            unreachable=tuple(self.chance.sample(peers, self.chance.randrange(2))),
            unaudited=self.chance.random() < 0.3,
            certain=self.chance.random() < 0.3,
        )

    def voted(self) -> Event | None:
        signed = self._any_group()
        if signed is None:
            return None
        vote = signed.vote(self._outcome(signed), self.chance.choice(("prepare", "commit")))
        sent = self._sent(replace(vote, signature=bytes(64)), unchanged=0.8)
        return Voted(peer=self._peer(), vote=replace(sent, signature=bytes(64))) if sent else None

    def attempt_left(self) -> Event | None:
        signed = self._any_group()
        if signed is None:
            return None
        accused = tuple(sorted(self.chance.sample(OTHERS, self.chance.randrange(4))))
        reason = self.chance.choice(("gone", "é" * 999, "😀" * 500))
        abort = Abort(
            run=RUN,
            step=STEP,
            attempt=signed.group.attempt,
            group_digest=signed.digest,
            reason=reason,
            accused=accused,
        )
        sent = self._sent(abort)
        return AttemptLeft(peer=self._peer(), abort=sent) if sent else None

    def convicted(self) -> Event | None:
        return Convicted(peer=self._peer(), reason="it lied") if self.chance.random() < 0.1 else None

    def proven(self) -> Event | None:
        return Proven(certificate=b"certificate") if self.chance.random() < 0.05 else None

    def offered(self) -> Event:
        return Offered(contribution=contribution(self.state.setup.me), interval_s=self.chance.choice((0.0, 5.0, 1e6)))

    def tick(self) -> Event:
        self.now = max(self.now, wake_at(self.state) or 0.0)
        return Tick()

    def _peer(self) -> str:
        return self.chance.choice(PEERS if self.chance.random() < 0.7 else EVERYONE)

    def _attempt(self) -> int:
        attempt = self.state.attempt
        return self.chance.choice((attempt, attempt, attempt, attempt + 1, 0, 2**19, 2**20))

    def _outcome(self, signed: SignedGroup) -> Outcome:
        origin = signed.origin or signed
        return signed.group.resumes or outcome(origin, self.chance.choice((b"s", b"s", b"s", b"t")))

    def _any_group(self) -> SignedGroup | None:
        if self.state.signed is not None and self.chance.random() < 0.9:
            return self.state.signed
        return self.chance.choice(list(self._groups.values())) if self._groups else None

    def _signed(self, group: Group, signer: str) -> SignedGroup:
        data = group.to_bytes() + signer.encode()
        origin = self._groups.get(group.origin) if group.lock is not None else None
        signed = SignedGroup(group=group, signer=signer, data=data, digest=hashlib.sha256(data).digest(), origin=origin)
        if origin is None:
            self._groups[data] = signed
        return signed

    def _sent(self, message: M, unchanged: float = 0.5) -> M | None:
        """Return what arrives of `message`, changed or not; None if it is refused when it is decoded."""
        if self.chance.random() > unchanged:
            message = altered(message, self.chance, texts=NAMES, num_changes=self.chance.choice((1, 1, 3)))
        try:
            sent = type(message).from_bytes(message.to_bytes())
        except PeerViolation:
            return None
        # what is of another run or step does not get as far as the member's state
        return sent if (sent.run, sent.step) == (RUN, STEP) else None


_DRAWS: tuple[Callable[[RoundHistory], Event | None], ...] = (
    RoundHistory.sighted,
    RoundHistory.reported,
    RoundHistory.reported,
    RoundHistory.withdrew,
    RoundHistory.expired,
    RoundHistory.lost,
    RoundHistory.moved,
    RoundHistory.left_out,
    *(RoundHistory.grouped,) * 4,
    *(RoundHistory.reduced,) * 3,
    RoundHistory.reduce_failed,
    *(RoundHistory.voted,) * 10,
    RoundHistory.attempt_left,
    RoundHistory.convicted,
    RoundHistory.proven,
    RoundHistory.offered,
    RoundHistory.tick,
    RoundHistory.tick,
)


def check_bounded(state: RoundState) -> None:
    """Raises AssertionError if a member's memory of a round is not bounded by MAX_HEARD, its roster and its group."""
    most = MAX_HEARD + len(state.setup.roster)
    in_group = len(state.signed.group.members) if state.signed else 0
    assert len(state.known) <= MAX_HEARD
    assert state.attempts.named.keys() <= {*state.known, *state.setup.roster, state.setup.me}
    assert len(state.reports) <= most
    assert state.heard <= set(state.setup.roster)
    assert max(len(state.votes["prepare"]), len(state.votes["commit"])) <= most + in_group
    assert len(state.silent) <= most + in_group


def play_round(data: bytes) -> Mapping[str, int]:
    """Play the history that `data` draws. Returns how often what happened. Raises AssertionError, or what `step`
    raises, which is nothing."""
    history = RoundHistory(random.Random(data))
    history.play(NUM_EVENTS)
    return history.happened


TARGETS = (Target(name="history of a round", take=play_round),)
