"""Asks other members of a run where they are, and for the groups that their streams name.

`PeerLookout` reads what they show: a later attempt, or a state that is further.

`ShownGroups` holds the signed groups of one step. A stream of a reduction names its group by the digest, since a full
group is larger than a small part. A member usually has its group from the coordinator. If a stream names one that it
does not have, it asks the sender: the coordinator may have kept it back, or have signed two.

The driver of a step owns both, whose tasks end with the step.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from swarm_protocol.envelope import claimed_signer
from swarm_protocol.errors import PeerRefused, PeerViolation, RoundError, SwarmError
from swarm_protocol.state_messages import StandingRequest
from swarm_protocol.training_messages import GroupRequest, SignedGroup

from swarm.newest_items import NewestItems
from swarm.training.round.round_events import Event, Lost, Proven, Sighted
from swarm.training.run.methods import short
from swarm.training.state.proof_reader import CALL_TIMEOUT_S
from swarm.training.state.run_context import RunContext
from swarm.training.state.state_sync import follows

logger = logging.getLogger(__name__)

ASK_AFTER_S = 0.5
"""Time for which the coordinator's own answer is awaited before another member is asked: it usually comes with the
stream."""

MAX_GROUPS = 8
"""Groups that are kept, of up to half a megabyte. Each attempt has one, and a step that cannot end has thousands."""

MAX_LOOKING_AT = 64
"""Peers asked at one time, whatever others say about who else is there."""


class PeerLookout:
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
            self._spawn(self._look(peer), f"look at {peer[-6:]}")

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


class ShownGroups:
    """The newest groups of one step that this member has seen and checked, by digest.

    `coordinator` returns who may sign a group now, and `take` takes one that another member has shown.
    """

    def __init__(
        self, context: RunContext, *, coordinator: Callable[[], str], take: Callable[[SignedGroup], None]
    ) -> None:
        self._context = context
        self._coordinator = coordinator
        self._take = take
        self._groups = NewestItems[bytes, bytes](MAX_GROUPS)
        self._asking: set[str] = set()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._groups

    def add(self, signed: SignedGroup) -> None:
        self._groups[signed.digest] = signed.data

    def show(self, request: GroupRequest) -> bytes:
        """Return the group that is asked for. Raises PeerRefused if this member has not seen it."""
        if request.group_digest not in self._groups:
            raise PeerRefused("this member has not seen this group")
        return self._groups[request.group_digest]

    async def ask(self, peer: str, digest: bytes, *, after_s: float) -> None:
        """Ask `peer` for the group with this digest, if this member does not get it otherwise within `after_s`. One
        question to a peer runs at a time."""
        if digest in self._groups or peer in self._asking:
            return
        self._asking.add(peer)
        try:
            await asyncio.sleep(after_s)
            if digest not in self._groups:
                self._take(await self._asked(peer, digest))
        except SwarmError as error:
            logger.info("%s shows no group for its part: %s", short(peer), error)
        finally:
            self._asking.discard(peer)

    async def _asked(self, peer: str, digest: bytes) -> SignedGroup:
        """Return the group that `peer` shows. Raises SwarmError. What costs least is checked first: a group may hold
        hundreds of signatures, and anyone can make one."""
        context = self._context
        request = GroupRequest(run=context.run, group_digest=digest).to_bytes()
        data = await context.network.call(peer, context.methods.group, request, timeout_s=CALL_TIMEOUT_S)
        if hashlib.sha256(data).digest() != digest:
            raise PeerViolation("it shows another group than its part is of", peer_id=peer)
        if claimed_signer(data) != self._coordinator():
            raise RoundError("the group of this part is not one that this member can be in")
        signed = context.signatures.read_group(data, context.network.now())
        if not {peer, context.network.peer_id} <= set(signed.group.peer_ids):
            raise PeerViolation("the group of this part does not contain both of us", peer_id=peer)
        return signed
