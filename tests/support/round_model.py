"""A model of one step of a run, small enough to look at every order of events: what may be signed, and what follows.

Time, messages and coordinators are the adversary's: it delivers, loses and reorders as it likes, every coordinator
works for it, and so does one member, the liar, if there is one. The liar votes for everything, twice if that helps, and
reports any lock that can be proven, or none. What honest members sign can be neither forged nor taken back. So a state
holds only what each honest member has signed, and what it remembers:

    its attempt, whether it can still vote in it, its lock, and for each attempt: its report and its two votes

Three decisions are those of the program: which sets of members are enough (`Succession.is_enough`), which outcome a
group may resume (`lock_complaint`), and what a restarted member goes on with (`bound_by`). A `Rule` replaces them by
others, to show that the model finds what these prevent.

What the model leaves out only gives the adversary more: votes of one attempt for one outcome count together whatever
their group, and of two thirds of a group it knows nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise, permutations
from typing import NamedTuple

from support.round_scripts import PEERS, RUN, STEP, setup
from swarm.training.round.promise import Promise, bound_by
from swarm.training.round.quorum import Succession, lock_complaint
from swarm.training.round.round_state import RoundState
from swarm_protocol.commit_messages import Lock, LockClaim, Outcome
from swarm_protocol.training_messages import Contribution, Group, Ready

TWO_THIRDS = Succession(min_group=2)
LIAR = PEERS[0]
DIGEST = bytes(32)


class Held(NamedTuple):
    """Hold a lock, or none if `attempt` is -1."""

    attempt: int = -1
    value: int = -1


ABSENT = Held(-2)


class Signed(NamedTuple):
    """Hold what an honest member has signed in one attempt. A vote of -1 means that it has not voted, and a `claim` of
    ABSENT that it has not reported."""

    claim: Held = ABSENT
    prepare: int = -1
    commit: int = -1


class Honest(NamedTuple):
    attempt: int
    is_done: bool
    lock: Held
    signed: tuple[Signed, ...]


State = tuple[Honest, ...]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Define how members decide. `phases` is 1 for the rule before there were locks: one vote decides, and reports of
    earlier votes are unproven. `proves` is False if a group may resume any outcome. `remembers` is False if a restarted
    member has forgotten its lock."""

    succession: Succession = TWO_THIRDS
    phases: int = 2
    proves: bool = True
    remembers: bool = True


