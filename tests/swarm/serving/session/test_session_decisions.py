"""The client's decisions against a toy chain: any history of failures ends with the right answers or a typed error."""

from __future__ import annotations

import math
import random
from collections import Counter
from contextlib import suppress
from functools import partial

import pytest
from support.toy_chain import KINDS, ROW_BYTES, Request, ToyServer, ToyWorld, answers, any_world, outputs_of, token_row
from swarm.serving.session.actions import Action, Answer, Blame, Cause, Feed, Find, OpenSeat, Relink
from swarm.serving.session.chain import RELINK_S, WINDOW_CHUNKS, Limits
from swarm.serving.session.hop import FLOOR_S, Hop, Ran
from swarm.serving.session.replay_buffer import Ledger
from swarm.serving.session.session_decisions import LEAVE_RETRY_S, MAX_FAILURES, OPEN_S, Course
from swarm_protocol.errors import PeerUnreachable, PeerViolation, SessionError

THIRDS = [(0, 2), (2, 4), (4, 6)]


def test_course_every_history_of_failures_ends_with_the_undisturbed_answers() -> None:
    struck: Counter[str] = Counter()
    num_failed = 0
    for seed in range(400):
        world, request = any_world(seed)
        with suppress(SessionError):
            for answer, expected in answers(world, request):
                assert answer == expected, f"seed {seed}"
        num_failed += world.error is not None
        struck += world.struck
    assert set(struck) == {*KINDS, "push lost", "hand-over"}
    assert num_failed < 20, "these worlds have spares: few of them are beyond help"


def test_course_no_server_keeps_a_token_that_died_with_the_one_that_drew_it() -> None:
    """Where another server would draw another one: a tie, or a sum in another order."""
    num_looped = num_anew = num_failed = 0
    for seed in range(400):
        draw = random.Random(seed)
        spans = draw.choice([[(0, 1), (1, 2), (2, 3)], [(0, 2), (2, 3)], [(0, 1), (1, 3)], [(0, 3)]])
        world = ToyWorld(seed, num_blocks=3, spans=spans * 6)
        world.draws_vary, world.max_delay_s = True, draw.choice([0.02, 0.2, 1.0])
        now_s = 0.0
        for _ in range(8):
            now_s += draw.choice([0.0, 0.01, 0.1, 0.5, 2.0])
            what = draw.choice(["kill", "kill", "lane", "evict", "spoil", "leave", "stall", "late", "late"])
            world.later(now_s, partial(strike_any_hop, world, what))
        try:
            assert len(world.ask([1, 2, 3], "token", ahead=40)) == 41
            world.check_draws([1, 2, 3])
            world.check_states()
            world.wait(1.0)
            world.check_states()
        except SessionError:
            num_failed += 1
        assert not world.judged, f"seed {seed}: the innocent are blamed"
        num_looped += world.num_looped
        num_anew += world.num_anew
    assert num_looped > 400 * 20
    assert num_anew > 20
    assert num_failed < 40


def strike_any_hop(world: ToyWorld, what: str) -> None:
    hops = world.course.hops
    if hops:
        index = world.random.choice([0, len(hops) - 1, world.random.randrange(len(hops))])
        world.strike(what, served_by(world, index))


def toy(spans: list[tuple[int, int]] = THIRDS * 2, **options: int) -> ToyWorld:
    return ToyWorld(1, num_blocks=6, spans=spans, **options)


def draws_after(prompt: list[int], num_tokens: int) -> list[int]:
    known = list(prompt)
    for _ in range(num_tokens):
        known += outputs_of(known, 6)[-1:]
    return known[len(prompt) :]


def served_by(world: ToyWorld, index: int) -> ToyServer:
    return world.servers[world.course.hops[index].peer_id]


def tokens(world: ToyWorld, num_prompt: int = 20, num_tokens: int = 6) -> list[int]:
    """Answers of a greedy generation, each of them checked."""
    request = Request(prompt=list(range(num_prompt)), wants=[("token", 0, 0.0)] * num_tokens)
    found = []
    for answer, expected in answers(world, request):
        assert answer == expected
        found += answer
    return found


def test_course_undisturbed_runs_every_row_once_on_every_hop() -> None:
    world = toy()
    tokens(world)
    assert world.num_rows_run == 3 * 25
    assert world.repaired == [("", 0)]


