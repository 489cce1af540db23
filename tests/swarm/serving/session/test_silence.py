"""When a client asks whether the servers of a session are there, and which of them it gives up."""

from __future__ import annotations

import math

import pytest
from support.toy_chain import ToyWorld
from swarm.serving.session.silence import ANSWER_S, MAX_ANSWER_S, QUIET_S, SilenceWatch
from swarm.serving.session.stage import Stage


@pytest.fixture
def stages() -> list[Stage]:
    world = ToyWorld(1, num_blocks=3, spans=[(0, 1), (1, 2), (2, 3)])
    return [world.new_stage(f"s{index}", index, index + 1) for index in range(3)]


def test_servers_are_asked_when_one_of_them_was_not_heard_of_for_a_while(stages: list[Stage]) -> None:
    watch = SilenceWatch()
    assert watch.due_s(stages) == math.inf
    watch.begin(10.0)
    for at_s in (10.2, 10.4):  # a prompt's rows still come from the first servers, and the last one has stopped
        watch.hear(stages[0], at_s)
        watch.hear(stages[1], at_s)
    assert watch.due_s(stages) == 10.0 + QUIET_S
    assert watch.due_s(stages[:2]) == 10.4 + QUIET_S
    assert watch.ask(stages, is_in_bulk=False).stages == tuple(stages)
    watch.hear(stages[0], 11.0)
    assert watch.due_s(stages) == math.inf, "one question at a time"
    watch.lost([], 11.5, is_in_bulk=False)
    assert watch.due_s(stages) == 11.5 + QUIET_S


def test_blocks_that_this_process_runs_are_not_waited_for(stages: list[Stage]) -> None:
    watch = SilenceWatch()
    stages[0].is_local = True
    watch.begin(10.0)
    watch.hear(stages[1], 10.3)
    watch.hear(stages[2], 10.4)
    assert watch.due_s(stages) == 10.3 + QUIET_S


def test_server_is_kept_that_was_heard_of_after_it_was_asked(stages: list[Stage]) -> None:
    watch = SilenceWatch()
    watch.ask(stages, is_in_bulk=False)
    watch.hear(stages[1], 1.0)
    assert watch.lost(stages[1:], 2.0, is_in_bulk=False) == stages[2:]


def test_later_answers_may_take_longer_when_servers_were_given_up(stages: list[Stage]) -> None:
    watch = SilenceWatch()
    found = []
    for _ in range(4):
        found.append(watch.ask(stages, is_in_bulk=False).timeout_s)
        watch.lost(stages[:1], 2.0, is_in_bulk=False)
    assert found == [ANSWER_S, 2 * ANSWER_S, MAX_ANSWER_S, MAX_ANSWER_S]


def test_servers_have_longer_to_answer_while_many_rows_are_under_way(stages: list[Stage]) -> None:
    watch = SilenceWatch()
    assert watch.ask(stages, is_in_bulk=True).timeout_s == MAX_ANSWER_S
    assert watch.lost(stages[:1], 2.0, is_in_bulk=True) == stages[:1]


def test_short_ping_that_may_wait_behind_rows_asked_for_meanwhile_gives_no_server_up(stages: list[Stage]) -> None:
    watch = SilenceWatch()
    watch.ask(stages, is_in_bulk=False)
    assert watch.lost(stages[:1], 2.0, is_in_bulk=True) == []
    watch.ask(stages, is_in_bulk=True)
    assert watch.lost(stages[:1], 9.0, is_in_bulk=False) == stages[:1]
