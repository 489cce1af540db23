"""Carries what members tell each other in the attempts of one step: reports and answers, votes, and why one leaves.

`AttemptCalls` sends what the state machine decides; `PendingReports` keeps the reports that came to this member as
their coordinator. The driver of the step owns both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from swarm_protocol.commit_messages import Abort, VoteReply
from swarm_protocol.errors import PeerTimeout, PeerUnreachable, SwarmError
from swarm_protocol.identity import short_id
from swarm_protocol.run_credentials import grant_of
from swarm_protocol.training_messages import Ready, ReadyReply

from swarm.training.allreduce.peer_connections import SILENT_S
from swarm.training.member.peer_queries import PeerQueries
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
    Reported,
    Voted,
    Withdrew,
)
from swarm.training.state.certificate import CREDENTIAL_MARGIN_S
from swarm.training.state.proof_reader import CALL_TIMEOUT_S
from swarm.training.state.run_context import RunContext

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""Time for which a coordinator keeps a report waiting before the member has to send it again. A coordinator that is
stopped, but whose connection does not break, is noticed after at most this and SILENT_S."""
MISSING_S = 1.0
"""Time within which a coordinator that was missing in an earlier attempt has to answer a small call. It has been waited
for at length in that attempt, and each further attempt that it coordinates would cost the others as long again."""
ANNOUNCE_TIMEOUT_S = 0.5
"""Time for which leaving an attempt waits until the others have heard why."""


class AttemptCalls:
    """Send this member's reports and votes, and count the bytes. `feed` takes the events that follow from the answers.

    `background` outlives the step: others may still need a vote when this member has seen enough of them.
    """

    def __init__(
        self,
        context: RunContext,
        queries: PeerQueries,
        groups: ShownGroups,
        *,
        feed: Callable[[Event], None],
        background: asyncio.TaskGroup,
    ) -> None:
        self.bytes_sent = 0
        self._context = context
        self._queries = queries
        self._groups = groups
        self._feed = feed
        self._background = background

    async def send_report(self, action: Ask) -> None:
        """Report to the coordinator until it decides."""
        await self._context.failpoints.reached("round.ready")
        context, peer, num_bytes = self._context, action.peer, 0
        if action.was_missing and not await context.connections.answers(peer, MISSING_S):
            self._feed(Lost(peer=peer, reason=f"it was missing before, and answers nothing within {MISSING_S:.0f} s"))
            return
        request = context.signatures.sign_report(action.ready).to_bytes()
        reply = ReadyReply(kind="pending")
        try:
            while reply.kind == "pending":
                at = context.network.now() + CREDENTIAL_MARGIN_S + POLL_S
                if any(grant_of(each).expires_at <= at for each in action.ready.credentials):
                    # the coordinator would refuse the report, and seem to be gone
                    self._feed(CredentialsExpired(at=at))
                    return
                num_bytes += len(request)
                data = await context.network.call(peer, context.methods.ready, request, timeout_s=POLL_S + SILENT_S)
                reply = ReadyReply.from_bytes(data)
            event = await self._event_of(peer, action.ready.attempt, reply)
        except SwarmError as error:
            event = Lost(peer=peer, reason=error.message)
        self.bytes_sent += num_bytes
        self._feed(event)

    async def _event_of(self, peer: str, attempt: int, reply: ReadyReply) -> Event:
        """Return what `peer`'s reply to a report means. Raises PeerViolation or IntegrityError."""
        match reply.kind:
            case "group":
                signed = self._context.signatures.read_group(reply.group, self._context.network.now())
                self._groups.check(signed)
                return Grouped(signed=signed)
            case "attempt":
                return Moved(attempt=attempt, to=reply.attempt)
            case "left_out":
                return LeftOut(attempt=attempt, reason=reply.reason)
            case _:
                further = await self._queries.overtaken(peer, reply.certificate)
                return further or Lost(peer=peer, reason="it starts from another state")

    async def cast(self, action: CastVote) -> None:
        await self._context.failpoints.reached("round.vote")
        vote = self._context.signatures.sign_vote(action.vote)
        data = vote.to_bytes()
        self._feed(Voted(peer=self._context.network.peer_id, vote=vote))
        for peer in action.peers:
            self.bytes_sent += len(data)
            # others may still need this vote when this member has seen enough of them
            self._background.create_task(self._send_vote(peer, data), name=f"vote to {short_id(peer)}")

    async def _send_vote(self, peer: str, data: bytes) -> None:
        context, lost = self._context, None
        try:
            reply = await context.network.call(peer, context.methods.vote, data, timeout_s=CALL_TIMEOUT_S)
            context.meter.reported(peer, VoteReply.from_bytes(reply).bytes_per_s)
        except (PeerTimeout, PeerUnreachable) as error:
            lost = Lost(peer=peer, reason=error.message)
        except SwarmError as error:
            logger.warning("%s did not take a vote: %s", short_id(peer), error)
        await context.failpoints.reached("round.voted")
        if lost is not None:
            self._feed(lost)

    async def announce(self, abort: Abort, peers: tuple[str, ...]) -> None:
        """Send `abort` to `peers`, within ANNOUNCE_TIMEOUT_S, so that they hear the reason before streams break."""
        network, method, data = self._context.network, self._context.methods.abort, abort.to_bytes()

        async def tell(peer: str) -> None:
            try:
                await network.call(peer, method, data, timeout_s=ANNOUNCE_TIMEOUT_S)
            except SwarmError as error:
                logger.debug("could not tell %s why this member left: %s", short_id(peer), error)

        async with asyncio.TaskGroup() as tasks:
            for peer in peers:
                tasks.create_task(tell(peer))


class PendingReports:
    """Keep the reports that wait here for what the state machine answers, one of each peer."""

    def __init__(self, feed: Callable[[Event], None]) -> None:
        self._feed = feed
        self._waiting: dict[str, asyncio.Future[ReadyReply]] = {}

    async def take(self, peer: str, ready: Ready) -> ReadyReply:
        """Take the report of `peer`, which waits here until `answer`, or for POLL_S."""
        self.answer(peer, ReadyReply(kind="pending"))
        answer: asyncio.Future[ReadyReply] = asyncio.get_running_loop().create_future()
        self._waiting[peer] = answer
        self._feed(Reported(peer=peer, ready=ready))
        try:
            async with asyncio.timeout(POLL_S):
                return await answer
        except TimeoutError:
            return ReadyReply(kind="pending")
        except asyncio.CancelledError:
            if self._waiting.get(peer) is answer:
                self._feed(Withdrew(peer=peer))
            raise

    def answer(self, peer: str, reply: ReadyReply) -> None:
        """Answer `peer`, if its report waits here."""
        if (waiting := self._waiting.pop(peer, None)) and not waiting.done():
            waiting.set_result(reply)

    def close(self) -> None:
        """Tell all peers whose reports wait here to report again."""
        for peer in list(self._waiting):
            self.answer(peer, ReadyReply(kind="pending"))