def test_course_a_prompt_is_under_way_in_no_more_than_a_window_of_chunks() -> None:
    world = toy(chunk=2)
    fed: list[int] = []
    carry_out = world.carry_out

    def watch(actions: list) -> None:  # type: ignore[type-arg]
        for action in actions:
            if isinstance(action, Feed):
                fed.append(action.end - min(hop.done for hop in world.course.hops))
        carry_out(actions)

    world.carry_out = watch  # type: ignore[method-assign]
    tokens(world, 60, 2)
    assert max(fed) == 2 * WINDOW_CHUNKS


@pytest.mark.parametrize("index", [0, 1, 2])
def test_course_killed_hop_is_replayed_alone_and_at_once(index: int) -> None:
    world = toy()
    first = world.ask(list(range(20)), "token")
    num_rows = world.num_rows_run
    world.strike("kill", served_by(world, index))
    since_s = world.now_s
    assert world.ask(first, "token") == outputs_of([*range(20), *first], 6)[-1:]
    assert [num_tokens for _, num_tokens in world.repaired[1:]] == [20]
    # the replay, the new token on all three, and perhaps the row whose copy had not come yet
    assert world.num_rows_run - num_rows <= 20 + 3
    assert world.now_s - since_s < 0.5


def test_course_copies_that_were_lost_with_their_server_are_computed_again() -> None:
    """The last hop has run what the ledger before it has not: the copy died with the hop that should have sent it."""
    world = toy()
    expected = outputs_of(list(range(20)), 6)[-1:]
    middle = []

    def kill_when_pushed() -> None:
        if not middle and len(world.course.hops) == 3:
            last = served_by(world, 2)
            if any(seat.length for seat in last.seats.values()):
                middle.append(world.strike("kill", served_by(world, 1)))
        world.later(0.0005, kill_when_pushed)

    world.later(0.0, kill_when_pushed)
    assert world.ask(list(range(20)), "token") == expected
    assert middle
    assert world.now_s < 1, "nothing was waited for in vain"
    assert world.ask(expected, "token") == outputs_of([*range(20), *expected], 6)[-1:]


def test_course_stalled_hop_is_fed_once_more_and_then_given_up() -> None:
    world = toy()
    first = world.ask(list(range(20)), "token")
    served_by(world, 1).stalled_until_s = 1e9
    since_s = world.now_s
    world.ask(first, "token")
    assert FLOOR_S < world.now_s - since_s < FLOOR_S + 1
    assert len(world.repaired) == 2


def test_course_link_that_is_cut_is_gone_around_and_tried_again_later() -> None:
    world = toy()
    first = world.ask(list(range(20)), "token")
    upper, lower = world.course.hops[:2]
    world.cut = {(upper.peer_id, lower.peer_id)}
    second = world.ask(first, "token")
    pause_s = world.now_s
    third = world.ask(second, "token")
    assert world.now_s - pause_s < 0.2, "only the first token finds out the slow way"
    assert world.course.hops[:2] == [upper, lower]
    assert upper.told.next_sequence_id == b""
    world.cut = set()
    world.wait(60)
    world.ask(third, "token")
    assert upper.told.next_sequence_id == lower.sequence_id


def test_course_leaving_server_hands_its_seat_over_and_nothing_is_run_again() -> None:
    world = toy()
    world.random.random = lambda: 0.5  # type: ignore[method-assign]
    first = world.ask(list(range(20)), "token")
    world.strike("leave", served_by(world, 1))
    num_rows = world.num_rows_run
    world.wait(0.5)
    assert world.ask(first, "token") == outputs_of([*range(20), *first], 6)[-1:]
    assert world.repaired[1][1] == 0
    assert world.num_rows_run == num_rows + 3


def test_course_hand_over_that_fails_is_a_replay() -> None:
    world = toy()
    world.random.random = lambda: 0.1  # type: ignore[method-assign]
    first = world.ask(list(range(20)), "token")
    world.strike("leave", served_by(world, 1))
    world.wait(0.5)
    assert world.struck["hand-over"] == 1
    assert world.ask(first, "token") == outputs_of([*range(20), *first], 6)[-1:]
    assert world.repaired[1][1] == 20


@pytest.mark.parametrize("ahead", [0, 9])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_course_leaving_server_goes_on_until_its_seat_is_handed_over(index: int, ahead: int) -> None:
    world = toy()
    world.random.random = lambda: 0.5  # type: ignore[method-assign]
    last = world.ask(list(range(20)), "token")
    world.strike("leave", served_by(world, index))
    answer = []
    while len(answer) < 30:
        answer += world.ask(last, "token", ahead=ahead)
        last = answer[-1:]
    assert answer == draws_after(list(range(20)), 31)[1:]
    assert len(world.repaired) == 2
    # what it ran after it had been copied
    assert world.num_rows_run <= 3 * 50 + 2
    assert world.repaired[1][1] <= 2


