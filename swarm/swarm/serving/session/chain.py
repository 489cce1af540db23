"""The chain that a session's rows go through: who has run what, who is fed next, and who pushes to whom.

Hops lie side by side, each fed the rows of the ledger at its first block. Whoever is behind is fed: at first the first
hop alone, for servers push their outputs on and send the client a copy; and after any trouble whichever hop lacks what
the ledger before it has. Servers drop rows that they have run already, so feeding twice is harmless, and this one rule
is prefill, decode, replay and the way around a broken link.

Pure; a part of `course`, which puts hops in and takes them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from swarm_protocol.errors import PeerViolation

from swarm.serving.model.batch import PAGE_TOKENS
from swarm.serving.session.actions import Action, Answer, Feed, Relink
from swarm.serving.session.hop import Hop, Neighbours, Ran
from swarm.serving.session.ledger import Ledger

WINDOW_CHUNKS = 4
"""Chunks of a prompt under way at once: enough for every hop of a usual chain to have work, and little to repeat."""

RELINK_S = 10.0
"""A link between two servers that failed is left alone for as long, and for twice that the next time."""

MAX_RELINK_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`max_step_tokens` rows in a step, and `max_output_tokens` if the outputs of all of them are wanted."""

    max_step_tokens: int = 512
    max_output_tokens: int = 512


