"""The server's side of grammars: which tokens each session's grammar allows next, computed off the event loop.

Each grammar is compiled and followed by a process of its own, forked from one that holds the tokenizer (see
`grammar_worker`), and a thread waits for it. A grammar that takes too long or too much memory costs its own session
only; the event loop, the passes over the weights and other sessions do not wait for it.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from swarm_protocol.errors import ConfigError, PeerRefused
from swarm_protocol.sampler import Grammar

from swarm.child_process import ChildFailure, ChildProcess, limit_waits
from swarm.serving.peer_shares import PeerShares

START_S = 30.0
"""A tokenizer of 256k tokens takes two seconds to read."""

FORK_S = 5.0

ANSWER_S = 4.0
"""A hundred times what a large schema takes: for a busy machine. A client waits ten seconds for a session."""

TOKENS_PER_S = 20_000.0
"""The slowest that tokens of a long answer are read again, by a server that takes it over."""

GRACE_S = 1.0
"""Time after the process has ended itself at its limit, until its answer is given up."""

ENVIRONMENT = {"RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
TOKENIZER_BYTES = 4 * 2**30
"""Memory limit of the process that holds the tokenizer, which is the server's own file."""

MAX_ANSWER_BYTES = 2**20

MAX_GRAMMARS = 32
"""Sessions with one at a time: each has a process, and a thread while it waits for it. Peers share them as they share
the sessions, see `PeerShares`."""


@dataclass(frozen=True, slots=True)
class TokenMask:
    """A bit for each token id that the grammar allows next, the lowest first; `may_end`: it is fulfilled."""

    allowed: bytes
    may_end: bool


class GrammarForkServer:
    """Forks processes from one that has read `tokenizer`, a tokenizer.json. Used by any thread."""

    def __init__(self, tokenizer: Path) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._origin: ChildProcess | None = None

    def fork(self) -> Connection:
        """Return a connection to a new process, which ends with it. Raises ConfigError for a tokenizer that cannot be
        used, and PeerRefused where no process could be had."""
        with self._lock:
            if self._origin is None:
                self._origin = self._start()
            ours, theirs = Pipe()
            with theirs:
                try:
                    self._origin.ask(b"", fd=theirs.fileno(), within_s=FORK_S, max_bytes=MAX_ANSWER_BYTES)
                except ChildFailure as failure:
                    ours.close()
                    self._origin = None
                    raise _no_process(failure) from None
            return ours

    def close(self) -> None:
        """End the process that others are forked from; these go on."""
        with self._lock:
            if self._origin is not None:
                self._origin.kill()
                self._origin = None

    def _start(self) -> ChildProcess:
        try:
            tokenizer = self._tokenizer.read_bytes()
        except OSError:
            raise ConfigError(
                "the model has no tokenizer.json, which grammars need", remedy="ask without a grammar"
            ) from None
        origin = ChildProcess(
            "swarm.serving.grammar.grammar_worker",
            environment=ENVIRONMENT,
            memory_bytes=TOKENIZER_BYTES,
            without=["torch"],
        )
        try:
            answer = origin.ask(tokenizer, within_s=START_S, max_bytes=MAX_ANSWER_BYTES)
        except ChildFailure as failure:
            raise _no_process(failure) from None
        if answer != b"ready":
            origin.kill()
            why = answer.decode(errors="replace")
            raise ConfigError(f"this server cannot use grammars: {why}", remedy="ask without a grammar")
        return origin


