"""Drafts: guesses at the next tokens, which the last server compares with its draws. They must never change a token.

A tiny model repeats nothing, so most tests have the guesses made for the servers: right ones, with wrong ones among
them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from support.faults import Fault
from support.tiny_models import local_tokens
from swarm.serving.checking.spot_checks import SpotCheckOptions
from swarm.serving.engine.compute import compute
from swarm.serving.model.attention import slots_of
from swarm.serving.model.batch import Batch
from swarm.serving.model.kv_pool import KVPool
from swarm.serving.model.span import Span
from swarm.serving.server.session_sampler import Drafter
from swarm.serving.session.client_state import SessionOptions
from swarm.testing import virtual_time
from swarm_protocol.errors import ConfigError
from swarm_protocol.sampler import Grammar
from torch import Tensor

NUM_TOKENS = 40
THIRDS = [(0, 2), (0, 2), (2, 4), (2, 4), (4, 6), (4, 6)]
OFF = SessionOptions(drafts=False)
PLAIN = {"temperature": 0.0}
SAMPLED = {
    "temperature": 1.0,
    "top_p": 0.9,
    "seed": 5,
    "presence_penalty": 0.6,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "logit_bias": {40: 3.0, 41: 2.0},
    "min_tokens": 20,
}


def slow_step(function: Callable[..., object]) -> float:
    return 0.2


def slow_pass(function: Callable[..., object]) -> float:
    return 0.2 if function is compute else 0.0


@contextmanager
def guesses(answer: Sequence[int], num_prompt: int, wrong_every: int = 7) -> Iterator[list[int]]:
    """Have servers guess the tokens of `answer`, of which each `wrong_every`th is wrong. Yields how many tokens came of
    each pass with drafts."""
    yielded: list[int] = []
    drew = Drafter.drew

    def found(drafter: Drafter, most: int) -> tuple[int, ...]:
        assert drafter._text is not None
        start = len(drafter._text) - num_prompt
        return tuple(
            token_id if index % wrong_every else token_id ^ 1
            for index, token_id in enumerate(answer[start : start + most], start)
        )

    def count(drafter: Drafter, tokens: Sequence[int], now_s: float) -> None:
        if drafter.drafts:
            yielded.append(len(tokens))
        drew(drafter, tokens, now_s)

    with patch.object(Drafter, "_found", found), patch.object(Drafter, "drew", count):
        yield yielded


async def drawn(box: Any, num_tokens: int = NUM_TOKENS, **options: Any) -> list[tuple[int, float | None, str | None]]:
    found = [token async for token in box.generate(num_tokens, num_logprobs=2, **options)]
    return [(token.token_id, token.logprob, token.finish_reason) for token in found]


Undrafted = Callable[..., list[tuple[int, float | None, str | None]]]


@pytest.fixture(scope="module")
def undrafted(boxes: Any, model_dirs: Any) -> Undrafted:
    """`undrafted("llama", 40, seed=1)` returns the answer of one server without drafts, which is drawn once for all."""
    known: dict[str, list[tuple[int, float | None, str | None]]] = {}

    def get(family: str, num_tokens: int = NUM_TOKENS, **options: Any) -> list[tuple[int, float | None, str | None]]:
        async def scenario() -> None:
            async with boxes(model_dirs(family), [(0, 6)], session=OFF) as box:
                known[key] = await drawn(box, num_tokens, **options)

        if (key := repr((family, num_tokens, options))) not in known:
            virtual_time.run(scenario())
        return known[key]

    return get


@pytest.mark.parametrize("family", ["llama", "qwen3", "bloom"])
@pytest.mark.parametrize("spans", [[(0, 6)], [(0, 2), (2, 4), (4, 6)]])
@pytest.mark.parametrize("options", [PLAIN, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_change_neither_tokens_nor_probabilities(
    boxes: Any, model_dirs: Any, tokenize: Any, undrafted: Undrafted, family: str, spans: Any, options: dict[str, Any]
) -> None:
    expected = undrafted(family, **options)

    async def scenario() -> None:
        async with boxes(model_dirs(family), spans) as box:
            num_prompt = len(tokenize("def add(a, b):\n    return"))
            with guesses([token_id for token_id, _, _ in expected], num_prompt) as yielded:
                found = await drawn(box, **options)
            await box.all_freed()
        assert [(token_id, reason) for token_id, _, reason in found] == [(each[0], each[2]) for each in expected]
        assert [each[1] for each in found] == pytest.approx([each[1] for each in expected], abs=1e-4)
        assert sum(yielded) > 1.5 * len(yielded) > 0, "most passes yield several tokens"
        assert 1 in yielded, "some drafts are wrong"

    virtual_time.run(scenario())


def test_answer_that_stops_in_the_middle_of_a_pass_ends_as_without_drafts(
    boxes: Any, llama_dir: Path, tokenize: Any
) -> None:
    prompt = tokenize("def add(a, b):\n    return")
    expected = local_tokens(llama_dir, prompt, NUM_TOKENS)

    async def stopped(box: Any, **stop: Any) -> list[tuple[int, str, str | None]]:
        answer = [(each.token_id, each.text, each.finish_reason) async for each in box.generate(NUM_TOKENS, **stop)]
        await box.all_freed()
        return answer

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3), (3, 6)], session=OFF) as box:
            text = await (await box.kit()).decode(expected)
            stops = [{"stop": text[at : at + 3]} for at in (9, 11)]
            stops += [{"stop_token_ids": [expected[at]]} for at in (10, 12)]
            plain = [await stopped(box, **stop) for stop in stops]
        assert [answer[-1][2] for answer in plain] == ["stop"] * 4
        async with boxes(llama_dir, [(0, 3), (3, 6)]) as box:
            for stop, answer in zip(stops, plain, strict=True):
                with (
                    guesses(expected, len(prompt), wrong_every=NUM_TOKENS),
                    patch.object(Drafter, "drew", autospec=True, side_effect=Drafter.drew) as drew,
                ):
                    assert await stopped(box, **stop) == answer
                passes = [len(call.args[1]) for call in drew.call_args_list]
                ends = list(accumulate(passes))
                index = next(index for index, end in enumerate(ends) if end >= len(answer))
                assert passes[index] >= 4
                assert ends[index] > len(answer), "drafts after its last token were right, too"

    virtual_time.run(scenario())


RECORDS = Grammar(
    kind="lark",
    text='start: record record record\nrecord: "name: " /[a-z]{2,5}/ ", size: " /[0-9]{2}/ "; "',
)
"""Forces most of its text. Without quotes, which end the tiny models' answers."""
FORCED = 40
"""Tokens of RECORDS up to the end of the second record, at least."""
GUIDED = {name: value for name, value in SAMPLED.items() if name != "min_tokens"}


