"""Asks other members of a run where they are, and reads what they show: a later attempt, or a state that is further.

The driver of a step owns it, and its tasks end with the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from swarm_protocol.errors import PeerRefused, SwarmError
from swarm_protocol.identity import short_id
from swarm_protocol.member_messages import StandingRequest

from swarm.training.round.round_events import Event, Lost, Proven, Sighted
from swarm.training.state.run_context import RunContext
from swarm.training.state.state_sync import follows

logger = logging.getLogger(__name__)

MAX_LOOKING_AT = 64
"""Peers asked at one time, whatever others say about who else is there."""


class PeerQueries:
    """The questions of one step. `attempt` is this member's; `on_named` is called with each peer that another names.

    `feed` takes the events that follow, `spawn` starts a task of the step, and `on_certificate` is shown every
    certificate that was checked.
    """

    def __init__(
        self,
        context: RunContext,
        step: int,
        *,
        attempt: Callable[[], int],
        on_named: Callable[[str], None],
        feed: Callable[[Event], None],
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
        on_certificate: Callable[[bytes], None],
    ) -> None:
        self._context = context
        self._step = step
        self._attempt = attempt
        self._on_named = on_named
        self._feed = feed
        self._spawn = spawn
        self._on_certificate = on_certificate
        self._looking_at: set[str] = set()

    def look_at(self, peer: str) -> None:
        """Ask `peer` where it is, unless it is being asked, or too many are."""
        is_new = peer not in self._looking_at and peer != self._context.network.peer_id
        if is_new and len(self._looking_at) < MAX_LOOKING_AT:
            self._looking_at.add(peer)
            self._spawn(self._look(peer), f"look at {short_id(peer)}")

    async def query(self, peer: str, *, hurry: bool) -> None:
        """Ask `peer` where it is, and feed the event that follows. `hurry` asks it to end its interval, too."""
        event, _ = await self._standing_of(peer, hurry=hurry)
        if event is not None:
            self._feed(event)

    async def overtaken(self, peer: str, certificate: bytes) -> Proven | None:
        """Return an event if `certificate`, which `peer` shows, leads further than this member's state. Raises
        PeerViolation or IntegrityError."""
        further = await overtaken(self._context, peer, certificate)
        if certificate:
            self._on_certificate(certificate)
        return further

    async def _look(self, peer: str) -> None:
        event, others = await self._standing_of(peer, hurry=False)
        self._looking_at.discard(peer)
        # nothing is expected of this peer: if it cannot be reached, that is no reason to leave it out of a group
        if event is not None and not isinstance(event, Lost):
            self._feed(event)
        for other in others:
            self._on_named(other)

    async def _standing_of(self, peer: str, *, hurry: bool) -> tuple[Event | None, tuple[str, ...]]:
        """Ask `peer` where it is. Return an event that says that it is further than this member, there, or gone; and
        the peers that it knows."""
        request = StandingRequest(run=self._context.run, step=self._step, attempt=self._attempt(), hurry=hurry)
        try:
            standing = await self._context.standing(peer, request)
            sighted = Sighted(peer=peer, attempt=standing.attempt)
            return await self.overtaken(peer, standing.certificate) or sighted, standing.known
        except PeerRefused:
            # it is there, but does not take part yet
            return None, ()
        except SwarmError as error:
            return Lost(peer=peer, reason=error.message), ()


async def overtaken(context: RunContext, peer: str, certificate: bytes) -> Proven | None:
    """Return an event if `certificate`, which `peer` shows, has a higher rank than this member's state and follows from
    it.

    A new replica decides what to follow by asking several peers (see `state_sync.furthest`). Raises PeerViolation or
    IntegrityError.
    """
    if not certificate:
        return None
    proof = await context.check(certificate)
    is_further = proof.rank > context.replica.rank and await follows(context, peer, proof)
    return Proven(certificate=certificate) if is_further else None
