"""How a member gets to the state that a certificate names: from its own proposal, by parts, or by fetching chunks.

A member that took part has proposed the state itself. A member that held the state before needs only the result's
parts. A member that is a few steps behind needs the parts of all these steps, one after the other (`catch_up`): a
step's parts take about a byte a parameter with int8, a state takes eight. A joiner whose link needs longer for the
state than the run for an outer step would otherwise fetch one state after the other, and never arrive. All others
fetch chunks. States in between are adopted here; `RunMember` adopts the last one.

A state can change in a member's memory. Among three or more members, the others commit without the damaged member,
which then sees that its own result of the same parts differs, and fetches the chunks that differ. If only two are
left and their results differ, neither can tell which one is damaged, and neither can go on. So each compares its state
with the committed digest after a failed attempt, and repairs what differs (`repair_if_damaged`).

No state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from swarm_protocol.errors import SwarmError
from swarm_protocol.records import TrainerRecord
from swarm_protocol.training_messages import Group, StandingRequest

from swarm.network.membership import Membership
from swarm.training.state.certificate import Proof
from swarm.training.state.following import RunContext, claims_of, furthest, trainers
from swarm.training.state.proof_reader import CALL_TIMEOUT_S
from swarm.training.state.replica import NUM_PARTS, HashedState
from swarm.training.state.state_transfer import FetchedState

logger = logging.getLogger(__name__)

MAX_DONORS = 16
"""The most donors of one download. Beyond them the joiner's own link is the bottleneck."""
NUM_RETRIES = 3
RETRY_S = 1.0
"""Donors may be busy or restarting. If they are gone, the state is lost, and waiting longer does not bring it back."""
MAX_LINKS = 4 * NUM_PARTS
"""The longest chain of certificates. Rounds that only admit members lie between those that leave parts."""
LINKS_S = 3 * CALL_TIMEOUT_S
"""The time limit for all peers together that show certificates, so that slow or silent ones delay a member no
longer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SyncResult:
    """`held` is the state that `proof` certifies. `fetched` is None if this member had or computed it."""

    proof: Proof
    held: HashedState
    fetched: FetchedState | None = None


async def reach(
    context: RunContext, membership: Membership, proof: Proof, records: Mapping[str, TrainerRecord]
) -> SyncResult:
    """Get the state that `proof` certifies, or a later one. `records` name further peers that may have it.

    Raises RoundError if no peer gives it in several attempts: the members that committed it are gone.
    """
    for _ in range(NUM_RETRIES):
        try:
            return await _obtain(context, proof, records)
        except SwarmError as error:
            logger.warning("cannot get the state of outer step %d yet: %s", proof.outer_step, error)
        await asyncio.sleep(RETRY_S)
        records = await trainers(membership, context.run)
        later = await furthest(context, claims_of(context, records))
        proof = max(proof, later or proof, key=lambda each: each.rank)
    return await _obtain(context, proof, records)


async def _obtain(context: RunContext, proof: Proof, records: Mapping[str, TrainerRecord]) -> SyncResult:
    if (held := await _mine(context, proof)) is not None:
        return SyncResult(proof=proof, held=held)
    others = [peer for peer, record in records.items() if record.digest == proof.outcome.state_digest]
    donors = [peer for peer in dict.fromkeys((*proof.voters, *others)) if peer != context.network.peer_id][:MAX_DONORS]
    replica = context.replica
    if replica.differing(proof.outcome) is None and (reached := await _by_parts(context, proof, donors)) is not None:
        return reached
    own = [replica.current]
    if (damaged := replica.differing(proof.outcome)) is not None:
        logger.warning("this member's copy of outer step %d is damaged: repairing what differs", proof.outer_step)
        own.insert(0, await replica.make(context.executor, damaged))
        replica.num_mismatches += 1
    fetched = await context.fetcher.state(proof.outcome.state_digest, donors, own)
    return SyncResult(proof=proof, held=fetched.held, fetched=fetched)


async def _mine(context: RunContext, proof: Proof) -> HashedState | None:
    """The state, if this member has it already, or what makes it."""
    replica = context.replica
    if proof.is_order:
        return replica.current if proof.outcome.state_digest == replica.digest else None
    proposal = replica.proposal(proof.outcome)
    return None if proposal is None else await replica.make(context.executor, proposal)


async def _by_parts(context: RunContext, proof: Proof, donors: list[str]) -> SyncResult | None:
    """Get the state from this member's own by the parts of reductions. None if they do not lead there.

    A resume order has no parts.
    """
    if proof.is_order:
        return None
    if proof.origin.state_digest == context.replica.digest:
        try:
            held, _ = await rebuild(context, proof, donors)
            return SyncResult(proof=proof, held=held)
        except SwarmError as error:
            logger.warning("fetching the state, since its parts do not lead to it: %s", error)
    elif context.replica.proof is not None and (caught := await catch_up(context, proof, donors)) is not None:
        return SyncResult(proof=proof, held=caught.held, fetched=caught)
    return None


async def rebuild(context: RunContext, proof: Proof, holders: Sequence[str]) -> tuple[HashedState, int]:
    """Apply the certified parts to this member's state, which they start from. Return the result and the parts' bytes.

    Raises SwarmError if the parts cannot be had, or lead to another state.
    """
    parts = await context.fetcher.parts(proof.origin, proof.outcome, holders, context.codec)
    mine = await context.replica.propose(context.executor, proof.outcome.origin_digest, proof.origin, parts)
    proposal = context.replica.proposal(proof.outcome)
    if proposal is None:
        raise SwarmError(f"they lead to {mine.state_digest.hex()[:12]} here")
    return await context.replica.make(context.executor, proposal), sum(map(len, parts))


async def catch_up(context: RunContext, proof: Proof, holders: Sequence[str]) -> FetchedState | None:
    """Get the state that `proof` certifies, and adopt all states before it. None if the parts do not lead there.

    The certificates in between need no trust of their own: each certifies exactly the state that the next one, and in
    the end `proof`, starts from.
    """
    num_bytes = 0
    try:
        async with asyncio.timeout(LINKS_S):
            chain = await _chain(context, proof, holders)
        for link in chain:
            others = (peer for peer in link.voters if peer != context.network.peer_id)
            held, size = await rebuild(context, link, list(dict.fromkeys((*holders, *others))))
            num_bytes += size
            if link is proof:
                donors = tuple(sorted(holders))
                return FetchedState(held=held, donors=donors, num_bytes=num_bytes)
            context.replica.adopt(held, link)
    except TimeoutError:
        logger.warning("fetching the state, since nobody showed what led to it within %.0f s", LINKS_S)
    except SwarmError as error:
        logger.warning("fetching the state, since the parts in between cannot be had: %s", error)
    return None


async def _chain(context: RunContext, proof: Proof, peers: Sequence[str]) -> list[Proof]:
    """The certificates from this member's state to `proof`, which comes last. The first of `peers` that answers
    decides; the chain is empty if it has none, or one that is too long."""
    for peer in peers:
        try:
            made_by = await _links(context, peer)
        except SwarmError as error:
            logger.warning("%s does not show what led to its state: %s", peer[-6:], error)
            continue
        chain = [proof]
        while chain[0].origin.state_digest != context.replica.digest and len(chain) <= MAX_LINKS:
            before = made_by.get(chain[0].origin.state_digest)
            if before is None:
                return []
            chain.insert(0, before)
        return chain if len(chain) <= MAX_LINKS and _num_steps(chain) <= NUM_PARTS else []
    return []


def _num_steps(chain: Sequence[Proof]) -> int:
    return sum(bool(link.outcome.part_digests) for link in chain)


async def _links(context: RunContext, peer: str) -> dict[bytes, Proof]:
    """Return the certificate of each state since this member's own, by the state's digest."""
    made_by: dict[bytes, Proof] = {}
    request = StandingRequest(run=context.run, step=context.replica.outer_step + 1)
    async with aclosing(context.history(peer, request)) as history:
        async for link in history:
            if not link.is_order:  # an order makes no state
                made_by[link.outcome.state_digest] = link
            if len(made_by) >= MAX_LINKS:
                break
    return made_by


async def repair_if_damaged(context: RunContext, group: Group) -> None:
    """Check this member's state before it computes `group`'s outcome, if an earlier attempt at the step has failed.

    If the state is damaged, repair it from the group's members.
    """
    replica = context.replica
    if group.attempt == (replica.proof.next_attempt if replica.proof else 0):
        return
    base = replica.current
    damaged = await asyncio.get_running_loop().run_in_executor(context.executor, replica.damaged)
    if damaged is None or base is not replica.current:
        return
    logger.warning("this member's copy of outer step %d is damaged: repairing what differs", replica.outer_step)
    replica.num_mismatches += 1
    donors = [peer for peer in group.peer_ids if peer != context.network.peer_id]
    try:
        fetched = await context.fetcher.state(base.digest, donors, [damaged])
    except SwarmError as error:
        logger.warning("it cannot be repaired now: %s", error)
        return
    if base is replica.current:
        replica.repair(fetched.held)
