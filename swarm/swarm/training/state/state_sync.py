"""How a member gets to the state that a certificate names: by the proposal it has, by the parts, or by fetching it.

A member that took part has proposed the state itself. One that held the state before needs only the result's parts, a
byte a parameter with int8, and one a few steps behind those of all these steps (`catch_up`). One whose own result of
the same parts is another has been damaged, in its memory or by a defect, and fetches the chunks that differ. Everyone
else fetches chunks. States in between are adopted here, and what comes back by `trainer`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from swarm_protocol.errors import SwarmError
from swarm_protocol.records import TrainerRecord
from swarm_protocol.training_messages import Standing, StandingRequest

from swarm.network.membership import Membership
from swarm.training.round.certificate import Proof
from swarm.training.round.claims import most_supported, whom_to_ask
from swarm.training.round.round_context import CALL_TIMEOUT_S, Seat, follows
from swarm.training.state.catch_up import catch_up, rebuild
from swarm.training.state.replica import Held, Replica
from swarm.training.state.state_transfer import Fetched

logger = logging.getLogger(__name__)

MAX_DONORS = 16
"""Beyond this a joiner's own link is the bottleneck."""
NUM_RETRIES = 3
RETRY_S = 1.0
"""Donors may be busy or restarting. If they are gone, the state is lost, and waiting longer does not bring it back."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reached:
    """The state that `proof` is about. `fetched` says how it came, unless this member could compute it."""

    proof: Proof
    held: Held
    fetched: Fetched | None = None


async def trainers(membership: Membership, run: str) -> dict[str, TrainerRecord]:
    """Who trains `run`; nobody if the lookup fails, which is then tried again sooner or later."""
    try:
        return await membership.trainers(run)
    except SwarmError as error:
        logger.warning("could not look up who trains %s: %s", run, error)
        return {}


def claims_of(seat: Seat, records: Mapping[str, TrainerRecord]) -> dict[str, int]:
    """The outer steps that others say they have, of all that the run admits."""
    others = {peer: each for peer, each in records.items() if peer != seat.network.peer_id and seat.notary.admits(peer)}
    return {peer: each.outer_step for peer, each in others.items() if each.digest}


async def furthest(seat: Seat, claims: Mapping[str, int]) -> Proof | None:
    """The proof of highest rank that any of these peers can show, and that follows; None if nobody has one.

    To a new replica anything follows: it takes what most voters show (see `claims`), its own group's included.
    """
    replica, me = seat.replica, seat.network.peer_id
    peers = whom_to_ask(claims, () if replica.is_new else replica.roster, me)
    async with asyncio.TaskGroup() as tasks:
        asking = {peer: tasks.create_task(_proof_of(seat, peer)) for peer in peers}
    shown = {peer: proof for peer, task in asking.items() if (proof := task.result()) is not None}
    if not replica.is_new:
        return max(shown.values(), key=lambda proof: proof.rank, default=None)
    return most_supported(shown | ({me: replica.proof} if replica.proof else {}))


async def _proof_of(seat: Seat, peer: str) -> Proof | None:
    request = StandingRequest(run=seat.run, step=1).to_bytes()
    try:
        data = await seat.network.call(peer, seat.methods.standing, request, timeout_s=CALL_TIMEOUT_S)
        certificate = Standing.from_bytes(data).certificate
        if not certificate:
            return None
        proof = await seat.check(certificate)
        is_open = proof.rank <= seat.replica.rank or (seat.replica.is_new and proof.order is None)
        return proof if is_open or await follows(seat, peer, proof) else None
    except SwarmError as error:
        logger.warning("%s did not say where it is: %s", peer[-6:], error)
        return None


async def reach(seat: Seat, membership: Membership, proof: Proof, records: Mapping[str, TrainerRecord]) -> Reached:
    """The state that `proof` is about, or a later one. `records` say who else may have it.

    Raises RoundError if nobody gives it, also when asked again: those who committed it are gone.
    """
    for _ in range(NUM_RETRIES):
        try:
            return await _obtain(seat, proof, records)
        except SwarmError as error:
            logger.warning("cannot get the state of outer step %d yet: %s", proof.outer_step, error)
        await asyncio.sleep(RETRY_S)
        records = await trainers(membership, seat.run)
        later = await furthest(seat, claims_of(seat, records))
        proof = max(proof, later or proof, key=lambda each: each.rank)
    return await _obtain(seat, proof, records)


async def _obtain(seat: Seat, proof: Proof, records: Mapping[str, TrainerRecord]) -> Reached:
    if (held := _mine(seat.replica, proof)) is not None:
        return Reached(proof=proof, held=held)
    others = [peer for peer, record in records.items() if record.digest == proof.outcome.state_digest]
    donors = [peer for peer in dict.fromkeys((*proof.voters, *others)) if peer != seat.network.peer_id][:MAX_DONORS]
    replica = seat.replica
    if replica.differing(proof.outcome) is None and (reached := await _by_parts(seat, proof, donors)) is not None:
        return reached
    own = [replica.current]
    if (damaged := replica.differing(proof.outcome)) is not None:
        logger.warning("this member's copy of outer step %d is damaged: repairing what differs", proof.outer_step)
        own.insert(0, damaged)
        replica.num_mismatches += 1
    fetched = await seat.fetcher.state(proof.outcome.state_digest, donors, own)
    return Reached(proof=proof, held=Held(state=fetched.state, manifest=fetched.manifest), fetched=fetched)


def _mine(replica: Replica, proof: Proof) -> Held | None:
    """The state as this member has it already."""
    if not proof.is_order:
        return replica.proposal(proof.outcome)
    return replica.current if proof.outcome.state_digest == replica.digest else None


async def _by_parts(seat: Seat, proof: Proof, donors: list[str]) -> Reached | None:
    """By what reductions left, if that leads there from this member's state. A resume order has reduced nothing."""
    if proof.is_order:
        return None
    if proof.origin.state_digest == seat.replica.digest:
        try:
            held, _ = await rebuild(seat, proof, donors)
            return Reached(proof=proof, held=held)
        except SwarmError as error:
            logger.warning("fetching the state, since its parts do not lead to it: %s", error)
    elif seat.replica.proof is not None and (caught := await catch_up(seat, proof, donors)) is not None:
        return Reached(proof=proof, held=Held(state=caught.state, manifest=caught.manifest), fetched=caught)
    return None
