"""Chooses the sequences whose rows the next pass computes.

Every pass takes all ready decodes, in the order in which they came, up to `max_batch`, and adds prompt tokens up to the
budget of `StepCost`. So a decode waits for at most one pass of bounded time, and prompts advance in each pass. If not
all prompts fit, the providers' networks take turns, in each network its peers, and for each peer its steps, by deficit
round robin in tokens (Shreedhar and Varghese, 1995). So many keys, many sequences or long prompts give nobody an
advantage.

A pass runs one range of blocks. If sequences use different parts of a span, networks, and in each its peers, take turns
to choose the range, and every pass takes all rows that are ready on it.

Decisions only: no clock, no tasks, no tensors. The engine calls it in its loop, between steps.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from swarm.serving.model.batch import is_decode
from swarm.serving.peer_shares import Sharer

QUANTUM_TOKENS = 256
"""Prompt tokens of a turn. Most questions fit in one turn, for which a long document waits only a few steps."""


@dataclass(slots=True, eq=False, kw_only=True)
class SchedulableStep:
    """One step of a sequence: `num_tokens` are left to compute on `blocks` [start, end), the last `num_drafts` of which
    are guesses at the tokens after one. `left` prompt tokens are left in its turn."""

    sharer: Sharer
    blocks: tuple[int, int]
    num_tokens: int
    num_drafts: int = 0
    left: int = QUANTUM_TOKENS

    @property
    def is_decode(self) -> bool:
        return is_decode(self.num_tokens, self.num_drafts)

    def take(self, num_tokens: int, blocks: tuple[int, int], chunks: dict[Any, int]) -> int:
        """Do as `_Turns.take`, for this step alone."""
        if self.is_decode or self.blocks != blocks:
            return 0
        num_before = chunks.get(self, 0)
        chunks[self] = min(num_before + num_tokens, self.num_tokens)
        return chunks[self] - num_before


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


class _Member(Protocol):
    left: int

    def take(self, num_tokens: int, blocks: tuple[int, int], chunks: dict[Any, int]) -> int: ...


M = TypeVar("M", bound=_Member)


@dataclass(slots=True, eq=False)
class _Turns(Generic[M]):
    """The networks that have steps, the peers of one of them, or the steps of one peer: `members`, in the order of
    their turns for prompt tokens. A network or peer has `left` prompt tokens in its own turn, and last chose the blocks
    at `led`."""

    led: int
    left: int = QUANTUM_TOKENS
    members: dict[Hashable, M] = field(default_factory=dict)

    def take(self, num_tokens: int, blocks: tuple[int, int], chunks: dict[Any, int]) -> int:
        """Add up to `num_tokens` prompt tokens of the steps on `blocks` to `chunks`, and return how many. A member that
        has not used up its turn continues it the next time."""
        num_taken, waiting = 0, deque(self.members)
        while waiting and num_taken < num_tokens:
            name = waiting.popleft()
            member = self.members[name]
            wanted = min(num_tokens - num_taken, member.left)
            found = member.take(wanted, blocks, chunks)
            num_taken += found
            member.left -= found
            if found == wanted:  # it may have more
                waiting.append(name)
            if not member.left or 0 < found < wanted:
                member.left = QUANTUM_TOKENS
                self.members[name] = self.members.pop(name)
        return num_taken


class Scheduler(Generic[W]):
    """Holds the steps that are not done yet."""

    def __init__(self, *, max_batch: int) -> None:
        self._max_batch = max_batch
        self._steps: dict[W, None] = {}  # in the order in which they came
        self._networks = _Turns[_Turns[_Turns[W]]](0)
        self._leads = itertools.count(1)
        self._ran: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: W) -> None:
        """Add a ready step. A network or peer that had none is the last in turn."""
        self._steps[step] = None
        network = self._networks.members.setdefault(step.sharer.network, _Turns(next(self._leads)))
        network.members.setdefault(step.sharer.peer_id, _Turns(next(self._leads))).members[step] = step

    def remove(self, step: W) -> None:
        """Remove a step that is done or not wanted any more. A second call does nothing."""
        if step not in self._steps:
            return
        del self._steps[step]
        network = self._networks.members[step.sharer.network]
        peer = network.members[step.sharer.peer_id]
        del peer.members[step]
        if not peer.members:
            del network.members[step.sharer.peer_id]
        if not network.members:
            del self._networks.members[step.sharer.network]

    def plan(self, budget_tokens: int) -> BatchPlan[W]:
        """Choose the next pass, with at most `budget_tokens` prompt tokens (at least one). Steps stay until they are
        removed."""
        if not self._steps:
            return BatchPlan(parts=())
        blocks, chunks = self._next_blocks(), dict[W, int]()
        decodes = [step for step in self._steps if step.is_decode and step.blocks == blocks][: self._max_batch]
        self._networks.take(budget_tokens, blocks, chunks)
        return BatchPlan(
            parts=(*((step, step.num_tokens) for step in decodes), *chunks.items()), num_decodes=len(decodes)
        )

    def _next_blocks(self) -> tuple[int, int]:
        """Return the least recently run range of the peer whose turn it is to choose."""
        present = {step.blocks for step in self._steps}
        if len(present) == 1:
            return present.pop()
        network = min(self._networks.members.values(), key=lambda network: network.led)
        leader = min(network.members.values(), key=lambda peer: peer.led)
        chosen = min((step.blocks for step in leader.members.values()), key=lambda blocks: self._ran.get(blocks, 0))
        network.led = leader.led = next(self._leads)
        self._ran = {blocks: led for blocks, led in self._ran.items() if blocks in present} | {chosen: leader.led}
        return chosen
