"""The process that compiles grammars and says which tokens they allow next.

It runs llguidance (MIT; Earley parser over derivatives of regular expressions), with the model's tokenizer, in limited
memory. Each request names a grammar by a key and brings the tokens drawn since the last one; a grammar that is new here
comes with all of them. Requests are answered one after another; who is too slow is killed by `process`, which loses
nothing but time, for all state follows from grammars and tokens. It ends when its parent is gone.
"""

from __future__ import annotations

import json
import resource
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

GRAMMAR_BYTES = 2**30
"""Of address space, beside what the tokenizer takes. A usual schema takes some megabytes."""

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # 20 ms
    step_lexer_fuel=200_000,  # 15 ms
    step_max_items=50_000,  # 3 ms
    max_lexer_states=20_000,  # 40 MB
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""The largest of what one grammar may take, which the comments say in time and memory. JSON schemas of a hundred
properties stay a hundred times below."""

END = "<|end of the grammar|>"
MAX_ERROR_CHARS = 300


def main(fd: int) -> None:
    """Serve the connection `fd` until it ends. Its first message is a tokenizer.json."""
    with suppress(EOFError, BrokenPipeError, ConnectionResetError), Connection(fd) as parent:
        try:
            matchers = Matchers(parent.recv_bytes())
        except (ValueError, KeyError, TypeError) as error:
            parent.send_bytes(b"x" + _line(str(error)).encode())
            return
        _limit_memory()
        parent.send_bytes(b"ready")
        while True:
            parent.send_bytes(matchers.answer(json.loads(parent.recv_bytes())))


class Matchers:
    """The state of each grammar by its key."""

    def __init__(self, tokenizer_json: bytes) -> None:
        tokenizer = json.loads(tokenizer_json)
        self._end_id = _add_end(tokenizer)
        self._tokenizer = LLTokenizer(json.dumps(tokenizer), eos_token=self._end_id)
        self._matchers: dict[int, LLMatcher] = {}

    def answer(self, request: dict[str, Any]) -> bytes:
        """A letter (`m`: the grammar may go on, `e`: or end; `x`: an error) and the mask, or the error's text."""
        for key in request["drop"]:
            self._matchers.pop(key, None)
        key = request["key"]
        if "grammar" in request:
            try:
                grammar = _compiled(request["kind"], request["grammar"])
            except ValueError as error:
                return b"x" + _line(str(error)).encode()
            self._matchers[key] = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        matcher = self._matchers[key]
        if request["tokens"] and not matcher.is_error():
            matcher.consume_tokens(request["tokens"])
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            return b"x" + _line(matcher.get_error()).encode()
        end_byte, end_bit = divmod(self._end_id, 8)
        may_end = mask[end_byte] >> end_bit & 1
        bits = bytearray(mask)
        bits[end_byte] &= ~(1 << end_bit) & 0xFF
        return (b"e" if may_end else b"m") + bits


def _compiled(kind: str, text: str) -> str:
    if kind == "json_schema":
        # as most models write it; free white space lets a model write nothing else until its tokens are used up
        return LLMatcher.grammar_from_json_schema(
            text, overrides={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        )
    return LLMatcher.grammar_from_lark(text)


def _add_end(tokenizer: dict[str, Any]) -> int:
    """Add a token that stands for the end of a grammar, so that no real one has a double meaning: it gets a free id."""
    model, added = tokenizer["model"]["vocab"], tokenizer.setdefault("added_tokens", [])
    ids = range(len(model)) if isinstance(model, list) else model.values()
    end_id = max([*ids, *(token["id"] for token in added)], default=-1) + 1
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added.append({"id": end_id, "content": END, "special": True, **flags})
    return end_id


def _line(error: str) -> str:
    first = next((line for line in error.splitlines() if line.strip()), "it cannot be used")
    if first.startswith("panic"):
        first = "it is too ambiguous"
    return " ".join(first.split())[:MAX_ERROR_CHARS]


def _limit_memory() -> None:
    with suppress(OSError, ValueError):  # where there are no such limits, those of llguidance hold
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        with suppress(FileNotFoundError):
            held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + GRAMMAR_BYTES, held + GRAMMAR_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