class GrammarProcess:
    """Follows one grammar. Used by any thread, and by one at a time."""

    def __init__(self, processes: GrammarForkServer, grammar: Grammar) -> None:
        self._processes = processes
        self._grammar = grammar
        self._lock = threading.Lock()
        self._pipe: Connection | None = None
        self._num_sent = 0
        self._has_ended = False

    def mask(self, tokens: Sequence[int]) -> TokenMask:
        """Return the mask of what may follow `tokens`, which continue those of the last call.

        Raises ConfigError for a grammar that cannot be used, or takes too much, and PeerRefused without a process.
        After any of these, nothing can be asked.
        """
        with self._lock:
            try:
                return self._mask(tokens)
            except BaseException:
                self._end()
                raise

    def close(self) -> None:
        """Let its process end. A second call does nothing."""
        with self._lock:
            self._end()

    def _mask(self, tokens: Sequence[int]) -> TokenMask:
        if self._has_ended:
            raise PeerRefused("the session has ended", remedy="open it again", retry_after_s=1.0)
        new = list(tokens[self._num_sent :])
        within_s = ANSWER_S + len(new) / TOKENS_PER_S
        request: dict[str, object] = {"tokens": new, "within_s": within_s}
        if self._pipe is None:
            self._pipe = self._processes.fork()
            request |= {"kind": self._grammar.kind, "grammar": self._grammar.text}
        answer = _ask(self._pipe, json.dumps(request).encode(), within_s + GRACE_S)
        name = "JSON schema" if self._grammar.kind == "json_schema" else "grammar"
        if not answer:
            raise ConfigError(f"the {name} takes too much time or memory", remedy=f"use a simpler {name}")
        if answer[:1] == b"x":
            what = "the JSON schema cannot be used" if name == "JSON schema" else "the grammar cannot be used"
            why = answer[1:].decode(errors="replace")
            raise ConfigError(f"{what}: {why}", remedy=f"use a simpler or another {name}")
        self._num_sent += len(new)
        return TokenMask(answer[1:], may_end=answer[:1] == b"e")

    def _end(self) -> None:
        self._has_ended = True
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None


def _ask(pipe: Connection, message: bytes, within_s: float) -> bytes:
    """Return the answer; empty if the process is late or has died."""
    with suppress(EOFError, OSError):
        limit_waits(pipe, within_s)
        pipe.send_bytes(message)
        if pipe.poll(within_s):
            return pipe.recv_bytes(MAX_ANSWER_BYTES)
    return b""


def _no_process(failure: ChildFailure) -> PeerRefused:
    return PeerRefused(
        f"the server's process for grammars {failure}", remedy="ask again later, or another server", retry_after_s=1.0
    )


class GrammarPool:
    """The grammars of one server's sessions, for the model with this `tokenizer` (a tokenizer.json). `close` ends their
    processes."""

    def __init__(self, tokenizer: Path) -> None:
        self._processes = GrammarForkServer(tokenizer)
        self._threads = ThreadPoolExecutor(MAX_GRAMMARS, thread_name_prefix="swarm-grammars")
        self._open: set[SessionGrammar] = set()
        self._shares = PeerShares(MAX_GRAMMARS, MAX_GRAMMARS)

    def open(self, grammar: Grammar, client: str) -> SessionGrammar:
        """Return a state of the grammar for a session of `client`, to be closed. Raises PeerRefused where there are too
        many, and for a client that has its share of them."""
        now_s = asyncio.get_running_loop().time()
        self._shares.check(client, 1, self._open, now_s=now_s)
        if len(self._open) >= MAX_GRAMMARS:
            self._shares.wait(client, self._open, now_s=now_s)
            raise PeerRefused(
                f"the server follows {MAX_GRAMMARS} grammars at once",
                remedy="ask again later, or another server",
                retry_after_s=1.0,
            )
        state = SessionGrammar(GrammarProcess(self._processes, grammar), self._threads, self._open, client)
        self._open.add(state)
        return state

    def close(self) -> None:
        """End all grammars; no mask may be asked for after this."""
        for state in list(self._open):
            state.close()
        self._threads.submit(self._processes.close)
        self._threads.shutdown(wait=False)


class SessionGrammar:
    """The grammar of one session of `client`. `among` are those that have a place."""

    num_pages = 1

    def __init__(
        self, process: GrammarProcess, threads: ThreadPoolExecutor, among: set[SessionGrammar], client: str
    ) -> None:
        self.client = client
        self._process = process
        self._threads = threads
        self._among = among
        self._last: asyncio.Future[TokenMask] | None = None

    def mask(self, tokens: Sequence[int]) -> asyncio.Future[TokenMask]:
        """Compute what may follow `tokens`, which continue those of the last call, and must not change until it is
        done.

        Raises ConfigError for a grammar that cannot be used, or takes too much, and PeerRefused without a process.
        """
        self._last = asyncio.get_running_loop().run_in_executor(self._threads, self._process.mask, tokens)
        return self._last

    def close(self) -> None:
        """Ask for no more masks; a second call does nothing. Its process ends, and its place is free, once the last
        mask is done."""
        if self._last is None or self._last.done():
            self._end()
        else:
            self._last.add_done_callback(lambda _: self._end())

    def _end(self) -> None:
        self._among.discard(self)
        self._process.close()
