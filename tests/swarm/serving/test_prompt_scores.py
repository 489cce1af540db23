"""A prompt that is echoed with the log probabilities of its tokens, against the same model on one machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.faults import Fault
from support.text_models import byte_tokenizer
from swarm.client import Token, remote_blocks, tensor_calls
from swarm.client.prompt_scores import PromptScores
from swarm.client.request import ContextExceeded
from swarm.serving.local_ends.kept_model import KeptModel
from swarm.serving.server.forward_call import HEAD_PIECE_BYTES
from swarm.serving.server.forward_server import ForwardAdmission
from swarm.testing import virtual_time
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError, PeerRefused, SessionError
from swarm_protocol.serving_messages import Compute
from transformers import AutoModelForCausalLM

PROMPT = "def add(a, b):\n    return a + b  # €\n"
IDS = byte_tokenizer()(PROMPT)["input_ids"]
HALVES = [(0, 3), (3, 6)]


def local_logprobs(directory: Path, ids: Sequence[int]) -> torch.Tensor:
    """Log probabilities of what follows each position, [T, V]."""
    with torch.inference_mode():
        logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(directory)(torch.tensor([ids])).logits[0]
        return logits.float().log_softmax(-1)


async def echoed(swarm: Any, num_tokens: int = 0, prompt: object = PROMPT, **more: Any) -> list[Token]:
    asked = {"prompt": prompt, "echo": True, "num_logprobs": 2, **more}
    return [token async for token in swarm.generate(num_tokens, **asked)]


def assert_scored(directory: Path, tokens: Sequence[Token], ids: Sequence[int] = IDS) -> None:
    expected_TV = local_logprobs(directory, ids)
    assert [token.token_id for token in tokens] == list(ids)
    assert all(token.is_prompt for token in tokens)
    assert (tokens[0].logprob, tokens[0].top) == (None, ())
    for token, before_V in zip(tokens[1:], expected_TV, strict=False):
        assert token.logprob == pytest.approx(float(before_V[token.token_id]), abs=1e-4)
        values, likely = before_V.topk(2)
        assert [other.token_id for other in token.top] == likely.tolist()
        assert [other.logprob for other in token.top] == pytest.approx(values.tolist(), abs=1e-4)
    assert b"".join(token.data for token in tokens).decode() == PROMPT
    assert [token.text for token in tokens] == [""] * (len(ids) - 1) + [PROMPT]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("spans", [[(0, 6)], [(0, 2), (2, 6)]], ids=len)
def test_scores_of_a_prompt_are_the_local_models(
    boxes: Any, model_dirs: Callable[[str], Path], family: str, spans: Sequence[tuple[int, int]]
) -> None:
    async def scenario() -> list[Token]:
        async with boxes(model_dirs(family), spans) as swarm:
            tokens = await echoed(swarm)
            assert await echoed(swarm, prompt=IDS) == tokens
            assert swarm.client.trace()["num_prompt_tokens"] == len(IDS)
            return tokens

    tokens = virtual_time.run(scenario())
    assert_scored(model_dirs(family), tokens)
    assert [token.finish_reason for token in tokens] == [None] * (len(IDS) - 1) + ["length"]


def test_prompt_whose_pages_servers_keep_is_scored_as_a_new_one_and_answered_as_without_echo(
    boxes: Any, llama_dir: Path
) -> None:
    async def scenario() -> tuple[list[Token], list[Token]]:
        async with boxes(llama_dir, HALVES) as swarm:
            plain = [token async for token in swarm.generate(8, prompt=PROMPT, num_logprobs=2)]
            tokens = await echoed(swarm, 8)
            assert swarm.client.trace()["num_reused_tokens"] >= 32
            await swarm.all_freed()
            return plain, tokens

    plain, tokens = virtual_time.run(scenario())
    assert_scored(llama_dir, tokens[: len(IDS)])
    answer = tokens[len(IDS) :]
    assert [(token.token_id, token.text, token.finish_reason) for token in answer] == [
        (token.token_id, token.text, token.finish_reason) for token in plain
    ]
    assert [token.logprob for token in answer] == pytest.approx([token.logprob for token in plain], abs=1e-4)


def test_one_likeliest_token_comes_from_the_same_pass_and_needs_no_session(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as swarm:
            [plain] = [token async for token in swarm.generate(1, prompt=PROMPT, num_logprobs=2)]
            num_opened = swarm.client.trace()["hops"]
            assert num_opened
            *_, one = await echoed(swarm, 1)
            assert not swarm.client.trace()["hops"]
            assert (one.token_id, one.text, one.data, one.finish_reason) == (
                plain.token_id,
                plain.text,
                plain.data,
                "length",
            )
            assert [one.logprob, *(other.logprob for other in one.top)] == pytest.approx(
                [plain.logprob, *(other.logprob for other in plain.top)], abs=1e-4
            )
            assert [other.token_id for other in one.top] == [other.token_id for other in plain.top]
            # an end token ends the answer, and is scored for all that
            *_, end = await echoed(swarm, 1, stop_token_ids=[plain.token_id])
            assert (end.text, end.finish_reason, end.logprob) == ("", "stop", one.logprob)
            *_, end = await echoed(swarm, 5, stop_token_ids=[plain.token_id])
            assert (end.text, end.finish_reason, end.logprob) == ("", "stop", pytest.approx(one.logprob, abs=1e-4))
            # what changes the logits is drawn by the last server
            biased = await echoed(swarm, 1, logit_bias={7: 100.0})
            assert biased[-1].token_id == 7
            *_, drawn = await echoed(swarm, 1, temperature=2.0, seed=3)
            [expected] = [t async for t in swarm.generate(1, prompt=PROMPT, temperature=2.0, seed=3)]
            assert drawn.token_id == expected.token_id

    virtual_time.run(scenario())


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("what", ["kill", "stall", "raise"])
def test_server_that_fails_while_a_prompt_is_scored_changes_no_figure(
    boxes: Any, llama_dir: Path, nth: int, what: Any
) -> None:
    async def scenario() -> list[Token]:
        faults = [Fault(who="*", phase="serve/forward", what=what, nth=nth)]
        async with boxes(llama_dir, [*HALVES, *HALVES], faults=faults) as swarm:
            return await echoed(swarm)

    assert_scored(llama_dir, virtual_time.run(scenario()))


def test_scores_are_bounded_and_of_equally_likely_tokens_the_lower_id_comes_first() -> None:
    rows = [[1.0, 1.0, 5.0, 2.0, 3.0, 1.5], [1.0, 1.0, 5.0, 2.0, -2e6, 1.5], [1.0, 1.0, 5.0, 2.0, 0.0, 1.5]]
    scores = PromptScores([7, 8, 9], rows, 2)
    assert [scores.token(position).logprob for position in (1, 2)] == [0.0, -limits.MAX_LOGPROB]
    assert scores.answer().token_id == 2
    assert scores.answer().top == ((2, -0.5), (5, -0.5))


@pytest.mark.parametrize("lie", [256.0, -256.0])
def test_server_that_names_impossible_tokens_is_left_for_another(
    boxes: Any, llama_dir: Path, monkeypatch: pytest.MonkeyPatch, lie: float
) -> None:
    async def scenario() -> list[Token]:
        async with boxes(llama_dir, [(0, 6), (0, 6)]) as swarm:
            liar = next(iter(swarm.servers.values())).calls
            honest = liar._forward
            lies = list[int]()

            async def forward(*asked: Any) -> torch.Tensor:
                rows: torch.Tensor = await honest(*asked)
                lies.append(1)
                rows[..., 2:4] += lie
                return rows

            monkeypatch.setattr(liar, "_forward", forward)
            for _ in range(20):
                tokens = await echoed(swarm)
                if lies:
                    return tokens
            raise AssertionError("the liar was never asked")

    assert_scored(llama_dir, virtual_time.run(scenario()))


def test_prompts_are_scored_a_few_at_a_time_so_that_servers_refuse_none(
    boxes: Any, llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> list[str]:
        async with boxes(llama_dir, [(0, 6)]) as swarm:
            calls = next(iter(swarm.servers.values())).calls
            honest, refuse, refused = calls._forward, calls.room._busy, list[str]()

            async def forward(*asked: Any) -> torch.Tensor:
                await asyncio.sleep(1)
                rows: torch.Tensor = await honest(*asked)
                return rows

            def busy(why: str) -> PeerRefused:
                refused.append(why)
                return refuse(why)

            monkeypatch.setattr(calls, "_forward", forward)
            monkeypatch.setattr(calls.room, "_busy", busy)
            found = await asyncio.gather(*(echoed(swarm) for _ in range(16)))
            assert all(tokens == found[0] for tokens in found)
            return refused

    assert virtual_time.run(scenario()) == []


def test_echo_without_probabilities_is_the_prompt_and_asks_no_server(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as swarm:
            for prompt in (PROMPT, IDS):
                [token] = await echoed(swarm, prompt=prompt, num_logprobs=None)
                assert (token.text, token.logprob, token.finish_reason) == (PROMPT, None, "length")
            assert not any(server.calls._paces for server in swarm.servers.values())
            with pytest.raises(ConfigError, match="max_tokens is 0"):
                swarm.generate(0)
            context = await swarm.client.context_tokens("tiny")
            assert len(await echoed(swarm, prompt=[65] * context)) == context
            with pytest.raises(ConfigError, match="over the context"):
                await echoed(swarm, prompt=[65] * (context + 1))

    virtual_time.run(scenario())


def test_client_that_keeps_text_at_home_scores_no_prompt(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        kept = {"tiny": KeptModel(source=str(llama_dir))}
        async with boxes(llama_dir, [(0, 6)], text_at_home=kept) as swarm:
            with pytest.raises(ConfigError, match="scores of a prompt would give it to servers"):
                await echoed(swarm)

    asyncio.run(scenario())


def test_blocks_that_nobody_serves_are_named(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3)]) as swarm:
            with pytest.raises(SessionError, match="3:6"):
                await echoed(swarm)

    virtual_time.run(scenario())


def test_lost_servers_of_a_prompt_to_score_or_of_an_embedding_are_told_as_those_of_an_answer(
    boxes: Any, llama_dir: Path
) -> None:
    async def told(swarm: Any, answering: Any) -> tuple[str, float]:
        clock = asyncio.get_running_loop().time
        since_s = clock()
        with pytest.raises(SessionError) as error:
            await answering
        return str(error.value), clock() - since_s

    async def scenario(ask: Callable[[Any], Any]) -> tuple[str, float]:
        async with boxes(llama_dir, HALVES, detection_s=0.1) as swarm:
            await echoed(swarm)
            swarm.internet.crash(swarm.who["s1"])
            return await told(swarm, ask(swarm))

    async def answered(swarm: Any) -> None:
        async for _ in swarm.generate(1):
            pass

    sentence, of_answer_s = virtual_time.run(scenario(answered))
    assert sentence.startswith("blocks 3:6 are not available: their servers just failed (12D3KooW")
    assert sentence.endswith(": the peer does not answer): try again in a moment")
    for ask in (echoed, lambda swarm: swarm.client.pooled("def", model="tiny")):
        assert virtual_time.run(scenario(ask)) == (sentence, pytest.approx(of_answer_s, abs=1.5))


def test_text_that_no_server_has_memory_for_is_refused_as_too_long(
    boxes: Any, llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ForwardAdmission()._max_bytes[-1] == tensor_calls.MAX_CALL_BYTES
    assert HEAD_PIECE_BYTES == tensor_calls.HEAD_PIECE_BYTES

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)]) as swarm:
            calls = next(iter(swarm.servers.values())).calls
            hidden_size = calls._current().loaded.span.hidden_size

            async def check(most_bytes: int, ask: Callable[[list[int]], Any]) -> None:
                calls.room = ForwardAdmission(max_bytes=2 * most_bytes)
                with pytest.raises(ContextExceeded, match="a client may have"):
                    await ask([65] * 33)
                monkeypatch.setattr(tensor_calls, "MAX_CALL_BYTES", most_bytes)
                await ask([65] * 32)
                with pytest.raises(ContextExceeded, match="33 tokens, and tiny computes at most 32"):
                    await ask([65] * 33)
                monkeypatch.undo()

            scored_bytes = HEAD_PIECE_BYTES + 32 * (8 * hidden_size + 2 * 8 + 16)
            await check(scored_bytes, lambda ids: echoed(swarm, prompt=ids))
            await check(32 * 8 * hidden_size, lambda ids: swarm.client.pooled(ids, model="tiny"))

    virtual_time.run(scenario())


def test_only_the_last_server_gets_targets(boxes: Any, llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Compute]()
    read = Compute.from_bytes

    def from_bytes(data: bytes) -> Compute:
        asked.append(read(data))
        return asked[-1]

    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as swarm:
            monkeypatch.setattr(Compute, "from_bytes", from_bytes)
            await echoed(swarm)

    # over such a link all logits would take over an hour, and the two numbers and two tokens of a row do not
    monkeypatch.setattr(remote_blocks, "SLOWEST_TENSOR_BYTES_PER_S", 10.0)
    virtual_time.run(scenario())
    assert [(each.end, each.has_targets, each.num_top) for each in asked] == [(3, False, 0), (6, True, 2)]
    assert asked[1].deadline_s < 1.1 * asked[0].deadline_s
