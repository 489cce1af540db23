"""What a model can write where calls have to come, or to fit: by llguidance itself, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.text_models import byte_tokenizer
from swarm.serving.grammar.grammar_masks import GrammarForkServer, GrammarProcess
from swarm_node.gateway.tools import CallableTool, calls_grammar

# as pydantic's models say it
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"type": "string"}},
}
TOOLS = [CallableTool(name="weather", arguments=CITY), CallableTool(name="clock", arguments={"type": "object"})]

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
UNFIT = CALL.replace("city", "town")
OTHER = CALL.replace("weather", "rm")


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
                CALL,
                f"Let me see.\n{CALL}",
                f"{CALL}\n{CLOCK}\n{CALL}",
                f"{CALL}\nThat is it.",
            ],
            [UNFIT, f"So: {UNFIT}", f"{CALL}\n{UNFIT}", OTHER, "<tool_call>"],
        ),
        (
            {"may_talk": True, "may_repeat": False},
            ["", "hello", CALL, f"Let me see.\n{CALL}"],
            [f"So: {UNFIT}", f"{CALL}\n{CLOCK}", f"{CALL}\n"],
        ),
        ({"may_talk": False, "may_repeat": True}, [CALL, f"{CALL}\n{CLOCK}"], ["", "hello", f"So: {CALL}", UNFIT]),
        ({"may_talk": False, "may_repeat": False}, [CALL], ["", f"{CALL}\n{CLOCK}"]),
        (
            {"may_talk": True, "may_repeat": True, "answer": {"type": "integer"}},
            ["12", CALL, f"{CALL}\n{CLOCK}"],
            ["", "hello", f"12{CALL}", UNFIT],
        ),
    ],
    ids=lambda value: " ".join(f"{name}={on}" for name, on in value.items()) if isinstance(value, dict) else "",
)
def test_grammar_of_calls_allows_what_fits_and_nothing_else(
    processes: GrammarForkServer, how: dict[str, Any], fit: list[str], unfit: list[str]
) -> None:
    found = {text: _is_allowed(processes, how, text) for text in (*fit, *unfit)}
    assert found == dict.fromkeys(fit, True) | dict.fromkeys(unfit, False)


def _is_allowed(processes: GrammarForkServer, how: dict[str, Any], text: str) -> bool:
    """Whether it can be written, and may end there."""
    process = GrammarProcess(processes, calls_grammar(TOOLS, **how))
    token_ids = list(byte_tokenizer()(text)["input_ids"])
    try:
        for index, token_id in enumerate(token_ids):
            if not process.mask(token_ids[:index]).allowed[token_id // 8] >> token_id % 8 & 1:
                return False
        return process.mask(token_ids).may_end
    finally:
        process.close()
