"""Answers that outgrow the room that their session got at first have the same tokens, and a full cache ends one by
`length`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from swarm.client import SamplingParams
from swarm.network.membership import Membership
from swarm.router.routing import NoRoom
from swarm.serving.checking.spot_checks import SpotCheckOptions
from swarm.serving.engine.compute import compute
from swarm.serving.engine.engine import Engine
from swarm.serving.engine.page_allocator import PageTable
from swarm.serving.engine.sequence import EngineSequence
from swarm.serving.grammar.grammar_masks import MAX_GRAMMARS
from swarm.serving.model.batch import Want
from swarm.serving.sampling.sampling import LogitEdits
from swarm.serving.server.deployment import ServerOptions
from swarm.serving.server.session_sampler import SessionSampler
from swarm.serving.server.span_server import SpanServer
from swarm.serving.server.waiting_clients import WaitingClients
from swarm.serving.session import session_messages
from swarm.serving.session.client_state import SessionOptions
from swarm.serving.session.connection_pool import ROOM_S
from swarm.serving.session.route_finder import LOOK_UP_S
from swarm.serving.wire.multiplexed_connection import MultiplexedConnection
from swarm.testing import virtual_time
from swarm_protocol.errors import PeerRefused, SessionError
from swarm_protocol.limits import PAGE_TOKENS
from swarm_protocol.sampler import Grammar
from swarm_protocol.session_frames import RoomFreed

HALVES = [(0, 3), (3, 6)]
NUM_TOKENS = 100
SMALL_BYTES = 96 * 768
"""A cache for 96 tokens, of 768 bytes each: fewer than PROMPT and NUM_TOKENS have."""

STEERED = SamplingParams(
    grammar=Grammar(kind="lark", text="start: /[a-z]{3,8}( [a-z]{3,8}){20,}/"),
    temperature=1.0,
    seed=11,
    presence_penalty=0.5,
    repetition_penalty=1.2,
    num_logprobs=2,
)


@pytest.fixture(autouse=True)
def grows() -> Iterator[None]:
    """Sessions get room for one page of their answer at first."""
    with patch("swarm.serving.session.session_messages.GROWTH_TOKENS", PAGE_TOKENS):
        yield


STEP_S = 0.3


def slow_step(function: Any) -> float:
    return 0.01


def full(server: SpanServer) -> PageTable:
    """Take all free pages of a server's cache. `PageAllocator.release` frees them."""
    pages = server.deployed.engine.pages
    table = pages.reserve(pages.num_free)
    assert table is not None
    return table


def with_grammar(server: SpanServer, client: str) -> EngineSequence:
    """Open a sequence with a grammar for another client. It frees the grammar's place when it is ended."""
    span = server.deployed.engine.span
    sequence = server.deployed.engine.open(client=client, start=span.start, end=span.end, max_tokens=2 * PAGE_TOKENS)
    grammar = server._grammars.open(STEERED.grammar, sequence)
    sequence.on_ended = lambda _: grammar.close()
    return sequence


async def answer(generation: Any) -> tuple[list[int], str | None]:
    tokens = [token async for token in generation]
    return [token.token_id for token in tokens if token.is_drawn], tokens[-1].finish_reason


