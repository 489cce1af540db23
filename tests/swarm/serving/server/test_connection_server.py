"""A server's handling of client frames: sessions open, steps run, invalid frames are refused, and everything is
freed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.arithmetic_span import NUM_PAGES, REVISION, alone, answer, prompt_of
from support.faults import Fault
from support.served_chain import (
    COLUMNS,
    MAX_STEP_TOKENS,
    MODEL,
    Server,
    Talk,
    World,
    floats,
    hidden_rows,
    opening,
    sequence_id,
    token_rows,
    with_servers,
)
from swarm.ended_tasks import end_tasks
from swarm.serving.model.kv_pool import PAGE_TOKENS
from swarm.serving.peer_shares import RETRY_AFTER_S, WAIT_S, Sharer
from swarm.serving.server.connection_server import (
    IDLE_CONNECTION_S,
    MAX_CONNECTIONS_PER_PEER,
    ConnectionServer,
)
from swarm.serving.server.server_session import ServerSession
from swarm.serving.server.session_queues import MAX_INBOX, SessionInbox
from swarm.serving.server.waiting_clients import NUM_TOLD, PEER_PART, REFUSED_PER_S
from swarm.serving.wire.multiplexed_connection import MultiplexedConnection, open_stream
from swarm.serving.wire.page_keys import page_keys
from swarm_protocol import limits
from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerUnreachable, PeerViolation, SessionError
from swarm_protocol.frames import Frames
from swarm_protocol.rows import Rows
from swarm_protocol.session_frames import (
    AllowHandover,
    CloseSequence,
    Frame,
    LinkUpdate,
    OpenSequence,
    RoomFreed,
    SequenceEnded,
    SequenceReady,
    SequenceRef,
    ServerLeaving,
    StepRequest,
    StepResult,
    TokenDraw,
)

PROMPT = prompt_of(21)


# --- steps ------------------------------------------------------------------------------------------------------------


def test_session_answers_each_step_of_a_prompt_with_the_wanted_output() -> None:
    async def work(world: World) -> None:
        talk = await world.talk()
        ready = await talk.open()
        assert (ready.length, ready.max_step_tokens) == (0, MAX_STEP_TOKENS)
        first = await talk.step(token_rows(*PROMPT[:9]), 0)
        assert (first.position, first.rows, first.token, first.push_failed) == (9, None, None, False)
        second = await talk.step(token_rows(*PROMPT[9:15]), 9, want="all")
        assert torch.equal(floats(second.rows), alone(PROMPT[:15])[9:])
        third = await talk.step(token_rows(*PROMPT[15:20]), 15, want="last")
        assert torch.equal(floats(third.rows), alone(PROMPT[:20])[-1:])
        fourth = await talk.step(token_rows(PROMPT[20]), 20, want="token")
        assert fourth.token is not None
        assert fourth.token.token_id == answer(PROMPT, 1)[0]
        assert (fourth.position, fourth.rows, fourth.batch_size) == (21, None, 1)
        assert fourth.compute_ms > 0

    with_servers(work)


def test_session_answers_steps_that_were_sent_together_in_their_order() -> None:
    async def work(world: World) -> None:
        talk = await world.talk()
        await talk.open()
        for position in range(0, 20, 4):
            talk.send_step(token_rows(*PROMPT[position : position + 4]), position, want="last")
        for position in range(0, 20, 4):
            result = await talk.next(StepResult)
            assert result.position == position + 4
            assert torch.equal(floats(result.rows), alone(PROMPT[: position + 4])[-1:])

    with_servers(work)


def test_sessions_of_many_clients_share_one_pass() -> None:
    async def work(world: World) -> None:
        talk = await world.talk()
        for number in range(16):
            await talk.open(number, max_tokens=16)
        for number in range(16):
            talk.send_step(token_rows(number), 0, number, "token")
        results = [await talk.next(StepResult) for _ in range(16)]
        for number, result in enumerate(sorted(results, key=lambda result: result.sequence_id)):
            assert result.token is not None
            assert result.token.token_id == answer([number], 1)[0]
            assert result.batch_size == 16
        assert world.servers[0].engine.num_passes == 1

    with_servers(work)


def test_session_runs_only_the_rows_that_it_has_not_run() -> None:
    async def work(world: World) -> None:
        talk = await world.talk()
        await talk.open()
        await talk.step(token_rows(*PROMPT[:10]), 0)
        talk.send_step(token_rows(*PROMPT[2:8]), 2, want="all")  # nothing new, so no answer
        result = await talk.step(token_rows(*PROMPT[6:14]), 6, want="all")
        assert result.position == 14
        assert torch.equal(floats(result.rows), alone(PROMPT[:14])[10:])

    with_servers(work)


def test_session_begins_after_the_prefix_that_the_server_still_has() -> None:
    async def work(world: World) -> None:
        talk = await world.talk()
        prompt = prompt_of(40)
        await talk.open(1)
        await talk.step(token_rows(*prompt[:32]), 0)
        await talk.step(token_rows(*prompt[32:]), 32)
        keys = tuple(page_keys(REVISION, prompt))
        for number, (may_skip, length) in enumerate([(0, 0), (31, 16)], start=2):
            assert (await talk.open(number, page_keys=keys, may_skip=may_skip)).length == length
            result = await talk.step(token_rows(*prompt[:32]), 0, number, want="all")
            assert torch.equal(floats(result.rows), alone(prompt[:32])[length:]), "rows before it are dropped"

    with_servers(work)


@pytest.mark.parametrize("want", ["all", "last", "nothing"])
def test_middle_session_returns_the_wanted_output_or_all_rows_to_pass_on(want: str) -> None:
    async def work(world: World) -> None:
        talk = await world.talk()
        await talk.open()
        x_TH = torch.arange(12.0).reshape(3, COLUMNS)
        alone_rows = {"all": 3, "last": 1, "nothing": 0}[want]
        result = await talk.step(hidden_rows(x_TH), 0, want=want)
        assert (0 if result.rows is None else result.rows.num_rows) == alone_rows
        result = await talk.step(hidden_rows(x_TH), 3, want=want, forward=True)
        assert result.rows is not None
        assert result.rows.num_rows == 3
        assert not result.push_failed

    with_servers(work, [(1, 3)])


def test_session_uses_the_requested_codec_and_reports_its_error() -> None:
    async def work(world: World) -> None:
        talk = await world.talk()
        x_TH = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        for number, codec in enumerate(("raw", "bf16", "int8")):
            await talk.open(number, codec=codec)
            await talk.step(hidden_rows(x_TH + 700.3, codec), 0, number)
            result = await talk.step(hidden_rows(x_TH, codec), 1, number, forward=True)
            assert result.rows is not None
            assert result.rows.codec == codec
            assert (result.codec_error > 0) == (codec != "raw")
            assert result.codec_error < 0.01
        await talk.open(3, codec="bf16")
        talk.send_step(hidden_rows(x_TH, "raw"), 0, 3)
        assert "raw" in str((await talk.next(SequenceEnded)).error(""))

    with_servers(work, [(1, 3)])


# --- wrong steps ------------------------------------------------------------------------------------------------------

NAN_ROWS = Rows(codec="raw", num_rows=1, num_columns=COLUMNS, payload=b"\xff" * 4 * COLUMNS)

WRONG_TOKENS: dict[str, tuple[dict[str, Any], str]] = {
    "a gap": ({"position": 5}, "the session ends at"),
    "no token": ({"rows": token_rows(64)}, "vocabulary"),
    "negative": ({"rows": token_rows(-1)}, "vocabulary"),
    "hidden states": ({"rows": hidden_rows(torch.zeros(1, COLUMNS))}, "not token ids"),
    "too long": ({"rows": token_rows(*[1] * (MAX_STEP_TOKENS + 1))}, "this server takes"),
    "too much": ({"position": 2, "rows": token_rows(*[1] * 15)}, "the session has at most 16"),
}
WRONG_HIDDEN: dict[str, tuple[dict[str, Any], str]] = {
    "not finite": ({"rows": NAN_ROWS}, "finite"),
    "wrong width": ({"rows": hidden_rows(torch.zeros(1, COLUMNS + 1))}, "5 columns"),
    "tokens": ({"rows": token_rows(1)}, "columns in tokens"),
    "a token from the middle": ({"want": "token", "draw": TokenDraw()}, "only the last block"),
}


@pytest.mark.parametrize("case", [*WRONG_TOKENS, *WRONG_HIDDEN])
def test_wrong_step_ends_only_its_session_with_a_violation(case: str) -> None:
    is_first = case in WRONG_TOKENS
    changes, message = {**WRONG_TOKENS, **WRONG_HIDDEN}[case]
    right = token_rows(1, 2) if is_first else hidden_rows(torch.ones(2, COLUMNS))

    async def work(world: World) -> None:
        talk = await world.talk()
        await talk.open(1, max_tokens=16)
        await talk.open(2, max_tokens=16)
        await talk.step(right, 0, 1)
        num_tokens = world.servers[0].engine.num_tokens
        step = {"rows": right.without(1), "position": 2, "number": 1, **changes}
        talk.send_step(**step)
        ended = await talk.next(SequenceEnded)
        assert ended.sequence_id == sequence_id(1)
        error = ended.error("")
        assert isinstance(error, PeerViolation)
        assert message in str(error)
        assert world.servers[0].engine.num_tokens == num_tokens
        assert world.servers[0].engine.num_sequences == 1
        await talk.step(right, 0, 2)

    with_servers(work, [(0, 4) if is_first else (1, 3)])


def test_session_ends_when_a_client_sends_steps_without_waiting() -> None:
    async def work(world: World) -> None:
        talk = await world.talk()
        await talk.open()
        for position in range(MAX_INBOX + 2):
            talk.send_step(token_rows(1), position)
        assert "at once" in str((await talk.next(SequenceEnded)).error(""))

    with_servers(work)


def test_rows_of_a_step_beyond_those_that_may_wait_are_not_decoded() -> None:
    """One message may bring hundreds of steps with megabytes of rows."""

    async def work(world: World) -> None:
        talk = await world.talk()
        await talk.open()
        with patch.object(SessionInbox, "_decoded", autospec=True, side_effect=SessionInbox._decoded) as decoded:
            for position in range(MAX_INBOX + 2):
                talk.send_step(token_rows(1), position)
            assert "at once" in str((await talk.next(SequenceEnded)).error(""))
        assert decoded.call_count == MAX_INBOX

    with_servers(work)


def test_steps_of_all_sessions_of_a_client_together_are_bounded() -> None:
    async def work(world: World) -> None:
        talk = await world.talk()
        await talk.open(1)
        await talk.open(2)
        talk.send_step(token_rows(*[1] * 16), 0, 1)
        talk.send_step(token_rows(*[1] * 16), 0, 2)
        error = (await talk.next(SequenceEnded)).error("")
        assert isinstance(error, PeerRefused)
        assert error.retry_after_s > 0
        assert (await talk.next(StepResult)).sequence_id == sequence_id(1)

    with_servers(work, max_backlog_bytes=300)


def test_step_is_refused_when_its_session_is_unknown_or_of_another_client() -> None:
    async def work(world: World) -> None:
        own, foreign = await world.talk(), await world.talk(client=world.internet.network())
        await own.open()
        await own.step(token_rows(*PROMPT), 0)
        foreign.send_step(token_rows(1), len(PROMPT))
        foreign.connection.send(CloseSequence(sequence_id=sequence_id(1)))
        foreign.connection.send(LinkUpdate(sequence_id=sequence_id(1)))
        assert isinstance((await foreign.next(SequenceEnded)).error(""), PeerRefused)
        assert (await foreign.open()).length == 0  # an unknown id
        assert (await own.step(token_rows(1), len(PROMPT))).position == len(PROMPT) + 1

    with_servers(work)


@pytest.mark.parametrize(
    "frame",
    [
        SequenceReady(sequence_id=sequence_id(1), max_step_tokens=1),
        ServerLeaving(within_s=1.0),
        RoomFreed(),
        SequenceEnded(sequence_id=sequence_id(1), failure=b"x"),
    ],
    ids=lambda frame: type(frame).__name__,
)
def test_connection_ends_when_a_client_sends_a_frame_of_servers(frame: Any) -> None:
    async def work(world: World) -> None:
        talk, other = await world.talk(), await world.talk()
        await talk.open(1)
        await other.open(2)
        talk.connection.send(frame)
        with pytest.raises(PeerViolation):
            await talk.next(StepResult)
        assert list(world.servers[0].connections.sessions) == [(world.client.peer_id, sequence_id(2))]
        await other.step(token_rows(1), 0, 2)

    with_servers(work)


def absurd_step() -> StepRequest:
    pick = TokenDraw(temperature=1.0)
    object.__setattr__(pick, "temperature", math.nan)
    return StepRequest(sequence_id=sequence_id(1), position=0, want="token", draw=pick, rows=token_rows(1))


BROKEN: dict[str, Callable[[Server], bytes]] = {
    "invalid UTF-8": lambda server: (
        Frames((opening(server, session_id="name"),)).to_bytes().replace(b"name", b"\xff" * 4)
    ),
    "absurd sampling": lambda server: Frames((absurd_step(),)).to_bytes(),
    "half a message": lambda server: Frames((opening(server),)).to_bytes()[:-5],
}


@pytest.mark.parametrize("case", BROKEN)
def test_malformed_message_ends_only_its_connection_with_all_sessions(case: str) -> None:
    async def work(world: World) -> None:
        talk, other = await world.talk(), await world.talk()
        await talk.open(1)
        await other.open(2)
        await talk.connection._stream.send(BROKEN[case](world.servers[0]))
        with pytest.raises(PeerViolation):
            await talk.next(StepResult)
        assert list(world.servers[0].connections.sessions) == [(world.client.peer_id, sequence_id(2))]
        await other.step(token_rows(1), 0, 2)

    with_servers(work)


# --- who gets in ------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "revision": ({"revision": "other"}, "this server has revision"),
    "blocks": ({"start": 2, "end": 5}, r"this server has blocks"),
    "never fits": ({"max_tokens": 2**20}, "is over the"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_open_is_refused_for_good_when_the_blocks_are_not_served(case: str) -> None:
    changes, message = REFUSED[case]

    async def work(world: World) -> None:
        talk = await world.talk()
        error = await talk.refused(**changes)
        assert isinstance(error, PeerRefused)
        assert message in str(error)
        assert error.retry_after_s == 0
        assert world.servers[0].connections.num_refused == {"busy": 0, "never": 1, "violation": 0, "connections": 0}
        await talk.open()
        await talk.step(token_rows(1), 0)

    with_servers(work)


def test_open_is_refused_without_room_until_a_session_is_closed() -> None:
    async def work(world: World) -> None:
        talk = await world.talk()
        await talk.open(1, max_tokens=NUM_PAGES * PAGE_TOKENS)
        error = await talk.refused(2)
        assert isinstance(error, PeerRefused)
        assert error.retry_after_s > 0
        assert world.servers[0].connections.num_refused == {"busy": 1, "never": 0, "violation": 0, "connections": 0}
        talk.connection.send(CloseSequence(sequence_id=sequence_id(1)))
        await talk.open(2)

    with_servers(work)


def test_clients_that_were_refused_longest_ago_are_told_once_when_a_session_ends() -> None:
    async def work(world: World) -> None:
        holder, gone, *waiting = [await world.talk(client=world.internet.network()) for _ in range(NUM_TOLD + 4)]
        await gone.open()
        assert isinstance(await holder.refused(), PeerRefused)
        await asyncio.sleep(WAIT_S)
        gone.connection.send(CloseSequence(sequence_id=sequence_id(1)))
        await holder.open()
        assert holder.num_told == 0, "it may have gone elsewhere"
        for talk in waiting:
            for number in (2, 3):
                await talk.refused(number)
            await asyncio.sleep(0.1)
        holder.connection.send(CloseSequence(sequence_id=sequence_id(1)))
        await waiting[-1].open()
        assert [talk.num_told for talk in waiting] == [1] * NUM_TOLD + [0] * 2
        waiting[-1].connection.send(CloseSequence(sequence_id=sequence_id(1)))
        await waiting[0].open()
        assert [talk.num_told for talk in waiting] == [1] * (NUM_TOLD + 2)

    with_servers(work, max_sessions=1)


async def talk_from(world: World, provider: str) -> Talk:
    """Open a connection of a new client in a provider's network."""
    client = world.internet.network()
    world.internet.providers[client.peer_id] = provider
    return await world.talk(client=client)


