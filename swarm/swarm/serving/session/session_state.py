"""Decides what the client of one session does next: a pure state machine.

Time and bytes are arguments. Every method is an event and returns the actions that follow, in the order in which they
are to be carried out.

A lost server leaves a gap in the pipeline. A `Repair` fills it with one or several other servers, which start empty and
so just lack rows. The first opening is a repair of all blocks. The replacement of a leaving server is a repair, too.

    finding ──> opening ──> in the pipeline
       ^           │           │
       └───────────┴───────────┘  a server is lost, late or leaving: find others for its blocks only

A position is answered once, however often it is run, so a token is never taken twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerViolation, SessionError, SwarmError
from swarm_protocol.session_frames import SequenceReady

from swarm.serving.session.pipeline import Pipeline
from swarm.serving.session.repair import Repair, TokenFailures
from swarm.serving.session.replay_buffer import ReplayBuffer
from swarm.serving.session.session_actions import (
    Action,
    AvoidPeer,
    CloseStage,
    Fail,
    FailureCause,
    FindServers,
    ForgetRows,
    OpenStage,
    Repaired,
)
from swarm.serving.session.silence import SilenceWatch
from swarm.serving.session.stage import LostToken, Stage
from swarm.serving.session.step_reports import StepReport
from swarm.serving.session.straggler import WAIT_S, StragglerWatch

LEAVE_RETRY_S = 3.0
"""Seconds between searches for a replacement of a leaving server that still answers."""


class SessionState:
    """A session over blocks `[0, num_blocks)`. `new_buffer(block)` makes the replay buffer of a boundary.
    `bytes_beside(peer_id)` returns the bytes that other sessions have under way to and from a server. A straggler is
    compared with others after `slow_wait_s`."""

    def __init__(
        self,
        num_blocks: int,
        new_buffer: Callable[[int], ReplayBuffer],
        *,
        max_step_tokens: int,
        bytes_beside: Callable[[str], int] = lambda _peer_id: 0,
        slow_wait_s: float = WAIT_S,
    ) -> None:
        self.repairs = [Repair(start=0, end=num_blocks)]
        self.error: SwarmError | None = None
        self._failures = TokenFailures()
        self._silence = SilenceWatch()
        self._stragglers = StragglerWatch(slow_wait_s)
        self._bytes_beside = bytes_beside
        self._actions: list[Action] = []
        self.pipeline = Pipeline(num_blocks, new_buffer, max_step_tokens=max_step_tokens)

    @property
    def stages(self) -> Sequence[Stage]:
        return self.pipeline.stages

    def peers_beside(self, repair: Repair) -> tuple[str, str]:
        """Return the servers directly before and after the span under repair, "" for none."""
        before = next((stage.peer_id for stage in self.stages if stage.end == repair.start), "")
        return before, next((stage.peer_id for stage in self.stages if stage.start == repair.end), "")

    def ask(self, rows: bytes, now_s: float, *, ahead: int = 0) -> list[Action]:
        """Append tokens, and ask for the one that follows them.

        The servers may draw `ahead` more, each of which becomes the next input.
        """
        self.pipeline.ask(rows, ahead, now_s)
        self._silence.begin(now_s)
        self._failures = TokenFailures()
        for repair in self.repairs:
            if repair.is_idle:
                repair.since_s = repair.begun_s = now_s
                self._find(repair)
        return self._decide(now_s)

    def on_found(self, repair: Repair, new: Sequence[Stage], now_s: float) -> list[Action]:
        if repair not in self.repairs or self.error is not None:
            return []
        if repair.straggler is not None and repair.error is not None:
            repair.straggler.stage.replace_from_s = now_s
            self._actions.append(AvoidPeer(repair.lost_peer, repair.error, FailureCause.SLOW))
        repair.open(new, now_s)
        self.pipeline.buffers.add(stage.start for stage in new)
        self._expect_opening()
        for stage in new:
            stage.link.neighbours = self.pipeline.links.neighbours(stage, now_s, [*self.stages, *new])
            stage.may_skip = self.pipeline.may_skip(stage)
            self._actions.append(OpenStage(stage, repair.old if repair.is_handover else None))
        return self._decide(now_s)

    def on_not_found(self, repair: Repair, error: SwarmError, now_s: float) -> list[Action]:
        if repair not in self.repairs:
            return []
        if repair.old is not None:
            repair.old.replace_from_s = math.inf if repair.straggler else now_s + LEAVE_RETRY_S
            self.repairs.remove(repair)
            self._expect_opening()  # a last stage that stays may pass on tokens again
        elif repair.lost_peer and not repair.has_searched_patiently:
            self._find(repair)
        elif self.pipeline.is_asked:
            self._fail(repair.failure(error))
        else:
            # no caller waits: search again with the next request
            repair.is_idle = True
        return self._decide(now_s)

    def on_opened(self, stage: Stage, opened: SequenceReady, now_s: float) -> list[Action]:
        """Record that the server has opened a sequence for the stage. Raises PeerViolation if its answer is
        impossible."""
        self._silence.hear(stage, now_s)
        repair = self._repair_with(stage)
        if stage.opened:
            raise PeerViolation("the server opened a session twice")
        # the old stage of a handover continues until it is copied
        is_handover = repair is not None and repair.is_handover
        most = self.pipeline.length + self.pipeline.request.ahead if is_handover else stage.may_skip
        if opened.length > most:
            raise PeerViolation(f"the server begins after {opened.length} positions, and may skip {most}")
        if repair is None or self.error is not None:
            return []
        stage.opened = opened
        return self._decide(now_s)

    def on_report(self, stage: Stage, report: StepReport, now_s: float) -> list[Action]:
        """Process a server's report. Raises PeerViolation if the report is impossible."""
        if stage not in self.stages:
            return []
        self._silence.hear(stage, now_s)
        if (taken := self.pipeline.on_report(stage, report, now_s)) is not None:
            self._failures = TokenFailures()
            self._actions.append(taken)
        if not self.repairs and not self.pipeline.links.lost_token.suspects:
            self._leave_straggler(now_s)
        return self._decide(now_s)

    def on_link_ack(self, stage: Stage, num_links: int, position: int, now_s: float) -> list[Action]:
        """Process a server's confirmation of its neighbours. Raises PeerViolation if the confirmation is impossible."""
        if stage not in self.stages:
            return []
        self._silence.hear(stage, now_s)
        self.pipeline.links.on_ack(stage, num_links, position)
        return self._decide(now_s)

    def on_leaving(self, stage: Stage, now_s: float) -> list[Action]:
        """Replace the stage of a server that drains."""
        if (repair := self._replacement_of(stage)) is not None:
            repair.straggler = None  # it must be left, whatever others promise
        if not stage.is_leaving:
            stage.replace_from_s = 0.0
        return self.tick(now_s)

    def on_lost(self, stage: Stage, error: SwarmError, cause: FailureCause, now_s: float) -> list[Action]:
        self._lose(stage, error, cause, now_s)
        return self._decide(now_s)

    def on_pinged(self, silent: Sequence[Stage], now_s: float) -> list[Action]:
        """Replace servers that did not answer a ping."""
        for stage in self._silence.lost(silent, now_s, is_in_bulk=self.pipeline.is_in_bulk):
            self._lose_silent(stage, "the server does not answer a ping", now_s)
        return self._decide(now_s)

    def give_up(self, error: SwarmError, now_s: float) -> list[Action]:
        """Fail the session with `error`."""
        if self.error is None:
            self._fail(error)
        return self._decide(now_s)

    def tick(self, now_s: float) -> list[Action]:
        """Act on the deadlines that have passed."""
        for stage in list(self.stages):
            if stage.deadline.due_s <= now_s and not stage.deadline.postpone(self._bytes_beside(stage.peer_id), now_s):
                self._lose_silent(stage, "the server did not answer in time", now_s)
            elif stage.deadline.feed_again_s <= now_s:
                self.pipeline.feed_again(stage, now_s)
        if self.pipeline.links.lost_token.due_s <= now_s:
            for stage in list(self.pipeline.links.lost_token.suspects):
                self._lose_silent(stage, "the server did not hear in time who its neighbours are", now_s)
        if self._silence_due_s() <= now_s:
            opening = [stage for repair in self.repairs for stage in repair.new if not stage.opened]
            self._actions.append(self._silence.ask([*self.stages, *opening], is_in_bulk=self.pipeline.is_in_bulk))
        for repair in list(self.repairs):
            if repair.open_by_s <= now_s and (awaited := repair.awaited) is not None:
                self._lose_silent(awaited, "the server opened no session in time", now_s)
        return self._decide(now_s)

    def next_due_s(self) -> float:
        """Return when `tick` is due next, or infinity if no deadline is set."""
        if self.error is not None:
            return math.inf
        times = [min(stage.deadline.due_s, stage.deadline.feed_again_s) for stage in self.stages]
        times += [repair.open_by_s for repair in self.repairs if repair.awaited is not None]
        times += [stage.replace_from_s for stage in self.stages if stage.is_leaving and not self._replacement_of(stage)]
        return min([*times, self.pipeline.links.lost_token.due_s, self._silence_due_s()])

    def _silence_due_s(self) -> float:
        return self._silence.due_s(self.stages) if self.pipeline.is_asked else math.inf

    def _decide(self, now_s: float) -> list[Action]:
        if self.error is None:
            if self.pipeline.links.lost_token.is_held:
                self._start_anew(SessionError("a server was lost with a token that only others had got"), now_s)
            for stage in self.stages:
                if stage.replace_from_s <= now_s and not self._replacement_of(stage):
                    self._leave(stage, now_s)
            for repair in [repair for repair in self.repairs if self._can_splice(repair)]:
                self._splice(repair, now_s)
            self._actions += self.pipeline.feed(now_s)
        actions, self._actions = self._actions, []
        return actions

    def _repair_with(self, stage: Stage) -> Repair | None:
        return next((repair for repair in self.repairs if stage in repair.new), None)

    def _replacement_of(self, stage: Stage) -> Repair | None:
        return next((repair for repair in self.repairs if repair.old is stage), None)

    def _find(self, repair: Repair) -> None:
        repair.search()
        self._actions.append(FindServers(repair))

    def _leave(self, stage: Stage, now_s: float) -> None:
        refusal = PeerRefused("the server is leaving", peer_id=stage.peer_id)
        self._actions.append(AvoidPeer(stage.peer_id, refusal, FailureCause.REPORTED))
        self._expect_opening()  # a last stage that leaves must not pass on more tokens
        self.repairs.append(Repair.of(stage, refusal, now_s))
        self._find(self.repairs[-1])

    def _leave_straggler(self, now_s: float) -> None:
        found = self._stragglers.find(self.stages, self.pipeline.request.passes_to_come, now_s)
        if found is not None:
            self.repairs.append(Repair.of(found.stage, SessionError("the server has become slow"), now_s, found))
            self._find(self.repairs[-1])

    def _expect_opening(self) -> None:
        self.pipeline.links.expect([stage for repair in self.repairs for stage in repair.new])

    def _can_splice(self, repair: Repair) -> bool:
        if not repair.is_ready:
            return False
        old = repair.old
        if old is None:
            return True
        # the client must know the results of the copied positions, too: nobody else reports their outputs
        is_known = not repair.is_handover or all(s.opened and s.opened.length <= old.num_run for s in repair.new)
        return is_known and (old.end < self.pipeline.num_blocks or self.pipeline.knows_draws_of(old))

    def _splice(self, repair: Repair, now_s: float) -> None:
        """Put the opened stages into the pipeline."""
        if repair.old is not None:
            self._remove(repair.old, now_s)
            repair.num_run_before = repair.old.num_run
        self.repairs.remove(repair)
        if repair.lost_peer:
            for stage in repair.new:
                stage.replays_until = self.pipeline.length
                stage.is_taken_over = repair.is_handover
        starts = [repair.start for repair in self.repairs]
        self._expect_opening()
        self.pipeline.insert(repair.new, [*starts, *(stage.start for other in self.repairs for stage in other.new)])
        self._actions.append(Repaired(repair, max(0, repair.num_run_before - repair.new[0].num_run)))

    def _remove(self, stage: Stage, now_s: float) -> None:
        self._actions += self.pipeline.remove(stage, now_s)
        self._actions.append(CloseStage(stage))

    def _lose_silent(self, stage: Stage, message: str, now_s: float) -> None:
        self._lose(stage, PeerTimeout(message, peer_id=stage.peer_id), FailureCause.SILENT, now_s)

    def _lose(self, stage: Stage, error: SwarmError, cause: FailureCause, now_s: float) -> None:
        repair = self._repair_with(stage)
        if self.error is not None or (repair is None and stage not in self.stages):
            return
        self._failures.add(stage.peer_id, error, repair)
        if repair is not None:
            self._opening_failed(repair, stage, error, cause)
        else:
            self._actions.append(AvoidPeer(stage.peer_id, error, cause))
            self._replace(stage, error, now_s)
            may_be_rows = cause is FailureCause.REPORTED and isinstance(error, SessionError) and stage.start > 0
            if may_be_rows and self._failures.doubts_rows(stage):
                self._doubt_rows(stage, error, now_s)
        if (failure := self._failures.too_many(stage, error, repair)) is not None:
            self._fail(failure)

    def _doubt_rows(self, stage: Stage, error: SwarmError, now_s: float) -> None:
        """Run all positions again, since bad rows may have made the stage fail. Any server before it may have made
        them, so all rows are forgotten, and nobody is accused: other servers are preferred for a while."""
        before = [other.peer_id for other in self.stages if other.end <= stage.start and not other.is_local]
        self._actions.append(ForgetRows(tuple(before)))
        self.pipeline.buffers.forget_outputs()
        for repair in self.repairs:
            if repair.new:  # these servers skip positions whose rows are forgotten now
                self._abandon(repair)
                self._find(repair)
        self._start_anew(error, now_s)

    def _start_anew(self, error: SwarmError, now_s: float) -> None:
        """Replace all stages because of `error`: they may hold something that other servers would compute differently,
        such as a token that only some have run, and that the client does not know."""
        self.pipeline.links.lost_token = LostToken()  # replaced together with the stages that may hold it
        for stage in list(self.stages):
            self._replace(stage, error, now_s)

    def _replace(self, stage: Stage, error: SwarmError, now_s: float) -> None:
        self._remove(stage, now_s)
        repair = self._replacement_of(stage)
        is_new = repair is None
        if repair is None:
            repair = Repair(start=stage.start, end=stage.end)
            self.repairs.append(repair)
        is_cut_off = repair.is_handover and bool(repair.new)
        repair.lose(stage, error, now_s)
        if is_cut_off:
            self._abandon(repair)
        if is_new or is_cut_off:
            self._find(repair)

    def _opening_failed(self, repair: Repair, stage: Stage, error: SwarmError, cause: FailureCause) -> None:
        self._abandon(repair)
        # a refused or slow handover may be the fault of either server: the new one may still work without it
        if not (repair.is_handover and (cause is FailureCause.REPORTED or repair.straggler)):
            self._actions.append(AvoidPeer(stage.peer_id, error, cause))
        repair.opening_failed(error)
        self._find(repair)

    def _abandon(self, repair: Repair) -> None:
        self._actions += [CloseStage(stage) for stage in repair.abandon()]
        self._expect_opening()

    def _fail(self, error: SwarmError) -> None:
        self.error = error
        self._actions[:] = [action for action in self._actions if isinstance(action, CloseStage)]
        self._actions.append(Fail(error))
