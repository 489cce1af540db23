"""Rows that servers push to each other, the client's copies of them, and the reports when they do not arrive."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from unittest.mock import patch

import pytest
import torch
from support.arithmetic_span import prompt_of
from support.faults import Fault
from support.served_chain import (
    COLUMNS,
    MODEL,
    Talk,
    World,
    floats,
    hidden_rows,
    opening,
    sequence_id,
    through,
    token_rows,
    with_servers,
)
from swarm.network.interface import Network, Stream
from swarm.serving.peer_shares import Sharer
from swarm.serving.server.push_connections import MAX_PEERS, MAX_REFUSED, REST_S, UNUSED_S, DialLimiter
from swarm.serving.server.server_session import refuse_push
from swarm.serving.wire.multiplexed_connection import MultiplexedConnection, open_stream
from swarm_protocol.errors import PeerRefused, PeerUnreachable, PeerViolation
from swarm_protocol.rows import Rows
from swarm_protocol.session_frames import (
    CloseSequence,
    Frame,
    LinkAck,
    LinkUpdate,
    Push,
    PushRefused,
    SequenceReady,
    SequenceRef,
    StepResult,
)

SPANS = [(0, 2), (2, 3), (3, 4)]
PROMPT = prompt_of(21)
SOURCE = sequence_id(99)


@pytest.mark.parametrize("codec", ["raw", "bf16", "int8"])
def test_step_is_pushed_down_the_chain_and_the_client_gets_copies_and_the_token(codec: str) -> None:
    async def work(world: World) -> None:
        talks = await world.chain(codec=codec)
        copies: list[list[Rows]] = [[], []]
        for start, end, want in ((0, 12, "nothing"), (12, 20, "nothing"), (20, 21, "token")):
            talks[0].send_step(token_rows(*PROMPT[start:end]), start, want=want, forward=True)
            for talk, kept in zip(talks[:2], copies, strict=True):
                result = await talk.next(StepResult)
                assert result.position == end
                assert not result.push_failed
                assert result.rows is not None
                kept.append(result.rows)
            last = await talks[2].next(StepResult)
            assert (last.position, last.rows) == (end, None)
            assert (last.token is None) == (want != "token")
        if codec == "raw":
            assert last.token is not None
            assert last.token.token_id == int(through(PROMPT, 3)[-1].argmax())
        await check_replay(world, copies[1], codec, last)

    async def check_replay(world: World, copies: list[Rows], codec: str, last: StepResult) -> None:
        """Feed another session from the client's copies, and check that it draws the same token."""
        talk = await world.talk(2)
        await talk.open(9, codec=codec)
        position = 0
        for rows in copies:
            want = "token" if position == 20 else "nothing"
            result = await talk.step(rows, position, 9, want=want)
            position = result.position
        assert result.token == last.token

    with_servers(work, SPANS)


def test_chunks_of_a_prompt_are_in_all_servers_at_once() -> None:
    async def work(world: World) -> None:
        talks = await world.chain()
        for start in range(0, 20, 5):
            want = "last" if start == 15 else "nothing"
            talks[0].send_step(token_rows(*PROMPT[start : start + 5]), start, want=want, forward=True)
        while (last := await talks[2].next(StepResult)).position < 20:
            assert last.rows is None
        assert torch.equal(floats(last.rows), through(PROMPT[:20], 3)[-1:])

    with_servers(work, SPANS)


def test_batch_of_sixteen_is_pushed_as_one_message() -> None:
    async def work(world: World) -> None:
        talks = [await world.talk(index) for index in range(2)]
        for number in range(16):
            for index, talk in enumerate(talks):
                await talk.open(number, max_tokens=16, **world.neighbours(index, number))
        await asyncio.sleep(1.0)
        for number in range(16):
            talks[0].send_step(token_rows(number), 0, number, want="token", forward=True)
        for _ in range(16):
            assert (await talks[1].next(StepResult)).batch_size == 16
        (outgoing,) = world.servers[0].connections.push_connections._outgoing.values()
        assert outgoing.connection is not None
        assert outgoing.connection.num_messages == 1

    with_servers(work, [(0, 2), (2, 4)])


