"""What one session does next, decided from what it has heard: pure, with time and bytes as arguments.

A hop that fails leaves a gap in the chain, and a `Repair` puts one or several others there, which start empty and are
thus simply behind. The first opening is a repair too, of all blocks; so is a leaving server's hand-over.

Every method is an event and returns the actions that follow, in the order in which they are to be carried out. A
position is answered once, however often it is run, so a token is never taken twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerViolation, SessionError, SwarmError
from swarm_protocol.limits import PAGE_TOKENS

from swarm.serving.session.actions import (
    Action,
    Blame,
    Cause,
    CloseSeat,
    Fail,
    Find,
    Hand,
    OpenSeat,
    Repair,
    Repaired,
)
from swarm.serving.session.chain import Chain, Limits
from swarm.serving.session.hop import Hop, Neighbours, Ran
from swarm.serving.session.replay_buffer import Ledger

OPEN_S = 10.0
"""Dialling through a relay and a server's slow moment. The hand-over of a seat gets as long as running it again."""

LEAVE_RETRY_S = 3.0
"""Between looks for others in the place of a leaving server that still answers."""

MAX_FAILURES = 16
"""Of servers during one question or call: beyond that it is itself what breaks them."""


class Course:
    """Of one session over blocks `[0, num_blocks)`. `new_ledger(block)` makes the ledger of a boundary."""

    def __init__(self, num_blocks: int, new_ledger: Callable[[int], Ledger], limits: Limits) -> None:
        self.repairs = [Repair(start=0, end=num_blocks)]
        self.error: SwarmError | None = None
        self._num_failed = 0
        self._has_opened = False
        self._actions: list[Action] = []
        self._chain = Chain(num_blocks, new_ledger, limits, self._actions)

    @property
    def hops(self) -> Sequence[Hop]:
        return self._chain.hops

    @property
    def ledgers(self) -> Mapping[int, Ledger]:
        """What went into the spans, by their first block."""
        return self._chain.ledgers

    @property
    def length(self) -> int:
        """Tokens that were asked about so far."""
        return self._chain.length

    @property
    def is_asked(self) -> bool:
        return self._chain.is_asked

    def beside(self, repair: Repair) -> Neighbours:
        """Between which servers the repair's blocks are."""
        lower = next((hop for hop in self.hops if hop.start == repair.end), None)
        return Neighbours(
            next_peer_id=lower.peer_id if lower else "",
            previous_peer_id=next((hop.peer_id for hop in self.hops if hop.end == repair.start), ""),
        )

    # --- events -----------------------------------------------------------------------------------------------------

    def ask(self, rows: bytes, want: str, now_s: float, *, ahead: int = 0) -> list[Action]:
        """Append tokens. `want`: "token" or "last" of the last one's output, "all" of those that are new.

        After a token the servers may draw `ahead` more, each of them the next input, which `follow` is told of.
        """
        self._chain.ask(rows, want, ahead, now_s)
        self._num_failed = 0
        for repair in self.repairs:
            if repair.is_asleep:
                repair.since_s = repair.begun_s = now_s
                self._find(repair)
        return self._decide(now_s)

    def follow(self, row: bytes, now_s: float) -> list[Action]:
        """The token that was answered is the next input."""
        self._num_failed = 0
        self._chain.follow(row, now_s)
        return self._decide(now_s)

    def found(self, repair: Repair, fresh: Sequence[Hop], now_s: float) -> list[Action]:
        if repair not in self.repairs:
            return []
        assert not repair.fresh
        repair.fresh = list(fresh)
        repair.is_opening = False
        # of the rows between several nothing is known, so that they would begin anew
        repair.is_handing = repair.old is not None and repair.may_hand and len(fresh) == 1
        if repair.is_handing:
            repair.since_s = now_s
        self._chain.prepare(fresh)
        return self._decide(now_s)

    def not_found(self, repair: Repair, error: SwarmError, now_s: float) -> list[Action]:
        if repair not in self.repairs:
            return []
        if repair.old is not None:
            repair.old.stay_until_s = now_s + LEAVE_RETRY_S
            self.repairs.remove(repair)
        elif repair.lost_peer and not repair.has_looked_patiently:
            self._find(repair)
        elif self.is_asked:
            error.__cause__ = repair.error
            self._fail(error)
        else:
            # nobody waits: look again with the next question
            repair.is_asleep = True
        return self._decide(now_s)

    def ready(self, hop: Hop, length: int, max_step_tokens: int, now_s: float) -> list[Action]:
        """The server has a seat for the hop, and of its positions the first `length`. Raises PeerViolation."""
        repair = self._repair_with(hop)
        if hop.is_ready:
            raise PeerViolation("the server opened a session twice")
        # the old one of a hand-over goes on until it is copied
        is_handing = repair is not None and repair.is_handing
        most = self.length + self._chain.ahead if is_handing else hop.max_length
        if length > most:
            raise PeerViolation(f"the server holds {length} positions, and was told of {most}")
        if repair is None or self.error is not None:
            return []
        hop.is_ready, hop.length, hop.max_step_tokens = True, length, max_step_tokens
        return self._decide(now_s)

    def ran(self, hop: Hop, ran: Ran, now_s: float) -> list[Action]:
        """A server has run some more positions. Raises PeerViolation if it says what cannot be."""
        if hop not in self.hops:
            return []
        self._chain.take(hop, ran, now_s)
        return self._decide(now_s)

    def linked(self, hop: Hop, num_links: int, position: int, now_s: float) -> list[Action]:
        """Its server knows its neighbours. Raises PeerViolation if it says what cannot be."""
        if hop not in self.hops:
            return []
        self._chain.linked(hop, num_links, position)
        return self._decide(now_s)

    def leaving(self, hop: Hop) -> None:
        """Its server drains. Followed up with the next event."""
        hop.is_leaving = True

    def lost(self, hop: Hop, error: SwarmError, cause: Cause, now_s: float) -> list[Action]:
        self._lose(hop, error, cause, now_s)
        return self._decide(now_s)

    def give_up(self, error: SwarmError, now_s: float) -> list[Action]:
        """What is asked cannot be done, whichever server is asked."""
        if self.error is None:
            self._fail(error)
        return self._decide(now_s)

    def tick(self, now_s: float) -> list[Action]:
        """Deadlines that are over by now."""
        for hop in list(self.hops):
            if hop.due_s <= now_s:
                late = PeerTimeout("the server did not answer in time", peer_id=hop.peer_id)
                self._lose(hop, late, Cause.GONE, now_s)
            elif hop.nudge_s <= now_s:
                self._chain.nudge(hop, now_s)
        if self._chain.doubt_by_s <= now_s:
            for hop in list(self._chain.doubted):
                late = PeerTimeout("the server did not hear in time who its neighbours are", peer_id=hop.peer_id)
                self._lose(hop, late, Cause.GONE, now_s)
        for repair in list(self.repairs):
            silent = self._awaited(repair)
            if repair.open_by_s <= now_s and silent is not None:
                late = PeerTimeout("the server opened no session in time", peer_id=silent.peer_id)
                self._lose(silent, late, Cause.GONE, now_s)
        return self._decide(now_s)

    def next_s(self) -> float:
        """When `tick` is next due; infinity if nothing is waited for."""
        if self.error is not None:
            return math.inf
        times = [min(hop.due_s, hop.nudge_s) for hop in self.hops]
        times += [repair.open_by_s for repair in self.repairs if self._awaited(repair) is not None]
        times += [hop.stay_until_s for hop in self.hops if hop.is_leaving and not self._is_replaced(hop)]
        return min([*times, self._chain.doubt_by_s])

    # --- what is done about it --------------------------------------------------------------------------------------

    def _decide(self, now_s: float) -> list[Action]:
        if self.error is None:
            if self._chain.is_tainted:
                self._start_anew(now_s)
            for hop in self.hops:
                if hop.is_leaving and hop.stay_until_s <= now_s and not self._is_replaced(hop):
                    self._leave(hop, now_s)
            for repair in self.repairs:
                if repair.fresh and not repair.is_opening:
                    self._open(repair, now_s)
            for repair in [repair for repair in self.repairs if self._can_splice(repair)]:
                self._splice(repair, now_s)
            self._chain.feed(now_s)
        actions = self._actions[:]
        self._actions.clear()
        return actions

    def _repair_with(self, hop: Hop) -> Repair | None:
        return next((repair for repair in self.repairs if hop in repair.fresh), None)

    def _is_replaced(self, hop: Hop) -> bool:
        return any(repair.old is hop for repair in self.repairs)

    def _find(self, repair: Repair) -> None:
        repair.is_asleep = False
        repair.has_looked_patiently = repair.has_patience
        self._actions.append(Find(repair))

    def _leave(self, hop: Hop, now_s: float) -> None:
        refusal = PeerRefused("the server is leaving", peer_id=hop.peer_id)
        repair = Repair(start=hop.start, end=hop.end, since_s=now_s, lost_peer=hop.peer_id, error=refusal, old=hop)
        self.repairs.append(repair)
        self._actions.append(Blame(hop.peer_id, refusal, Cause.TOLD))
        self._expect_coming()  # a last one that leaves passes no more tokens on
        self._find(repair)

    def _open(self, repair: Repair, now_s: float) -> None:
        repair.is_opening = True
        repair.open_by_s = now_s + OPEN_S
        if repair.is_handing and repair.old is not None:
            repair.open_by_s += max(hop.timer.expected_s(repair.old.done) for hop in repair.fresh)
        self._expect_coming()
        for hop in repair.fresh:
            hop.told = self._chain.neighbours(hop, now_s, [*self.hops, *repair.fresh])
            taken_over = repair.old if repair.is_handing else None
            if taken_over is not None:
                self._actions.append(Hand(taken_over, hop.peer_id))
            hop.max_length = self.length // PAGE_TOKENS * PAGE_TOKENS
            self._actions.append(OpenSeat(hop, taken_over))

    def _expect_coming(self) -> None:
        opening = [repair for repair in self.repairs if repair.is_opening]
        self._chain.expect([hop for repair in opening for hop in repair.fresh])

    def _awaited(self, repair: Repair) -> Hop | None:
        """Who holds it up: a server that opens no seat, or an old one that may pass more on for all it has said."""
        if not repair.is_opening:
            return None
        silent = next((hop for hop in repair.fresh if not hop.is_ready), None)
        if silent is None and repair.old is not None and repair.old.owes_link:
            return repair.old
        return silent

    def _can_splice(self, repair: Repair) -> bool:
        if not repair.is_opening or not all(hop.is_ready for hop in repair.fresh):
            return False
        old = repair.old
        if old is None:
            return True
        # what was copied of it the client must have heard of, too: nobody else tells of those outputs
        is_known = not repair.is_handing or all(hop.length <= old.done for hop in repair.fresh)
        return is_known and (old.end < self._chain.num_blocks or self._chain.is_cut(old))

    def _splice(self, repair: Repair, now_s: float) -> None:
        if repair.old is not None:
            self._remove(repair.old, now_s)
            repair.lost_done = repair.old.done
        self.repairs.remove(repair)
        if repair.lost_peer:
            for hop in repair.fresh:
                hop.replays_until = self.length
        self._has_opened = True
        starts = [repair.start for repair in self.repairs]
        self._expect_coming()
        self._chain.join(repair.fresh, [*starts, *(hop.start for other in self.repairs for hop in other.fresh)])
        self._actions.append(Repaired(repair, max(0, repair.lost_done - repair.fresh[0].done)))

    def _remove(self, hop: Hop, now_s: float) -> None:
        self._chain.remove(hop, now_s)
        self._actions.append(CloseSeat(hop))

    def _lose(self, hop: Hop, error: SwarmError, cause: Cause, now_s: float) -> None:
        repair = self._repair_with(hop)
        if self.error is not None or (repair is None and hop not in self.hops):
            return
        self._num_failed += 1
        if repair is not None:
            self._opening_failed(repair, hop, error, cause)
        else:
            self._actions.append(Blame(hop.peer_id, error, cause))
            self._replace(hop, error, now_s)
        if self._num_failed > MAX_FAILURES:
            what = (
                "servers keep failing at the same token" if self._has_opened else "servers in a row opened no session"
            )
            self._fail(SessionError(f"{what}: {error.message}", remedy="try again in a moment"))

    def _start_anew(self, now_s: float) -> None:
        """On all hops: some have run a token that the client does not know and another server may not draw again."""
        self._chain.end_doubt()
        error = SessionError("a server was lost with a token that only others had got")
        for hop in list(self.hops):
            self._replace(hop, error, now_s)

    def _replace(self, hop: Hop, error: SwarmError, now_s: float) -> None:
        since_s = hop.since_s if hop.known > hop.done else now_s
        self._remove(hop, now_s)
        repair = next((repair for repair in self.repairs if repair.old is hop), None)
        is_new = repair is None
        if repair is None:
            repair = Repair(start=hop.start, end=hop.end)
            self.repairs.append(repair)
        # a hand-over from the dead ends nowhere
        is_cut_off = repair.is_handing and repair.is_opening
        repair.old, repair.is_handing = None, False
        repair.since_s, repair.lost_peer, repair.error = since_s, hop.peer_id, error
        repair.lost_done, repair.begun_s = hop.done, now_s
        if is_cut_off:
            self._abandon(repair)
        if is_new or is_cut_off:
            self._find(repair)

    def _opening_failed(self, repair: Repair, hop: Hop, error: SwarmError, cause: Cause) -> None:
        self._abandon(repair)
        repair.error = repair.error or error
        # of a hand-over that was refused, who knows whose fault it was: the new server may still do without
        if not (repair.is_handing and cause is Cause.TOLD):
            self._actions.append(Blame(hop.peer_id, error, cause))
        if repair.is_handing:
            repair.may_hand = repair.is_handing = False
        self._find(repair)

    def _abandon(self, repair: Repair) -> None:
        self._actions += [CloseSeat(hop) for hop in repair.fresh]
        repair.fresh, repair.is_opening = [], False
        self._expect_coming()

    def _fail(self, error: SwarmError) -> None:
        self.error = error
        self._actions[:] = [action for action in self._actions if isinstance(action, CloseSeat)]
        self._actions.append(Fail(error))
