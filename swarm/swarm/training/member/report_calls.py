"""Carries the reports of one step to the coordinators of its attempts, and their answers.

`ReportCalls` sends this member's report; `TakenReports` keeps those that came to this member as their coordinator, and
signs the group. The driver of the step owns both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from swarm_protocol.errors import SwarmError
from swarm_protocol.run_credentials import RunCredential, grant_of
from swarm_protocol.training_messages import Ready, ReadyReply

from swarm.training.allreduce.peer_connections import SILENT_S
from swarm.training.member.peer_queries import PeerQueries
from swarm.training.member.shown_groups import ShownGroups
from swarm.training.round.round_events import (
    Ask,
    CredentialsExpired,
    Event,
    Grouped,
    LeftOut,
    Lost,
    Moved,
    Reported,
    Sign,
    Withdrew,
)
from swarm.training.round.round_state import RoundSetup
from swarm.training.state.certificate import CREDENTIAL_MARGIN_S
from swarm.training.state.run_context import RunContext

POLL_S = 1.0
"""Time for which a coordinator keeps a report waiting before the member has to send it again. A coordinator that is
stopped, but whose connection does not break, is noticed after at most this and SILENT_S."""
MISSING_S = 1.0
"""Time within which a coordinator that was missing in an earlier attempt has to answer a small call. It has been waited
for at length in that attempt, and each further attempt that it coordinates would cost the others as long again."""


class ReportCalls:
    """Send this member's reports, and count the bytes. `feed` takes the events that follow from the answers."""

    def __init__(
        self, context: RunContext, queries: PeerQueries, groups: ShownGroups, *, feed: Callable[[Event], None]
    ) -> None:
        self.bytes_sent = 0
        self._context = context
        self._queries = queries
        self._groups = groups
        self._feed = feed

    async def send(self, action: Ask) -> None:
        """Report to the coordinator until it decides."""
        await self._context.failpoints.reached("round.ready")
        context, peer = self._context, action.peer
        if action.was_missing and not await context.connections.answers(peer, MISSING_S):
            self._feed(Lost(peer=peer, reason=f"it was missing before, and answers nothing within {MISSING_S:.0f} s"))
            return
        request = context.signatures.sign_report(action.ready).to_bytes()
        reply = ReadyReply(kind="pending")
        try:
            while reply.kind == "pending":
                at = context.network.now() + CREDENTIAL_MARGIN_S + POLL_S
                if _any_expires_by(at, action.ready.credentials):
                    # the coordinator would refuse the report, and seem to be gone
                    self._feed(CredentialsExpired(at=at))
                    return
                self.bytes_sent += len(request)
                data = await context.network.call(peer, context.methods.ready, request, timeout_s=POLL_S + SILENT_S)
                reply = ReadyReply.from_bytes(data)
            event = await self._event_of(peer, action.ready.attempt, reply)
        except SwarmError as error:
            event = Lost(peer=peer, reason=error.message)
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


class TakenReports:
    """Keep the reports that wait at this member, their coordinator, for what the state machine answers: one of each
    peer. Count the bytes of the groups that it signs. `on_left_out` is called with each peer that is left out, and why.
    """

    def __init__(
        self,
        context: RunContext,
        setup: RoundSetup,
        groups: ShownGroups,
        *,
        feed: Callable[[Event], None],
        look_at: Callable[[str], None],
        on_left_out: Callable[[str, str], None],
    ) -> None:
        self.bytes_sent = 0
        self._context = context
        self._setup = setup
        self._groups = groups
        self._feed = feed
        self._look_at = look_at
        self._on_left_out = on_left_out
        self._waiting: dict[str, asyncio.Future[ReadyReply]] = {}

    async def take(self, peer: str, ready: Ready) -> ReadyReply:
        """Take the report of `peer`, which waits here until it is answered, or for POLL_S."""
        self._answer(peer, ReadyReply(kind="pending"))
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

    async def sign(self, action: Sign) -> None:
        """Sign the group, and answer the reports of its members with it."""
        await self._context.failpoints.reached("round.sign")
        context, at = self._context, self._context.network.now()
        if _any_expires_by(at, action.group.credentials):
            # every member would refuse a group that is signed now
            self._feed(CredentialsExpired(at=at))
            return
        signed = context.signatures.sign_group(action.group, at, self._setup.sequence)
        self._groups.add(signed)
        await self._context.failpoints.reached("round.signed")
        for peer in action.group.peer_ids:
            self.bytes_sent += len(signed.data)
            self.reply(peer, ReadyReply(kind="group", group=signed.data))
        for peer, reason in action.left_out.items():
            self.reply(peer, ReadyReply(kind="left_out", reason=reason[:400]))
        self._feed(Grouped(signed=signed))

    def reply(self, peer: str, reply: ReadyReply) -> None:
        """Answer the report of `peer` as the state machine has decided, if it waits here."""
        if reply.kind == "behind":
            # or this member is behind
            self._look_at(peer)
            replica = self._context.replica
            reply = ReadyReply(kind="behind", state_digest=replica.digest, certificate=replica.certificate)
        if reply.kind == "left_out":
            self._on_left_out(peer, reply.reason)
        self._answer(peer, reply)

    def close(self) -> None:
        """Tell all peers whose reports wait here to report again."""
        for peer in list(self._waiting):
            self._answer(peer, ReadyReply(kind="pending"))

    def _answer(self, peer: str, reply: ReadyReply) -> None:
        if (waiting := self._waiting.pop(peer, None)) and not waiting.done():
            waiting.set_result(reply)


def _any_expires_by(at: float, credentials: Iterable[RunCredential]) -> bool:
    return any(grant_of(each).expires_at <= at for each in credentials)