class Chain:
    """Over blocks `[0, num_blocks)`, with gaps while servers are missing. `new_ledger(block)`: a boundary's ledger.

    What is to be done is appended to `actions`. `coming` are hops that are being opened in gaps.
    """

    def __init__(
        self, num_blocks: int, new_ledger: Callable[[int], Ledger], limits: Limits, actions: list[Action]
    ) -> None:
        self.hops: list[Hop] = []
        self.ledgers = {0: new_ledger(0)}
        self.coming: list[Hop] = []
        self.num_blocks = num_blocks
        self._new_ledger = new_ledger
        self._limits = limits
        self._actions = actions
        self._want = "nothing"
        self._answered = 0
        self._asked_s = 0.0
        self._chunk = limits.max_step_tokens
        self._links_changed = False
        self._relink_s = math.inf

    @property
    def length(self) -> int:
        """Tokens that were asked about so far."""
        return self.ledgers[0].length

    @property
    def is_asked(self) -> bool:
        return self._answered < self.length

    def ask(self, rows: bytes, want: str, now_s: float) -> None:
        assert not self.is_asked, "one question at a time"
        self._answered = self.length
        self._asked_s = now_s
        self.ledgers[0].append(rows)
        if want != "all":
            self._answered = self.length - 1
        self._want = want
        if now_s >= self._relink_s:
            self._links_changed, self._relink_s = True, math.inf

    def take(self, hop: Hop, ran: Ran, now_s: float) -> None:
        """What a server has run. Raises PeerViolation if that cannot be."""
        if not hop.done <= ran.position <= self.length:
            raise PeerViolation(f"the server ran {ran.position} positions, of {self.length} after {hop.done}")
        if hop.end == self.num_blocks:
            if ran.position == self.length == hop.done + 1:
                self._note_times(ran, (now_s - self._asked_s) * 1000)
            self._answer(ran)
        else:
            _copy(self.ledgers[hop.end], ran)
        hop.progress(ran, now_s)
        lower = next((lower for lower in self.hops if lower.start == hop.end), None)
        if lower is not None and _are_linked(hop, lower) and lower.given >= ran.position:
            if not ran.push_failed:
                lower.learn(ran.position, now_s)
            elif ran.position > max(lower.done, lower.fed):
                self._unlink(hop, lower, now_s)

    def needed(self, hop: Hop) -> int:
        """From which position on the hop's outputs are not known yet."""
        return self._answered if hop.end == self.num_blocks else self.ledgers[hop.end].length

    def _note_times(self, ran: Ran, took_ms: float) -> None:
        """Of a single token, which took `took_ms` through all hops."""
        before = self.hops[: len(self.hops) - 1]
        for hop, (compute_ms, queue_ms) in zip(reversed(before), reversed(ran.upstream_ms), strict=False):
            hop.trace.step(compute_ms, queue_ms)
        if len(ran.upstream_ms) == len(before):
            # nobody can tell which link it was
            wire_ms = took_ms - ran.compute_ms - ran.queue_ms - sum(map(sum, ran.upstream_ms))
            for hop in self.hops:
                hop.trace.wire_ms += max(0.0, wire_ms) / len(self.hops)

    def _answer(self, ran: Ran) -> None:
        if ran.position <= self._answered:
            return
        first = ran.position - ran.num_outputs
        if not ran.num_outputs or first > self._answered:
            raise PeerViolation("the server left out what was asked for")
        skip = self._answered - first
        self._answered = ran.position
        self._actions.append(Answer(skip, is_last=not self.is_asked))

    # --- feeding ----------------------------------------------------------------------------------------------------

    def feed(self, now_s: float, held: Collection[Hop]) -> None:
        """Whoever is behind, but those in `held`, and nothing that would reach them."""
        if self._links_changed:
            self._relink(now_s)
        for index, hop in enumerate(self.hops):
            if hop.given < self.ledgers[hop.start].length:
                self._feed(index, now_s, held)

    def _feed(self, index: int, now_s: float, held_hops: Collection[Hop]) -> None:
        hop = self.hops[index]
        held, is_last = self.ledgers[hop.start].length, hop.end == self.num_blocks
        while hop.given < held:
            start, needed = hop.given, self.needed(hop)
            slowest = min(following.done for following in self.hops[index:])
            forward = start >= needed and not is_last
            if start >= slowest + WINDOW_CHUNKS * self._chunk or self._is_held(index, held_hops, forward=forward):
                return
            end = min(held, start + self._chunk)
            if start < needed and (not is_last or self._want == "all"):
                end = min(end, needed)
            want = self._want_until(end)
            if want == "all":
                end = min(end, start + self._limits.max_output_tokens)
            self._actions.append(Feed(hop, start, end, want, forward))
            hop.given = hop.fed = end
            hop.learn(end, now_s)
            if forward:
                self._expect_pushes(index, start, end)

    def _want_until(self, end: int) -> str:
        is_wanted = end > self._answered if self._want == "all" else self.is_asked and end == self.length
        return self._want if is_wanted else "nothing"

    def _expect_pushes(self, index: int, start: int, end: int) -> None:
        """Rows that the hop at `index` is to compute and push will reach those after it, if all are in step."""
        for upper, lower in zip(self.hops[index:], self.hops[index + 1 :], strict=False):
            # a lower one that is still being fed directly may not have got to `start` when the push comes
            if not _are_linked(upper, lower) or lower.given < start or lower.fed > lower.done:
                return
            start = max(start, lower.given)
            if start >= end:
                return
            lower.given = end

    def _is_held(self, index: int, held: Collection[Hop], *, forward: bool) -> bool:
        return any(hop in held for hop in (self.hops[index:] if forward else self.hops[index : index + 1]))

    # --- who pushes to whom -----------------------------------------------------------------------------------------

    def _relink(self, now_s: float) -> None:
        self._links_changed = False
        for hop in self.hops:
            told = self.neighbours(hop, now_s, self.hops)
            if told != hop.told:
                hop.told = told
                self._actions.append(Relink(hop))

    def neighbours(self, hop: Hop, now_s: float, ready: Sequence[Hop]) -> Neighbours:
        """One of those that are `ready` to push to, and whose pushes may come, soon or now."""
        lower = next((other for other in ready if other.start == hop.end and now_s >= hop.unlinked_until_s), None)
        return Neighbours(
            next_peer_id=lower.peer_id if lower else "",
            next_seat_id=lower.seat_id if lower else b"",
            previous_peer_id=next(
                (other.peer_id for other in (*self.hops, *self.coming) if other.end == hop.start), ""
            ),
        )

    def _unlink(self, upper: Hop, lower: Hop, now_s: float) -> None:
        """Feed the lower one directly, and do so for a while."""
        upper.unlinked_until_s = now_s + min(MAX_RELINK_S, RELINK_S * 2**upper.num_unlinked)
        upper.num_unlinked += 1
        self._links_changed = True
        self._relink_s = min(self._relink_s, upper.unlinked_until_s)
        lower.distrust()

    def nudge(self, hop: Hop, now_s: float) -> None:
        """It should have answered: perhaps what was pushed to it got lost."""
        hop.nudge_s = math.inf
        upper = next((upper for upper in self.hops if upper.end == hop.start), None)
        if upper is not None and hop.given > max(hop.fed, hop.done):
            self._unlink(upper, hop, now_s)

    # --- hops that come and go --------------------------------------------------------------------------------------

    def expect(self, coming: Sequence[Hop]) -> None:
        """Hops that are being opened: those after them have to know from whom pushes will come before these do."""
        self.coming = list(coming)
        self._links_changed = True

    def prepare(self, fresh: Sequence[Hop]) -> None:
        """Ledgers for boundaries that are new with these hops."""
        for hop in fresh[1:]:
            if hop.start not in self.ledgers:
                self.ledgers[hop.start] = self._new_ledger(hop.start)

    def join(self, fresh: Sequence[Hop], other_starts: Collection[int]) -> None:
        """Put hops into a gap. Ledgers are kept where a span begins, and at `other_starts`."""
        self.hops = sorted([*self.hops, *fresh], key=lambda hop: hop.start)
        for hop in fresh:
            position = min(hop.length, self.ledgers[hop.start].length, self.needed(hop))
            # what a seat shares with others it can give up only by whole pages
            hop.begin(position if position == hop.length else position // PAGE_TOKENS * PAGE_TOKENS)
        for block in self.ledgers.keys() - {hop.start for hop in self.hops} - set(other_starts):
            del self.ledgers[block]
        self._chunk = min(self._limits.max_step_tokens, *(hop.max_step_tokens for hop in self.hops))
        self._links_changed = True

    def remove(self, hop: Hop) -> None:
        """What it was to push to the next one may not come any more."""
        self.hops.remove(hop)
        self._links_changed = True
        for lower in self.hops:
            if lower.start == hop.end:
                lower.distrust()


def _copy(ledger: Ledger, ran: Ran) -> None:
    if ran.position <= ledger.length:
        return
    first = ran.position - len(ran.rows) // ledger.row_bytes
    if first > ledger.length:
        raise PeerViolation("the server left out what was asked for")
    ledger.append(ran.rows[(ledger.length - first) * ledger.row_bytes :])


def _are_linked(upper: Hop, lower: Hop) -> bool:
    return upper.told.next_seat_id == lower.seat_id
