"""Logging, and the report of an error that ends a command.

Log lines go to a bounded file in the home. Errors of Swarm's own packages also go to the terminal. Lines of libraries
(transformers, uvicorn) go to the file only, so that a terminal shows just what the node reports.

Exit codes of failures: 1 cannot be done, 70 a bug.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

from swarm_protocol.errors import SwarmError, reason_of

from swarm_node import interrupts
from swarm_node.storage.home import explain, explained

MAX_FILE_BYTES = 10 * 2**20  # days of a busy node at the default level
NUM_OLD_FILES = 3
HUMAN = "%(asctime)s.%(msecs)03dZ %(levelname)-7s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
OURS = ("swarm", "swarm_node", "swarm_protocol", "swarm_compression")
_MARK = "_swarm"  # marks the handlers made here, so that a second set-up replaces them


class JsonFormatter(logging.Formatter):
    """Formats one JSON object per line: time, level, logger, message, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _LogFile(logging.handlers.RotatingFileHandler):
    """A log file that reports once that it cannot be written, instead of printing a traceback for each line. It is made
    again once another program, such as logrotate, has moved or removed it."""

    failed = False

    def shouldRollover(self, record: logging.LogRecord) -> bool:  # noqa: N802 the base class' name
        if self.stream is not None and not self._is_file(self.stream.fileno()):
            self.stream.close()
            self.stream = None  # the base class opens it, for a later line if that fails now
        return bool(super().shouldRollover(record))

    def _is_file(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(Path(self.baseFilename).stat(), os.fstat(descriptor))
        except FileNotFoundError:
            return False

    def handleError(self, _record: logging.LogRecord) -> None:  # noqa: N802 the base class' name
        if not self.failed:
            self.failed = True
            error = sys.exc_info()[1]
            reason = reason_of(error) if isinstance(error, Exception) else "no reason given"
            sys.stderr.write(f"! warning: the log file {self.baseFilename} cannot be written: {reason}\n")


def set_up(directory: Path, *, log_format: str, level: str) -> Path:
    """Send all log lines to DIRECTORY/swarm-node.log, and Swarm's errors also to stderr. Return the file's path."""
    path = directory / "swarm-node.log"
    with explained("write the log"):
        file = _LogFile(path, maxBytes=MAX_FILE_BYTES, backupCount=NUM_OLD_FILES, encoding="utf-8", errors="replace")
    terminal = logging.StreamHandler(sys.stderr)
    terminal.setLevel(logging.ERROR)
    terminal.addFilter(lambda record: record.name.split(".")[0] in OURS)
    formatter = JsonFormatter() if log_format == "json" else logging.Formatter(*HUMAN)
    formatter.converter = time.gmtime
    terminal.setFormatter(formatter if log_format == "json" else logging.Formatter("%(levelname)s: %(message)s"))
    file.setFormatter(formatter)
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if getattr(handler, _MARK, False)]:
        root.removeHandler(old)
        old.close()
    for handler in (file, terminal):
        setattr(handler, _MARK, True)
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for name in OURS:
        logging.getLogger(name).setLevel(level.upper())
    logging.captureWarnings(capture=True)
    return path


def quieten_imports() -> None:
    """Keep libraries that are not imported yet from writing to the terminal. Settings of the user stay."""
    # gRPC's fork handlers log whenever libp2p's daemon is started; transformers shows progress bars, and warns of token
    # ids that the error after it names, or that only its family's vocabulary has
    quiet = {"GRPC_ENABLE_FORK_SUPPORT": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    for variable, value in quiet.items():
        os.environ.setdefault(variable, value)
    # transformers imports torchao if it is installed, which logs each kernel that is for another machine
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def quieten_libraries() -> None:
    """Remove the terminal handlers that libraries installed when they were imported."""
    for name in ("transformers", "uvicorn"):
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True


def begin_work() -> None:
    """Keep libraries off the terminal, and let Ctrl-C raise. Call it before a command opens resources that it must
    close."""
    quieten_libraries()
    interrupts.raise_in_command()


def keep_traceback(error: BaseException) -> Path:
    """Write the traceback of `error` to the log file, or to a temporary file if there is none. Return the path."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _LogFile):
            info = type(error), error, error.__traceback__
            record = logging.LogRecord("swarm_node", logging.ERROR, __file__, 0, "unexpected error", None, info)
            handler.handle(record)
            return Path(handler.baseFilename)
    descriptor, path = tempfile.mkstemp(prefix="swarm-node-", suffix=".log", text=True)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        traceback.print_exception(error, file=file)
    return Path(path)


EXIT_FAILURE = 1
EXIT_BUG = 70


def as_swarm_error(error: Exception) -> SwarmError:
    """Return `error` as an error that a person can act on. The traceback of a bug goes to a file that the remedy
    names."""
    if isinstance(error, SwarmError):
        return error
    if _lacks_memory(error):
        return SwarmError(
            "this process gets no more memory or threads",
            remedy="end other programs, raise a limit such as `ulimit -v` or `-u`, or lend less with --max-memory",
        )
    if isinstance(error, FileNotFoundError) and error.filename is None:  # only `tempfile` names no file
        return SwarmError(
            "no directory for temporary files can be written",
            remedy="free some space there, or set TMPDIR to a directory that this user may write",
        )
    if isinstance(error, OSError) and (readable := explain(error, "use" if error.filename else "go on", option="")):
        return readable
    path = keep_traceback(error)
    return SwarmError(
        f"unexpected {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}",
        remedy=f"this is a bug; please report it with {path}",
    )


def _lacks_memory(error: Exception) -> bool:
    """Return whether the system gave no memory, addresses or thread to Python, the loader of libraries, or torch."""
    signs = ("failed to map segment", "annot allocate memory", "can't start new thread")
    kinds = ImportError, OSError, RuntimeError
    return isinstance(error, MemoryError) or (isinstance(error, kinds) and any(sign in str(error) for sign in signs))


def exit_code(error: Exception) -> int:
    is_known = isinstance(error, SwarmError | OSError) or _lacks_memory(error)
    return EXIT_FAILURE if is_known else EXIT_BUG
