"""Tests whom a coordinator leaves out of a group because of accusations, and which member of a cut pair yields."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.round_scripts import contribution, outcome, ready, setup, vote_of
from swarm.training.round import state_machine as machine
from swarm.training.round.disputes import TURN_ATTEMPTS, accused_members, with_yield, yields
from swarm.training.round.group_members import form_group, own_report
from swarm.training.round.round_events import Grouped, LeftOut, Offered, Recover, Reduce, Sighted, Tick
from swarm.training.round.round_state import RoundSetup, RoundState, with_unreachable
from swarm.training.standing.entrance import Probation
from swarm.training.standing.standings import TrainerStandings
from swarm_protocol.identity import Identity
from swarm_protocol.training_messages import Ready, SignedGroup

NINE = tuple(sorted(Identity(bytes([number]) * 32).peer_id for number in range(9)))
NUM_ATTEMPTS = 3 * TURN_ATTEMPTS


def setup_of(me: str, state_number: int = 0) -> RoundSetup:
    return setup(me, roster=NINE, leased=NINE, max_group=9, state_digest=bytes([state_number]) * 32)


def left_out(
    accusations: dict[str, tuple[str, ...]], attempt: int, *, idle: tuple[str, ...] = (), state_number: int = 0
) -> set[str]:
    """Return whom the last of NINE leaves out of its group. The `idle` report no tokens."""
    return accused_members(setup_of(NINE[-1], state_number), attempt, reports(accusations, attempt, idle))


def reports(accusations: dict[str, tuple[str, ...]], attempt: int, idle: tuple[str, ...] = ()) -> dict[str, Ready]:
    nothing: dict[str, object] = {"num_tokens": 0, "num_samples": 0, "loss": 0.0}
    return {
        peer: ready(attempt, accused=accusations.get(peer, ()), **(nothing if peer in idle else {})) for peer in NINE
    }


def waiting(me: str, unreachable: tuple[str, ...], attempt: int = 1, state_number: int = 0) -> RoundState:
    """Return the state of `me`, which waits for the group of `attempt`."""
    state = machine.begin(replace(setup_of(me, state_number)), accused={})
    state = with_unreachable(replace(state, attempt=attempt, coordinator=NINE[-1]), unreachable)
    return machine.step(state, Offered(contribution=contribution(me)), 0.0)[0]


def test_liar_that_refuses_several_members_is_left_out_and_none_of_them() -> None:
    liar, *honest = NINE
    for num_refused in range(2, 9):
        refused = tuple(honest[:num_refused])
        for attempt in range(1, NUM_ATTEMPTS):
            assert left_out({liar: refused, **dict.fromkeys(refused, (liar,))}, attempt) == {liar}


def test_liar_that_refuses_a_second_member_after_one_has_yielded_to_it_is_left_out() -> None:
    liar, yielded, refused = NINE[:3]
    accusations = {liar: (yielded, refused), yielded: (liar,), refused: (liar,)}
    for attempt in range(1, NUM_ATTEMPTS):
        assert left_out(accusations, attempt, idle=(yielded,)) == {liar}


def test_cut_pair_leaves_out_the_same_member_or_none_in_a_turn_and_each_over_time() -> None:
    a, b = NINE[:2]
    drawn = set[str]()
    for state_number in range(12):
        outs = [left_out({a: (b,), b: (a,)}, number, state_number=state_number) for number in range(1, TURN_ATTEMPTS)]
        named = set[str]().union(*outs)
        assert len(named) <= 1
        drawn |= named
    assert drawn == {a, b}


def test_of_two_members_that_accuse_each_other_exactly_one_yields() -> None:
    a, b = NINE[:2]
    for state_number in range(12):
        of_a, of_b = waiting(a, (b,), state_number=state_number), waiting(b, (a,), state_number=state_number)
        assert (with_yield(of_a) != of_a) != (with_yield(of_b) != of_b)


def test_member_that_accuses_nobody_does_not_yield_when_it_is_left_out() -> None:
    state = waiting(NINE[0], ())
    assert with_yield(state) == state


def yielder() -> tuple[str, str]:
    """Return two members, of which the first yields to the second at the first turn."""
    a, b = NINE[2], NINE[6]
    state = waiting(a, (b,))
    return (a, b) if with_yield(state) != state else (b, a)


def test_member_that_yields_reports_the_same_in_one_attempt_however_often_it_is_left_out() -> None:
    """Two reports to one attempt would convict it."""
    me, other = yielder()
    state = waiting(me, (other,))
    for attempt in range(1, NUM_ATTEMPTS):
        state = replace(state, attempt=attempt, phase="forming", coordinator=NINE[-1])
        report = own_report(state)
        assert attempt == 1 or attempt >= TURN_ATTEMPTS or not report.num_tokens
        for now in (10.0 * attempt, 10.0 * attempt + 5.0):
            state, _ = machine.step(state, LeftOut(attempt=attempt, reason="accused"), now)
            assert state.phase == "left_out"
            state, _ = machine.step(state, Tick(), now + 2.0)
            assert own_report(replace(state, attempt=attempt)) == report
            state = replace(state, attempt=attempt, phase="forming", coordinator=NINE[-1])


def test_member_that_reaches_the_other_one_again_contributes_in_the_next_attempt() -> None:
    """A liar could otherwise refuse one member after the other, and have all of them yield."""
    me, other = yielder()
    state = waiting(me, (other,))
    for event in (LeftOut(attempt=1, reason="accused"), Sighted(peer=NINE[0], attempt=2)):
        state, _ = machine.step(state, event, 1.0)
    assert (state.attempt, own_report(state).num_tokens) == (2, 0)
    state, _ = machine.step(state, Sighted(peer=other, attempt=2), 2.0)
    assert own_report(state).num_tokens == 0
    state, _ = machine.step(state, Sighted(peer=NINE[0], attempt=3), 60.0)
    assert state.attempt == 3
    assert own_report(state).num_tokens


def test_member_that_has_yielded_is_in_the_group_unless_a_neighbour_contributes_nothing() -> None:
    a, b, c, d = NINE[0], NINE[2], NINE[3], NINE[5]
    pairs = {a: (NINE[6],), NINE[6]: (a,), b: (NINE[7],), NINE[7]: (b,)}
    in_group = [not {a, b} & left_out(pairs, number, idle=(a, b)) for number in range(1, NUM_ATTEMPTS)]
    assert any(in_group)
    near, num_decided = {b: (d,), d: (b,), c: (NINE[7],), NINE[7]: (c,)}, 0
    for state_number in range(12):
        for attempt in range(1, TURN_ATTEMPTS):
            if {b, c} <= left_out(near, attempt, state_number=state_number):
                num_decided += 1
                assert left_out(near, attempt, idle=(b, c), state_number=state_number) == {c}
    assert num_decided


def test_member_that_has_yielded_to_one_that_contributes_nothing_is_not_in_the_group() -> None:
    a, b = yielder()
    for attempt in range(1, TURN_ATTEMPTS):
        assert left_out({a: (b,), b: (a,)}, attempt, idle=(a, b)) in ({a}, set())


def test_idle_member_that_accuses_two_others_is_not_in_the_group() -> None:
    liar, a, b = NINE[:3]
    for attempt in range(1, NUM_ATTEMPTS):
        assert left_out({liar: (a, b), a: (liar,), b: (liar,)}, attempt, idle=(liar,)) == {liar}


@pytest.mark.parametrize(("num_deciding", "sits_out"), [(2, False), (3, True)])
def test_member_that_has_yielded_sits_out_only_if_enough_others_decide(num_deciding: int, sits_out: bool) -> None:
    """The votes of members on probation do not show that an honest member has audited."""
    proven, fresh = NINE[:num_deciding], NINE[num_deciding]
    me, other = proven[:2]
    standings = TrainerStandings(rule=Probation(steps=4), known=NINE, left={fresh: 3}, outer_step=4)
    start = setup(me, roster=proven, leased=NINE, standings=standings)
    state = replace(machine.begin(start, accused={}), attempt=1, coordinator=other, yields_after=0)
    state, _ = machine.step(with_unreachable(state, (other,)), Offered(contribution=contribution(me)), 0.0)
    mine = replace(own_report(state), accused=())
    assert mine.num_tokens == 0
    ready_peers = {me: mine, **dict.fromkeys(proven[1:], ready(1)), fresh: ready(1, steps_left=3)}
    group, _ = form_group(replace(start, me=other), 1, ready_peers)
    assert group.deciding == proven
    assert group.on_probation == (fresh,)
    signed = SignedGroup(group=group, signer=other, data=b"group", digest=bytes(32))
    state, actions = machine.step(state, Grouped(signed=signed), 1.0)
    assert actions == [Reduce(signed=signed, sits_out=sits_out)]


@pytest.mark.parametrize("num_votes", [3, 4])
def test_member_that_sits_out_votes_once_more_than_a_third_have_voted(num_votes: int) -> None:
    me, other = yielder()
    state = replace(waiting(me, (other,)), yields_after=0)
    assert yields(state)
    mine = own_report(state)
    group, _ = form_group(setup_of(NINE[-1]), 1, {**reports({}, 1), me: replace(mine, accused=())})
    signed = SignedGroup(group=group, signer=NINE[-1], data=b"group", digest=bytes(32))
    state, _ = machine.step(state, Grouped(signed=signed), 1.0)
    assert state.sits_out
    recovers = []
    for peer in [each for each in NINE if each not in {me, other}][:num_votes]:
        state, actions = machine.step(state, vote_of(peer, signed, outcome(signed)), 2.0)
        recovers += [action for action in actions if isinstance(action, Recover)]
    assert [each.is_audited for each in recovers] == ([True] if num_votes > 3 else [])


def test_member_without_tokens_takes_part_in_a_group_of_two() -> None:
    """Its part has no backup there."""
    me, other = pair = NINE[:2]
    state = with_unreachable(machine.begin(setup(me, roster=pair, leased=pair), accused={}), (other,))
    state, _ = machine.step(replace(state, attempt=1, coordinator=other), Offered(contribution=None), 0.0)
    assert other in state.faults.failed
    group, _ = form_group(
        setup(other, roster=pair, leased=pair), 1, {me: replace(own_report(state), accused=()), other: ready(1)}
    )
    signed = SignedGroup(group=group, signer=other, data=b"group", digest=bytes(32))
    state, actions = machine.step(state, Grouped(signed=signed), 1.0)
    assert not state.sits_out
    assert actions == [Reduce(signed=signed, sits_out=False)]


def test_member_without_tokens_that_has_not_yielded_takes_part_in_the_reduction() -> None:
    """A contributor could otherwise take a part from both its owner and the backup, if neither has tokens."""
    me, other = yielder()
    state = with_unreachable(machine.begin(setup_of(me), accused={}), (other,))
    state, _ = machine.step(replace(state, attempt=1, coordinator=NINE[-1]), Offered(contribution=None), 0.0)
    mine = replace(own_report(state), accused=())
    group, _ = form_group(setup_of(NINE[-1]), 1, {**reports({}, 1), me: mine})
    signed = SignedGroup(group=group, signer=NINE[-1], data=b"group", digest=bytes(32))
    state, _ = machine.step(state, Grouped(signed=signed), 1.0)
    assert state.phase == "reducing"
    assert not state.sits_out


def test_member_that_has_yielded_to_the_coordinator_is_not_in_its_group() -> None:
    me, coordinator = NINE[0], NINE[-1]
    for attempt in range(1, NUM_ATTEMPTS):
        assert left_out({me: (coordinator,), coordinator: (me,)}, attempt, idle=(me,)) == {me}
