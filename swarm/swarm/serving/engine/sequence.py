"""One session's sequence on one server: the pages reserved for it, which may become more, and the one step that it may
have running.

`page_allocator` allocates the pages, `scheduler` orders the steps, and `compute` runs them. Used in the engine's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swarm_protocol.errors import IntegrityError, PeerRefused, PeerViolation, SessionError, SwarmError
from swarm_protocol.session_frames import SampledToken
from torch import Tensor

from swarm.serving.engine.compute import PieceResult
from swarm.serving.engine.page_allocator import PageInputs, PageNames, PageTable
from swarm.serving.engine.scheduler import SchedulableStep
from swarm.serving.model.batch import Want
from swarm.serving.model.kv_pool import PAGE_TOKENS, KVPool
from swarm.serving.peer_shares import RETRY_AFTER_S, Sharer
from swarm.serving.sampling.sampling import Pick

if TYPE_CHECKING:
    from swarm.serving.engine.engine import Engine

EXPORT_BYTES = 2**20
"""Bytes of a cache that are read at once, between two steps of other sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The wanted `output` (float32 on the CPU), and the picked `tokens`, if any: drafts that were right, and one more.
    `num_drafts` rows are drafts: all of the step's, or none if the model could not compute them.

    `queue_ms` is the time until its first rows ran, `compute_ms` the time of all passes with its rows, `batch_size`
    that of the last.
    """

    output: Tensor | None
    tokens: tuple[SampledToken, ...]
    compute_ms: float
    queue_ms: float
    batch_size: int
    num_drafts: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceStep(SchedulableStep):
    """The step that a sequence waits for. `since_s` and `begun_s` are times of the loop's clock. `tokens` are the token
    ids in `x`, if any."""

    sequence: EngineSequence
    x: Tensor
    tokens: Sequence[int]
    want: Want
    pick: Pick | None
    since_s: float
    future: asyncio.Future[StepOutput]
    begun_s: float | None = None
    num_run: int = 0
    compute_ms: float = 0.0
    outputs: list[Tensor] = field(default_factory=list)

    def drop_drafts(self) -> None:
        """Leave out the drafts, which could not be computed."""
        self.num_tokens, self.num_drafts = self.num_tokens - self.num_drafts, 0


class EngineSequence:
    """Holds `length` positions, at most `max_tokens`; the last `num_drafts` are guesses, which the next step may
    replace. `num_queued` steps wait or run, as its session says. Once `end_error` is set, every call raises that error.

    `on_ended`, if set, is called when the sequence is ended without `close`: by eviction, a failure, or the engine's
    end. `inputs_of` returns the inputs of a page that has just become full, or None if they are not known.
    """

    def __init__(
        self,
        engine: Engine,
        sharer: Sharer,
        blocks: tuple[int, int],
        max_tokens: int,
        page_table: PageTable,
        names: PageNames,
    ) -> None:
        self.sharer = sharer
        self.blocks = blocks
        self.max_tokens = max_tokens
        self.page_table = page_table
        self.length = len(page_table.pages) * PAGE_TOKENS
        self.since_s = self.idle_since_s = asyncio.get_running_loop().time()
        self.end_error: SwarmError | None = None
        self.on_ended: Callable[[SwarmError], None] | None = None
        self.inputs_of: Callable[[int], PageInputs | None] = lambda _index: None
        self.num_drafts = self.num_queued = 0
        self._engine = engine
        self._names = names
        self._unnamed: list[int] = []  # tokens of the last positions, of which no page was named yet
        self._names.begin(len(page_table.pages))
        self._step: SequenceStep | None = None
        self._num_moving = 0

    @property
    def num_pages(self) -> int:
        return self.page_table.num_pages

    @property
    def firm_length(self) -> int:
        """The number of positions that are no drafts."""
        return self.length - self.num_drafts

    @property
    def shared_inputs(self) -> list[PageInputs | None]:
        """The inputs of the pages that the sequence shares with others; None for each page whose inputs are not
        known."""
        return self._engine.pages.inputs_of(self.page_table)

    @property
    def is_idle(self) -> bool:
        return self._step is None and not self._num_moving

    def room_for_drafts(self, position: int) -> int:
        """Return how many drafts may follow the positions before `position`."""
        return max(0, self._engine.room_for_drafts(self, position))

    def settle(self, position: int) -> None:
        """Keep the drafts before `position`, and forget the others. Raises PeerViolation if `position` is not among
        them or directly after them."""
        self._check_open()
        if not self.firm_length <= position <= self.length:
            raise PeerViolation(
                f"rows from position {position} on, and the session holds {self.length}, with {self.num_drafts} drafts"
            )
        self._engine.keep_drafts(position - self.firm_length)
        num_forgotten, self.length, self.num_drafts = self.length - position, position, 0
        self._name_pages(self._unnamed[: len(self._unnamed) - num_forgotten])
        self._unnamed = []

    def _name_pages(self, tokens: Sequence[int]) -> None:
        for index, name in self._names.filled(tokens, self.firm_length):
            self._engine.pages.register(self.page_table, index, name, self.inputs_of(index))

    async def step(self, x: Tensor, want: Want, pick: Pick | None = None, *, num_drafts: int = 0) -> StepOutput:
        """Append the rows of `x` (int64 token ids [T] at block 0, else float [T, H]), and return the wanted outputs.

        `want` selects the outputs: hidden states [T, H] or [1, H], or after the last block logits [T, V] or [1, V].
        With `pick`, the next token is picked as well. The last `num_drafts` rows, those of the drafts of `pick`, are
        guesses: `settle` says which were right. Only one step may run at a time. Cancellation removes the step from
        the queue. If some of its rows have run, it also closes the sequence, whose content is then unknown. The caller
        has checked that the rows fit the blocks and `max_tokens`.

        Raises PeerRefused if the sequence must grow for the rows and there is no room, SessionError if they cannot be
        computed, or the error that ended the sequence.
        """
        self._check_open()
        assert self.is_idle, "a sequence does one thing at a time"
        assert self.length + len(x) <= self.max_tokens, "rows beyond the room that the client asked for"
        self._engine.extend(self, -(-(self.length + x.shape[0]) // PAGE_TOKENS))
        loop = asyncio.get_running_loop()
        step = SequenceStep(
            sharer=self.sharer,
            blocks=self.blocks,
            num_tokens=x.shape[0],
            num_drafts=num_drafts,
            sequence=self,
            x=x,
            tokens=() if self.blocks[0] else x.tolist(),
            want=want,
            pick=pick,
            since_s=loop.time(),
            future=loop.create_future(),
        )
        self._step = step
        self._engine.submit(step)
        try:
            return await step.future
        except asyncio.CancelledError:
            self._engine.withdraw(step)
            if step.begun_s is not None:
                self.close()
            raise
        finally:
            self._step = None
            self.idle_since_s = loop.time()
            if step.future.done() and not step.future.cancelled():
                step.future.exception()  # marks the exception as retrieved, also after a cancellation

    def advance(self, step: SequenceStep, num_tokens: int, computed: PieceResult) -> None:
        """Record that `num_tokens` more of the step's rows are in the cache. Called by the engine."""
        tokens = step.tokens[step.num_run : step.num_run + num_tokens]
        self.length += num_tokens
        step.num_run += num_tokens
        step.num_tokens -= num_tokens
        if computed.output is not None:
            step.outputs.append(computed.output)
        if step.num_drafts:
            self.num_drafts, self._unnamed = step.num_drafts, list(tokens)[-step.num_drafts :]
            tokens = tokens[: -step.num_drafts]
        self._name_pages(tokens)

    def end(self, error: SwarmError) -> None:
        """End with `error`, and fail the unfinished step. Called by the engine, which frees the pages."""
        self.end_error = error
        if self._step is not None:
            self._engine.withdraw(self._step)
        if self._step is not None and not self._step.future.done():
            self._step.future.set_exception(error)
        elif self.on_ended is not None:
            self.on_ended(error)

    def close(self) -> None:
        """Free the pages now, or at the end of a running step. A second call does nothing."""
        if self.end_error is None:
            self.on_ended = None
            self._engine.end(self, SessionError("the session is closed"))

    def evict(self, *, lacks_room: bool = True) -> None:
        """End the sequence, since others need its pages, or without `lacks_room` the place of its grammar."""
        why = "the session was idle or old, and others needed its room"
        error = PeerRefused(why, remedy="open it again", retry_after_s=RETRY_AFTER_S, lacks_room=lacks_room)
        self._engine.end(self, error)

    async def export(self, start: int, end: int) -> AsyncGenerator[bytes, None]:
        """Yield the cache of blocks [start, end), for `adopt` on a server of these blocks: the layout, then pieces of
        whole pages.

        Raises PeerViolation for blocks that the sequence does not have.
        """
        self._check_open()
        if not self.blocks[0] <= start < end <= self.blocks[1]:
            raise PeerViolation(f"the session is on blocks {list(self.blocks)}, not [{start}, {end}]")
        num_pages = -(-self.firm_length // PAGE_TOKENS)
        self._num_moving += 1
        try:
            if self.length < num_pages * PAGE_TOKENS:
                await self._engine.in_thread(
                    _blank, self._engine.pool, self.page_table.pages[num_pages - 1], self.length
                )
            pages_at_once = max(1, EXPORT_BYTES // self._page_bytes)
            blocks = start - self._engine.span.start, end - self._engine.span.start
            yield self._engine.pool.layout(*blocks)
            for first in range(0, num_pages, pages_at_once):
                self._check_open()
                pages = self.page_table.pages[first : min(first + pages_at_once, num_pages)]
                yield await self._engine.in_thread(self._engine.pool.read, pages, *blocks)
        finally:
            self._num_moving -= 1
            self.idle_since_s = asyncio.get_running_loop().time()

    async def adopt(self, length: int, pieces: AsyncIterable[bytes]) -> None:
        """Take over `length` positions that another server exported. Only before the first step.

        Raises PeerViolation for an impossible length, PeerRefused without room for it, IntegrityError for content that
        is damaged, of another size or of another layout. The sequence is then empty again. Adopted pages are not shared
        with other sequences.
        """
        if not 0 <= length <= self.max_tokens:
            raise PeerViolation(f"{length} positions of a session of at most {self.max_tokens}")
        self._check_open()
        assert not self.length, "a sequence that has content takes over no other"
        self._names.stop()
        num_pages = -(-length // PAGE_TOKENS)
        self._engine.extend(self, num_pages)
        self._engine.pages.grow(self.page_table, num_pages)
        self._num_moving += 1
        try:
            await self._write_all(pieces, num_pages)
        except BaseException:
            if self.end_error is None:
                self._engine.pages.empty(self.page_table)
            raise
        finally:
            self._num_moving -= 1
            self.idle_since_s = asyncio.get_running_loop().time()
        self.length = length

    async def _write_all(self, pieces: AsyncIterable[bytes], num_pages: int) -> None:
        num_written, pieces = 0, aiter(pieces)
        if await anext(pieces, b"") != self._engine.pool.layout(*self._blocks_in_pool):
            raise IntegrityError("the cache has a different layout", remedy="run the session again")
        async for piece in pieces:
            self._check_open()
            if not piece:  # else there could be any number of pieces, and each takes a turn in the thread
                raise IntegrityError("received an empty piece of a cache")
            num_new = len(piece) // self._page_bytes
            # fewer than `num_new` if the session has no more, which the pool refuses
            pages = self.page_table.pages[num_written : num_written + num_new]
            await self._engine.in_thread(self._engine.pool.write, pages, *self._blocks_in_pool, piece)
            num_written += num_new
        self._check_open()
        if num_written != num_pages:
            raise IntegrityError(f"received {num_written} of {num_pages} cache pages")

    @property
    def _blocks_in_pool(self) -> tuple[int, int]:
        first = self._engine.span.start
        return self.blocks[0] - first, self.blocks[1] - first

    @property
    def _page_bytes(self) -> int:
        return self._engine.pool.bytes_of_page(*self._blocks_in_pool)

    def _check_open(self) -> None:
        if self.end_error is not None:
            raise self.end_error


def _blank(pool: KVPool, page: int, length: int) -> None:
    """Clear the unused positions of the last page, which may have data of an earlier sequence."""
    end = (page + 1) * PAGE_TOKENS
    for tensor_SKD in (*pool.keys_SKD, *pool.values_SKD):
        tensor_SKD[end - PAGE_TOKENS + length % PAGE_TOKENS : end] = 0