@pytest.mark.parametrize("spans", [[(0, 6)], HALVES, [(0, 2), (2, 4), (4, 6)]], ids=["one", "two", "three"])
def test_answer_that_grows_is_that_of_one_machine(boxes: Any, llama_dir: Path, spans: Any) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, spans) as box:
            generation = box.generate(NUM_TOKENS, ignore_eos=True)
            most, drawn = 0, list[int]()
            async for token in generation:
                drawn.append(token.token_id)
                engines = [server.deployed.engine for server in box.servers.values()]
                most = max(most, *(engine.pool.num_pages - engine.pages.num_free for engine in engines))
                if len(drawn) == 1:
                    assert most <= 1 + -(-(generation.num_prompt_tokens + 2 * PAGE_TOKENS) // PAGE_TOKENS)
            assert drawn == box.expected(NUM_TOKENS)
            assert generation.trace()["replays"] == []
            assert most * PAGE_TOKENS >= generation.num_prompt_tokens + NUM_TOKENS - 1
            await box.all_freed()

    virtual_time.run(scenario(), compute_s=slow_step)


@pytest.fixture(scope="module")
def steered(boxes: Any, llama_dir: Path) -> list[Any]:
    """Return the tokens of a STEERED answer for which there is room from the beginning."""
    assert session_messages.GROWTH_TOKENS > NUM_TOKENS

    async def scenario() -> list[Any]:
        async with boxes(llama_dir, HALVES) as box:
            return [token async for token in box.generate(NUM_TOKENS, sampling=STEERED)]

    return virtual_time.run(scenario(), compute_s=slow_step)


@pytest.mark.parametrize("victim", [None, 0, 1])
def test_steered_answer_that_grows_is_the_same_also_if_a_server_dies(
    boxes: Any, llama_dir: Path, steered: list[Any], victim: int | None
) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES * 2) as box:
            generation, tokens = box.generate(NUM_TOKENS, sampling=STEERED), list[Any]()
            async for token in generation:
                tokens.append(token)
                if victim is not None and len(tokens) == 60:
                    box.internet.crash(generation.trace()["hops"][victim]["peer_id"])
            assert [token.token_id for token in tokens] == [token.token_id for token in steered]
            assert [token.text for token in tokens] == [token.text for token in steered]
            assert [token.logprob for token in tokens] == pytest.approx([token.logprob for token in steered], abs=1e-4)
            assert len(generation.trace()["replays"]) == (victim is not None)

    virtual_time.run(scenario(), compute_s=slow_step)


def test_answer_without_a_limit_ends_where_the_context_ends(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            generation = box.generate(None, ignore_eos=True)
            drawn, reason = await answer(generation)
            context = await box.client.context_tokens("tiny")
            assert len(drawn) == context - generation.num_prompt_tokens
            assert (drawn[:NUM_TOKENS], reason) == (box.expected(NUM_TOKENS), "length")
            await box.all_freed()

    virtual_time.run(scenario())


@pytest.mark.parametrize("index", [0, 1])
def test_answer_goes_on_where_another_server_has_room(boxes: Any, llama_dir: Path, index: int) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES * 2) as box:
            generation, drawn = box.generate(NUM_TOKENS, ignore_eos=True), list[int]()
            async for token in generation:
                drawn.append(token.token_id)
                if len(drawn) == 50:
                    full_peer = generation.trace()["hops"][index]["peer_id"]
                    full(box.servers[full_peer])
            assert drawn == box.expected(NUM_TOKENS)
            (replay,) = generation.trace()["replays"]
            assert replay["lost_peer"] == full_peer
            assert "the server is full: its cache has no room for " in replay["reason"]
            assert replay["failover_ms"] < 1000

    virtual_time.run(scenario(), compute_s=slow_step)


@pytest.mark.parametrize("index", [0, 1])
def test_answer_that_has_grown_moves_with_its_cache_from_a_server_that_leaves(
    boxes: Any, llama_dir: Path, index: int
) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES * 2) as box, asyncio.TaskGroup() as tasks:
            generation, drawn = box.generate(NUM_TOKENS, ignore_eos=True), list[int]()
            async for token in generation:
                drawn.append(token.token_id)
                if len(drawn) == 50:
                    tasks.create_task(box.servers[generation.trace()["hops"][index]["peer_id"]].drain())
            assert drawn == box.expected(NUM_TOKENS)
            (replay,) = generation.trace()["replays"]
            assert replay["was_handed_over"]

    virtual_time.run(scenario(), compute_s=slow_step)