def test_networks_are_told_in_turn_however_many_of_their_clients_wait() -> None:
    async def work(world: World) -> None:
        holder = await world.talk()
        greedy = [await talk_from(world, "greedy") for _ in range(3 * NUM_TOLD)]
        others = [await talk_from(world, f"other {number}") for number in range(NUM_TOLD)]
        await holder.open()
        for talk in [*greedy, *others]:
            await talk.refused()
        for ends in range(1, 3):
            holder.connection.send(CloseSequence(sequence_id=sequence_id(1)))
            await holder.open()
            num_greedy = sum(talk.num_told for talk in greedy)
            assert (num_greedy, sum(talk.num_told for talk in others)) == [(1, 3), (4, 4)][ends - 1]

    with_servers(work, max_sessions=1)


def test_peers_of_one_network_are_told_in_turn_however_many_connections_they_have() -> None:
    async def work(world: World) -> None:
        holder, greedy = await world.talk(), world.internet.network()
        world.internet.providers[greedy.peer_id] = "shared"
        talks = [await world.talk(client=greedy) for _ in range(NUM_TOLD)]
        other = await talk_from(world, "shared")
        await holder.open()
        for talk in [*talks, other]:
            await talk.refused()
        holder.connection.send(CloseSequence(sequence_id=sequence_id(1)))
        await holder.open()
        assert (sum(talk.num_told for talk in talks), other.num_told) == (NUM_TOLD - 1, 1)

    with_servers(work, max_sessions=1)


