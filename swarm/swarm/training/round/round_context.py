"""A member's place in a run, and what it says to the other members, each as one function that ends in an event.

Failures of peers become events too, so that the round machine decides what follows from them. Nothing here has state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from swarm_compression import Codec
from swarm_protocol import limits
from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerUnreachable, PeerViolation, SwarmError
from swarm_protocol.training_messages import Abort, Certificate, Ready, ReadyReply, Standing, StandingRequest, VoteReply

from swarm.network.failpoints import FaultHook
from swarm.network.interface import EndOfStream, Network
from swarm.training.allreduce.bandwidth import SLOWEST_BYTES_PER_S, Meter
from swarm.training.allreduce.peer_connections import SILENT_S, PeerLines
from swarm.training.allreduce.residuals import Residuals
from swarm.training.round.certificate import Notary, Proof, Rank
from swarm.training.round.certificate_history import MAX_HISTORY_BYTES, MAX_LINKS
from swarm.training.round.coordinator import Terms
from swarm.training.round.methods import Methods
from swarm.training.round.promise import PromiseStore
from swarm.training.round.round_events import Event, Grouped, LeftOut, Lost, Moved, Proven, Sighted
from swarm.training.state.replica import Replica
from swarm.training.state.state_transfer import SMALL_BYTES, Fetcher

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""How long a coordinator keeps a report waiting before it has it made again. A coordinator that is stopped, whose
connection does not break, is noticed after at most this and SILENT_S."""
CALL_TIMEOUT_S = 5.0
"""For small messages over bad links."""
HISTORY_TIMEOUT_S = 60.0
"""For all links that a peer shows: MAX_HISTORY_BYTES at 2 Mbit/s."""
ANNOUNCE_TIMEOUT_S = 0.5
"""How long leaving an attempt waits until the others have heard why."""
FOUNDING_GRACE_S = 2.0
"""The least grace of a run's first group: members that start together see each other's records after about a second,
and two first groups would be two runs."""
PATIENCE_S = 10.0
"""How much longer than the grace a coordinator waits until it says that too few members are ready."""
SLOWEST_VALUES_PER_S = 2e7
"""Of an outer step with its digests; a small computer does ten times as much."""
SPARE_S = 10.0
"""For what does not grow with the vector."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seat:
    """What rounds need of a member. `executor` computes for rounds, beside the one that trains. `residuals` are
    those of a run with error feedback. `promises` outlive the process; None: this member keeps none."""

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
    meter: Meter = field(default_factory=Meter)

    @property
    def run(self) -> str:
        return self.notary.run

    @property
    def lines(self) -> PeerLines:
        return PeerLines(network=self.network, methods=self.methods, meter=self.meter)

    async def check(self, certificate: bytes) -> Proof:
        """What `certificate` proves. A large one is checked off the loop. Raises PeerViolation or IntegrityError."""
        check, now = self.notary.check_certificate, self.network.now()
        if len(certificate) <= SMALL_BYTES:
            return check(certificate, now)
        return await asyncio.get_running_loop().run_in_executor(self.executor, check, certificate, now)


def terms_of(seat: Seat) -> Terms:
    """Those of the step that follows from the replica's committed state."""
    replica, config = seat.replica, seat.replica.config
    step = replica.outer_step + 1
    fragment = replica.fragment(step)
    num_values = fragment.stop - fragment.start
    roster, order = replica.roster, replica.order
    grace_s = config.quorum_grace_s if roster else max(config.quorum_grace_s, FOUNDING_GRACE_S)
    both_ways_bytes = 2 * seat.codec.encoded_bytes(num_values)
    return Terms(
        run=seat.run,
        me=seat.network.peer_id,
        step=step,
        first_attempt=replica.proof.next_attempt if replica.proof else 0,
        state_digest=replica.digest,
        roster=roster,
        leased=replica.leased(step),
        admission=config.admission,
        min_group=config.min_group,
        max_group=config.max_group,
        samples_per_member=config.samples_per_interval,
        tokens_per_sample=config.data.window_tokens,
        num_values=num_values,
        bytes_per_s=seat.meter.bytes_per_s,
        majority_after_s=config.majority_after_s,
        sequence=order.sequence if order else 0,
        order=replica.proof.origin.order if replica.proof else b"",
        grace_s=grace_s,
        patience_s=grace_s + PATIENCE_S,
        reduce_s=min(limits.MAX_PHASE_S, SPARE_S + both_ways_bytes / SLOWEST_BYTES_PER_S),
        vote_s=min(limits.MAX_PHASE_S, SPARE_S + replica.current.manifest.num_values / SLOWEST_VALUES_PER_S),
    )


async def settle(seat: Seat, step: int, proof: Proof | None) -> None:
    """`step` is over, with `proof` of what was committed: what the codec lost of this member's contribution counts if
    that is part of it."""
    if seat.residuals is None:
        return
    origin = proof.origin if proof is not None and proof.origin.step == step else None
    members = origin.members if origin is not None else ()
    counts = any(member.peer_id == seat.network.peer_id and member.num_tokens for member in members)
    work = seat.residuals.commit if counts else seat.residuals.rollback
    await asyncio.get_running_loop().run_in_executor(seat.executor, work, seat.replica.fragment(step))


async def report_ready(seat: Seat, peer: str, ready: Ready) -> tuple[Event, int]:
    """Report to the coordinator `peer` until it decides; also the bytes that were sent for it."""
    request, num_bytes = ready.to_bytes(), 0
    try:
        while True:
            num_bytes += len(request)
            data = await seat.network.call(peer, seat.methods.ready, request, timeout_s=POLL_S + SILENT_S)
            reply = ReadyReply.from_bytes(data)
            if reply.kind != "pending":
                return await _read_reply(seat, peer, ready.attempt, reply), num_bytes
    except SwarmError as error:
        return Lost(peer=peer, reason=error.message), num_bytes


