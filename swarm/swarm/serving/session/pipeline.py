"""Keeps track of a session's pipeline: what each stage has run, which stage is fed next, and which stage pushes to
which.

Each stage takes its inputs from the replay buffer at its first block. The client feeds every stage that lacks rows.
Usually that is only the first stage, since servers push their outputs downstream and send the client a copy. After a
failure it is also the stage that lacks rows of the buffer before it. Servers drop rows that they have run already, so
feeding rows twice does no harm; drafts, which they would run again and round otherwise, are fed only to those that lack
them. This one rule covers prefill, decode, replay and the way around a broken link.

If more tokens may be drawn than the one that was asked for, the pipeline becomes a ring: the last server pushes each
token that it draws to the first server, and tells the client. Servers then run ahead of the client. Their reports are
kept until the client catches up, so everything else is decided as if the client had asked for each token. If the last
server is lost, its replacement might draw another token in place of one that the client never received. So no server
gets a token for that position before all have confirmed that they never received one.

The module is pure. It moves rows; `session_state` inserts and removes the stages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from swarm_protocol.errors import PeerViolation

from swarm.serving.session.replay_buffer import ReplayBuffer, ReplayBuffers
from swarm.serving.session.session_actions import Feed, TakeToken, UpdateLink
from swarm.serving.session.stage import LostToken, Neighbours, PendingRequest, Stage
from swarm.serving.session.step_reports import StepReport

WINDOW_CHUNKS = 4
"""Maximum chunks of a prompt in flight: enough to keep every stage of a usual chain busy, and few to repeat."""

BULK_BYTES = 2**16
"""Maximum bytes of rows under way beside which a ping is soon answered. An uplink of 1 Mbit/s takes a second for them,
since a server sends them both to the next one and to the client."""

RELINK_S = 10.0
"""Seconds for which a failed link between two servers is not used. Each further failure doubles the time."""

MAX_RELINK_S = 600.0


class Pipeline:
    """Stages over blocks `[0, num_blocks)`, with gaps while servers are missing.

    `buffers` holds the inputs of the spans; `new_buffer(block)` makes one. A step has up to `max_step_tokens` rows. The
    inputs at the positions `drafted` were drafts that were right, so that servers ran them before they were drawn.
    """

    def __init__(self, num_blocks: int, new_buffer: Callable[[int], ReplayBuffer], *, max_step_tokens: int) -> None:
        self.stages: list[Stage] = []
        self.links = StageLinks(self.stages, num_blocks)
        self.buffers = ReplayBuffers(new_buffer)
        self.num_blocks = num_blocks
        self.request = PendingRequest()
        self.drafted: set[int] = set()
        self._max_step_tokens = self._chunk = max_step_tokens
        self._has_looped = False

    @property
    def length(self) -> int:
        """The number of input tokens so far."""
        return self.buffers[0].length

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the rows that are kept for replays, with those of early reports."""
        reported = {stage.end: stage.reported for stage in self.stages}
        return sum(max(each.length, reported.get(at, 0)) * each.row_bytes for at, each in self.buffers.items())

    @property
    def is_asked(self) -> bool:
        return self.request.answered < self.length

    @property
    def is_in_bulk(self) -> bool:
        """True while so many rows are under way that they may fill the queue of a home's uplink, where a ping waits
        behind them for seconds."""
        num_rows = max((stage.num_expected - stage.num_run for stage in self.stages), default=0)
        return num_rows * max(each.row_bytes for each in self.buffers.values()) > BULK_BYTES

    def ask(self, rows: bytes, ahead: int, now_s: float) -> None:
        assert not self.is_asked, "one request at a time"
        self.buffers[0].append(rows)
        self.links.retry(now_s)
        self.links.set_ring(is_ring=ahead > 0)
        is_timed = len(rows) == self.buffers[0].row_bytes
        self.request = PendingRequest(answered=self.length - 1, ahead=ahead, asked_s=now_s, is_timed=is_timed)

    def _follow(self, token_id: int, now_s: float) -> None:
        """Append the drawn token as the next input. The last server may have passed it on already."""
        request, start, tokens = self.request, self.length, self.buffers[0]
        assert not self.is_asked
        tokens.append(token_id.to_bytes(tokens.row_bytes, "little"))
        request.goes_on(now_s, is_drafted=start in self.drafted)
        if self._has_looped:
            first, last = self.stages[0], self.stages[-1]
            self._expect_pushes([last, *self.stages], start, self.length)
            if first.num_expected == self.length:
                first.expect_report(self.length, now_s)
        self.links.retry(now_s)
        for stage in list(self.stages):
            self._take_early(stage, now_s)

    def on_report(self, stage: Stage, report: StepReport, now_s: float) -> TakeToken | None:
        """Take a server's report of what it has run. A token that was drawn ahead becomes the next input. Raises
        PeerViolation if the report is impossible."""
        is_last = stage.end == self.num_blocks
        lacks_drafts = report.lacks_drafts(stage.reported, self.drafted)
        if self.links.lost_token.check(report.firm_end) or (lacks_drafts and report.rows):
            return None  # a new stage upstream has pushed right drafts to it again
        if lacks_drafts:
            report = replace(report, position=stage.reported)
        if report.firm_end < stage.reported or report.position > self.length + (0 if is_last else self.request.ahead):
            raise PeerViolation(f"the server ran {report.position} positions, of {self.length} after {stage.reported}")
        if is_last:
            return self._take_token(stage, report, now_s)
        self._take_rows(stage, report, now_s)
        return None

    def _take_token(self, stage: Stage, report: StepReport, now_s: float) -> TakeToken | None:
        request, taken = self.request, None
        if self._is_timed(stage, report):
            request.note_answered(report, self.stages, now_s)
        if report.position > request.answered:
            if report.token is None:
                raise PeerViolation("the server left out what was asked for")
            request.answered = report.position
            if report.drafted:
                self.drafted.add(report.position)
            taken = TakeToken(report.token, request.num_drawn, goes_on=request.ahead > 0)
        self._progress(stage, report, now_s)
        if taken is not None and taken.goes_on:
            self._follow(taken.token.token_id, now_s)
        return taken

    def _is_timed(self, stage: Stage, report: StepReport) -> bool:
        return self.request.is_timed and report.position == self.length == stage.num_run + 1

    def _take_rows(self, stage: Stage, report: StepReport, now_s: float) -> None:
        buffer, last = self.buffers[stage.end], stage.early.last
        first = report.position - len(report.rows) // buffer.row_bytes
        if report.position > buffer.length and first > max(buffer.length, stage.held):
            raise PeerViolation("the server left out what was asked for")
        if report.position > self.length:
            # copied without known rows, so that kept reports take no more memory than the session's rows
            known = max(buffer.length, stage.reported)
            report = replace(report, rows=bytes(report.rows[max(0, known - first) * buffer.row_bytes :]))
        if last is not None and report.position == stage.reported:
            # a repeated report can only add that a push failed
            stage.early[-1] = replace(last, push_failed=last.push_failed or report.push_failed)
        else:
            stage.early.add(report, buffer.row_bytes)
            self._take_early(stage, now_s)

    def _take_early(self, stage: Stage, now_s: float) -> None:
        """Process early reports up to the positions whose tokens the client knows."""
        while stage.early:
            buffer = self.buffers[stage.end]
            if (report := stage.early.take(stage.num_run, self.length, self.drafted, buffer.row_bytes)) is None:
                return
            buffer.append_new(report.rows, report.position)
            self._progress(stage, report, now_s)

    def _progress(self, stage: Stage, report: StepReport, now_s: float) -> None:
        """Record that a stage has run more, and whether its pushes reached the stage downstream."""
        is_last = stage.end == self.num_blocks
        if not is_last and not report.passed_on and self._is_timed(stage, report):
            self.request.note_spent(report, self.stages[: self.stages.index(stage)])
        stage.progress(report, now_s, self.drafted)
        downstream = self.links.downstream(stage, self.stages)
        # otherwise the outputs went to the stage that it was linked to before
        is_current = report.num_links == stage.link.num_updates
        is_linked = downstream is not None and stage.link.leads_to(downstream) and is_current
        if is_last:
            self._has_looped = (report.looped or report.drafted) and is_linked and not report.push_failed
        if downstream is not None:
            self._note_push(stage, downstream, report, now_s, is_linked=is_linked)

    def _note_push(self, stage: Stage, downstream: Stage, report: StepReport, now_s: float, *, is_linked: bool) -> None:
        """Expect a report from the stage downstream if the pushed rows have surely arrived there, and no push any more
        that cannot arrive."""
        is_last = stage.end == self.num_blocks
        is_only_pushed = downstream.is_only_pushed(report.position + is_last)  # a drawn token follows the last row
        if not is_linked:
            if is_only_pushed:
                downstream.forget_pushes()
        elif report.push_failed:
            if is_only_pushed or is_last:
                self.links.unlink(stage, downstream, now_s)
        elif not is_last and downstream.num_expected >= report.position:
            downstream.expect_report(report.position, now_s)

    def feed(self, now_s: float) -> list[Feed | UpdateLink]:
        """Return the updates of links that have changed, and rows for each stage that lacks some."""
        actions: list[Feed | UpdateLink] = [*self.links.updates(now_s)]
        for index in range(len(self.stages)):
            while (feed := self._next_feed(index)) is not None:
                actions.append(feed)
                self._note_fed(index, feed, now_s)
        return actions

    def needed(self, stage: Stage) -> int:
        """Return the first position whose output of the stage is not known yet."""
        return self.request.answered if stage.end == self.num_blocks else self.buffers[stage.end].length

    def may_skip(self, stage: Stage) -> int:
        """Return how many positions a new stage need not run if its server holds them: their inputs and outputs are
        known."""
        return min(self.buffers[stage.start].length, self.needed(stage))

    def _next_feed(self, index: int) -> Feed | None:
        """Return the rows to send to the stage next, or None if it has all, or enough for now."""
        stage = self.stages[index]
        held, start = self.buffers[stage.start].length, stage.num_expected
        if start >= held:
            return None
        is_last, needed, request = stage.end == self.num_blocks, self.needed(stage), self.request
        if self.links.lost_token.suspects and stage.start == 0:
            held = min(held, self.links.lost_token.position)
        slowest = min(each.num_run for each in self.stages[index:])
        forward = start >= needed and not is_last
        end = min(held, start + self._chunk, held if forward or is_last else needed)
        end = stage.first_unreported(start, end, self.drafted)
        if start >= min(end, slowest + WINDOW_CHUNKS * self._chunk):
            return None
        wants_token = (forward or is_last) and self.is_asked and end == self.length
        return Feed(stage, start, end, wants_token, forward, request.num_drawn, request.ahead if wants_token else 0)

    def _note_fed(self, index: int, feed: Feed, now_s: float) -> None:
        feed.stage.num_expected = feed.stage.num_fed = feed.end
        self.request.may_draw = self.request.may_draw or feed.wants_token
        feed.stage.expect_report(feed.end, now_s)
        if feed.forward:
            self._expect_pushes(self.stages[index:], feed.start, feed.end)

    def _expect_pushes(self, stages: Sequence[Stage], start: int, end: int) -> None:
        """Record the rows that pushes from the first of these stages will bring to the others, up to the first stage
        that is not linked or not in step."""
        for upstream, downstream in itertools.pairwise(stages):
            # a stage that is still being fed directly may not have reached `start` when the push arrives
            if (
                not upstream.link.leads_to(downstream)
                or downstream.num_expected < start
                or downstream.num_fed > downstream.num_run
            ):
                return
            start = max(start, downstream.num_expected)
            if start >= end:
                return
            downstream.num_expected = end

    def knows_draws_of(self, last: Stage) -> bool:
        """Return whether the client knows all tokens that the last stage has pushed on."""
        may_draw = self.request.ahead and self.request.may_draw
        return not may_draw or not (last.link.neighbours.downstream or last.link.is_pending)

    def feed_again(self, stage: Stage, now_s: float) -> None:
        """Feed a stage directly whose report is late: rows that were pushed to it may be lost."""
        stage.deadline.feed_again_s = math.inf
        upstream = self.links.upstream(stage, self.stages)
        if upstream is not None and stage.num_expected > max(stage.num_fed, stage.num_run):
            self.links.unlink(upstream, stage, now_s)

    def insert(self, stages: Sequence[Stage], other_starts: Collection[int]) -> None:
        """Put opened stages into a gap. Only buffers where a span begins, and those at `other_starts`, are kept."""
        self.stages += stages
        self.stages.sort(key=lambda stage: stage.start)
        for stage in stages:
            assert stage.opened is not None
            stage.begin(stage.opened.length)
            stage.outputs_from = self.needed(stage)
        self.buffers.keep({*(stage.start for stage in self.stages), *other_starts})
        self._chunk = min([self._max_step_tokens] + [s.opened.max_step_tokens for s in self.stages if s.opened])
        self.links.have_changed, self.request.is_timed = True, False

    def remove(self, stage: Stage, now_s: float) -> list[UpdateLink]:
        """Remove a stage. Its pushes downstream are not expected any more."""
        self.stages.remove(stage)
        stage.trace.is_replaced = True
        self.links.have_changed, self.request.is_timed = True, False
        if downstream := self.links.downstream(stage, self.stages):
            downstream.forget_pushes()
        is_lost_draw = stage.end == self.num_blocks and not self.knows_draws_of(stage)
        is_suspect = stage in self.links.lost_token.suspects
        return self.links.suspect(self.length, now_s) if is_suspect or is_lost_draw else []