def test_network_that_asks_a_full_server_too_often_is_refused_at_once_and_others_are_not() -> None:
    async def work(world: World) -> None:
        holder = await world.talk()
        await holder.open()
        greedy = [await talk_from(world, "greedy") for _ in range(PEER_PART)]
        other = await talk_from(world, "other")
        engine = world.servers[0].engine
        with patch.object(engine, "open", wraps=engine.open) as judged:
            burst = int(REFUSED_PER_S * RETRY_AFTER_S)
            errors = [await greedy[number % PEER_PART].refused(number) for number in range(burst + 100)]
            assert all(isinstance(error, PeerRefused) and error.lacks_room and error.retry_after_s for error in errors)
            assert "others of your network ask too often" in str(errors[-1])
            assert burst <= judged.call_count <= burst + 10
            before = judged.call_count
            assert "your network" not in str(await other.refused())
            assert judged.call_count == before + 1
        holder.connection.send(CloseSequence(sequence_id=sequence_id(1)))
        await asyncio.sleep(PEER_PART / REFUSED_PER_S)
        await greedy[0].open()

    with_servers(work, max_sessions=1)


def test_peer_that_asks_a_full_server_without_end_leaves_refusals_for_others_of_its_network() -> None:
    async def work(world: World) -> None:
        holder = await world.talk()
        await holder.open()
        greedy, other = [await talk_from(world, "shared") for _ in range(2)]
        engine = world.servers[0].engine
        with patch.object(engine, "open", wraps=engine.open) as judged:
            burst = int(REFUSED_PER_S * RETRY_AFTER_S) // PEER_PART
            for number in range(5 * burst):
                await greedy.refused(number)
            assert burst <= judged.call_count <= burst + 10
            assert "ask too often" not in str(await other.refused())

    with_servers(work, max_sessions=1)


