"""Several choices and several prompts: they are numbered, have different seeds, are freed together, and share a
computed prompt.
"""

from __future__ import annotations

import asyncio

import openai as api
import pytest
from node.gateway.scripted_client import Hang, ScriptedClient, ScriptedToken, converse
from openai import AsyncOpenAI
from swarm_node.gateway.app import GatewayOptions
from swarm_protocol.errors import SessionError

HELLO = [{"role": "user", "content": "hi"}]
ANSWERS = [[ScriptedToken(text), ScriptedToken("!", reason)] for text, reason in (("a", "stop"), ("b", "length"))]


def test_two_choices_are_numbered_and_the_prompt_is_counted_once() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        answer = await openai.chat.completions.create(model="tiny", messages=HELLO, n=2)
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert [choice.message.content for choice in answer.choices] == ["a!", "b!"]
        assert [choice.finish_reason for choice in answer.choices] == ["stop", "length"]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 4)
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 2

    converse(ScriptedClient(scripts=ANSWERS), conversation)


def test_streamed_choices_arrive_as_they_are_ready_each_with_its_role_and_reason() -> None:
    go_on = asyncio.Event()
    client = ScriptedClient(
        scripts=[
            [ScriptedToken("a"), go_on, ScriptedToken("c", "stop")],
            [ScriptedToken("b"), ScriptedToken("d", "length")],
        ]
    )

    async def conversation(openai: AsyncOpenAI) -> None:
        stream = await openai.chat.completions.create(model="tiny", messages=HELLO, n=2, stream=True)
        seen: dict[int, list[str | None]] = {0: [], 1: []}
        order = []
        async for chunk in stream:
            [choice] = chunk.choices
            order.append(choice.index)
            seen[choice.index].append(choice.delta.role or choice.delta.content or choice.finish_reason)
            if choice.finish_reason == "length":
                go_on.set()
        assert seen == {0: ["assistant", "a", "c", "stop"], 1: ["assistant", "b", "d", "length"]}
        assert order == [0, 0, 1, 1, 1, 1, 0, 0]

    converse(client, conversation)


def test_further_choices_begin_after_the_first_token_so_that_their_prompt_is_cached() -> None:
    release = asyncio.Event()
    client = ScriptedClient(scripts=[[release, ScriptedToken("a", "stop")], *[[ScriptedToken("b", "stop")]] * 3])

    async def conversation(openai: AsyncOpenAI) -> None:
        asking = asyncio.create_task(openai.completions.create(model="tiny", prompt=["x", "y"], n=2))
        async with asyncio.timeout(60):
            while client.num_finished < 2:  # both of the second prompt, of which the first waits for no other
                await asyncio.sleep(0.001)
        assert client.num_open == 1
        release.set()
        assert [choice.text for choice in (await asking).choices] == ["a", "b", "b", "b"]

    converse(client, conversation)


def test_seeds_of_choices_differ_and_follow_from_the_request_s_seed() -> None:
    client = ScriptedClient()

    async def conversation(openai: AsyncOpenAI) -> None:
        for _ in range(2):
            await openai.completions.create(model="tiny", prompt="hi", n=3, seed=7)
        await openai.completions.create(model="tiny", prompt="hi", n=2)

    converse(client, conversation)
    seeds = [asked.sampling.seed for asked in client.asked]
    assert seeds[:3] == seeds[3:6]
    assert seeds[0] == 7
    assert len(set(seeds[:3])) == 3
    assert len(set(seeds[6:])) == 2


def test_prompts_may_be_several_texts_or_lists_of_token_ids() -> None:
    client = ScriptedClient()

    async def conversation(openai: AsyncOpenAI) -> None:
        for prompt in (["a", "b"], [1, 2], [[1], [2, 3]]):
            await openai.completions.create(model="tiny", prompt=prompt)
        await openai.completions.create(model="tiny", prompt="a", n=2)

    converse(client, conversation)
    assert [asked.prompt.prompt for asked in client.asked] == ["a", "b", [1, 2], [1], [2, 3], "a", "a"]


def test_prompts_times_n_are_bounded() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        with pytest.raises(api.BadRequestError, match="must be at most 16") as error:
            await openai.completions.create(model="tiny", prompt=["a"] * 9, n=2)
        assert error.value.param == "n"

    converse(ScriptedClient(), conversation)


def test_each_choice_takes_a_slot() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        with pytest.raises(api.RateLimitError, match="at most 3 answers of a model at once"):
            await openai.completions.create(model="tiny", prompt="hi", n=4)
        await openai.completions.create(model="tiny", prompt="hi", n=3)

    converse(ScriptedClient(), conversation, GatewayOptions(max_requests=3))


@pytest.mark.parametrize("stream", [True, False])
def test_failure_of_one_choice_ends_and_frees_all_choices(stream: bool) -> None:
    client = ScriptedClient(
        scripts=[[ScriptedToken("a"), Hang()], [ScriptedToken("b"), SessionError("nobody is left")]]
    )

    async def conversation(openai: AsyncOpenAI) -> None:
        with pytest.raises(api.APIError, match="nobody is left"):
            await _read(openai, n=2, stream=stream)
        assert client.num_open == 0

    converse(client, conversation)


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_frees_all_choices(stream: bool) -> None:
    client = ScriptedClient(script=[ScriptedToken("a"), Hang()])

    async def conversation(openai: AsyncOpenAI) -> None:
        asking = asyncio.create_task(_read(openai, n=3, stream=stream))
        async with asyncio.timeout(60):
            while client.num_open < 3:
                await asyncio.sleep(0.001)
            asking.cancel()
            await asyncio.wait([asking])
            while client.num_open:
                await asyncio.sleep(0.001)

    converse(client, conversation)


async def _read(openai: AsyncOpenAI, *, n: int, stream: bool) -> None:
    answer = await openai.completions.create(model="tiny", prompt="hi", n=n, stream=stream)
    if isinstance(answer, api.AsyncStream):
        async for _chunk in answer:
            pass