def test_answer_waits_for_room_and_goes_on(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box, asyncio.TaskGroup() as tasks:
            generation, drawn = box.generate(NUM_TOKENS, ignore_eos=True), list[int]()

            async def free(server: SpanServer, table: PageTable) -> None:
                await asyncio.sleep(7)
                server.deployed.engine.pages.release(table)
                server.announcer.changed()

            async for token in generation:
                drawn.append(token.token_id)
                if len(drawn) == 50:
                    server = next(iter(box.servers.values()))
                    tasks.create_task(free(server, full(server)))
            assert drawn == box.expected(NUM_TOKENS)
            (replay,) = generation.trace()["replays"]
            assert 5000 < replay["failover_ms"] < 15000
            await box.all_freed()

    virtual_time.run(scenario(), compute_s=slow_step)


def test_requests_get_room_in_the_order_in_which_they_asked(boxes: Any, llama_dir: Path) -> None:
    """The users of a gateway want six times as many sessions as its server has."""

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)], options=ServerOptions(max_sessions=2)) as box:
            begun = list[int]()

            async def ask(user: int) -> None:
                await asyncio.sleep(0.37 * user)
                async for _ in box.generate(4):
                    begun.append(user)

            async with asyncio.TaskGroup() as tasks:
                for user in range(12):
                    tasks.create_task(ask(user))
            assert list(dict.fromkeys(begun)) == list(range(12))

    virtual_time.run(scenario(), compute_s=lambda function: 0.5 if function is compute else 0.0)


def test_request_of_another_client_gets_a_place_as_soon_as_it_is_free(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)], options=ServerOptions(max_sessions=1)) as box, box.visitor() as visitor:
            clock = asyncio.get_running_loop().time

            async def ask() -> float:
                async for _ in visitor.generate(model="tiny", prompt="a", max_tokens=1):
                    pass
                return clock()

            first = box.generate(8, ignore_eos=True)
            await anext(aiter(first))
            asking = asyncio.create_task(ask())
            async for _ in first:
                ended_s = clock()
            assert await asking - ended_s < 1.5 * STEP_S

    virtual_time.run(scenario(), compute_s=lambda function: STEP_S if function is compute else 0.0)


def test_full_server_that_always_says_that_it_has_room_is_asked_a_few_times_a_second(
    boxes: Any, llama_dir: Path
) -> None:
    def lie(_waiting: WaitingClients, connection: MultiplexedConnection) -> None:
        def say() -> None:
            if connection.error is None:
                connection.send(RoomFreed())

        asyncio.get_running_loop().call_later(0.01, say)

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)]) as box:
            [server] = box.servers.values()
            full(server)
            with patch.object(WaitingClients, "refused", lie), pytest.raises(NoRoom):
                await box.tokens()
            assert server.connections.num_refused["busy"] <= 1.2 * SessionOptions().patience_s / ROOM_S

    virtual_time.run(scenario(), compute_s=slow_step)


def test_long_prompt_gets_room_among_short_ones_of_the_same_gateway(boxes: Any, llama_dir: Path) -> None:
    """The short ones need two of ten pages each and the long one five, of which the short ones leave at most one."""

    async def scenario() -> None:
        options = ServerOptions(kv_bytes=10 * PAGE_TOKENS * 768)
        async with boxes(llama_dir, [(0, 6)], options=options) as box, asyncio.TaskGroup() as tasks:

            async def ask_on(user: int) -> None:
                while True:
                    await box.tokens(4 + user, prompt="ab", ignore_eos=True)

            users = [tasks.create_task(ask_on(user)) for user in range(10)]
            await asyncio.sleep(5)
            tokens = await box.tokens(4, prompt="a" * 64)
            assert len(tokens) == 4
            for user in users:
                user.cancel()

    virtual_time.run(scenario(), compute_s=lambda function: 0.5 if function is compute else 0.0)


@pytest.mark.parametrize("num_servers", [1, 10])
def test_request_waits_for_room_however_many_servers_are_full(boxes: Any, llama_dir: Path, num_servers: int) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)] * num_servers) as box, asyncio.TaskGroup() as tasks:
            tables = {server: full(server) for server in box.servers.values()}

            async def free(server: SpanServer) -> None:
                await asyncio.sleep(12)
                server.deployed.engine.pages.release(tables[server])

            tasks.create_task(free(next(iter(tables))))
            clock = asyncio.get_running_loop().time
            since_s = clock()
            with patch.object(Membership, "servers", autospec=True, side_effect=Membership.servers) as looked_up:
                assert await box.tokens() == box.expected()
            assert 12 < clock() - since_s < 20
            assert looked_up.call_count <= 2 + 12 / LOOK_UP_S

    virtual_time.run(scenario(), compute_s=slow_step)