def test_thousands_of_sessions_on_one_connection_are_bounded_by_admission() -> None:
    async def work(world: World) -> None:
        talk = await world.talk()
        for number in range(2000):
            talk.connection.send(opening(world.servers[0], 0, sequence_id=number.to_bytes(16), max_tokens=1))
        async with asyncio.timeout(100):
            while len(talk.heard) < 2000:
                await asyncio.sleep(0.01)
        assert sum(isinstance(frame, SequenceReady) for frame in talk.heard) == 8
        assert world.servers[0].engine.num_sequences == 8

    with_servers(work, max_sessions=8)


def test_connection_ends_when_a_sequence_id_is_opened_twice() -> None:
    async def work(world: World) -> None:
        talk, other = await world.talk(), await world.talk(client=world.internet.network())
        await talk.open()
        await other.open()
        talk.connection.send(opening(world.servers[0]))
        with pytest.raises(PeerViolation, match="twice"):
            await talk.next(SequenceReady)
        assert world.servers[0].engine.num_sequences == 1
        await other.step(token_rows(1), 0)

    with_servers(work)


async def silent(world: World, client: Any) -> tuple[MultiplexedConnection, asyncio.Task[None]]:
    stream = await world.talks.enter_async_context(open_stream(client, world.servers[0].peer_id, MODEL))
    connection = MultiplexedConnection(stream, "")
    return connection, asyncio.create_task(connection.run(lambda frame: None))


