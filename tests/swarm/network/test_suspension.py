"""A wall clock that went on while timers stood still."""

from __future__ import annotations

from swarm.network.suspension import SUSPENDED_S, SuspensionWatch


def test_machine_that_slept_is_told_once_and_a_busy_or_corrected_one_is_not() -> None:
    wall_s, timers_s = 1_750_000_000.0, 7.0
    watch = SuspensionWatch(lambda: wall_s, lambda: timers_s)
    assert not watch.was_suspended()
    wall_s, timers_s = wall_s + 3600, timers_s + 3600  # a loop that stood still slept no more than its timers
    assert not watch.was_suspended()
    wall_s += SUSPENDED_S / 2  # set by a program
    assert not watch.was_suspended()
    wall_s, timers_s = wall_s + 3600, timers_s + 0.5
    assert watch.was_suspended()
    assert not watch.was_suspended()
    wall_s -= 7200  # set back: no record of this node has expired
    assert not watch.was_suspended()
