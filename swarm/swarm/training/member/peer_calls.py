"""Makes and answers the calls of a step that ask members where they are, that report to coordinators, and that vote.

`PeerQueries` asks other members where they are, and learns of later attempts and later states. `ReportCalls` sends this
member's report. `TakenReports` keeps the reports that other members send to this one as their coordinator, and signs
the group. `VoteCalls` signs and sends this member's votes. The driver of the step owns all four. Their tasks are
`StepTasks`, but for those of votes, which others may still need after the step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from swarm_protocol.commit_messages import Abort, VoteReply
from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerUnreachable, SwarmError
from swarm_protocol.identity import short_id
from swarm_protocol.member_messages import StandingRequest
from swarm_protocol.run_credentials import any_expires_by
from swarm_protocol.training_messages import Ready, ReadyReply

from swarm.training.allreduce.peer_connections import SILENT_S
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
)
from swarm.training.round.round_state import RoundSetup, RoundState
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


class StepTasks:
    """Runs the tasks of one step in the task group that it is given, until the step is over. Those started
    `in_attempt` end with the attempt. Before and after the step, no task is started."""

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None
        self._tasks: dict[asyncio.Task[None], bool] = {}  # whether it ends with the attempt

    def open(self, group: asyncio.TaskGroup) -> None:
        self._group = group

    def start(self, work: Coroutine[Any, Any, None], name: str, *, in_attempt: bool = False) -> None:
        if self._group is None:
            work.close()
            return
        task = self._group.create_task(work, name=name)
        self._tasks[task] = in_attempt
        task.add_done_callback(self._tasks.pop)

    def end_attempt(self) -> None:
        for task, in_attempt in self._tasks.items():
            if in_attempt:
                task.cancel()

    def close(self) -> None:
        self._group = None
        for task in self._tasks:
            task.cancel()


class PeerQueries:
    """Asks peers where they are, and the peers that they name, in the step of `state`. `feed` takes the events that
    follow, and `on_certificate` is called with every certificate that was checked."""

    def __init__(
        self,
        context: RunContext,
        state: Callable[[], RoundState],
        tasks: StepTasks,
        *,
        feed: Callable[[Event], None],
        on_certificate: Callable[[bytes], None],
    ) -> None:
        self._context = context
        self._state = state
        self._tasks = tasks
        self._feed = feed
        self._on_certificate = on_certificate
        self.looking_at: set[str] = set()
        """The peers that `look_at` asks, and that have not answered yet."""

    def look_at(self, peer: str) -> None:
        """Ask `peer` where it is, which also tells it that this member is there. Do nothing if that is under way, or
        too many peers are being asked for a stranger."""
        is_new = peer not in self.looking_at and peer != self._context.network.peer_id
        if is_new and (len(self.looking_at) < MAX_LOOKING_AT or peer in self._state().setup.roster):
            self.looking_at.add(peer)
            self._tasks.start(self._look(peer), f"look at {short_id(peer)}")

    async def query(self, peer: str, *, hurry: bool) -> None:
        """Ask `peer` where it is, and feed the event that follows. `hurry` asks it to end its interval, too."""
        event, _ = await self._standing_of(peer, hurry=hurry)
        if event is not None:
            self._feed(event)

    async def take_certificate(self, peer: str, certificate: bytes) -> None:
        """Take the certificate that `peer` shows. Raises PeerViolation or IntegrityError."""
        if (further := await self.overtaken(peer, certificate)) is not None:
            self._feed(further)

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
        self._on_certificate(certificate)
        return Proven(certificate=certificate) if is_further else None

    async def _look(self, peer: str) -> None:
        event, others = await self._standing_of(peer, hurry=False)
        self.looking_at.discard(peer)
        # nothing is expected of this peer: failing to reach it is no reason to leave it out of a group
        if event is not None and not isinstance(event, Lost):
            self._feed(event)
        for other in others:
            # it counts only once it has answered itself
            if other not in self._state().known:
                self.look_at(other)

    async def _standing_of(self, peer: str, *, hurry: bool) -> tuple[Event | None, tuple[str, ...]]:
        """Ask `peer` where it is. Return an event that says that it is further than this member, there, or gone, and
        the peers that it knows. The event is None if it does not take part yet."""
        state = self._state()
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


class ReportCalls:
    """Sends this member's reports, and counts the bytes. `feed` takes the events that follow from the answers."""

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
                if any_expires_by(at, action.ready.credentials):
                    # the coordinator would refuse the report, and would look as if it were gone
                    self._feed(CredentialsExpired(attempt=action.ready.attempt, at=at))
                    return
                self.bytes_sent += len(request)
                data = await context.network.call(peer, context.methods.ready, request, timeout_s=POLL_S + SILENT_S)
                reply = ReadyReply.from_bytes(data)
            event = await self._event_of(peer, action.ready.attempt, reply)
        except SwarmError as error:
            event = Lost(peer=peer, reason=error.message)
        self._feed(event)

    async def _event_of(self, peer: str, attempt: int, reply: ReadyReply) -> Event:
        """Return the event that `peer`'s reply to a report stands for. Raises PeerViolation or IntegrityError."""
        match reply.kind:
            case "group":
                signed = self._context.signatures.read_group(reply.group, self._context.network.now())
                self._groups.check(signed)
                return Grouped(signed=signed)
            case "attempt":
                return Moved(attempt=attempt, to=reply.attempt, reason=reply.reason)
            case "left_out":
                return LeftOut(attempt=attempt, reason=reply.reason)
            case _:
                further = await self._queries.overtaken(peer, reply.certificate)
                return further or Lost(peer=peer, reason="it starts from another state")


