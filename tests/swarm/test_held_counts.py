from __future__ import annotations

import pytest
from swarm.held_counts import HeldCounts


def test_key_is_kept_only_while_it_holds_something() -> None:
    held = HeldCounts[str]()
    with held.holding("alice", 2), held.holding("bob"):
        held["alice"] += 3
        assert held == {"alice": 5, "bob": 1}
        assert held.total() == 6
        held["alice"] -= 3
    assert not held


def test_key_that_is_set_to_nothing_twice_is_not_kept() -> None:
    held = HeldCounts[str]()
    held["alice"] = 0
    assert held["alice"] == 0
    assert not held


def test_count_is_given_back_after_an_error() -> None:
    held = HeldCounts[str]()
    with pytest.raises(ValueError, match="lost"), held.holding("alice"):
        raise ValueError("lost")
    assert not held