def test_connections_are_bounded_by_peer_and_in_all_and_silent_ones_end() -> None:
    async def work(world: World) -> None:
        server = world.servers[0].connections
        greedy = [await silent(world, world.client) for _ in range(MAX_CONNECTIONS_PER_PEER + 1)]
        others = [await silent(world, world.internet.network()) for _ in range(12)]
        await asyncio.sleep(1.0)
        refused = [connection.error for connection, _ in greedy if isinstance(connection.error, PeerRefused)]
        assert server.num_connections == 16
        # one connection was too many from the start, and four more displaced others
        assert len(refused) == 1 + (MAX_CONNECTIONS_PER_PEER + 12 - 16)
        assert all(error.retry_after_s > 0 for error in refused)
        assert server.num_refused["connections"] == 1
        assert not any(connection.error for connection, _ in others)
        await asyncio.sleep(IDLE_CONNECTION_S + 2.0)
        assert server.num_connections == 0
        assert sum(isinstance(connection.error, PeerUnreachable) for connection, _ in greedy + others) == 16
        await asyncio.wait([running for _, running in greedy + others])

    with_servers(work, max_connections=16)


def test_connections_of_many_keys_of_one_network_displace_each_other_and_none_of_another_network() -> None:
    async def work(world: World) -> None:
        visitor, running = await silent(world, world.client)
        keys = [world.internet.network() for _ in range(12)]
        world.internet.providers = dict.fromkeys((key.peer_id for key in keys), "one network")
        opened = [await silent(world, key) for key in keys]
        await asyncio.sleep(1.0)
        assert world.servers[0].connections.num_connections == 4
        assert sum(isinstance(connection.error, PeerRefused) for connection, _ in opened) == 9
        assert visitor.error is None
        await asyncio.sleep(IDLE_CONNECTION_S + 2.0)
        await asyncio.wait([running, *(task for _, task in opened)])

    with_servers(work, max_connections=4)


