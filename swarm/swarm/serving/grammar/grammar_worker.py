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
import time
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

DRAFT_S = 0.005
"""Time after which no further draft is made, since the server waits for them. One takes less than 0.1 ms for a usual
schema."""

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
        self._grammar = ""
        self._tokens: list[int] = []
        self._matcher: LLMatcher
        self._may_draft = True
        self._has_drafted = False

    def answer(self, request: dict[str, Any]) -> bytes:
        """Return a line and the masks after the tokens and after each draft, all of one length. The line is JSON, with
        the drafts and where the text may end, or with an error."""
        if "grammar" in request:
            try:
                self._grammar = _compiled(request["kind"], request["grammar"])
            except ValueError as error:
                return _failed(str(error))
            self._matcher = self._new_matcher()
        self._tokens += request["tokens"]
        masks = self._follow(request["tokens"])
        drafts = self._draft(masks, request["guess"], request["most"]) if masks and self._may_draft else []
        if self._matcher.is_error() and self._has_drafted:
            # perhaps only because of drafts, which count towards the matcher's limits, and no error can be rolled back
            self._may_draft = self._has_drafted = False
            self._matcher = self._new_matcher()
            masks, drafts = self._follow(self._tokens), []
        if self._matcher.is_error():
            return _failed(self._matcher.get_error())
        stated = {"drafts": drafts, "may_end": [may_end for _, may_end in masks]}
        return b"\n".join([json.dumps(stated).encode(), b"".join(mask for mask, _ in masks)])

    def _new_matcher(self) -> LLMatcher:
        return LLMatcher(self._tokenizer.tokens, self._grammar, log_level=0, limits=LIMITS)

    def _follow(self, tokens: list[int]) -> list[tuple[bytes, bool]]:
        """Return the mask after further tokens, and whether the text may end there; nothing after an error."""
        if tokens and not self._matcher.is_error():
            self._matcher.consume_tokens(tokens)
        mask = b"" if self._matcher.is_error() else self._matcher.compute_bitmask()
        if self._matcher.is_error():
            return []
        end_byte, end_bit = divmod(self._tokenizer.end_id, 8)
        bits = bytearray(mask)
        bits[end_byte] &= ~(1 << end_bit) & 0xFF
        return [(bytes(bits), bool(mask[end_byte] >> end_bit & 1))]

    def _draft(self, masks: list[tuple[bytes, bool]], guess: list[int], most: int) -> list[int]:
        """Return up to `most` drafts, and append to `masks` the one after each: of the only token that the grammar
        allows, else the next of `guess` that it allows."""
        drafts = list[int]()
        until_s = time.monotonic() + DRAFT_S
        while len(drafts) < most and time.monotonic() < until_s:
            mask, may_end = masks[-1]
            token_id = None if may_end else _only(mask)
            if token_id is None and guess and _is_allowed(guess[0], mask):
                token_id = guess[0]
            if token_id is None or not (following := self._follow([token_id])):
                break
            guess = guess[1:] if guess[:1] == [token_id] else []
            drafts.append(token_id)
            masks += following
        self._has_drafted = self._has_drafted or bool(drafts) or self._matcher.is_error()
        self._matcher.rollback(len(drafts))
        return drafts


def _only(mask: bytes) -> int | None:
    """Return the token whose bit is the only one of the mask."""
    bits = int.from_bytes(mask, "little")
    return bits.bit_length() - 1 if bits.bit_count() == 1 else None


def _is_allowed(token_id: int, mask: bytes) -> bool:
    byte, bit = divmod(token_id, 8)
    return byte < len(mask) and bool(mask[byte] >> bit & 1)


def _failed(error: str) -> bytes:
    return json.dumps({"error": _line(error)}).encode()


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