def test_full_server_that_has_answered_is_asked_again_at_once(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)], options=ServerOptions(kv_bytes=SMALL_BYTES)) as box:
            drawn = []
            async for token in box.generate(48, ignore_eos=True):
                drawn.append(token.token_id)
                if len(drawn) == 40:
                    with pytest.raises(NoRoom, match="no server has room"):
                        await box.tokens(16)
            assert await box.tokens(16, ignore_eos=True) == box.expected(16)

    virtual_time.run(scenario(), compute_s=slow_step)


def test_answer_waits_for_room_however_many_servers_are_full(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)] + [(3, 6)] * 10) as box, asyncio.TaskGroup() as tasks:

            async def free(server: SpanServer, table: PageTable) -> None:
                await asyncio.sleep(12)
                server.deployed.engine.pages.release(table)

            generation, drawn = box.generate(NUM_TOKENS, ignore_eos=True), list[int]()
            async for token in generation:
                drawn.append(token.token_id)
                if len(drawn) == 50:
                    _, *servers = box.servers.values()
                    tables = [full(server) for server in servers]
                    tasks.create_task(free(servers[0], tables[0]))
            assert drawn == box.expected(NUM_TOKENS)
            (replay,) = generation.trace()["replays"]
            assert 12000 < replay["failover_ms"] < 20000

    virtual_time.run(scenario(), compute_s=slow_step)


def test_answer_waits_for_room_while_other_sessions_of_its_client_end(boxes: Any, llama_dir: Path) -> None:
    """After each of them the server is asked again, and has no room."""

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)]) as box, asyncio.TaskGroup() as tasks:
            [(peer_id, server)] = box.servers.items()

            async def free(table: PageTable) -> None:
                for _ in range(24):
                    await asyncio.sleep(0.5)
                    box.client._state.health.made_room(peer_id)
                server.deployed.engine.pages.release(table)

            generation, drawn = box.generate(NUM_TOKENS, ignore_eos=True), list[int]()
            async for token in generation:
                drawn.append(token.token_id)
                if len(drawn) == 50:
                    tasks.create_task(free(full(server)))
            assert drawn == box.expected(NUM_TOKENS)
            (replay,) = generation.trace()["replays"]
            assert 11000 < replay["failover_ms"] < 20000

    virtual_time.run(scenario(), compute_s=slow_step)


def test_silent_peer_with_all_pages_makes_room_for_a_client_that_asks_for_some(boxes: Any, llama_dir: Path) -> None:
    """The server's record has no room, and only a server that is asked ends what is idle."""

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)], options=ServerOptions(kv_bytes=SMALL_BYTES)) as box:
            [server] = box.servers.values()
            engine = server.deployed.engine
            hog = engine.open(client="hog", start=0, end=6, max_tokens=engine.free_tokens)
            server.announcer.changed()
            await asyncio.sleep(10)
            [record] = (await box.membership.servers("tiny")).values()
            assert record.free_kv_tokens == 0
            # what needs no pages is computed all the same
            assert (await box.client.pooled("some text", model="tiny")).isfinite().all()
            assert await box.tokens(20, ignore_eos=True) == box.expected(20)
            assert hog.end_error is not None
            await box.all_freed()

    virtual_time.run(scenario(), compute_s=slow_step)


@pytest.mark.parametrize(("pause_s", "wait_s"), [(30, 15), (5, 65)], ids=["silent", "old"])
def test_peer_with_all_places_for_grammars_makes_room_for_a_client_that_asks_for_one(
    boxes: Any, llama_dir: Path, pause_s: int, wait_s: int
) -> None:
    async def compute(sequences: list[EngineSequence]) -> None:
        while True:
            await asyncio.sleep(pause_s)
            for sequence in sequences:
                if sequence.end_error is None:
                    await sequence.step(torch.tensor([1]), Want.NOTHING)

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)]) as box:
            [server] = box.servers.values()
            hogs = [with_grammar(server, "hog") for _ in range(MAX_GRAMMARS)]
            computing = asyncio.create_task(compute(hogs))
            clock, drawn = asyncio.get_running_loop().time, list[int]()
            since_s = clock()
            while not drawn and clock() - since_s < 100:
                with suppress(SessionError):
                    drawn, _ = await answer(box.generate(8, sampling=STEERED))
                await asyncio.sleep(0.5)
            assert drawn
            assert clock() - since_s < wait_s
            assert [hog.end_error is None for hog in hogs] == [False] + [True] * (MAX_GRAMMARS - 1)
            computing.cancel()

    virtual_time.run(scenario(), compute_s=slow_step)


