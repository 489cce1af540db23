"""Runs the steps of all sequences of one server together, in one thread.

The task `run` owns the sequences and their pages. Between two passes over the weights it takes in new steps, asks the
scheduler for the next pass, and delivers results. All methods are called in its loop. All work on the model or the pool
runs in the thread, one piece after another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from swarm_protocol.errors import PeerRefused, SwarmError

from swarm.serving.engine.compute import BatchPiece, PieceResult, RunnableSpan, compute
from swarm.serving.engine.page_allocator import PageAllocator, PageNames, PageTable
from swarm.serving.engine.scheduler import BatchPlan, Scheduler
from swarm.serving.engine.sequence import EngineSequence, SequenceStep, StepOutput
from swarm.serving.engine.span_speed import PREFILL_TOKENS, ObservedSpeed, SpanSpeed, StepCost
from swarm.serving.model.batch import SequenceRows, Want
from swarm.serving.model.kv_pool import PAGE_TOKENS, KVPool, Prefault
from swarm.serving.peer_shares import RETRY_AFTER_S, PeerShares, Sharer

T = TypeVar("T")

CHEAP_ROWS = 16
"""Rows of all sequences for which a pass takes little longer than for one, so that drafts delay nobody."""

KEPT_SHARE = 16
"""One in so many sessions is kept for peers that have none."""

PASS_S = 1.0
"""Most passes over the weights take less. Then the pages of a sequence that was evicted during one are free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The sequences whose step is running, those whose step waits, and the reserved share of the cache (1: full)."""

    num_running: int = 0
    num_waiting: int = 0
    cache_usage: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The limits of a span's computation.

    A pass computes the next tokens of at most `max_batch` sessions, and also prompt tokens for `max_step_ms`. If there
    is only one session, it computes prompt tokens for `max_alone_ms`, for which a new session may have to wait. A
    session that sends nothing for `evict_idle_s` is evicted when another peer needs room, and so is one that has been
    open for `evict_old_s` while its peer has over half of the server. `on_step` is called in the
    loop for every computed step, with its positions without drafts and its compute and queue milliseconds, and
    `on_drafts` with the number of drafts that turn out to be right.
    """

    max_sessions: int = 64
    max_step_tokens: int = 512
    max_batch: int = 64
    max_step_ms: float = 200.0
    max_alone_ms: float = 1000.0
    evict_idle_s: float = 10.0
    evict_old_s: float = 60.0
    on_step: Callable[[int, float, float], None] = field(default=lambda _positions, _compute_ms, _queue_ms: None)
    on_drafts: Callable[[int], None] = field(default=lambda _num_right: None)


