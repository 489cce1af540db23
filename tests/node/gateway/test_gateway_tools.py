"""Tool calls: found in a model's text, and enforced by a grammar."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import openai as api
import pytest
from hypothesis import given
from hypothesis import strategies as st
from node.gateway.scripted_client import ScriptedClient, ScriptedToken, converse
from openai import AsyncOpenAI
from pydantic import BaseModel
from support.text_models import byte_tokenizer
from support.work_count import num_lines
from swarm.serving.grammar.grammar_masks import GrammarForkServer, GrammarProcess
from swarm_node.gateway import http_limits
from swarm_node.gateway.choice import CLOSING, OPENING, ToolCall, ToolCallFinder, calls_grammar

HELLO = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = OPENING + '\n{"name": "weather", "arguments": {"city": "Paris"}}\n' + CLOSING


def _said(*texts: str) -> ScriptedClient:
    *most, last = texts
    return ScriptedClient(script=[*map(ScriptedToken, most), ScriptedToken(last, "stop")])


def test_call_becomes_openai_s_tool_call_with_its_finish_reason() -> None:
    client = _said("Let me see.\n", CALL[:5], CALL[5:30], CALL[30:])

    async def conversation(openai: AsyncOpenAI) -> None:
        answer = await openai.chat.completions.create(model="tiny", messages=HELLO, tools=[WEATHER])
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        assert choice.message.tool_calls is not None
        [call] = choice.message.tool_calls
        assert call.type == "function"
        assert call.id.startswith("call_")
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments) == {"city": "Paris"}

    converse(client, conversation)
    assert client.asked[0].prompt.tools == [WEATHER]


class Weather(BaseModel):
    city: str


def test_message_that_openais_client_parsed_is_accepted_as_it_is() -> None:
    client = _said(CALL)

    async def conversation(openai: AsyncOpenAI) -> None:
        tool = api.pydantic_function_tool(Weather, name="weather")
        parsed = await openai.chat.completions.parse(model="tiny", messages=HELLO, tools=[tool])
        called = parsed.choices[0].message
        assert called.tool_calls is not None
        assert called.tool_calls[0].function.parsed_arguments == Weather(city="Paris")
        result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "sunny"}
        await openai.chat.completions.create(model="tiny", messages=[*HELLO, called, result])
        answered = {"role": "assistant", "content": '{"city": "Paris"}', "parsed": {"city": "Paris"}}
        await openai.chat.completions.create(model="tiny", messages=[*HELLO, answered, *HELLO])

    converse(client, conversation)
    [_, call, _] = client.asked[1].prompt.messages
    assert call["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Paris"}}
    assert client.asked[2].prompt.messages[1] == {"role": "assistant", "content": '{"city": "Paris"}'}


def test_call_is_not_closed_by_a_closing_tag_in_an_argument() -> None:
    city = 'a "quoted" ' + CLOSING + " \\"
    call = OPENING + json.dumps({"name": "weather", "arguments": {"city": city}}) + CLOSING
    for texts in ([call, CALL], list(call + CALL)):
        finder = ToolCallFinder({"weather"})
        found = [part for text in texts for part in finder.push(text)] + finder.flush(is_cut=False)
        assert [json.loads(part.arguments)["city"] for part in found if isinstance(part, ToolCall)] == [city, "Paris"]
        assert len(found) == 2


def test_number_that_is_too_large_leaves_the_call_a_call() -> None:
    """The grammar of a forced call lets a model write such a number."""
    largest, numbers = sys.float_info.max, f"[6e+4358, -1e999, {'9' * 5000}, 2.5, 7]"
    [call] = ToolCallFinder({"weather"}).push(CALL.replace('"Paris"', numbers))
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments) == {"city": [largest, -largest, largest, 2.5, 7]}


def test_streamed_calls_are_numbered() -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        stream = await openai.chat.completions.create(model="tiny", messages=HELLO, tools=[WEATHER], stream=True)
        choices = [chunk.choices[0] async for chunk in stream]
        calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
        assert [call.index for call in calls] == [0, 1]
        assert len({call.id for call in calls}) == 2
        assert "".join(choice.delta.content or "" for choice in choices) == ""
        assert choices[-1].finish_reason == "tool_calls"

    converse(_said(CALL, "\n", CALL, "\n"), conversation)


@pytest.mark.parametrize(
    "text",
    [
        CALL.replace("weather", "rm"),
        CALL.replace("}}", "}"),
        CALL.replace('{"city": "Paris"}', '"Paris"'),
        CALL.removesuffix(CLOSING),
        OPENING + "[]" + CLOSING,
        OPENING + "[" * 100_000 + CLOSING,
        OPENING + '{"name": "weather", "arguments": {"city": NaN}}' + CLOSING,
    ],
)
def test_malformed_call_stays_text(text: str) -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        answer = await openai.chat.completions.create(model="tiny", messages=HELLO, tools=[WEATHER])
        assert answer.choices[0].message.content == text
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].finish_reason == "stop"

    converse(_said(text), conversation)


@pytest.mark.parametrize(
    ("texts", "shown", "num_calls"),
    [
        (["<tool_call"], "", 0),
        (["<"], "", 0),
        ([CALL, "\n<tool_c"], "", 1),
        ([CALL, "\n" + CALL[:30]], "", 1),
        (["Let me see.\n", CALL[:30]], "Let me see.", 0),
        (["Let me see.\n", "<too"], "Let me see.", 0),
        (["if a < b", " "], "if a < b ", 0),
    ],
)
def test_call_that_the_token_limit_cuts_is_not_returned(texts: list[str], shown: str, num_calls: int) -> None:
    *most, last = texts
    script = [*map(ScriptedToken, most), ScriptedToken(last, "length")]

    async def conversation(openai: AsyncOpenAI) -> None:
        answer = await openai.chat.completions.create(model="tiny", messages=HELLO, tools=[WEATHER])
        [choice] = answer.choices
        assert (choice.finish_reason, choice.message.content or "") == ("length", shown)
        assert len(choice.message.tool_calls or ()) == num_calls
        stream = await openai.chat.completions.create(model="tiny", messages=HELLO, tools=[WEATHER], stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        assert "".join(delta.content or "" for delta in deltas) == shown

    converse(ScriptedClient(script=script), conversation)


def test_call_stays_text_when_no_tools_were_offered() -> None:
    client = _said(CALL)

    async def conversation(openai: AsyncOpenAI) -> None:
        for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
            answer = await openai.chat.completions.create(model="tiny", messages=HELLO, **more)  # type: ignore[call-overload]
            assert answer.choices[0].message.content == CALL

    converse(client, conversation)
    assert [asked.prompt.tools for asked in client.asked] == [[], []]


def test_conversation_with_calls_and_their_results_reaches_the_template() -> None:
    client = ScriptedClient()
    called = {"name": "weather", "arguments": '{"city": "Paris"}'}

    async def conversation(openai: AsyncOpenAI) -> None:
        await openai.chat.completions.create(
            model="tiny",
            messages=[
                *HELLO,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c1", "type": "function", "function": called}],
                },
                {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
            ],
        )

    converse(client, conversation)
    assert client.asked[0].prompt.messages == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
            ],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        {"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": ""}}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "narrator", "content": "x"},
    ],
)
def test_incomplete_message_is_refused(message: dict[str, object]) -> None:
    async def conversation(openai: AsyncOpenAI) -> None:
        with pytest.raises(api.BadRequestError) as error:
            await openai.chat.completions.create(model="tiny", messages=[message])  # type: ignore[list-item]
        assert str(error.value.param).startswith("messages")

    converse(ScriptedClient(), conversation)


@given(
    st.lists(st.sampled_from([CALL, OPENING, CLOSING, "<tool", "a", " ", "\n", "<", "{}", '"', "\\"]), max_size=8),
    st.data(),
)
def test_finder_gives_the_same_calls_however_the_text_is_split(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert _found(pieces) == _found([text])


def _found(pieces: list[str]) -> list[str]:
    """Return the calls by their place, and the text between them."""
    finder = ToolCallFinder({"weather"})
    found = [part for piece in pieces for part in finder.push(piece)] + finder.flush(is_cut=False)
    joined = [""]
    for part in found:
        if isinstance(part, ToolCall):
            joined += [f"call {part.index} {part.arguments}", ""]
        else:
            joined[-1] += part
    return [part.strip() for part in joined]


def test_finder_gives_up_a_call_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "MAX_TOOL_CALL_CHARS", 100)
    finder = ToolCallFinder({"weather"})
    assert "".join(map(str, finder.push(OPENING + "x" * 200))) == OPENING + "x" * 200
    assert finder.push("on") == ["on"]


def test_finder_reads_each_part_of_a_held_call_once() -> None:
    """Otherwise each token of a long call would cost a gateway as much as the whole call."""
    finder = ToolCallFinder({"weather"})
    finder.push(OPENING + '{"name": "weather", "arguments": {"city": "')
    assert finder.push("x") == []
    few = num_lines(lambda: finder.push("x"))
    assert finder.push(CLOSING * 1000) == []
    assert num_lines(lambda: finder.push("x")) == few
    [call] = finder.push('"}}' + CLOSING)
    assert isinstance(call, ToolCall)
    assert call.arguments == f'{{"city": "xx{CLOSING * 1000}x"}}'


# in the form of pydantic's models
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"type": "string"}},
}
TOOLS = {"weather": CITY, "clock": {"type": "object"}}

ROME_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
UNFIT = ROME_CALL.replace("city", "town")
OTHER = ROME_CALL.replace("weather", "rm")


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarForkServer]:
    directory = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(directory)
    processes = GrammarForkServer(directory / "tokenizer.json")
    yield processes
    processes.close()


@pytest.mark.parametrize(
    ("how", "fit", "unfit"),
    [
        (
            {"may_talk": True, "may_repeat": True},
            [
                "",
                "2 < 3",
                "a <tool_cal",
                ROME_CALL,
                f"Let me see.\n{ROME_CALL}",
                f"{ROME_CALL}\n{CLOCK}\n{ROME_CALL}",
                f"{ROME_CALL}\nThat is it.",
            ],
            [UNFIT, f"So: {UNFIT}", f"{ROME_CALL}\n{UNFIT}", OTHER, "<tool_call>"],
        ),
        (
            {"may_talk": True, "may_repeat": False},
            ["", "hello", ROME_CALL, f"Let me see.\n{ROME_CALL}"],
            [f"So: {UNFIT}", f"{ROME_CALL}\n{CLOCK}", f"{ROME_CALL}\n"],
        ),
        (
            {"may_talk": False, "may_repeat": True},
            [ROME_CALL, f"{ROME_CALL}\n{CLOCK}"],
            ["", "hello", f"So: {ROME_CALL}", UNFIT],
        ),
        ({"may_talk": False, "may_repeat": False}, [ROME_CALL], ["", f"{ROME_CALL}\n{CLOCK}"]),
        (
            {"may_talk": True, "may_repeat": True, "answer": {"type": "integer"}},
            ["12", ROME_CALL, f"{ROME_CALL}\n{CLOCK}"],
            ["", "hello", f"12{ROME_CALL}", UNFIT],
        ),
    ],
    ids=lambda value: " ".join(f"{name}={on}" for name, on in value.items()) if isinstance(value, dict) else "",
)
def test_grammar_of_calls_allows_exactly_valid_calls(
    processes: GrammarForkServer, how: dict[str, Any], fit: list[str], unfit: list[str]
) -> None:
    found = {text: _is_allowed(processes, how, text) for text in (*fit, *unfit)}
    assert found == dict.fromkeys(fit, True) | dict.fromkeys(unfit, False)


def _is_allowed(processes: GrammarForkServer, how: dict[str, Any], text: str) -> bool:
    """Return whether the text can be written, and may end there."""
    process = GrammarProcess(processes, calls_grammar(TOOLS, **how))
    token_ids = list(byte_tokenizer()(text)["input_ids"])
    try:
        for index, token_id in enumerate(token_ids):
            if not process.mask(token_ids[:index]).allowed[token_id // 8] >> token_id % 8 & 1:
                return False
        return process.mask(token_ids).may_end
    finally:
        process.close()