@pytest.mark.parametrize("has_other", [False, True])
def test_old_answer_over_half_of_a_server_gives_way_and_goes_on_with_the_same_tokens(
    boxes: Any, llama_dir: Path, has_other: bool
) -> None:
    async def ask(engine: Engine) -> None:
        open_one = partial(engine.open, client="another", start=0, end=6, max_tokens=6 * PAGE_TOKENS)
        with pytest.raises(PeerRefused) as refused:
            open_one()  # the pass that runs uses the pages of the old answer
        await asyncio.sleep(refused.value.retry_after_s)
        with closing(open_one()):
            await asyncio.sleep(7)

    async def scenario() -> None:
        options = ServerOptions(kv_bytes=2 * SMALL_BYTES, evict_old_s=0.5)
        async with boxes(llama_dir, [(0, 6)] * (1 + has_other), options=options) as box, asyncio.TaskGroup() as tasks:
            generation, drawn = box.generate(NUM_TOKENS, ignore_eos=True), list[int]()
            async for token in generation:
                drawn.append(token.token_id)
                if len(drawn) == 80:
                    old = box.servers[generation.trace()["hops"][0]["peer_id"]]
                    tasks.create_task(ask(old.deployed.engine))
            assert drawn == box.expected(NUM_TOKENS)
            (replay,) = generation.trace()["replays"]
            assert "the session was idle or old" in replay["reason"]
            assert (replay["failover_ms"] < 1000) == has_other

    virtual_time.run(scenario(), compute_s=slow_step)


@pytest.mark.parametrize("index", [0, 1])
def test_answer_for_which_no_server_gets_room_ends_by_length(boxes: Any, llama_dir: Path, index: int) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            clock = asyncio.get_running_loop().time
            generation, tokens, since_s = box.generate(NUM_TOKENS, ignore_eos=True), list[Any](), 0.0
            async for token in generation:
                tokens.append(token)
                if len(tokens) == 50:
                    server = list(box.servers.values())[index]
                    table = full(server)
                if tokens[-1].is_drawn:
                    since_s = clock()
            *drawn, last = tokens
            assert [token.token_id for token in drawn] == box.expected(NUM_TOKENS)[: len(drawn)]
            assert 50 <= len(drawn) < NUM_TOKENS
            assert (last.finish_reason, last.is_drawn) == ("length", False)
            assert clock() - since_s < SessionOptions().patience_s + 2
            assert "".join(token.text for token in tokens) == await box.client.decode(
                [token.token_id for token in drawn], model="tiny"
            )
            assert generation.trace()["num_tokens"] == len(drawn)
            # at the beginning of an answer, it is an error, as ever
            rest = full(server)
            with pytest.raises(NoRoom, match="no server has room"):
                await box.tokens(NUM_TOKENS)
            for taken in (table, rest):
                server.deployed.engine.pages.release(taken)
            await box.all_freed()

    virtual_time.run(scenario(), compute_s=slow_step)


@pytest.mark.parametrize("has_other", [False, True])
def test_answer_that_fills_a_server_alone_waits_only_for_another_one(
    boxes: Any, llama_dir: Path, has_other: bool
) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)] if has_other else []) as box, asyncio.TaskGroup() as tasks:
            others = list(box.servers.values())
            tables = [full(other) for other in others]
            for other in others:
                other.announcer.changed()
            small = await box.add(0, 6, ServerOptions(kv_bytes=SMALL_BYTES))
            await box.known(1 + has_other)
            clock = asyncio.get_running_loop().time

            async def free() -> None:
                await asyncio.sleep(7)
                for other, table in zip(others, tables, strict=True):
                    other.deployed.engine.pages.release(table)
                    other.announcer.changed()

            generation, drawn, since_s = box.generate(NUM_TOKENS, ignore_eos=True), list[int](), 0.0
            async for token in generation:
                if token.is_drawn:
                    drawn.append(token.token_id)
                    since_s = clock()
                if len(drawn) == 20:
                    tasks.create_task(free())
            assert drawn == box.expected(NUM_TOKENS)[: len(drawn)]
            assert (len(drawn) == NUM_TOKENS) == has_other
            assert token.finish_reason == "length"
            assert has_other or small.deployed.loaded.kv_tokens - generation.num_prompt_tokens <= len(drawn)
            assert clock() - since_s < 2

    virtual_time.run(scenario(), compute_s=slow_step)


