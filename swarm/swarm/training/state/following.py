"""Which committed states a member follows, of those that the certificates of other members prove.

`follows` decides whether a member that has a state may follow a certificate; `furthest` asks many peers at once.
`state_sync` then gets the state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass, field

from swarm_compression import Codec
from swarm_protocol.errors import SwarmError
from swarm_protocol.records import TrainerRecord
from swarm_protocol.training_messages import Certificate, StandingRequest

from swarm.network.interface import FaultHook
from swarm.network.membership import Membership
from swarm.training.allreduce.parts import Residuals
from swarm.training.allreduce.peer_connections import BandwidthMeter, PeerConnections
from swarm.training.state.certificate import (
    Proof,
    Rank,
    most_supported,
    whom_to_ask,
)
from swarm.training.state.proof_reader import HISTORY_TIMEOUT_S, ProofReader
from swarm.training.state.replica import Replica
from swarm.training.state.state_transfer import Fetcher

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunContext(ProofReader):
    """What the rooms of training need of one member. `executor` computes for rounds, beside the one that trains.
    `residuals` exist in a run with error feedback."""

    executor: Executor
    replica: Replica
    codec: Codec
    fetcher: Fetcher
    faults: FaultHook
    residuals: Residuals | None = None
    meter: BandwidthMeter = field(default_factory=BandwidthMeter)

    @property
    def connections(self) -> PeerConnections:
        return PeerConnections(network=self.network, methods=self.methods, meter=self.meter)


async def trainers(membership: Membership, run: str) -> dict[str, TrainerRecord]:
    """Return the records of the run's trainers. They are empty if the lookup fails; callers look up again later."""
    try:
        return await membership.trainers(run)
    except SwarmError as error:
        logger.warning("could not look up who trains %s: %s", run, error)
        return {}


def claims_of(context: RunContext, records: Mapping[str, TrainerRecord]) -> dict[str, int]:
    """Return the outer steps that other peers claim to have, of all peers that the run admits."""
    others = {
        peer: each
        for peer, each in records.items()
        if peer != context.network.peer_id and context.signatures.admits(peer)
    }
    return {peer: each.outer_step for peer, each in others.items() if each.digest}


async def furthest(context: RunContext, claims: Mapping[str, int]) -> Proof | None:
    """Return the proof of highest rank that any of these peers shows and that follows this member's state, if any does.

    Any proof follows a new replica's state: it takes what most voters show, its own group's included.
    """
    replica, me = context.replica, context.network.peer_id
    peers = whom_to_ask(claims, () if replica.is_new else replica.roster, me)
    async with asyncio.TaskGroup() as tasks:
        asking = {peer: tasks.create_task(_proof_of(context, peer)) for peer in peers}
    shown = {peer: proof for peer, task in asking.items() if (proof := task.result()) is not None}
    if not replica.is_new:
        return max(shown.values(), key=lambda proof: proof.rank, default=None)
    return most_supported(shown | ({me: replica.proof} if replica.proof else {}))


async def _proof_of(context: RunContext, peer: str) -> Proof | None:
    try:
        proof = await context.newest(peer, StandingRequest(run=context.run, step=1))
        if proof is None:
            return None
        is_open = proof.rank <= context.replica.rank or (context.replica.is_new and proof.order is None)
        return proof if is_open or await follows(context, peer, proof) else None
    except SwarmError as error:
        logger.warning("%s did not say where it is: %s", peer[-6:], error)
        return None


async def follows(context: RunContext, peer: str, proof: Proof) -> bool:
    """Return whether `proof`, which `peer` shows, follows from a state that this member trusts, or from a later resume
    order of the run's author than it knows.

    It follows directly if enough of that state's members voted for it, else by the links that `peer` then has to show.
    """
    replica, succession = context.replica, context.signatures.succession
    if proof.order == replica.order:
        rosters, rank, outer_step = replica.anchors, replica.rank, replica.outer_step
    elif proof.order is None or (replica.order and proof.sequence <= replica.order.sequence):
        logger.warning("%s shows a state that does not know the last resume order of the run's author", peer[-6:])
        return False
    elif proof.is_order:
        return True
    else:
        start = context.signatures.check_certificate(
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
    context: RunContext, peer: str, proof: Proof, rosters: Sequence[tuple[str, ...]], rank: Rank, outer_step: int
) -> list[Proof]:
    """Return the links from the state of `outer_step` and `rank`, for which one of `rosters` vouches, to the one before
    `proof`; none if they do not lead there."""
    succession, links = context.signatures.succession, list[Proof]()
    async with aclosing(context.history(peer, StandingRequest(run=context.run, step=outer_step + 1))) as history:
        async for link in history:
            if rank < link.rank < proof.rank and any(succession.is_enough(each, link.voters) for each in rosters):
                rosters, rank = (link.roster,), link.rank
                links.append(link)
                if succession.is_enough(link.roster, proof.voters):
                    return links
    return []