# --- refused ----------------------------------------------------------------------------------------------------------


async def pusher(world: World, server: int) -> Talk:
    """The client's own connection, used as if it were a server's."""
    stream = await world.talks.enter_async_context(open_stream(world.client, world.servers[server].peer_id, MODEL))
    talk = Talk(MultiplexedConnection(stream, world.servers[server].peer_id), opening(world.servers[server]))
    return await world.talks.enter_async_context(talk)


def push(world: World, rows: Rows, position: int = 0, number: int = 1) -> Push:
    return Push(
        client_peer_id=world.client.peer_id,
        sequence_id=sequence_id(number),
        position=position,
        want="nothing",
        rows=rows,
        source_id=SOURCE,
    )


WRONG = {
    "a gap": (hidden_rows(torch.ones(1, COLUMNS)), 7, "the session ends at"),
    "not finite": (Rows(codec="raw", num_rows=1, num_columns=COLUMNS, payload=b"\xff" * 16), 0, "finite"),
    "wrong width": (hidden_rows(torch.ones(1, 3)), 0, "3 columns"),
}


def test_push_that_overtakes_the_clients_rows_begins_no_sequence_before_what_the_server_holds() -> None:
    """The server would compute its prefix again, and its results would be about rows that nobody asked it for."""

    async def work(world: World) -> None:
        talk, before = await world.talk(), await pusher(world, 0)
        keys, rows = (bytes(16),), torch.arange(24.0 * COLUMNS).reshape(24, COLUMNS)
        await talk.open(1, page_keys=keys)
        first = await talk.step(hidden_rows(rows), 0, want="all")
        named = SequenceRef(peer_id=world.client.peer_id, sequence_id=SOURCE)
        assert (await talk.open(2, page_keys=keys, may_skip=16, previous=named)).length == 16
        before.connection.send(push(world, hidden_rows(rows[:12]), 0, 2))
        before.connection.send(push(world, hidden_rows(rows[12:20]), 12, 2))
        result = await talk.next(StepResult)
        assert (result.position, floats(result.rows).tolist()) == (20, floats(first.rows)[16:20].tolist())
        result = await talk.step(hidden_rows(rows[16:]), 16, 2, want="all")
        assert (result.position, floats(result.rows).tolist()) == (24, floats(first.rows)[20:].tolist())

    with_servers(work, [(1, 3)])


@pytest.mark.parametrize("case", WRONG)
def test_wrong_push_is_refused_and_leaves_the_session_unchanged(case: str) -> None:
    rows, position, message = WRONG[case]

    async def work(world: World) -> None:
        talk, before = await world.talk(), await pusher(world, 0)
        await talk.open(previous=SequenceRef(peer_id=world.client.peer_id, sequence_id=SOURCE))
        before.connection.send(push(world, rows, position))
        refused = await before.next(PushRefused)
        assert (refused.client_peer_id, refused.sequence_id, refused.position) == (
            world.client.peer_id,
            sequence_id(1),
            position,
        )
        error = refused.error("")
        assert isinstance(error, PeerViolation)
        assert message in str(error)
        before.connection.send(push(world, hidden_rows(torch.ones(2, COLUMNS))))
        assert (await talk.next(StepResult)).position == 2

    with_servers(work, [(2, 4)])


def test_push_of_a_peer_that_the_client_did_not_name_is_refused() -> None:
    async def work(world: World) -> None:
        talk, stranger = await world.talk(), await pusher(world, 0)
        await talk.open(previous=SequenceRef(peer_id=world.internet.network().peer_id, sequence_id=SOURCE))
        stranger.connection.send(push(world, hidden_rows(torch.ones(2, COLUMNS))))
        assert isinstance((await stranger.next(PushRefused)).error(""), PeerViolation)
        stranger.connection.send(push(world, hidden_rows(torch.ones(2, COLUMNS)), number=5))
        assert isinstance((await stranger.next(PushRefused)).error(""), PeerRefused)
        talk.connection.send(
            LinkUpdate(
                sequence_id=sequence_id(1), previous=SequenceRef(peer_id=world.client.peer_id, sequence_id=SOURCE)
            )
        )
        assert (await talk.next(LinkAck)).position == 0
        stranger.connection.send(push(world, hidden_rows(torch.ones(2, COLUMNS))))
        assert (await talk.next(StepResult)).position == 2

    with_servers(work, [(2, 4)])