@contextmanager
def passes() -> Iterator[list[int]]:
    """Yields how many tokens came of each pass."""
    found, drew = list[int](), Drafter.drew

    def count(drafter: Drafter, tokens: Sequence[int], now_s: float) -> None:
        found.append(len(tokens))
        drew(drafter, tokens, now_s)

    with patch.object(Drafter, "drew", count):
        yield found


@pytest.mark.parametrize(
    ("spans", "options", "wrong_every"),
    [
        # one server alone sends its drafts to itself
        pytest.param([(0, 6)], GUIDED, 3, id="alone"),
        *(
            pytest.param(THIRDS[::2], options, wrong_every, id=f"{name}, wrong every {wrong_every}")
            for name, options in (("greedy", PLAIN), ("sampled", GUIDED))
            for wrong_every in (0, 1, 3, 7)
        ),
    ],
)
def test_drafts_change_no_token_of_an_answer_with_a_grammar(
    boxes: Any,
    llama_dir: Path,
    tokenize: Any,
    undrafted: Undrafted,
    spans: Any,
    options: dict[str, Any],
    wrong_every: int,
) -> None:
    """Those that the grammar forces, beside guesses that are right, wrong, or that it forbids."""
    expected = undrafted("llama", 2 * FORCED, grammar=RECORDS, **options)
    assert expected[-1][2] == "stop"

    async def scenario() -> None:
        async with boxes(llama_dir, spans) as box:
            num_prompt = len(tokenize("def add(a, b):\n    return"))
            right = guesses([token_id for token_id, _, _ in expected], num_prompt, wrong_every)
            with right if wrong_every else nullcontext(), passes() as yielded:
                found = await drawn(box, 2 * FORCED, grammar=RECORDS, **options)
            await box.all_freed()
        assert [(token_id, reason) for token_id, _, reason in found] == [(each[0], each[2]) for each in expected]
        assert [each[1] for each in found] == pytest.approx([each[1] for each in expected], abs=1e-4)
        assert len(yielded) < 0.6 * len(expected), "the grammar forces most tokens"
        assert max(yielded) >= 8

    virtual_time.run(scenario())