@dataclass(frozen=True, kw_only=True)
class Model:
    """Define one step of a run with `num_members` in `num_attempts`. With `lies`, the first member is a liar."""

    rule: Rule
    num_members: int = 4
    num_attempts: int = 2
    lies: bool = True

    @property
    def honest(self) -> tuple[str, ...]:
        return PEERS[int(self.lies) : self.num_members]

    @property
    def start(self) -> State:
        nothing = Honest(attempt=-1, is_done=True, lock=Held(), signed=(Signed(),) * self.num_attempts)
        return (nothing,) * len(self.honest)

    def steps(self, state: State) -> Iterator[State]:
        """Yield each state that may follow."""
        for index, member in enumerate(state):
            for after in self._moves(state, member, index):
                yield (*state[:index], after, *state[index + 1 :])

    def certified(self, state: State) -> set[int]:
        """Return the outcomes for which enough members have voted."""
        values = {each.commit for member in state for each in member.signed} - {-1}
        return {
            value
            for value in values
            for attempt in range(self.num_attempts)
            if self._is_enough(state, attempt, value, commit=True)
        }

    def _moves(self, state: State, member: Honest, index: int) -> Iterator[Honest]:
        for attempt in range(member.attempt + 1, self.num_attempts):
            report = member.signed[attempt]._replace(claim=member.lock)
            yield member._replace(attempt=attempt, is_done=False, signed=_with(member.signed, attempt, report))
        if member.attempt < 0:
            return
        attempt, here = member.attempt, member.signed[member.attempt]
        if not member.is_done and here.prepare < 0:
            for value in self._acceptable(state, index):
                commit = value if self.rule.phases == 1 else -1
                voted = here._replace(prepare=value, commit=commit)
                yield member._replace(signed=_with(member.signed, attempt, voted))
        if not member.is_done and here.prepare >= 0 > here.commit and self._is_enough(state, attempt, here.prepare):
            voted = here._replace(commit=here.prepare)
            lock = Held(attempt, here.prepare)
            yield member._replace(lock=lock, signed=_with(member.signed, attempt, voted))
        yield self._restarted(member)

    def _restarted(self, member: Honest) -> Honest:
        next_attempt, lock = after_restart(member.attempt, member.lock)
        assert next_attempt == member.attempt + 1
        return member._replace(is_done=True, lock=lock if self.rule.remembers else Held())

    def _is_enough(self, state: State, attempt: int, value: int, *, commit: bool = False) -> bool:
        voters = frozenset(
            peer
            for peer, member in zip(self.honest, state, strict=True)
            if (member.signed[attempt].commit if commit else member.signed[attempt].prepare) == value
        )
        return is_enough(self.rule.succession, self.num_members, voters | self._liars)

    @property
    def _liars(self) -> frozenset[str]:
        return frozenset({LIAR} if self.lies else ())

    def _acceptable(self, state: State, index: int) -> set[int]:
        """Return the outcomes of the groups in which the honest member `index` may vote in its present attempt."""
        me, attempt = self.honest[index], state[index].attempt
        new = {2 * attempt, 2 * attempt + 1}  # a coordinator that signs two groups
        if self.rule.phases == 1:
            # reports are not signed here: the coordinator chooses which outcome is resumed
            return new | {value for member in state for each in member.signed if (value := each.prepare) >= 0}
        provable = self._provable(state, attempt)
        reports = {
            peer: member.signed[attempt].claim
            for peer, member in zip(self.honest, state, strict=True)
            if member.signed[attempt].claim != ABSENT
        }
        found = set[int]()
        for claims in self._reported(me, reports, provable):
            for held in acceptable_locks(attempt, claims, provable, proves=self.rule.proves):
                found |= {held.value} if held.attempt >= 0 else new
        return found

    def _provable(self, state: State, before: int) -> tuple[Held, ...]:
        values = {each.prepare for member in state for each in member.signed} - {-1}
        return tuple(
            Held(attempt, value)
            for attempt in range(before)
            for value in sorted(values)
            if self._is_enough(state, attempt, value)
        )

    def _reported(self, me: str, reports: dict[str, Held], provable: tuple[Held, ...]) -> Iterator[tuple[Held, ...]]:
        """Yield what the reports of each possible group with `me` claim."""
        others = [peer for peer in reports if peer != me]
        for size in range(len(others) + 1):
            for chosen in combinations(others, size):
                members = frozenset({me, *chosen})
                claims = tuple(reports[peer] for peer in sorted(members))
                if is_enough(self.rule.succession, self.num_members, members):
                    yield claims
                if self.lies and is_enough(self.rule.succession, self.num_members, members | {LIAR}):
                    for lie in (Held(), *provable):
                        yield (*claims, lie)


class Explored(NamedTuple):
    """Hold the result of a search. The `num_states` states differ by more than the names of honest members and of an
    attempt's two new outcomes. `violation` is a state with two certificates, or None if none can be reached."""

    num_states: int
    violation: State | None
    num_certified: int


def explore(model: Model) -> Explored:
    """Visit every state that can be reached, breadth first, until two outcomes are certified."""
    seen = {canonical(model.start)}
    frontier, num_certified = list(seen), 0
    while frontier:
        following = []
        for state in frontier:
            for after in model.steps(state):
                name = canonical(after)
                if name in seen:
                    continue
                seen.add(name)
                certified = model.certified(name)
                num_certified += bool(certified)
                if len(certified) > 1:
                    return Explored(len(seen), name, num_certified)
                following.append(name)
        frontier = following
    return Explored(len(seen), None, num_certified)


