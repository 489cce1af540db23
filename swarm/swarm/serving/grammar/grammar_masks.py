"""Grammars of a server's sessions: which tokens each allows next, worked out off the loop and apart from the model.

Each is compiled and followed by a process of its own, which a thread waits for, so that neither the loop nor the passes
over the weights nor another session wait for a grammar. Used in the server's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from swarm_protocol.errors import PeerRefused
from swarm_protocol.sampler import Grammar

from swarm.serving.grammar.grammar_process import GrammarProcess, GrammarProcesses, Mask

MAX_GRAMMARS = 32
"""Sessions with one at a time: each has a process, and a thread while it waits for it."""


class Grammars:
    """Of one server, for the model whose `tokenizer` (a tokenizer.json) it has. `close` ends the processes."""

    def __init__(self, tokenizer: Path) -> None:
        self._processes = GrammarProcesses(tokenizer)
        self._threads = ThreadPoolExecutor(MAX_GRAMMARS, thread_name_prefix="swarm-grammars")
        self._open: set[GrammarState] = set()

    def open(self, grammar: Grammar) -> GrammarState:
        """A state of it, to be closed. Raises PeerRefused where there are too many."""
        if len(self._open) >= MAX_GRAMMARS:
            raise PeerRefused(
                f"the server follows {MAX_GRAMMARS} grammars at once",
                remedy="ask again later, or another server",
                retry_after_s=1.0,
            )
        state = GrammarState(GrammarProcess(self._processes, grammar), self._threads, self._open)
        self._open.add(state)
        return state

    def close(self) -> None:
        """Nothing may be asked after this."""
        for state in list(self._open):
            state.close()
        self._threads.submit(self._processes.close)
        self._threads.shutdown(wait=False)


class GrammarState:
    """One session's grammar. `among` are those that are open."""

    def __init__(self, process: GrammarProcess, threads: ThreadPoolExecutor, among: set[GrammarState]) -> None:
        self._process = process
        self._threads = threads
        self._among = among

    def mask(self, tokens: Sequence[int]) -> asyncio.Future[Mask]:
        """What may follow `tokens`, which go on from those of the last call, and do not change until it is done.

        Raises ConfigError for a grammar that cannot be used, or takes too much, and PeerRefused without a process.
        """
        return asyncio.get_running_loop().run_in_executor(self._threads, self._process.mask, tokens)

    def close(self) -> None:
        """Idempotent."""
        if self in self._among:
            self._among.remove(self)
            self._threads.submit(self._process.close)
