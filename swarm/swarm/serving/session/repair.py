"""Follows the course of a repair: from the search for servers of blocks that lack one, or whose server leaves, to the
open sequences there. Counts the failures on the way, of which too many fail the session.

A value without I/O. `session_state` asks for the searches and openings, and puts the opened stages into the pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarm_protocol.errors import PeerRefused, PeerUnreachable, SessionError, SwarmError

from swarm.router.routing import NoChain
from swarm.serving.session.stage import Stage
from swarm.serving.session.straggler import Straggler

OPEN_S = 10.0
"""Seconds to open a sequence: enough to dial through a relay, and for a slow moment of the server. A handover gets the
time of a replay on top."""

MAX_FAILURES = 16
"""Maximum server failures per request or call. A request that exceeds it is assumed to be the cause."""

MAX_REFUSALS = 256
"""Maximum refusals of one server that has no room for a session now. They are no failures: all servers may be full
until the patience ends, and each may be asked twice a second, and whenever another session of this client ends."""

BAD_ROWS_FAILURES = 4
"""Number of failures that count when all positions are run again because some server sent bad rows: it is as much
work."""


@dataclass(slots=True, eq=False, kw_only=True)
class Repair:
    """Blocks `[start, end)` that no server runs, or that a leaving one (`old`) runs until others have taken over.

    The repair began at `begun_s`, and has delayed the answer since `since_s`. `lost_peer` had the blocks last and had
    run `num_run_before` positions; it is empty before the first opening.

    `new` are the stages that are being opened. If `is_handover`, they take over the keys and values of `old`, which
    continues until they are ready. `refusal` is the last one for now that named another reason than room. With a
    `straggler`, the old server is only left if others are much faster.
    """

    start: int
    end: int
    since_s: float = 0.0
    begun_s: float = 0.0
    lost_peer: str = ""
    num_run_before: int = 0
    error: SwarmError | None = None
    refusal: PeerRefused | None = None
    old: Stage | None = None
    new: list[Stage] = field(default_factory=list)
    is_handover: bool = False
    may_hand_over: bool = True
    is_idle: bool = True
    has_searched_patiently: bool = False
    open_by_s: float = 0.0
    straggler: Straggler | None = None

    @classmethod
    def of(cls, old: Stage, error: SwarmError, now_s: float, straggler: Straggler | None = None) -> Repair:
        """Return a repair of the blocks of a stage that goes on until others have taken over."""
        return cls(
            start=old.start,
            end=old.end,
            since_s=now_s,
            lost_peer=old.peer_id,
            error=error,
            old=old,
            straggler=straggler,
        )

    @property
    def is_patient(self) -> bool:
        """True if the session cannot continue without a replacement. It can while a leaving server still answers, and
        the first opening fails early instead."""
        return self.old is None and self.lost_peer != ""

    @property
    def is_ready(self) -> bool:
        return bool(self.new) and all(stage.opened for stage in self.new)

    @property
    def awaited(self) -> Stage | None:
        """The stage that delays the repair: a new one that is not open yet, or the old one while it may pass on
        more."""
        if not self.new:
            return None
        silent = next((stage for stage in self.new if not stage.opened), None)
        if silent is None and self.old is not None and self.old.link.is_pending:
            return self.old
        return silent

    def lose(self, stage: Stage, error: SwarmError, now_s: float) -> None:
        """Record that the blocks have lost their stage, from which nothing can be handed over any more."""
        self.old, self.straggler, self.is_handover = None, None, False
        self.since_s = stage.since_s if stage.num_arrived > stage.num_run else now_s
        self.lost_peer, self.num_run_before = stage.peer_id, stage.num_run
        self.error, self.refusal = error, _not_for_room(error)
        self.begun_s = now_s

    def search(self) -> None:
        """Record that a search for servers begins."""
        self.is_idle = False
        self.has_searched_patiently = self.is_patient

    def open(self, new: Sequence[Stage], now_s: float) -> None:
        """Record the stages on the servers that were found, which are being opened from now on."""
        assert not self.new
        self.new = list(new)
        self.open_by_s = now_s + OPEN_S
        # the rows between several new stages are not known, so a handover to several would start from nothing
        self.is_handover = self.old is not None and self.may_hand_over and len(new) == 1
        if self.is_handover and self.old is not None:
            self.since_s = now_s
            self.open_by_s += new[0].timer.expected_s(self.old.num_run)

    def failure(self, error: SwarmError) -> SwarmError:
        """Return the error for the caller after a search has ended with `error`: it names what led to the search."""
        if self.refusal is not None and isinstance(error, NoChain):
            error = type(error)(
                f"no server takes the session: {self.refusal.message}",
                remedy="try again in a moment",
                missing=error.missing,
            )
        error.__cause__ = self.error
        return error

    def abandon(self) -> list[Stage]:
        """Forget the new stages, and return them."""
        stages, self.new = self.new, []
        return stages

    def opening_failed(self, error: SwarmError) -> None:
        """Record that a new stage was not opened. If that was a handover, there is no other."""
        self.error = self.error or error
        self.refusal = _not_for_room(error) or self.refusal
        if self.is_handover:
            self.may_hand_over = self.is_handover = False


class TokenFailures:
    """Counts the failures of servers at one token, and the refusals of those that were asked to open a session."""

    def __init__(self) -> None:
        self._num_failed = 0
        self._num_refused = Counter[str]()
        self._are_unreachable = True
        self._doubtful_peer = ""

    def add(self, peer_id: str, error: SwarmError, repair: Repair | None) -> None:
        """Count a failure, which occurred in a `repair` if the server was asked to open a session."""
        if repair is not None and isinstance(error, PeerRefused) and (error.lacks_room or error.retry_after_s):
            self._num_refused[peer_id] += 1
        elif repair is None or repair.straggler is None:  # the answer goes on at a straggler
            self._num_failed += 1
        self._are_unreachable = self._are_unreachable and isinstance(error, PeerUnreachable)

    def doubts_rows(self, stage: Stage) -> bool:
        """Return whether bad rows explain that the stage has failed: it is local, or it is the second server to fail at
        this token."""
        before, self._doubtful_peer = self._doubtful_peer, stage.peer_id
        if not stage.is_local and before in {"", stage.peer_id}:
            return False
        self._num_failed += BAD_ROWS_FAILURES - 1
        return True

    def too_many(self, stage: Stage, error: SwarmError, repair: Repair | None) -> SessionError | None:
        """Return the error for the caller if the last failure, that of the stage, was one too many."""
        if self._num_failed <= MAX_FAILURES and self._num_refused[stage.peer_id] <= MAX_REFUSALS:
            return None
        blocks = f"blocks {stage.start}:{stage.end}"
        if repair is not None and self._are_unreachable:
            message = f"{blocks} are not available: none of their servers can be reached"
        elif repair is None or repair.lost_peer:
            message = f"servers keep failing at the same token: {error.message} ({blocks})"
        else:
            message = f"servers in a row opened no session: {error.message} ({blocks})"
        failure = SessionError(message, remedy="try again in a moment")
        failure.__cause__ = error if repair is None else repair.error
        return failure


def _not_for_room(error: SwarmError) -> PeerRefused | None:
    """Return a refusal for now that is not for lack of room: a search that ends without servers must name it."""
    return error if isinstance(error, PeerRefused) and error.retry_after_s and not error.lacks_room else None
