"""The processes that compile grammars and say which tokens they allow next.

They run llguidance (MIT; Earley parser over derivatives of regular expressions). The first process only reads the
model's tokenizer, and forks one for each grammar, which shares that memory. A fork is killed at its memory limit, or at
the time limit of an answer, since the interpreter cannot react while llguidance works. All processes end with their
connections.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

GRAMMAR_BYTES = 2**27
"""Limit of a fork's address space, in addition to the tokenizer's. A usual schema takes some megabytes."""

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # 20 ms
    step_lexer_fuel=200_000,  # 15 ms
    step_max_items=50_000,  # 3 ms
    max_lexer_states=20_000,  # 40 MB
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""Limits of one grammar; the comments give the resulting time and memory. JSON schemas of a hundred properties stay a
hundred times below."""

END = "<|end of the grammar|>"
MAX_ERROR_CHARS = 300
CAUSES = {"NoExtensionBias": "no text can satisfy it, as where a $ref or a rule leads only to itself"}
"""Explanations of errors that llguidance reports only by name."""
GONE = EOFError, BrokenPipeError, ConnectionResetError


def main(fd: int, _memory_bytes: int) -> None:
    """Serve the connection `fd` until it ends.

    The first message is a tokenizer.json. Each later one comes with a connection, which a fork then serves.
    """
    with suppress(*GONE), Connection(fd) as parent:
        try:
            tokenizer = GrammarTokenizer(parent.recv_bytes())
        except (ValueError, KeyError, TypeError) as error:
            parent.send_bytes(_line(str(error)).encode())
            return
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
        parent.send_bytes(b"ready")
        while True:
            parent.recv_bytes()
            given = recv_handle(parent)
            if os.fork() == 0:
                parent.close()
                _follow(tokenizer, given)
            os.close(given)
            parent.send_bytes(b"forked")


def _follow(tokenizer: GrammarTokenizer, fd: int) -> None:
    """Run the process of one grammar, until its connection ends."""
    try:
        _limit_memory()
        with suppress(*GONE), Connection(fd) as session:
            follower = GrammarFollower(tokenizer)
            while True:
                request = json.loads(session.recv_bytes())
                signal.setitimer(signal.ITIMER_REAL, request["within_s"])  # by default, SIGALRM ends the process
                answer = follower.answer(request)
                signal.setitimer(signal.ITIMER_REAL, 0)
                session.send_bytes(answer)
    finally:
        os._exit(0)


class GrammarTokenizer:
    """The model's tokenizer with an additional token for the end of a grammar."""

    def __init__(self, tokenizer_json: bytes) -> None:
        tokenizer = json.loads(tokenizer_json)
        self.end_id = _add_end(tokenizer)
        self.tokens = LLTokenizer(json.dumps(tokenizer), eos_token=self.end_id)


class GrammarFollower:
    """The state of one grammar. The first request brings the grammar."""

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = tokenizer
        self._matcher: LLMatcher

    def answer(self, request: dict[str, Any]) -> bytes:
        """Return a letter and the mask, or the error's text. `m`: the text must go on; `e`: it may end; `x`: an
        error."""
        if "grammar" in request:
            try:
                grammar = _compiled(request["kind"], request["grammar"])
            except ValueError as error:
                return b"x" + _line(str(error)).encode()
            self._matcher = LLMatcher(self._tokenizer.tokens, grammar, log_level=0, limits=LIMITS)
        matcher = self._matcher
        if request["tokens"] and not matcher.is_error():
            matcher.consume_tokens(request["tokens"])
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            return b"x" + _line(matcher.get_error()).encode()
        end_byte, end_bit = divmod(self._tokenizer.end_id, 8)
        may_end = mask[end_byte] >> end_bit & 1
        bits = bytearray(mask)
        bits[end_byte] &= ~(1 << end_bit) & 0xFF
        return (b"e" if may_end else b"m") + bits


def _compiled(kind: str, text: str) -> str:
    if kind == "json_schema":
        # white space as most models write it; if it were free, a model could write nothing else until its limit
        return LLMatcher.grammar_from_json_schema(
            text, overrides={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        )
    return LLMatcher.grammar_from_lark(text)


def _add_end(tokenizer: dict[str, Any]) -> int:
    """Add a token with a free id for the end of a grammar, so that no real token has two meanings."""
    model, added = tokenizer["model"]["vocab"], tokenizer.setdefault("added_tokens", [])
    ids = range(len(model)) if isinstance(model, list) else model.values()
    end_id = max([*ids, *(token["id"] for token in added)], default=-1) + 1
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added.append({"id": end_id, "content": END, "special": True, **flags})
    return end_id


def _line(error: str) -> str:
    first, *others = [line.strip() for line in error.splitlines() if line.strip()] or ["it cannot be used"]
    if first.startswith("panic"):
        first = "it is too ambiguous"
    elif " is not present in a registry" in first:
        first = f"{first.partition(' is not present')[0]} is not in the schema, and nothing is fetched"
    elif first.endswith(":") and others:  # an excerpt of the place follows, and then the reason
        first = f"{first} {others[-1]}"
    return " ".join(CAUSES.get(first, first).split())[:MAX_ERROR_CHARS]


def _limit_memory() -> None:
    with suppress(OSError, ValueError):  # without these limits, llguidance's own still hold
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        with suppress(FileNotFoundError):
            held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + GRAMMAR_BYTES, held + GRAMMAR_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
