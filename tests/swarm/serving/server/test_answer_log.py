"""A server signs only inputs from which it computed its cache, whatever names a client gives to the pages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from unittest.mock import Mock

import pytest
import torch
from support.arithmetic_span import NUM_BLOCKS, REVISION, prompt_of
from support.served_chain import COLUMNS, Talk, World, hidden_rows, token_rows, with_servers
from swarm.serving.checking.span_commitment import signed_by
from swarm.serving.model.kv_pool import PAGE_TOKENS
from swarm.serving.server.answer_log import AnswerLog
from swarm.serving.server.connection_server import MAX_ENDED, SIGN_S, SWEEP_S
from swarm.serving.wire.page_keys import page_keys
from swarm_protocol.errors import PeerRefused
from swarm_protocol.rows import Rows
from swarm_protocol.served_evidence_messages import AnswerCommitment, PositionDigests
from swarm_protocol.session_frames import CloseSequence, Commitment, SequenceEnded, StepResult

TRUE, FALSE = prompt_of(PAGE_TOKENS), prompt_of(PAGE_TOKENS)[::-1]
KEYS = [bytes([number]) * 16 for number in range(1, 6)]


def page(number: float) -> Rows:
    """Return one page of hidden states that are unique to `number`."""
    return hidden_rows(torch.full((PAGE_TOKENS, COLUMNS), float(number)))


async def signed(world: World, talk: Talk, number: int) -> AnswerCommitment:
    """Close a session, and return what its server signed."""
    talk.connection.send(CloseSequence(sequence_id=bytes([number]) * 16, commit_to=4 * PAGE_TOKENS))
    return signed_by((await talk.next(Commitment)).signed, world.client.network_id)[1]


def digest(rows: Sequence[Rows]) -> bytes:
    digests = PositionDigests()
    for each in rows:
        digests.add_rows(digests.end, each.payload, each.row_bytes)
    return digests.digest(digests.end)


def test_server_signs_the_inputs_of_its_cache_when_a_client_sends_others_under_their_keys() -> None:
    """A client that could make it sign others would have evidence against an honest server."""

    async def work(world: World) -> None:
        talk, names = await world.talk(), tuple(page_keys(REVISION, TRUE))
        await talk.open(1, may_skip=64, page_keys=names)
        await talk.step(token_rows(*FALSE), 0, 1)
        await signed(world, talk, 1)
        await talk.open(2)
        await talk.step(token_rows(*TRUE), 0, 2)
        await signed(world, talk, 2)
        assert (await talk.open(3, may_skip=64, page_keys=names)).length == PAGE_TOKENS
        await talk.step(token_rows(7), PAGE_TOKENS, 3)
        stated = await signed(world, talk, 3)
        assert (stated.inputs_from, stated.inputs_to) == (0, PAGE_TOKENS + 1)
        assert stated.inputs_digest == digest([token_rows(*TRUE, 7)])

    with_servers(work)


def test_server_signs_all_outputs_of_rows_that_came_in_parts_and_were_run_at_once() -> None:
    async def work(world: World) -> None:
        talk = await world.talk()
        for number, parts in enumerate([(TRUE,), (TRUE[:5], TRUE[5:9], TRUE[9:])], start=1):
            await talk.open(number)
            position = 0
            for part in parts:
                is_end = position + len(part) == len(TRUE)
                talk.send_step(token_rows(*part), position, number, "token" if is_end else "nothing")
                position += len(part)
            while (await talk.next(StepResult)).position < len(TRUE):
                pass
        whole, in_parts = [await signed(world, talk, number) for number in (1, 2)]
        assert (whole.outputs_from, whole.outputs_to) == (len(TRUE) - 1, len(TRUE))
        assert (in_parts.outputs_from, in_parts.outputs_to) == (len(TRUE) - 1, len(TRUE))
        assert in_parts.outputs_digest == whole.outputs_digest

    with_servers(work, [(0, NUM_BLOCKS)])


def test_server_signs_all_rows_that_it_pushed_for_parts_that_were_run_at_once() -> None:
    log = AnswerLog(Mock())
    for position in (0, 4, 8):
        log.took(position, token_rows(*range(4)))
    rows = hidden_rows(torch.rand(12, COLUMNS))
    log.gave(0, rows)
    assert log.outputs.digest(12) == digest([rows])


def test_server_signs_an_answer_for_some_seconds_after_it_has_ended_the_session() -> None:
    """Its end and the client's close may cross."""

    async def work(world: World) -> None:
        talk = await world.talk()
        for number in (1, 2):
            await talk.open(number)
            await talk.step(token_rows(*TRUE), 0, number)
        for session in list(world.servers[0].connections.sessions.values()):
            session.end(PeerRefused("the server is leaving"))
            await talk.next(SequenceEnded)
        stated = await signed(world, talk, 1)
        assert (stated.inputs_to, stated.inputs_digest) == (PAGE_TOKENS, digest([token_rows(*TRUE)]))
        await asyncio.sleep(SIGN_S + SWEEP_S)
        for number in (1, 2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await signed(world, talk, number)

    with_servers(work)


def test_ended_sessions_of_a_stranger_displace_those_of_no_other_peer() -> None:
    async def work(world: World) -> None:
        talk, stranger = await world.talk(), await world.talk(client=world.internet.network())
        sessions = world.servers[0].connections.sessions

        async def end(talk: Talk, number: int) -> None:
            await talk.open(number, max_tokens=PAGE_TOKENS)
            await talk.step(token_rows(*TRUE), 0, number)
            next(iter(sessions.values())).end(PeerRefused("the server is leaving"))
            await talk.next(SequenceEnded)

        await end(talk, 1)
        for number in range(MAX_ENDED + 1):
            await end(stranger, number)
        assert (await signed(world, talk, 1)).inputs_to == PAGE_TOKENS
        assert (await signed(world, stranger, MAX_ENDED)).inputs_to == PAGE_TOKENS

    with_servers(work)


def test_server_does_not_sign_the_inputs_of_a_page_under_another_prefix() -> None:
    async def work(world: World) -> None:
        talk = await world.talk()
        await talk.open(1, may_skip=64, page_keys=tuple(KEYS[:2]))
        await talk.step(page(1.0), 0, 1)
        await talk.step(page(2.0), PAGE_TOKENS, 1)
        await signed(world, talk, 1)
        await talk.open(2, may_skip=64, page_keys=(KEYS[1], KEYS[0]))
        await talk.step(page(3.0), 0, 2)
        await talk.step(page(4.0), PAGE_TOKENS, 2)
        await signed(world, talk, 2)
        for number, (names, inputs) in enumerate([(KEYS[:2], (1.0, 2.0)), ([*KEYS[:2], KEYS[0]], ())], start=3):
            length = len(names) * PAGE_TOKENS
            assert (await talk.open(number, may_skip=64, page_keys=tuple(names))).length == length
            await talk.step(page(5.0), length, number)
            stated = await signed(world, talk, number)
            assert stated.inputs_from == (0 if inputs else length)
            assert stated.inputs_digest == digest([page(each) for each in (*inputs, 5.0)])

    with_servers(work, [(1, NUM_BLOCKS - 1)])


@pytest.mark.parametrize("num_again", [0, 1])
def test_pages_that_follow_cached_ones_are_signed_for_later_sessions(num_again: int) -> None:
    """`num_again` of the cached pages are computed once more."""

    async def work(world: World) -> None:
        talk = await world.talk()
        await talk.open(1, may_skip=64, page_keys=tuple(KEYS[:2]))
        for index in range(2):
            await talk.step(page(index), index * PAGE_TOKENS, 1)
        await signed(world, talk, 1)
        await talk.open(2, may_skip=(2 - num_again) * PAGE_TOKENS, page_keys=tuple(KEYS[:3]))
        for index in range(2 - num_again, 3):
            await talk.step(page(index), index * PAGE_TOKENS, 2)
        await signed(world, talk, 2)
        assert (await talk.open(3, may_skip=64, page_keys=tuple(KEYS[:3]))).length == 3 * PAGE_TOKENS
        await talk.step(page(3), 3 * PAGE_TOKENS, 3)
        stated = await signed(world, talk, 3)
        assert stated.inputs_from == 0
        assert stated.inputs_digest == digest([page(index) for index in range(4)])

    with_servers(work, [(1, NUM_BLOCKS - 1)])
