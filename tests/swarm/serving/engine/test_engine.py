"""Many sequences on one server: each gets the results that it would get alone, and equal prefixes are shared."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from support.arithmetic_span import (
    GREEDY,
    NUM_BLOCKS,
    NUM_PAGES,
    REVISION,
    Sums,
    alone,
    answer,
    generate,
    ids,
    prompt_of,
    rows_of,
    sums_of,
    with_engine,
)
from swarm.serving.engine.engine import Engine, EngineLoad
from swarm.serving.engine.sequence import EngineSequence
from swarm.serving.model.batch import Want
from swarm.serving.model.kv_pool import PAGE_TOKENS
from swarm.serving.sampling.drawing import pick
from swarm.serving.sampling.sampling import Pick
from swarm.serving.wire.page_keys import page_keys
from swarm_protocol.session_frames import TokenDraw

# --- what is computed -------------------------------------------------------------------------------------------------


def test_engine_gives_sixteen_sequences_of_mixed_lengths_what_each_gets_alone() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        prompts = [prompt_of(3 + 9 * seed, seed) for seed in range(16)]

        async def one(prompt: list[int]) -> list[int]:
            sequence = engine.open(client=f"c{len(prompt) % 3}", start=0, end=NUM_BLOCKS, max_tokens=len(prompt) + 12)
            found = await generate(sequence, prompt, 12)
            sequence.close()
            return found

        async with asyncio.TaskGroup() as tasks:
            found = [tasks.create_task(one(prompt)) for prompt in prompts]
        assert [task.result() for task in found] == [answer(prompt, 12) for prompt in prompts]
        # decodes of all sequences ran together
        assert max(len(batch.pieces) for batch in span.batches) == 16
        assert engine.num_tokens == sum(len(prompt) + 11 for prompt in prompts)
        assert engine.num_passes < 60

    with_engine(work, num_pages=120)


@pytest.mark.parametrize("want", [Want.ALL, Want.LAST, Want.NOTHING])
def test_engine_returns_all_outputs_when_a_long_step_is_cut(want: Want) -> None:
    async def work(engine: Engine, span: Sums) -> None:
        prompt = prompt_of(100)
        sequence = engine.open(client="a", start=0, end=NUM_BLOCKS, max_tokens=100)
        done = await sequence.step(ids(*prompt), want)
        assert [batch.pieces[0].num_tokens for batch in span.batches] == [32, 32, 32, 4]
        assert sequence.length == 100
        if want is Want.NOTHING:
            assert done.output is None
        else:
            assert done.output is not None
            assert torch.equal(done.output, alone(prompt)[-1:] if want is Want.LAST else alone(prompt))
        sequence.close()

    with_engine(work, max_step_tokens=32)


def test_engine_takes_and_returns_hidden_states_when_its_span_is_in_the_middle() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        sequence = engine.open(client="a", start=2, end=3, max_tokens=20)
        x = torch.arange(40.0).reshape(10, 4)
        done = await sequence.step(x, Want.ALL)
        assert done.output is not None
        assert torch.equal(done.output, rows_of(sums_of(x[:, 0]), False))
        sequence.close()

    with_engine(work, span=Sums(start=1, end=3))


def test_engine_draws_the_client_s_tokens_and_returns_probabilities() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        draw = TokenDraw(temperature=0.7, top_p=0.9, seed=5, index=9)
        picks = [GREEDY, Pick(replace(draw, index=3, num_logprobs=4)), Pick(draw)]
        sequences = [engine.open(client="a", start=0, end=NUM_BLOCKS, max_tokens=20) for _ in picks]
        done = await asyncio.gather(
            *(
                sequence.step(ids(*prompt_of(5, n)), Want.LAST, p)
                for n, (sequence, p) in enumerate(zip(sequences, picks, strict=True))
            )
        )
        for n, (one, wanted) in enumerate(zip(done, picks, strict=True)):
            logits = alone(prompt_of(5, n))[-1]
            (token,) = one.tokens
            assert one.output is not None
            assert torch.equal(one.output[0], logits)
            assert token.token_id == pick(logits, wanted.draw)
            assert (token.logprob is None) == (wanted.draw.num_logprobs is None)
            assert len(token.top) == (wanted.draw.num_logprobs or 0)
        assert {one.batch_size for one in done} == {3}
        for sequence in sequences:
            sequence.close()

    with_engine(work)


def test_engine_looks_for_steps_once_for_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(engine: Engine, span: Sums) -> None:
        sequence = engine.open(client="a", start=0, end=NUM_BLOCKS, max_tokens=20)
        num_plans, plan = 0, engine._scheduler.plan

        def counted(budget_tokens: int) -> object:
            nonlocal num_plans
            num_plans += 1
            return plan(budget_tokens)

        monkeypatch.setattr(engine._scheduler, "plan", counted)
        for _ in range(5):
            await sequence.step(ids(1), Want.LAST)
        await asyncio.sleep(1)
        assert num_plans == engine.num_passes == 5
        sequence.close()

    with_engine(work)


def test_engine_runs_simultaneous_steps_in_one_pass_and_reports_their_wait() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        sequences = [engine.open(client="a", start=0, end=NUM_BLOCKS, max_tokens=20) for _ in range(3)]
        done = await asyncio.gather(*(sequence.step(ids(1), Want.LAST) for sequence in sequences))
        assert [round(one.queue_ms) for one in done] == [0, 0, 100]
        assert [one.batch_size for one in done] == [2, 2, 1]
        assert told == [(1, one.compute_ms, one.queue_ms) for one in done]
        await asyncio.gather(sequences[0].step(ids(1, 2, 3), Want.LAST), _look(engine))
        assert told[-1][0] == 3
        for sequence in sequences:
            sequence.close()

    async def _look(engine: Engine) -> None:
        await asyncio.sleep(0.05)
        usage = pytest.approx(3 * 2 / engine.pool.num_pages)
        assert engine.load == EngineLoad(num_running=1, num_waiting=0, cache_usage=usage)  # type: ignore[arg-type]

    told: list[tuple[int, float, float]] = []
    with_engine(work, max_batch=2, compute_s=0.1, on_step=lambda *step: told.append(step))


# --- sharing prefixes -------------------------------------------------------------------------------------------------


def test_engine_shares_a_prefix_between_clients_without_time_or_room() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        prompt = prompt_of(5 * PAGE_TOKENS + 3)
        keys = page_keys(REVISION, prompt)
        first = engine.open(client="a", start=0, end=NUM_BLOCKS, max_tokens=120, may_skip=120, page_keys=keys)
        assert first.length == 0
        expected = await generate(first, prompt, 4)
        free = engine.free_tokens
        second = engine.open(client="b", start=0, end=NUM_BLOCKS, max_tokens=120, may_skip=120, page_keys=keys)
        assert second.length == 5 * PAGE_TOKENS
        assert free - engine.free_tokens == 3 * PAGE_TOKENS
        assert await generate(second, prompt[second.length :], 4) == expected == answer(prompt, 4)
        # the shared pages are unchanged
        assert await generate(first, expected[-1:], 3) == answer([*prompt, *expected], 3)
        first.close()
        second.close()
        # once no sequence holds them, the full pages are kept, with the answer's
        again = page_keys(REVISION, [*prompt, *answer(prompt, 20)])
        third = engine.open(client="c", start=0, end=NUM_BLOCKS, max_tokens=120, may_skip=120, page_keys=again)
        assert third.length == 5 * PAGE_TOKENS
        third.close()
        assert engine.free_tokens == NUM_PAGES * PAGE_TOKENS

    with_engine(work)


def test_engine_keeps_answers_as_prefixes() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        prompt = prompt_of(10)
        sequence = engine.open(client="a", start=0, end=NUM_BLOCKS, max_tokens=60)
        tokens = [*prompt, *(await generate(sequence, prompt, 40))]
        sequence.close()
        sequence = engine.open(
            client="a", start=0, end=NUM_BLOCKS, max_tokens=60, may_skip=60, page_keys=page_keys(REVISION, tokens)
        )
        assert sequence.length == 3 * PAGE_TOKENS
        done = await sequence.step(ids(*tokens[sequence.length :]), Want.LAST)
        assert done.output is not None
        assert torch.equal(done.output, alone(tokens)[-1:])
        sequence.close()

    with_engine(work)


def test_engine_ignores_false_page_keys_when_its_span_begins_at_block_0() -> None:
    """A client cannot name a prompt's pages by keys of its choice: the server computes them from the tokens."""

    async def work(engine: Engine, span: Sums) -> None:
        real, claimed = prompt_of(40, 1), prompt_of(40, 2)
        liar = engine.open(
            client="a", start=0, end=4, max_tokens=40, may_skip=40, page_keys=page_keys(REVISION, claimed)
        )
        await liar.step(ids(*real), Want.NOTHING)
        victim = engine.open(
            client="b", start=0, end=4, max_tokens=40, may_skip=40, page_keys=page_keys(REVISION, claimed)
        )
        assert victim.length == 0
        other = engine.open(client="b", start=0, end=4, max_tokens=40, may_skip=40, page_keys=page_keys(REVISION, real))
        assert other.length == 2 * PAGE_TOKENS
        for sequence in (liar, victim, other):
            sequence.close()

    with_engine(work)