def test_connections_without_sessions_are_ended_to_admit_others() -> None:
    async def work(world: World) -> None:
        server = world.servers[0].connections
        attackers = [await silent(world, world.internet.network()) for _ in range(4)]
        for connection, _ in attackers:
            connection.send(CloseSequence(sequence_id=sequence_id(1)))
        await asyncio.sleep(1.0)
        assert server.num_connections == 4
        talks = [await world.talk(client=world.internet.network()) for _ in range(3)]
        for talk in talks:
            await talk.open()
        refused, running = await silent(world, world.internet.network())
        await asyncio.sleep(1.0)
        assert server.num_connections == 4
        assert sum(isinstance(connection.error, PeerRefused) for connection, _ in attackers) == 4
        for talk in talks:
            await talk.step(token_rows(1), 0)
        last = await world.talk(client=world.internet.network())
        await last.open()
        assert isinstance(refused.error, PeerRefused)
        late, late_running = await silent(world, world.internet.network())
        await asyncio.sleep(1.0)
        assert isinstance(late.error, PeerRefused), "connections with sessions must not be ended to admit others"
        await asyncio.wait([running, late_running, *(task for _, task in attackers)])

    with_servers(work, max_connections=4)


# --- how it ends ------------------------------------------------------------------------------------------------------


def test_sessions_end_with_their_connection_also_while_they_compute() -> None:
    async def work(world: World) -> None:
        talk = await world.talk()
        for number in range(3):
            await talk.open(number)
        talk.send_step(token_rows(*PROMPT), 0, 0)
        talk.send_step(token_rows(*PROMPT), 0, 1)
        await asyncio.sleep(0.0)
        await world.talks.aclose()
        await world.servers[0].freed()

    with_servers(work)


@pytest.mark.parametrize("how", ["closed", "cut off", "evicted"])
def test_sessions_that_end_after_any_turn_of_the_loop_leave_nothing(how: str) -> None:
    """One takes over the cache of another server, and one has steps that were sent twice and in another order."""

    async def work(world: World) -> None:
        server, source = world.servers[1], await world.talk(0)
        await source.open()
        await source.step(token_rows(*PROMPT), 0)
        source.connection.send(AllowHandover(sequence_id=sequence_id(1), to_peer_id=server.peer_id))
        taken = SequenceRef(peer_id=world.servers[0].peer_id, sequence_id=sequence_id(1))
        talk = await world.talk(1)
        for num_turns in range(32):
            if how == "cut off":
                client = world.internet.network()
                talk = await world.talk(1, client)
            talk.connection.send(opening(server, 1))
            talk.connection.send(opening(server, 2, take_over=taken))
            for position in (0, 9, 0, 6):
                talk.send_step(token_rows(*PROMPT[position : position + 9]), position)
            talk.send_step(token_rows(1), 18, want="token")
            for _ in range(num_turns):
                await asyncio.sleep(0)
            await asyncio.sleep(num_turns % 4 * 0.0007)
            if how == "cut off":
                world.internet.crash(client.peer_id)
                await client.close()
            if how == "evicted":
                for session in list(server.connections.sessions.values()):
                    session.sequence.evict()
            for number in () if how == "cut off" else (1, 2):
                talk.connection.send(CloseSequence(sequence_id=sequence_id(number), commit_to=9))
            await server.freed()
            assert not server.engine._scheduler._networks.members

    with_servers(work, [(0, 4), (0, 4)])


def test_close_frees_the_session_at_once_and_is_not_answered() -> None:
    async def work(world: World) -> None:
        talk = await world.talk()
        await talk.open()
        talk.send_step(token_rows(*PROMPT), 0)
        talk.send_step(token_rows(*PROMPT), len(PROMPT))
        talk.connection.send(CloseSequence(sequence_id=sequence_id(1)))
        await world.servers[0].freed()
        await asyncio.sleep(1.0)
        assert not talk.heard

    with_servers(work)


