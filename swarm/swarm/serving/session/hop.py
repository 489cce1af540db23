"""What a client knows of its seat on one server, and how long it waits for an answer from there.

Positions, all of them counts from the start of the session:
`done` have been run, as the server's results say; `fed` were sent to it by the client itself, and so are there or on
their way; `given` is `fed`, or what the server before it was asked to push, which may get lost; `known` have surely
reached it. Plain values: who changes them is `course`.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace

from swarm_protocol.records import ServeRecord
from swarm_protocol.rows import Data
from swarm_protocol.session_frames import Spent

from swarm.serving.session.trace import HopTrace

FLOOR_S = 5.0
"""No server is given up sooner that is not known yet: a busy machine may pause for a second or two."""

KNOWN_FLOOR_S = 2.5
"""Nor one whose last KNOWN_STEPS tokens all came within a tenth of that: a pause is rare there, and a death is not."""

KNOWN_STEPS = 8

FACTOR = 8.0
"""A step may take this many times what steps took so far, for another session's prefill may stand before it."""

MAX_COMPUTE_S = 600.0
"""Whatever a server claims: a chunk of a prompt on a slow machine, with others waiting, is done by then."""

MAX_TOKEN_S = 30.0
"""The same of one token. Without it, a server that answers just in time each time would be waited for ever longer."""

SLOWEST_BYTES_PER_S = 250_000.0
"""A mobile uplink. Slower ones cannot carry activations."""


