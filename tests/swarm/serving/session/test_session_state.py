"""The client's decisions against a toy chain: any history of failures ends with the right answers or a typed error."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from support.toy_chain import (
    KINDS,
    MISSING,
    ROW_BYTES,
    Request,
    ToyServer,
    ToyWorld,
    answers,
    any_world,
    outputs_of,
    ready,
    token_row,
)
from swarm.serving.session.pipeline import RELINK_S, WINDOW_CHUNKS
from swarm.serving.session.repair import MAX_FAILURES, OPEN_S
from swarm.serving.session.replay_buffer import ReplayBuffer
from swarm.serving.session.session_actions import (
    Action,
    AvoidPeer,
    CloseStage,
    FailureCause,
    Feed,
    FindServers,
    ForgetRows,
    OpenStage,
    TakeToken,
    UpdateLink,
)
from swarm.serving.session.session_state import LEAVE_RETRY_S, SessionState
from swarm.serving.session.silence import MAX_ANSWER_S, QUIET_S
from swarm.serving.session.stage import Stage
from swarm.serving.session.step_reports import StepReport
from swarm.serving.session.step_timer import FLOOR_S
from swarm.serving.wire.multiplexed_connection import SLOWEST_SERVER_BYTES_PER_S
from swarm_protocol.errors import PeerRefused, PeerUnreachable, PeerViolation, SessionError, SwarmError
from swarm_protocol.session_frames import SampledToken

THIRDS = [(0, 2), (2, 4), (4, 6)]
TOKEN = SampledToken(token_id=7)


def test_state_gives_the_undisturbed_answers_after_any_history_of_failures() -> None:
    struck: Counter[str] = Counter()
    num_failed = 0
    for seed in range(200):
        world, request = any_world(seed)
        with suppress(SessionError):
            for answer, expected in answers(world, request):
                assert answer == expected, f"seed {seed}"
        num_failed += world.error is not None
        struck += world.struck
    assert set(struck) == {*KINDS, "push lost", "hand-over"}
    assert num_failed < 10, "these worlds have spares, so that few sessions fail"


def test_state_leaves_no_server_with_a_token_that_was_lost_with_the_server_that_drew_it() -> None:
    """Another server could draw another token: at a tie, or with a sum in another order."""
    num_looped = num_drafted = num_anew = num_failed = num_moves = 0
    for seed in range(200):
        draw = random.Random(seed)
        spans = draw.choice([[(0, 1), (1, 2), (2, 3)], [(0, 2), (2, 3)], [(0, 1), (1, 3)], [(0, 3)]])
        world = ToyWorld(seed, num_blocks=3, spans=spans * 6, slow_wait_s=0.0)
        world.draws_vary, world.max_delay_s = True, draw.choice([0.02, 0.2, 1.0])
        world.has_drafts = seed % 3 > 0
        now_s = 0.0
        for _ in range(8):
            now_s += draw.choice([0.0, 0.01, 0.1, 0.5, 2.0])
            what = draw.choice(["kill", "kill", "connection", "evict", "spoil", "leave", "stall", "late", "late"])
            world.later(now_s, partial(strike_any_stage, world, what))
        if seed % 2:
            world.later(0.1, partial(strike_any_stage, world, "slow"))
        try:
            assert len(world.ask([1, 2, 3], ahead=40)) == 41
            world.check_draws([1, 2, 3])
            world.check_states()
            world.wait(1.0)
            world.check_states()
        except SessionError:
            num_failed += 1
        assert not world.judged, f"seed {seed}: the innocent are blamed"
        num_looped += world.num_looped
        num_drafted += world.num_drafted
        num_anew += world.num_anew
        num_moves += world.num_moves
    assert num_looped > 200 * 15
    assert num_drafted > 500
    assert num_anew > 10
    assert num_moves > 10
    assert num_failed < 20


def strike_any_stage(world: ToyWorld, what: str) -> None:
    stages = world.state.stages
    if stages:
        index = world.random.choice([0, len(stages) - 1, world.random.randrange(len(stages))])
        world.strike(what, served_by(world, index))


def toy(spans: list[tuple[int, int]] = THIRDS * 2, **options: Any) -> ToyWorld:
    return ToyWorld(1, num_blocks=6, spans=spans, **options)


def draws_after(prompt: list[int], num_tokens: int) -> list[int]:
    known = list(prompt)
    for _ in range(num_tokens):
        known += outputs_of(known, 6)[-1:]
    return known[len(prompt) :]


def served_by(world: ToyWorld, index: int) -> ToyServer:
    return world.servers[world.state.stages[index].peer_id]


def tokens(world: ToyWorld, num_prompt: int = 20, num_tokens: int = 6) -> list[int]:
    """Generate greedily, and check each answer."""
    request = Request(prompt=list(range(num_prompt)), questions=[(0, 0.0)] * num_tokens)
    found = []
    for answer, expected in answers(world, request):
        assert answer == expected
        found += answer
    return found


def test_state_runs_every_row_once_on_every_hop_without_failures() -> None:
    world = toy()
    tokens(world)
    assert world.num_rows_run == 3 * 25
    assert world.repaired == [("", 0)]


def test_state_keeps_at_most_a_window_of_a_prompt_s_chunks_in_flight() -> None:
    world = toy(chunk=2)
    fed: list[int] = []
    carry_out = world.carry_out

    def watch(actions: list) -> None:  # type: ignore[type-arg]
        for action in actions:
            if isinstance(action, Feed):
                fed.append(action.end - min(stage.num_run for stage in world.state.stages))
        carry_out(actions)

    world.carry_out = watch  # type: ignore[method-assign]
    tokens(world, 60, 2)
    assert max(fed) == 2 * WINDOW_CHUNKS


@pytest.mark.parametrize("index", [0, 1, 2])
def test_state_replays_only_the_killed_stage_and_at_once(index: int) -> None:
    world = toy()
    first = world.ask(list(range(20)))
    num_rows = world.num_rows_run
    world.strike("kill", served_by(world, index))
    since_s = world.now_s
    assert world.ask(first) == outputs_of([*range(20), *first], 6)[-1:]
    assert [num_tokens for _, num_tokens in world.repaired[1:]] == [20]
    # the replay, the new token on all three, and perhaps the row whose copy had not arrived
    assert world.num_rows_run - num_rows <= 20 + 3
    assert world.now_s - since_s < 0.5


def test_state_computes_copies_again_that_were_lost_with_their_server() -> None:
    """The last stage has run rows that the buffer before it lacks: their copies died with the server that sent them."""
    world = toy()
    expected = outputs_of(list(range(20)), 6)[-1:]
    middle = []

    def kill_when_pushed() -> None:
        if not middle and len(world.state.stages) == 3:
            last = served_by(world, 2)
            if any(sequence.length for sequence in last.sequences.values()):
                middle.append(world.strike("kill", served_by(world, 1)))
        world.later(0.0005, kill_when_pushed)

    world.later(0.0, kill_when_pushed)
    assert world.ask(list(range(20))) == expected
    assert middle
    assert world.now_s < 1, "the client must not wait for copies that never come"
    assert world.ask(expected) == outputs_of([*range(20), *expected], 6)[-1:]


def test_state_feeds_a_stalled_stage_once_more_and_then_gives_it_up() -> None:
    world = toy()
    first = world.ask(list(range(20)))
    for sequence in served_by(world, 1).sequences.values():
        sequence.busy_until_s = 1e9  # it answers pings
    since_s = world.now_s
    world.ask(first)
    assert FLOOR_S < world.now_s - since_s < FLOOR_S + 1
    assert len(world.repaired) == 2


@pytest.mark.parametrize("has_spare", [False, True], ids=["no other server", "a spare that takes no session"])
def test_state_keeps_a_slow_last_server_and_its_ring_when_no_other_takes_over(*, has_spare: bool) -> None:
    world = toy(THIRDS + [(4, 6)] * has_spare, slow_wait_s=0.0)
    world.ask([1])
    searched: list[FindServers] = []
    look = world.look

    def look_and_close(find: FindServers, give_up_s: float) -> None:
        searched.append(find)
        look(find, give_up_s)
        for server in world.servers.values():
            server.is_leaving = server is not served_by(world, 2) and server.start == 4

    world.look = look_and_close  # type: ignore[method-assign]
    world.strike("slow", served_by(world, 2))
    world.ask([2], ahead=60)
    assert len(searched) == 1 + has_spare
    assert len(world.repaired) == 1
    assert not world.state.stages[2].is_leaving
    assert world.num_looped > 50


def test_state_keeps_a_slow_server_however_many_others_take_no_session() -> None:
    """The answer goes on there, so a request must not fail as if it broke one server after the other."""
    world = toy(THIRDS + [(2, 4)] * (MAX_FAILURES + 1), slow_wait_s=0.0)
    world.ask([1])
    opening = world.opening

    def refused(action: OpenStage) -> Callable[[], None]:
        if world.state.repairs[0].straggler is None:
            return opening(action)
        stage, error = action.stage, PeerRefused("this server is broken")
        return lambda: world.end_sequence(world.servers[stage.peer_id], stage.sequence_id, error)

    world.opening = refused  # type: ignore[method-assign]
    slow = served_by(world, 1)
    world.strike("slow", slow)
    assert world.ask([2], ahead=60) == draws_after([1, 2], 61)
    assert served_by(world, 1) is slow


def test_state_runs_the_prefix_again_on_the_same_server_when_a_slow_one_does_not_hand_over_in_time() -> None:
    world = toy(slow_wait_s=0.0)
    world.ask([1])
    opening = world.opening
    world.opening = lambda action: (lambda: None) if action.taken_over else opening(action)  # type: ignore[method-assign]
    slow = served_by(world, 1)
    world.strike("slow", slow)
    slow.slow_s = 0.4
    assert world.ask([2], ahead=90) == draws_after([1, 2], 91)
    lost_peer, num_replayed = world.repaired[-1]
    assert (lost_peer, num_replayed > 8) == (slow.peer_id, True)


def test_state_leaves_a_slow_server_that_then_drains_whatever_others_promise() -> None:
    world = toy(slow_wait_s=0.0)
    world.ask([1])
    slow = served_by(world, 1)
    look = world.look

    def drain_first(find: FindServers, give_up_s: float) -> None:
        if find.repair.straggler is None:
            look(find, give_up_s)
            return
        # nobody else is much faster, and meanwhile the server says that it leaves
        slow.is_leaving = True
        for sequence_id in slow.sequences:
            world.to_client(slow, sequence_id, world.told_to_leave)
        world.later(1.0, lambda: world.carry_out(world.state.on_not_found(find.repair, MISSING, world.now_s)))

    world.look = drain_first  # type: ignore[method-assign]
    world.strike("slow", slow)
    assert world.ask([2], ahead=60) == draws_after([1, 2], 61)
    assert world.repaired[-1][0] == slow.peer_id


def test_state_gives_a_server_up_that_falls_silent_during_a_prompt_before_its_step_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swarm.serving.session.pipeline.BULK_BYTES", 10 * ROW_BYTES)
    monkeypatch.setattr("swarm.serving.session.step_timer.FLOOR_S", 60.0)
    world = toy()
    first, since_s = world.ask([0]), world.now_s
    served_by(world, 1).stalled_until_s = 1e9
    world.ask([*first, *range(20)])
    assert MAX_ANSWER_S < world.now_s - since_s < MAX_ANSWER_S + 2 * QUIET_S
    assert len(world.repaired) == 2


def test_state_lets_a_step_wait_once_for_the_rows_of_other_sessions() -> None:
    state = ring(bytes_beside={"s0": int(10 * SLOWEST_SERVER_BYTES_PER_S)}.__getitem__)
    first, due_s = state.stages[0], state.stages[0].deadline.due_s
    state.tick(due_s)
    assert first.deadline.due_s == due_s + 10
    state.tick(due_s + 9)
    assert first in state.stages
    state.tick(due_s + 10)
    assert first not in state.stages


def test_state_avoids_a_cut_link_and_tries_it_again_later() -> None:
    world = toy()
    first = world.ask(list(range(20)))
    upstream, downstream = world.state.stages[:2]
    world.cut = {(upstream.peer_id, downstream.peer_id)}
    second = world.ask(first)
    pause_s = world.now_s
    third = world.ask(second)
    assert world.now_s - pause_s < 0.2, "only the first token may wait for the timeout"
    assert world.state.stages[:2] == [upstream, downstream]
    assert upstream.link.neighbours.downstream is None
    world.cut = set()
    world.wait(60)
    world.ask(third)
    assert upstream.link.neighbours.downstream is downstream


def test_state_runs_nothing_again_when_a_leaving_server_hands_its_sequence_over() -> None:
    world = toy()
    world.random.random = lambda: 0.5  # type: ignore[method-assign]
    first = world.ask(list(range(20)))
    world.strike("leave", served_by(world, 1))
    num_rows = world.num_rows_run
    world.wait(0.5)
    assert world.ask(first) == outputs_of([*range(20), *first], 6)[-1:]
    assert world.repaired[1][1] == 0
    assert world.num_rows_run == num_rows + 3


def test_state_replays_when_a_handover_fails() -> None:
    world = toy()
    world.random.random = lambda: 0.1  # type: ignore[method-assign]
    first = world.ask(list(range(20)))
    world.strike("leave", served_by(world, 1))
    world.wait(0.5)
    assert world.struck["hand-over"] == 1
    assert world.ask(first) == outputs_of([*range(20), *first], 6)[-1:]
    assert world.repaired[1][1] == 20


@pytest.mark.parametrize("ahead", [0, 9])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_state_keeps_a_leaving_server_until_its_sequence_is_handed_over(index: int, ahead: int) -> None:
    world = toy()
    world.random.random = lambda: 0.5  # type: ignore[method-assign]
    last = world.ask(list(range(20)))
    world.strike("leave", served_by(world, index))
    answer = []
    while len(answer) < 30:
        answer += world.ask(last, ahead=ahead)
        last = answer[-1:]
    assert answer == draws_after(list(range(20)), 31)[1:]
    assert len(world.repaired) == 2
    # what it ran after the copy
    assert world.num_rows_run <= 3 * 50 + 2
    assert world.repaired[1][1] <= 2


@pytest.mark.parametrize("which", ["old", "new"])
def test_state_replays_when_a_server_dies_during_a_handover(which: str) -> None:
    world = toy(THIRDS * 3)
    first = world.ask(list(range(20)))
    old = served_by(world, 1)
    world.strike("leave", old)
    world.run_until(lambda: any(repair.is_handover and repair.new for repair in world.state.repairs))
    new = world.servers[world.state.repairs[0].new[0].peer_id]
    world.strike("kill", old if which == "old" else new)
    assert world.ask(first) == outputs_of([*range(20), *first], 6)[-1:]
    assert world.now_s < 1


def test_state_keeps_a_leaving_server_and_searches_now_and_then_without_a_spare() -> None:
    world = toy(THIRDS)
    last = world.ask(list(range(20)))
    leaver = served_by(world, 1)
    leaver.is_leaving = True
    for sequence_id in leaver.sequences:
        world.to_client(leaver, sequence_id, world.told_to_leave)
    looks = []
    look = world.look
    world.look = lambda *arguments: (looks.append(world.now_s), look(*arguments))  # type: ignore[assignment]
    since_s = world.now_s
    for _ in range(100):
        last = world.ask(last)
    assert 1 <= len(looks) <= 2 + (world.now_s - since_s) / LEAVE_RETRY_S


def test_state_computes_a_prefix_that_all_servers_hold_and_the_ledgers_lack() -> None:
    world = toy(THIRDS)
    tokens(world, 40, 1)
    again = ToyWorld(2, num_blocks=6, spans=THIRDS)
    for server, known in zip(again.servers.values(), world.servers.values(), strict=True):
        server.pages = known.pages
    tokens(again, 40, 1)
    assert again.num_rows_run == 3 * 40


def test_state_does_not_run_a_prefix_again_when_both_sides_have_it() -> None:
    world = toy(THIRDS)
    tokens(world, 40, 1)
    again = ToyWorld(2, num_blocks=6, spans=THIRDS)
    for server, known in zip(again.servers.values(), world.servers.values(), strict=True):
        server.pages = known.pages

    def filled(block: int) -> ReplayBuffer:
        buffer = ReplayBuffer(ROW_BYTES)
        buffer.append(world.state.pipeline.buffers[block].rows(0, 32))
        return buffer

    again.state.pipeline.buffers._new_buffer = filled
    tokens(again, 40, 1)
    assert again.num_rows_run == 3 * 8


# --- single decisions -----------------------------------------------------------------------------------------------


def opened(num_blocks: int = 2, spans: tuple[tuple[int, int], ...] = ((0, 1), (1, 2))) -> tuple[SessionState, ToyWorld]:
    """Return a state with all stages open and a request of four tokens in flight."""
    world = ToyWorld(3, num_blocks=num_blocks, spans=list(spans))
    state = SessionState(num_blocks, lambda block: ReplayBuffer(ROW_BYTES), max_step_tokens=8)
    (find,) = state.ask(b"".join(map(token_row, range(4))), 0.0)
    assert isinstance(find, FindServers)
    fresh = [world.new_stage(f"s{i}", start, end) for i, (start, end) in enumerate(spans)]
    assert [type(action) for action in state.on_found(find.repair, fresh, 0.0)] == [OpenStage] * len(spans)
    for stage in fresh:
        state.on_opened(stage, ready(0, 8), 0.0)
    return state, world


def test_ran_with_impossible_positions_is_a_violation() -> None:
    state, _ = opened()
    with pytest.raises(PeerViolation, match="ran 5 positions, of 4"):
        state.on_report(state.stages[0], StepReport(position=5, rows=bytes(5 * ROW_BYTES)), 1.0)
    state.on_report(state.stages[0], StepReport(position=4, rows=bytes(4 * ROW_BYTES)), 1.0)
    with pytest.raises(PeerViolation, match="of 4 after 4"):
        state.on_report(state.stages[0], StepReport(position=3, rows=bytes(3 * ROW_BYTES)), 1.0)


def test_ran_without_the_rows_or_the_output_asked_for_is_a_violation() -> None:
    state, _ = opened()
    with pytest.raises(PeerViolation, match="left out"):
        state.on_report(state.stages[0], StepReport(position=4, rows=bytes(3 * ROW_BYTES)), 1.0)
    with pytest.raises(PeerViolation, match="left out"):
        state.on_report(state.stages[1], StepReport(position=4), 1.0)


@pytest.mark.parametrize("failing", [("s2", "s2"), ("s2", "other")])
def test_rows_are_dropped_and_accuse_no_server_when_two_servers_failed_at_them(failing: tuple[str, str]) -> None:
    state, world = opened(3, ((0, 1), (1, 2), (2, 3)))
    state.on_report(state.stages[0], StepReport(position=4, rows=bytes(4 * ROW_BYTES)), 1.0)
    state.on_report(state.stages[1], StepReport(position=4, rows=bytes(4 * ROW_BYTES)), 1.0)
    error, last = SessionError("not finite"), state.stages[2]
    actions = state.on_lost(last, error, FailureCause.REPORTED, 1.0)
    (find,) = [action for action in actions if isinstance(action, FindServers)]
    assert not [action for action in actions if isinstance(action, ForgetRows)], "the server itself may be the cause"
    state.on_found(find.repair, [world.new_stage(failing[1], 2, 3)], 1.0)
    (following,) = find.repair.new
    state.on_opened(following, ready(0, 8), 1.0)
    actions = state.on_lost(following, error, FailureCause.REPORTED, 1.0)
    accused = [action.peer_id for action in actions if isinstance(action, AvoidPeer)]
    assert accused == [failing[1]], "it failed, whatever the cause"
    forgotten = [action.peers for action in actions if isinstance(action, ForgetRows)]
    if failing[1] == failing[0]:
        assert forgotten == []
        assert state.pipeline.buffers[2].length == 4
    else:
        assert forgotten == [("s0", "s1")]
        assert not state.stages
        assert [state.pipeline.buffers[block].length for block in range(3)] == [4, 0, 0]


def finds(actions: list[Action]) -> list[FindServers]:
    return [action for action in actions if isinstance(action, FindServers)]


def test_sequence_that_is_being_opened_skips_no_rows_that_are_dropped_meanwhile() -> None:
    state, world = opened(3, ((0, 1), (1, 2), (2, 3)))
    first, middle, last = state.stages
    for stage in (first, middle):
        state.on_report(stage, StepReport(position=4, rows=bytes(4 * ROW_BYTES)), 1.0)
    (find,) = finds(state.on_lost(first, PeerUnreachable("gone"), FailureCause.SILENT, 1.0))
    new = world.new_stage("s0", 0, 1)
    state.on_found(find.repair, [new], 1.0)
    assert new.may_skip == 4
    error = SessionError("not finite")
    (of_last,) = finds(state.on_lost(last, error, FailureCause.REPORTED, 1.0))
    following = world.new_stage("other", 2, 3)
    state.on_found(of_last.repair, [following], 1.0)
    state.on_opened(following, ready(0, 8), 1.0)
    actions = state.on_lost(following, error, FailureCause.REPORTED, 1.0)
    assert [action for action in actions if isinstance(action, ForgetRows)]
    assert new in [action.stage for action in actions if isinstance(action, CloseStage)]
    assert find.repair in [action.repair for action in finds(actions)]
    again = world.new_stage("s0", 0, 1)
    state.on_found(find.repair, [again], 1.0)
    assert again.may_skip == 0


def ring(ahead: int = 8, bytes_beside: Callable[[str], int] = lambda _peer_id: 0) -> SessionState:
    """Return a state with three open stages and a request of four tokens in flight."""
    world = ToyWorld(3, num_blocks=3, spans=[(0, 1), (1, 2), (2, 3)])
    state = SessionState(3, lambda _: ReplayBuffer(ROW_BYTES), max_step_tokens=8, bytes_beside=bytes_beside)
    (find,) = state.ask(b"".join(map(token_row, range(4))), 0.0, ahead=ahead)
    assert isinstance(find, FindServers)
    fresh = [world.new_stage(f"s{i}", i, i + 1) for i in range(3)]
    state.on_found(find.repair, fresh, 0.0)
    for stage in fresh:
        state.on_opened(stage, ready(0, 8), 0.0)
    return state


def test_ran_is_kept_when_it_is_ahead_of_the_client() -> None:
    state = ring()
    first, _, last = state.stages
    assert (last.link.neighbours.downstream, first.link.neighbours.upstream) == (first, last)
    state.on_report(first, StepReport(position=4, rows=bytes(4 * ROW_BYTES)), 1.0)
    state.on_report(first, StepReport(position=6, rows=b"c" * 2 * ROW_BYTES), 1.0)
    assert (first.num_run, first.reported, state.pipeline.buffers[1].length) == (4, 6, 4)
    taken = state.on_report(last, StepReport(position=4, token=TOKEN, looped=True), 1.0)
    assert taken == [TakeToken(TOKEN, 0, goes_on=True)], "no stage must be fed"
    assert (first.num_run, state.pipeline.buffers[1].length) == (5, 5)
    state.on_report(last, StepReport(position=5, token=TOKEN, looped=True), 1.0)
    assert (first.num_run, state.pipeline.buffers[1].rows(4, 6)) == (6, b"c" * 2 * ROW_BYTES)


def test_ran_is_a_violation_when_it_is_further_ahead_than_allowed() -> None:
    state = ring(ahead=2)
    first, middle, last = state.stages
    state.on_report(first, StepReport(position=6, rows=bytes(6 * ROW_BYTES)), 1.0)
    with pytest.raises(PeerViolation, match="ran 7 positions"):
        state.on_report(first, StepReport(position=7, rows=bytes(ROW_BYTES)), 1.0)
    with pytest.raises(PeerViolation, match="left out"):
        state.on_report(middle, StepReport(position=6, rows=bytes(ROW_BYTES)), 1.0)
    with pytest.raises(PeerViolation, match="ran 5 positions"):
        state.on_report(last, StepReport(position=5, token=TOKEN), 1.0)


def test_rows_of_drafts_are_used_as_far_as_the_drafts_were_right() -> None:
    state = ring()
    first, _, last = state.stages
    state.on_report(first, StepReport(position=4, rows=bytes(4 * ROW_BYTES)), 1.0)
    state.on_report(
        first, StepReport(position=8, rows=b"".join(bytes([at]) * ROW_BYTES for at in range(4, 8)), num_drafts=3), 1.0
    )
    assert (first.reported, state.pipeline.buffers[1].length) == (5, 4)
    for position, drafted in ((4, False), (5, True), (6, False)):
        report = StepReport(position=position, token=TOKEN, drafted=drafted, looped=not drafted)
        assert not any(isinstance(action, Feed) for action in state.on_report(last, report, 1.0)), "servers have them"
    # the token after position 5 was a draft, and the one after 6 was not the next draft
    assert (first.num_run, state.pipeline.buffers[1].length) == (6, 6)
    assert state.pipeline.buffers[1].rows(4, 6) == b"\x04" * ROW_BYTES + b"\x05" * ROW_BYTES
    state.on_report(first, StepReport(position=8, rows=b"n" * 2 * ROW_BYTES, num_drafts=1), 1.0)
    assert (first.num_run, state.pipeline.buffers[1].rows(6, 7)) == (7, b"n" * ROW_BYTES)


def test_report_of_a_right_draft_that_was_run_again_is_ignored() -> None:
    state = ring()
    first, _, last = state.stages
    state.on_report(first, StepReport(position=7, rows=bytes(7 * ROW_BYTES), num_drafts=2), 1.0)
    for position, drafted in ((4, False), (5, True), (6, True)):
        state.on_report(last, StepReport(position=position, token=TOKEN, drafted=drafted, looped=not drafted), 1.0)
    assert first.num_run == 7
    assert not state.on_report(first, StepReport(position=6, rows=bytes(ROW_BYTES)), 1.0)
    with pytest.raises(PeerViolation, match="ran 4 positions"):
        state.on_report(first, StepReport(position=4, rows=bytes(ROW_BYTES)), 1.0)


def test_server_that_reports_a_lost_push_does_not_know_yet_which_drafts_were_right() -> None:
    state = ring()
    _, middle, last = state.stages
    for first, position, num_drafts in ((0, 4, 0), (4, 7, 2)):
        rows = bytes((position - first) * ROW_BYTES)
        state.on_report(middle, StepReport(position=position, rows=rows, num_drafts=num_drafts), 1.0)
    for position, drafted in ((4, False), (5, True), (6, True)):
        state.on_report(last, StepReport(position=position, token=TOKEN, drafted=drafted, looped=not drafted), 1.0)
    assert middle.num_run == 7
    # the last server is gone; the one before it had got only one token that was no draft
    state.on_report(middle, StepReport(position=5, push_failed=True), 1.0)
    assert middle in state.stages
    with pytest.raises(PeerViolation, match="ran 4 positions"):
        state.on_report(middle, StepReport(position=4, push_failed=True), 1.0)


def after_passes_with_drafts(num_passes: int, pass_s: float) -> SessionState:
    """Return a ring whose first and last server took this long for each pass of 15 tokens."""
    state, now_s = ring(ahead=300), 0.0
    first, _, last = state.stages
    for stage in (first, last):
        stage.expect_report(4, 0.0)
    state.on_report(first, StepReport(position=4, rows=bytes(4 * ROW_BYTES)), 1.0)
    state.on_report(last, StepReport(position=4, token=TOKEN, looped=True), 1.0)
    for start in range(4, 4 + 15 * num_passes, 15):
        now_s += pass_s
        rows = bytes(15 * ROW_BYTES)
        held = StepReport(position=start + 15, rows=rows, num_drafts=14, passed_on=True)
        state.on_report(first, held, now_s)
        for position in range(start + 1, start + 16):
            drafted = position < start + 15
            state.on_report(
                last, StepReport(position=position, token=TOKEN, drafted=drafted, looped=not drafted), now_s
            )
        for stage in (first, last):
            stage.expect_report(start + 30, now_s)
    return state


@pytest.mark.parametrize("index", [0, 2], ids=["first", "last"])
def test_server_has_as_much_time_for_a_pass_with_drafts_as_its_passes_took(index: int) -> None:
    assert after_passes_with_drafts(10, 9.0).stages[index].timer.timeout_s(1, 0) > 2 * 9.0


@pytest.mark.parametrize("index", [0, 2], ids=["first", "last"])
def test_server_is_as_slow_with_drafts_as_its_passes_are(index: int) -> None:
    assert after_passes_with_drafts(10, 2.0).stages[index].timer.recent_ms() == pytest.approx(2000.0)


def test_move_saves_time_in_each_pass_to_come_not_in_each_token_of_it() -> None:
    assert after_passes_with_drafts(8, 2.0).pipeline.request.passes_to_come == 9, "as many as so far"
    assert after_passes_with_drafts(15, 2.0).pipeline.request.passes_to_come == 5, "for 74 tokens"


def test_drafts_are_no_token_that_was_lost_with_its_server() -> None:
    """A server that holds only drafts beyond what the client knows has not heard of the lost token."""
    for num_drafts in (3, 2):
        state = ring()
        first, _, last = state.stages
        state.on_report(first, StepReport(position=4, rows=bytes(4 * ROW_BYTES)), 1.0)
        state.on_report(first, StepReport(position=8, rows=bytes(4 * ROW_BYTES), num_drafts=3), 1.0)
        state.on_report(last, StepReport(position=4, token=TOKEN, looped=True), 1.0)
        state.on_lost(last, PeerUnreachable("gone"), FailureCause.SILENT, 1.0)
        state.on_link_ack(first, first.link.num_updates, 8 - num_drafts, 1.0)
        assert (first in state.stages) == (num_drafts == 3)


def test_ran_ahead_takes_bounded_memory_when_it_is_sent_without_end() -> None:
    state = ring()
    first = state.stages[0]
    state.on_report(first, StepReport(position=6, rows=bytes(6 * ROW_BYTES)), 1.0)
    for _ in range(1000):
        state.on_report(first, StepReport(position=6, push_failed=True), 1.0)
    assert len(first.early) == 1
    assert first.early[0].push_failed


def test_linked_is_a_violation_when_no_link_was_requested() -> None:
    state = ring()
    with pytest.raises(PeerViolation, match="told of its neighbours 0 times, not 1"):
        state.on_link_ack(state.stages[0], 1, 4, 1.0)


@pytest.mark.parametrize("num_rows", [1, 20])
def test_state_gives_no_server_up_for_a_ping_that_waits_behind_many_rows(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.serving.session.pipeline.BULK_BYTES", 10 * ROW_BYTES)
    world = toy()
    prompt = [0, *world.ask([0])]
    served_by(world, 1).stalled_until_s = world.now_s + 0.8 * FLOOR_S  # neither rows nor an answer arrive before
    world.ask(prompt[1:] if num_rows == 1 else list(range(num_rows)))
    assert len(world.repaired[1:]) == (1 if num_rows == 1 else 0)


def test_lost_last_stage_delays_the_next_token_until_no_stage_has_another_one() -> None:
    state = ring()
    first, middle, last = state.stages
    for stage in (first, middle):
        state.on_report(stage, StepReport(position=4, rows=bytes(4 * ROW_BYTES)), 1.0)
    actions = state.on_lost(last, PeerUnreachable("gone"), FailureCause.SILENT, 1.0)
    assert {action.stage for action in actions if isinstance(action, UpdateLink)} == {first, middle}
    state.on_link_ack(first, 1, 4, 1.0)
    assert state.pipeline.links.lost_token.due_s == pytest.approx(1.0 + FLOOR_S, abs=0.1)
    assert state.tick(state.pipeline.links.lost_token.due_s), "a server that does not answer must be replaced"
    assert state.stages == [first]


def spare(state: SessionState, actions: list[Action], now_s: float) -> Stage:
    """Return a stage in the place of the lost one."""
    (repair,) = [action.repair for action in actions if isinstance(action, FindServers)]
    stage = ToyWorld(4, num_blocks=3, spans=[]).new_stage(f"spare {now_s}", repair.start, repair.end)
    state.on_found(repair, [stage], now_s)
    state.on_opened(stage, ready(0, 8), now_s)
    return stage


def in_doubt() -> tuple[SessionState, Stage, Stage, Stage]:
    """Lose the last stage of a ring while the others have yet to say what they received, and fill its place."""
    state = ring()
    first, middle, last = state.stages
    for stage in (first, middle):
        state.on_report(stage, StepReport(position=4, rows=bytes(4 * ROW_BYTES)), 1.0)
    new = spare(state, state.on_lost(last, PeerUnreachable("gone"), FailureCause.SILENT, 1.0), 1.1)
    return state, first, middle, new


def test_lost_token_is_not_copied_when_the_stage_was_replaced() -> None:
    state, first, _, new = in_doubt()
    state.on_report(new, StepReport(position=4, token=TOKEN), 2.0)
    state.on_report(first, StepReport(position=5, rows=b"T" * ROW_BYTES), 2.1)
    assert not state.stages, "all stages must begin anew"
    assert state.pipeline.buffers[1].length == 4


def test_lost_token_is_not_returned_and_blames_nobody_when_the_new_last_stage_got_it() -> None:
    state, _, _, new = in_doubt()
    actions = state.on_report(new, StepReport(position=5, token=TOKEN), 2.0)
    assert not state.stages
    assert not any(isinstance(action, TakeToken | AvoidPeer) for action in actions)


def test_doubt_remains_when_a_stage_is_lost_before_it_has_answered() -> None:
    state, first, middle, new = in_doubt()
    state.on_link_ack(middle, 1, 4, 2.0)
    state.on_lost(first, PeerUnreachable("gone"), FailureCause.SILENT, 2.1)
    assert state.pipeline.links.lost_token.suspects == {middle, new}
    state.on_link_ack(middle, 2, 5, 2.2)
    assert not state.stages


def test_second_doubt_is_about_the_first_token() -> None:
    state, first, middle, new = in_doubt()
    state.on_report(new, StepReport(position=4, token=TOKEN), 2.0)
    state.on_lost(middle, PeerUnreachable("gone"), FailureCause.SILENT, 2.1)
    state.on_lost(new, PeerUnreachable("gone"), FailureCause.SILENT, 2.2)
    state.on_link_ack(first, first.link.num_updates, 5, 2.3)
    assert not state.stages


def test_no_doubt_when_the_last_stage_is_lost_before_it_could_draw() -> None:
    state = ring()
    first, _, last = state.stages
    state.pipeline.request.may_draw = False
    state.on_lost(last, PeerUnreachable("gone"), FailureCause.SILENT, 1.0)
    assert not state.pipeline.links.lost_token.suspects
    assert first in state.stages


def test_leaving_last_stage_is_given_up_when_it_does_not_answer_the_unlinking() -> None:
    state = ring()
    last = state.stages[-1]
    spare(state, state.on_leaving(last, 1.0), 1.0)
    assert last in state.stages
    assert last.link.is_pending
    now_s = 1.0
    while last in state.stages:
        assert state.next_due_s() > now_s, "it must not spin"
        now_s = state.next_due_s()
        state.tick(now_s)
    assert now_s < 1.0 + 2 * OPEN_S


def test_ran_ahead_takes_no_more_memory_than_the_session_when_rows_are_repeated() -> None:
    state = ring(ahead=200)
    first = state.stages[0]
    for position in range(1, 200):
        state.on_report(first, StepReport(position=position, rows=bytes(position * ROW_BYTES)), 1.0)
    assert sum(len(ran.rows) for ran in first.early) <= 200 * ROW_BYTES


def test_last_stage_is_linked_again_later_when_its_tokens_do_not_arrive() -> None:
    state = ring()
    first, _, last = state.stages
    state.on_report(first, StepReport(position=4, rows=bytes(4 * ROW_BYTES)), 1.0)
    actions = state.on_report(last, StepReport(position=4, token=TOKEN, looped=True, push_failed=True), 1.0)
    assert any(isinstance(action, Feed) and action.stage is first for action in actions)
    assert last.link.neighbours.downstream is None
    state.on_link_ack(last, 1, 4, 1.0)
    state.on_report(last, StepReport(position=5, token=TOKEN, num_links=1), 1.0 + RELINK_S)
    assert last.link.neighbours.downstream is first


def test_ran_drops_rows_and_a_token_that_are_known_already() -> None:
    state, _ = opened()
    upstream, last = state.stages
    state.on_report(upstream, StepReport(position=2, rows=b"a" * 2 * ROW_BYTES), 1.0)
    state.on_report(upstream, StepReport(position=4, rows=b"b" * 3 * ROW_BYTES), 1.0)
    assert state.pipeline.buffers[1].rows(0, 4) == b"a" * 2 * ROW_BYTES + b"b" * 2 * ROW_BYTES
    assert TakeToken(TOKEN, 0, goes_on=False) in state.on_report(last, StepReport(position=4, token=TOKEN), 1.0)
    state.ask(bytes(4 * ROW_BYTES), 2.0)
    assert not any(isinstance(a, TakeToken) for a in state.on_report(last, StepReport(position=6), 3.0))
    assert TakeToken(TOKEN, 0, goes_on=False) in state.on_report(last, StepReport(position=8, token=TOKEN), 3.0)
    again = state.on_report(last, StepReport(position=8, token=TOKEN), 3.0)
    assert not any(isinstance(a, TakeToken) for a in again)


def test_ready_is_a_violation_when_it_has_more_than_was_named() -> None:
    world = ToyWorld(3, num_blocks=1, spans=[(0, 1)])
    state = SessionState(1, lambda block: ReplayBuffer(ROW_BYTES), max_step_tokens=512)
    (find,) = state.ask(bytes(20 * ROW_BYTES), 0.0)
    assert isinstance(find, FindServers)
    stage = world.new_stage("s0", 0, 1)
    state.on_found(find.repair, [stage], 0.0)
    with pytest.raises(PeerViolation, match="begins after 20 positions, and may skip 19"):
        state.on_opened(stage, ready(20, 8), 0.0)
    feeds = [action for action in state.on_opened(stage, ready(16, 8), 0.0) if isinstance(action, Feed)]
    assert [(feed.start, feed.end, feed.wants_token) for feed in feeds] == [(16, 20, True)]


def test_neighbours_are_unlinked_when_a_stage_is_lost() -> None:
    state, _ = opened(3, ((0, 1), (1, 2), (2, 3)))
    actions = state.on_lost(state.stages[1], PeerUnreachable("gone"), FailureCause.SILENT, 1.0)
    told = {action.stage.start: action.stage.link.neighbours for action in actions if isinstance(action, UpdateLink)}
    assert told[0].downstream is None
    assert told[2].upstream is None


@pytest.mark.parametrize(
    ("opens", "others", "why"),
    [
        (True, PeerUnreachable("gone"), "servers keep failing at the same token: gone (blocks 0:1)"),
        (False, PeerUnreachable("gone"), "blocks 0:1 are not available: none of their servers can be reached"),
        (False, PeerRefused("full"), "servers keep failing at the same token: gone (blocks 0:1)"),
    ],
)
def test_session_ends_when_server_after_server_is_lost(*, opens: bool, others: SwarmError, why: str) -> None:
    state, world = opened(1, ((0, 1),))
    stage = state.stages[0]
    for number in range(MAX_FAILURES + 1):
        assert state.error is None
        error = PeerUnreachable("gone") if number == MAX_FAILURES else others
        actions = state.on_lost(stage, error, FailureCause.SILENT, 1.0)
        finds = [action for action in actions if isinstance(action, FindServers)]
        if finds:
            stage = world.new_stage(f"s{number}", 0, 1)
            state.on_found(finds[0].repair, [stage], 1.0)
            if opens:
                state.on_opened(stage, ready(0, 8), 1.0)
    assert isinstance(state.error, SessionError)
    assert state.error.message == why


def test_search_is_repeated_with_the_next_request_when_it_found_nothing_between_requests() -> None:
    state, _ = opened(1, ((0, 1),))
    state.on_report(state.stages[0], StepReport(position=4, token=TOKEN), 1.0)
    (repair,) = [
        action.repair
        for action in state.on_lost(state.stages[0], PeerUnreachable("gone"), FailureCause.SILENT, 1.0)
        if isinstance(action, FindServers)
    ]
    assert state.on_not_found(repair, SessionError("nobody"), 30.0) == []
    assert [type(action) for action in state.ask(token_row(1), 40.0)] == [FindServers]
    state.on_not_found(repair, SessionError("nobody"), 60.0)
    assert str(state.error) == "nobody"


def test_stage_gets_no_more_time_when_it_reports_row_by_row() -> None:
    stage = toy().new_stage("a", 0, 2)
    stage.begin(0)
    stage.expect_report(100, 0.0)
    due_s, now_s = stage.deadline.due_s, 0.0
    while now_s + 1 < due_s:
        now_s += 1
        stage.progress(StepReport(position=stage.num_run + 1), now_s)
    assert 2 < stage.num_run < 50
    assert stage.deadline.due_s == due_s
    stage.expect_report(120, now_s)
    stage.progress(StepReport(position=100), now_s)
    assert stage.deadline.due_s > now_s + FLOOR_S  # the rows that came since give it a new deadline
    stage.progress(StepReport(position=120), now_s)
    assert stage.deadline.due_s == math.inf


def test_state_gives_a_handover_the_time_of_a_replay() -> None:
    world = toy(THIRDS * 3)
    world.ask(list(range(20)))
    world.strike("leave", served_by(world, 1))
    world.run_until(lambda: any(repair.is_handover and repair.new for repair in world.state.repairs))
    (repair,) = world.state.repairs
    again_s = max(stage.timer.expected_s(20) for stage in repair.new)
    assert again_s > 0
    assert repair.open_by_s == pytest.approx(repair.since_s + OPEN_S + again_s, abs=0.01)