def test_answer_with_a_grammar_that_stops_in_the_middle_of_a_pass_ends_as_without_drafts(
    boxes: Any, llama_dir: Path
) -> None:
    async def scenario() -> None:
        answers = []
        for session in (OFF, SessionOptions()):
            async with boxes(llama_dir, [(0, 3), (3, 6)], session=session) as box:
                with passes() as yielded:
                    generation = box.generate(2 * FORCED, grammar=RECORDS, stop=[", si"])
                    answers.append([(each.token_id, each.text, each.finish_reason) async for each in generation])
                await box.all_freed()
        assert answers[0] == answers[1]
        assert answers[0][-1][2] == "stop"
        ends = list(accumulate(yielded))
        assert any(before < len(answers[0]) < end for before, end in pairwise(ends))

    virtual_time.run(scenario())


@pytest.mark.parametrize("options", [PLAIN, GUIDED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("phase", "nth"), [("serve/decode", nth) for nth in (5, 9, 15)] + [("serve/reply", 9)])
def test_server_lost_with_forced_drafts_under_way_costs_no_token(
    boxes: Any, llama_dir: Path, undrafted: Undrafted, phase: str, nth: int, options: dict[str, Any]
) -> None:
    expected = [token_id for token_id, _, _ in undrafted("llama", 2 * FORCED, grammar=RECORDS, **options)]

    async def scenario() -> None:
        async with boxes(llama_dir, THIRDS, faults=[Fault(who="*", phase=phase, what="kill", nth=nth)]) as box:
            with passes() as yielded:
                assert await box.tokens(2 * FORCED, grammar=RECORDS, **options) == expected
            assert len(box.client.trace()["replays"]) >= 1
            assert len(yielded) < len(expected)
            await box.all_freed()

    virtual_time.run(scenario())


def test_server_that_draws_with_a_grammar_leaves_with_drafts_under_way(
    boxes: Any, llama_dir: Path, undrafted: Undrafted
) -> None:
    expected = [token_id for token_id, _, _ in undrafted("llama", 2 * FORCED, grammar=RECORDS, **GUIDED)]

    async def scenario() -> None:
        async with boxes(llama_dir, THIRDS) as box, asyncio.TaskGroup() as tasks:
            with passes() as yielded:
                generation, tokens = box.generate(2 * FORCED, grammar=RECORDS, **GUIDED), []
                async for token in generation:
                    tokens.append(token.token_id)
                    if len(tokens) == 7:
                        leaver = generation.trace()["hops"][2]["peer_id"]
                        tasks.create_task(box.servers[leaver].drain(within_s=30))
            assert tokens == expected
            assert len(yielded) < len(expected)
            (replay,) = generation.trace()["replays"]
            assert replay["was_handed_over"]

    virtual_time.run(scenario(), compute_s=slow_pass)


def test_answers_with_grammars_in_one_batch_are_those_without_drafts(boxes: Any, llama_dir: Path) -> None:
    seeds = range(4)

    async def scenario() -> None:
        answers = []
        for session in (OFF, SessionOptions()):
            async with boxes(llama_dir, [(0, 3), (3, 6)], session=session) as box:
                asked = [box.tokens(2 * FORCED, grammar=RECORDS, temperature=1.0, seed=seed) for seed in seeds]
                asked.append(box.tokens(NUM_TOKENS))
                with passes() as yielded:
                    answers.append(await asyncio.gather(*asked))
        assert answers[0] == answers[1]
        assert len(yielded) < 0.9 * sum(map(len, answers[1]))

    virtual_time.run(scenario(), compute_s=slow_pass)


def test_answer_with_a_slow_grammar_does_not_wait_for_drafts(boxes: Any, llama_dir: Path) -> None:
    def slow_mask(function: Callable[..., object]) -> float:
        return 0.05 if "GrammarProcess" in getattr(function, "__qualname__", "") else 0.0

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3), (3, 6)], session=OFF) as box:
            expected = await box.tokens(FORCED, grammar=RECORDS)
        async with boxes(llama_dir, [(0, 3), (3, 6)]) as box:
            with passes() as yielded:
                assert await box.tokens(FORCED, grammar=RECORDS) == expected
            assert set(yielded) == {1}

    virtual_time.run(scenario(), compute_s=slow_mask)


