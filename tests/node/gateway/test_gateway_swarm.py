"""The gateway over the real client and real servers on a simulated internet: what a scripted client cannot show."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import openai as api
import pytest
import torch
from node.gateway.gateway_swarm import gateway_swarm
from openai import AsyncOpenAI
from openai.types import CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletion
from support.leaks import no_leaks
from swarm.client.tensor_calls import TensorCalls
from swarm.serving.server.deployment import ServerOptions
from swarm.serving.session import session_messages
from swarm.serving.tokenizer.model_assets import TokenizerLimits
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_model import initial_theta
from swarm.training.run.run_tables import DEFAULT_MODEL
from swarm.training.state.export import export_hf
from swarm_node.demo import demo_answer
from swarm_protocol.errors import PeerUnreachable
from transformers import AutoModelForCausalLM

PROMPT = "def fibonacci(n):\n"
KV_BYTES = 2**17
SMALL = {**DEFAULT_MODEL, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "initializer_range": 0.3}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gateway") / "small"
    run = RunConfig(name="small", model=SMALL)
    export_hf(initial_theta(run), run, directory)
    return directory


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def test_streamed_tokens_are_those_of_the_model_also_when_a_server_dies(checkpoint: Path) -> None:
    async def main() -> None:
        async with gateway_swarm(checkpoint, (0, 2), (0, 2), (2, 4), (2, 4)) as swarm:
            stream = await swarm.openai.completions.create(
                model="small", prompt=PROMPT, max_tokens=40, temperature=0, stream=True
            )
            texts: list[str] = []
            async for chunk in stream:
                texts.append(chunk.choices[0].text)
                if len(texts) == 8:
                    trace = await swarm.openai.get(f"/traces/{chunk.id}", cast_to=dict)
                    swarm.internet.crash(trace["hops"][-1]["peer_id"])
            trace = await swarm.openai.get(f"/traces/{chunk.id}", cast_to=dict)
            assert len(trace["replays"]) == 1
            assert trace["failover_ms"] > 0
            assert "".join(texts) == await asyncio.to_thread(demo_answer.complete_undisturbed, checkpoint, PROMPT, 40)

    asyncio.run(main())


def test_chat_without_a_limit_ends_where_the_context_ends_or_the_cache_is_full(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache of the second swarm holds less than the model's context."""
    monkeypatch.setattr(session_messages, "GROWTH_TOKENS", 32)
    short = shutil.copytree(checkpoint, tmp_path / "small")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 192}))

    async def chat(kv_bytes: int) -> tuple[CompletionUsage, int]:
        async with gateway_swarm(short, (0, 2), (2, 4), options=ServerOptions(kv_bytes=kv_bytes)) as swarm:
            swarm.client._session = replace(swarm.client._session, patience_s=1.0)
            before = swarm.num_free_tokens()
            answer = await swarm.openai.chat.completions.create(
                model="small",
                messages=[{"role": "user", "content": PROMPT}],
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            [choice] = answer.choices
            assert choice.finish_reason == "length"
            assert choice.message.content
            assert answer.usage is not None
            await _until(lambda: swarm.num_sessions() == 0)
            assert swarm.num_free_tokens() == before
            return answer.usage, min(before)

    async def main() -> None:
        usage, _ = await chat(2**22)
        assert usage.total_tokens == 192
        usage, cache_tokens = await chat(KV_BYTES // 4)
        assert 64 < cache_tokens < 160
        assert cache_tokens <= usage.total_tokens <= cache_tokens + 1

    asyncio.run(main())


def test_request_without_options_is_drawn_with_the_model_s_own(checkpoint: Path, tmp_path: Path) -> None:
    own = {"temperature": 0.6, "top_p": 0.8, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2}
    given = shutil.copytree(checkpoint, tmp_path / "small")
    (given / "generation_config.json").write_text(json.dumps({"do_sample": True, **own}))

    async def main() -> None:
        async with gateway_swarm(given, (0, 2), (2, 4)) as swarm:

            async def ask(**options: Any) -> str:
                asked = {"model": "small", "prompt": PROMPT, "max_tokens": 16, "seed": 1}
                return (await swarm.openai.completions.create(**asked, extra_body=options)).choices[0].text

            expected = await ask()
            assert await ask(**own) == expected
            assert await ask(**{**own, "temperature": 1}) == await ask(temperature=1) != expected
            plain = await ask(temperature=0, repetition_penalty=1)
            assert plain == await asyncio.to_thread(demo_answer.complete_undisturbed, given, PROMPT, 16)

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_disconnects_frees_every_server(checkpoint: Path, stream: bool) -> None:
    async def main() -> None:
        async with gateway_swarm(checkpoint, (0, 2), (2, 4)) as swarm:
            before = swarm.num_free_tokens()
            asking = asyncio.create_task(_ask(swarm.openai, stream=stream))
            await _until(lambda: swarm.num_sessions() == 2)
            asking.cancel()
            await asyncio.wait([asking])
            # a running step keeps its pages until it ends
            await _until(lambda: swarm.num_sessions() == 0 and swarm.num_free_tokens() == before)
            answer = await swarm.openai.completions.create(model="small", prompt=PROMPT, max_tokens=5, temperature=0)
            assert answer.choices[0].text == await asyncio.to_thread(
                demo_answer.complete_undisturbed, checkpoint, PROMPT, 5
            )

    asyncio.run(main())


async def _ask(openai: AsyncOpenAI, *, stream: bool) -> None:
    answer = await openai.completions.create(model="small", prompt=PROMPT, max_tokens=900, temperature=0, stream=stream)
    if isinstance(answer, api.AsyncStream):
        async for _chunk in answer:
            pass


def test_model_with_a_gap_is_unavailable_and_the_blocks_are_named(checkpoint: Path) -> None:
    async def main() -> None:
        async with gateway_swarm(checkpoint, (0, 3)) as swarm:
            with pytest.raises(api.InternalServerError, match="nobody serves blocks 3:4 of 4") as error:
                await swarm.openai.completions.create(model="small", prompt=PROMPT)
            assert error.value.status_code == 503
            health = await swarm.openai._client.get(str(swarm.openai.base_url).replace("/v1/", "/health"))
            assert health.status_code == 503
            [small] = health.json()["models"]
            assert 0 <= small.pop("age_s") < 60
            assert small == {"id": "small", "num_blocks": 4, "missing_blocks": [[3, 4]]}

    asyncio.run(main())


BAD_BODIES = [
    (400, "over the context", b'{"model": "small", "prompt": "' + b"x" * 2000 + b'"}'),
    (404, "'small'", b'{"model": "large", "prompt": "x"}'),
    (400, "temperature", b'{"model": "small", "prompt": "x", "temperature": 1e999}'),
    (400, "top_p", b'{"model": "small", "prompt": "x", "top_p": -1}'),
    (400, "", b'{"model": "small", "prompt": "\xff\xfe"}'),
]


def test_bad_requests_are_refused_and_another_session_goes_on(checkpoint: Path) -> None:
    async def main() -> None:
        async with gateway_swarm(checkpoint, (0, 4)) as swarm:
            before = swarm.num_free_tokens()
            honest = await swarm.openai.completions.create(
                model="small", prompt=PROMPT, max_tokens=100, temperature=0, stream=True
            )
            chunks = aiter(honest)
            texts = [(await anext(chunks)).choices[0].text]
            for status, what, body in BAD_BODIES:
                refused = await swarm.openai._client.post(
                    f"{swarm.openai.base_url}completions", content=body, headers={"content-type": "application/json"}
                )
                assert refused.status_code == status
                assert what in refused.json()["error"]["message"]
                assert swarm.num_sessions() <= 1
            texts += [chunk.choices[0].text async for chunk in chunks]
            assert "".join(texts) == await asyncio.to_thread(demo_answer.complete_undisturbed, checkpoint, PROMPT, 100)
            await _until(lambda: swarm.num_sessions() == 0)
            assert swarm.num_free_tokens() == before

    async def counted() -> None:
        with no_leaks():
            await main()

    asyncio.run(counted())


def test_prompt_over_the_cache_of_every_server_is_refused_and_another_session_goes_on(checkpoint: Path) -> None:
    """Two requests fit in no server ever, and one does not fit while another session is there."""

    async def main() -> None:
        options = ServerOptions(kv_bytes=KV_BYTES)
        async with gateway_swarm(checkpoint, (0, 2), (2, 4), options=options, patience_s=0.0) as swarm:
            budget = min(server.deployed.loaded.kv_tokens for server in swarm.servers.values())
            assert 200 < budget < 900  # under the context of 1024, which would give another refusal
            before = swarm.num_free_tokens()
            honest = await swarm.openai.completions.create(
                model="small", prompt=PROMPT, max_tokens=400, temperature=0, stream=True
            )
            chunks = aiter(honest)
            texts = [(await anext(chunks)).choices[0].text]
            during = swarm.num_free_tokens()
            for prompt, max_tokens, status, told in (
                ("x" * budget, 16, 400, "is too small for the prompt and its answer: shorten the prompt or ask"),
                ("x", budget, 400, "is too small for the prompt and its answer: shorten the prompt or ask"),
                ("x", 2**20, 400, "over the context of 1024 tokens of small: ask for 1023 at most"),
                ("x" * (budget - 64), 16, 429, "not available"),
            ):
                with pytest.raises(api.APIStatusError) as refused:
                    await swarm.openai.completions.create(model="small", prompt=prompt, max_tokens=max_tokens)
                assert refused.value.status_code == status
                assert ("retry-after" in refused.value.response.headers) == (status == 429)
                error = refused.value.response.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert told in error["message"]
                assert swarm.num_sessions() == 2
                assert swarm.num_free_tokens() == during
            # a refusal for lack of room says nothing about smaller requests
            small = await swarm.openai.completions.create(model="small", prompt="y", max_tokens=2, temperature=0)
            assert small.usage is not None
            assert small.usage.completion_tokens == 2
            texts += [chunk.choices[0].text async for chunk in chunks]
            assert "".join(texts) == await asyncio.to_thread(demo_answer.complete_undisturbed, checkpoint, PROMPT, 400)
            await _until(lambda: swarm.num_sessions() == 0)
            assert swarm.num_free_tokens() == before

    async def counted() -> None:
        with no_leaks():
            await main()

    asyncio.run(counted())


def test_seeded_sampling_repeats_and_usage_counts_tokens(checkpoint: Path) -> None:
    async def main() -> None:
        async with gateway_swarm(checkpoint, (0, 2), (2, 4)) as swarm:
            answers = [
                await swarm.openai.completions.create(
                    model="small", prompt=PROMPT, max_tokens=12, temperature=1.2, seed=5
                )
                for _ in range(2)
            ]
            assert answers[0].choices[0].text == answers[1].choices[0].text
            usage = answers[0].usage
            assert usage is not None
            assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), 12)

    asyncio.run(main())


