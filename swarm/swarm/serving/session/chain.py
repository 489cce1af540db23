"""The chain that a session's rows go through: who has run what, who is fed next, and who pushes to whom.

Hops lie side by side, each fed the rows of the ledger at its first block. Whoever is behind is fed: at first the first
hop alone, for servers push their outputs on and send the client a copy; and after any trouble whichever hop lacks what
the ledger before it has. Servers drop rows that they have run already, so feeding twice is harmless, and this one rule
is prefill, decode, replay and the way around a broken link.

Where more tokens may be drawn than the one that was asked for, the chain is closed to a ring: the last server pushes
what it drew to the first one, and tells the client. Servers then run ahead of what the client knows. What they say of
that is kept until it does, so that everything else is decided as if the client had asked. A token that died with the
last server, another may draw otherwise: nobody is given one in its place before all have said that they never got it.

Pure; a part of `course`, which puts hops in and takes them out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from swarm_protocol.errors import PeerViolation
from swarm_protocol.limits import PAGE_TOKENS

from swarm.serving.session.actions import Action, Answer, Feed, Relink
from swarm.serving.session.hop import Hop, Neighbours, Ran
from swarm.serving.session.replay_buffer import Ledger

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

    What is to be done is appended to `actions`. `coming` are hops that are being opened in gaps. `ahead` tokens may
    still be drawn without being asked for. `doubted` hops may have been given one that the client will never hear of,
    and say so until `doubt_by_s`. `is_tainted`: one of them has been.
    """

    def __init__(
        self, num_blocks: int, new_ledger: Callable[[int], Ledger], limits: Limits, actions: list[Action]
    ) -> None:
        self.hops: list[Hop] = []
        self.ledgers = {0: new_ledger(0)}
        self.coming: list[Hop] = []
        self.num_blocks = num_blocks
        self.ahead = 0
        self.is_tainted = False
        self.doubted: set[Hop] = set()
        self.doubt_by_s = math.inf
        self._new_ledger = new_ledger
        self._limits = limits
        self._actions = actions
        self._want = "nothing"
        self._answered = 0
        self._num_drawn = 0
        self._is_ring = False
        self._has_looped = False
        self._may_draw = False
        self._doubt_from = 0
        self._asked_s = 0.0
        self._chunk = limits.max_step_tokens
        self._links_changed = False
        self._relink_s = math.inf
        self._is_timed = False  # a single token is under way, through hops that have not changed since it was asked for

    @property
    def length(self) -> int:
        """Tokens that were asked about so far."""
        return self.ledgers[0].length

    @property
    def is_asked(self) -> bool:
        return self._answered < self.length

    def ask(self, rows: bytes, want: str, ahead: int, now_s: float) -> None:
        assert not self.is_asked, "one question at a time"
        assert want == "token" or not ahead
        self._answered = self.length
        self._num_drawn, self.ahead, self._may_draw = 0, ahead, False
        if self._is_ring != (ahead > 0):
            self._is_ring, self._links_changed = ahead > 0, True
        self._asked_s = now_s
        self.ledgers[0].append(rows)
        self._is_timed = self.length == self._answered + 1
        if want != "all":
            self._answered = self.length - 1
        self._want = want
        self._retry_links(now_s)

    def follow(self, row: bytes, now_s: float) -> None:
        """The token that was drawn is the next input. Its server may have seen to that itself."""
        assert self.ahead > 0
        assert not self.is_asked
        start = self.length
        self.ledgers[0].append(row)
        self.ahead -= 1
        self._num_drawn += 1
        self._asked_s, self._is_timed = now_s, True
        if self._has_looped:
            first, last = self.hops[0], self.hops[-1]
            self._expect_pushes([last, *self.hops], start, self.length)
            if first.given == self.length:
                first.learn(self.length, now_s)
        self._retry_links(now_s)
        for hop in list(self.hops):
            self._take_early(hop, now_s)

    def take(self, hop: Hop, ran: Ran, now_s: float) -> None:
        """What a server has run. Raises PeerViolation if that cannot be."""
        is_last = hop.end == self.num_blocks
        if self._check_untainted(ran.position):
            return
        if not hop.reported <= ran.position <= self.length + (0 if is_last else self.ahead):
            raise PeerViolation(f"the server ran {ran.position} positions, of {self.length} after {hop.reported}")
        if is_last:
            if self._is_timed and ran.position == self.length == hop.done + 1:
                self._note_times(ran, (now_s - self._asked_s) * 1000)
            self._answer(ran)
            self._progress(hop, ran, now_s)
            return
        ledger = self.ledgers[hop.end]
        known = max(ledger.length, hop.reported)
        first = ran.position - len(ran.rows) // ledger.row_bytes
        if ran.position > ledger.length and first > known:
            raise PeerViolation("the server left out what was asked for")
        if ran.position > self.length:
            # what is kept takes no more memory than the session, nor that of the message
            ran = replace(ran, rows=bytes(ran.rows[max(0, known - first) * ledger.row_bytes :]))
        if hop.early and ran.position == hop.reported:
            # nothing new but that, however often it is told
            hop.early[-1] = replace(hop.early[-1], push_failed=hop.early[-1].push_failed or ran.push_failed)
            return
        hop.early.append(ran)
        self._take_early(hop, now_s)

    def _take_early(self, hop: Hop, now_s: float) -> None:
        """As far as the client knows the tokens."""
        while hop.early:
            ran = hop.early[0]
            if ran.position > self.length:
                if hop.done >= self.length:
                    return
                ran, hop.early[0] = ran.cut(self.length, self.ledgers[hop.end].row_bytes)
            else:
                hop.early.popleft()
            _copy(self.ledgers[hop.end], ran)
            self._progress(hop, ran, now_s)

    def _progress(self, hop: Hop, ran: Ran, now_s: float) -> None:
        hop.progress(ran, now_s)
        lower, is_last = self._lower(hop, self.hops), hop.end == self.num_blocks
        is_linked = lower is not None and _are_linked(hop, lower) and ran.num_links == hop.num_links
        if is_last:
            self._has_looped = ran.looped and is_linked
            if lower is not None and is_linked and ran.push_failed:
                self._unlink(hop, lower, now_s)
                return
        # after its last row the first hop gets the token that comes of it
        reach = ran.position + is_last
        if lower is None or lower.given < reach:
            return
        if is_linked and not ran.push_failed:
            if not is_last:
                lower.learn(reach, now_s)
        elif reach > max(lower.done, lower.fed):
            if is_linked:
                self._unlink(hop, lower, now_s)
            else:
                lower.distrust()  # it went where the hop was linked to before

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
        self._actions.append(Answer(skip, is_last=not self.is_asked, goes_on=not self.is_asked and self.ahead > 0))

    # --- feeding ----------------------------------------------------------------------------------------------------

    def feed(self, now_s: float) -> None:
        """Whoever is behind."""
        if self._links_changed:
            self._relink(now_s)
        for index, hop in enumerate(self.hops):
            if hop.given < self.ledgers[hop.start].length:
                self._feed(index, now_s)

    def _feed(self, index: int, now_s: float) -> None:
        hop = self.hops[index]
        held, is_last = self.ledgers[hop.start].length, hop.end == self.num_blocks
        if self.doubted and hop.start == 0:
            held = min(held, self._doubt_from)
        while hop.given < held:
            start, needed = hop.given, self.needed(hop)
            slowest = min(following.done for following in self.hops[index:])
            forward = start >= needed and not is_last
            if start >= slowest + WINDOW_CHUNKS * self._chunk:
                return
            end = min(held, start + self._chunk)
            if start < needed and (not is_last or self._want == "all"):
                end = min(end, needed)
            want = self._want_until(end) if forward or is_last else "nothing"
            if want == "all":
                end = min(end, start + self._limits.max_output_tokens)
            ahead = self.ahead if want == "token" else 0
            self._actions.append(Feed(hop, start, end, want, forward, self._num_drawn, ahead))
            hop.given = hop.fed = end
            self._may_draw = self._may_draw or want == "token"
            hop.learn(end, now_s)
            if forward:
                self._expect_pushes(self.hops[index:], start, end)

    def _want_until(self, end: int) -> str:
        is_wanted = end > self._answered if self._want == "all" else self.is_asked and end == self.length
        return self._want if is_wanted else "nothing"

    def _expect_pushes(self, hops: Sequence[Hop], start: int, end: int) -> None:
        """Rows that the first of these hops is to push will reach those after it, if all are in step."""
        for upper, lower in itertools.pairwise(hops):
            # a lower one that is still being fed directly may not have got to `start` when the push comes
            if not _are_linked(upper, lower) or lower.given < start or lower.fed > lower.done:
                return
            start = max(start, lower.given)
            if start >= end:
                return
            lower.given = end

    # --- who pushes to whom -----------------------------------------------------------------------------------------

    def _relink(self, now_s: float) -> None:
        self._links_changed = False
        for hop in self.hops:
            told = self.neighbours(hop, now_s, self.hops)
            if told != hop.told:
                self._tell(hop, told)

    def _tell(self, hop: Hop, told: Neighbours) -> None:
        hop.told = told
        hop.num_links += 1
        self._actions.append(Relink(hop))

    def linked(self, hop: Hop, num_links: int, position: int) -> None:
        """A server has heard so many times who its neighbours are, and had been given the inputs up to `position`.

        Raises PeerViolation if that cannot be.
        """
        if not hop.num_linked < num_links <= hop.num_links:
            raise PeerViolation(f"the server was told of its neighbours {hop.num_links} times, not {num_links}")
        hop.num_linked = num_links
        if not self._check_untainted(position) and not hop.owes_link:
            self._trust(hop)

    def is_cut(self, last: Hop) -> bool:
        """Whether all tokens that the last hop has pushed on are known."""
        return not self.ahead or not self._may_draw or not (last.told.next_sequence_id or last.owes_link)

    def neighbours(self, hop: Hop, now_s: float, ready: Sequence[Hop]) -> Neighbours:
        """One of those that are `ready` to push to, and whose pushes may come, soon or now."""
        lower, upper = self._lower(hop, ready), self._upper(hop, (*self.hops, *self.coming))
        if now_s < hop.unlinked_until_s or (hop.end == self.num_blocks and not self._may_loop(hop, lower)):
            lower = None
        return Neighbours(
            next_peer_id=lower.peer_id if lower else "",
            next_sequence_id=lower.sequence_id if lower else b"",
            previous_peer_id=upper.peer_id if upper else "",
            previous_sequence_id=upper.sequence_id if upper else b"",
        )

    def _may_loop(self, last: Hop, first: Hop | None) -> bool:
        # nobody dials itself, unless it is the same seat: that needs no dialling
        can_push = first is last or (first is not None and first.peer_id != last.peer_id)
        return can_push and not self.doubted and not last.is_leaving

    def _lower(self, hop: Hop, among: Iterable[Hop]) -> Hop | None:
        """The one after it; in a ring the first one comes after the last."""
        start = hop.end % self.num_blocks
        return next((other for other in among if other.start == start), None) if start or self._is_ring else None

    def _upper(self, hop: Hop, among: Iterable[Hop]) -> Hop | None:
        end = hop.start or self.num_blocks
        return next((other for other in among if other.end == end), None) if hop.start or self._is_ring else None

    def _unlink(self, upper: Hop, lower: Hop, now_s: float) -> None:
        """Feed the lower one directly, and do so for a while."""
        upper.unlinked_until_s = now_s + min(MAX_RELINK_S, RELINK_S * 2**upper.num_unlinked)
        upper.num_unlinked += 1
        self._links_changed = True
        self._relink_s = min(self._relink_s, upper.unlinked_until_s)
        lower.distrust()

    def _retry_links(self, now_s: float) -> None:
        if now_s >= self._relink_s:
            self._links_changed, self._relink_s = True, math.inf

    def nudge(self, hop: Hop, now_s: float) -> None:
        """It should have answered: perhaps what was pushed to it got lost."""
        hop.nudge_s = math.inf
        upper = self._upper(hop, self.hops)
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
        self._links_changed, self._is_timed = True, False

    def remove(self, hop: Hop, now_s: float) -> None:
        """What it was to push to the next one may not come any more."""
        self.hops.remove(hop)
        hop.trace.is_replaced = True
        self._links_changed, self._is_timed = True, False
        if lower := self._lower(hop, self.hops):
            lower.distrust()
        is_lost_draw = hop.end == self.num_blocks and not self.is_cut(hop)
        if hop in self.doubted or is_lost_draw:
            self._doubt(now_s)

    def _doubt(self, now_s: float) -> None:
        """The last hop may have drawn a token that only others know; or one of those has gone without having said."""
        self._doubt_from = min(self._doubt_from, self.length) if self.doubted else self.length
        self.doubted = set(self.hops)
        self.doubt_by_s = max((now_s + hop.timeout_s() for hop in self.hops), default=math.inf)
        for hop in self.hops:
            self._tell(hop, self.neighbours(hop, now_s, self.hops))
            self._check_untainted(hop.reported)

    def _check_untainted(self, position: int) -> bool:
        """Whether all must begin anew: somebody was given what nobody is to be given while there is doubt."""
        self.is_tainted = self.is_tainted or (bool(self.doubted) and position > self._doubt_from)
        return self.is_tainted

    def end_doubt(self) -> None:
        """All hops are about to go, and what they hold with them."""
        self.is_tainted, self.doubt_by_s = False, math.inf
        self.doubted.clear()

    def _trust(self, hop: Hop) -> None:
        self.doubted.discard(hop)
        if not self.doubted and self.doubt_by_s < math.inf:
            self._links_changed, self.doubt_by_s = True, math.inf


def _copy(ledger: Ledger, ran: Ran) -> None:
    if ran.position <= ledger.length:
        return
    first = ran.position - len(ran.rows) // ledger.row_bytes
    if first > ledger.length:
        raise PeerViolation("the server left out what was asked for")
    ledger.append(ran.rows[(ledger.length - first) * ledger.row_bytes :])


def _are_linked(upper: Hop, lower: Hop) -> bool:
    return upper.told.next_sequence_id == lower.sequence_id