def test_sessions_end_when_their_client_dies() -> None:
    async def work(world: World) -> None:
        client = world.internet.network()
        talk = await world.talk(client=client)
        await talk.open()
        await talk.step(token_rows(*PROMPT), 0)
        world.internet.crash(client.peer_id)
        await world.servers[0].freed()
        assert world.servers[0].connections.num_connections == 0

    with_servers(work)


def test_silent_session_and_then_its_connection_are_ended() -> None:
    async def work(world: World) -> None:
        talk = await world.talk()
        await talk.open()
        await talk.step(token_rows(1), 0)
        await asyncio.sleep(7.0)
        await talk.step(token_rows(1), 1)
        await asyncio.sleep(7.0)
        assert not talk.heard
        error = (await talk.next(SequenceEnded)).error("")
        assert isinstance(error, PeerRefused)
        assert "silent for 10 s" in str(error)
        await world.servers[0].freed()
        await asyncio.sleep(IDLE_CONNECTION_S + 2)
        assert isinstance(talk.connection.error, PeerUnreachable)
        assert world.servers[0].connections.num_connections == 0

    with_servers(work, idle_s=10.0)


def test_session_is_not_silent_while_what_it_has_computed_waits_for_a_slow_line() -> None:
    async def work(world: World) -> None:
        talk = await world.talk()
        await talk.open()
        ((_, session),) = world.servers[0].connections.sessions.items()
        send = session.connection._stream.send

        async def send_slowly(message: bytes) -> None:
            await asyncio.sleep(6.0)
            await send(message)

        session.connection._stream.send = send_slowly  # type: ignore[method-assign]
        for position in range(3):
            talk.send_step(token_rows(1), position)
            await asyncio.sleep(0.1)
        for position in range(3):
            assert (await talk.next(StepResult)).position == position + 1
        assert (await talk.next(SequenceEnded)).error("").message.startswith("the session was silent")

    with_servers(work, idle_s=10.0)


def test_session_ends_without_a_defect_when_its_connection_fails_as_it_becomes_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def prepare(_: ConnectionServer, session: ServerSession, _wanted: OpenSequence) -> None:
        session.connection.fail(PeerTimeout("the peer does not read what it is sent"))

    async def work(world: World) -> None:
        talk = await world.talk()
        source = SequenceRef(peer_id=world.client.peer_id, sequence_id=sequence_id(9))
        with pytest.raises(PeerTimeout, match="does not read"):
            await talk.open(take_over=source)

    monkeypatch.setattr(ConnectionServer, "_prepare", prepare)
    with_servers(work)


def test_client_is_notified_when_the_engine_evicts_its_session() -> None:
    async def work(world: World) -> None:
        talk = await world.talk()
        await talk.open(1, max_tokens=NUM_PAGES * PAGE_TOKENS)
        await asyncio.sleep(6.0)
        other = await world.talk(client=world.internet.network())
        await other.open(1)
        assert isinstance((await talk.next(SequenceEnded)).error(""), PeerRefused)

    with_servers(work, evict_idle_s=5.0)


def test_engine_failure_ends_only_its_session() -> None:
    async def work(world: World) -> None:
        def fail(batch: Any) -> None:
            raise ValueError("no such luck")

        talk = await world.talk()
        await talk.open(1)
        await talk.open(2)
        world.servers[0].span.on_run = fail
        talk.send_step(token_rows(1), 0, 1)
        error = (await talk.next(SequenceEnded)).error("")
        assert isinstance(error, SessionError)
        world.servers[0].span.on_run = lambda batch: None
        await talk.step(token_rows(1), 0, 2)

    with_servers(work)


def test_client_that_does_not_read_is_cut_off_and_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.serving.wire.multiplexed_connection.MAX_QUEUED_BYTES", 2**20)
    wrong = StepRequest(sequence_id=sequence_id(9), position=0, want="nothing", rows=token_rows(1))
    message = Frames((wrong,) * limits.MAX_FRAMES).to_bytes()

    async def send_without_end(world: World, other: Talk) -> None:
        stream = await world.talks.enter_async_context(
            open_stream(world.internet.network(), world.servers[0].peer_id, MODEL)
        )
        await stream.send(Frames((opening(world.servers[0], 1),)).to_bytes())
        # the server's answers are never read
        for position in itertools.count():
            await stream.send(message)
            if position < 50:
                await other.step(token_rows(1), position, 2)

    async def work(world: World) -> None:
        other = await world.talk()
        await other.open(2)
        with pytest.raises(PeerTimeout, match="does not read"):
            await send_without_end(world, other)
        assert list(world.servers[0].connections.sessions) == [(world.client.peer_id, sequence_id(2))]
        await other.step(token_rows(1), 50, 2)

    with_servers(work)


