"""Prints what a node is doing: JSON lines for programs on stdout, short lines for people on stderr.

EVENTS has every event, its fields, and its line for people. Scripts rely on these names: a name or field may be added,
but never renamed or given another meaning. `daemon_events` and `command_events` declare the events and are the only
source of `docs/reference/events.md`, which `docs/contracts.py` writes. A test compares the two.

Each command creates one `Emitter` and passes it on. Any task or thread may call it, since one lock guards its output.
`LiveLine` draws the status line of a terminal.
"""

from __future__ import annotations

import json as json_module
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TextIO

from swarm_protocol.errors import ConfigError, SwarmError

from swarm_node.events.command_events import COMMAND_EVENTS
from swarm_node.events.daemon_events import DAEMON_EVENTS
from swarm_node.events.event_spec import TYPES, EventSpec
from swarm_node.formatting import clean, plural, progress
from swarm_node.storage.home import explained

logger = logging.getLogger(__name__)

EVERY_S = 60.0
"""Minimum seconds between two lines of the same kind without a terminal."""

WIPE = "\r\x1b[K"
"""Moves a terminal's cursor to the start of the line, and clears the line."""

_MARKS = {"ready": "●", "serving": "●", "training": "●", "warning": "!", "draining": "○", "stopped": "○"}
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_REPEATED_AT = frozenset(10**power for power in range(1, 10))

Listener = Callable[[str, Mapping[str, object]], None]
"""A function `listener(event, fields)` that neither blocks nor raises. It is called in the thread that emits."""

EVENTS: Mapping[str, EventSpec] = {**DAEMON_EVENTS, **COMMAND_EVENTS}
"""Every event by name: first those of daemons, then those of commands that end by themselves."""


class Emitter:
    """Prints events. With `json`, events go to stdout and lines for people to stderr; without it, stdout gets results
    only.

    If stdout cannot be written, methods raise OSError or ConfigError, unless the program `goes_on`, as daemons do.
    """

    def __init__(
        self, *, json: bool, goes_on: bool = False, out: TextIO | None = None, err: TextIO | None = None
    ) -> None:
        self.json = json
        self._goes_on = goes_on
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._line = LiveLine(self._err)
        self._repeated: dict[str, tuple[str, int]] = {}  # the last reason of each event, and how often it came in a row
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []

    @contextmanager
    def notifying(self, listener: Listener) -> Iterator[None]:
        """Call `listener` with each event while the context lasts."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def emit(self, event: str, **fields: object) -> None:
        """Print one event. AssertionError if the event is not in the contract."""
        line = {"event": event, "time": round(time.time(), 3)} | {name: _plain(v) for name, v in fields.items()}
        found = problems(line)
        assert not found, "; ".join(found)
        logger.debug("%s %s", event, fields)
        for listener in tuple(self._listeners):
            listener(event, fields)
        if self.json:
            self._print(json_module.dumps(line, allow_nan=False), self._out)
        if event == "stopped":
            self._guarded(self._line.end)
        spec, text = EVENTS[event], _text(event, fields)
        if spec.repeated_field:
            text = self._counted(event, str(fields[spec.repeated_field]), text)
        if text and spec.live:
            self.status(event, text)
        elif text:
            self._print(text, self._err)

    def progress(self, event: str, model: str, num_bytes: int, total_bytes: int) -> None:
        """Print how much of a model was read or downloaded."""
        self.emit(event, model=model, num_bytes=num_bytes, total_bytes=total_bytes)

    def error(self, error: SwarmError) -> None:
        """Print an `error: …` line and, below it, the remedy."""
        text = f"error: {error.message}"
        self._print(f"{text}\n  → {error.remedy}" if error.remedy else text, self._err)
        with suppress(OSError, ConfigError):  # stdout may be what cannot be written
            self.emit("error", message=error.message, remedy=error.remedy)

    def warning(self, message: str, remedy: str = "") -> None:
        self.emit("warning", message=message, remedy=remedy)

    def status(self, kind: str, text: str) -> None:
        """Show progress: as the last line of a terminal, or as occasional lines for each `kind`."""
        self._guarded(lambda: self._line.show(kind, text))

    def say(self, text: str) -> None:
        """Print a line for people. Programs do not get it."""
        self._print(text, self._err)

    def result(self, text: str) -> None:
        """Print what the user asked for: on stdout, or on stderr if events use stdout."""
        self._print(text, self._err if self.json else self._out)

    def _counted(self, event: str, reason: str, text: str) -> str:
        """Return `text`, or "" if the event repeats its reason and this is not the 10th, 100th, … time."""
        same = _NUMBER.sub("#", reason)  # to a reader, texts that differ only in a number are equal
        with self._lock:
            last, number = self._repeated.get(event, ("", 0))
            number = number + 1 if last == same else 1
            self._repeated[event] = same, number
        if number == 1:
            return text
        return f"{text} ({number} times so far)" if number in _REPEATED_AT else ""

    def _print(self, text: str, stream: TextIO) -> None:
        if stream is self._err:
            self._guarded(lambda: self._line.above(text))
            return
        try:
            with explained("write the output", option=""), self._lock:
                _write(stream, text)
        except (OSError, ConfigError) as error:
            if not self._goes_on:
                raise
            logger.warning("output is lost: %s", error)

    def _guarded(self, write: Callable[[], None]) -> None:
        try:
            with self._lock:
                write()
        except OSError as error:
            # stderr cannot be written (a closed pipe, a full disk), so nobody can be told
            logger.warning("output is lost: %s", error)


def _write(stream: TextIO, text: str) -> None:
    stream.write(text + "\n")
    stream.flush()


def _plain(value: object) -> object:
    """Return `value` as JSON can represent it: tuples become lists, and non-finite numbers null."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _text(event: str, fields: Mapping[str, object]) -> str:
    template = EVENTS[event].text
    if not template:
        return ""
    known: dict[str, object] = dict(fields)
    known |= {f"num_{name}": len(v) for name, v in fields.items() if isinstance(v, list | tuple)}
    known |= {name: math.nan for name, v in fields.items() if v is None}
    known |= {name: _Counted(v) for name, v in known.items() if type(v) is int}
    if isinstance(seconds := fields.get("seconds"), int | float):
        known["within"] = f"within {seconds:.0f} s" if seconds >= 1 else "at once"
    if event == "draining" and known["within"] != "at once":
        known["within"] = f"{known['within']}; Ctrl-C leaves at once"
    if event in {"downloading", "hashing"}:
        known["bar"] = progress(int(str(fields["num_bytes"])), int(str(fields["total_bytes"])))
    if event == "outer_step":  # this node may not have trained in it
        known["here"] = f", {fields['tokens_per_s']:.0f} tokens/s here" if fields["tokens_per_s"] else ""
    text = template.format_map(known)
    if event in {"warning", "run_waits"} and fields.get("remedy"):
        text += f"\n  → {fields['remedy']}"
    mark = _MARKS.get(event)
    return f"{mark} {text}" if mark else text