@pytest.mark.parametrize("which", ["old", "new"])
def test_course_death_during_a_hand_over_is_a_replay(which: str) -> None:
    world = toy(THIRDS * 3)
    first = world.ask(list(range(20)), "token")
    old = served_by(world, 1)
    world.strike("leave", old)
    world.run_until(lambda: any(repair.is_handing and repair.is_opening for repair in world.course.repairs))
    new = world.servers[world.course.repairs[0].fresh[0].peer_id]
    world.strike("kill", old if which == "old" else new)
    assert world.ask(first, "token") == outputs_of([*range(20), *first], 6)[-1:]
    assert world.now_s < 1


def test_course_leaving_server_without_a_spare_is_kept_and_looked_around_for_now_and_then() -> None:
    world = toy(THIRDS)
    last = world.ask(list(range(20)), "token")
    leaver = served_by(world, 1)
    leaver.is_leaving = True
    for sequence_id in leaver.seats:
        world.to_client(leaver, sequence_id, world.told_to_leave)
    looks = []
    look = world.look
    world.look = lambda *arguments: (looks.append(world.now_s), look(*arguments))  # type: ignore[assignment]
    since_s = world.now_s
    for _ in range(100):
        last = world.ask(last, "token")
    assert 1 <= len(looks) <= 2 + (world.now_s - since_s) / LEAVE_RETRY_S


def test_course_prefix_that_all_servers_hold_but_the_ledgers_do_not_is_computed() -> None:
    world = toy(THIRDS)
    tokens(world, 40, 1)
    again = ToyWorld(2, num_blocks=6, spans=THIRDS)
    for server, known in zip(again.servers.values(), world.servers.values(), strict=True):
        server.pages = known.pages
    tokens(again, 40, 1)
    assert again.num_rows_run == 3 * 40


def test_course_prefix_that_is_known_on_both_sides_is_not_run_again() -> None:
    world = toy(THIRDS)
    tokens(world, 40, 1)
    again = ToyWorld(2, num_blocks=6, spans=THIRDS)
    for server, known in zip(again.servers.values(), world.servers.values(), strict=True):
        server.pages = known.pages

    def filled(block: int) -> Ledger:
        ledger = Ledger(ROW_BYTES)
        ledger.append(world.course.ledgers[block].rows(0, 32))
        return ledger

    again.course._chain._new_ledger = filled
    tokens(again, 40, 1)
    assert again.num_rows_run == 3 * 8


# --- single decisions -----------------------------------------------------------------------------------------------


def opened(num_blocks: int = 2, spans: tuple[tuple[int, int], ...] = ((0, 1), (1, 2))) -> tuple[Course, ToyWorld]:
    """A course that has asked about four tokens, with all hops open and the tokens on their way."""
    world = ToyWorld(3, num_blocks=num_blocks, spans=list(spans))
    course = Course(num_blocks, lambda block: Ledger(ROW_BYTES), Limits(max_step_tokens=8))
    (find,) = course.ask(b"".join(map(token_row, range(4))), "token", 0.0)
    assert isinstance(find, Find)
    fresh = [world.new_hop(f"s{i}", start, end) for i, (start, end) in enumerate(spans)]
    assert [type(action) for action in course.found(find.repair, fresh, 0.0)] == [OpenSeat] * len(spans)
    for hop in fresh:
        course.ready(hop, 0, 8, 0.0)
    return course, world


def test_ran_positions_that_cannot_be_are_violations() -> None:
    course, _ = opened()
    with pytest.raises(PeerViolation, match="ran 5 positions, of 4"):
        course.ran(course.hops[0], Ran(position=5, rows=bytes(5 * ROW_BYTES)), 1.0)
    course.ran(course.hops[0], Ran(position=4, rows=bytes(4 * ROW_BYTES)), 1.0)
    with pytest.raises(PeerViolation, match="of 4 after 4"):
        course.ran(course.hops[0], Ran(position=3, rows=bytes(3 * ROW_BYTES)), 1.0)


def test_ran_without_the_rows_or_the_output_asked_for_is_a_violation() -> None:
    course, _ = opened()
    with pytest.raises(PeerViolation, match="left out"):
        course.ran(course.hops[0], Ran(position=4, rows=bytes(3 * ROW_BYTES)), 1.0)
    with pytest.raises(PeerViolation, match="left out"):
        course.ran(course.hops[1], Ran(position=4), 1.0)


