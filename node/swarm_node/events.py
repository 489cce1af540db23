"""Says what a node is doing: JSON lines for programs on stdout, short lines for people on stderr.

The names and fields are `swarm_node.event_contract`'s. An `Emitter` is created once, by the command, and handed down;
any task may call it, because a line is written in one piece.
"""

from __future__ import annotations

import json as json_module
import logging
import math
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from swarm_protocol.errors import SwarmError

from swarm_node import event_contract

logger = logging.getLogger(__name__)

_MARKS = {"ready": "●", "serving": "●", "training": "●", "warning": "!", "draining": "○", "stopped": "○"}


class Emitter:
    """With `json` people's lines stay on stderr, and programs read stdout. Without, stdout stays empty."""

    def __init__(self, *, json: bool, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self.json = json
        self._out = out or sys.stdout
        self._err = err or sys.stderr

    def emit(self, event: str, **fields: object) -> None:
        """Print one event of the contract. AssertionError if it is not in the contract."""
        line = {"event": event, "time": round(time.time(), 3)} | {name: _plain(v) for name, v in fields.items()}
        found = event_contract.problems(line)
        assert not found, "; ".join(found)
        logger.debug("%s %s", event, fields)
        if self.json:
            self._print(json_module.dumps(line, allow_nan=False), self._out)
        text = _text(event, fields)
        if text:
            self._print(text, self._err)

    def error(self, error: SwarmError) -> None:
        """One `error: …` line and, below it, the remedy."""
        text = f"error: {error.message}"
        self._print(f"{text}\n  → {error.remedy}" if error.remedy else text, self._err)
        self.emit("error", message=error.message, remedy=error.remedy)

    def say(self, text: str) -> None:
        """A line for people that programs have no use for."""
        self._print(text, self._err)

    def result(self, text: str) -> None:
        """What a person asked for: on stdout, unless that is the programs'."""
        self._print(text, self._err if self.json else self._out)

    def _print(self, text: str, stream: TextIO) -> None:
        try:
            stream.write(text + "\n")
            stream.flush()
        except OSError as error:
            # the reader went away (a closed pipe, a full disk); a daemon goes on without it
            logger.warning("output is lost: %s", error)


def _plain(value: object) -> object:
    """`value` as JSON can hold it: tuples become lists, non-finite numbers null."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _text(event: str, fields: Mapping[str, object]) -> str:
    template = event_contract.EVENTS[event].text
    if not template:
        return ""
    known: dict[str, object] = dict(fields)
    known |= {f"num_{name}": len(v) for name, v in fields.items() if isinstance(v, list | tuple)}
    known |= {name: math.nan for name, v in fields.items() if v is None}
    text = template.format_map(known)
    if event == "warning" and fields.get("remedy"):
        text += f"\n  → {fields['remedy']}"
    mark = _MARKS.get(event)
    return f"{mark} {text}" if mark else text