class _Counted(int):
    """A number in a template: `{num_steps:outer step}` becomes "1 outer step" or "2 outer steps"."""

    def __format__(self, spec: str) -> str:
        return plural(self, spec) if re.fullmatch(r"[a-z]{2}[a-z ]*", spec) else format(int(self), spec)


class LiveLine:
    """Draws a status line below other output to `stream`. Errors of the stream reach the caller, which must serialize
    calls."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._shown = ""
        self._printed: dict[str, tuple[str, float]] = {}  # the last line of each kind, and when the next one is due

    def show(self, kind: str, text: str) -> None:
        """Replace the line by `text`. Without a terminal, print `text` if it is news and its `kind` is due."""
        if self._is_terminal:
            self._shown = text
            self._write(self._drawn())
            return
        last, due_s = self._printed.get(kind, ("", 0.0))
        if text != last and self._clock() >= due_s:
            self._printed[kind] = text, self._clock() + EVERY_S
            self._write(text + "\n")

    def above(self, text: str) -> None:
        """Print a lasting line above the status line."""
        self._write(f"{WIPE}{text}\n{self._drawn()}" if self._shown else text + "\n")

    def end(self) -> None:
        """Remove the status line."""
        if self._shown:
            self._shown = ""
            self._write(WIPE)

    def _drawn(self) -> str:
        # the cursor returns to the start of the line, so that other output overwrites the status line
        return f"{WIPE}{clean(self._shown, self._width() - 1)}\r"

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except OSError:
            return 80

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def problems(event: Mapping[str, object]) -> list[str]:
    """Return how a printed `event` violates the contract. Empty if it conforms."""
    name = event.get("event")
    spec = EVENTS.get(name) if isinstance(name, str) else None
    if spec is None:
        return [f"unknown event {name!r}"]
    given = set(event) - {"event", "time"}
    found = [f"{name} lacks {field}" for field in spec.fields if field not in given]
    found += [f"{name} has the undocumented field {field}" for field in sorted(given - set(spec.fields))]
    for field in spec.fields:
        type_name, nullable = spec.field_type(field)
        value = event.get(field)
        if field not in given or (nullable and value is None):
            continue
        if not isinstance(value, TYPES[type_name]) or (isinstance(value, bool) and type_name != "bool"):
            found.append(f"{name}.{field} is {value!r}, not {type_name}")
    return found
