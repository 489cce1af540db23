"""The parent's side of a model's tokenizer process: starts it, asks it, and starts it anew after it was killed.

`ask` blocks and is for one thread; `close` may be called from any.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import finalize

from swarm_protocol.errors import ConfigError, IntegrityError, SessionError, SwarmError

from swarm.child_process import ChildFailure, ChildProcess
from swarm.serving.model.shape import SMALL_FILES
from swarm.temporary_folder import make_folder

MAX_ANSWER_BYTES = 48 * 2**20
"""Twice what the token ids of the longest prompt and the largest table of tokens take as JSON."""

ENVIRONMENT = {
    "HOME": "/nonexistent",
    "HF_HOME": "/nonexistent",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    # one thread: a prompt's time is then also the processor's, and memory is not divided into arenas
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "RUST_BACKTRACE": "0",
}
_ERRORS: dict[str, type[SwarmError]] = {each.code: each for each in (ConfigError, IntegrityError)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerLimits:
    """Limits of a model's tokenizer process. 262,000 tokens with as many merges load in 4 s and 0.5 GiB; a prompt of
    two million characters takes another 0.5 GiB."""

    memory_bytes: int = 3 * 2**29
    load_s: float = 60.0
    call_s: float = 20.0


def start_child(limits: TokenizerLimits) -> ChildProcess:
    """A process without a tokenizer yet, which takes a second to be ready."""
    return ChildProcess(
        "swarm.serving.tokenizer.tokenizer_worker",
        environment=ENVIRONMENT,
        memory_bytes=limits.memory_bytes,
        without=["torch"],  # which transformers would import, for three times the start
    )


class TokenizerProcess:
    """Asks about the `files` of `model`; the first process may be `ready` made. At most one process at a time."""

    def __init__(
        self, model: str, files: Mapping[str, bytes], limits: TokenizerLimits, ready: ChildProcess | None = None
    ) -> None:
        self._model = model
        self._limits = limits
        self._held = _OwnedProcess(ready)
        self._end = finalize(self, self._held.end)
        for name, payload in files.items():
            assert name in SMALL_FILES
            (self._held.folder / name).write_bytes(payload)

    def ask(self, what: str, **values: Any) -> Any:
        """The worker's answer to one of its requests. Raises ConfigError, and IntegrityError for files without sense.

        A process that takes too long, or too much memory, is killed, and the next request gets a new one.
        """
        child = self._held.child
        try:
            if child is None or what == "load":
                child = child or self._held.start(self._limits)
                loaded = self._answer(child, "load", {}, self._limits.load_s)
                if what == "load":
                    return loaded
            return self._answer(child, what, values, self._limits.call_s)
        except ChildFailure as failure:
            self._held.forget()
            if what == "load":
                raise IntegrityError(
                    f"the files of {self._model} cannot be used: their tokenizer {failure}",
                    remedy="its servers may be broken; use another model",
                ) from None
            raise ConfigError(
                f"the tokenizer of {self._model} {failure}",
                remedy="shorten the prompt or use another model",
            ) from None

    def close(self) -> None:
        """Kill the process, in mid-request too. Idempotent."""
        self._end()

    def _answer(self, child: ChildProcess, what: str, values: Mapping[str, Any], within_s: float) -> Any:
        request = {"do": what, "model": self._model, "folder": str(self._held.folder), "within_s": within_s, **values}
        try:
            asked = json.dumps(request).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"the request cannot be written as JSON: {error}", remedy="use plain values") from None
        reply = json.loads(child.ask(asked, within_s=within_s, max_bytes=MAX_ANSWER_BYTES))
        match reply:
            case {"answer": answer}:
                return answer
            case {"error": str(code), "message": str(message), "remedy": str(remedy)} if code in _ERRORS:
                raise _ERRORS[code](message, remedy=remedy)
        raise IntegrityError(f"the process of the tokenizer of {self._model} answers without sense")


class _OwnedProcess:
    """The process and the folder of a tokenizer, which a finalizer frees if `close` was not called."""

    def __init__(self, child: ChildProcess | None) -> None:
        self.child = child
        self.folder = make_folder("tokenizer")
        self._lock = threading.Lock()
        self._has_ended = False

    def start(self, limits: TokenizerLimits) -> ChildProcess:
        """Raises SessionError after the end."""
        with self._lock:
            self._check()
            self.child = start_child(limits)
            return self.child

    def forget(self) -> None:
        """The child is gone. Raises SessionError where that was the end."""
        with self._lock:
            self._check()
            self.child = None

    def _check(self) -> None:
        if self._has_ended:
            raise SessionError("the client has been closed", remedy="ask before it is closed")

    def end(self) -> None:
        with self._lock:
            self._has_ended = True
            if self.child is not None:
                self.child.kill()
            shutil.rmtree(self.folder, ignore_errors=True)
