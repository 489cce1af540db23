"""What a round needs of a member, and the calls it makes to other members, each a function that returns an event.

Failures of peers become events too: the state machine decides what follows from them. Nothing here has state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

from swarm_compression import Codec
from swarm_protocol import limits
from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerUnreachable, PeerViolation, SwarmError
from swarm_protocol.training_messages import Abort, Certificate, Ready, ReadyReply, Standing, StandingRequest, VoteReply

from swarm.network.interface import EndOfStream, FaultHook, Network
from swarm.training.allreduce.parts import Residuals
from swarm.training.allreduce.peer_connections import SILENT_S, SLOWEST_BYTES_PER_S, BandwidthMeter, PeerConnections
from swarm.training.round.certificate import MAX_HISTORY_BYTES, MAX_LINKS, Notary, Proof, Rank
from swarm.training.round.methods import Methods
from swarm.training.round.promise import Promise, PromiseStore
from swarm.training.round.round_events import Event, Grouped, LeftOut, Lost, Moved, Proven, Sighted
from swarm.training.round.round_state import Terms
from swarm.training.state.replica import Replica
from swarm.training.state.state_transfer import SMALL_BYTES, Fetcher

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""How long a coordinator keeps a report waiting before the member has to send it again. A coordinator that is stopped,
but whose connection does not break, is noticed after at most this and SILENT_S."""
CALL_TIMEOUT_S = 5.0
"""The deadline of a small message over a bad link."""
HISTORY_TIMEOUT_S = 60.0
"""The deadline for all links that a peer shows: MAX_HISTORY_BYTES at 2 Mbit/s."""
ANNOUNCE_TIMEOUT_S = 0.5
"""How long leaving an attempt waits until the others have heard why."""
FOUNDING_GRACE_S = 2.0
"""The least grace of a run's first group. Members that start together see each other's records after about a second,
and two first groups would be two runs."""
PATIENCE_S = 10.0
"""How much longer than the grace a coordinator waits before it reports that too few members are ready."""
SLOWEST_VALUES_PER_S = 2e7
"""The rate of an outer step with its digests on a slow machine; a small computer is ten times as fast."""
SPARE_S = 10.0
"""The part of a phase's deadline that does not grow with the vector."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundContext:
    """What rounds need of a member. `executor` computes for rounds, beside the one that trains. `residuals` exist in a
    run with error feedback. `promises` outlive the process; None if this member keeps none."""

    network: Network
    notary: Notary
    methods: Methods
    replica: Replica
    codec: Codec
    fetcher: Fetcher
    executor: Executor
    faults: FaultHook
    residuals: Residuals | None = None
    promises: PromiseStore | None = None
    meter: BandwidthMeter = field(default_factory=BandwidthMeter)

    @property
    def run(self) -> str:
        return self.notary.run

    @property
    def connections(self) -> PeerConnections:
        return PeerConnections(network=self.network, methods=self.methods, meter=self.meter)

    async def check(self, certificate: bytes) -> Proof:
        """Return what `certificate` proves. A large one is checked off the loop. Raises PeerViolation or
        IntegrityError."""
        check, now = self.notary.check_certificate, self.network.now()
        if len(certificate) <= SMALL_BYTES:
            return check(certificate, now)
        return await asyncio.get_running_loop().run_in_executor(self.executor, check, certificate, now)


def terms_of(context: RoundContext) -> Terms:
    """Return the terms of the step that follows the replica's committed state."""
    replica, config = context.replica, context.replica.config
    step = replica.outer_step + 1
    fragment = replica.fragment(step)
    num_values = fragment.stop - fragment.start
    roster, order = replica.roster, replica.order
    grace_s = config.quorum_grace_s if roster else max(config.quorum_grace_s, FOUNDING_GRACE_S)
    both_ways_bytes = 2 * context.codec.encoded_bytes(num_values)
    return Terms(
        run=context.run,
        me=context.network.peer_id,
        step=step,
        first_attempt=replica.proof.next_attempt if replica.proof else 0,
        state_digest=replica.digest,
        roster=roster,
        leased=replica.leased(step),
        admission=config.admission,
        succession=config.succession,
        max_group=config.max_group,
        samples_per_member=config.samples_per_interval,
        tokens_per_sample=config.data.window_tokens,
        num_values=num_values,
        bytes_per_s=context.meter.bytes_per_s,
        sequence=order.sequence if order else 0,
        order=replica.proof.origin.order if replica.proof else b"",
        grace_s=grace_s,
        patience_s=grace_s + PATIENCE_S,
        reduce_s=min(limits.MAX_PHASE_S, SPARE_S + both_ways_bytes / SLOWEST_BYTES_PER_S),
        vote_s=min(limits.MAX_PHASE_S, SPARE_S + replica.current.manifest.num_values / SLOWEST_VALUES_PER_S),
    )


