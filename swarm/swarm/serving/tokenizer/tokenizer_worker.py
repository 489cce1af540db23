"""The process that holds one model's tokenizer and chat template, which are a stranger's: the program of `process`.

It answers one request after another, as JSON, until its pipe ends. Its limits are set before the first of the
stranger's bytes is read: memory for good, and for each request the processor's time, so that a request that nobody
waits for any more ends by itself, too.
"""

from __future__ import annotations

import json
import os
import resource
import select
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from swarm_protocol import limits
from swarm_protocol.errors import ConfigError, SwarmError

from swarm.child_process import OUT_OF_MEMORY
from swarm.serving.tokenizer.loaded import LoadedTokenizer, load_tokenizer, one_line, warm_up

MAX_OPEN_FILES = 64


def main(fd: int, memory_bytes: int) -> None:
    """Serve the connection `fd` until it ends."""
    with suppress(EOFError, BrokenPipeError, ConnectionResetError), Connection(fd) as parent:
        try:
            threading.Thread(target=_end_with_parent, args=(fd,), daemon=True).start()
            warm_up()
            _limit(memory_bytes)
            answers = TokenizerAnswers()
            while True:
                request = json.loads(parent.recv_bytes())
                _limit_processor(request["within_s"])
                os.chdir(request["folder"])
                parent.send_bytes(json.dumps(answers.answer(request)).encode())
        except MemoryError:
            os._exit(OUT_OF_MEMORY)


class TokenizerAnswers:
    """Answers requests, of which the first is to load the files in the current directory."""

    def __init__(self) -> None:
        self._loaded: LoadedTokenizer

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises MemoryError."""
        try:
            return {"answer": self._answer(request)}
        except SwarmError as error:
            return {"error": error.code, "message": error.message, "remedy": error.remedy}
        except (MemoryError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a panic of the tokenizers library is no Exception
            return {
                "error": ConfigError.code,
                "message": f"the tokenizer of {request['model']} cannot take this: {one_line(error)}",
                "remedy": "use other words or another model",
            }

    def _answer(self, request: dict[str, Any]) -> Any:
        match request["do"]:
            case "load":
                self._loaded = load_tokenizer(request["model"], Path(request["folder"]))
                table = self._loaded.table()
                return {**self._loaded.about, "table": table and table.to_json()}
            case "encode":
                return self._loaded.encode(request["prompt"])
            case "encode_chat":
                return self._loaded.encode_chat(request["messages"], request["tools"], request["template_kwargs"])
            case "decode":
                return [self._loaded.decode(token_ids) for token_ids in request["sequences"]]
            case "token_bytes":
                return [self._loaded.token_bytes(token_id).decode("latin-1") for token_id in request["token_ids"]]


def _end_with_parent(fd: int) -> None:
    """In mid-request too, unless the interpreter is held up: then the limit of the processor's time ends it."""
    parent = select.poll()
    parent.register(fd, 0)  # told is only that the other end is gone
    parent.poll()
    os._exit(1)


def _limit(memory_bytes: int) -> None:
    for what, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, limits.MAX_MODEL_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(OSError, ValueError):  # where a system has no such limit; the parent looks at the memory, too
            resource.setrlimit(what, (most, most))


def _limit_processor(within_s: float) -> None:
    """SIGXCPU ends the process some time after the parent has given up."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most_s = int(used.ru_utime + used.ru_stime + within_s) + 2
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (most_s, resource.RLIM_INFINITY))