def test_answer_that_fills_a_server_alone_waits_for_one_that_still_loads(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, []) as box, asyncio.TaskGroup() as tasks:
            small = await box.add(0, 6, ServerOptions(kv_bytes=SMALL_BYTES))
            async with Membership(box.internet.network()) as loading:
                loading.announce(replace(small.record, state="joining", free_kv_tokens=0))
                await box.known(2)

                async def load() -> None:
                    await asyncio.sleep(7)
                    await box.add(0, 6)

                generation, drawn = box.generate(NUM_TOKENS, ignore_eos=True), list[int]()
                async for token in generation:
                    drawn.append(token.token_id)
                    if len(drawn) == 20:
                        tasks.create_task(load())
                assert drawn == box.expected(NUM_TOKENS)
                (replay,) = generation.trace()["replays"]
                assert 5000 < replay["failover_ms"] < 15000

    virtual_time.run(scenario(), compute_s=slow_step)


def test_answer_without_a_place_for_its_grammar_is_an_error_that_says_so(boxes: Any, llama_dir: Path) -> None:
    async def lose_the_only_place(box: Any, generation: Any) -> None:
        num_drawn = 0
        async for _ in generation:
            num_drawn += 1
            if num_drawn == 40:
                lost = generation.trace()["hops"][1]["peer_id"]
                (other,) = (each for peer, each in box.servers.items() if peer != lost and each.start_block)
                for _ in range(MAX_GRAMMARS):
                    with_grammar(other, box.network.peer_id)
                box.internet.crash(lost)

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3), (3, 6), (3, 6)]) as box:
            since_s = asyncio.get_running_loop().time()
            with pytest.raises(NoRoom, match="no server takes the session: the server already has 32 sessions with"):
                await lose_the_only_place(box, box.generate(NUM_TOKENS, sampling=STEERED))
            assert asyncio.get_running_loop().time() - since_s > SessionOptions().patience_s

    virtual_time.run(scenario(), compute_s=slow_step)


def test_answer_whose_server_refuses_for_another_reason_than_room_is_an_error(boxes: Any, llama_dir: Path) -> None:
    async def edits(sampler: SessionSampler, index: int) -> LogitEdits:
        if index >= 30:
            raise PeerRefused("the server's process for grammars has died", retry_after_s=1.0)
        return await whole(sampler, index)

    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            with patch.object(SessionSampler, "edits", edits), pytest.raises(SessionError, match="grammars has died"):
                await answer(box.generate(NUM_TOKENS, sampling=STEERED))
            await box.all_freed()

    whole = SessionSampler.edits
    virtual_time.run(scenario(), compute_s=slow_step)


def test_answer_ends_by_length_where_the_client_may_keep_no_more_rows(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES, session=SessionOptions(max_replay_bytes=12_000)) as box:
            drawn, reason = await answer(box.generate(None, ignore_eos=True))
            assert (drawn, reason) == (box.expected(NUM_TOKENS)[: len(drawn)], "length")
            assert 2 * PAGE_TOKENS < len(drawn) < NUM_TOKENS
            await box.all_freed()

    virtual_time.run(scenario(), compute_s=slow_step)


def test_answer_that_grew_is_checked_and_passes(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        checks = SpotCheckOptions(share=1.0)
        async with boxes(llama_dir, HALVES * 2, checks=checks) as box:
            generation = box.generate(NUM_TOKENS, ignore_eos=True)
            assert (await answer(generation))[0] == box.expected(NUM_TOKENS)
            async with asyncio.timeout(60):
                while len(generation.trace()["checks"]) < len(HALVES):
                    await asyncio.sleep(0.1)
            assert [check["result"] for check in generation.trace()["checks"]] == ["passed"] * len(HALVES)

    virtual_time.run(scenario(), compute_s=slow_step)
