"""The calls that a round makes to other members, each a function that returns an event.

Failures of peers become events too: the state machine decides what follows from them. Nothing here has state.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from swarm_protocol import limits
from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerUnreachable, SwarmError
from swarm_protocol.training_messages import Abort, Ready, ReadyReply, StandingRequest, VoteReply

from swarm.training.allreduce.peer_connections import SILENT_S, SLOWEST_BYTES_PER_S
from swarm.training.round.promise import Promise, PromiseStore
from swarm.training.round.round_events import Event, Grouped, LeftOut, Lost, Moved, Proven, Sighted
from swarm.training.round.round_state import RoundSetup
from swarm.training.state.certificate import Proof
from swarm.training.state.proof_reader import CALL_TIMEOUT_S
from swarm.training.state.state_sync import RunContext, follows

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""How long a coordinator keeps a report waiting before the member has to send it again. A coordinator that is stopped,
but whose connection does not break, is noticed after at most this and SILENT_S."""
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


def setup_of(context: RunContext) -> RoundSetup:
    """Return the setup of the step that follows the replica's committed state."""
    replica, config = context.replica, context.replica.config
    step = replica.outer_step + 1
    fragment = replica.fragment(step)
    num_values = fragment.stop - fragment.start
    roster, order = replica.roster, replica.order
    grace_s = config.quorum_grace_s if roster else max(config.quorum_grace_s, FOUNDING_GRACE_S)
    both_ways_bytes = 2 * context.codec.encoded_bytes(num_values)
    return RoundSetup(
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


async def recall_promise(context: RunContext, promises: PromiseStore | None) -> Promise | None:
    """Return what this member promised before it was started again; None if it keeps no promises. The outcome it voted
    for is proposed if it still has the parts."""
    if promises is None:
        return None
    kept = await asyncio.get_running_loop().run_in_executor(context.executor, promises.read)
    if kept is None or kept.report.voted is None or kept.report.state_digest != context.replica.digest:
        return kept
    try:
        origin = context.signatures.read_group(kept.report.voted_origin, context.network.now()).group
        await context.replica.propose(context.executor, kept.report.voted.origin_digest, origin, kept.parts)
    except SwarmError as error:
        logger.warning("what this member voted for before its restart cannot be made again: %s", error)
    return kept


async def settle(context: RunContext, step: int, proof: Proof | None) -> None:
    """End `step`, after which `proof` says what was committed. The residual of this member's contribution is committed
    if the state holds the contribution."""
    if context.residuals is None:
        return
    origin = proof.origin if proof is not None and proof.origin.step == step else None
    members = origin.members if origin is not None else ()
    counts = any(member.peer_id == context.network.peer_id and member.num_tokens for member in members)
    work = partial(context.residuals.settle, context.replica.fragment(step), is_committed=counts)
    await asyncio.get_running_loop().run_in_executor(context.executor, work)


async def report_ready(context: RunContext, peer: str, ready: Ready) -> tuple[Event, int]:
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


async def _read_reply(context: RunContext, peer: str, attempt: int, reply: ReadyReply) -> Event:
    """Raises PeerViolation or IntegrityError."""
    match reply.kind:
        case "group":
            return Grouped(signed=context.signatures.read_group(reply.group, context.network.now()))
        case "attempt":
            return Moved(attempt=attempt, to=reply.attempt)
        case "left_out":
            return LeftOut(attempt=attempt, reason=reply.reason)
        case _:
            return await overtaken(context, peer, reply.certificate) or Lost(
                peer=peer, reason="it starts from another state"
            )


async def ask_standing(
    context: RunContext, peer: str, request: StandingRequest
) -> tuple[Event | None, tuple[str, ...]]:
    """Ask `peer` where it is. Return an event that says that it is further than this member, there, or gone; and the
    peers that it knows."""
    try:
        standing = await context.standing(peer, request)
        sighted = Sighted(peer=peer, attempt=standing.attempt)
        return await overtaken(context, peer, standing.certificate) or sighted, standing.known
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


async def send_vote(context: RunContext, peer: str, vote: bytes) -> Event | None:
    try:
        reply = await context.network.call(peer, context.methods.vote, vote, timeout_s=CALL_TIMEOUT_S)
        context.meter.reported(peer, VoteReply.from_bytes(reply).bytes_per_s)
    except (PeerTimeout, PeerUnreachable) as error:
        return Lost(peer=peer, reason=error.message)
    except SwarmError as error:
        logger.warning("%s did not take a vote: %s", peer[-6:], error)
    return None


async def announce(context: RunContext, abort: Abort, peers: tuple[str, ...]) -> None:
    """Send `abort` to `peers`, within ANNOUNCE_TIMEOUT_S, so that they hear the reason before streams break."""

    async def tell(peer: str) -> None:
        try:
            await context.network.call(peer, context.methods.abort, abort.to_bytes(), timeout_s=ANNOUNCE_TIMEOUT_S)
        except SwarmError as error:
            logger.debug("could not tell %s why this member left: %s", peer[-6:], error)

    async with asyncio.TaskGroup() as tasks:
        for peer in peers:
            tasks.create_task(tell(peer))
