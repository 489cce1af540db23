"""Tests every order of events in one step, to a bound: one liar of four makes no two certificates, whatever is lost.

`tests/chaos/test_chaos_round_model.py` goes one attempt further.
"""

from __future__ import annotations

import pytest
from support.round_model import Explored, Model, Rule, explore
from swarm.training.round.quorum import Succession

MAJORITY = Succession(min_group=2, majority_after_s=60.0)


def test_one_liar_of_four_makes_no_two_certificates_in_two_attempts() -> None:
    found = explore(Model(rule=Rule()))
    assert found.violation is None, found.violation
    assert (found.num_states, found.num_certified) == (7554, 2311), (
        "the model has changed: check whether the new bound is right"
    )


@pytest.mark.parametrize("succession", [Succession(min_group=2), MAJORITY], ids=["two thirds", "majority"])
def test_members_that_crash_and_do_not_lie_make_no_two_certificates(succession: Succession) -> None:
    found = explore(Model(rule=Rule(succession=succession), num_members=3, lies=False))
    assert found.violation is None, found.violation
    assert found.num_certified


def _two_certificates(found: Explored) -> bool:
    return found.violation is not None


def test_one_liar_of_four_makes_two_certificates_with_one_phase_and_unproven_reports() -> None:
    """This was the rule before there were locks."""
    assert _two_certificates(explore(Model(rule=Rule(phases=1))))


@pytest.mark.parametrize(
    "rule",
    [Rule(remembers=False), Rule(proves=False), Rule(succession=MAJORITY)],
    ids=["locks forgotten on restart", "groups that resume what they like", "a majority"],
)
def test_model_finds_two_certificates_without_any_single_part_of_the_rule(rule: Rule) -> None:
    assert _two_certificates(explore(Model(rule=rule)))


def test_locks_forgotten_on_restart_allow_two_certificates_without_liars() -> None:
    rule = Rule(remembers=False, succession=MAJORITY)
    assert _two_certificates(explore(Model(rule=rule, num_members=3, lies=False)))