def canonical(state: State) -> State:
    """Return the state that stands for all that are equal to this one but for the names of honest members. The two new
    outcomes of an attempt are named in the order in which the sorted members vote for them."""
    shapes = [_shape(member) for member in state]
    if len(set(shapes)) == len(shapes):  # one order only
        return _renamed(tuple(member for _, member in sorted(zip(shapes, state, strict=True))))
    return min(_renamed(order) for order in permutations(state) if _is_sorted([_shape(member) for member in order]))


@cache
def _shape(member: Honest) -> Honest:
    """Return the member without which of the two new outcomes of an attempt it has seen."""
    return _without_names(member)


def _is_sorted(shapes: list[Honest]) -> bool:
    return all(one <= other for one, other in pairwise(shapes))


def _renamed(state: State) -> State:
    names = dict[int, int]()
    for member in state:
        for attempt, each in enumerate(member.signed):
            if each.prepare >= 0 and each.prepare // 2 == attempt and each.prepare not in names:
                names[each.prepare] = 2 * attempt + (each.prepare ^ 1 in names)
    if all(old == new for old, new in names.items()):
        return state
    return tuple(_renamed_by(member, names) for member in state)


def _renamed_by(member: Honest, names: dict[int, int]) -> Honest:
    signed = tuple(
        Signed(_named(each.claim, names), names.get(each.prepare, each.prepare), names.get(each.commit, each.commit))
        for each in member.signed
    )
    return Honest(member.attempt, member.is_done, _named(member.lock, names), signed)


def _without_names(member: Honest) -> Honest:
    names = {value: value & ~1 for each in member.signed for value in (each.prepare, each.commit, each.claim.value)}
    names[member.lock.value] = member.lock.value & ~1
    names.pop(-1, None)
    return _renamed_by(member, names)


def _named(held: Held, names: dict[int, int]) -> Held:
    return Held(held.attempt, names.get(held.value, held.value))


def _with(signed: tuple[Signed, ...], attempt: int, entry: Signed) -> tuple[Signed, ...]:
    return (*signed[:attempt], entry, *signed[attempt + 1 :])


# --- the decisions of the program, cached by their arguments ----------------------------------------------------------


@cache
def is_enough(succession: Succession, num_members: int, voters: frozenset[str]) -> bool:
    return succession.is_enough(PEERS[:num_members], voters)


@cache
def acceptable_locks(
    attempt: int, claims: tuple[Held, ...], provable: tuple[Held, ...], *, proves: bool
) -> tuple[Held, ...]:
    """Return the locks with which members accept a group whose reports make these claims. An empty lock stands for a
    new outcome. A lock that cannot be proven is never accepted."""
    return tuple(
        held for held in (Held(), *provable) if not (proves and lock_complaint(group_with(attempt, claims, held)))
    )


def group_with(attempt: int, claims: tuple[Held, ...], held: Held) -> Group:
    lock = lock_of(held)
    members = tuple(
        Contribution(peer_id=peer, locked=each.claim if (each := lock_of(claim)) else None)
        for peer, claim in zip(PEERS, claims, strict=False)
    )
    return Group(
        run=RUN,
        step=STEP,
        attempt=attempt,
        state_digest=DIGEST,
        members=members,
        reduce_s=1.0,
        vote_s=1.0,
        lock=lock,
        origin=b"origin" if lock else b"",
    )


@cache
def lock_of(held: Held) -> Lock | None:
    if held.attempt < 0:
        return None
    outcome = Outcome(origin_digest=DIGEST, part_digests=(), state_digest=bytes([held.value]) * 32)
    return Lock(attempt=held.attempt, group_digest=DIGEST, outcome=outcome, votes=())


@cache
def after_restart(attempt: int, lock: Held) -> tuple[int, Held]:
    """Return the attempt and the lock with which a restarted member continues that had promised `attempt` and held
    `lock`."""
    held = lock_of(lock)
    report = Ready(
        run=RUN, step=STEP, attempt=attempt, state_digest=DIGEST, lock=held, origin=b"origin" if held else b""
    )
    state = bound_by(RoundState(setup=setup(), attempt=0), Promise(report=report))
    kept: LockClaim | None = state.lock.claim if state.lock else None
    return state.attempt, lock if kept == (held.claim if held else None) else Held()