def test_answer_fails_at_the_end_token_that_its_grammar_forces_as_text(boxes: Any, llama_dir: Path) -> None:
    """Drafts go up to there, and the answer comes as far as without them."""
    grammar = Grammar(kind="lark", text='start: /[a-z]{4}0123456789"/')

    async def collect(box: Any, tokens: list[int]) -> None:
        async for token in box.generate(FORCED, grammar=grammar):
            tokens.append(token.token_id)

    async def scenario() -> None:
        answers = list[list[int]]()
        for session in (OFF, SessionOptions()):
            async with boxes(llama_dir, [(0, 3), (3, 6)], session=session) as box:
                answers.append([])
                with passes() as yielded, pytest.raises(ConfigError, match="end token stands in the way"):
                    await collect(box, answers[-1])
        assert answers[0] == answers[1]
        assert len(answers[0]) == 14
        assert max(yielded) >= 4

    virtual_time.run(scenario())


PHASES = [("serve/decode", nth) for nth in range(4, 13)] + [("serve/reply", 9), ("serve/reply", 11), ("serve/push", 8)]


# a stalled server is noticed later, wherever it was: three places are enough for that
@pytest.mark.parametrize(
    ("phase", "nth", "what"), [(*place, "kill") for place in PHASES] + [(*place, "stall") for place in PHASES[::5]]
)
def test_server_lost_with_drafts_under_way_costs_no_token(
    boxes: Any, llama_dir: Path, tokenize: Any, phase: str, nth: int, what: Any
) -> None:
    prompt = tokenize("def add(a, b):\n    return")
    expected = local_tokens(llama_dir, prompt, NUM_TOKENS)

    async def scenario() -> None:
        faults = [Fault(who="*", phase=phase, what=what, nth=nth)]
        async with boxes(llama_dir, THIRDS, faults=faults) as box:
            with guesses(expected, len(prompt)) as yielded:
                assert await box.tokens(NUM_TOKENS) == expected
            assert len(box.client.trace()["replays"]) >= 1
            # rows may have been fed by the client after a stall, and without the drafts
            assert sum(yielded) > len(yielded) or what == "stall"
            await box.all_freed()

    virtual_time.run(scenario())


