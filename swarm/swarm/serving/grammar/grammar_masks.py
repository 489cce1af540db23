"""The server's side of grammars: the tokens that each session's grammar allows next, computed off the event loop.

Each grammar has its own process, forked from one that holds the tokenizer (see `grammar_worker`), and a thread waits
for it. A grammar that takes too long or too much memory affects only its own session. The event loop, the passes over
the weights and other sessions do not wait for it.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from swarm_protocol import limits
from swarm_protocol.errors import ConfigError, PeerRefused
from swarm_protocol.sampler import Grammar

from swarm.child_process import ChildFailure, ChildProcess, limit_waits
from swarm.serving.peer_shares import Held, PeerShares, Sharer

START_S = 30.0
"""Time limit to read the tokenizer; one of 256k tokens takes two seconds."""

FORK_S = 5.0

ANSWER_S = 4.0
"""Time limit of an answer: a hundred times that of a large schema, for busy machines. A client waits ten seconds for a
session."""

TOKENS_PER_S = 20_000.0
"""Minimum speed at which a server that takes over a long answer reads its tokens again."""

GRACE_S = 1.0
"""Time after the process's own limit until its answer is given up."""

ENVIRONMENT = {"RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
TOKENIZER_BYTES = 4 * 2**30
"""Memory limit of the process that holds the tokenizer, which is a file of this server."""

MAX_ANSWER_BYTES = (1 + limits.MAX_DRAFTS) * limits.MAX_VOCAB // 8 + 2**16

MAX_GRAMMARS = 32
"""Maximum sessions with a grammar. Each has a process, and a thread while it waits. `PeerShares` shares them among
peers, as it does sessions."""


@dataclass(frozen=True, slots=True)
class TokenMask:
    """`allowed` has a bit for each token id, the lowest first: 1 if the grammar allows it next. `may_end`: the text may
    end here.

    `drafts` are tokens that may follow, one after the other, each with the mask of what is allowed after it.
    """

    allowed: bytes
    may_end: bool
    drafts: tuple[tuple[int, TokenMask], ...] = ()


class GrammarForkServer:
    """Forks processes from one that has read `tokenizer`, a tokenizer.json. Any thread may use it."""

    def __init__(self, tokenizer: Path) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._origin: ChildProcess | None = None

    def fork(self) -> Connection:
        """Return a connection to a new process, which ends with the connection. Raises ConfigError for an unusable
        tokenizer, and PeerRefused if no process can be started."""
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
        """End the process from which others are forked. The forks go on."""
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
    """Follows one grammar. Any thread may use it, one at a time."""

    def __init__(self, processes: GrammarForkServer, grammar: Grammar) -> None:
        self._processes = processes
        self._grammar = grammar
        self._lock = threading.Lock()
        self._pipe: Connection | None = None
        self._num_sent = 0
        self._has_ended = False

    def mask(self, tokens: Sequence[int], guess: Sequence[int] = (), most: int = 0) -> TokenMask:
        """Return the mask of what may follow `tokens`, which begin with those of the last call.

        Its drafts are up to `most` tokens: where the grammar allows only one token that one, else those of `guess`, as
        far as the grammar allows them.

        Raises ConfigError for a grammar that is unusable or takes too much, and PeerRefused without a process.
        Afterwards no mask is available.
        """
        with self._lock:
            try:
                return self._mask(tokens, guess, most)
            except BaseException:
                self._end()
                raise

    def close(self) -> None:
        """End the process. A second call does nothing."""
        with self._lock:
            self._end()

    def _mask(self, tokens: Sequence[int], guess: Sequence[int], most: int) -> TokenMask:
        if self._has_ended:
            raise PeerRefused("the session has ended", remedy="open it again", retry_after_s=1.0)
        new = list(tokens[self._num_sent :])
        within_s = ANSWER_S + len(new) / TOKENS_PER_S
        request: dict[str, object] = {"tokens": new, "guess": guess, "most": most, "within_s": within_s}
        if self._pipe is None:
            self._pipe = self._processes.fork()
            request |= {"kind": self._grammar.kind, "grammar": self._grammar.text}
        answer = _ask(self._pipe, json.dumps(request).encode(), within_s + GRACE_S)
        is_schema = self._grammar.kind == "json_schema"
        # the grammar of tools consists of JSON schemas, which a caller knows
        remedy = "use a simpler or another " + ("JSON schema" if is_schema else "grammar or JSON schema")
        if not answer:
            name = "JSON schema" if is_schema else "grammar"
            raise ConfigError(f"the {name} takes too much time or memory", remedy=remedy)
        head, _, masks = answer.partition(b"\n")
        stated = json.loads(head)
        if "error" in stated:
            what = "the JSON schema cannot be used" if is_schema else "the grammar cannot be used"
            raise ConfigError(f"{what}: {stated['error']}", remedy=remedy)
        self._num_sent += len(new)
        size = len(masks) // len(stated["may_end"])
        first, *following = (
            TokenMask(masks[size * index : size * (index + 1)], may_end)
            for index, may_end in enumerate(stated["may_end"])
        )
        return replace(first, drafts=tuple(zip(stated["drafts"], following, strict=True)))

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


def _too_many() -> PeerRefused:
    return PeerRefused(
        f"the server already has {MAX_GRAMMARS} sessions with grammars",
        remedy="ask again later, or another server",
        retry_after_s=1.0,
    )


class GrammarPool:
    """The grammars of one server's sessions, for the model with `tokenizer` (a tokenizer.json). `close` ends their
    processes."""

    def __init__(self, tokenizer: Path) -> None:
        self._processes = GrammarForkServer(tokenizer)
        self._threads = ThreadPoolExecutor(MAX_GRAMMARS, thread_name_prefix="swarm-grammars")
        self._open: dict[SessionGrammar, Held] = {}
        self._shares = PeerShares(self._open.values(), MAX_GRAMMARS, what="sessions with grammars", lacks_room=False)

    def check(self, sharer: Sharer) -> Held | None:
        """Check that a peer may have another grammar, and return the session to end for it, if one must end.

        Raises PeerRefused if there are too many, or it has its share.
        """
        now_s = asyncio.get_running_loop().time()
        self._shares.check(sharer, 0, now_s=now_s)
        if len(self._open) < MAX_GRAMMARS:
            return None
        for other in self._shares.evictable(sharer, 0, now_s=now_s):
            return other
        self._shares.wait(sharer, 0, num_more=1, now_s=now_s)
        raise _too_many()

    def open(self, grammar: Grammar, sequence: Held) -> SessionGrammar:
        """Return the grammar of the session of `sequence`; the caller must close it. This ends the session that `check`
        returns.

        Raises PeerRefused like `check`, and if a mask of the ended session is still under way.
        """
        if (other := self.check(sequence.sharer)) is not None:
            other.evict(lacks_room=False)
            if len(self._open) >= MAX_GRAMMARS:
                raise _too_many()
        state = SessionGrammar(GrammarProcess(self._processes, grammar), self._threads, self._open)
        self._open[state] = sequence
        self._shares.admitted(sequence.sharer, 0, now_s=asyncio.get_running_loop().time())
        return state

    def close(self) -> None:
        """End all grammars. Do not ask for masks afterwards."""
        for state in list(self._open):
            state.close()
        self._threads.submit(self._processes.close)
        self._threads.shutdown(wait=False)


class SessionGrammar:
    """The grammar of one session. `among` are all open ones of the pool."""

    def __init__(
        self,
        process: GrammarProcess,
        threads: ThreadPoolExecutor,
        among: dict[SessionGrammar, Held],
    ) -> None:
        self._process = process
        self._threads = threads
        self._among = among
        self._last: asyncio.Future[TokenMask] | None = None

    def mask(self, tokens: Sequence[int], guess: Sequence[int] = (), most: int = 0) -> asyncio.Future[TokenMask]:
        """Compute what may follow `tokens`, which begin with those of the last call and must not change until the
        result is there. Its drafts are as `GrammarProcess.mask` says.

        Raises ConfigError for a grammar that is unusable or takes too much, and PeerRefused without a process.
        """
        self._last = asyncio.get_running_loop().run_in_executor(self._threads, self._process.mask, tokens, guess, most)
        return self._last

    def close(self) -> None:
        """End the process and free its place once the last mask is done. A second call does nothing."""
        if self._last is None or self._last.done():
            self._end()
        else:
            self._last.add_done_callback(lambda _: self._end())

    def _end(self) -> None:
        self._among.pop(self, None)
        self._process.close()