def ring(ahead: int = 8) -> Course:
    """Three hops, opened, with a question of four tokens under way."""
    world = ToyWorld(3, num_blocks=3, spans=[(0, 1), (1, 2), (2, 3)])
    course = Course(3, lambda block: Ledger(ROW_BYTES), Limits(max_step_tokens=8))
    (find,) = course.ask(b"".join(map(token_row, range(4))), "token", 0.0, ahead=ahead)
    assert isinstance(find, Find)
    fresh = [world.new_hop(f"s{i}", i, i + 1) for i in range(3)]
    course.found(find.repair, fresh, 0.0)
    for hop in fresh:
        course.ready(hop, 0, 8, 0.0)
    return course


def test_ran_ahead_of_what_the_client_knows_is_kept_until_it_does() -> None:
    course = ring()
    first, _, last = course.hops
    assert (last.told.next_sequence_id, first.told.previous_sequence_id) == (first.sequence_id, last.sequence_id)
    course.ran(first, Ran(position=4, rows=bytes(4 * ROW_BYTES)), 1.0)
    course.ran(first, Ran(position=6, rows=b"c" * 2 * ROW_BYTES), 1.0)
    assert (first.done, first.reported, course.ledgers[1].length) == (4, 6, 4)
    assert course.ran(last, Ran(position=4, num_outputs=1, looped=True), 1.0) == [Answer(0, is_last=True, goes_on=True)]
    assert course.follow(token_row(7), 1.0) == [], "nobody is fed"
    assert (first.done, course.ledgers[1].length) == (5, 5)
    course.ran(last, Ran(position=5, num_outputs=1, looped=True), 1.0)
    course.follow(token_row(8), 1.0)
    assert (first.done, course.ledgers[1].rows(4, 6)) == (6, b"c" * 2 * ROW_BYTES)


def test_ran_further_ahead_than_the_client_allowed_is_a_violation() -> None:
    course = ring(ahead=2)
    first, middle, last = course.hops
    course.ran(first, Ran(position=6, rows=bytes(6 * ROW_BYTES)), 1.0)
    with pytest.raises(PeerViolation, match="ran 7 positions"):
        course.ran(first, Ran(position=7, rows=bytes(ROW_BYTES)), 1.0)
    with pytest.raises(PeerViolation, match="left out"):
        course.ran(middle, Ran(position=6, rows=bytes(ROW_BYTES)), 1.0)
    with pytest.raises(PeerViolation, match="ran 5 positions"):
        course.ran(last, Ran(position=5, num_outputs=1), 1.0)


def test_ran_ahead_that_is_told_without_end_takes_no_memory() -> None:
    course = ring()
    first = course.hops[0]
    course.ran(first, Ran(position=6, rows=bytes(6 * ROW_BYTES)), 1.0)
    for _ in range(1000):
        course.ran(first, Ran(position=6, push_failed=True), 1.0)
    assert len(first.early) == 1
    assert first.early[0].push_failed


def test_linked_that_nobody_asked_for_is_a_violation() -> None:
    course = ring()
    with pytest.raises(PeerViolation, match="told of its neighbours 0 times, not 1"):
        course.linked(course.hops[0], 1, 4, 1.0)


def test_lost_last_hop_holds_up_the_next_token_until_nobody_has_another() -> None:
    course = ring()
    first, middle, last = course.hops
    for hop in (first, middle):
        course.ran(hop, Ran(position=4, rows=bytes(4 * ROW_BYTES)), 1.0)
    actions = course.lost(last, PeerUnreachable("gone"), Cause.GONE, 1.0)
    assert {action.hop for action in actions if isinstance(action, Relink)} == {first, middle}
    course.linked(first, 1, 4, 1.0)
    assert course.next_s() == pytest.approx(1.0 + FLOOR_S, abs=0.1)
    assert course.tick(course.next_s()), "whoever does not answer is replaced"
    assert course.hops == [first]


def spare(course: Course, actions: list[Action], now_s: float) -> Hop:
    """A hop in the place of the one that was lost."""
    (repair,) = [action.repair for action in actions if isinstance(action, Find)]
    hop = ToyWorld(4, num_blocks=3, spans=[]).new_hop(f"spare {now_s}", repair.start, repair.end)
    course.found(repair, [hop], now_s)
    course.ready(hop, 0, 8, now_s)
    return hop


