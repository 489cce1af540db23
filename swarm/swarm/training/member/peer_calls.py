"""Makes and answers the calls of a step that ask members where they are, that report to coordinators, and that vote.

`PeerQueries` asks other members where they are, and learns of later attempts and later states. `send_report` sends this
member's report. `TakenReports` keeps the reports that other members send to this one as their coordinator, and signs
the group. `cast_vote` signs and sends this member's votes. The driver of the step owns the tasks, but for those of
votes, which others may still need after the step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from swarm_protocol.commit_messages import Abort, VoteReply
from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerUnreachable, SwarmError
from swarm_protocol.identity import short_id
from swarm_protocol.member_messages import StandingRequest
from swarm_protocol.run_credentials import any_expires_by
from swarm_protocol.training_messages import Ready, ReadyReply

from swarm.training.allreduce.peer_connections import SILENT_S
from swarm.training.member.current_step import CurrentStep
from swarm.training.member.progress_reports import LEFT_OUT
from swarm.training.member.shown_groups import ShownGroups
from swarm.training.round.round_events import (
    Ask,
    CastVote,
    CredentialsExpired,
    Event,
    Grouped,
    LeftOut,
    Lost,
    Moved,
    Proven,
    Reported,
    Sighted,
    Sign,
    Voted,
    Withdrew,
    left_out_reply,
)
from swarm.training.state.certificate import CREDENTIAL_MARGIN_S
from swarm.training.state.proof_reader import CALL_TIMEOUT_S
from swarm.training.state.run_context import RunContext
from swarm.training.state.state_sync import follows

logger = logging.getLogger(__name__)

ANNOUNCE_TIMEOUT_S = 0.5
"""Maximum seconds that leaving an attempt waits until the others have heard why."""
MAX_LOOKING_AT = 64
"""Maximum peers asked at one time, whatever others say about who else is there. Members of the state are asked beyond
it: strangers can each take a place for the minute in which they may show how their made-up states came about."""
POLL_S = 1.0
"""Seconds for which a coordinator lets a report wait before the member has to send it again. A coordinator that is
stopped, but whose connection does not break, is noticed within this plus SILENT_S."""
MISSING_S = 1.0
"""Seconds within which a coordinator that was missing in an earlier attempt has to answer a small call. It was waited
for at length in that attempt, and each further attempt that it coordinates would cost the others as long again."""


class PeerQueries:
    """Asks peers where they are, and the peers that they name."""

    def __init__(self, step: CurrentStep) -> None:
        self._step = step
        self._context = step.context
        self.looking_at: set[str] = set()
        """The peers that `look_at` asks, and that have not answered yet."""

    def look_at(self, peer: str) -> None:
        """Ask `peer` where it is, which also tells it that this member is there. Do nothing if that is under way, or
        too many peers are being asked for a stranger."""
        is_new = peer not in self.looking_at and peer != self._context.network.peer_id
        if is_new and (len(self.looking_at) < MAX_LOOKING_AT or peer in self._step.setup.roster):
            self.looking_at.add(peer)
            self._step.start(self._look(peer), f"look at {short_id(peer)}")

    async def query(self, peer: str, *, hurry: bool) -> None:
        """Ask `peer` where it is, and feed the event that follows. `hurry` asks it to end its interval, too."""
        event, _ = await self._standing_of(peer, hurry=hurry)
        if event is not None:
            self._step.feed(event)

    async def take_certificate(self, peer: str, certificate: bytes) -> None:
        """Take the certificate that `peer` shows. Raises PeerViolation or IntegrityError."""
        if (further := await self.overtaken(peer, certificate)) is not None:
            self._step.feed(further)

    async def overtaken(self, peer: str, certificate: bytes) -> Proven | None:
        """Return an event if `certificate`, which `peer` shows, has a higher rank than this member's state and follows
        from it.

        A new replica instead asks several peers, and decides what to follow (see `state_sync.furthest`). Raises
        PeerViolation or IntegrityError.
        """
        if not certificate:
            return None
        context, replica = self._context, self._context.replica
        proof = await context.check(certificate)
        if replica.history.stays_apart(proof):
            context.note_apart(peer, proof)  # two histories can be equally fast, so the peer may never be further
        is_further = proof.rank > replica.rank and await follows(context, peer, proof)
        self._step.convictions.hear(certificate)
        return Proven(certificate=certificate) if is_further else None

    async def _look(self, peer: str) -> None:
        event, others = await self._standing_of(peer, hurry=False)
        self.looking_at.discard(peer)
        # nothing is expected of this peer: failing to reach it is no reason to leave it out of a group
        if event is not None and not isinstance(event, Lost):
            self._step.feed(event)
        for other in others:
            # it counts only once it has answered itself
            if other not in self._step.state.known:
                self.look_at(other)

    async def _standing_of(self, peer: str, *, hurry: bool) -> tuple[Event | None, tuple[str, ...]]:
        """Ask `peer` where it is. Return an event that says that it is further than this member, there, or gone, and
        the peers that it knows. The event is None if it does not take part yet."""
        state = self._step.state
        request = StandingRequest(run=self._context.run, step=state.setup.step, attempt=state.attempt, hurry=hurry)
        try:
            standing = await self._context.standing(peer, request)
            sighted = Sighted(peer=peer, attempt=standing.attempt)
            return await self.overtaken(peer, standing.certificate) or sighted, standing.known
        except PeerRefused:
            # it is there, but does not take part yet
            return None, ()
        except SwarmError as error:
            return Lost(peer=peer, reason=error.message), ()


async def send_report(step: CurrentStep, queries: PeerQueries, groups: ShownGroups, action: Ask) -> None:
    """Report to the coordinator until it decides."""
    context, peer = step.context, action.peer
    await context.failpoints.reached("round.ready")
    if action.was_missing and not await context.connections.answers(peer, MISSING_S):
        step.feed(Lost(peer=peer, reason=f"it was missing before, and answers nothing within {MISSING_S:.0f} s"))
        return
    request = context.signatures.sign_report(action.ready).to_bytes()
    reply = ReadyReply(kind="pending")
    try:
        while reply.kind == "pending":
            at = context.network.now() + CREDENTIAL_MARGIN_S + POLL_S
            if any_expires_by(at, action.ready.credentials):
                # the coordinator would refuse the report, and would look as if it were gone
                step.feed(CredentialsExpired(attempt=action.ready.attempt, at=at))
                return
            step.log.sent(len(request))
            data = await context.network.call(peer, context.methods.ready, request, timeout_s=POLL_S + SILENT_S)
            reply = ReadyReply.from_bytes(data)
        event = await _event_of(peer, action.ready.attempt, reply, queries, groups)
    except SwarmError as error:
        event = Lost(peer=peer, reason=error.message)
    step.feed(event)


async def _event_of(peer: str, attempt: int, reply: ReadyReply, queries: PeerQueries, groups: ShownGroups) -> Event:
    """Return the event that `peer`'s reply to a report stands for. Raises PeerViolation or IntegrityError."""
    match reply.kind:
        case "group":
            return Grouped(signed=groups.read(reply.group))
        case "attempt":
            return Moved(attempt=attempt, to=reply.attempt, reason=reply.reason)
        case "left_out":
            return LeftOut(attempt=attempt, reason=reply.reason)
        case _:
            further = await queries.overtaken(peer, reply.certificate)
            return further or Lost(peer=peer, reason="it starts from another state")


