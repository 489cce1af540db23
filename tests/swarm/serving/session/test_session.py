"""A session over servers that compute hashes, on a simulated internet: the tokens are the same whatever fails."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest
from support.leaks import no_leaks
from support.toy_server import COLUMNS, MODEL, VOCAB, ToyServer, expected_tokens, logits_of
from swarm.deadline_timer import READ_S
from swarm.network.membership import Membership
from swarm.network.memory.memory_link import LinkModel
from swarm.network.memory.memory_network import MemoryInternet, MemoryNetwork
from swarm.router.routing import Hop, NoChain, NoRoom
from swarm.serving.model.shape import ModelShape
from swarm.serving.session.client_state import ClientState, SessionOptions
from swarm.serving.session.session import MAX_STEP_BYTES, Session
from swarm.serving.session.session_actions import Action
from swarm.serving.session.silence import ANSWER_S, QUIET_S
from swarm.serving.session.step_timer import FLOOR_S, MAX_TOKEN_S
from swarm.serving.session.trace import Trace
from swarm.serving.wire.multiplexed_connection import SLOWEST_SERVER_BYTES_PER_S
from swarm.testing import virtual_time
from swarm_protocol.errors import ConfigError, PeerUnreachable, SessionError, SwarmError
from swarm_protocol.rows import Rows
from swarm_protocol.session_frames import SampledToken, StepResult, TokenDraw

NUM_BLOCKS = 6
THIRDS = [(0, 2), (2, 4), (4, 6)]
PROMPT = list(range(40))
RTT_S = 0.02


@dataclass
class World:
    internet: MemoryInternet
    network: MemoryNetwork
    membership: Membership
    servers: dict[str, ToyServer]
    state: ClientState

    def server_of(self, session: Session, index: int) -> ToyServer:
        """Return the server of a stage."""
        return self.servers[session._state.stages[index].peer_id]

    @asynccontextmanager
    async def session(
        self, trace: Trace | None = None, *, max_tokens: int = 200, **options: Any
    ) -> AsyncIterator[Session]:
        session = Session(
            self.state,
            ModelShape(name=MODEL, revision="r", num_blocks=NUM_BLOCKS, hidden_size=COLUMNS, vocab_size=VOCAB),
            max_tokens=max_tokens,
            servers=await self.membership.servers(MODEL),
            trace=trace or Trace(model=MODEL),
            options=SessionOptions(**options),
        )
        async with session:
            yield session

    async def all_freed(self) -> None:
        async with asyncio.timeout(5):
            while any(server.sequences for server in self.servers.values()):
                await asyncio.sleep(0.01)
        assert not self.state.health.load


@asynccontextmanager
async def world(spans: Sequence[tuple[int, int]] = THIRDS * 2, *, detection_s: float = 0.0) -> AsyncIterator[World]:
    internet = MemoryInternet(detection_s=detection_s, default_link=LinkModel(latency_s=RTT_S / 2))
    async with AsyncExitStack() as stack:
        network = internet.network()
        membership = await stack.enter_async_context(Membership(network))
        servers: dict[str, ToyServer] = {}
        for start, end in spans:
            node = internet.network()
            server = ToyServer(node, await stack.enter_async_context(Membership(node)), start, end, NUM_BLOCKS)
            await server.start_serving()
            stack.push_async_callback(server.close)
            servers[node.peer_id], server.others = server, servers
        while len(await membership.servers(MODEL)) < len(spans):
            await asyncio.sleep(0.1)
        state = ClientState(network, membership)
        stack.push_async_callback(state.close)
        yield World(internet, network, membership, servers, state)


async def generate(
    session: Session, num_tokens: int = 10, strike: Callable[[int], None] = lambda index: None, *, looped: bool = False
) -> list[int]:
    """Return greedy tokens. `strike` runs before each is requested, or while it is awaited."""
    tokens, new = list[int](), PROMPT
    if looped:
        strike(0)
        async for picked in session.next_tokens(PROMPT, TokenDraw(), num_tokens):
            tokens.append(picked.token_id)
            strike(len(tokens))
        return tokens
    for index in range(num_tokens):
        strike(index)
        new = [(await session.next_token(new, TokenDraw(index=index))).token_id]
        tokens += new
    return tokens


EXPECTED = expected_tokens(PROMPT, 10, NUM_BLOCKS)


def run(scenario: Any) -> None:
    with no_leaks():
        virtual_time.run(scenario)


def test_session_opens_in_one_round_trip_and_takes_the_chain_s_latency_for_each_token() -> None:
    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        async with world(THIRDS) as w:
            trace = Trace(model=MODEL)
            async with w.session(trace) as session:
                since_s = clock()
                await session.next_token(PROMPT, TokenDraw())
                # a connection is opened and accepted, a sequence opened; then the request, two pushes, the result
                assert clock() - since_s < 2 * RTT_S + 2 * RTT_S + 2 * RTT_S
                since_s = clock()
                await session.next_token([1], TokenDraw(index=1))
                assert clock() - since_s == pytest.approx(2 * RTT_S, abs=1e-3)
                assert [server.num_rows for server in w.servers.values()] == [41] * 3
            await w.all_freed()
            assert trace.replays == []
            assert [(hop.start, hop.end, hop.num_steps) for hop in trace.hops] == [(0, 2, 1), (2, 4, 1), (4, 6, 1)]

    run(scenario())


def test_sessions_share_connections() -> None:
    async def scenario() -> None:
        async with world(THIRDS) as w, AsyncExitStack() as stack:
            sessions = [await stack.enter_async_context(w.session()) for _ in range(8)]
            answers = await asyncio.gather(*(generate(session) for session in sessions))
            assert answers == [EXPECTED] * 8
            assert len(w.state.connections._tasks) == 3
            await stack.aclose()
            await w.all_freed()
            await asyncio.sleep(40)
            assert not w.state.connections._tasks, "an idle connection must be closed"

    run(scenario())


def test_session_does_not_use_a_connection_that_is_being_closed() -> None:
    async def scenario() -> None:
        async with world([(0, 6)]) as w:
            async with w.session() as session:
                assert await generate(session) == EXPECTED
            (peer_id,) = w.servers
            old = await w.state.connections.get(peer_id, MODEL)
            old._connection.end()  # its idle time is over at this very moment
            assert await w.state.connections.get(peer_id, MODEL) is not old
            trace = Trace(model=MODEL)
            async with w.session(trace) as session:
                assert await generate(session) == EXPECTED
            assert len(trace.hops) == 1
            await w.all_freed()

    run(scenario())


WHEN = {"before the second token": 1, "between": 5, "at the end": 9}


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("index", [0, 1, 2])
def test_session_loses_some_round_trips_and_no_token_when_a_server_dies(index: int, when: str, looped: bool) -> None:
    async def scenario() -> None:
        async with world() as w:
            trace = Trace(model=MODEL)
            async with w.session(trace) as session:
                strike = lambda i: i == WHEN[when] and w.internet.crash(w.server_of(session, index).network.peer_id)  # noqa: E731
                assert await generate(session, 10, strike, looped=looped) == EXPECTED
            (replay,) = trace.replays
            assert replay.num_tokens - (len(PROMPT) + WHEN[when] - 1) in ({0, 1} if looped else {0})
            assert 0 < replay.failover_ms < 8 * RTT_S * 1000
            await w.all_freed()

    run(scenario())


@pytest.mark.parametrize("spans", [THIRDS, [(0, 6)]])
def test_session_tokens_take_the_latency_between_servers_when_the_client_is_far_away(
    spans: list[tuple[int, int]],
) -> None:
    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        async with world(spans) as w:
            for peer_id in w.servers:
                w.internet.link(w.network.peer_id, peer_id, LinkModel(latency_s=0.4))
            trace = Trace(model=MODEL)
            async with w.session(trace) as session:
                times = []
                async for _ in session.next_tokens(PROMPT, TokenDraw(), 100):
                    times.append(clock())
            # the servers have connected to each other before the first token
            each_s = (times[-1] - times[0]) / 99
            assert each_s == pytest.approx(len(spans) * RTT_S / 2 if len(spans) > 1 else 0.0, abs=1e-3)
            assert trace.replays == []
            assert [server.num_rows for server in w.servers.values()] == [len(PROMPT) + 99] * len(spans)
            await w.all_freed()
            for peer_id in w.servers:  # so that all connections are closed when the test ends
                w.internet.link(w.network.peer_id, peer_id, LinkModel(latency_s=RTT_S / 2))

    run(scenario())


def test_session_stops_its_servers_when_it_takes_no_more_tokens() -> None:
    async def scenario() -> None:
        async with world(THIRDS) as w:
            async with w.session(max_tokens=1000) as session:
                async for _ in session.next_tokens(PROMPT, TokenDraw(), 900):
                    break
            await w.all_freed()
            assert all(server.num_rows < len(PROMPT) + 4 for server in w.servers.values())

    run(scenario())


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("delay_s", [0.02, 0.05, 0.06, 0.07, 0.08])
def test_session_gives_the_same_tokens_when_a_server_dies_during_prefill(index: int, delay_s: float) -> None:
    async def scenario() -> None:
        async with world() as w:
            trace = Trace(model=MODEL)
            async with w.session(trace, max_step_tokens=4) as session:
                strike = lambda: w.internet.crash([*w.servers][index])  # noqa: E731
                asyncio.get_running_loop().call_later(delay_s, strike)
                spare = {w.servers[peer_id] for peer_id in list(w.servers)[3:]}
                # so that the servers that die are those in use
                session._connections.finder._known.servers = {
                    server.network.peer_id: record
                    for server in w.servers.values()
                    if server not in spare
                    for record in [(await w.membership.servers(MODEL))[server.network.peer_id]]
                }
                assert await generate(session) == EXPECTED
            await w.all_freed()

    run(scenario())


@pytest.mark.parametrize("looped", [False, True])
def test_session_gives_the_same_tokens_when_two_servers_die_at_once(looped: bool) -> None:
    async def scenario() -> None:
        async with world() as w:
            trace = Trace(model=MODEL)
            async with w.session(trace) as session:

                def strike(index: int) -> None:
                    if index == 4:
                        for stage in list(session._state.stages)[:2]:
                            w.internet.crash(stage.peer_id)

                assert await generate(session, 10, strike, looped=looped) == EXPECTED
            assert len(trace.replays) == 2
            await w.all_freed()

    run(scenario())


def test_session_gives_a_server_up_that_answers_pings_and_no_step() -> None:
    async def scenario() -> None:
        async with world() as w:
            trace = Trace(model=MODEL)
            async with w.session(trace) as session:

                def strike(index: int) -> None:
                    if index == 4:
                        w.server_of(session, 1).spoil = lambda result: None

                assert await generate(session, 10, strike) == EXPECTED
            (replay,) = trace.replays
            assert FLOOR_S * 1000 < replay.failover_ms < (FLOOR_S + 1) * 1000
            assert replay.reason == "the server did not answer in time"

    run(scenario())


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("silent", [(0,), (1,), (2,), (0, 2)])
def test_session_gives_servers_up_at_once_that_answer_no_ping(silent: tuple[int, ...], looped: bool) -> None:
    async def scenario() -> None:
        async with world(detection_s=1e6) as w:
            trace, waited_s = Trace(model=MODEL), list[float]()
            async with w.session(trace) as session:

                def strike(index: int) -> None:
                    waited_s.append(asyncio.get_running_loop().time())
                    if index == 5:
                        w.internet.partition([[w.server_of(session, at).network.peer_id] for at in silent])

                assert await generate(session, 10, strike, looped=looped) == EXPECTED
            assert [replay.reason for replay in trace.replays] == ["the server does not answer a ping"] * len(silent)
            pause_s = max(after - before for before, after in pairwise(waited_s))
            assert QUIET_S + ANSWER_S < pause_s < QUIET_S + ANSWER_S + 0.5
            w.internet.heal()
            await w.all_freed()

    run(scenario())


@pytest.mark.parametrize("looped", [False, True])
def test_session_blames_no_server_when_its_own_line_pauses(looped: bool) -> None:
    async def scenario() -> None:
        async with world(detection_s=1e6) as w:
            trace = Trace(model=MODEL)
            async with w.session(trace) as session:

                def strike(index: int) -> None:
                    if index == 5:
                        w.internet.partition([[w.network.peer_id]])
                        asyncio.get_running_loop().call_later(0.8 * FLOOR_S, w.internet.heal)

                assert await generate(session, 10, strike, looped=looped) == EXPECTED
            assert trace.replays == []

    run(scenario())


@pytest.mark.parametrize("looped", [False, True])
def test_session_blames_no_server_when_its_own_process_was_stopped(looped: bool) -> None:
    async def scenario() -> None:
        async with world() as w:
            trace, loop = Trace(model=MODEL), asyncio.get_running_loop()
            assert isinstance(loop, virtual_time.VirtualTimeLoop)
            async with w.session(trace) as session:

                def strike(index: int) -> None:
                    if index == 5:
                        loop._now_s += 30.0  # no callback ran meanwhile

                assert await generate(session, 10, strike, looped=looped) == EXPECTED
            assert trace.replays == []

    run(scenario())


def test_deadlines_are_late_once_when_the_process_was_stopped_however_many_frames_come() -> None:
    async def scenario() -> None:
        async with world() as w, w.session() as session:
            loop, ticks = asyncio.get_running_loop(), list[float]()
            assert isinstance(loop, virtual_time.VirtualTimeLoop)
            since_s, state = loop.time(), session._state

            def due_s() -> float:
                return math.inf if ticks else since_s + 1

            def tick(now_s: float) -> list[Action]:
                ticks.append(now_s)
                return []

            with patch.object(state, "next_due_s", due_s), patch.object(state, "tick", tick):
                session._carry_out([])
                loop._now_s += 10.0
                for _ in range(20):
                    await asyncio.sleep(0.1)
                    session._carry_out([])  # as each frame does
            assert ticks == [pytest.approx(since_s + 10 + READ_S, abs=0.2)]

    run(scenario())


def test_session_opens_at_another_server_when_one_answers_no_ping() -> None:
    async def scenario() -> None:
        async with world(detection_s=1e6) as w:
            async with w.session() as session:
                assert await generate(session) == EXPECTED
                stopped = w.server_of(session, 1)
            await w.all_freed()
            w.internet.partition([[stopped.network.peer_id]])
            since_s = asyncio.get_running_loop().time()
            with patch.object(w.membership, "known_rtts_ms", return_value={stopped.network.peer_id: 0.0}):
                async with w.session() as session:
                    assert await generate(session) == EXPECTED
            assert asyncio.get_running_loop().time() - since_s < QUIET_S + ANSWER_S + 1
            w.internet.heal()
            await w.all_freed()

    run(scenario())


def test_session_gives_every_server_but_the_last_the_time_to_send_a_prompt_s_rows() -> None:
    async def scenario() -> None:
        async with world() as w, w.session(Trace(model=MODEL)) as session:
            assert await generate(session) == EXPECTED
            peer_id, record = next(iter((await w.membership.servers(MODEL)).items()))
            alone = Hop(peer_id=peer_id, start=0, end=NUM_BLOCKS, cost_ms=1.0, record=record)
            stages = [*session._state.stages, session._connections._new_stage(alone)]
            sent = [stage.output_row_bytes for stage in stages]
            assert sent == [stages[1].row_bytes, stages[2].row_bytes, 0, 0]
            first, second = stages[:2]
            first.num_arrived, second.num_arrived = first.num_run + 10**6, second.num_run + 10**6
            assert first.timeout_s() > 2 * 10**6 * second.row_bytes / SLOWEST_SERVER_BYTES_PER_S

    run(scenario())


def test_step_has_the_time_of_the_rows_that_other_sessions_of_the_client_wait_for() -> None:
    async def scenario() -> None:
        async with world(THIRDS) as w, w.session() as one, w.session() as other:
            assert await generate(one) == await generate(other) == EXPECTED
            (stage, *_), (beside, *_) = one._state.stages, other._state.stages
            assert stage.peer_id == beside.peer_id
            assert w.state.bytes_beside(one, stage.peer_id) == 0
            beside.num_expected = beside.num_run + 100
            num_bytes = 200 * max(beside.row_bytes, beside.output_row_bytes)
            assert w.state.bytes_beside(one, stage.peer_id) == num_bytes
            stage.num_expected += 1
            began_s = asyncio.get_running_loop().time()
            stage.expect_report(stage.num_run + 1, began_s)
            one._state.tick(stage.deadline.due_s)
            assert stage in one._state.stages
            due_s = began_s + stage.timeout_s() + num_bytes / SLOWEST_SERVER_BYTES_PER_S
            assert stage.deadline.due_s == pytest.approx(due_s)
            beside.num_expected, stage.num_expected = beside.num_run, stage.num_run

    run(scenario())


def test_session_timeout_does_not_grow_when_a_server_answers_just_in_time() -> None:
    async def scenario() -> None:
        async with world() as w, w.session(Trace(model=MODEL)) as session:
            await session.next_token(PROMPT, TokenDraw())
            timer = session._state.stages[1].timer
            for _ in range(50):
                timer.took(1, timer.timeout_s(1, 0) - 0.01)
            assert FLOOR_S < timer.timeout_s(1, 0) <= FLOOR_S + MAX_TOKEN_S

    run(scenario())


def test_session_sends_short_steps_when_rows_are_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with world() as w:
            trace = Trace(model=MODEL)
            async with w.session(trace) as session:
                assert await generate(session, 4) == expected_tokens(PROMPT, 4, NUM_BLOCKS)
            # three tokens, and the prompt's last row, which is alone in its step
            assert all(hop.num_steps == 3 + 1 for hop in trace.hops)
            assert {server.num_steps for server in w.servers.values()} == {0, -(-len(PROMPT) // 3) + 3}

    monkeypatch.setattr("swarm.serving.session.session.row_bytes", lambda codec, width: MAX_STEP_BYTES // 3)
    run(scenario())


def test_session_opens_its_sequence_again_when_it_was_evicted() -> None:
    async def scenario() -> None:
        async with world() as w:
            trace = Trace(model=MODEL)
            async with w.session(trace) as session:
                strike = lambda i: i == 4 and w.server_of(session, 1).evict()  # noqa: E731
                assert await generate(session, 10, strike) == EXPECTED
            assert [replay.reason for replay in trace.replays] == ["evicted"]

    run(scenario())


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_session_moves_without_a_replay_when_its_server_leaves(index: int, looped: bool) -> None:
    async def scenario() -> None:
        async with world() as w:
            trace = Trace(model=MODEL)
            async with w.session(trace) as session:
                strike = lambda i: i == 4 and w.server_of(session, index).leave()  # noqa: E731
                assert await generate(session, 30, strike, looped=looped) == expected_tokens(PROMPT, 30, NUM_BLOCKS)
            (replay,) = trace.replays
            assert replay.was_handed_over
            assert replay.num_tokens <= looped, "the successor runs only what came after the copy"
            # there is no pause besides the handover itself
            assert replay.failover_ms < 1000 * (0.05 + 5 * RTT_S)
            await w.all_freed()

    run(scenario())


@pytest.mark.parametrize("who", ["old", "new"])
def test_session_gives_the_same_tokens_when_a_server_dies_during_a_handover(who: str) -> None:
    async def scenario() -> None:
        async with world([*THIRDS * 2, (2, 4)]) as w:
            trace = Trace(model=MODEL)
            struck = []
            async with w.session(trace) as session:

                def kill() -> None:
                    (repair,) = session._state.repairs
                    assert repair.is_handover
                    assert repair.old is not None
                    struck.append(repair.old.peer_id if who == "old" else repair.new[0].peer_id)
                    w.internet.crash(struck[0])

                def strike(index: int) -> None:
                    if index == 4:
                        for server in w.servers.values():
                            server.hand_over_s = 1.0
                        w.server_of(session, 1).leave()
                        asyncio.get_running_loop().call_later(0.5, kill)

                assert await generate(session, 60, strike) == expected_tokens(PROMPT, 60, NUM_BLOCKS)
            assert struck
            (replay,) = trace.replays
            assert not replay.was_handed_over
            await w.all_freed()

    run(scenario())


def test_session_avoids_a_broken_link_between_two_servers() -> None:
    async def scenario() -> None:
        async with world(THIRDS) as w:
            trace = Trace(model=MODEL)
            clock = asyncio.get_running_loop().time
            async with w.session(trace) as session:
                seconds: list[float] = []

                def strike(index: int) -> None:
                    seconds.append(clock())
                    if index == 4:
                        upper = w.server_of(session, 0)
                        # what it sends to the next server is lost
                        upper._queues = dict.fromkeys(w.servers, asyncio.Queue())  # type: ignore[arg-type]

                assert await generate(session, 10, strike) == EXPECTED
            assert trace.replays == []
            assert seconds[5] - seconds[4] < FLOOR_S
            assert seconds[6] - seconds[5] < 4 * RTT_S, "later tokens must not wait for the same timeout"

    run(scenario())


def nonsense(result: StepResult) -> StepResult:
    bad = Rows(codec="raw", num_rows=1, num_columns=COLUMNS, payload=b"\x00\x00\xc0\x7f" * COLUMNS)
    return replace(result, rows=bad)


LIES: dict[str, Callable[[StepResult], StepResult]] = {
    "not a number": nonsense,
    "another position": lambda result: replace(result, position=result.position + 7),
    "fewer rows": lambda result: replace(result, rows=None),
    "logits": lambda result: replace(
        result, rows=Rows(codec="raw", num_rows=1, num_columns=VOCAB, payload=logits_of(bytes(8)).tobytes())
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_session_replaces_a_server_for_good_when_it_sends_invalid_frames(lie: str) -> None:
    async def scenario() -> None:
        async with world([*THIRDS, (2, 4)]) as w:
            trace = Trace(model=MODEL)
            async with w.session(trace) as session:
                liar = []

                def strike(index: int) -> None:
                    if index == 4:
                        liar.append(w.server_of(session, 1))

                        liar[0]._push = lambda *_: None  # type: ignore[method-assign]
                        liar[0].spoil = LIES[lie]

                assert await generate(session, 10, strike) == EXPECTED
            (replay,) = trace.replays
            assert replay.lost_peer == liar[0].network.peer_id
            async with w.session() as honest:
                assert await generate(honest) == EXPECTED
                assert w.server_of(honest, 1) is not liar[0]
            await w.all_freed()
            w.internet.crash(replay.new_peers[0])
            async with w.session(patience_s=3) as session:
                with pytest.raises(NoChain):
                    await generate(session)

    run(scenario())


LOGITS = Rows(codec="raw", num_rows=1, num_columns=VOCAB, payload=logits_of(bytes(8)).tobytes())
ANSWERS: dict[str, tuple[TokenDraw, Callable[[StepResult], StepResult]]] = {
    "a token outside the vocabulary": (TokenDraw(), lambda result: replace(result, token=SampledToken(token_id=VOCAB))),
    "logits for a token": (TokenDraw(), lambda result: replace(result, token=None, rows=LOGITS)),
    "logits beside a token": (TokenDraw(), lambda result: replace(result, rows=LOGITS)),
    "no probability": (TokenDraw(num_logprobs=1), lambda result: replace(result, token=SampledToken(token_id=1))),
    "a probability that nobody wants": (
        TokenDraw(),
        lambda result: replace(result, token=SampledToken(token_id=1, logprob=-1.0)),
    ),
    "too many likely ones": (
        TokenDraw(num_logprobs=0),
        lambda result: replace(result, token=SampledToken(token_id=1, logprob=-1.0, top=((1, -1.0),))),
    ),
    "a likely one outside the vocabulary": (
        TokenDraw(num_logprobs=1),
        lambda result: replace(result, token=SampledToken(token_id=1, logprob=-1.0, top=((VOCAB, -1.0),))),
    ),
}


@pytest.mark.parametrize("lie", ANSWERS)
def test_session_raises_a_violation_when_a_result_answers_another_request(lie: str) -> None:
    async def scenario() -> None:
        pick, spoil = ANSWERS[lie]
        async with world([(0, 6)]) as w:
            (server,) = w.servers.values()
            server.spoil = lambda result: spoil(result) if result.token or result.rows else result
            async with w.session(patience_s=2) as session:
                with pytest.raises(NoChain) as caught:
                    await session.next_token(PROMPT, pick)
            assert "just failed" in str(caught.value)

    run(scenario())


def test_session_avoids_a_server_that_claims_an_impossible_prefix() -> None:
    async def scenario() -> None:
        async with world([(0, 6), (0, 6)]) as w:
            trace = Trace(model=MODEL)
            liar = next(iter(w.servers.values()))
            liar.pages = [(b"",) * 6] * 100
            ready = ToyServer._ready

            def lying(self: ToyServer, peer_id: str, connection: Any, opened: Any, states: Any) -> None:
                ready(self, peer_id, connection, opened, self.pages)

            liar._ready = lying.__get__(liar)  # type: ignore[method-assign]
            for _ in range(3):
                async with w.session(trace) as session:
                    assert await generate(session) == EXPECTED
                    assert w.server_of(session, 0) is not liar

    run(scenario())


def test_session_reuses_a_prefix_that_the_servers_and_the_client_still_have() -> None:
    async def scenario() -> None:
        async with world(THIRDS) as w:
            for num_rows in (49, 49 + 49 - 32):
                trace = Trace(model=MODEL)
                async with w.session(trace) as session:
                    assert await generate(session) == EXPECTED
                assert [server.num_rows for server in w.servers.values()] == [num_rows] * 3
            assert trace.num_reused_tokens == 32
            await w.all_freed()

    run(scenario())


def test_session_goes_to_the_servers_that_have_its_prefix() -> None:
    """Without that, each of the three servers would be drawn from two by the session's id."""

    async def scenario() -> None:
        async with world() as w:
            used = set()
            for _ in range(8):
                trace = Trace(model=MODEL)
                async with w.session(trace) as session:
                    await generate(session)
                    used.add(tuple(stage.peer_id for stage in session._state.stages))
            assert len(used) == 1
            assert trace.num_reused_tokens == 32

    run(scenario())


