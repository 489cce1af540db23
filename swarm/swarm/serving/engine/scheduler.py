"""Chooses the sequences whose rows the next pass computes.

Every pass takes all ready decodes, up to `max_batch`, and adds prompt tokens up to the budget of `StepCost`. So a
decode waits for at most one pass of bounded time, and prompts advance in each pass. If not everything fits, clients
take turns: decodes one by one, prompts by deficit round robin in tokens (Shreedhar and Varghese, 1995), so that many
sequences or long prompts give a client no advantage.

A pass runs one range of blocks. If sequences use different parts of a span, clients take turns to choose the range, and
every pass takes all rows that are ready on it.

Decisions only: no clock, no tasks, no tensors. The engine calls it in its loop, between steps.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from swarm.newest_items import NewestItems
from swarm.serving.model.batch import is_decode

QUANTUM_TOKENS = 256
"""Prompt tokens of a client's turn. Most questions fit in one turn, for which a long document waits only a few
steps."""

MAX_REMEMBERED = 1024
"""Clients whose last decode is remembered while they have none ready, as happens between two tokens."""


@dataclass(slots=True, eq=False, kw_only=True)
class SchedulableStep:
    """One step of a sequence: `num_tokens` are left to compute on `blocks` [start, end), the last `num_drafts` of which
    are guesses at the tokens after one."""

    client: str
    blocks: tuple[int, int]
    num_tokens: int
    num_drafts: int = 0
    turn: int = 0

    @property
    def is_decode(self) -> bool:
        return is_decode(self.num_tokens, self.num_drafts)


W = TypeVar("W", bound=SchedulableStep)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan(Generic[W]):
    """The next pass: steps with their number of tokens, each step at most once. Empty if there is none."""

    parts: tuple[tuple[W, int], ...]
    num_decodes: int = 0

    @property
    def num_decode_rows(self) -> int:
        return sum(num_tokens for _, num_tokens in self.parts[: self.num_decodes])

    @property
    def num_prefill_tokens(self) -> int:
        return sum(num_tokens for _, num_tokens in self.parts[self.num_decodes :])


@dataclass(slots=True, eq=False)
class _ClientQueue(Generic[W]):
    """The ready steps of one client. `led`: when it last chose the blocks. `deficit`: prompt tokens left in its
    turn."""

    led: int
    works: dict[W, None] = field(default_factory=dict)
    deficit: int = 0


class Scheduler(Generic[W]):
    """Holds the steps that are not done yet."""

    def __init__(self, *, max_batch: int) -> None:
        self._max_batch = max_batch
        # in the order of turns for prompt tokens
        self._clients: dict[str, _ClientQueue[W]] = {}
        self._turns = itertools.count(1)
        # ordered by the last decode of each client, the oldest first
        self._decoded = NewestItems[str, int](MAX_REMEMBERED)
        self._ran: dict[tuple[int, int], int] = {}

    def __bool__(self) -> bool:
        return bool(self._clients)

    def __len__(self) -> int:
        return sum(len(client.works) for client in self._clients.values())

    def add(self, work: W) -> None:
        """Add a ready step. A client that had none is the last in turn for prompt tokens."""
        work.turn = next(self._turns)
        if work.client not in self._clients:
            self._clients[work.client] = _ClientQueue(led=work.turn)
        self._clients[work.client].works[work] = None

    def remove(self, work: W) -> None:
        """Remove a step that is done or not wanted any more. A second call does nothing."""
        client = self._clients.get(work.client)
        if client is not None:
            client.works.pop(work, None)
            if not client.works:
                del self._clients[work.client]

    def plan(self, budget_tokens: int) -> BatchPlan[W]:
        """Choose the next pass, with at most `budget_tokens` prompt tokens (at least one). Steps stay until they are
        removed."""
        if not self._clients:
            return BatchPlan(parts=())
        blocks = self._next_blocks()
        ready = {name: [w for w in client.works if w.blocks == blocks] for name, client in self._clients.items()}
        decodes = self._next_decodes(ready)
        chunks = self._next_chunks(ready, budget_tokens)
        return BatchPlan(
            parts=(*((work, work.num_tokens) for work in decodes), *chunks.items()), num_decodes=len(decodes)
        )

    def _next_blocks(self) -> tuple[int, int]:
        """Return the least recently run range of the client whose turn it is to choose."""
        present = {work.blocks for client in self._clients.values() for work in client.works}
        if len(present) == 1:
            return present.pop()
        leader = min(self._clients.values(), key=lambda client: client.led)
        chosen = min((work.blocks for work in leader.works), key=lambda blocks: self._ran.get(blocks, 0))
        leader.led = next(self._turns)
        self._ran = {blocks: turn for blocks, turn in self._ran.items() if blocks in present} | {chosen: leader.led}
        return chosen

    def _next_decodes(self, ready: dict[str, list[W]]) -> list[W]:
        """Choose decodes client by client, from the least recently served client on."""
        queues = deque(
            (name, decodes)
            for name in sorted(ready, key=lambda name: self._decoded.get(name, 0))
            if (decodes := _in_turn(work for work in ready[name] if work.is_decode))
        )
        chosen: list[W] = []
        while queues and len(chosen) < self._max_batch:
            name, decodes = queues.popleft()
            chosen.append(decodes.popleft())
            self._decoded[name] = next(self._turns)
            if decodes:
                queues.append((name, decodes))
        return chosen

    def _next_chunks(self, ready: dict[str, list[W]], budget_tokens: int) -> dict[W, int]:
        """Choose prompt tokens by deficit round robin. A client that has not used up its turn continues it in the next
        pass."""
        chunks: dict[W, int] = {}
        queues = deque(
            (name, prefills)
            for name, works in ready.items()
            if (prefills := _in_turn(work for work in works if not work.is_decode))
        )
        while queues and budget_tokens > 0:
            name, prefills = queues[0]
            client, work = self._clients[name], prefills[0]
            client.deficit = client.deficit or QUANTUM_TOKENS
            num_tokens = min(budget_tokens, client.deficit, work.num_tokens - chunks.get(work, 0))
            chunks[work] = chunks.get(work, 0) + num_tokens
            budget_tokens -= num_tokens
            client.deficit -= num_tokens
            if chunks[work] == work.num_tokens:
                prefills.popleft()
            elif not client.deficit:
                work.turn = next(self._turns)
                prefills.rotate(-1)
            if not prefills:
                client.deficit = 0
            if not client.deficit:
                queues.popleft()
                self._clients[name] = self._clients.pop(name)
                if prefills:
                    queues.append((name, prefills))
        return chunks


def _in_turn(works: Iterable[W]) -> deque[W]:
    return deque(sorted(works, key=lambda work: work.turn))