@pytest.mark.parametrize("named", [[1], [1, 1]])
def test_engine_offers_no_prefix_when_pages_come_out_of_order(named: list[int]) -> None:
    """The keys and values of a page depend on the pages before it, so a page that follows others in another order is no
    prefix.
    """

    async def work(engine: Engine, span: Sums) -> None:
        prompt = prompt_of(3 * PAGE_TOKENS)
        keys = page_keys(REVISION, prompt)
        first = engine.open(client="a", start=0, end=4, max_tokens=80, may_skip=80, page_keys=keys)
        await first.step(ids(*prompt[: 2 * PAGE_TOKENS]), Want.NOTHING)
        liar = engine.open(
            client="b", start=0, end=4, max_tokens=80, may_skip=80, page_keys=[keys[index] for index in named]
        )
        await liar.step(ids(*prompt[2 * PAGE_TOKENS :]), Want.NOTHING)
        victim = engine.open(client="c", start=0, end=4, max_tokens=80, may_skip=80, page_keys=keys)
        assert victim.length == 2 * PAGE_TOKENS
        for sequence in (first, liar, victim):
            sequence.close()

    with_engine(work)


def test_engine_finds_only_the_client_s_own_keys_when_its_span_begins_later() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        keys = page_keys(REVISION, prompt_of(2 * PAGE_TOKENS))
        x = torch.rand(2 * PAGE_TOKENS + 1, 4)

        def open_for(client: str, start: int = 1) -> EngineSequence:
            return engine.open(client=client, start=start, end=3, max_tokens=60, may_skip=60, page_keys=keys)

        sequences = [open_for("a")]
        await sequences[0].step(x, Want.NOTHING)
        sequences += [open_for("b"), open_for("a"), open_for("a", 2)]
        assert [sequence.length for sequence in sequences[1:]] == [0, 2 * PAGE_TOKENS, 0]
        for sequence in sequences:
            sequence.close()

    with_engine(work, span=Sums(start=1, end=3))


def test_engine_computes_again_in_private_pages_what_a_client_may_not_skip() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        prompt = prompt_of(3 * PAGE_TOKENS)
        keys = page_keys(REVISION, prompt)
        first = engine.open(client="a", start=0, end=NUM_BLOCKS, max_tokens=80, page_keys=keys)
        await first.step(ids(*prompt), Want.NOTHING)
        for may_skip, length in ((0, 0), (3 * PAGE_TOKENS, 3 * PAGE_TOKENS), (3 * PAGE_TOKENS - 1, 2 * PAGE_TOKENS)):
            second = engine.open(client="b", start=0, end=NUM_BLOCKS, max_tokens=80, may_skip=may_skip, page_keys=keys)
            assert second.length == length
            other = [*prompt[:length], *prompt_of(20, 9)]
            done = await second.step(ids(*other[length:]), Want.LAST)
            assert done.output is not None
            assert torch.equal(done.output, alone(other)[-1:])
            second.close()
        done = await first.step(ids(5), Want.LAST)
        assert done.output is not None
        assert torch.equal(done.output, alone([*prompt, 5])[-1:])
        first.close()

    with_engine(work)
