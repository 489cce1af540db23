"""A kill that is armed while processes already run: the first of them to get where it is armed dies by SIGKILL, or is
stopped by SIGSTOP until the planner continues it.

The test that plans it writes one file, which each process reads at every phase it reaches. Who is to die may be anyone,
such as whichever coordinates next; so the process that dies claims the kill first, by creating a file that only one
can, and leaves in it what it was doing.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Kill `who` ("*" for any process) at the `nth` time from now on that it reaches `phase`. `number` identifies the
    kill. With `is_stop`, the process is stopped and not ended."""

    number: int
    who: str
    phase: str
    nth: int = 1
    is_stop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """Record the process that was struck, the time by the machine's monotonic clock, and the phase."""

    who: str
    phase: str
    at_s: float


class KillSwitch:
    """Arm kills, on the side of the test. `folder` is shared with the processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def arm(self, kill: Kill) -> None:
        """Arm a kill in place of the one armed before."""
        draft = self._folder / "armed.tmp"
        draft.write_text(json.dumps(asdict(kill)))
        draft.replace(self._folder / "armed")

    def struck(self, number: int) -> Struck | None:
        """Return what happened, or None if the kill has not struck yet."""
        try:
            return Struck(**json.loads((self._folder / f"struck-{number}").read_text()))
        except (FileNotFoundError, json.JSONDecodeError):
            return None


class ArmedFaults:
    """Carry out armed kills in the process `who`. Implements `FailpointHook`."""

    def __init__(self, folder: Path, who: str) -> None:
        self._folder = folder
        self._who = who
        self._hits: Counter[int] = Counter()

    async def reached(self, phase: str) -> None:
        try:
            kill = Kill(**json.loads((self._folder / "armed").read_text()))
        except FileNotFoundError:
            return
        if phase != kill.phase or kill.who not in {self._who, "*"}:
            return
        self._hits[kill.number] += 1
        if self._hits[kill.number] >= kill.nth and self._claim(kill):
            os.kill(os.getpid(), signal.SIGSTOP if kill.is_stop else signal.SIGKILL)

    def _claim(self, kill: Kill) -> bool:
        try:
            with (self._folder / f"struck-{kill.number}").open("x") as file:
                json.dump({"who": self._who, "phase": kill.phase, "at_s": time.monotonic()}, file)
        except FileExistsError:
            return False
        return True