def test_session_knows_the_servers_that_run_its_prefix_for_another_one() -> None:
    async def scenario() -> None:
        async with world(THIRDS) as w, w.session() as first, w.session() as second:
            await first.next_token(PROMPT, TokenDraw())
            second._messages.append_tokens(PROMPT)
            assert second._messages.cached_tokens() == (40, dict.fromkeys(w.servers, 32))

    run(scenario())


def test_session_replays_a_dead_server_from_the_start_after_a_reused_prefix() -> None:
    async def scenario() -> None:
        async with world() as w:
            async with w.session() as session:
                await generate(session)
            trace = Trace(model=MODEL)
            async with w.session(trace) as session:
                strike = lambda i: i == 4 and w.internet.crash(w.server_of(session, 1).network.peer_id)  # noqa: E731
                assert await generate(session, 10, strike) == EXPECTED
            assert trace.num_reused_tokens == 32
            assert trace.replays[0].num_tokens == 43

    run(scenario())


def test_session_names_the_missing_blocks_in_bounded_time_without_servers() -> None:
    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        async with world(THIRDS) as w, w.session(patience_s=5) as session:

            def strike(index: int) -> None:
                if index == 4:
                    w.internet.crash(w.server_of(session, 1).network.peer_id)

            since_s = clock()
            with pytest.raises(NoChain, match=r"blocks 2:4") as caught:
                await generate(session, 10, strike)
            assert "the connection broke" in str(caught.value.__cause__)
            assert 5 <= clock() - since_s < 8

    run(scenario())


