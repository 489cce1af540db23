"""The process that tokenizes: reads a source, and leaves a token file in the cache.

`tokenize` starts it and waits. It is a fresh interpreter: neither a thread, which would hold up its node, nor a fork,
which would share the node's locks and sockets. Its standard input brings the job, and ends when whoever started it is
gone, however that came about; then it ends too. It answers with lines of JSON: reports, then how it ended.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing import connection
from pathlib import Path
from typing import IO, Any

from swarm_protocol.errors import ConfigError, IntegrityError, SwarmError

from swarm.training.data.local import LocalData, Progress
from swarm.training.data.passages import Source
from swarm.training.data.tokenizer import TokenizerFiles, check_vocabulary
from swarm.training.data.tokenizing import discard, write_tokens

LOOK_S = 0.2
_PROGRAM = f"from {__name__} import main; main()"
_ERRORS: dict[str, type[SwarmError]] = {each.code: each for each in (ConfigError, IntegrityError)}


class PreparationStopped(Exception):
    """Whoever asked for the data does not want it any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Leave the tokens of `source` in `path`, for a model with `vocab_size` (0: unknown)."""

    source: Source
    tokenizer: TokenizerFiles
    path: Path
    vocab_size: int


def tokenize(job: Job, local: LocalData) -> None:
    """Blocks until the token file is there.

    Raises ConfigError or IntegrityError as the worker did, or for a worker that died, and PreparationStopped soon after
    `local.stop` has said so; the worker is gone then.
    """
    # the modules that are found here, and none that lie in the current directory
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryFile() as told:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and module, without a shell
            [sys.executable, "-P", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=told,
            env=environment,
            start_new_session=True,  # a Ctrl-C is for whoever started it, who then ends it
        )
        try:
            _follow(process, job, local)
        except EOFError:
            raise _died(process.wait(), told, job) from None
        finally:
            process.kill()
            process.communicate()
            discard(job.path)


def _follow(process: subprocess.Popen[bytes], job: Job, local: LocalData) -> None:
    """Until the worker says that it is done. Raises what it says, and EOFError if it says nothing more."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(pickle.dumps(job))
        process.stdin.flush()
    except BrokenPipeError as error:
        raise EOFError from error
    for line in _lines(process.stdout, local.stop):
        match json.loads(line):
            case {"done": True}:
                return
            case {"error": str(code), "message": str(message), "remedy": str(remedy)}:
                raise _ERRORS[code](message, remedy=remedy)
            case progress:
                local.on_progress(Progress(**progress))
    raise EOFError


def _lines(stream: IO[bytes], stop: Callable[[], bool]) -> Iterator[bytes]:
    held = b""
    while not stop():
        # unlike select, with any number of open files
        if not connection.wait([stream.fileno()], LOOK_S):
            continue
        data = os.read(stream.fileno(), 1 << 16)
        if not data:
            return
        *lines, held = (held + data).split(b"\n")
        yield from lines
    raise PreparationStopped


def _died(code: int, told: IO[bytes], job: Job) -> SwarmError:
    told.seek(0)
    last = told.read().decode(errors="replace").strip().rpartition("\n")[2]
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed: {last or f'exit code {code}'}"
    return IntegrityError(
        f"the process that tokenizes {job.source.name} {how}",
        remedy="see that there is memory, and that nothing changes the data; then start again",
    )


def main() -> None:
    """Work off the job on standard input."""
    # what libraries print is no answer
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job: Job = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the process that started this one
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        tokenizer = job.tokenizer.load()
        check_vocabulary(tokenizer.vocab_size, job.vocab_size)
        write_tokens(job.source, tokenizer, job.path, lambda progress: answer(**asdict(progress)))
    except (ConfigError, IntegrityError) as error:
        answer(error=error.code, message=error.message, remedy=error.remedy)
    else:
        answer(done=True)


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)