async def recall_promise(context: RoundContext) -> Promise | None:
    """Return what this member promised before it was started again. The outcome it voted for is proposed if it still
    has the parts."""
    if context.promises is None:
        return None
    kept = await asyncio.get_running_loop().run_in_executor(context.executor, context.promises.read)
    if kept is None or kept.report.voted is None or kept.report.state_digest != context.replica.digest:
        return kept
    try:
        origin = context.notary.read_group(kept.report.voted_origin, context.network.now()).group
        await context.replica.propose(context.executor, kept.report.voted.origin_digest, origin, kept.parts)
    except SwarmError as error:
        logger.warning("what this member voted for before its restart cannot be made again: %s", error)
    return kept


async def settle(context: RoundContext, step: int, proof: Proof | None) -> None:
    """End `step`, after which `proof` says what was committed. The residual of this member's contribution is committed
    if the state holds the contribution."""
    if context.residuals is None:
        return
    origin = proof.origin if proof is not None and proof.origin.step == step else None
    members = origin.members if origin is not None else ()
    counts = any(member.peer_id == context.network.peer_id and member.num_tokens for member in members)
    work = partial(context.residuals.settle, context.replica.fragment(step), is_committed=counts)
    await asyncio.get_running_loop().run_in_executor(context.executor, work)


async def report_ready(context: RoundContext, peer: str, ready: Ready) -> tuple[Event, int]:
    """Report to the coordinator `peer` until it decides. Return the event and the number of bytes sent."""
    request, num_bytes = ready.to_bytes(), 0
    try:
        while True:
            num_bytes += len(request)
            data = await context.network.call(peer, context.methods.ready, request, timeout_s=POLL_S + SILENT_S)
            reply = ReadyReply.from_bytes(data)
            if reply.kind != "pending":
                return await _read_reply(context, peer, ready.attempt, reply), num_bytes
    except SwarmError as error:
        return Lost(peer=peer, reason=error.message), num_bytes


async def _read_reply(context: RoundContext, peer: str, attempt: int, reply: ReadyReply) -> Event:
    """Raises PeerViolation or IntegrityError."""
    match reply.kind:
        case "group":
            return Grouped(signed=context.notary.read_group(reply.group, context.network.now()))
        case "attempt":
            return Moved(attempt=attempt, to=reply.attempt)
        case "left_out":
            return LeftOut(attempt=attempt, reason=reply.reason)
        case _:
            return await overtaken(context, peer, reply.certificate) or Lost(
                peer=peer, reason="it starts from another state"
            )


async def ask_standing(
    context: RoundContext, peer: str, request: StandingRequest
) -> tuple[Event | None, tuple[str, ...]]:
    """Ask `peer` where it is. Return an event that says that it is further than this member, there, or gone; and the
    peers that it knows."""
    try:
        data = await context.network.call(peer, context.methods.standing, request.to_bytes(), timeout_s=CALL_TIMEOUT_S)
        standing = Standing.from_bytes(data)
        sighted = Sighted(peer=peer, attempt=standing.attempt)
        return await overtaken(context, peer, standing.certificate) or sighted, standing.known
    except PeerRefused:
        # it is there, but does not take part yet
        return None, ()
    except SwarmError as error:
        return Lost(peer=peer, reason=error.message), ()


