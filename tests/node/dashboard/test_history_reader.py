from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from swarm_node.dashboard.history.reader import evenly


def test_preferred_positions_replace_those_before_them() -> None:
    """Every tenth of 100 steps was validated, and most of those shown are validated ones."""
    chosen = evenly([step % 10 == 9 for step in range(100)], 12)
    assert (len(chosen), chosen[0], chosen[-1]) == (12, 0, 99)
    assert [step for step in chosen if step % 10 == 9] == [9, 19, 29, 39, 49, 59, 69, 79, 89, 99]
    assert evenly([False] * 9, 3) == [0, 4, 8]


@given(st.lists(st.booleans(), max_size=200), st.integers(1, 50))
def test_few_of_many_are_in_order_with_both_ends(is_preferred: list[bool], limit: int) -> None:
    chosen = evenly(is_preferred, limit)
    assert len(chosen) == min(limit, len(is_preferred))
    assert chosen == sorted(set(chosen))
    if chosen:
        assert chosen[-1] == len(is_preferred) - 1
    if len(chosen) > 1:
        assert chosen[0] == 0
