"""Holds a stage: the blocks that one server runs for one session, and what the client knows of them.

It also holds what concerns several stages: the request that they answer, and a token that may be lost with one.

Positions count from the start of the session. `num_run` have been run, according to the server's results. The client
itself has sent `num_fed`, so they are there or on their way. `num_expected` also counts positions that the stage
upstream was asked to push, which may get lost. `num_arrived` have surely reached the server.

All are values without I/O. `pipeline` and `session_state` change them.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from swarm_protocol.limits import SEQUENCE_ID_BYTES
from swarm_protocol.session_frames import SequenceReady

from swarm.router.routing import Hop
from swarm.serving.session.step_reports import EarlyReports, StepReport
from swarm.serving.session.step_timer import Deadline, StepTimer
from swarm.serving.session.trace import HopTrace


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The stages that a stage takes pushes from (`upstream`) and pushes to (`downstream`)."""

    upstream: Stage | None = None
    downstream: Stage | None = None


@dataclass(slots=True)
class LinkState:
    """Holds what a server was told about its neighbours: `num_updates` updates since the stage was opened, of which the
    server has confirmed `num_acknowledged`.

    After `num_failures` failed pushes, the stage is not linked downstream until `off_until_s`.
    """

    neighbours: Neighbours = field(default_factory=Neighbours)
    num_updates: int = 0
    num_acknowledged: int = 0
    num_failures: int = 0
    off_until_s: float = 0.0

    def update(self, neighbours: Neighbours) -> None:
        """Record new neighbours, of which the server is to be told."""
        self.neighbours = neighbours
        self.num_updates += 1

    def leads_to(self, stage: Stage) -> bool:
        return self.neighbours.downstream is stage

    @property
    def is_pending(self) -> bool:
        """True while the server may not know its neighbours yet."""
        return self.num_acknowledged < self.num_updates


@dataclass(slots=True, eq=False, kw_only=True)
class Stage:
    """The blocks `[start, end)` of `hop` on its server, which takes `row_bytes` for each position and returns
    `output_row_bytes`. If `is_local`, this process runs them.

    The server may skip the first `may_skip` positions if it holds them; `opened` is its answer about that. `early` are
    reports of positions whose tokens the client does not know yet. From `replace_from_s` on, another server is sought;
    it is infinity for a server that does not leave. Other servers had run the positions before `replays_until`, and
    delivered the outputs before `outputs_from`. If `is_taken_over`, another server computed the first keys and values.
    """

    hop: Hop
    row_bytes: int
    output_row_bytes: int = 0
    is_local: bool = False
    sequence_id: bytes = field(default_factory=partial(secrets.token_bytes, SEQUENCE_ID_BYTES))
    timer: StepTimer = field(init=False)
    trace: HopTrace = field(init=False)
    may_skip: int = 0
    opened: SequenceReady | None = None
    num_run: int = 0
    num_fed: int = 0
    num_expected: int = 0
    num_arrived: int = 0
    since_s: float = 0.0
    deadline: Deadline = field(default_factory=Deadline)
    link: LinkState = field(default_factory=LinkState)
    early: EarlyReports = field(default_factory=EarlyReports)
    replace_from_s: float = math.inf
    replays_until: int = 0
    outputs_from: int = 0
    is_taken_over: bool = False

    def __post_init__(self) -> None:
        self.timer = StepTimer(self.hop.record, self.end - self.start)
        self.trace = HopTrace(peer_id=self.peer_id, start=self.start, end=self.end)

    @property
    def peer_id(self) -> str:
        return self.hop.peer_id

    @property
    def start(self) -> int:
        return self.hop.start

    @property
    def end(self) -> int:
        return self.hop.end

    @property
    def reported(self) -> int:
        """The number of positions, without drafts, that the server says it has run."""
        last = self.early.last
        return last.firm_end if last is not None else self.num_run

    @property
    def held(self) -> int:
        """The number of positions, with drafts, that the server says it has run."""
        last = self.early.last
        return last.position if last is not None else self.num_run

    @property
    def is_leaving(self) -> bool:
        return self.replace_from_s < math.inf

    @property
    def bytes_under_way(self) -> int:
        """The bytes of the rows that the stage has not reported yet: its inputs and outputs, with copies of them."""
        return self._bytes_of(max(self.num_expected, self.num_arrived) - self.num_run)

    def _bytes_of(self, num_rows: int) -> int:
        return 2 * num_rows * max(self.row_bytes, self.output_row_bytes)

    def begin(self, position: int) -> None:
        """Start with `position` positions on the server and nothing in flight."""
        self.num_run = self.num_fed = self.num_expected = self.num_arrived = self.deadline.goal = position

    def expect_report(self, num_arrived: int, now_s: float) -> None:
        """Record that inputs up to `num_arrived` have surely reached the server, so that it owes a report from now
        on."""
        if num_arrived <= self.num_arrived:
            return
        owed = self.num_arrived > self.num_run
        self.num_arrived = num_arrived
        if not owed and num_arrived > self.num_run:
            self._set_deadline(now_s)

    def progress(self, report: StepReport, now_s: float, drafted: Collection[int] = ()) -> None:
        """Record that the server has run everything before the report's position; the positions `drafted` took no pass
        of their own."""
        num_tokens, owed = report.position - self.num_run, self.num_arrived > self.num_run
        if not num_tokens:
            return
        is_of_tokens = num_tokens == 1 or report.passed_on
        num_passes = sum(at not in drafted for at in range(self.num_run, report.position)) if is_of_tokens else 0
        self.num_run = report.position
        self.num_expected = max(self.num_expected, report.position)
        self.num_arrived = max(self.num_arrived, report.position)
        # if it owed nothing, its input arrived by a push that had not been reported yet
        took_s = now_s - self.since_s if owed else 0.0
        if num_passes:
            self.timer.times_ms.append(took_s * 1000 / num_passes)
        if owed and num_passes:
            self.timer.took(1, took_s / num_passes)
        elif owed and not is_of_tokens:
            self.timer.took(num_tokens, took_s)
        if not report.passed_on and report.position > self.replays_until:
            self._note_times(num_tokens, report, took_s * 1000)
        self.since_s = now_s
        if self.num_run >= self.deadline.goal:
            self._set_deadline(now_s)

    def _note_times(self, num_tokens: int, report: StepReport, took_ms: float) -> None:
        """Add the times of a step that took `took_ms`, 0 if unknown. The pipeline attributes the wire time of single
        tokens."""
        if num_tokens > 1:
            self.trace.prompt_ms += max(took_ms, report.compute_ms + report.queue_ms)
        else:
            self.trace.step(report.compute_ms, report.queue_ms)

    def is_only_pushed(self, num_rows: int) -> bool:
        """Return whether the last of the first `num_rows` inputs was neither run nor fed, but is to be pushed."""
        return max(self.num_run, self.num_fed) < num_rows <= self.num_expected

    def first_unreported(self, start: int, end: int, drafted: Collection[int]) -> int:
        """Return the first position from `start` on that the server may hold as a draft which was right, as it has not
        reported the positions before; `end` if there is none before."""
        low = max(start, self.num_run + 1, self.replays_until)
        return next((at for at in range(low, end) if at in drafted), end)

    def forget_pushes(self) -> None:
        """Expect no pushes any more: those that were due may never arrive."""
        self.num_expected = max(self.num_run, self.num_fed)

    def timeout_s(self) -> float:
        """Return how long the server may take to report what it owes, or to answer at all."""
        num_owed = max(1, self.num_arrived - self.num_run)
        return self.timer.timeout_s(num_owed, self._bytes_of(num_owed))

    def _set_deadline(self, now_s: float) -> None:
        if self.num_arrived == self.num_run:
            self.deadline = Deadline(self.num_arrived)
            return
        timeout_s = self.timeout_s()
        self.since_s = now_s
        self.deadline = Deadline(self.num_arrived, now_s + timeout_s, now_s + timeout_s / 2)