class Engine:
    """The engine of one span. `num_tokens` counts the positions of sequences without wrong drafts, and `num_passes` the
    passes over the weights."""

    def __init__(
        self,
        span: RunnableSpan,
        pool: KVPool,
        options: EngineOptions,
        *,
        revision: str,
        speed: SpanSpeed | None = None,
        thread: ThreadPoolExecutor | None = None,
    ) -> None:
        """If the `speed` of the span was measured, the first steps have the right size, and `observed` is kept.

        `thread` has one worker, in which the span was loaded. The engine owns it from now on.
        """
        self.span = span
        self.pool = pool
        self.pages = PageAllocator(pool.num_pages)
        self._prefault = Prefault(pool)
        self.num_tokens = 0
        self.num_passes = 0
        self._revision = revision
        self._on_step, self._on_drafts = options.on_step, options.on_drafts
        self._sequences: dict[EngineSequence, None] = {}
        self._shares = PeerShares(
            self._sequences,
            options.max_sessions,
            pool.num_pages,
            num_kept=options.max_sessions // KEPT_SHARE,
            evict_idle_s=options.evict_idle_s,
            evict_old_s=options.evict_old_s,
        )
        self._cost = StepCost(
            max_step_ms=options.max_step_ms, max_alone_ms=options.max_alone_ms, max_step_tokens=options.max_step_tokens
        )
        self.observed = ObservedSpeed(speed) if speed is not None else None
        if speed is not None:
            num_blocks = span.end - span.start
            self._cost.measured(0, speed.decode_ms * num_blocks)
            self._cost.measured(PREFILL_TOKENS, speed.prefill_ms * num_blocks * PREFILL_TOKENS)
        self._scheduler: Scheduler[SequenceStep] = Scheduler(max_batch=options.max_batch)
        self._running: frozenset[EngineSequence] = frozenset()
        self._ready = asyncio.Event()
        self._has_ended = False
        self._thread = thread or ThreadPoolExecutor(1, thread_name_prefix="swarm-engine")

    @property
    def num_waiting(self) -> int:
        """The number of sequences with an unfinished step."""
        return len(self._scheduler)

    @property
    def load(self) -> EngineLoad:
        num_running = len(self._running)
        return EngineLoad(
            num_running=num_running,
            num_waiting=self.num_waiting - num_running,
            cache_usage=1 - self.pages.num_free / self.pool.num_pages,
        )

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    @property
    def free_tokens(self) -> int:
        """The number of positions that can still be reserved."""
        return self.pages.num_free * PAGE_TOKENS

    def room_for_drafts(self, sequence: EngineSequence, position: int) -> int:
        """Return how many drafts a sequence may run after its positions before `position`: none that need a further
        page, and together with the rows of other sequences no more than a pass computes at little cost."""
        num_others = sum(1 for other in self._sequences if other is not sequence and other.num_queued)
        return min(sequence.num_pages * PAGE_TOKENS - position, cheap_drafts(1 + num_others))

    async def in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        """Run work that must not overlap with a step, such as a measurement or the transfer of a cache.

        Raises PeerRefused if the engine is closed, also while the work waits for its turn.
        """
        try:
            running = asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        except RuntimeError:  # the thread has been shut down
            raise _over() from None
        try:
            return await running
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise _over() from None

    def close(self, *, wait: bool = True) -> None:
        """Compute nothing more. With `wait`, block until the thread's work has ended. Call it after `run` has ended."""
        self._prefault.close(wait=wait)
        self._thread.shutdown(wait=wait, cancel_futures=True)

    def open(
        self,
        *,
        client: str,
        network: Hashable = None,
        start: int,
        end: int,
        max_tokens: int,
        grow_to: int = 0,
        page_keys: Sequence[bytes] = (),
        may_skip: int = 0,
    ) -> EngineSequence:
        """Open a sequence with room for `max_tokens` on blocks [start, end), which may grow to `grow_to` while there is
        room. It begins with the pages of `page_keys` that are still cached, and lie within the first `may_skip`
        positions. The caller must close it. `network` is the provider's network of the client; None: one of its own.

        Raises PeerRefused, with `retry_after_s` if a retry may succeed.
        """
        if self._has_ended:
            raise _over()
        if not self.span.start <= start < end <= self.span.end:
            raise PeerRefused(f"this server has blocks {self.span.start}:{self.span.end}", remedy="look up its record")
        most = max(max_tokens, grow_to)
        if most > self.span.context_tokens:
            raise PeerRefused(
                f"a session of {most} tokens is over the model's context of {self.span.context_tokens}",
                remedy="ask for fewer tokens",
            )
        names = PageNames(self._revision, client, start, end, page_keys[: max_tokens // PAGE_TOKENS])
        sharer = Sharer(network or client, client)
        wanted = names.wanted[: may_skip // PAGE_TOKENS]
        page_table = self._admit(sharer, -(-max_tokens // PAGE_TOKENS), wanted)
        sequence = EngineSequence(self, sharer, (start, end), most, page_table, names)
        self._sequences[sequence] = None
        return sequence

    def _admit(self, sharer: Sharer, num_pages: int, wanted: Sequence[bytes]) -> PageTable:
        now_s = asyncio.get_running_loop().time()
        self._shares.check(sharer, num_pages, now_s=now_s)
        self._shares.check_turn(sharer, num_pages, num_free=self.pages.num_free, now_s=now_s)
        page_table, retry_after_s = self._reserve(sharer, num_pages, wanted), RETRY_AFTER_S
        if page_table is None and self._evict(sharer, num_pages, now_s, num_more=1):
            page_table, retry_after_s = self._reserve(sharer, num_pages, wanted), PASS_S
        if page_table is None:
            raise self._shares.refused(sharer, num_pages, now_s=now_s, num_more=1, retry_after_s=retry_after_s)
        self._shares.admitted(sharer, num_pages, now_s=now_s)
        return page_table

    def extend(self, sequence: EngineSequence, num_pages: int) -> None:
        """Reserve pages for a sequence that needs `num_pages` in all. Raises PeerRefused if it may not have more, or
        none are free."""
        num_more = num_pages - sequence.num_pages
        if num_more <= 0:
            return
        sharer, now_s = sequence.sharer, asyncio.get_running_loop().time()
        self._shares.check_size(num_pages)
        self._shares.check_growth(sharer, num_more, now_s=now_s)
        if not self.pages.extend(sequence.page_table, num_pages):
            retry_after_s = PASS_S if self._evict(sharer, num_more, now_s) else RETRY_AFTER_S
            if not self.pages.extend(sequence.page_table, num_pages):
                raise self._shares.refused(sharer, num_more, now_s=now_s, retry_after_s=retry_after_s)

    def _reserve(self, sharer: Sharer, num_pages: int, wanted: Sequence[bytes]) -> PageTable | None:
        if len(self._sequences) >= self._shares.places_for(sharer):
            return None
        return self.pages.reserve(num_pages, wanted)

    def _evict(self, sharer: Sharer, num_pages: int, now_s: float, *, num_more: int = 0) -> bool:
        """End sequences of other peers, and return whether there is then room for `num_pages` and `num_more` sequences
        of the peer; end none if that is not enough.

        A pass may still use their pages, or those of sequences that ended before: these are free once it has ended.
        """
        ending = (sequence for sequence in self._running if sequence.end_error is not None)
        num_free = self.pages.num_free + sum(self.pages.num_freed_by(sequence.page_table) for sequence in ending)
        chosen = list[EngineSequence]()
        evictable = self._shares.evictable(sharer, num_pages, now_s=now_s)
        places = self._shares.places_for(sharer)
        while num_free < num_pages or (num_more and len(self._sequences) - len(chosen) + num_more > places):
            if (sequence := next(evictable, None)) is None:
                return False
            chosen.append(sequence)
            num_free += self.pages.num_freed_by(sequence.page_table)
        for evicted in chosen:
            evicted.evict()
        return True

    def submit(self, step: SequenceStep) -> None:
        """Queue a step. Called by the step's sequence."""
        self._scheduler.add(step)
        self._ready.set()

    def withdraw(self, step: SequenceStep) -> None:
        """Drop a step that is no longer wanted. A second call does nothing."""
        self._scheduler.remove(step)

    def end(self, sequence: EngineSequence, error: SwarmError) -> None:
        """Free the sequence's pages once no pass writes them, and fail its unfinished step."""
        if sequence.end_error is not None:
            return
        del self._sequences[sequence]
        if sequence not in self._running:
            # a write to these pages may still be queued: the one thread does it before all work of their next owner
            self.pages.release(sequence.page_table)
        sequence.end(error)

    async def run(self) -> None:
        """Run until cancelled. Then, and when a defect ends the engine, all sequences are ended."""
        try:
            self._prefault.keep_ahead(0)
            while True:
                if not self._scheduler:
                    self._ready.clear()
                    await self._ready.wait()
                # steps of one message are submitted one after another, and belong in one pass
                await asyncio.sleep(0)
                await self._pass()
        finally:
            self._has_ended = True
            for sequence in self._running:
                if sequence.end_error is not None:
                    self.pages.release(sequence.page_table)
            self._running = frozenset()
            for sequence in list(self._sequences):
                self.end(sequence, _over())

    def keep_drafts(self, num_right: int) -> None:
        """Count drafts that were right: they are tokens like all others."""
        self.num_tokens += num_right
        self._on_drafts(num_right)

    async def _pass(self) -> None:
        loop = asyncio.get_running_loop()
        plan = self._scheduler.plan(self._cost.prefill_tokens(is_alone=len(self._sequences) <= 1))
        if not plan.parts:  # the steps were withdrawn
            return
        began_s = loop.time()
        pieces = [self._piece(step, num_tokens, began_s) for step, num_tokens in plan.parts]
        self._prefault.keep_ahead(self.pages.num_touched)
        self._running = frozenset(step.sequence for step, _ in plan.parts)
        computed, pass_ms = await self.in_thread(compute, self.span, self.pool, pieces, plan.parts[0][0].blocks)
        self._running = frozenset()
        self._deliver(plan, computed, pass_ms, (loop.time() - began_s) * 1000)

    def _piece(self, step: SequenceStep, num_tokens: int, now_s: float) -> BatchPiece:
        if step.begun_s is None:
            step.begun_s = now_s
        sequence = step.sequence
        self.pages.grow(sequence.page_table, -(-(sequence.length + num_tokens) // PAGE_TOKENS))
        is_last = num_tokens == step.num_tokens
        want = step.want if is_last or step.want is Want.ALL else Want.NOTHING
        pick = step.pick if is_last else None
        rows = SequenceRows(
            num_tokens=num_tokens,
            position=sequence.length,
            pages=sequence.page_table.pages,
            want=max(want, Want.ALL if pick.drafts else Want.LAST) if pick else want,
            num_drafts=step.num_drafts if is_last else 0,
        )
        return BatchPiece(x=step.x[step.num_run : step.num_run + num_tokens], rows=rows, want=want, pick=pick)

    def _deliver(
        self, plan: BatchPlan[SequenceStep], computed: Sequence[PieceResult], pass_ms: float | None, elapsed_ms: float
    ) -> None:
        self.num_passes += 1
        if pass_ms is not None:
            self._cost.measured(plan.num_prefill_tokens, pass_ms)
            if self.observed is not None:
                start, end = plan.parts[0][0].blocks
                self.observed.passed(plan.num_decode_rows, plan.num_prefill_tokens, end - start, pass_ms)
        for (step, num_tokens), result in zip(plan.parts, computed, strict=True):
            step.compute_ms += elapsed_ms if pass_ms is None else pass_ms
            self._apply(step, num_tokens, result, len(plan.parts))

    def _apply(self, step: SequenceStep, num_tokens: int, result: PieceResult, batch_size: int) -> None:
        sequence = step.sequence
        if sequence.end_error is not None:
            self._scheduler.remove(step)
            self.pages.release(sequence.page_table)
            return
        if result.error is not None:
            self._scheduler.remove(step)
            if sequence.blocks[0]:
                # the client's unchecked rows may be the cause, and earlier ones may have spoiled the cache, too
                self.pages.unregister(sequence.page_table)
            self.end(sequence, result.error)
            return
        if result.lacks_drafts:
            num_tokens -= step.num_drafts
            step.drop_drafts()
        sequence.advance(step, num_tokens, result)
        self.num_tokens += num_tokens
        if step.num_tokens:
            return
        self._scheduler.remove(step)
        self.num_tokens -= step.num_drafts
        done = _done(step, result, batch_size)
        self._on_step(step.num_run - step.num_drafts, done.compute_ms, done.queue_ms)
        if not step.future.done():
            step.future.set_result(done)


def _done(step: SequenceStep, last: PieceResult, batch_size: int) -> StepOutput:
    output = torch.cat(step.outputs) if len(step.outputs) > 1 else next(iter(step.outputs), None)
    return StepOutput(
        output=output,
        tokens=tuple(last.tokens),
        compute_ms=step.compute_ms,
        queue_ms=((step.begun_s or step.since_s) - step.since_s) * 1000,
        batch_size=batch_size,
        num_drafts=step.num_drafts,
    )


def cheap_drafts(num_sequences: int) -> int:
    """Return how many drafts each sequence of a pass may have; 0 or less: none."""
    return CHEAP_ROWS // num_sequences - 1


def _over() -> PeerRefused:
    return PeerRefused("the server has stopped computing", remedy="ask another server")
