"""The grammar of answers that have to call tools, or whose calls have to fit: llguidance's Lark with JSON schemas.

Calls are written as `tool_calls` finds them, which is what templates of Hermes and Qwen teach. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarm_protocol.errors import ConfigError
from swarm_protocol.sampler import Grammar

from swarm_node.gateway.tool_calls import CLOSING, OPENING

Schema = Mapping[str, Any]

OPENED = json.dumps(OPENING)
STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Of JSON as most models write it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableTool:
    """`arguments` is the JSON schema of what it is called with."""

    name: str
    arguments: Schema


def calls_grammar(
    tools: Sequence[CallableTool], *, may_talk: bool, may_repeat: bool, answer: Schema | None = None
) -> Grammar:
    """Answers that call one of `tools`, or with `may_repeat` several.

    With `may_talk` there may be text before and between calls, or none of these; with `answer` instead a JSON text of
    that schema. After a call that is the only one the answer ends. Raises ConfigError if the schemas are too large.
    """
    if answer is None and may_talk:
        start = "(opened call)* TEXT" if may_repeat else "TEXT | opened call"
        # lazy: text ends where a call begins, and not where it could no longer go on
        rules = [
            f"start: {start}",
            f"opened[lazy]: /(?s:.*)/ {OPENED}",
            f"TEXT: /(?s:.*)/ & ~/(?s:.*{OPENING}.*)/",
        ]
    else:
        calls = f"{OPENED} call" + (f' ("\\n" {OPENED} call)*' if may_repeat else "")
        rules = [f"start: {calls}{' | answer' if may_talk else ''}"]
    if answer is not None:
        rules.append(f"answer: %json {_styled(answer)}")
    rules.append(f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}")
    for index, tool in enumerate(tools):
        head = json.dumps(f'\n{{"name": {json.dumps(tool.name)}, "arguments": ')
        rules.append(f"call_{index}: {head} arguments_{index} {json.dumps('}' + chr(10) + CLOSING)}")
        rules.append(f"arguments_{index}: %json {_styled(tool.arguments)}")
    try:
        return Grammar(kind="lark", text="\n".join(rules))
    except ValueError as error:
        raise ConfigError(f"the tools cannot be kept to: {error}", remedy="offer fewer tools") from None


def _styled(schema: Schema) -> str:
    try:
        return json.dumps({**schema, "x-guidance": STYLE})
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"a JSON schema cannot be used: {error}", remedy="use another one") from None