def in_doubt() -> tuple[Course, Hop, Hop, Hop]:
    """The last hop of a ring was lost, and others have yet to say what they got; its place is taken."""
    course = ring()
    first, middle, last = course.hops
    for hop in (first, middle):
        course.ran(hop, Ran(position=4, rows=bytes(4 * ROW_BYTES)), 1.0)
    new = spare(course, course.lost(last, PeerUnreachable("gone"), Cause.GONE, 1.0), 1.1)
    return course, first, middle, new


def test_token_that_died_is_not_copied_even_where_its_place_is_taken() -> None:
    course, first, _, new = in_doubt()
    course.ran(new, Ran(position=4, num_outputs=1), 2.0)
    course.follow(token_row(7), 2.0)
    course.ran(first, Ran(position=5, rows=b"T" * ROW_BYTES), 2.1)
    assert not course.hops, "all begin anew"
    assert course.ledgers[1].length == 4


def test_token_that_died_and_came_to_the_new_last_hop_is_not_answered_and_nobody_is_blamed() -> None:
    course, _, _, new = in_doubt()
    actions = course.ran(new, Ran(position=5, num_outputs=1), 2.0)
    assert not course.hops
    assert not any(isinstance(action, Answer | Blame) for action in actions)


def test_hop_that_goes_before_it_has_said_leaves_the_others_in_doubt() -> None:
    course, first, middle, new = in_doubt()
    course.linked(middle, 1, 4, 2.0)
    course.lost(first, PeerUnreachable("gone"), Cause.GONE, 2.1)
    assert course._chain.doubted == {middle, new}
    course.linked(middle, 2, 5, 2.2)
    assert not course.hops


def test_doubt_on_doubt_is_about_the_first_token() -> None:
    course, first, middle, new = in_doubt()
    course.ran(new, Ran(position=4, num_outputs=1), 2.0)
    course.follow(token_row(7), 2.0)
    course.lost(middle, PeerUnreachable("gone"), Cause.GONE, 2.1)
    course.lost(new, PeerUnreachable("gone"), Cause.GONE, 2.2)
    course.linked(first, first.num_links, 5, 2.3)
    assert not course.hops


def test_last_hop_lost_before_any_token_could_be_drawn_leaves_no_doubt() -> None:
    course = ring()
    first, _, last = course.hops
    course._chain._may_draw = False
    course.lost(last, PeerUnreachable("gone"), Cause.GONE, 1.0)
    assert not course._chain.doubted
    assert first in course.hops


def test_leaving_last_hop_that_does_not_hear_to_pass_no_more_on_is_given_up() -> None:
    course = ring()
    last = course.hops[-1]
    course.leaving(last)
    spare(course, course.tick(1.0), 1.0)
    assert last in course.hops
    assert last.owes_link
    now_s = 1.0
    while last in course.hops:
        assert course.next_s() > now_s, "it spins"
        now_s = course.next_s()
        course.tick(now_s)
    assert now_s < 1.0 + 2 * OPEN_S


def test_ran_ahead_with_rows_that_were_told_before_takes_no_more_memory_than_the_session() -> None:
    course = ring(ahead=200)
    first = course.hops[0]
    for position in range(1, 200):
        course.ran(first, Ran(position=position, rows=bytes(position * ROW_BYTES)), 1.0)
    assert sum(len(ran.rows) for ran in first.early) <= 200 * ROW_BYTES


def test_last_hop_whose_tokens_do_not_get_on_is_linked_again_later() -> None:
    course = ring()
    first, _, last = course.hops
    course.ran(last, Ran(position=4, num_outputs=1, push_failed=True), 1.0)
    actions = course.follow(token_row(7), 1.0)
    assert any(isinstance(action, Feed) and action.hop is first for action in actions)
    assert last.told.next_sequence_id == b""
    course.linked(last, 1, 4, 1.0)
    course.ran(last, Ran(position=5, num_outputs=1, num_links=1), 1.0 + RELINK_S)
    course.follow(token_row(8), 1.0 + RELINK_S)
    assert last.told.next_sequence_id == first.sequence_id


