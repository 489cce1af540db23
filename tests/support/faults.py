"""Scripted faults: which participant fails, in which phase, and how; with a record of whether the fault fired.

Code under test announces its phases to a `FailpointHook` (`swarm.network.interface`). `FaultScript.hook(who)` returns
one that looks the phase up in its list of faults and injects it. A fault that never fired proves nothing, so a test
ends with `assert_all_fired`.

Inside one event loop a test keeps the script and hands out hooks. A real process gets the script in the environment:
the parent passes `script.environment(folder)`, the child calls `FaultScript.from_environment()`, and each fault
leaves a file in that folder before it strikes, by which the parent's script knows that it fired.

All state is changed by the task that announces a phase, never across threads.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from swarm.network.interface import FailpointHook
from swarm_protocol.errors import ConfigError, PeerUnreachable

SCRIPT_VARIABLE = "SWARM_TEST_FAULTS"

What: TypeAlias = Literal["kill", "stall", "delay", "raise"]

Kill: TypeAlias = Callable[[str], None]
"""Ends `who` without a word, such as `MemoryInternet.crash`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault: when `who` reaches `phase` for the `nth` time, `what` happens.

    `who` is the name that the hook was made for, `*` anyone. kill: the process dies by SIGKILL, or in one event loop
    the script's `kill` is called and the announcing task waits for ever (its owner cancels it). stall: the task waits
    for ever. delay: it waits `delay_s`. raise: PeerUnreachable is raised. A callable is called with `who`, and decides
    for itself; it cannot be passed to a process.
    """

    who: str
    phase: str
    what: What | Callable[[str], None]
    nth: int = 1
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        if not callable(self.what) and self.what not in {"kill", "stall", "delay", "raise"}:
            raise ValueError(f"unknown fault {self.what!r}")
        if self.nth < 1:
            raise ValueError("nth counts from 1")
        if (self.what == "delay") != (self.delay_s > 0):
            raise ValueError("delay_s goes with a delay, and only with one")

    def __str__(self) -> str:
        what = self.what if isinstance(self.what, str) else getattr(self.what, "__name__", "callable")
        return f"{what} {self.who} at {self.phase} (hit {self.nth})"


class FaultScript:
    """The faults of one test. `fired` lists those that struck here, in order."""

    def __init__(self, faults: Sequence[Fault], *, kill: Kill | None = None, folder: Path | None = None) -> None:
        self.faults = tuple(faults)
        self.num_hits: Counter[tuple[str, str]] = Counter()
        self._fired: list[int] = []
        self._all_fired = asyncio.Event()
        self._kill = kill or _kill_process
        self._folder = folder

    @property
    def fired(self) -> tuple[Fault, ...]:
        return tuple(self.faults[index] for index in self._fired)

    def hook(self, who: str) -> FailpointHook:
        """The hook to hand to the code that runs as `who`."""
        return _Hook(self, who)

    async def until_all_fired(self) -> None:
        """Wait until every fault has struck in this event loop."""
        if self.faults:
            await self._all_fired.wait()

    def assert_all_fired(self) -> None:
        """Raises AssertionError that names the faults that never struck, and the phases that were reached instead."""
        missed = [fault for index, fault in enumerate(self.faults) if not self._has_fired(index)]
        if missed:
            reached = ", ".join(f"{who}: {phase} x{hits}" for (who, phase), hits in sorted(self.num_hits.items()))
            raise AssertionError(
                f"never fired: {'; '.join(map(str, missed))}. Reached here: {reached or 'no phase at all'}"
            )

    def environment(self, folder: Path) -> Mapping[str, str]:
        """Return the variables to add to a child's environment. From now on this script reads from `folder` what fired
        there."""
        if any(callable(fault.what) for fault in self.faults):
            raise ValueError("a callable cannot be passed to a process")
        self._folder = folder
        faults = [
            {"who": f.who, "phase": f.phase, "what": f.what, "nth": f.nth, "delay_s": f.delay_s} for f in self.faults
        ]
        return {SCRIPT_VARIABLE: json.dumps({"folder": str(folder), "faults": faults})}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> FaultScript:
        """The script that the parent passed; an empty one without. Raises ConfigError if it cannot be read."""
        text = (os.environ if environment is None else environment).get(SCRIPT_VARIABLE)
        if text is None:
            return cls(())
        try:
            script = json.loads(text)
            return cls([Fault(**fault) for fault in script["faults"]], folder=Path(script["folder"]))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{SCRIPT_VARIABLE} is no fault script: {error!r}", remedy=f"unset {SCRIPT_VARIABLE}; it is for tests"
            ) from error

    async def reached(self, who: str, phase: str) -> None:
        """Strike if the script says so. Several faults at one hit strike in the order of the script."""
        self.num_hits[who, phase] += 1
        for index, fault in enumerate(self.faults):
            if fault.phase == phase and fault.who in {who, "*"} and fault.nth == self._hits_for(fault, who):
                self._mark(index)
                await self._strike(fault, who)

    def _hits_for(self, fault: Fault, who: str) -> int:
        if fault.who != "*":
            return self.num_hits[who, fault.phase]
        return sum(hits for (_, phase), hits in self.num_hits.items() if phase == fault.phase)

    async def _strike(self, fault: Fault, who: str) -> None:
        match fault.what:
            case "delay":
                await asyncio.sleep(fault.delay_s)
            case "raise":
                raise PeerUnreachable(f"fault script: {fault}")
            case "stall":
                await asyncio.Event().wait()
            case "kill":
                self._kill(who)
                await asyncio.Event().wait()
            case strike:
                strike(who)

    def _mark(self, index: int) -> None:
        """Mark the fault as fired before it acts, since a killed process can report nothing."""
        self._fired.append(index)
        if len(self._fired) == len(self.faults):
            self._all_fired.set()
        if self._folder is not None:
            (self._folder / f"fault-{index}.fired").touch()

    def _has_fired(self, index: int) -> bool:
        by_child = self._folder is not None and (self._folder / f"fault-{index}.fired").exists()
        return by_child or index in self._fired


class _Hook:
    def __init__(self, script: FaultScript, who: str) -> None:
        self._script = script
        self._who = who

    async def reached(self, phase: str) -> None:
        await self._script.reached(self._who, phase)


def _kill_process(_who: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