async def overtaken(context: RoundContext, peer: str, certificate: bytes) -> Proven | None:
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


async def follows(context: RoundContext, peer: str, proof: Proof) -> bool:
    """Return whether `proof`, which `peer` shows, follows from a state that this member trusts, or from a later resume
    order of the run's author than it knows.

    It follows directly if enough of that state's members voted for it, else by the links that `peer` then has to show.
    """
    replica, succession = context.replica, context.notary.succession
    if proof.order == replica.order:
        rosters, rank, outer_step = replica.anchors, replica.rank, replica.outer_step
    elif proof.order is None or (replica.order and proof.sequence <= replica.order.sequence):
        logger.warning("%s shows a state that does not know the last resume order of the run's author", peer[-6:])
        return False
    elif proof.is_order:
        return True
    else:
        start = context.notary.check_certificate(
            Certificate(order=proof.origin.order).to_bytes(), context.network.now()
        )
        rosters, rank, outer_step = (start.roster,), start.rank, start.outer_step
    if any(succession.is_enough(roster, proof.voters) for roster in rosters):
        return True
    if not rosters:
        return False
    try:
        async with asyncio.timeout(HISTORY_TIMEOUT_S):
            links = await _walk(context, peer, proof, rosters, rank, outer_step)
    except (SwarmError, TimeoutError) as error:
        logger.warning("%s does not show how its state follows from this member's: %s", peer[-6:], error)
        return False
    if not links:
        logger.warning("%s shows a state that does not follow from this member's", peer[-6:])
    replica.history.add(links)
    return bool(links)


async def _walk(
    context: RoundContext, peer: str, proof: Proof, rosters: Sequence[tuple[str, ...]], rank: Rank, outer_step: int
) -> list[Proof]:
    """Return the links from the state of `outer_step` and `rank`, for which one of `rosters` vouches, to the one before
    `proof`; none if they do not lead there."""
    succession, links = context.notary.succession, list[Proof]()
    num_bytes = num_received = 0
    async with context.network.stream(peer, context.methods.history, timeout_s=CALL_TIMEOUT_S) as stream:
        await stream.send(StandingRequest(run=context.run, step=outer_step + 1).to_bytes())
        await stream.finish()
        while True:
            try:
                data = await stream.receive()
            except EndOfStream:
                return []
            num_bytes, num_received = num_bytes + len(data), num_received + 1
            if num_bytes > MAX_HISTORY_BYTES or num_received > MAX_LINKS:
                raise PeerViolation("its history is longer than any", peer_id=peer)
            link = await context.check(data)
            if rank < link.rank < proof.rank and any(succession.is_enough(each, link.voters) for each in rosters):
                rosters, rank = (link.roster,), link.rank
                links.append(link)
                if succession.is_enough(link.roster, proof.voters):
                    return links


async def send_vote(context: RoundContext, peer: str, vote: bytes) -> Event | None:
    try:
        reply = await context.network.call(peer, context.methods.vote, vote, timeout_s=CALL_TIMEOUT_S)
        context.meter.reported(peer, VoteReply.from_bytes(reply).bytes_per_s)
    except (PeerTimeout, PeerUnreachable) as error:
        return Lost(peer=peer, reason=error.message)
    except SwarmError as error:
        logger.warning("%s did not take a vote: %s", peer[-6:], error)
    return None


async def announce(context: RoundContext, abort: Abort, peers: tuple[str, ...]) -> None:
    """Send `abort` to `peers`, within ANNOUNCE_TIMEOUT_S, so that they hear the reason before streams break."""

    async def tell(peer: str) -> None:
        try:
            await context.network.call(peer, context.methods.abort, abort.to_bytes(), timeout_s=ANNOUNCE_TIMEOUT_S)
        except SwarmError as error:
            logger.debug("could not tell %s why this member left: %s", peer[-6:], error)

    async with asyncio.TaskGroup() as tasks:
        for peer in peers:
            tasks.create_task(tell(peer))
