"""The points at which a test may strike: code announces the phase it has reached, and a script may act there.

Code under test takes `faults: FaultHook = no_faults` and awaits `faults.reached("reduce/before-send")` at each of its
named phases. What acts (`swarm.testing.faults.FaultScript`) is not known here. An implementation may return, wait,
raise, or end the process, so a phase is announced only where the code could be struck by the world anyway.
"""

from __future__ import annotations

from typing import Protocol


class FaultHook(Protocol):
    """Whoever wants to know, and perhaps to act, when a phase is reached."""

    async def reached(self, phase: str) -> None: ...


class _NoFaults:
    async def reached(self, phase: str) -> None:
        """Nothing happens, and nothing else gets to run: no task switch."""


no_faults: FaultHook = _NoFaults()
