"""These tests say which drafts a server guesses, and when it guesses none."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
from swarm.serving.server.session_sampler import FIRST_DRAFTS, PAUSE_TOKENS, Drafter
from swarm_protocol.limits import MAX_DRAFT_TEXT_TOKENS, MAX_DRAFTS

PASS_S = 0.1


class Course:
    """The passes of one answer, which take PASS_S and `row_s` for each draft."""

    def __init__(self, text: Sequence[int], row_s: float = 0.0) -> None:
        self.drafter = Drafter()
        self.drafter.begin(np.array(text))
        self.now_s, self.row_s = 0.0, row_s

    def propose(self, most: int) -> tuple[int, ...]:
        """Begin a pass, and return its drafts."""
        drafts = self.drafter.guess(self.drafter.room(most))
        self.drafter.sends(drafts, self.now_s)
        return drafts

    def run(self, tokens: Sequence[int], most: int = MAX_DRAFTS) -> list[int]:
        """Draw these tokens, and return how many drafts each pass had."""
        left, counts = list(tokens), list[int]()
        while left:
            drafts = self.propose(most)
            counts.append(len(drafts))
            num_right = next((i for i, pair in enumerate(zip(drafts, left, strict=False)) if pair[0] != pair[1]), None)
            num_drawn = min(len(left), 1 + (len(drafts) if num_right is None else num_right))
            self.now_s += PASS_S + self.row_s * len(drafts)
            self.drafter.drew(left[:num_drawn], self.now_s)
            del left[:num_drawn]
        return counts


def test_drafts_are_what_followed_the_newest_tokens_last() -> None:
    course = Course([1, 2, 3, 9, 9, 1, 2, 3, 4, 5, 6, 7, 8, 0])
    assert course.run([1, 2, 3], most=0) == [0, 0, 0]
    assert course.propose(MAX_DRAFTS) == (4, 5, 6, 7)
    assert course.propose(2) == (4, 5)
    assert course.propose(0) == ()


def test_drafts_follow_the_place_where_most_of_the_newest_tokens_occurred() -> None:
    course = Course([5, 1, 2, 3, 40, 0, 6, 1, 2, 3, 50, 0, 3, 60, 0])
    course.run([5, 1, 2, 3], most=0)
    assert course.propose(1) == (40,)


def test_the_search_in_a_text_of_one_token_is_bounded() -> None:
    course = Course([1] * MAX_DRAFT_TEXT_TOKENS)
    course.run([1, 1], most=0)
    since = time.thread_time()
    assert course.propose(2) == (1, 1)
    assert time.thread_time() - since < 0.02


def test_drafts_go_on_with_a_text_that_repeats_itself() -> None:
    course = Course([7, 1, 2, 7])
    course.run([9, 1, 2, 1, 2, 1], most=0)
    assert course.propose(MAX_DRAFTS) == (2, 1, 2, 1)


@pytest.mark.parametrize("text", [[], [1], [1, 2, 3, 4, 5, 6]])
def test_nothing_is_guessed_for_a_text_that_repeats_nothing(text: list[int]) -> None:
    assert Course(text).run(range(10, 40)) == [0] * 30


def test_nothing_is_guessed_without_the_client_s_text() -> None:
    drafter = Drafter()
    for second in range(10):
        drafter.drew([1], float(second))
        assert drafter.room(MAX_DRAFTS) == 0
        assert drafter.guess(0) == ()
        drafter.sends((), float(second))


def test_right_drafts_become_more_up_to_the_bound() -> None:
    text = list(range(100))
    counts = [count for count in Course(text).run(text) if count]
    assert counts[:4] == [FIRST_DRAFTS, 2 * FIRST_DRAFTS, MAX_DRAFTS, MAX_DRAFTS]


def test_wrong_drafts_become_fewer_and_pause_where_they_cost_time() -> None:
    """After 1 another token comes each time, so that every guess is wrong."""
    tokens = [token for last in range(10, 210) for token in (1, last)]
    free, costly = Course([]), Course([], row_s=PASS_S)
    assert sum(free.run(tokens)) > 90, "what costs nothing goes on"
    counts = costly.run(tokens)
    assert max(counts) <= FIRST_DRAFTS
    assert costly.now_s <= PASS_S * len(tokens) * 1.1
    pauses = "".join("d" if count else "-" for count in counts).split("d")
    assert max(map(len, pauses)) >= PAUSE_TOKENS - 4


def test_drafts_that_were_not_sent_are_not_counted() -> None:
    course = Course([1, 2, 3, 4, 5, 1])
    course.run([2, 3])
    assert course.propose(MAX_DRAFTS)
    course.drafter.withdraw()
    assert course.drafter.drafts == ()
    course.drafter.drew([4], course.now_s + 100.0)
    assert course.propose(1) == (5,)


def test_drafts_that_a_grammar_forces_pause_where_they_cost_time_and_else_need_no_guess() -> None:
    course = Course([])
    course.run([1, 2])
    for _ in range(50):
        assert course.drafter.room(MAX_DRAFTS) == MAX_DRAFTS
        course.drafter.sends((5, 6, 7), course.now_s)
        course.now_s += PASS_S
        course.drafter.drew((5, 6, 7, 8), course.now_s)
    for _ in range(4):
        assert course.drafter.room(MAX_DRAFTS) == MAX_DRAFTS
        course.drafter.sends((5, 6, 7), course.now_s)
        course.now_s += 2 * PASS_S
        course.drafter.drew((9,), course.now_s)
    assert course.drafter.room(MAX_DRAFTS) == 0
