"""Checks the model of `test_round_model` over three attempts, in which a lock may be made in the first one and resumed
in the second one."""

from __future__ import annotations

import pytest
from support.round_model import Model, Rule, explore

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]


def test_one_liar_of_four_makes_no_two_certificates_in_three_attempts() -> None:
    found = explore(Model(rule=Rule(), num_attempts=3))
    print(f"\n{found.num_states:,} states, {found.num_certified:,} of them with a certificate, none with two")
    assert found.violation is None, found.violation


def test_four_honest_members_that_crash_make_no_two_certificates_in_two_attempts() -> None:
    found = explore(Model(rule=Rule(), lies=False))
    print(f"\n{found.num_states:,} states, {found.num_certified:,} of them with a certificate, none with two")
    assert found.violation is None, found.violation
