"""Holds what servers report of their steps: single reports, and those that the client cannot use yet.

Servers run ahead of the client, and they run drafts: guesses at the next tokens. A report of positions whose tokens the
client does not know yet waits in `EarlyReports` until it does. Then the rows of drafts that were right are used like
all others, and the rest is dropped.

All are values without I/O. `pipeline` uses them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace

from swarm_protocol.rows import Data
from swarm_protocol.session_frames import SampledToken, Spent


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Holds a server's report of one step, a checked `StepResult`: it has run everything before `position`.

    `rows` are the inputs for the stage downstream, without their codec; the last stage has none, but may have the
    `token` that follows. The other fields are those of the `StepResult`.
    """

    position: int
    rows: Data = b""
    token: SampledToken | None = None
    compute_ms: float = 0.0
    queue_ms: float = 0.0
    push_failed: bool = False
    passed_on: bool = False
    looped: bool = False
    num_links: int = 0
    upstream_ms: tuple[Spent, ...] = ()
    drafted: bool = False
    num_drafts: int = 0

    @property
    def firm_end(self) -> int:
        """The position before which there are no drafts."""
        return self.position - self.num_drafts

    def lacks_drafts(self, num_reported: int, drafted: Collection[int]) -> bool:
        """Return whether the report covers less than `num_reported` positions only since its server has not heard yet
        that drafts were right."""
        lacking = range(self.firm_end, num_reported)
        return bool(lacking) and all(position in drafted for position in lacking)

    def cut(self, position: int, row_bytes: int) -> StepReport:
        """Return the report of the positions before `position`, none of which is a draft any more."""
        num_rows = max(0, len(self.rows) // row_bytes - (self.position - position))
        return replace(self, position=position, rows=self.rows[: num_rows * row_bytes], num_drafts=0)

    def split(self, position: int, row_bytes: int) -> tuple[StepReport, StepReport]:
        """Split the report into one of the positions before `position` and one of the others."""
        first = self.cut(position, row_bytes)
        return first, replace(self, rows=self.rows[len(first.rows) :], compute_ms=0.0, queue_ms=0.0)

    def settled(self, num_known: int, drafted: Collection[int], row_bytes: int) -> StepReport:
        """Return the report with what is known of its drafts: the first `num_known` inputs, of which those at the
        positions `drafted` were drafts that were right."""
        position = self.firm_end
        while position < min(self.position, num_known):
            if position not in drafted:
                return self.cut(position, row_bytes)
            position += 1
        return self if position == self.firm_end else replace(self, num_drafts=self.position - position)


class EarlyReports(deque[StepReport]):
    """Keeps the reports of one stage, in their order, until the client knows the tokens of their positions."""

    @property
    def last(self) -> StepReport | None:
        return self[-1] if self else None

    def add(self, report: StepReport, row_bytes: int) -> None:
        """Add a report, of rows of `row_bytes`. Its server has forgotten earlier drafts at the positions of these."""
        if self and self[-1].num_drafts:
            before, first = self[-1], report.position - len(report.rows) // row_bytes
            self[-1] = before.cut(max(before.firm_end, min(before.position, first)), row_bytes)
        self.append(report)

    def take(self, num_run: int, num_known: int, drafted: Collection[int], row_bytes: int) -> StepReport | None:
        """Take out the next report of known positions. `num_run` positions were taken out, and the other arguments are
        those of `StepReport.settled`."""
        if not self:
            return None
        report = self.popleft().settled(num_known, drafted, row_bytes)
        if report.position <= num_known:
            return report
        if num_run >= num_known:
            self.appendleft(report)
            return None
        report, rest = report.split(num_known, row_bytes)
        self.appendleft(rest)
        return report