class StepTimer:
    """How long a step may take: from the server's own claim at first, then from what its steps took."""

    __slots__ = ("_decode_s", "_num_quick", "_prefill_s")

    def __init__(self, record: ServeRecord, num_blocks: int) -> None:
        crowd = 1 + record.queue_depth
        self._decode_s = num_blocks * record.decode_ms_per_block * crowd / 1000
        self._prefill_s = num_blocks * record.prefill_ms_per_token * crowd / 1000
        self._num_quick = 0

    def timeout_s(self, num_tokens: int, num_bytes: int) -> float:
        expected_s = self._decode_s if num_tokens == 1 else self._prefill_s * num_tokens
        is_known = num_tokens == 1 and self._num_quick >= KNOWN_STEPS
        floor_s = KNOWN_FLOOR_S if is_known else FLOOR_S
        max_s = MAX_TOKEN_S if num_tokens == 1 else MAX_COMPUTE_S
        return floor_s + min(FACTOR * expected_s, max_s) + num_bytes / SLOWEST_BYTES_PER_S

    def expected_s(self, num_tokens: int) -> float:
        """Of a prompt of so many tokens, if nothing comes between; MAX_COMPUTE_S at most."""
        return min(self._prefill_s * num_tokens, MAX_COMPUTE_S)

    def took(self, num_tokens: int, seconds: float) -> None:
        if num_tokens == 1:
            self._decode_s += 0.2 * (seconds - self._decode_s)
            self._num_quick = self._num_quick + 1 if seconds <= KNOWN_FLOOR_S / 10 else 0
        else:
            self._prefill_s += 0.2 * (seconds / num_tokens - self._prefill_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a server said of one step: it has run everything before `position`.

    `rows` are the inputs of the next hop that came of it; the last hop has none but `num_outputs` outputs, those of
    the last positions. `push_failed`: the next hop has not taken some rows. `passed_on`: single tokens,
    whose times come with the last hop's answer, as `upstream_ms`: compute and queue of the hops before, nearest last.
    `looped`: the token that the last hop drew is on its way to the first. `num_links`: how often the server had been
    told its neighbours by then.
    """

    position: int
    rows: Data = b""
    num_outputs: int = 0
    compute_ms: float = 0.0
    queue_ms: float = 0.0
    push_failed: bool = False
    passed_on: bool = False
    looped: bool = False
    num_links: int = 0
    upstream_ms: tuple[Spent, ...] = ()

    def cut(self, position: int, row_bytes: int) -> tuple[Ran, Ran]:
        """What it says of the positions before `position`, and what of the others."""
        num_rows = max(0, len(self.rows) // row_bytes - (self.position - position))
        rows, rest = self.rows[: num_rows * row_bytes], self.rows[num_rows * row_bytes :]
        return replace(self, position=position, rows=rows), replace(self, rows=rest, compute_ms=0.0, queue_ms=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """Which seat a server pushes to, and from which it takes pushes. Empty: none."""

    next_peer_id: str = ""
    next_sequence_id: bytes = b""
    previous_peer_id: str = ""
    previous_sequence_id: bytes = b""


@dataclass(slots=True, eq=False, kw_only=True)
class Hop:
    """Blocks `[start, end)` on one server. `due_s`, `nudge_s`: when it is given up, and when it is fed once more.

    Both are for all positions up to `goal`: a server that reports them one by one gains no time. `early`: what it has
    run of positions whose tokens the client has not heard of. `num_links`: how often it was told its neighbours since
    it was opened, and `num_linked` how often it has answered. What it runs before `replays_until` others had run.
    """

    peer_id: str
    start: int
    end: int
    sequence_id: bytes
    timer: StepTimer
    row_bytes: int
    trace: HopTrace
    is_ready: bool = False
    max_step_tokens: int = 0
    max_length: int = 0
    length: int = 0
    done: int = 0
    fed: int = 0
    given: int = 0
    known: int = 0
    goal: int = 0
    since_s: float = 0.0
    due_s: float = math.inf
    nudge_s: float = math.inf
    told: Neighbours = field(default_factory=Neighbours)
    num_links: int = 0
    num_linked: int = 0
    early: deque[Ran] = field(default_factory=deque)
    is_leaving: bool = False
    stay_until_s: float = 0.0
    unlinked_until_s: float = 0.0
    num_unlinked: int = 0
    replays_until: int = 0

    @property
    def reported(self) -> int:
        """What it says that it has run."""
        return self.early[-1].position if self.early else self.done

    def begin(self, position: int) -> None:
        """It holds `position` positions and nothing is on its way."""
        self.done = self.fed = self.given = self.known = self.goal = position

    def learn(self, known: int, now_s: float) -> None:
        """Inputs up to `known` have surely reached it: from now on it owes an answer."""
        if known <= self.known:
            return
        owed = self.known > self.done
        self.known = known
        if not owed and known > self.done:
            self._wait(now_s)

    def progress(self, ran: Ran, now_s: float) -> None:
        """It has run everything before the position."""
        num_tokens, owed = ran.position - self.done, self.known > self.done
        if not num_tokens:
            return
        self.done = ran.position
        self.given = max(self.given, ran.position)
        self.known = max(self.known, ran.position)
        # if it owed nothing, its input came by a push of which nobody had told yet
        took_s = now_s - self.since_s if owed else 0.0
        if owed and ran.passed_on:
            self.timer.took(1, took_s / num_tokens)
        elif owed:
            self.timer.took(num_tokens, took_s)
        if not ran.passed_on and ran.position > self.replays_until:
            self._note_times(num_tokens, ran, took_s * 1000)
        self.since_s = now_s
        if self.done >= self.goal:
            self._wait(now_s)

    def _note_times(self, num_tokens: int, ran: Ran, took_ms: float) -> None:
        """Add a step that took `took_ms`, 0 if that is not known. What a single token waited for, the chain knows."""
        if num_tokens > 1:
            self.trace.prompt_ms += max(took_ms, ran.compute_ms + ran.queue_ms)
        else:
            self.trace.step(ran.compute_ms, ran.queue_ms)

    @property
    def owes_link(self) -> bool:
        """It may not have heard yet who its neighbours are."""
        return self.num_linked < self.num_links

    def distrust(self) -> None:
        """What was to come by pushes may never come."""
        self.given = max(self.done, self.fed)

    def timeout_s(self) -> float:
        """How long it may take to answer what it owes, or a word."""
        num_owed = max(1, self.known - self.done)
        return self.timer.timeout_s(num_owed, 2 * num_owed * self.row_bytes)

    def _wait(self, now_s: float) -> None:
        num_owed = self.known - self.done
        self.goal = self.known
        if not num_owed:
            self.due_s = self.nudge_s = math.inf
            return
        timeout_s = self.timeout_s()
        self.since_s = now_s
        self.due_s = now_s + timeout_s
        self.nudge_s = now_s + timeout_s / 2
