"""Answers with penalties and grammars: which tokens are drawn, and that a lost server changes none of them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support.arithmetic_span import NUM_PAGES
from support.faults import Fault
from support.served_chain import World, floats, opening, token_rows, with_servers
from swarm.client import AsyncClient, NoRoom
from swarm.serving.grammar import grammar_masks
from swarm.serving.grammar.grammar_masks import GrammarPool, SessionGrammar
from swarm.serving.sampling.sampling import LogitEdits
from swarm.serving.server.session_sampler import SessionSampler
from swarm.testing import virtual_time
from swarm_protocol.errors import ConfigError, PeerRefused, PeerTimeout, PeerViolation, SwarmError
from swarm_protocol.limits import PAGE_TOKENS
from swarm_protocol.sampler import Grammar, Sampler
from swarm_protocol.session_frames import AnswerTokens, SequenceEnded, StepResult, TokenDraw
from transformers import AutoModelForCausalLM

THIRDS = [(0, 2), (0, 2), (2, 4), (2, 4), (4, 6), (4, 6)]

WORDS = Grammar(kind="lark", text="start: /[a-z]{3,8}( [a-z]{3,8}){4,6}/")
"""Without quotes: the tiny models' end token is one."""

SETTINGS: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {5: 4.0, 9: -100.0}, "temperature": 0.8, "seed": 3, "min_p": 0.05},
    "grammar": {"grammar": WORDS},
    "all, drawn": {
        "grammar": WORDS,
        "temperature": 1.2,
        "seed": 5,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
    },
    "minimum": {"min_tokens": 12, "stop_token_ids": list(range(0, 256, 5)), "temperature": 1.0, "seed": 1},
}


def slow_step(function: Any) -> float:
    """Make each step take so many seconds that a fault can happen during a token."""
    return 0.2


def undisturbed(boxes: Any, directory: Path, **settings: Any) -> list[int]:
    async def scenario() -> list[int]:
        async with boxes(directory, [(0, 6)]) as box:
            tokens: list[int] = await box.tokens(**settings)
            return tokens

    return virtual_time.run(scenario())


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_sampler_answer_is_the_same_when_servers_are_killed(boxes: Any, llama_dir: Path, settings: Any) -> None:
    """The last server, which draws, dies in the middle of the answer, and the middle one dies later."""
    faults = [
        Fault(who="*", phase="serve/decode", what="kill", nth=15),
        Fault(who="*", phase="serve/decode", what="kill", nth=26),
    ]

    async def scenario() -> None:
        async with boxes(llama_dir, THIRDS, faults=faults) as box:
            generation = box.generate(**settings)
            tokens = [token.token_id async for token in generation]
            assert tokens == undisturbed_tokens
            replays = generation.trace()["replays"]
            assert (4, 6) in {(replay["start"], replay["end"]) for replay in replays}
            await box.all_freed()

    undisturbed_tokens = undisturbed(boxes, llama_dir, **settings)
    assert undisturbed_tokens != undisturbed(boxes, llama_dir, temperature=settings.get("temperature", 0), seed=7)
    virtual_time.run(scenario())


@pytest.mark.parametrize("cut", [{"min_p": 1.0}, {"top_k": 1}, {"top_p": 1e-9}], ids=",".join)
def test_sampler_settings_reach_the_server_that_draws(boxes: Any, llama_dir: Path, cut: Any) -> None:
    drawn = {"temperature": 2.0, "seed": 3}
    greedy = undisturbed(boxes, llama_dir)
    assert undisturbed(boxes, llama_dir, **drawn) != greedy
    assert undisturbed(boxes, llama_dir, **drawn, **cut) == greedy