@pytest.mark.parametrize("index", [0, 1, 2])
def test_server_that_leaves_with_drafts_under_way_hands_over_no_drafts(
    boxes: Any, llama_dir: Path, tokenize: Any, index: int
) -> None:
    prompt = tokenize("def add(a, b):\n    return")
    expected = local_tokens(llama_dir, prompt, NUM_TOKENS)

    async def scenario() -> None:
        async with boxes(llama_dir, THIRDS) as box, asyncio.TaskGroup() as tasks:
            with guesses(expected, len(prompt)) as yielded:
                generation, tokens = box.generate(NUM_TOKENS), []
                async for token in generation:
                    tokens.append(token.token_id)
                    if len(tokens) == 7:
                        leaver = generation.trace()["hops"][index]["peer_id"]
                        tasks.create_task(box.servers[leaver].drain(within_s=30))
            assert tokens == expected
            (replay,) = generation.trace()["replays"]
            assert replay["was_handed_over"]
            assert sum(yielded) > len(yielded)

    virtual_time.run(scenario(), compute_s=slow_step)


def test_drafts_that_overflow_cost_no_token_and_no_server(boxes: Any, llama_dir: Path, tokenize: Any) -> None:
    """A server finds at every fifth position that a draft gives numbers that are not finite."""
    run, num_bad = Span.run, 0
    num_prompt = len(prompt := tokenize("def add(a, b):\n    return"))
    expected = local_tokens(llama_dir, prompt, NUM_TOKENS)

    def overflow(span: Span, batch: Batch, pool: KVPool) -> list[Tensor | None]:
        nonlocal num_bad
        outputs = run(span, batch, pool)
        for piece, out in zip(batch.pieces, outputs, strict=True):
            end = piece.position + piece.num_tokens
            bad = [position for position in range(end - piece.num_drafts, end) if position % 5 == 0]
            if bad and out is not None:
                num_bad += 1
                out[bad[0] - end :] = math.nan
                pool.values_SKD[0][slots_of(piece, bad[0], end)] = math.nan
        return outputs

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3), (3, 6)]) as box:
            with guesses(expected, num_prompt) as yielded, patch.object(Span, "run", overflow):
                assert await box.tokens(NUM_TOKENS) == expected
            assert not box.client.trace()["replays"]
            assert num_bad >= 3
            assert sum(yielded) > len(yielded)
            await box.all_freed()

    virtual_time.run(scenario())


def test_checks_of_an_answer_with_drafts_pass(boxes: Any, llama_dir: Path, tokenize: Any) -> None:
    prompt = tokenize("def add(a, b):\n    return")

    async def scenario() -> None:
        for codec in ("raw", "int8"):
            options = SessionOptions(codec=codec, drafts=False)
            async with boxes(llama_dir, [(0, 3), (3, 6)], session=options) as box:
                expected = await box.tokens(NUM_TOKENS)
            options, checks = SessionOptions(codec=codec), SpotCheckOptions(share=1.0)
            async with boxes(llama_dir, [(0, 3), (3, 6)] * 2, session=options, checks=checks) as box:
                for num_tokens in (NUM_TOKENS, 17, 18):
                    with guesses(expected, len(prompt), wrong_every=5) as yielded:
                        assert await box.tokens(num_tokens) == expected[:num_tokens]
                    assert sum(yielded) > len(yielded)
                    await box.client.checks.settled()
                assert [report.result for report in box.client.checks.reports] == ["passed"] * 6

    virtual_time.run(scenario())


def test_answer_that_repeats_itself_takes_fewer_passes(boxes: Any, llama_dir: Path) -> None:
    """No guess is made here by the test: a bias leaves the model one token, so that it repeats itself."""
    bias = {40: 100.0}

    async def scenario() -> None:
        found, num_passes = [], []
        for drafts in (False, True):
            async with boxes(llama_dir, [(0, 3), (3, 6)], session=SessionOptions(drafts=drafts)) as box:
                with patch.object(Drafter, "drew", autospec=True, side_effect=Drafter.drew) as drew:
                    found.append(await box.tokens(64, logit_bias=bias))
                num_passes.append(drew.call_count)
        assert found[0] == found[1]
        assert num_passes[0] == 64
        assert num_passes[1] < 16

    virtual_time.run(scenario())
