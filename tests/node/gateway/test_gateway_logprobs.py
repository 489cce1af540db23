"""Probabilities in the forms of both endpoints, whole and streamed: bytes, offsets, and tokens outside the text."""

from __future__ import annotations

import openai as api
import pytest
from node.gateway.scripted_client import ScriptedClient, ScriptedLikely, ScriptedToken, converse
from openai import AsyncOpenAI

HELLO = [{"role": "user", "content": "hi"}]
EURO = "€".encode()


def _token(data: bytes, text: str, logprob: float = -0.5, reason: str | None = None) -> ScriptedToken:
    top = [ScriptedLikely(data, logprob), ScriptedLikely(b"zz", -3.0)]
    return ScriptedToken(text, reason, data=data, logprob=logprob, top=top)


SPLIT = [
    _token(b"a ", "a "),
    _token(EURO[:1], ""),
    _token(EURO[1:], "€"),
    _token(b"b", "b", logprob=float("-inf")),
    ScriptedToken("", "stop"),
]
"""A character that two tokens share, a token that could not come, and an end token, which has no probability."""


def test_chat_tokens_have_their_exact_bytes_and_the_likeliest() -> None:
    client = ScriptedClient(script=SPLIT)

    async def conversation(openai: AsyncOpenAI) -> None:
        answer = await openai.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=2)
        assert answer.choices[0].message.content == "a €b"
        assert answer.choices[0].logprobs is not None
        content = answer.choices[0].logprobs.content
        assert content is not None
        assert b"".join(bytes(token.bytes or ()) for token in content) == "a €b".encode()
        assert [token.token for token in content] == ["a ", "\ufffd", "\ufffd\ufffd", "b"]
        assert [token.logprob for token in content] == [-0.5, -0.5, -0.5, -9999.0]
        assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [("a ", -0.5), ("zz", -3.0)]

    converse(client, conversation)
    assert client.asked[0].num_logprobs == 2


def test_chat_without_top_logprobs_requests_only_the_token_s_own_probability() -> None:
    client = ScriptedClient(script=SPLIT)

    async def conversation(openai: AsyncOpenAI) -> None:
        await openai.chat.completions.create(model="tiny", messages=HELLO, logprobs=True)
        with pytest.raises(api.BadRequestError, match="requires logprobs to be true") as error:
            await openai.chat.completions.create(model="tiny", messages=HELLO, top_logprobs=2)
        assert error.value.param == "top_logprobs"
        plain = await openai.chat.completions.create(model="tiny", messages=HELLO)
        assert plain.choices[0].logprobs is None

    converse(client, conversation)
    assert [asked.num_logprobs for asked in client.asked] == [0, None]


def test_completion_offsets_point_into_the_text() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        answer = await openai.completions.create(model="tiny", prompt="hi", logprobs=2)
        found = answer.choices[0].logprobs
        assert found is not None
        assert found.tokens == ["a ", "bytes:\\xe2", "bytes:\\x82\\xac", "b"]
        assert found.text_offset == [0, 2, 3, 3]
        assert found.token_logprobs == [-0.5, -0.5, -0.5, -9999.0]
        assert found.top_logprobs is not None
        assert found.top_logprobs[0] == {"a ": -0.5, "zz": -3.0}

    converse(ScriptedClient(script=SPLIT), conversation)


def test_completion_tokens_without_text_are_distinguished_and_counted_as_shown() -> None:
    parts = [bytes([number]) for number in range(0x80, 0x85)]
    likely = [ScriptedLikely(part, -1.0 - number) for number, part in enumerate(parts)]
    script = [
        _token(b"/", "/"),
        ScriptedToken("", data=parts[0], logprob=-1.0, top=likely),
        _token(b":", "\ufffd:"),
        _token(EURO[:2], ""),
        _token(b"7", "\ufffd7"),
        _token(b"ab", "a"),  # the possible beginning of a stop string is held back
        _token(b"c", "bc", reason="length"),
    ]

    async def conversation(openai: AsyncOpenAI) -> None:
        answer = await openai.completions.create(model="tiny", prompt="hi", logprobs=5)
        found = answer.choices[0].logprobs
        assert found is not None
        assert answer.choices[0].text == "/\ufffd:\ufffd7abc"
        assert found.text_offset == [0, 1, 2, 3, 4, 5, 6]
        assert found.top_logprobs is not None
        assert found.top_logprobs[1] == {f"bytes:\\x{part[0]:x}": -1.0 - n for n, part in enumerate(parts)}

    converse(ScriptedClient(script=script), conversation)


def test_streamed_probabilities_come_with_their_text() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        stream = await openai.completions.create(model="tiny", prompt="hi", logprobs=0, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
        said = [(chunk.text, chunk.logprobs.tokens) for chunk in chunks if chunk.logprobs]
        assert said == [("a ", ["a "]), ("€", ["bytes:\\xe2", "bytes:\\x82\\xac"]), ("b", ["b"])]
        assert chunks[-1].logprobs is None
        chat = await openai.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, stream=True)
        counted = [len(chunk.choices[0].logprobs.content or ()) async for chunk in chat if chunk.choices[0].logprobs]
        assert counted == [1, 2, 1]

    converse(ScriptedClient(script=SPLIT), conversation)


