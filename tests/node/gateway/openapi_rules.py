"""Rules between fields that an OpenAPI description cannot express, loaded by schemathesis.

A request that breaks one is refused, as `test_gateway_fields.py` shows, and must not count as a finding.
"""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.hook
def filter_case(_context: Any, case: Any) -> bool:
    body = case.body
    return not isinstance(body, dict) or _are_consistent(body)


def _are_consistent(body: dict[str, Any]) -> bool:
    text = body.get("text")
    response_format = text.get("format") if isinstance(text, dict) else body.get("response_format")
    is_formed = isinstance(response_format, dict) and response_format.get("type") != "text"
    calls = body.get("tool_choice") not in (None, "none", "auto")
    seed = body.get("seed")
    items = body.get("input")
    said = [each for each in (*_listed(items), *_listed(body.get("messages"))) if isinstance(each, dict)]
    prompts, n = body.get("prompt"), body.get("n")
    return not (
        (body.get("top_logprobs") and not body.get("logprobs"))
        or (body.get("stream_options") is not None and not body.get("stream"))
        or calls
        or (isinstance(seed, int) and abs(seed) >= 2**62)  # schemathesis compares it with the bound as a float
        or (body.get("tools") and (body.get("stop") or is_formed or body.get("min_tokens") or body.get("ignore_eos")))
        or (is_formed and (body.get("min_tokens") or body.get("ignore_eos")))
        or (body.get("max_tokens") == 0 and not body.get("echo"))
        or (body.get("max_completion_tokens") and body.get("max_tokens") not in (None, body["max_completion_tokens"]))
        or (isinstance(items, list) and len(items) > 1000)  # of a chat's messages there are fewer than of items
        or (
            isinstance(items, list)
            and all(isinstance(item, dict) and item.get("type") == "reasoning" for item in items)
        )
        # the id of a drawn result is never that of a drawn call
        or any(each.get("role") == "tool" or each.get("type") == "function_call_output" for each in said)
        or (isinstance(prompts, list) and len(prompts) > 1 and n not in (None, 1))
    )


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