def test_ran_rows_and_outputs_that_are_known_already_are_cut_off() -> None:
    course, _ = opened()
    upper, last = course.hops
    course.ran(upper, Ran(position=2, rows=b"a" * 2 * ROW_BYTES), 1.0)
    course.ran(upper, Ran(position=4, rows=b"b" * 3 * ROW_BYTES), 1.0)
    assert course.ledgers[1].rows(0, 4) == b"a" * 2 * ROW_BYTES + b"b" * 2 * ROW_BYTES
    assert Answer(0, is_last=True) in course.ran(last, Ran(position=4, num_outputs=1), 1.0)
    course.ask(bytes(4 * ROW_BYTES), "all", 2.0)
    assert Answer(0, is_last=False) in course.ran(last, Ran(position=6, num_outputs=2), 3.0)
    assert Answer(1, is_last=True) in course.ran(last, Ran(position=8, num_outputs=3), 3.0)
    assert not any(isinstance(a, Answer) for a in course.ran(last, Ran(position=8, num_outputs=3), 3.0))


def test_ready_with_more_than_it_was_told_of_is_a_violation() -> None:
    world = ToyWorld(3, num_blocks=1, spans=[(0, 1)])
    course = Course(1, lambda block: Ledger(ROW_BYTES), Limits())
    (find,) = course.ask(bytes(20 * ROW_BYTES), "token", 0.0)
    assert isinstance(find, Find)
    hop = world.new_hop("s0", 0, 1)
    course.found(find.repair, [hop], 0.0)
    with pytest.raises(PeerViolation, match="holds 17 positions, and was told of 16"):
        course.ready(hop, 17, 8, 0.0)
    feeds = [action for action in course.ready(hop, 16, 8, 0.0) if isinstance(action, Feed)]
    assert [(feed.start, feed.end, feed.want) for feed in feeds] == [(16, 20, "token")]


def test_lost_hop_leaves_its_neighbours_unlinked() -> None:
    course, _ = opened(3, ((0, 1), (1, 2), (2, 3)))
    actions = course.lost(course.hops[1], PeerUnreachable("gone"), Cause.GONE, 1.0)
    told = {action.hop.start: action.hop.told for action in actions if isinstance(action, Relink)}
    assert told[0].next_sequence_id == b""
    assert told[2].previous_peer_id == ""


def test_lost_server_after_server_ends_the_session() -> None:
    course, world = opened(1, ((0, 1),))
    for number in range(MAX_FAILURES + 1):
        assert course.error is None
        actions = course.lost(course.hops[0], PeerUnreachable("gone"), Cause.GONE, 1.0)
        finds = [action for action in actions if isinstance(action, Find)]
        if finds:
            hop = world.new_hop(f"s{number}", 0, 1)
            course.found(finds[0].repair, [hop], 1.0)
            course.ready(hop, 0, 8, 1.0)
    assert isinstance(course.error, SessionError)


def test_not_found_while_nobody_asks_is_looked_for_again_with_the_next_question() -> None:
    course, _ = opened(1, ((0, 1),))
    course.ran(course.hops[0], Ran(position=4, num_outputs=1), 1.0)
    (repair,) = [
        action.repair
        for action in course.lost(course.hops[0], PeerUnreachable("gone"), Cause.GONE, 1.0)
        if isinstance(action, Find)
    ]
    assert course.not_found(repair, SessionError("nobody"), 30.0) == []
    assert [type(action) for action in course.ask(token_row(1), "token", 40.0)] == [Find]
    course.not_found(repair, SessionError("nobody"), 60.0)
    assert str(course.error) == "nobody"


def test_hop_that_reports_row_by_row_gains_no_time() -> None:
    hop = toy().new_hop("a", 0, 2)
    hop.begin(0)
    hop.learn(100, 0.0)
    due_s, now_s = hop.due_s, 0.0
    while now_s + 1 < due_s:
        now_s += 1
        hop.progress(Ran(position=hop.done + 1), now_s)
    assert 2 < hop.done < 50
    assert hop.due_s == due_s
    hop.learn(120, now_s)
    hop.progress(Ran(position=100), now_s)
    assert hop.due_s > now_s + FLOOR_S  # a new deadline for the rows that came since
    hop.progress(Ran(position=120), now_s)
    assert hop.due_s == math.inf


def test_course_hand_over_gets_the_time_of_running_the_session_again() -> None:
    world = toy(THIRDS * 3)
    world.ask(list(range(20)), "token")
    world.strike("leave", served_by(world, 1))
    world.run_until(lambda: any(repair.is_handing and repair.is_opening for repair in world.course.repairs))
    (repair,) = world.course.repairs
    again_s = max(hop.timer.expected_s(20) for hop in repair.fresh)
    assert again_s > 0
    assert repair.open_by_s == pytest.approx(repair.since_s + OPEN_S + again_s, abs=0.01)