def test_refused_push_is_reported_to_the_client_which_feeds_the_server_itself() -> None:
    async def work(world: World) -> None:
        talks = [await world.talk(index) for index in range(2)]
        await talks[0].open(**world.neighbours(0))
        await talks[1].open()  # names no neighbour before it
        first = await talks[0].step(token_rows(*PROMPT), 0, forward=True, want="token")
        assert first.rows is not None
        failed = await talks[0].next(StepResult)
        assert (failed.push_failed, failed.position, failed.rows) == (True, len(PROMPT), None)
        answer = await talks[1].step(first.rows, 0, want="token")
        assert answer.token is not None
        assert answer.token.token_id == int(through(PROMPT, 2)[-1].argmax())

    with_servers(work, [(0, 2), (2, 4)])


def test_push_to_a_closed_session_is_reported_to_the_client() -> None:
    async def work(world: World) -> None:
        talks = await world.chain()
        talks[1].connection.send(CloseSequence(sequence_id=sequence_id(1)))
        await asyncio.sleep(1.0)
        await talks[0].step(token_rows(*PROMPT), 0, forward=True)
        assert (await talks[0].next(StepResult)).push_failed

    with_servers(work, SPANS)


# --- gone -------------------------------------------------------------------------------------------------------------


def test_client_links_another_server_when_the_next_one_dies() -> None:
    async def work(world: World) -> None:
        talks = await world.chain()
        first = await talks[0].step(token_rows(*PROMPT[:9]), 0, forward=True)
        await talks[1].next(StepResult)
        world.kill("s1")
        assert (await talks[0].next(StepResult)).push_failed
        second = await talks[0].step(token_rows(*PROMPT[9:20]), 9, forward=True)
        assert second.push_failed
        other = await world.add(2, 4)
        talk = await world.talk(other)
        await talk.open(7, previous=SequenceRef(peer_id=world.servers[0].peer_id, sequence_id=sequence_id(1)))
        talks[0].connection.send(
            LinkUpdate(sequence_id=sequence_id(1), next=SequenceRef(peer_id=other.peer_id, sequence_id=sequence_id(7)))
        )
        for position, result in ((0, first), (9, second)):
            assert result.rows is not None
            await talk.step(result.rows, position, 7)
        talks[0].send_step(token_rows(PROMPT[20]), 20, want="token", forward=True)
        answer = await talk.next(StepResult)
        assert answer.token is not None
        assert answer.token.token_id == int(through(PROMPT, 2)[-1].argmax())

    with_servers(work, [(0, 2), (2, 4)], dead=[1])