def test_sampler_answer_is_the_same_when_the_server_that_draws_leaves(boxes: Any, llama_dir: Path) -> None:
    """It hands over its cache, and the client sends its successor the tokens."""
    settings = SETTINGS["all, drawn"]

    async def scenario() -> None:
        async with boxes(llama_dir, THIRDS) as box, asyncio.TaskGroup() as tasks:
            generation = box.generate(**settings)
            tokens = []
            async for token in generation:
                tokens.append(token.token_id)
                if len(tokens) == 5:
                    last = generation.trace()["hops"][-1]["peer_id"]
                    tasks.create_task(box.servers[last].drain(within_s=30))
            assert tokens == expected
            (replay,) = generation.trace()["replays"]
            assert replay["was_handed_over"]

    expected = undisturbed(boxes, llama_dir, **settings)
    virtual_time.run(scenario(), compute_s=slow_step)


def test_repetition_penalty_gives_the_tokens_of_transformers(boxes: Any, llama_dir: Path, tokenize: Any) -> None:
    prompt = tokenize("def add(a, b):\n    return")
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(llama_dir)
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            repetition_penalty=1.4,
        )
    expected = out[0, len(prompt) :].tolist()
    assert undisturbed(boxes, llama_dir, prompt=prompt, repetition_penalty=1.4, ignore_eos=True) == expected


@pytest.mark.parametrize(("presence", "frequency"), [(2.0, 0.0), (0.0, 1.0)])
def test_presence_and_frequency_penalties_give_the_tokens_of_openais_formula(
    boxes: Any, llama_dir: Path, tokenize: Any, presence: float, frequency: float
) -> None:
    prompt = tokenize("def add(a, b):\n    return")
    penalties = {"presence_penalty": presence, "frequency_penalty": frequency}
    plain, expected = (_penalized(llama_dir, prompt, *each) for each in ((0.0, 0.0), (presence, frequency)))
    assert expected != plain
    assert undisturbed(boxes, llama_dir, prompt=prompt, ignore_eos=True, **penalties) == expected


def _penalized(directory: Path, prompt: list[int], presence: float, frequency: float) -> list[int]:
    model, tokens = AutoModelForCausalLM.from_pretrained(directory), list[int]()
    with torch.inference_mode():
        for _ in range(16):
            logits_V = model(torch.tensor([prompt + tokens])).logits[0, -1]
            counts_V = torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=len(logits_V))
            tokens.append(int((logits_V - presence * (counts_V > 0) - frequency * counts_V).argmax()))
    return tokens


def test_grammar_answer_ends_where_the_grammar_does(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> str:
        async with boxes(llama_dir, [(0, 3), (3, 6)]) as box:
            tokens = [token async for token in box.generate(100, grammar=WORDS, temperature=1.0, seed=2)]
            assert tokens[-1].finish_reason == "stop"
            return "".join(token.text for token in tokens)

    words = virtual_time.run(scenario()).split(" ")
    assert 5 <= len(words) <= 7
    assert all(3 <= len(word) <= 8 and word.isalpha() and word.islower() for word in words)


def test_json_schema_is_followed_with_any_seed(boxes: Any, llama_dir: Path) -> None:
    """The schema has only numbers and lists, since a quote ends this model's answers."""
    schema = {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 99}, "minItems": 2, "maxItems": 6}

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)]) as box:
            for seed in range(3):
                tokens = [t async for t in box.generate(60, json_schema=schema, temperature=2.0, seed=seed)]
                numbers = json.loads("".join(token.text for token in tokens))
                assert 2 <= len(numbers) <= 6
                assert all(-9 <= number <= 99 for number in numbers)

    virtual_time.run(scenario())


@pytest.mark.parametrize("spans", [[(0, 6)], [(0, 3), (3, 6), (3, 6), (3, 6)]])
def test_unusable_grammar_fails_the_request_and_blames_no_server(
    boxes: Any, llama_dir: Path, spans: list[tuple[int, int]]
) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, spans) as box:
            since_s = asyncio.get_running_loop().time()
            with pytest.raises(ConfigError, match="grammar") as caught:
                await box.tokens(grammar=Grammar(kind="lark", text="start: missing"))
            assert caught.value.field == "grammar"
            assert asyncio.get_running_loop().time() - since_s < 1
            client: AsyncClient = box.client
            assert not client._state.health.avoid
            assert await box.tokens() == box.expected(), "the server must be used again"
            await box.all_freed()

    virtual_time.run(scenario())