class StageLinks:
    """Decides which of `stages`, the pipeline's own list, pushes to which. In a ring, the last one pushes the tokens
    that it draws to the first one.

    If a server is lost that may have pushed a token which the client never received, the others say whether they got it
    when they confirm their links (`lost_token`). Set `have_changed` when stages may have other neighbours.
    """

    def __init__(self, stages: Sequence[Stage], num_blocks: int) -> None:
        self.lost_token = LostToken()
        self.have_changed = False
        self._stages = stages
        self._opening: list[Stage] = []
        self._num_blocks = num_blocks
        self._is_ring = False
        self._retry_s = math.inf

    def set_ring(self, *, is_ring: bool) -> None:
        self.have_changed = self.have_changed or self._is_ring != is_ring
        self._is_ring = is_ring

    def expect(self, opening: Sequence[Stage]) -> None:
        """Record the stages that are being opened: the stages downstream must know the sender before its pushes
        arrive."""
        self._opening = list(opening)
        self.have_changed = True

    def updates(self, now_s: float) -> Iterator[UpdateLink]:
        """Yield the updates of links that have changed."""
        if not self.have_changed:
            return
        self.have_changed = False
        for stage in self._stages:
            neighbours = self.neighbours(stage, now_s, self._stages)
            if neighbours != stage.link.neighbours:
                stage.link.update(neighbours)
                yield UpdateLink(stage)

    def on_ack(self, stage: Stage, num_links: int, position: int) -> None:
        """Handle a server's confirmation of `num_links` link updates, before which it had got the inputs up to
        `position`.

        Raises PeerViolation if the confirmation is impossible.
        """
        link = stage.link
        if not link.num_acknowledged < num_links <= link.num_updates:
            raise PeerViolation(f"the server was told of its neighbours {link.num_updates} times, not {num_links}")
        link.num_acknowledged = num_links
        if not self.lost_token.check(position) and not link.is_pending:
            self.lost_token.suspects.discard(stage)
            if not self.lost_token.suspects and self.lost_token.due_s < math.inf:
                self.have_changed, self.lost_token.due_s = True, math.inf

    def neighbours(self, stage: Stage, now_s: float, ready: Sequence[Stage]) -> Neighbours:
        """Choose the neighbours of a stage: one of the `ready` stages to push to, and the stage whose pushes arrive now
        or soon.

        Inputs and outputs of local spans pass through the client anyway, so local stages have no neighbours.
        """
        if stage.is_local:
            return Neighbours()
        downstream, upstream = self.downstream(stage, ready), self.upstream(stage, (*self._stages, *self._opening))
        if now_s < stage.link.off_until_s or (stage.end == self._num_blocks and not self._may_loop(stage, downstream)):
            downstream = None
        return Neighbours(_if_remote(upstream), _if_remote(downstream))

    def _may_loop(self, last: Stage, first: Stage | None) -> bool:
        # no server dials itself, but pushing to the same sequence needs no dialling
        can_push = first is last or (first is not None and first.peer_id != last.peer_id)
        return can_push and not self.lost_token.suspects and not last.is_leaving

    def downstream(self, stage: Stage, among: Iterable[Stage]) -> Stage | None:
        """Return the stage that runs the blocks after `stage`. In a ring the first stage comes after the last."""
        start = stage.end % self._num_blocks
        return next((other for other in among if other.start == start), None) if start or self._is_ring else None

    def upstream(self, stage: Stage, among: Iterable[Stage]) -> Stage | None:
        end = stage.start or self._num_blocks
        return next((other for other in among if other.end == end), None) if stage.start or self._is_ring else None

    def unlink(self, upstream: Stage, downstream: Stage, now_s: float) -> None:
        """Take the link out of use for a while, and feed the stage downstream directly."""
        link = upstream.link
        link.off_until_s = now_s + min(MAX_RELINK_S, RELINK_S * 2**link.num_failures)
        link.num_failures += 1
        self.have_changed = True
        self._retry_s = min(self._retry_s, link.off_until_s)
        downstream.forget_pushes()

    def retry(self, now_s: float) -> None:
        if now_s >= self._retry_s:
            self.have_changed, self._retry_s = True, math.inf

    def suspect(self, length: int, now_s: float) -> list[UpdateLink]:
        """Ask all stages whether they hold a token that only the lost stage, or one of the suspects, may have known."""
        lost = self.lost_token
        lost.position = min(lost.position, length) if lost.suspects else length
        lost.suspects = set(self._stages)
        lost.due_s = max((now_s + stage.timeout_s() for stage in self._stages), default=math.inf)
        for stage in self._stages:
            stage.link.update(self.neighbours(stage, now_s, self._stages))
            lost.check(stage.reported)
        return [UpdateLink(stage) for stage in self._stages]


def _if_remote(stage: Stage | None) -> Stage | None:
    return None if stage is None or stage.is_local else stage