def test_other_sessions_go_on_when_the_next_server_dies_just_after_a_client_was_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The result that waits for the client is sent first, and cuts it off, since no frame may wait here."""

    async def work(world: World) -> None:
        talks = await world.chain()
        await talks[0].step(token_rows(*PROMPT[:9]), 0, forward=True)
        talks[0].send_step(token_rows(PROMPT[9]), 9, forward=True)
        [session] = world.servers[0].connections.sessions.values()
        async with asyncio.timeout(1):
            while not session._results._waiting:
                await asyncio.sleep(0.001)
        monkeypatch.setattr("swarm.serving.wire.multiplexed_connection.MAX_QUEUED_FRAMES", 0)
        world.kill("s1")
        await asyncio.sleep(1.0)
        assert session.is_closed
        assert not any(task.done() for task in world.servers[0].tasks)

    with_servers(work, [(0, 2), (2, 4)], dead=[1])


@pytest.mark.parametrize("who", ["nobody", "no server"])
def test_unreachable_next_server_is_reported_to_the_client(who: str) -> None:
    async def work(world: World) -> None:
        peer = world.internet.network()
        if who == "nobody":
            world.internet.crash(peer.peer_id)
        talk = await world.talk()
        await talk.open(next=SequenceRef(peer_id=peer.peer_id, sequence_id=sequence_id(1)))
        results = [await talk.step(token_rows(*PROMPT), 0, forward=True)]
        if not results[0].push_failed:
            results.append(await talk.next(StepResult))
        assert results[-1].push_failed
        assert results[0].rows is not None
        assert world.servers[0].connections.push_connections.num_connections == 0

    with_servers(work, [(0, 2)])


def test_server_is_not_flooded_when_it_refuses_all_pushes() -> None:
    async def work(world: World) -> None:
        victim, num_pushes = world.internet.network(), [0]

        async def refuse(peer_id: str, stream: object) -> None:
            connection = MultiplexedConnection(stream, peer_id)  # type: ignore[arg-type]

            def answer(frame: Frame) -> None:
                num_pushes[0] += 1
                assert isinstance(frame, Push)
                refuse_push(frame, connection, PeerRefused("not wanted"))

            await connection.run(answer)

        await victim.serve_stream(f"serving.lane/{MODEL}", refuse)
        talk = await world.talk()
        await talk.open(next=SequenceRef(peer_id=victim.peer_id, sequence_id=sequence_id(1)))
        for position in range(2 * MAX_REFUSED):
            talk.send_step(token_rows(1), position, forward=True)
            await asyncio.sleep(1.0)
        assert num_pushes[0] == MAX_REFUSED
        assert talk.heard[-1].push_failed  # type: ignore[union-attr]
        talk.connection.send(
            LinkUpdate(sequence_id=sequence_id(1), next=SequenceRef(peer_id=victim.peer_id, sequence_id=sequence_id(1)))
        )
        talk.send_step(token_rows(1), 2 * MAX_REFUSED, forward=True)
        await asyncio.sleep(1.0)
        assert num_pushes[0] == MAX_REFUSED + 1
        await victim.close()

    with_servers(work, [(0, 2)])


def test_client_can_have_a_server_dial_only_few_peers_and_none_again_at_once() -> None:
    dialled: list[str] = []

    def counted(network: Network, peer_id: str, model: str) -> AbstractAsyncContextManager[Stream]:
        dialled.append(peer_id)
        return open_stream(network, peer_id, model)

    async def work(world: World) -> None:
        talk = await world.talk()
        await talk.open()

        async def link_all(peers: list[str]) -> list[str]:
            dialled.clear()
            for peer_id in peers:
                talk.connection.send(
                    LinkUpdate(
                        sequence_id=sequence_id(1), next=SequenceRef(peer_id=peer_id, sequence_id=sequence_id(1))
                    )
                )
                await asyncio.sleep(0.01)
            return dialled

        dead = [world.internet.network().peer_id for _ in range(MAX_PEERS[-1] + 8)]
        for peer_id in dead:
            world.internet.crash(peer_id)
        assert await link_all(dead) == dead[: MAX_PEERS[-1]]
        assert await link_all(dead) == []
        other = await world.talk(client=world.internet.network())
        await other.open(2, next=SequenceRef(peer_id=dead[-1], sequence_id=sequence_id(1)))
        await asyncio.sleep(1.0)
        assert dialled == dead[-1:], "another client must still be able to have it dialled"
        await asyncio.sleep(REST_S)
        assert await link_all(dead[:1]) == dead[:1]

    with patch("swarm.serving.server.push_connections.open_stream", counted):
        with_servers(work, [(0, 2)])


def test_peers_that_many_keys_of_one_network_name_leave_some_to_another_network() -> None:
    async def scenario() -> None:
        limiter = DialLimiter()
        keys = [Sharer("one network", f"key {number}") for number in range(10)]
        allowed = [limiter.begin(f"{key.peer_id} {number}", key) for key in keys for number in range(40)]
        assert allowed == [True] * 32 + [False] * 8 + ([True] * 32 + [False] * 8) * 3 + [False] * 40 * 6
        assert limiter.begin("another", Sharer("another network", "visitor"))

    asyncio.run(scenario())


def test_servers_free_everything_when_one_is_killed_before_a_push() -> None:
    async def work(world: World) -> None:
        talks = await world.chain()
        talks[0].send_step(token_rows(*PROMPT), 0, forward=True)
        with pytest.raises(PeerUnreachable):
            await talks[0].next(StepResult)
        assert not talks[1].heard

    with_servers(work, SPANS, faults=[Fault(who="s0", phase="serve/push", what="kill")], dead=[0])


def test_connections_between_servers_stay_for_a_while_and_are_then_closed() -> None:
    async def work(world: World) -> None:
        servers = [server.connections for server in world.servers]
        talks = await world.chain()
        talks[0].send_step(token_rows(*PROMPT), 0, forward=True)
        for talk in talks:
            await talk.next(StepResult)
        for talk in talks:
            talk.connection.send(CloseSequence(sequence_id=sequence_id(1)))
        await asyncio.sleep(UNUSED_S / 2)
        assert [server.push_connections.num_connections for server in servers] == [1, 1, 0]
        await talks[0].open(2, **world.neighbours(0))
        await asyncio.sleep(UNUSED_S)
        assert [server.push_connections.num_connections for server in servers] == [1, 0, 0]
        talks[0].connection.send(CloseSequence(sequence_id=sequence_id(2)))
        await asyncio.sleep(UNUSED_S + 1)
        assert [server.push_connections.num_connections for server in servers] == [0, 0, 0]
        assert [server.num_connections for server in servers] == [1, 1, 1]  # the connection of the client

    with_servers(work, SPANS)


def test_connection_to_the_next_server_stays_open_while_silent_sessions_are_linked() -> None:
    async def work(world: World) -> None:
        talks = await world.chain()
        await asyncio.sleep(300.0)
        talks[0].send_step(token_rows(*PROMPT), 0, want="last", forward=True)
        assert (await talks[2].next(StepResult)).rows is not None
        assert len(talks[0].heard) == 1

    with_servers(work, SPANS, idle_s=1000.0)


def test_server_gets_no_more_pushes_when_it_answers_them_with_malformed_frames() -> None:
    async def work(world: World) -> None:
        liar = world.internet.network()

        async def lie(peer_id: str, stream: object) -> None:
            connection = MultiplexedConnection(stream, peer_id)  # type: ignore[arg-type]

            def answer(frame: Frame) -> None:
                connection.send(SequenceReady(sequence_id=sequence_id(1), max_step_tokens=1))

            await connection.run(answer)

        await liar.serve_stream(f"serving.lane/{MODEL}", lie)
        talk = await world.talk()
        await talk.open(next=SequenceRef(peer_id=liar.peer_id, sequence_id=sequence_id(1)))
        await talk.step(token_rows(*PROMPT), 0, forward=True)
        assert (await talk.next(StepResult)).push_failed
        assert world.servers[0].connections.push_connections.num_connections == 0
        await liar.close()

    with_servers(work, [(0, 2)])


def test_opening_is_unused_by_pushes_of_other_clients() -> None:
    async def work(world: World) -> None:
        other = world.internet.network()
        own, foreign = await world.talk(), await world.talk(client=other)
        await own.open(previous=SequenceRef(peer_id=world.client.peer_id, sequence_id=SOURCE))
        foreign.connection.send(
            opening(world.servers[0], 1, previous=SequenceRef(peer_id=world.client.peer_id, sequence_id=SOURCE))
        )
        await foreign.next(SequenceReady)
        before = await pusher(world, 0)
        before.connection.send(push(world, hidden_rows(torch.ones(2, COLUMNS))))
        assert (await own.next(StepResult)).position == 2
        assert not foreign.heard

    with_servers(work, [(2, 4)])