class TakenReports:
    """Keeps the reports that wait at this member, their coordinator, for an answer of the state machine: one for each
    peer."""

    def __init__(self, step: CurrentStep, queries: PeerQueries, groups: ShownGroups) -> None:
        self._step = step
        self._context = step.context
        self._queries = queries
        self._groups = groups
        self._waiting: dict[str, asyncio.Future[ReadyReply]] = {}

    async def take(self, peer: str, ready: Ready) -> ReadyReply:
        """Take the report of `peer`. Return its answer, or `pending` after POLL_S."""
        self._answer(peer, ReadyReply(kind="pending"))
        answer: asyncio.Future[ReadyReply] = asyncio.get_running_loop().create_future()
        self._waiting[peer] = answer
        self._step.feed(Reported(peer=peer, ready=ready))
        try:
            async with asyncio.timeout(POLL_S):
                return await answer
        except TimeoutError:
            return ReadyReply(kind="pending")
        except asyncio.CancelledError:
            if self._waiting.get(peer) is answer:
                self._step.feed(Withdrew(peer=peer))
            raise

    async def sign(self, action: Sign) -> None:
        """Sign the group, and answer the reports of its members with it."""
        await self._context.failpoints.reached("round.sign")
        context, at = self._context, self._context.network.now()
        if any_expires_by(at, action.group.credentials):
            # every member would refuse a group that is signed now
            self._step.feed(CredentialsExpired(attempt=action.group.attempt, at=at))
            return
        signed = context.signatures.sign_group(action.group, at, self._step.setup.sequence)
        if action.group.origin:
            # with the origin, whose members' votes count at all members of a run's first round
            signed = context.signatures.read_group(signed.data, at)
        self._groups.add(signed)
        await self._context.failpoints.reached("round.signed")
        for peer in action.group.peer_ids:
            self._step.log.sent(len(signed.data))
            self.reply(peer, ReadyReply(kind="group", group=signed.data))
        for peer, reason in action.left_out.items():
            self.reply(peer, left_out_reply(reason))
        self._step.feed(Grouped(signed=signed))

    def reply(self, peer: str, reply: ReadyReply) -> None:
        """Answer the report of `peer`, if one waits, as the state machine has decided."""
        if reply.kind == "behind":
            # it may be this member that is behind
            self._queries.look_at(peer)
            replica = self._context.replica
            reply = ReadyReply(kind="behind", state_digest=replica.digest, certificate=replica.certificate)
        if reply.kind == "left_out":
            self._step.log.refuse(peer, reply.reason, LEFT_OUT)
        self._answer(peer, reply)

    def close(self) -> None:
        """Tell all peers whose reports wait here to report again."""
        for peer in list(self._waiting):
            self._answer(peer, ReadyReply(kind="pending"))

    def _answer(self, peer: str, reply: ReadyReply) -> None:
        if (waiting := self._waiting.pop(peer, None)) and not waiting.done():
            waiting.set_result(reply)


