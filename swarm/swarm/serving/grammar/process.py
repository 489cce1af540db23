"""The parent's side of the grammar process: starts it, asks it, kills it when it is late, and starts it anew.

Blocking: for the one thread that `masks` owns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from swarm_protocol.errors import ConfigError
from swarm_protocol.sampler import Grammar

START_S = 30.0
"""A tokenizer of 256k tokens takes two seconds to read."""

ANSWER_S = 4.0
"""A hundred times what a large schema takes: for a busy machine. A client waits ten seconds for a session."""

TOKENS_PER_S = 20_000.0
"""The slowest that tokens of a long answer are read again, after the process was started anew."""

_PROGRAM = "import sys; from swarm.serving.grammar.worker import main; main(int(sys.argv[1]))"


@dataclass(frozen=True, slots=True)
class Mask:
    """A bit for each token id that the grammar allows next, the lowest first; `may_end`: it is fulfilled."""

    allowed: bytes
    may_end: bool


class GrammarProcess:
    """At most one child at a time."""

    def __init__(self, tokenizer: Path) -> None:
        self._tokenizer = tokenizer
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: Connection
        self._num_told: dict[int, int] = {}
        self._dropped: list[int] = []

    def mask(self, key: int, grammar: Grammar, tokens: Sequence[int]) -> Mask:
        """What may follow `tokens`. Raises ConfigError for a grammar that cannot be used, or takes too much."""
        if self._child is None:
            self._start()
        request: dict[str, object] = {"key": key, "drop": self._dropped}
        if key not in self._num_told:
            request |= {"kind": grammar.kind, "grammar": grammar.text}
        new = list(tokens[self._num_told.get(key, 0) :])
        request["tokens"] = new
        answer = self._ask(json.dumps(request).encode(), ANSWER_S + len(new) / TOKENS_PER_S)
        if not answer:
            raise ConfigError(
                "the grammar takes too much time or memory", remedy="use a simpler grammar or JSON schema"
            )
        self._dropped = []
        self._num_told[key] = len(tokens)
        if answer[:1] == b"x":
            self.drop(key)
            raise ConfigError(
                f"the grammar cannot be used: {answer[1:].decode(errors='replace')}",
                remedy="use a simpler or another grammar or JSON schema",
            )
        return Mask(answer[1:], may_end=answer[:1] == b"e")

    def drop(self, key: int) -> None:
        """Nobody asks for it any more."""
        if self._num_told.pop(key, None) is not None:
            self._dropped.append(key)

    def close(self) -> None:
        """Kill the child, if there is one."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._pipe.close()
            self._child = None
        self._num_told.clear()
        self._dropped.clear()

    def _start(self) -> None:
        try:
            tokenizer = self._tokenizer.read_bytes()
        except OSError:
            raise ConfigError(
                "the model has no tokenizer.json, which grammars need", remedy="ask without a grammar"
            ) from None
        # the modules that are found here, and none that lie in the current directory
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "RAYON_NUM_THREADS": "1",
            "MALLOC_ARENA_MAX": "2",
        }
        self._pipe, theirs = Pipe()
        with theirs:
            self._child = subprocess.Popen(  # noqa: S603 our own interpreter and module, without a shell
                [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,  # a Ctrl-C is for the node, which then ends it
            )
        answer = self._ask(tokenizer, START_S)
        if answer != b"ready":
            self.close()
            why = answer[1:].decode(errors="replace") if answer else "its process did not start"
            raise ConfigError(f"this server cannot use grammars: {why}", remedy="ask without a grammar")

    def _ask(self, message: bytes, within_s: float) -> bytes:
        """Nothing if the child is late or has died, and then there is none any more."""
        with suppress(EOFError, OSError):
            self._pipe.send_bytes(message)
            if self._pipe.poll(within_s):
                return self._pipe.recv_bytes()
        self.close()
        return b""