def test_tokens_of_a_stop_string_are_left_out_and_those_of_a_cut_answer_are_not() -> None:
    stopped = [_token(b"a", "a"), _token(b"E", ""), _token(b"ND", "", reason="stop")]
    cut = [_token(b"a", "a"), _token(EURO[:1], "", reason="length")]

    async def conversation(openai: AsyncOpenAI) -> None:
        for tokens in (["a"], ["a", "bytes:\\xe2"]):
            answer = await openai.completions.create(model="tiny", prompt="hi", logprobs=1)
            assert answer.choices[0].logprobs is not None
            assert answer.choices[0].logprobs.tokens == tokens

    converse(ScriptedClient(scripts=[stopped, cut]), conversation)


def _echo(*prompt: bytes, text: str, answer: tuple[ScriptedToken, ...] = ()) -> list[ScriptedToken]:
    """An echoed prompt, whose last token has its text, and the answer."""
    script = []
    for index, data in enumerate(prompt):
        is_last = index == len(prompt) - 1
        reason = "length" if is_last and not answer else None
        logprob = -0.5 * index if index else None
        top = [ScriptedLikely(data, -0.5 * index)] if index else []
        script.append(ScriptedToken(text if is_last else "", reason, data, logprob, top, is_prompt=True))
    return [*script, *answer]


BEGUN = [
    # a text without the special token and the space with which its tokens begin
    ((b"<s>", b" It", b" is", b" \xe2", b"\x82\xac"), "It is €", [0, 0, 2, 5, 7]),
    # token ids, whose text has all of them
    ((b"<s>", b" It"), "<s> It", [0, 3]),
    # a text that is normalized: only its beginning is known
    ((b"it", b" was"), "IT WAS", [0, 2]),
]


@pytest.mark.parametrize(("prompt", "text", "offsets"), BEGUN)
def test_echoed_prompt_has_offsets_in_its_text_and_null_for_the_first(
    prompt: tuple[bytes, ...], text: str, offsets: list[int]
) -> None:
    client = ScriptedClient(script=_echo(*prompt, text=text))

    async def conversation(openai: AsyncOpenAI) -> None:
        answer = await openai.completions.create(model="tiny", prompt="x", echo=True, logprobs=1, max_tokens=0)
        [choice] = answer.choices
        assert (choice.text, choice.finish_reason) == (text, "length")
        found = choice.logprobs
        assert found is not None
        assert found.text_offset == offsets
        assert found.token_logprobs == [None, *(-0.5 * index for index in range(1, len(prompt)))]
        assert found.top_logprobs is not None
        assert found.top_logprobs[0] is None
        assert [*map(len, found.top_logprobs[1:])] == [1] * (len(prompt) - 1)
        assert len(found.tokens or ()) == len(prompt)
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 0)

    converse(client, conversation)
    [asked] = client.asked
    assert (asked.echo, asked.num_logprobs, asked.max_tokens) == (True, 1, 0)


def test_echoed_prompt_is_followed_by_all_drawn_tokens_also_the_end_and_those_of_a_stop_string() -> None:
    answer = (_token(b" no", " no"), _token(b" more", "", reason="stop"))
    client = ScriptedClient(script=_echo(b"say", b" it", text="say it", answer=answer))

    async def conversation(openai: AsyncOpenAI) -> None:
        whole = await openai.completions.create(model="tiny", prompt="x", echo=True, logprobs=1, max_tokens=9)
        found = whole.choices[0].logprobs
        assert whole.choices[0].text == "say it no"
        assert found is not None
        assert found.tokens == ["say", " it", " no", " more"]
        assert found.text_offset == [0, 3, 6, 9]
        assert found.token_logprobs == [None, -0.5, -0.5, -0.5]
        plain = await openai.completions.create(model="tiny", prompt="x", echo=True)
        assert (plain.choices[0].text, plain.choices[0].logprobs) == ("say it no", None)

    converse(client, conversation)
    assert [asked.max_tokens for asked in client.asked] == [9, 16]


def test_echoed_prompt_is_the_first_chunk_of_a_stream() -> None:
    client = ScriptedClient(script=_echo(b"say", b" it", text="say it", answer=(_token(b"!", "!", reason="length"),)))

    async def conversation(openai: AsyncOpenAI) -> None:
        stream = await openai.completions.create(
            model="tiny", prompt="x", echo=True, logprobs=1, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert [chunk.choices[0].text for chunk in chunks if chunk.choices] == ["say it", "!", ""]
        first, last = chunks[0].choices[0].logprobs, chunks[1].choices[0].logprobs
        assert first is not None
        assert last is not None
        assert (first.tokens, first.text_offset, first.token_logprobs) == (["say", " it"], [0, 3], [None, -0.5])
        assert (last.tokens, last.text_offset) == (["!"], [6])
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 1

    converse(client, conversation)