async def cast_vote(step: CurrentStep, action: CastVote) -> None:
    """Sign the vote, and send it to the group. The driver has written it to disk."""
    context = step.context
    await context.failpoints.reached("round.vote")
    vote = context.signatures.sign_vote(action.vote)
    data = vote.to_bytes()
    step.feed(Voted(peer=context.network.peer_id, vote=vote))
    for peer in action.peers:
        step.log.sent(len(data))
        # others may still need this vote when this member has seen enough of them
        step.background.create_task(send_vote(step, peer, data, vote.attempt), name=f"vote to {short_id(peer)}")


async def send_vote(step: CurrentStep, peer: str, vote: bytes, attempt: int) -> None:
    """Send a signed vote of `attempt` to `peer`."""
    context, lost = step.context, None
    try:
        reply = await context.network.call(peer, context.methods.vote, vote, timeout_s=CALL_TIMEOUT_S)
        context.meter.reported(peer, VoteReply.from_bytes(reply).bytes_per_s)
    except (PeerTimeout, PeerUnreachable) as error:
        lost = Lost(peer=peer, reason=error.message, attempt=attempt)
    except SwarmError as error:
        logger.warning("%s did not take a vote: %s", short_id(peer), error)
    await context.failpoints.reached("round.voted")
    if lost is not None:
        step.feed(lost)


async def announce(context: RunContext, abort: Abort, peers: Iterable[str]) -> None:
    """Send `abort` to `peers`, within ANNOUNCE_TIMEOUT_S, so that they hear the reason before streams break."""
    data = abort.to_bytes()

    async def tell(peer: str) -> None:
        try:
            await context.network.call(peer, context.methods.abort, data, timeout_s=ANNOUNCE_TIMEOUT_S)
        except SwarmError as error:
            logger.debug("could not tell %s why this member left: %s", short_id(peer), error)

    async with asyncio.TaskGroup() as tasks:
        for peer in peers:
            tasks.create_task(tell(peer))
