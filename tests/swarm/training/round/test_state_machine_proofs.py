"""Tests what the round machine does with evidence, and with results that nobody audited."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.round_scripts import (
    COORDINATOR,
    FIRST,
    ME,
    OFFER,
    OTHERS,
    OUTCOME,
    Script,
    contribution,
    outcome,
    ready,
    run,
    setup,
    signed,
    vote_of,
)
from swarm.training.round import state_machine as machine
from swarm.training.round.round_events import (
    Announce,
    Ask,
    Convicted,
    GiveUp,
    Grouped,
    Offered,
    Recover,
    Reduce,
    ReduceFailed,
    Reply,
    Reported,
    ShowEvidence,
    Sign,
    Tick,
)

LIAR, HONEST = OTHERS
PROOF = Convicted(peer=LIAR, reason="it signed a wrong result")
UNAUDITED = ReduceFailed(attempt=0, reason="does not show", unreachable=(LIAR,), unaudited=True)


def test_attempt_ends_and_names_a_member_when_there_is_evidence_against_it() -> None:
    state, actions = run([(0.0, OFFER), (1.0, Grouped(signed=FIRST)), (2.0, PROOF)])
    assert [type(each) for each in actions][:3] == [ShowEvidence, Announce, GiveUp]
    assert state.attempt == 1
    assert state.faults.convicted == {LIAR}
    assert state.faults.accused[LIAR] == "it signed a wrong result"


def test_member_with_evidence_against_a_liar_does_not_vote_with_it() -> None:
    lie = outcome(FIRST, b"l")
    script: Script = [(0.0, OFFER), (1.0, Grouped(signed=FIRST)), (1.5, vote_of(LIAR, FIRST, lie)), (2.0, PROOF)]
    state, actions = run(script)
    assert not any(isinstance(each, Recover) for each in actions)
    state, actions = machine.step(state, vote_of(LIAR, signed(attempt=1), lie), 2.5)
    assert LIAR not in state.votes["prepare"]


def test_group_with_a_convicted_member_is_refused_and_its_members_are_shown_the_evidence() -> None:
    state, actions = run([(0.0, OFFER), (0.5, PROOF), (1.0, Grouped(signed=FIRST))])
    (show,) = [each for each in actions if isinstance(each, ShowEvidence)]
    assert set(show.peers) == {COORDINATOR, ME, HONEST}
    assert not any(isinstance(each, Reduce) for each in actions)
    assert COORDINATOR not in state.faults.failed, "the coordinator may not have had the evidence"


def test_convicted_member_is_refused_with_the_reason_and_not_waited_for() -> None:
    script: Script = [(0.0, PROOF), (0.1, Offered(contribution=contribution(COORDINATOR)))]
    script += [(0.2, Reported(peer=LIAR, ready=ready()))]
    state, actions = run(script, setup(COORDINATOR))
    (told,) = [each for each in actions if isinstance(each, Reply)]
    assert (told.peer, told.reply.kind) == (LIAR, "left_out")
    assert "evidence" in told.reply.reason
    state, _ = machine.step(state, Reported(peer=ME, ready=ready()), 0.3)
    state, actions = machine.step(state, Reported(peer=HONEST, ready=ready()), 0.4)
    (sign,) = [each for each in actions if isinstance(each, Sign)]
    assert LIAR not in sign.group.peer_ids


def test_convicted_coordinator_is_not_asked_again() -> None:
    state, actions = run([(0.0, OFFER), (1.0, Convicted(peer=COORDINATOR, reason="a lie"))])
    assert any(isinstance(each, GiveUp) for each in actions)
    state, actions = machine.step(state, Tick(), 2.0)
    assert [each.peer for each in actions if isinstance(each, Ask)] != [COORDINATOR]
    assert state.coordinator != COORDINATOR


def test_conviction_outlives_the_step() -> None:
    state = machine.begin(setup(), accused={}, convicted=frozenset({LIAR}))
    assert LIAR in state.faults.failed
    assert machine.step(state, PROOF, 1.0) == (state, [])


@pytest.mark.parametrize(("voters", "goes_on"), [((), False), ((LIAR,), False), ((LIAR, HONEST), True)])
def test_unaudited_part_gets_a_vote_only_when_more_than_a_third_have_voted_for_it(
    voters: tuple[str, ...], goes_on: bool
) -> None:
    script: Script = [(0.0, OFFER), (1.0, Grouped(signed=FIRST))]
    script += [(1.5, vote_of(peer, FIRST, OUTCOME)) for peer in voters]
    _, actions = run([*script, (2.0, UNAUDITED)])
    recovers = [each for each in actions if isinstance(each, Recover)]
    assert bool(recovers) == goes_on
    assert all(each.is_audited for each in recovers)
    assert any(isinstance(each, Announce) for each in actions) != goes_on


@pytest.mark.parametrize("on_probation", [(), (LIAR,), (LIAR, HONEST)])
def test_votes_of_members_on_probation_do_not_replace_an_audit(on_probation: tuple[str, ...]) -> None:
    group = FIRST.group
    members = tuple(replace(each, steps_left=3 if each.peer_id in on_probation else 0) for each in group.members)
    state, _ = run([(0.0, OFFER), (1.0, Grouped(signed=FIRST))])
    state = replace(state, signed=replace(FIRST, group=replace(group, members=members)))
    for peer in (LIAR, HONEST):
        state, _ = machine.step(state, vote_of(peer, FIRST, OUTCOME), 1.5)
    _, actions = machine.step(state, UNAUDITED, 2.0)
    assert any(isinstance(each, Recover) for each in actions) == (not on_probation)


def test_one_members_accusation_leaves_nobody_out_of_the_first_attempt() -> None:
    """A tie goes against neither side. Only evidence convicts."""
    script: Script = [(0.0, Offered(contribution=contribution(COORDINATOR)))]
    script += [(0.1, Reported(peer=LIAR, ready=ready(accused=(HONEST,))))]
    script += [(0.2, Reported(peer=HONEST, ready=ready())), (0.3, Reported(peer=ME, ready=ready()))]
    _, actions = run(script, setup(COORDINATOR))
    (sign,) = [each for each in actions if isinstance(each, Sign)]
    assert HONEST in sign.group.peer_ids