@dataclass(slots=True, kw_only=True)
class PendingRequest:
    """Holds the caller's last request: the token after the last position. Positions before `answered` are answered.

    `num_drawn` tokens were drawn ahead, `num_drafted` of them as drafts, and `ahead` more may be. `may_draw` is set
    once a server was asked to draw. If `is_timed`, a single token has been under way since `asked_s`, through stages
    that have not changed; `num_timed` of these have reported that they spent `spent_ms` on it.
    """

    answered: int = 0
    ahead: int = 0
    num_drawn: int = 0
    num_drafted: int = 0
    may_draw: bool = False
    asked_s: float = 0.0
    is_timed: bool = False
    num_timed: int = 0
    spent_ms: float = 0.0

    @property
    def passes_to_come(self) -> int:
        """The passes that the answer still takes, if it gets as many tokens more as so far."""
        num_passes = self.num_drawn - self.num_drafted
        return min(num_passes, self.ahead * num_passes // max(1, self.num_drawn))

    def goes_on(self, now_s: float, *, is_drafted: bool) -> None:
        """Record that the next token, which was drawn ahead, is asked for now."""
        self.ahead -= 1
        self.num_drawn += 1
        self.num_drafted += is_drafted
        self.asked_s, self.is_timed, self.num_timed, self.spent_ms = now_s, True, 0, 0.0

    def note_spent(self, report: StepReport, all_upstream: Sequence[Stage]) -> None:
        """Add the times of the token on the server that reports, and on the servers that pushed it there. The trace of
        the reporting stage is updated elsewhere."""
        self.num_timed += 1 + len(report.upstream_ms)
        self.spent_ms += report.compute_ms + report.queue_ms + sum(map(sum, report.upstream_ms))
        for upstream, (compute_ms, queue_ms) in zip(reversed(all_upstream), reversed(report.upstream_ms), strict=False):
            upstream.trace.step(compute_ms, queue_ms)

    def note_answered(self, report: StepReport, stages: Sequence[Stage], now_s: float) -> None:
        """Record that the token has passed through all `stages`, the last of which reports it."""
        self.note_spent(report, stages[:-1])
        if self.num_timed == len(stages):
            # it is not known which link took the time
            wire_ms = (now_s - self.asked_s) * 1000 - self.spent_ms
            for stage in stages:
                stage.trace.wire_ms += max(0.0, wire_ms) / len(stages)


@dataclass(slots=True)
class LostToken:
    """A token at `position` or later that a lost server may have drawn and that the client never received.

    The `suspects` have until `due_s` to say whether they received it. `is_held` is set if one of them did.
    """

    position: int = 0
    suspects: set[Stage] = field(default_factory=set)
    due_s: float = math.inf
    is_held: bool = False

    def check(self, reached: int) -> bool:
        """Record up to which position a stage got inputs, and return whether a stage holds the token."""
        self.is_held = self.is_held or (bool(self.suspects) and reached > self.position)
        return self.is_held