def test_probabilities_are_the_models_own_with_exact_bytes(checkpoint: Path) -> None:
    async def main() -> None:
        async with gateway_swarm(checkpoint, (0, 2), (2, 4)) as swarm:
            answer = await swarm.openai.completions.create(
                model="small", prompt=PROMPT, max_tokens=12, temperature=0, logprobs=3
            )
            chat = await swarm.openai.chat.completions.create(
                model="small",
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=12,
                temperature=0,
                logprobs=True,
                top_logprobs=2,
            )
        found = answer.choices[0].logprobs
        assert found is not None
        assert found.token_logprobs is not None
        expected = await asyncio.to_thread(_local_logprobs, checkpoint, PROMPT, 12)
        assert found.token_logprobs == pytest.approx(expected, abs=1e-4)
        assert found.top_logprobs is not None
        assert [max(top.values()) for top in found.top_logprobs] == found.token_logprobs
        told = chat.choices[0].logprobs
        assert told is not None
        assert told.content is not None
        data = b"".join(bytes(token.bytes or ()) for token in told.content)
        assert data.decode(errors="replace") == chat.choices[0].message.content
        assert [len(token.top_logprobs) for token in told.content] == [2] * len(told.content)

    asyncio.run(main())


def _local_logprobs(checkpoint: Path, prompt: str, num_tokens: int) -> list[float]:
    """Return the log probabilities of the greedy tokens by transformers alone. A byte is the token of its number."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    ids, found = list(prompt.encode()), []
    with torch.inference_mode():
        for _ in range(num_tokens):
            logprobs_V = model(torch.tensor([ids])).logits[0, -1].float().log_softmax(0)
            found.append(float(logprobs_V.max()))
            ids.append(int(logprobs_V.argmax()))
    return found


def test_prompts_are_scored_as_transformers_scores_them_also_while_servers_crash(checkpoint: Path) -> None:
    """Requests of evaluation harnesses are answered: text or token ids, several at once, with no token more or one."""
    texts = [PROMPT, "class A:\n    pass  # €"]
    expected = [_local_prompt_logprobs(checkpoint, text) for text in texts]

    def check(choice: CompletionChoice, text: str, logprobs: list[float], num_new: int) -> None:
        found = choice.logprobs
        assert found is not None
        assert found.token_logprobs is not None
        assert found.token_logprobs[0] is None
        prompt = found.token_logprobs[1 : len(text.encode())]
        assert prompt == pytest.approx(logprobs, abs=1e-4)
        num_tokens = len(text.encode()) + num_new
        assert [*map(len, (found.tokens or (), found.top_logprobs or (), found.text_offset or ()))] == [num_tokens] * 3
        assert choice.text.startswith(text)
        assert [text[at] for at in found.text_offset or () if at < len(text.rstrip("€"))] == [*text.rstrip("€")]
        assert choice.finish_reason == "length"

    async def main() -> None:
        async with gateway_swarm(checkpoint, (0, 2), (0, 2), (2, 4), (2, 4)) as swarm:
            ask = partial(swarm.openai.completions.create, model="small", temperature=0, logprobs=2, echo=True)
            as_ids = [list(text.encode()) for text in texts]
            for prompt in (texts, as_ids):
                for max_tokens in (0, 1, 3):
                    answer = await ask(prompt=prompt, max_tokens=max_tokens)
                    for choice, text, logprobs in zip(answer.choices, texts, expected, strict=True):
                        check(choice, text, logprobs, max_tokens)
                    assert answer.usage is not None
                    assert answer.usage.prompt_tokens == sum(map(len, as_ids))
                    assert answer.usage.completion_tokens == max_tokens * len(texts)
            used = [who for who, server in swarm.servers.items() if server.calls._paces]
            calling = asyncio.create_task(ask(prompt=texts, max_tokens=1))
            for peer_id in (used[0], used[-1]):
                await asyncio.sleep(0.001)
                swarm.internet.crash(peer_id)
            for choice, text, logprobs in zip((await calling).choices, texts, expected, strict=True):
                check(choice, text, logprobs, 1)
            with pytest.raises(api.BadRequestError, match="token ids that the model does not know") as refused:
                await ask(prompt=[10**6], max_tokens=1)
            assert refused.value.param == "prompt"
            await _until(lambda: swarm.num_sessions() == 0)

    asyncio.run(main())


def test_echoed_prompt_is_scored_once_for_all_its_answers(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored, score = list[list[int]](), TensorCalls.score

    async def noted(calls: TensorCalls, chosen: Any, token_ids: list[int], num_top: int) -> list[list[float]]:
        scored.append(token_ids)
        return await score(calls, chosen, token_ids, num_top)

    async def main() -> None:
        async with gateway_swarm(checkpoint, (0, 4)) as swarm:
            for max_tokens in (0, 1, 3):
                answer = await swarm.openai.completions.create(
                    model="small", prompt=[PROMPT, "class"], n=3, max_tokens=max_tokens, logprobs=2, echo=True
                )
                assert len(answer.choices) == 6
                assert all(choice.logprobs for choice in answer.choices)
                assert sorted(scored) == sorted(list(text.encode()) for text in (PROMPT, "class"))
                scored.clear()

    monkeypatch.setattr(TensorCalls, "score", noted)
    asyncio.run(main())


def _local_prompt_logprobs(checkpoint: Path, prompt: str) -> list[float]:
    """Return the score that transformers gives each token of the prompt but the first."""
    ids = torch.tensor(list(prompt.encode()))
    with torch.inference_mode():
        logits_TV = AutoModelForCausalLM.from_pretrained(checkpoint)(ids[None]).logits[0].float()
    found: list[float] = logits_TV.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0].tolist()
    return found


def test_choices_differ_and_repeat_with_the_seed_also_for_a_prompt_of_token_ids(checkpoint: Path) -> None:
    async def main() -> None:
        async with gateway_swarm(checkpoint, (0, 2), (2, 4)) as swarm:
            texts = []
            for prompt in (PROMPT, list(PROMPT.encode())):
                answer = await swarm.openai.completions.create(
                    model="small", prompt=prompt, max_tokens=8, temperature=1.5, seed=5, n=3
                )
                texts.append([choice.text for choice in answer.choices])
                assert answer.usage is not None
                assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 24)
            assert texts[0] == texts[1]
            assert len(set(texts[0])) == 3
            with pytest.raises(api.BadRequestError, match="token ids that the model does not know"):
                await swarm.openai.completions.create(model="small", prompt=[10**6])
            url = str(swarm.openai.base_url).replace("/v1/", "/detokenize")
            response = await swarm.openai._client.post(url, json={"model": "small", "tokens": [10**6]})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "tokens")
            await _until(lambda: swarm.num_sessions() == 0)

    asyncio.run(main())


def test_tools_for_a_model_whose_template_has_no_place_for_them_are_refused(checkpoint: Path) -> None:
    async def main() -> None:
        async with gateway_swarm(checkpoint, (0, 4)) as swarm:
            with pytest.raises(api.BadRequestError, match="does not support tools") as refused:
                await swarm.openai.chat.completions.create(
                    model="small",
                    messages=[{"role": "user", "content": "hi"}],
                    tools=[{"type": "function", "function": {"name": "f"}}],
                )
            assert refused.value.param == "tools"
            with pytest.raises(api.BadRequestError, match="does not use mood") as refused:
                await swarm.openai.chat.completions.create(
                    model="small",
                    messages=[{"role": "user", "content": "hi"}],
                    extra_body={"chat_template_kwargs": {"mood": 1}},
                )
            assert refused.value.param == "chat_template_kwargs"

    asyncio.run(main())


TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %};{% endfor %}"
)


def test_template_renders_tools_calls_and_results_into_the_prompt(checkpoint: Path, tmp_path: Path) -> None:
    """A byte is a token, so the prompt's length shows what the template made of it."""
    templated = tmp_path / "small"
    shutil.copytree(checkpoint, templated)
    (templated / "chat_template.jinja").write_text(TEMPLATE)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    expected = '[f]system: be brief;assistant: {"a": 1};tool: 2;'

    async def main() -> None:
        async with gateway_swarm(templated, (0, 4)) as swarm:
            answer = await swarm.openai.chat.completions.create(
                model="small",
                messages=messages,  # type: ignore[arg-type]
                tools=[{"type": "function", "function": {"name": "f"}}],
                max_tokens=1,
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == len(expected)
            response = await swarm.openai.responses.create(
                model="small",
                input=[
                    {"role": "developer", "content": "be brief"},
                    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
                    {"type": "function_call_output", "call_id": "c1", "output": "2"},
                ],
                tools=[{"type": "function", "name": "f", "parameters": None, "strict": None}],
                max_output_tokens=1,
            )
            assert response.usage is not None
            assert (response.usage.input_tokens, response.status) == (len(expected), "incomplete")

    asyncio.run(main())


def test_constrained_answers_fit_their_grammar_also_when_the_server_that_draws_dies(
    checkpoint: Path, tmp_path: Path
) -> None:
    """The weights are random, so that only the grammar makes the answers fit."""
    templated = tmp_path / "small"
    shutil.copytree(checkpoint, templated)
    (templated / "chat_template.jinja").write_text(TEMPLATE)
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "maximum": 99}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    weather = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    clock = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "maxProperties": 0}}}
    asked = {
        "model": "small",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 150,
        "temperature": 1.0,
        "presence_penalty": 0.5,
        "stop_token_ids": [0],  # a model of bytes has no end token
    }

    async def main() -> None:
        async with gateway_swarm(templated, (0, 2), (2, 4), (2, 4)) as swarm:
            chat = swarm.openai.chat.completions.with_raw_response

            async def answer(seed: int, **more: Any) -> ChatCompletion:
                response = await chat.create(extra_body={**asked, "seed": seed, **more}, model="small", messages=[])
                parsed = response.parse()
                assert isinstance(parsed, ChatCompletion)
                return parsed

            named = {"tools": [weather, clock], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
            for seed in range(2):
                [call] = (await answer(seed, **named)).choices[0].message.tool_calls or ()
                assert call.type == "function"
                assert call.function.name == "weather"
                assert set(json.loads(call.function.arguments)) == {"city", "days"}
            required = await answer(3, tools=[clock], tool_choice="required", parallel_tool_calls=False)
            assert required.choices[0].finish_reason == "tool_calls"
            formed = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
            texts = [(await answer(4, **formed)).choices[0].message.content]
            assert set(json.loads(texts[0] or "")) == {"city", "days"}

            stream = await swarm.openai.chat.completions.create(
                extra_body={**asked, "seed": 4, **formed, "stream": True}, model="small", messages=[], stream=True
            )
            pieces = []
            async for chunk in stream:
                pieces.append(chunk.choices[0].delta.content or "")
                if len(pieces) == 6:
                    trace = (await swarm.openai.get(f"/traces/{chunk.id}", cast_to=dict[str, Any]))["hops"]
                    swarm.internet.crash(trace[-1]["peer_id"])
            assert "".join(pieces) == texts[0]
            with pytest.raises(api.BadRequestError, match=r"the JSON schema cannot be used: .*uniqueItems") as refused:
                await answer(5, response_format={**formed["response_format"], "json_schema": UNFIT})
            assert refused.value.param == "response_format"
            unfit_tool = {"type": "function", "function": {"name": "f", "parameters": UNFIT["schema"]}}
            with pytest.raises(api.BadRequestError, match="the grammar cannot be used") as refused:
                await answer(6, tools=[unfit_tool], tool_choice="required")
            assert refused.value.param == "tools"
            for limit in ("max_tokens", "max_completion_tokens"):
                with pytest.raises(api.BadRequestError, match="over the context") as refused:
                    await answer(7, **{"max_tokens": None, limit: 100_000})
                assert refused.value.param == limit

    asyncio.run(main())


def test_embedding_is_the_mean_of_the_models_last_hidden_states(checkpoint: Path) -> None:
    texts = [PROMPT, "ab"]
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        means = [model.model(torch.tensor([list(text.encode())]))[0][0].mean(dim=0) for text in texts]
    expected = [(mean / mean.norm()).tolist() for mean in means]

    async def main() -> None:
        async with gateway_swarm(checkpoint, (0, 2), (2, 4)) as swarm:
            answer = await swarm.openai.embeddings.create(model="small", input=texts)
            for found, wanted in zip(answer.data, expected, strict=True):
                assert found.embedding == pytest.approx(wanted, abs=1e-4)
            assert answer.usage.prompt_tokens == len(PROMPT) + 2
            with pytest.raises(api.BadRequestError, match="over the context") as caught:
                await swarm.openai.embeddings.create(model="small", input="x" * 3000)
            assert caught.value.code == "context_length_exceeded"
            with pytest.raises(api.BadRequestError, match="empty"):
                await swarm.openai.embeddings.create(model="small", input="")
            url = str(swarm.openai.base_url).replace("/v1/", "")
            tokens = (
                await swarm.openai._client.post(f"{url}/tokenize", json={"model": "small", "prompt": "ab"})
            ).json()
            assert (tokens["tokens"], tokens["count"]) == ([97, 98], 2)
            back = await swarm.openai._client.post(f"{url}/detokenize", json={"model": "small", "tokens": [97, 98]})
            assert back.json() == {"prompt": "ab"}
            knows_no = {
                "messages": [{"role": "user", "content": "x"}],
                "chat_template_kwargs": {"enable_thinking": True},
            }
            refused = await swarm.openai._client.post(f"{url}/v1/chat/completions", json={"model": "small", **knows_no})
            assert (refused.status_code, "enable_thinking" in refused.text) == (400, True)

    asyncio.run(main())


UNFIT = {"name": "x", "schema": {"type": "array", "uniqueItems": True}}


def test_health_does_not_trust_the_record_of_a_server_that_could_not_be_reached(checkpoint: Path) -> None:
    async def main() -> None:
        async with gateway_swarm(checkpoint, (0, 2), (2, 4)) as swarm:
            url = str(swarm.openai.base_url).replace("/v1/", "/health")
            assert (await swarm.openai._client.get(url)).status_code == 200
            last = next(peer_id for peer_id, server in swarm.servers.items() if server.end_block == 4)
            swarm.client._state.health.failed(last, PeerUnreachable("gone", peer_id=last))
            health = await swarm.openai._client.get(url)
            assert health.status_code == 503
            assert health.json()["models"][0]["missing_blocks"] == [[2, 4]]
            swarm.client._state.health.worked(last)
            assert (await swarm.openai._client.get(url)).status_code == 200

    asyncio.run(main())


LOOP = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}" + 2 * "{% endfor %}"


