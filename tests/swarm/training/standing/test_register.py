"""Tests which proven members the register remembers and for how long, and what strangers can do to it."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm.training.round.quorum import Succession
from swarm.training.standing import standings as module
from swarm.training.standing.entrance import Probation
from swarm.training.standing.standings import Register, TrainerStandings, credits_after
from swarm_protocol.identity import Identity

PEERS = sorted(Identity(bytes([number]) * 32).peer_id for number in range(40))
MEMBERS = PEERS[:9]
FORGETFUL, MINDFUL = Probation(steps=4), Probation(steps=4, absence_steps=10)


def after(
    standings: TrainerStandings, here: Collection[str], contributors: Collection[str] | None = None
) -> TrainerStandings:
    """Return the standings after an outer step that leaves the trainers `here`, of which all contribute by default."""
    used = here if contributors is None else contributors
    return TrainerStandings(
        rule=standings.rule,
        left=dict(standings.after(here, used)),
        known=set(here),
        outer_step=standings.outer_step + 1,
        register=standings.register_after(here, used, num_steps=1),
    )


def after_steps(standings: TrainerStandings, num_steps: int, here: Collection[str]) -> TrainerStandings:
    for _ in range(num_steps):
        standings = after(standings, here)
    return standings


@pytest.mark.parametrize("num_away", [1, 2, 7, 10])
def test_member_counts_fully_when_it_returns_within_its_credits(num_away: int) -> None:
    standings = after_steps(TrainerStandings(rule=MINDFUL, known=MEMBERS), 20, MEMBERS)
    standings = after_steps(standings, num_away, MEMBERS[1:])
    assert standings.steps_left(MEMBERS[0]) == 0
    assert after(standings, MEMBERS).steps_left(MEMBERS[0]) == 0


def test_member_is_remembered_for_the_steps_that_it_contributed_to_up_to_the_runs_limit() -> None:
    begun = TrainerStandings(rule=MINDFUL, known=MEMBERS)
    for num_steps, num_away in ((3, 3), (10, 10), (30, 10)):
        standings = after_steps(after_steps(begun, num_steps, MEMBERS), num_away, MEMBERS[1:])
        assert standings.steps_left(MEMBERS[0]) == 0
        assert after(standings, MEMBERS[1:]).steps_left(MEMBERS[0]) == 4
    idle = after(after(begun, MEMBERS, MEMBERS[1:]), MEMBERS[1:])
    assert idle.steps_left(MEMBERS[0]) == 2, "a member that never contributed is not remembered"


def test_steps_away_use_up_credits_of_contributed_steps() -> None:
    """Otherwise a few machines could prove many keys one after the other, and then bring all of them at once."""
    standings = after_steps(TrainerStandings(rule=MINDFUL, known=MEMBERS), 10, MEMBERS)
    standings = after_steps(standings, 6, MEMBERS[1:])
    standings = after_steps(standings, 1, MEMBERS)
    assert standings.register.credits[MEMBERS[0]] == 10 - 6 + 1
    assert after_steps(standings, 5, MEMBERS[1:]).steps_left(MEMBERS[0]) == 0
    assert after_steps(standings, 6, MEMBERS[1:]).steps_left(MEMBERS[0]) == 4


def test_round_without_an_outer_step_changes_no_credits() -> None:
    standings = after_steps(TrainerStandings(rule=MINDFUL, known=MEMBERS), 3, MEMBERS)
    assert standings.register_after(MEMBERS[1:], (), num_steps=0).credits == standings.register.credits


def test_register_is_empty_in_a_run_that_remembers_nobody() -> None:
    for rule in (FORGETFUL, Probation(absence_steps=10)):
        standings = after_steps(TrainerStandings(rule=rule, known=MEMBERS), 3, MEMBERS)
        assert standings.register_after(MEMBERS, MEMBERS, num_steps=1) == Register()
    missed_one = after(after_steps(TrainerStandings(rule=FORGETFUL, known=MEMBERS), 9, MEMBERS), MEMBERS[1:])
    assert missed_one.steps_left(MEMBERS[0]) == 4
    assert Register().to_json() == {}, "digests of states without a register must not change"


def test_strangers_are_not_remembered_before_they_have_proven_themselves() -> None:
    standings = after_steps(TrainerStandings(rule=MINDFUL, known=MEMBERS), 5, MEMBERS)
    crowd = PEERS[9:]
    for num_steps in range(4):
        assert not standings.register.credits.keys() & set(crowd), num_steps
        standings = after(standings, PEERS)
    assert {standings.register.credits[peer] for peer in crowd} == {1}, (
        "the last step on probation earns the first credit"
    )


def test_newly_proven_members_displace_no_member_with_more_credits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_AWAY", 5)
    standings = after_steps(TrainerStandings(rule=MINDFUL, known=MEMBERS), 8, MEMBERS)
    standings = after_steps(standings, 4, PEERS)
    standings = after(standings, MEMBERS[:4])  # 5 old members and 31 newly proven ones leave
    away = standings.register.credits.keys() - set(MEMBERS[:4])
    assert away == set(MEMBERS[4:])


@given(
    before=st.dictionaries(st.sampled_from(PEERS), st.integers(0, 10)),
    proven=st.sets(st.sampled_from(PEERS[:20])),
    unproven=st.sets(st.sampled_from(PEERS[20:])),
    contributors=st.sets(st.sampled_from(PEERS)),
    num_steps=st.integers(0, 1),
)
def test_register_is_valid_and_holds_nobody_on_probation(
    before: dict[str, int], proven: set[str], unproven: set[str], contributors: set[str], num_steps: int
) -> None:
    credit = credits_after(
        before, most=10, proven=proven, unproven=unproven, contributors=contributors, num_steps=num_steps
    )
    Register(credits=credit)
    assert not credit.keys() & unproven
    assert credit.keys() <= before.keys() | (proven & contributors)
    assert all(value <= before.get(peer, 0) + 1 for peer, value in credit.items())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({PEERS[0]: -1}, "credits is -1, not"),
        ({PEERS[0]: 10_001}, "credits is 10001, not"),
        ({"nobody": 1}, "'nobody' is not an Ed25519 peer id"),
    ],
)
def test_register_refuses_credits_out_of_bounds(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Register(credits=wrong)


def _voters_under_a_ratchet(rule: Probation, num_steps: int) -> list[int]:
    """Return the number of deciding members after each step. A liar coordinates every third step, and then leaves out
    as many deciding members as it may. A member that was left out is ready again for the next step."""
    succession, numbers = Succession(min_group=2, majority_after_s=0.0), []
    standings, roster = after_steps(TrainerStandings(rule=rule, known=MEMBERS), 6, MEMBERS), set(MEMBERS)
    for step in range(num_steps):
        needed = succession.num_usual(tuple(sorted(roster)))
        group = set(sorted(roster)[:needed] if step % 3 == 0 else roster) | (set(MEMBERS) - roster)
        standings = after(standings, group, group & set(standings.known))
        roster = {peer for peer in group if standings.steps_left(peer) == 0}
        numbers.append(len(roster))
    return numbers


def test_liar_that_repeatedly_leaves_out_a_third_does_not_reduce_the_deciding_members() -> None:
    """Members that it left out decide again one step later, so that it never takes two thirds of two thirds."""
    assert min(_voters_under_a_ratchet(FORGETFUL, 30)) < 6, "without the register the attack must succeed"
    assert min(_voters_under_a_ratchet(MINDFUL, 300)) == 6
