"""Probabilities of tokens as OpenAI's two endpoints write them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from swarm_node.gateway import http_limits
from swarm_node.gateway.choice import Entry, as_text

Json = dict[str, Any]


def of_chat(entries: Sequence[Entry]) -> Json:
    """`bytes` are exact, also where the text of a token, being a part of a character, is U+FFFD."""
    return {
        "content": [
            {
                **_one(entry.token.data, entry.token.logprob),
                "top_logprobs": [_one(likely.data, likely.logprob) for likely in entry.token.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def of_completion(entries: Sequence[Entry]) -> Json:
    """`text_offset` counts characters from the beginning of the choice's own text.

    `top_logprobs` has the token that came as well, as OpenAI's has; of equal texts the likeliest.
    """
    return {
        "text_offset": [entry.offset for entry in entries],
        "token_logprobs": [_finite(entry.token.logprob) for entry in entries],
        "tokens": [entry.text for entry in entries],
        "top_logprobs": [_top(entry) for entry in entries],
    }


def _top(entry: Entry) -> dict[str, float]:
    top: dict[str, float] = {}
    for likely in entry.token.top:
        top.setdefault(as_text(likely.data), _finite(likely.logprob))
    top.setdefault(entry.text, _finite(entry.token.logprob))
    return top


def _one(data: bytes, logprob: float | None) -> Json:
    return {"token": as_text(data), "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float | None) -> float:
    assert logprob is not None
    return max(logprob, http_limits.LEAST_LOGPROB) if math.isfinite(logprob) else http_limits.LEAST_LOGPROB