def test_chat_template_without_an_end_is_refused_and_other_requests_go_on(checkpoint: Path, tmp_path: Path) -> None:
    """Otherwise each such request would take a thread of the gateway for good."""
    looping = shutil.copytree(checkpoint, tmp_path / "looping")
    (looping / "chat_template.jinja").write_text(LOOP)

    async def scenario() -> None:
        async with gateway_swarm(looping, (0, 4), tokenizers=TokenizerLimits(call_s=1.0)) as swarm:
            ask = swarm.openai.completions.create
            before = await ask(model="small", prompt=PROMPT, max_tokens=8, temperature=0)
            message = {"role": "user", "content": "hi"}
            chat = asyncio.create_task(swarm.openai.chat.completions.create(model="small", messages=[message]))
            # its tokens are decoded while the tokenizer's process is busy
            stream = await ask(model="small", prompt=[1, 2, 3], max_tokens=8, temperature=0, stream=True)
            assert [event async for event in stream]
            with pytest.raises(api.BadRequestError) as refused:
                await chat
            assert refused.value.body == {
                "message": "the tokenizer of small exceeded its limits: it took over 1 s: "
                "shorten the prompt or use another model",
                "type": "invalid_request_error",
                "param": None,
                "code": "invalid_request",
            }
            again = await ask(model="small", prompt=PROMPT, max_tokens=8, temperature=0)
            assert again.choices == before.choices

    with no_leaks():
        asyncio.run(scenario())