class TakenReports:
    """Keeps the reports that wait at this member, their coordinator, for an answer of the state machine: one for each
    peer. Counts the bytes of the groups that it sends. `on_left_out` is called with each peer that is left out, and
    why."""

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
        """Take the report of `peer`. Return its answer, or `pending` after POLL_S."""
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
        if any_expires_by(at, action.group.credentials):
            # every member would refuse a group that is signed now
            self._feed(CredentialsExpired(attempt=action.group.attempt, at=at))
            return
        signed = context.signatures.sign_group(action.group, at, self._setup.sequence)
        if action.group.origin:
            # with the origin, whose members' votes count at all members of a run's first round
            signed = context.signatures.read_group(signed.data, at)
        self._groups.add(signed)
        await self._context.failpoints.reached("round.signed")
        for peer in action.group.peer_ids:
            self.bytes_sent += len(signed.data)
            self.reply(peer, ReadyReply(kind="group", group=signed.data))
        for peer, reason in action.left_out.items():
            self.reply(peer, ReadyReply(kind="left_out", reason=reason[:400]))
        self._feed(Grouped(signed=signed))

    def reply(self, peer: str, reply: ReadyReply) -> None:
        """Answer the report of `peer`, if one waits, as the state machine has decided."""
        if reply.kind == "behind":
            # it may be this member that is behind
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


class VoteCalls:
    """Signs this member's votes and sends them, and counts the bytes. `feed` takes the events that follow. The task
    group `background` outlives the step."""

    def __init__(self, context: RunContext, *, feed: Callable[[Event], None], background: asyncio.TaskGroup) -> None:
        self.bytes_sent = 0
        self._context = context
        self._feed = feed
        self._background = background

    async def cast(self, action: CastVote) -> None:
        """Sign the vote, and send it to the group. The driver has written it to disk."""
        await self._context.failpoints.reached("round.vote")
        vote = self._context.signatures.sign_vote(action.vote)
        data = vote.to_bytes()
        self._feed(Voted(peer=self._context.network.peer_id, vote=vote))
        for peer in action.peers:
            self.bytes_sent += len(data)
            # others may still need this vote when this member has seen enough of them
            self._background.create_task(self.send(peer, data, vote.attempt), name=f"vote to {short_id(peer)}")

    async def send(self, peer: str, vote: bytes, attempt: int) -> None:
        """Send a signed vote of `attempt` to `peer`."""
        context, lost = self._context, None
        try:
            reply = await context.network.call(peer, context.methods.vote, vote, timeout_s=CALL_TIMEOUT_S)
            context.meter.reported(peer, VoteReply.from_bytes(reply).bytes_per_s)
        except (PeerTimeout, PeerUnreachable) as error:
            lost = Lost(peer=peer, reason=error.message, attempt=attempt)
        except SwarmError as error:
            logger.warning("%s did not take a vote: %s", short_id(peer), error)
        await context.failpoints.reached("round.voted")
        if lost is not None:
            self._feed(lost)


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
