"""Tokens that the last server pushes to the first one without waiting for the client."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.arithmetic_span import prompt_of, rows_of, sums_of
from support.faults import Fault
from support.served_chain import PICK, Talk, World, floats, hidden_rows, sequence_id, through, token_rows, with_servers
from swarm.serving.engine.engine import CHEAP_ROWS
from swarm.serving.server.session_sampler import SessionSampler
from swarm_protocol import limits
from swarm_protocol.errors import PeerViolation
from swarm_protocol.sampler import Sampler
from swarm_protocol.session_frames import (
    DraftText,
    LinkAck,
    LinkUpdate,
    Push,
    SequenceEnded,
    SequenceRef,
    StepResult,
    TokenDraw,
)

PROMPT = prompt_of(21)
SPANS = [(0, 2), (2, 3), (3, 4)]


async def ring(world: World, number: int = 1, sampler: Sampler | None = None) -> list[Talk]:
    """Open a connection to each server, with sequences that are linked in a ring. The last one has the sampler."""
    num_servers = len(world.servers)
    talks = [await world.talk(index) for index in range(num_servers)]
    for index, talk in enumerate(talks):
        await talk.open(
            number,
            previous=SequenceRef(peer_id=world.servers[index - 1].peer_id, sequence_id=sequence_id(number)),
            next=SequenceRef(peer_id=world.servers[(index + 1) % num_servers].peer_id, sequence_id=sequence_id(number)),
            sampler=sampler if index == num_servers - 1 else None,
        )
    await asyncio.sleep(1.0)
    return talks


def ask(talk: Talk, ahead: int, num_servers: int) -> None:
    pick = replace(PICK, ahead=ahead)
    talk.send_step(token_rows(*PROMPT), 0, want="token", draw=pick, forward=num_servers > 1)


async def drawn(talk: Talk, num_tokens: int) -> list[int]:
    found = []
    for index in range(num_tokens):
        result = await talk.next(StepResult)
        assert result.position == len(PROMPT) + index
        assert result.token is not None
        assert result.looped == (index + 1 < num_tokens)
        found.append(result.token.token_id)
    return found


def greedy(num_tokens: int, num_spans: int) -> list[int]:
    known = list(PROMPT)
    for _ in range(num_tokens):
        known.append(int(through(known, num_spans)[-1].argmax()))
    return known[len(PROMPT) :]


@pytest.mark.parametrize("spans", [SPANS, [(0, 4)]])
def test_loop_draws_as_many_tokens_as_are_allowed_and_no_more(spans: list[tuple[int, int]]) -> None:
    async def work(world: World) -> None:
        talks = await ring(world)
        ask(talks[0], 9, len(spans))
        assert await drawn(talks[-1], 10) == greedy(10, len(spans))
        await asyncio.sleep(1.0)
        assert not talks[-1].heard
        assert [server.engine.num_tokens for server in world.servers] == [len(PROMPT) + 9] * len(spans)

    with_servers(work, spans)


def test_loop_leaves_each_token_to_the_client_when_it_is_not_linked() -> None:
    async def work(world: World) -> None:
        talks = await world.chain()
        ask(talks[0], 9, 3)
        result = await talks[-1].next(StepResult)
        assert result.token is not None
        assert not result.looped

    with_servers(work, SPANS)


def test_loop_is_cut_by_a_link_update_whose_answer_says_what_came_before() -> None:
    async def work(world: World) -> None:
        talks = await ring(world)
        ask(talks[0], 40, 3)
        for _ in range(5):
            await talks[-1].next(StepResult)
        await asyncio.sleep(0.2)
        above = SequenceRef(peer_id=world.servers[1].peer_id, sequence_id=sequence_id(1))
        talks[-1].connection.send(LinkUpdate(sequence_id=sequence_id(1), previous=above))
        linked = await talks[-1].next(LinkAck)
        assert (linked.num_links, linked.position) == (1, len(PROMPT) + 5)
        # the row before it is run, and its result is pushed nowhere
        after = await talks[-1].next(StepResult)
        assert (after.position, after.num_links, after.looped) == (linked.position, 1, False)
        await asyncio.sleep(1.0)
        assert not talks[-1].heard

    # so that the LinkUpdate arrives while a row waits
    with_servers(work, SPANS, faults=[Fault(who="s2", phase="serve/decode", what="delay", nth=5, delay_s=0.5)])


def test_loop_stops_at_the_end_of_the_room_and_leaves_the_token_to_the_client() -> None:
    async def work(world: World) -> None:
        talks = await ring(world)
        ask(talks[0], 1000, 1)
        results = [await talks[0].next(StepResult)]
        while results[-1].looped:
            results.append(await talks[0].next(StepResult))
        assert results[-1].position == 64
        assert results[-1].token is not None
        await asyncio.sleep(1.0)
        assert not any(isinstance(frame, SequenceEnded) for frame in talks[0].heard)

    with_servers(work, [(0, 4)])


def test_loop_reports_a_refused_push_to_the_client() -> None:
    async def work(world: World) -> None:
        talks = await ring(world)
        talks[0].connection.send(
            LinkUpdate(
                sequence_id=sequence_id(1),
                next=SequenceRef(peer_id=world.servers[1].peer_id, sequence_id=sequence_id(1)),
            )
        )
        await talks[0].next(LinkAck)
        ask(talks[0], 9, 3)
        first = await talks[-1].next(StepResult)
        assert first.looped
        assert (await talks[-1].next(StepResult)).push_failed

    with_servers(work, SPANS)


def test_loop_reports_no_position_before_its_token_when_a_push_is_lost_beside_a_search_for_drafts() -> None:
    """The client takes a position without its token for a violation."""
    drew = SessionSampler.drew

    async def work(world: World) -> None:
        async def slow(sampler: SessionSampler, *drawn: Any) -> tuple[int, ...]:
            if len(sampler._drawn) == 1:
                world.kill("s0")
                await asyncio.sleep(1.0)
            return await drew(sampler, *drawn)

        talks = await ring(world, sampler=Sampler(presence_penalty=0.5))
        with patch.object(SessionSampler, "drew", slow):
            ask(talks[0], 9, 3)
            heard = [await talks[-1].next(StepResult) for _ in range(3)]
        assert [(told.position - len(PROMPT), told.push_failed, told.token is None) for told in heard] == [
            (0, False, False),
            (0, True, True),
            (1, True, False),
        ]

    with_servers(work, SPANS, dead=[0])


def test_loop_pushes_only_over_an_open_connection() -> None:
    async def work(world: World) -> None:
        talks = await world.chain()
        nowhere = world.internet.network().peer_id
        talks[-1].connection.send(
            LinkUpdate(
                sequence_id=sequence_id(1),
                previous=SequenceRef(peer_id=world.servers[1].peer_id, sequence_id=sequence_id(1)),
                next=SequenceRef(peer_id=nowhere, sequence_id=sequence_id(1)),
            )
        )
        await talks[-1].next(LinkAck)
        await asyncio.sleep(1.0)
        ask(talks[0], 9, 3)
        result = await talks[-1].next(StepResult)
        assert result.token is not None
        assert not result.looped
        assert result.push_failed, "the client has to learn that it should link again later"

    with_servers(work, SPANS)


def test_pick_beyond_the_longest_session_is_refused() -> None:
    assert TokenDraw(index=limits.MAX_SESSION_TOKENS - 1, ahead=1)
    with pytest.raises(ValueError, match="ahead"):
        TokenDraw(index=limits.MAX_SESSION_TOKENS, ahead=1)


# --- drafts -----------------------------------------------------------------------------------------------------------


def draft_text(*tokens: int, number: int = 1) -> DraftText:
    return DraftText(sequence_id=sequence_id(number), token_ids=token_rows(*tokens).payload)


@pytest.mark.parametrize("spans", [SPANS, [(0, 4)]])
def test_loop_with_drafts_draws_the_same_tokens_and_no_more(spans: list[tuple[int, int]]) -> None:
    """The text for drafts has the answer, with some wrong tokens, so that drafts are right until one of these."""
    expected = greedy(30, len(spans))

    async def work(world: World) -> None:
        talks = await ring(world)
        guessed = [token if index % 8 else token ^ 1 for index, token in enumerate(expected, 3)]
        talks[-1].connection.send(draft_text(*guessed, *PROMPT))
        ask(talks[0], 29, len(spans))
        results = [await talks[-1].next(StepResult) for _ in range(30)]
        assert [result.position for result in results] == list(range(len(PROMPT), len(PROMPT) + 30))
        assert [result.token.token_id for result in results if result.token] == expected
        assert sum(result.drafted for result in results) >= 8
        assert not results[-1].looped
        assert all(result.looped != result.drafted for result in results[:-1])
        await asyncio.sleep(1.0)
        assert not talks[-1].heard

    with_servers(work, spans)


@pytest.mark.parametrize("num_sessions", [1, 4, 9])
def test_sessions_of_one_pass_share_its_cheap_rows_for_their_drafts(num_sessions: int) -> None:
    expected = greedy(30, 2)

    async def work(world: World) -> None:
        talks = await ring(world)
        for number in range(2, num_sessions + 1):
            for index, talk in enumerate(talks):
                to = SequenceRef(peer_id=world.servers[1 - index].peer_id, sequence_id=sequence_id(number))
                await talk.open(number, previous=to, next=to)
        for number in range(1, num_sessions + 1):
            talks[1].connection.send(draft_text(*expected, *PROMPT, number=number))
        await asyncio.sleep(1.0)
        for number in range(1, num_sessions + 1):
            talks[0].send_step(token_rows(*PROMPT), 0, number, want="token", draw=replace(PICK, ahead=29), forward=True)
        found = [await talks[1].next(StepResult) for _ in range(30 * num_sessions)]
        assert sorted(result.position for result in found) == sorted([*range(21, 51)] * num_sessions)
        for server in world.servers:
            most = max(sum(piece.num_tokens for piece in batch.pieces) for batch in server.span.batches[3:])
            assert most <= max(CHEAP_ROWS, num_sessions)
            assert most > num_sessions or num_sessions > CHEAP_ROWS // 2

    with_servers(work, [(0, 2), (2, 4)])


def pushed(client: str, *tokens: int, position: int, drafts: int, number: int = 1) -> Push:
    return Push(
        client_peer_id=client,
        sequence_id=sequence_id(number),
        position=position,
        want="token",
        draw=replace(PICK, ahead=5),
        rows=token_rows(*tokens),
        source_id=sequence_id(7),
        num_drafts=drafts,
    )


def test_drafts_that_come_for_many_sessions_at_once_are_cut() -> None:
    async def work(world: World) -> None:
        before = world.internet.network()
        talk, pushing = await world.talk(0), await world.talk(0, client=before)
        previous = SequenceRef(peer_id=before.peer_id, sequence_id=sequence_id(7))
        for number in range(1, 9):
            await talk.open(number, previous=previous, end=3)
            await talk.step(token_rows(*PROMPT[:8]), 0, number)
        for number in range(1, 9):
            pushing.connection.send(pushed(world.client.peer_id, *range(16), position=8, drafts=15, number=number))
        results = [await talk.next(StepResult) for _ in range(8)]
        assert sorted(result.num_drafts for result in results) == [1, 1, 1, 2, 3, 4, 7, 15]
        await before.close()

    with_servers(work)


def test_drafts_that_a_last_server_did_not_make_are_dropped() -> None:
    async def work(world: World) -> None:
        liar = world.internet.network()
        talk, pushing = await world.talk(), await world.talk(client=liar)
        await talk.open(previous=SequenceRef(peer_id=liar.peer_id, sequence_id=sequence_id(7)))
        await talk.step(token_rows(*PROMPT), 0)
        pushing.connection.send(pushed(world.client.peer_id, 1, 2, 3, position=len(PROMPT), drafts=2))
        result = await talk.next(StepResult)
        assert (result.position, result.num_drafts, result.drafted) == (len(PROMPT) + 1, 0, False)
        assert result.token is not None
        assert result.token.token_id == int(through([*PROMPT, 1], 1)[-1].argmax())
        await liar.close()

    with_servers(work)


@pytest.mark.parametrize("num_drafts", [(2, 0), (0, 2)])
def test_wrong_push_beside_drafts_does_not_end_the_session(num_drafts: tuple[int, int]) -> None:
    """The previous server pushes a step before the last server has compared drafts, or made those of the step."""
    expected = greedy(9, 2)
    rows_TH = rows_of(sums_of(torch.tensor([*PROMPT, *expected], dtype=torch.float32)), False)

    async def work(world: World) -> None:
        liar = world.internet.network()
        talk, pushing = await world.talk(1), await world.talk(1, client=liar)
        previous = SequenceRef(peer_id=liar.peer_id, sequence_id=sequence_id(7))
        # the first server takes no token, since it has no such sequence
        await talk.open(previous=previous, next=SequenceRef(peer_id=world.servers[0].peer_id, sequence_id=bytes(16)))
        await asyncio.sleep(1.0)
        talk.connection.send(draft_text(*expected, *PROMPT))

        def push(position: int, drafts: int) -> None:
            rows = hidden_rows(rows_TH[position : position + 1 + drafts])
            wanted = pushed(world.client.peer_id, 0, position=position, drafts=0)
            pushing.connection.send(replace(wanted, rows=rows, num_drafts=drafts))

        async def token() -> int:
            while (result := await talk.next(StepResult)).token is None:
                pass
            return result.token.token_id

        talk.send_step(hidden_rows(rows_TH[:21]), 0, want="token", draw=replace(PICK, ahead=29))
        assert await token() == expected[0]
        push(21, 0)
        assert await token() == expected[1]
        push(22, num_drafts[0])
        push(23, num_drafts[1])
        num_drawn = 5 if num_drafts[0] else 4
        for known in expected[2:num_drawn]:
            assert await token() == known
        push(20 + num_drawn, 0)
        assert await token() == expected[num_drawn]
        await liar.close()

    with_servers(work, [(0, 2), (2, 4)])


def test_drafts_in_the_middle_are_replaced_by_the_next_step() -> None:
    """The step that comes next begins at the first draft, at a later one, or after the last."""

    async def work(world: World) -> None:
        before = world.internet.network()
        talk, pushing = await world.talk(0), await world.talk(0, client=before)
        for number, next_at in enumerate((1, 2, 3), 1):
            previous = SequenceRef(peer_id=before.peer_id, sequence_id=sequence_id(7))
            await talk.open(number, previous=previous, end=3)
            await talk.step(token_rows(*PROMPT), 0, number)
            push = pushed(world.client.peer_id, 5, 6, 7, position=len(PROMPT), drafts=2, number=number)
            pushing.connection.send(push)
            held = await talk.next(StepResult)
            assert (held.position, held.num_drafts) == (len(PROMPT) + 3, 2)
            pushing.connection.send(push)  # once more, which is dropped
            talk.connection.send(LinkUpdate(sequence_id=sequence_id(number)))
            assert (await talk.next(LinkAck)).position == len(PROMPT) + 1, "drafts do not count"
            kept = [5, 6, 7][:next_at]
            result = await talk.step(token_rows(9), len(PROMPT) + next_at, number, "all")
            assert result.position == len(PROMPT) + next_at + 1
            expected = rows_of(sums_of(torch.tensor([*PROMPT, *kept, 9], dtype=torch.float32)), False)[-1:]
            assert torch.equal(floats(result.rows), expected)
        talk.send_step(token_rows(1), len(PROMPT) + 9, 1)
        assert "session ends at" in str((await talk.next(SequenceEnded)).error(""))
        await before.close()

    with_servers(work)


@pytest.mark.parametrize(("end", "tokens"), [(3, (1, 2)), (4, (1, 10**6))], ids=["not the last block", "no token"])
def test_text_for_drafts_that_no_server_can_use_ends_the_connection(end: int, tokens: tuple[int, ...]) -> None:
    async def work(world: World) -> None:
        talk = await world.talk()
        await talk.open(end=end)
        talk.connection.send(draft_text(*tokens))
        with pytest.raises(PeerViolation):
            await talk.step(token_rows(1), 0)

    with_servers(work)