async def _read_reply(seat: Seat, peer: str, attempt: int, reply: ReadyReply) -> Event:
    """Raises PeerViolation or IntegrityError."""
    match reply.kind:
        case "group":
            return Grouped(signed=seat.notary.read_group(reply.group, seat.network.now()))
        case "attempt":
            return Moved(attempt=attempt, to=reply.attempt)
        case "left_out":
            return LeftOut(attempt=attempt, reason=reply.reason)
        case _:
            return await overtaken(seat, peer, reply.certificate) or Lost(
                peer=peer, reason="it starts from another state"
            )


async def ask_standing(seat: Seat, peer: str, request: StandingRequest) -> tuple[Event | None, tuple[str, ...]]:
    """Where `peer` is: an event that says that it is further than this member, there, or gone; and whom it knows."""
    try:
        data = await seat.network.call(peer, seat.methods.standing, request.to_bytes(), timeout_s=CALL_TIMEOUT_S)
        standing = Standing.from_bytes(data)
        sighted = Sighted(peer=peer, attempt=standing.attempt)
        return await overtaken(seat, peer, standing.certificate) or sighted, standing.known
    except PeerRefused:
        # it is there, but not yet at work
        return None, ()
    except SwarmError as error:
        return Lost(peer=peer, reason=error.message), ()


async def overtaken(seat: Seat, peer: str, certificate: bytes) -> Proven | None:
    """An event if `certificate`, which `peer` shows, is of higher rank than this member's state, and follows from it.

    What a new replica follows is decided by asking several peers (see `sync.furthest`). Raises PeerViolation or
    IntegrityError.
    """
    if not certificate:
        return None
    proof = await seat.check(certificate)
    is_further = proof.rank > seat.replica.rank and await follows(seat, peer, proof)
    return Proven(certificate=certificate) if is_further else None


async def follows(seat: Seat, peer: str, proof: Proof) -> bool:
    """Whether `proof`, which `peer` shows, follows from a state that this member trusts, or from a resume order of the
    run's author that is later than the one it knows.

    Directly, if enough of that state's members voted for it; else by the links that `peer` then has to show.
    """
    replica, succession = seat.replica, seat.notary.succession
    if proof.order == replica.order:
        rosters, rank, outer_step = replica.anchors, replica.rank, replica.outer_step
    elif proof.order is None or (replica.order and proof.sequence <= replica.order.sequence):
        logger.warning("%s shows a state that does not know the last resume order of the run's author", peer[-6:])
        return False
    elif proof.is_order:
        return True
    else:
        start = seat.notary.check_certificate(Certificate(order=proof.origin.order).to_bytes(), seat.network.now())
        rosters, rank, outer_step = (start.roster,), start.rank, start.outer_step
    if any(succession.is_enough(roster, proof.voters) for roster in rosters):
        return True
    if not rosters:
        return False
    try:
        async with asyncio.timeout(HISTORY_TIMEOUT_S):
            links = await _walk(seat, peer, proof, rosters, rank, outer_step)
    except (SwarmError, TimeoutError) as error:
        logger.warning("%s does not show how its state follows from this member's: %s", peer[-6:], error)
        return False
    if not links:
        logger.warning("%s shows a state that does not follow from this member's", peer[-6:])
    replica.history.add(links)
    return bool(links)


async def _walk(
    seat: Seat, peer: str, proof: Proof, rosters: Sequence[tuple[str, ...]], rank: Rank, outer_step: int
) -> list[Proof]:
    """The links from a state of `outer_step` and `rank`, which one of `rosters` speaks for, to the one before `proof`;
    none if there is no such way."""
    succession, links = seat.notary.succession, list[Proof]()
    num_bytes = num_received = 0
    async with seat.network.stream(peer, seat.methods.history, timeout_s=CALL_TIMEOUT_S) as stream:
        await stream.send(StandingRequest(run=seat.run, step=outer_step + 1).to_bytes())
        await stream.finish()
        while True:
            try:
                data = await stream.receive()
            except EndOfStream:
                return []
            num_bytes, num_received = num_bytes + len(data), num_received + 1
            if num_bytes > MAX_HISTORY_BYTES or num_received > MAX_LINKS:
                raise PeerViolation("its history is longer than any", peer_id=peer)
            link = await seat.check(data)
            if rank < link.rank < proof.rank and any(succession.is_enough(each, link.voters) for each in rosters):
                rosters, rank = (link.roster,), link.rank
                links.append(link)
                if succession.is_enough(link.roster, proof.voters):
                    return links


async def send_vote(seat: Seat, peer: str, vote: bytes) -> Event | None:
    try:
        reply = await seat.network.call(peer, seat.methods.vote, vote, timeout_s=CALL_TIMEOUT_S)
        seat.meter.told(peer, VoteReply.from_bytes(reply).bytes_per_s)
    except (PeerTimeout, PeerUnreachable) as error:
        return Lost(peer=peer, reason=error.message)
    except SwarmError as error:
        logger.warning("%s did not take a vote: %s", peer[-6:], error)
    return None


async def announce(seat: Seat, abort: Abort, peers: tuple[str, ...]) -> None:
    """Tell `peers`, for at most ANNOUNCE_TIMEOUT_S, so that they hear the reason before streams break."""

    async def tell(peer: str) -> None:
        try:
            await seat.network.call(peer, seat.methods.abort, abort.to_bytes(), timeout_s=ANNOUNCE_TIMEOUT_S)
        except SwarmError as error:
            logger.debug("could not tell %s why this member left: %s", peer[-6:], error)

    async with asyncio.TaskGroup() as tasks:
        for peer in peers:
            tasks.create_task(tell(peer))