def test_server_that_cannot_use_a_grammar_ends_no_request_while_another_can(boxes: Any, llama_dir: Path) -> None:
    whole, asked = GrammarPool.open, list[GrammarPool]()

    def open_at_second(pool: GrammarPool, *args: Any) -> SessionGrammar:
        asked.append(pool)
        if pool is asked[0]:
            raise ConfigError("this server cannot use grammars")
        return whole(pool, *args)

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3), (3, 6), (3, 6)]) as box:
            expected = await box.tokens(grammar=WORDS, temperature=1.0, seed=2)
            with patch.object(GrammarPool, "open", open_at_second):
                for _ in range(4):
                    assert await box.tokens(grammar=WORDS, temperature=1.0, seed=2) == expected
            assert len(set(map(id, asked))) == 2
            assert not box.client._state.health.avoid

    virtual_time.run(scenario())


def test_server_of_all_blocks_that_cannot_use_a_grammar_runs_all_but_the_last_one(boxes: Any, llama_dir: Path) -> None:
    whole = GrammarPool.open

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6), (3, 6)]) as box:
            (all_blocks, server), _ = box.servers.items()

            def open_elsewhere(pool: GrammarPool, *args: Any) -> SessionGrammar:
                if pool is server._grammars:
                    raise ConfigError("this server cannot use grammars")
                return whole(pool, *args)

            expected = await box.tokens(grammar=WORDS, temperature=1.0, seed=2)
            with patch.object(GrammarPool, "open", open_elsewhere):
                assert await box.tokens(grammar=WORDS, temperature=1.0, seed=2) == expected
                assert await box.tokens() == box.expected()
            assert [hop["peer_id"] for hop in box.client.trace()["hops"]] == [all_blocks]
            assert not box.client._state.health.avoid

    virtual_time.run(scenario())


def test_server_without_a_place_for_a_grammar_is_asked_for_plain_answers(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)]) as box:
            no_place = PeerRefused("all places for grammars are taken", retry_after_s=5.0)
            with patch.object(GrammarPool, "check", side_effect=no_place):
                with pytest.raises(NoRoom, match="all places for grammars are taken"):
                    await box.tokens(grammar=WORDS)
                assert await box.tokens() == box.expected()

    virtual_time.run(scenario())


def test_answer_goes_on_elsewhere_when_its_grammar_takes_one_server_too_long(boxes: Any, llama_dir: Path) -> None:
    whole, failed = SessionSampler.edits, list[int]()

    async def edits(sampler: SessionSampler, index: int) -> LogitEdits:
        if index == 5 and not failed:
            failed.append(index)
            raise ConfigError("the grammar takes too much time or memory")
        return await whole(sampler, index)

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3), (3, 6), (3, 6)]) as box:
            expected = await box.tokens(grammar=WORDS, temperature=1.0, seed=2)
            with patch.object(SessionSampler, "edits", edits):
                assert await box.tokens(grammar=WORDS, temperature=1.0, seed=2) == expected
            assert failed

    virtual_time.run(scenario())


def test_grammar_that_needs_the_end_token_is_refused_with_that_reason(boxes: Any, llama_dir: Path) -> None:
    """A quote ends this model's answers, and every string begins with one."""

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)]) as box:
            with pytest.raises(ConfigError, match="end token stands in the way"):
                await box.tokens(json_schema={"type": "string"})
            await box.all_freed()

    virtual_time.run(scenario())