@pytest.mark.parametrize("phase", ["serve/prefill", "serve/decode", "serve/reply"])
def test_connections_end_when_a_fault_kills_their_server(phase: str) -> None:
    async def listen(talk: Talk) -> None:
        while True:
            await talk.next(StepResult)

    async def work(world: World) -> None:
        talk = await world.talk()
        await talk.open()
        talk.send_step(token_rows(*PROMPT), 0)
        talk.send_step(token_rows(1), len(PROMPT))
        with pytest.raises(PeerUnreachable):
            await listen(talk)

    with_servers(work, faults=[Fault(who="s0", phase=phase, what="kill")], dead=[0])


def test_client_waits_and_keeps_its_session_when_it_sends_faster_than_the_server_computes() -> None:
    async def work(world: World) -> None:
        talk = await world.talk()
        await talk.open()
        backlog = world.servers[0].connections.backpressure
        client = Sharer(world.client.peer_id, world.client.peer_id)
        backlog.take(client, 160)  # steps of other sessions of this client
        await talk.step(token_rows(*[1] * 16), 0)
        backlog.take(client, 130)
        talk.send_step(token_rows(*[1] * 16), 16)  # 128 bytes, for which there is no room
        await asyncio.sleep(1)
        assert not talk.heard
        backlog.give_back(client, 290)
        assert (await talk.next(StepResult)).position == 32

    with_servers(work, max_backlog_bytes=600)


# --- many keys --------------------------------------------------------------------------------------------------------


def test_steps_of_many_keys_of_one_network_leave_room_for_those_of_another_network() -> None:
    async def work(world: World) -> None:
        keys = [world.internet.network() for _ in range(12)]
        world.internet.providers = dict.fromkeys((key.peer_id for key in keys), "one network")
        talks = [await world.talk(client=key) for key in keys]
        visitor = await world.talk()
        for talk in (*talks, visitor):
            await talk.open(max_tokens=32)
        for talk in talks:
            talk.send_step(token_rows(*[1] * 16), 0)  # 128 bytes
        await asyncio.sleep(0.0005)  # the first of them run, and take 1 ms
        assert world.servers[0].connections.backpressure.num_bytes == 6 * 128
        assert (await visitor.step(token_rows(*[1] * 16), 0)).position == 16
        for key in keys:
            await key.close()

    with_servers(work, max_backlog_bytes=8 * 128)


async def admitted(talk: Talk) -> float:
    """Ask for a session as a client does until it is there, and return the seconds that this took."""
    clock = asyncio.get_running_loop().time
    since_s = clock()
    while True:
        talk.connection.send(dataclasses.replace(talk.blank, max_tokens=PAGE_TOKENS))
        if isinstance(await talk.next(Frame), SequenceReady):
            return clock() - since_s
        await asyncio.sleep(RETRY_AFTER_S)


async def used(talk: Talk, num_steps: int) -> None:
    """Run a step every three seconds, then end the session."""
    for position in range(num_steps):
        await talk.step(token_rows(position), position)
        await asyncio.sleep(3.0)
    talk.connection.send(CloseSequence(sequence_id=talk.blank.sequence_id))


@pytest.mark.parametrize("max_sessions", [15, 32], ids=["no place is kept", "places are kept"])
def test_hundred_keys_of_one_network_keep_no_visitor_of_another_network_out(max_sessions: int) -> None:
    async def flood(talk: Talk, num_steps: int) -> None:
        while True:
            await admitted(talk)
            await used(talk, num_steps)

    async def work(world: World) -> None:
        keys = [world.internet.network() for _ in range(100)]
        world.internet.providers = dict.fromkeys((key.peer_id for key in keys), "one network")
        talks = [await world.talk(client=key) for key in keys]
        floods = [asyncio.create_task(flood(talk, 1 + number % 4)) for number, talk in enumerate(talks)]
        await asyncio.sleep(15)
        visitor = await world.talk()
        for _ in range(4):
            async with asyncio.timeout(30):
                assert await admitted(visitor) <= 3 * RETRY_AFTER_S
            await used(visitor, 1)
            assert len(world.servers[0].connections.sessions) >= max_sessions - 3, "nothing is left idle for long"
            await asyncio.sleep(4)
        await end_tasks(*floods)
        for key in keys:
            await key.close()

    with_servers(work, max_sessions=max_sessions)
