"""The processes that compile grammars and say which tokens they allow next.

They run llguidance (MIT; Earley parser over derivatives of regular expressions). The first one only reads the model's
tokenizer, and forks one for each grammar, which shares that memory. A fork has limits of memory and, for each answer,
of time, at which it is killed: the interpreter would not notice anything while llguidance works. All end with the
connections that they serve.
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
"""Limit of a fork's address space, beside what the tokenizer takes. A usual schema takes some megabytes."""

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
CAUSES = {"NoExtensionBias": "no text can satisfy it, as where a $ref or a rule leads only to itself"}
"""Explanations of errors that llguidance reports by a bare name."""
GONE = EOFError, BrokenPipeError, ConnectionResetError


def main(fd: int, _memory_bytes: int) -> None:
    """Serve the connection `fd` until it ends.

    Its first message is a tokenizer.json. Each other one comes with a connection, which a fork serves from then on.
    """
    with suppress(*GONE), Connection(fd) as parent:
        try:
            tokenizer = GrammarTokenizer(parent.recv_bytes())
        except (ValueError, KeyError, TypeError) as error:
            parent.send_bytes(_line(str(error)).encode())
            return
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the forks are not waited for
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
    """Be the process of one grammar, until its connection ends."""
    try:
        _limit_memory()
        with suppress(*GONE), Connection(fd) as session:
            follower = GrammarFollower(tokenizer)
            while True:
                request = json.loads(session.recv_bytes())
                signal.setitimer(signal.ITIMER_REAL, request["within_s"])  # SIGALRM's default is to end the process
                answer = follower.answer(request)
                signal.setitimer(signal.ITIMER_REAL, 0)
                session.send_bytes(answer)
    finally:
        os._exit(0)


class GrammarTokenizer:
    """The model's, with a token for the end of a grammar."""

    def __init__(self, tokenizer_json: bytes) -> None:
        tokenizer = json.loads(tokenizer_json)
        self.end_id = _add_end(tokenizer)
        self.tokens = LLTokenizer(json.dumps(tokenizer), eos_token=self.end_id)


class GrammarFollower:
    """The state of one grammar, which comes with the first request."""

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = tokenizer
        self._matcher: LLMatcher

    def answer(self, request: dict[str, Any]) -> bytes:
        """Return a letter (`m`: the grammar may go on, `e`: or end; `x`: an error) and the mask, or the error's
        text."""
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
    first, *others = [line.strip() for line in error.splitlines() if line.strip()] or ["it cannot be used"]
    if first.startswith("panic"):
        first = "it is too ambiguous"
    elif " is not present in a registry" in first:
        first = f"{first.partition(' is not present')[0]} is not in the schema, and nothing is fetched"
    elif first.endswith(":") and others:  # a drawing of the place follows, and at last what is wrong there
        first = f"{first} {others[-1]}"
    return " ".join(CAUSES.get(first, first).split())[:MAX_ERROR_CHARS]


def _limit_memory() -> None:
    with suppress(OSError, ValueError):  # where there are no such limits, those of llguidance hold
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        with suppress(FileNotFoundError):
            held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + GRAMMAR_BYTES, held + GRAMMAR_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