def test_hanging_grammar_delays_no_other_answer(boxes: Any, llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In real time: while one session waits for its grammar's stopped process, another is answered."""
    hung = asyncio.Event()

    def hang(self: grammar_masks.GrammarProcess, *_: object) -> grammar_masks.TokenMask:
        loop.call_soon_threadsafe(hung.set)
        asyncio.run_coroutine_threadsafe(answered.wait(), loop).result(30)
        raise ConfigError("the grammar takes too much time or memory")

    async def scenario() -> None:
        nonlocal loop, answered
        loop, answered = asyncio.get_running_loop(), asyncio.Event()
        async with boxes(llama_dir, [(0, 3), (3, 6)]) as box, asyncio.TaskGroup() as tasks:
            stuck = tasks.create_task(refused(box))
            await hung.wait()
            assert await box.tokens() == box.expected()
            answered.set()
            await stuck

    async def refused(box: Any) -> None:
        with pytest.raises(ConfigError, match="too much time"):
            await box.tokens(grammar=WORDS)

    loop: asyncio.AbstractEventLoop
    answered: asyncio.Event
    monkeypatch.setattr(grammar_masks.GrammarProcess, "mask", hang)
    asyncio.run(scenario())


# --- frames, right ones and wrong ones --------------------------------------------------------------------------------

SAMPLER = Sampler(presence_penalty=1.0)


def test_session_with_a_sampler_counts_received_and_drawn_tokens() -> None:
    async def work(world: World) -> None:
        talk = await world.talk()
        sampler = Sampler(bias_ids=(1, 2), bias_values=(60.0, 60.0), frequency_penalty=2.0)
        await talk.open(sampler=sampler)
        drawn = [(await talk.step(token_rows(1, 2, 3), 0, want="token")).token]
        for index in range(1, 8):
            drawn.append((await talk.step(token_rows(1), 2 + index, want="token", draw=TokenDraw(index=index))).token)
        ids = [token.token_id for token in drawn if token]
        assert set(ids) == {1, 2}, "each token must become less likely the more often it was drawn"

        await talk.open(2, sampler=sampler)
        talk.send_step(token_rows(1, 2, 3, *[1] * 7), 0, 2, want="token", draw=TokenDraw(index=7))
        talk.connection.send(AnswerTokens(sequence_id=bytes([2]) * 16, token_ids=np.array(ids[:7], "<i4").tobytes()))
        again = (await talk.next(StepResult)).token
        assert again is not None
        assert again.token_id == ids[7], "the draw must be as before, though its tokens came late"
        logits = await talk.step(token_rows(5), 10, 2, want="all")
        assert floats(logits.rows).isfinite().all(), "other sessions must go on"

    with_servers(work)


@pytest.mark.parametrize(
    ("sampler", "why"),
    [
        (Sampler(bias_ids=(5000,), bias_values=(1.0,)), "vocabulary"),
        (Sampler(repetition_penalty=2.0, prompt_ids=(5000).to_bytes(4, "little")), "vocabulary"),
        (Sampler(repetition_penalty=2.0, prompt_ids=(2**32 - 1).to_bytes(4, "little")), "vocabulary"),
        (Sampler(end_ids=(5000,), min_tokens=2), "vocabulary"),
    ],
)
def test_session_is_refused_when_its_sampler_is_for_another_vocabulary(sampler: Sampler, why: str) -> None:
    async def work(world: World) -> None:
        talk = await world.talk()
        error = await talk.refused(1, sampler=sampler)
        assert isinstance(error, PeerViolation)
        assert why in str(error)

    with_servers(work)


def test_session_with_a_grammar_is_refused_when_the_server_follows_none() -> None:
    async def work(world: World) -> None:
        talk = await world.talk()
        error = await talk.refused(1, sampler=Sampler(end_ids=(1,), grammar=WORDS))
        assert isinstance(error, PeerRefused)
        assert "no grammars" in str(error)

    with_servers(work)


def test_idle_session_is_not_evicted_for_a_grammar_that_is_refused(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        (server,) = world.servers
        server.connections._grammars = GrammarPool(tmp_path / "tokenizer.json")
        idle, other = await world.talk(), await world.talk(client=world.internet.network())
        await idle.open(max_tokens=NUM_PAGES * PAGE_TOKENS)
        await asyncio.sleep(60)
        with patch.object(grammar_masks, "MAX_GRAMMARS", 0):
            error = await other.refused(1, sampler=Sampler(end_ids=(1,), grammar=WORDS))
        assert isinstance(error, PeerRefused)
        assert "sessions with grammars" in str(error)
        await idle.step(token_rows(1, 2), 0)

    with_servers(work, idle_s=120.0)


def test_client_that_sends_an_answer_before_its_session_is_ready_has_one_mask_computed(tmp_path: Path) -> None:
    masks = list[object]()

    async def work(world: World) -> None:
        (server,) = world.servers
        server.connections._grammars = GrammarPool(tmp_path / "tokenizer.json")
        talk = await world.talk()
        talk.connection.send(dataclasses.replace(talk.blank, sampler=Sampler(end_ids=(1,), grammar=WORDS)))
        for _ in range(50):
            talk.connection.send(AnswerTokens(sequence_id=talk.blank.sequence_id, token_ids=b""))
        with pytest.raises(PeerViolation, match="before its session is ready"):
            await talk.next(SequenceEnded)

    def mask(_grammar: object, *_asked: object) -> asyncio.Future[object]:
        masks.append(asyncio.get_running_loop().create_future())
        return masks[-1]

    with patch.object(grammar_masks.SessionGrammar, "mask", mask):
        with_servers(work)
    assert len(masks) == 1


def test_session_with_a_sampler_is_refused_before_the_last_block() -> None:
    async def work(world: World) -> None:
        talk = await world.talk(0)
        last = dataclasses.replace(opening(world.servers[0]), sampler=SAMPLER)
        talk.connection.send(last)
        error: SwarmError = (await talk.next(SequenceEnded)).error("")
        assert isinstance(error, PeerViolation)

    with_servers(work, [(0, 1), (1, 2)])


def test_connection_ends_when_a_session_is_sent_the_same_answer_twice() -> None:
    async def work(world: World) -> None:
        talk = await world.talk()
        await talk.open(sampler=SAMPLER)
        for _ in range(2):
            talk.connection.send(AnswerTokens(sequence_id=bytes([1]) * 16, token_ids=(1).to_bytes(4, "little")))
        with pytest.raises(SwarmError):
            await talk.next(SequenceEnded)

    with_servers(work)


def test_session_ends_when_the_tokens_before_a_draw_do_not_come_in_time() -> None:
    async def work(world: World) -> None:
        talk = await world.talk()
        await talk.open(sampler=SAMPLER)
        talk.send_step(token_rows(1, 2), 0, want="token", draw=TokenDraw(index=2))
        assert isinstance((await talk.next(SequenceEnded)).error(""), PeerTimeout)
        await talk.open(2, sampler=SAMPLER)
        await talk.step(token_rows(1, 2), 0, 2, want="token")
        talk.send_step(token_rows(1), 2, 2, want="token")
        assert isinstance((await talk.next(SequenceEnded)).error(""), PeerViolation), "a draw cannot be repeated"

    with_servers(work)


def test_edits_after_drafts_take_little_time_late_in_a_long_answer() -> None:
    sampler = SessionSampler(Sampler(presence_penalty=0.5), 2**15, None, None)  # type: ignore[arg-type]
    sampler.recall(np.arange(2**15, dtype="<i4").tobytes())
    since = time.thread_time()
    found = sampler.edits_after([7] * 15)
    took_s = time.thread_time() - since
    assert [(edits.counts[6], edits.counts[7]) for edits in found] == [(1, num) for num in range(2, 17)]
    since = time.thread_time()
    assert all(edits.counts + Counter([7]) for edits in found)
    looped_s = time.thread_time() - since
    assert took_s < looped_s / 3, "a Python loop over all tokens of the answer for each draft"
