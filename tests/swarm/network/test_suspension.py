"""Detecting a suspended machine: the wall clock went on while timers did not."""

from __future__ import annotations

from swarm.network.suspension import SUSPENDED_S, SuspensionWatch


def test_suspension_is_reported_once_and_not_for_a_busy_machine_or_a_corrected_clock() -> None:
    wall_s, timers_s = 1_750_000_000.0, 7.0
    watch = SuspensionWatch(lambda: wall_s, lambda: timers_s)
    assert not watch.was_suspended()
    wall_s, timers_s = wall_s + 3600, timers_s + 3600  # a loop that stood still slept no longer than its timers
    assert not watch.was_suspended()
    wall_s += SUSPENDED_S / 2  # set by a program
    assert not watch.was_suspended()
    wall_s, timers_s = wall_s + 3600, timers_s + 0.5
    assert watch.was_suspended()
    assert not watch.was_suspended()
    wall_s -= 7200  # set back, with no expired record of this node
    assert not watch.was_suspended()
