"""Reads what Linux has counted of a process's memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

SAMPLE_S = 0.01


def peak_bytes(pid: int) -> int:
    """Return the most memory that a process ever had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


class TreePeaks:
    """Samples, in a thread, what processes and all their living descendants have in memory at one time.

    `peaks` has the most of each tree so far, by the process id of its root, and what each process of it had then.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self.peaks: dict[int, list[int]] = {pid: [] for pid in pids}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="sample memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            for pid in self.peaks:
                self.peaks[pid] = max(self.peaks[pid], resident_bytes(pid), key=sum)


def resident_bytes(pid: int) -> list[int]:
    """Return the memory that a process and each of its living descendants have now. A process that ends during the call
    counts 0."""
    found = [0]
    with suppress(OSError, ValueError):  # the process has ended, so that its files are gone or lack the line
        status = Path(f"/proc/{pid}/status").read_text()
        found = [1024 * int(status.partition("VmRSS:")[2].partition("kB")[0])]
        for child in children(pid):
            found += resident_bytes(child)
    return found
