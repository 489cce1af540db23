"""Grammars of a server's sessions: which tokens each allows next, worked out off the loop and apart from the model.

All are compiled and followed by one child process, asked from one thread, so that neither the loop nor the passes over
the weights wait for a grammar. Used in the server's loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from swarm_protocol.errors import PeerRefused
from swarm_protocol.sampler import Grammar

from swarm.serving.grammar.process import GrammarProcess, Mask

MAX_GRAMMARS = 32
"""Sessions with one at a time: they share the process's memory and its turns."""


class Grammars:
    """Of one server, for the model whose `tokenizer` (a tokenizer.json) it has. `close` ends the process."""

    def __init__(self, tokenizer: Path) -> None:
        self._process = GrammarProcess(tokenizer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="swarm-grammars")
        self._keys = itertools.count()
        self._open: set[int] = set()

    def open(self, grammar: Grammar) -> GrammarState:
        """A state of it, to be closed. Raises PeerRefused where there are too many."""
        if len(self._open) >= MAX_GRAMMARS:
            raise PeerRefused(
                f"the server follows {MAX_GRAMMARS} grammars at once",
                remedy="ask again later, or another server",
                retry_after_s=1.0,
            )
        key = next(self._keys)
        self._open.add(key)
        return GrammarState(self, key, grammar)

    def mask(self, key: int, grammar: Grammar, tokens: Sequence[int]) -> asyncio.Future[Mask]:
        """What may follow; raises ConfigError for a grammar that cannot be used, or takes too much."""
        return asyncio.get_running_loop().run_in_executor(self._thread, self._process.mask, key, grammar, tokens)

    def drop(self, key: int) -> None:
        """Idempotent."""
        if key in self._open:
            self._open.remove(key)
            self._thread.submit(self._process.drop, key)

    def close(self) -> None:
        """Nothing may be asked after this."""
        self._thread.submit(self._process.close)
        self._thread.shutdown(wait=False)


class GrammarState:
    """One session's grammar."""

    def __init__(self, owner: Grammars, key: int, grammar: Grammar) -> None:
        self._owner = owner
        self._key = key
        self._grammar = grammar

    def mask(self, tokens: Sequence[int]) -> asyncio.Future[Mask]:
        """What may follow `tokens`, which go on from those of the last call, and do not change until it is done."""
        return self._owner.mask(self._key, self._grammar, tokens)

    def close(self) -> None:
        self._owner.drop(self._key)