def test_session_fails_at_once_with_the_reason_when_its_network_has_ended() -> None:
    async def scenario() -> None:
        async with world(THIRDS) as w, w.session() as session:
            ended = PeerUnreachable("this node's network has ended")

            def strike(index: int) -> None:
                if index == 4:
                    w.membership.servers = AsyncMock(side_effect=ended)  # type: ignore[method-assign]
                    w.internet.crash(w.server_of(session, 1).network.peer_id)

            async with asyncio.timeout(30):
                with pytest.raises(PeerUnreachable, match="network has ended"):
                    await generate(session, 10, strike)

    run(scenario())


DEFECTS: dict[str, Callable[[World, Session, BaseException], Any]] = {
    "the task that finds servers": lambda w, _, error: patch.object(w.membership, "servers", side_effect=error),
    "the task that opens a sequence": lambda w, _, error: patch.object(w.state.connections, "get", side_effect=error),
    "what is made of a server's frame": lambda _, session, error: patch.object(
        session._messages, "check_result", side_effect=error
    ),
    "a deadline": lambda _, session, error: patch.object(session._state, "tick", side_effect=error),
}


@pytest.mark.parametrize("error", [RuntimeError("a defect"), asyncio.CancelledError()], ids=["defect", "cancelled"])
@pytest.mark.parametrize("where", DEFECTS)
def test_session_fails_with_the_error_that_ended_one_of_its_tasks_or_callbacks(
    where: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    if isinstance(error, asyncio.CancelledError) and "task" not in where:
        error = ValueError("another defect")

    async def scenario() -> None:
        async with world(THIRDS) as w, w.session() as session:
            clock = asyncio.get_running_loop().time

            def strike(index: int) -> None:
                if index == 4:
                    since_s.append(clock())
                    silent = w.server_of(session, 1)
                    if where != "a deadline":
                        w.internet.crash(silent.network.peer_id)
                    else:
                        silent.spoil = lambda result: replace(result, position=0, rows=None, token=None)
                        silent._push = lambda *_: None  # type: ignore[method-assign]
                    defect.enter_context(DEFECTS[where](w, session, error))

            since_s: list[float] = []
            with ExitStack() as defect, pytest.raises(SessionError, match="failed internally"):
                async with asyncio.timeout(60):
                    await generate(session, 10, strike)
            assert clock() - since_s[0] < 10

    run(scenario())
    assert any(record.exc_info and record.exc_info[1] is not None for record in caplog.records)


@pytest.mark.parametrize("delay_s", [0.005, 0.015, 0.03, 0.05, 0.1, 1.0])
def test_sessions_end_with_their_client_wherever_they_wait(delay_s: float) -> None:
    async def scenario() -> None:
        async with world(THIRDS) as w:

            async def answer() -> None:
                async with w.session(max_tokens=2000) as session:
                    await generate(session, 1500, looped=True)

            answers = [asyncio.create_task(answer()) for _ in range(3)]
            await asyncio.sleep(delay_s)
            w.state.end_sessions()
            async with asyncio.timeout(5):
                await asyncio.wait(answers)
            for each in [*answers, asyncio.create_task(answer())]:
                with pytest.raises(SessionError, match="the client has been closed"):
                    await each
            await w.all_freed()

    run(scenario())


def test_sessions_that_wait_for_a_connection_fail_when_it_ends_before_it_began() -> None:
    async def scenario() -> None:
        async with world([(0, 6)]) as w:
            (server,) = w.servers
            waiting = asyncio.create_task(w.state.connections.get(server, MODEL))
            await asyncio.sleep(0)
            await w.state.connections.close()
            results: list[SwarmError] = []
            for asked in (waiting, w.state.connections.get(server, MODEL)):
                with pytest.raises(PeerUnreachable, match="connection is closed") as caught:
                    await asyncio.wait_for(asked, 1)
                results.append(caught.value)
            assert [error.peer_id for error in results] == [server] * 2

    run(scenario())


def test_session_frees_everything_when_it_is_closed_or_cancelled_at_any_moment() -> None:
    async def scenario() -> None:
        async with world() as w:

            async def one() -> None:
                async with w.session() as session:
                    await generate(session)

            for delay_s in (0.0, 0.005, 0.015, 0.03, 0.05, 0.08, 0.1, 0.2):
                task = asyncio.create_task(one())
                await asyncio.sleep(delay_s)
                task.cancel()
                await asyncio.wait([task])
                await w.all_freed()

    run(scenario())


def test_session_is_refused_when_its_replays_need_too_much_memory() -> None:
    async def scenario() -> None:
        async with world(THIRDS) as w:
            with pytest.raises(ConfigError, match="surviving a failure would take"):
                async with w.session(max_replay_bytes=1000) as session:
                    await generate(session)

    run(scenario())


def test_session_refuses_a_request_that_exceeds_its_room() -> None:
    async def scenario() -> None:
        async with world(THIRDS) as w, w.session() as session:
            with pytest.raises(ConfigError, match="201 tokens"):
                await session.next_token([0] * 201, TokenDraw())

    run(scenario())


def test_session_refused_for_lack_of_room_does_not_keep_a_smaller_one_from_the_server() -> None:
    async def scenario() -> None:
        async with world(THIRDS) as w:
            for server in w.servers.values():
                server.room_tokens = 100
            for _ in range(2):
                async with w.session() as session:
                    with pytest.raises(NoRoom, match="no server has room for 200 tokens"):
                        await generate(session)
            async with w.session(max_tokens=100) as session:
                assert await generate(session) == EXPECTED
            assert not w.state.health.avoid
            await w.all_freed()

    run(scenario())


def test_session_ends_when_all_servers_fail_at_the_same_token() -> None:
    async def scenario() -> None:
        async with world([(0, 6)] * 20) as w:
            for server in w.servers.values():
                server.spoil = lambda result: replace(result, position=result.position + 1000)
            async with w.session() as session:
                with pytest.raises(SessionError, match=r"no session|same token"):
                    await generate(session)

    run(scenario())


def test_session_trace_has_the_codec_error_and_the_spans() -> None:
    async def scenario() -> None:
        async with world(THIRDS) as w:
            next(iter(w.servers.values())).spoil = lambda result: replace(result, codec_error=0.25)
            trace = Trace(model=MODEL)
            async with w.session(trace) as session:
                await generate(session, 2)
            assert (trace.codec, trace.codec_error) == ("raw", 0.25)

    run(scenario())


def test_answer_ends_early_and_without_an_error_when_many_servers_are_full() -> None:
    """Their records claim room, so that all are asked, more often than a request may fail."""

    async def scenario() -> None:
        async with world([(0, 3), *[(3, NUM_BLOCKS)] * 7]) as w, w.session() as session:

            def fill(index: int) -> None:
                if index == 5:
                    for server in list(w.servers.values())[1:]:
                        server.room_tokens = 0
                        server.evict()

            tokens = await generate(session, 10, fill, looped=True)
            assert 5 <= len(tokens) < 10
            assert tokens == EXPECTED[: len(tokens)]

    run(scenario())
