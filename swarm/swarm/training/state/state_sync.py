"""Decides which committed states a member follows, and gets them: from its own proposal, by parts, or by chunks.

`follows` decides whether a member may follow a certificate that a peer shows. `furthest` asks many peers at once.
`fetch_state` gets the state.

A member that took part has proposed the state itself. A member with the previous state needs only the result's parts. A
member that is a few steps behind needs the parts of these steps, one after the other (`catch_up`): a step's parts take
about a byte a parameter with int8, and a state takes eight. Without this, a joiner that downloads more slowly than the
run makes outer steps would fetch one state after the other, and never catch up. All others fetch chunks. The states in
between are adopted here; `OuterSteps` adopts the last one.

A state can be damaged in a member's memory. Of three or more members, the others commit without the damaged one. It
then sees that its own result of the same parts differs, and fetches the chunks that differ. If there are only two
members and their results differ, neither can commit, and neither knows which one is damaged. So each compares its state
with the committed digest after a failed attempt, and repairs what differs (`repair_if_damaged`).

No state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from swarm_compression.codec import Data
from swarm_protocol.commit_messages import Outcome
from swarm_protocol.errors import IntegrityError, SwarmError
from swarm_protocol.identity import short_id
from swarm_protocol.member_messages import StandingRequest
from swarm_protocol.records import TrainerRecord
from swarm_protocol.training_messages import Group

from swarm.network.membership import Membership
from swarm.threads import in_executor
from swarm.training.allreduce.parts import part_digests
from swarm.training.round.round_state import rest_after
from swarm.training.state.ancestry import Anchor, links_from, those_following, whom_a_newcomer_asks
from swarm.training.state.certificate_history import Proof, most_supported, whom_to_ask
from swarm.training.state.proof_reader import CALL_TIMEOUT_S
from swarm.training.state.replica import NUM_PARTS
from swarm.training.state.replica_state import ReplicaState, check_genesis
from swarm.training.state.run_context import RunContext
from swarm.training.state.state_transfer import FetchedState

logger = logging.getLogger(__name__)

MAX_DONORS = 16
"""Maximum donors of one download. With more, the joiner's own link is the bottleneck."""
NUM_RETRIES = 3
RETRY_S = 1.0
"""Donors may be busy or restarting. If they are gone, the state is lost, and waiting longer does not bring it back."""
GONE_S = 3600.0
"""Time after which a member without a state of its own no longer tries to get one that no peer shows any more. Those
who have it may be cut off for a while or gone for good, and strangers may have made it up."""
MAX_CATCH_UP_LINKS = 4 * NUM_PARTS
"""Maximum certificates of a catch-up. Rounds that only admit members lie between those that have parts."""
LINKS_S = 3 * CALL_TIMEOUT_S
"""Time limit for all peers together that are asked for certificates, so that slow or silent ones delay a member no
longer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SyncResult:
    """The `state` that `proof` certifies. `fetched` is None if this member had or computed the state."""

    proof: Proof
    state: ReplicaState
    fetched: FetchedState | None = None


async def fetch_state(
    context: RunContext,
    membership: Membership,
    proof: Proof,
    records: Mapping[str, TrainerRecord],
    on_wait: Callable[[Proof, SwarmError], None],
) -> SyncResult:
    """Get the state that `proof` certifies, or a later one. `records` name further peers that may have it.

    A member whose own state has no roster tries until it succeeds, or no peer has shown such a state for GONE_S: with
    others in its situation, it could begin the run a second time. It never begins a run of which the author has
    endorsed a state. While it waits like this, `on_wait` is called after each failed attempt.

    Raises the last attempt's SwarmError if no peer gives the state in several attempts: the members that committed it
    are gone.
    """
    now = asyncio.get_running_loop().time
    num_failed, shown_at = 0, now()
    while True:
        try:
            return await _obtain(context, proof, records)
        except SwarmError as error:
            logger.warning("cannot get the state of outer step %d yet: %s", proof.outer_step, error)
            if num_failed >= NUM_RETRIES:
                is_gone = now() > shown_at + GONE_S and context.endorsements.newest is None
                # a state that is not the run's is no reason to wait for it
                if context.replica.roster or isinstance(error, IntegrityError) or is_gone:
                    raise
                on_wait(proof, error)
        await asyncio.sleep(max(RETRY_S, rest_after(num_failed)))
        num_failed += 1
        shown, records = await newest_shown(context, membership)
        if shown is not None:
            # members without a state follow those that most voters show, which may be others by now
            proof = max(proof, shown, key=lambda each: each.rank) if context.replica.roster else shown
            shown_at = now()


async def _obtain(context: RunContext, proof: Proof, records: Mapping[str, TrainerRecord]) -> SyncResult:
    if (state := await context.replica.find_or_make(context.executor, proof)) is not None:
        return SyncResult(proof=proof, state=state)
    donors, replica = donors_of(context, proof, records), context.replica
    if replica.differing(proof.outcome) is None and (reached := await catch_up(context, proof, donors)) is not None:
        return reached
    own = [replica.current]
    # applying the parts may have shown the damage, or led to a later state of this member
    if (damaged := replica.differing(proof.outcome)) is not None:
        logger.warning("this member's copy of outer step %d is damaged: repairing what differs", proof.outer_step)
        own.insert(0, await replica.make_state(context.executor, damaged))
        replica.num_mismatches += 1
    fetched = await context.fetcher.state(proof.outcome.state_digest, donors, own)
    check_genesis(fetched.state.manifest, replica.config)
    return SyncResult(proof=proof, state=fetched.state, fetched=fetched)


def donors_of(context: RunContext, proof: Proof, records: Mapping[str, TrainerRecord]) -> list[str]:
    """Return the peers to get the state of `proof` from: drawn voters, and the fastest of those and of all that claim
    to have it. Strangers can be fast and claim it, too, and then send nothing."""
    me = context.network.peer_id
    voters = [peer for peer in proof.voters if peer != me]
    others = [peer for peer, each in records.items() if each.digest == proof.outcome.state_digest and peer != me]
    drawn = context.chance.sample(voters, min(len(voters), MAX_DONORS // 2))
    fastest = context.network.links.fastest_first(list(dict.fromkeys((*voters, *others))))
    return list(dict.fromkeys((*drawn, *fastest)))[:MAX_DONORS]


async def kept_parts(context: RunContext, outcome: Outcome) -> tuple[Data, ...]:
    """Return the outcome's parts if this member has kept them from the reduction, else an empty tuple. On a slow link,
    fetching them again takes seconds."""
    parts = context.replica.parts_of(outcome.origin_digest)
    return parts if await in_executor(context.executor, part_digests, parts) == outcome.part_digests else ()


async def catch_up(context: RunContext, proof: Proof, holders: Sequence[str]) -> SyncResult | None:
    """Get the state that `proof` certifies by the parts of the reductions that lead to it, and adopt all states before
    it. None if the parts do not lead there.

    Each certificate in between certifies exactly the state that the next one starts from. Each also follows from the
    one before, since its state is adopted even if the parts of the next one cannot be fetched.
    """
    num_bytes = 0
    try:
        async with asyncio.timeout(LINKS_S):
            chain = await _chain(context, proof, holders)
        for link in chain:
            others = (peer for peer in link.voters if peer != context.network.peer_id)
            state, size = await _rebuild(context, link, list(dict.fromkeys((*holders, *others))))
            num_bytes += size
            if link is proof:
                fetched = FetchedState(state=state, donors=tuple(sorted(holders)), num_bytes=num_bytes)
                return SyncResult(proof=proof, state=state, fetched=fetched if len(chain) > 1 else None)
            context.replica.adopt(state, link)
    except TimeoutError:
        logger.warning("fetching the state, since no peer showed the certificates before it within %.0f s", LINKS_S)
    except SwarmError as error:
        logger.warning("fetching the state, since the parts that lead to it cannot be applied: %s", error)
    return None


async def _rebuild(context: RunContext, proof: Proof, holders: Sequence[str]) -> tuple[ReplicaState, int]:
    """Apply the certified parts to this member's state, from which they start. Return the result and the bytes fetched.

    A member that has kept the parts itself fetches nothing. Raises SwarmError if the parts cannot be fetched, or lead
    to another state.
    """
    parts, num_bytes = await kept_parts(context, proof.outcome), 0
    if not parts:
        parts = await context.fetcher.parts(proof.origin, proof.outcome, holders, context.codec)
        num_bytes = sum(map(len, parts))
    mine = await context.replica.propose(context.executor, proof.outcome.origin_digest, proof.origin, parts)
    state = await context.replica.find_or_make(context.executor, proof)
    if state is None:
        raise SwarmError(f"they lead to state {mine.state_digest.hex()[:12]} on this machine")
    return state, num_bytes


async def _chain(context: RunContext, proof: Proof, peers: Sequence[str]) -> list[Proof]:
    """Return the certificates from this member's state to `proof`, which comes last. Only the first of `peers` that
    answers counts; those that voted for `proof` are asked first. The chain is empty if it shows none, one that is too
    long, or one that the members did not vote for. A resume order has no parts."""
    replica = context.replica
    if not proof.is_order and proof.origin.state_digest == replica.digest:
        return [proof]
    if proof.is_order or replica.proof is None:
        return []
    for peer in sorted(peers, key=lambda peer: peer not in proof.voters):
        try:
            made_by = await _links(context, peer)
        except SwarmError as error:
            logger.warning("%s does not show the certificates before its state: %s", short_id(peer), error)
            continue
        chain = [proof]
        while chain[0].origin.state_digest != replica.digest and len(chain) <= MAX_CATCH_UP_LINKS:
            before = made_by.get(chain[0].origin.state_digest)
            if before is None:
                return []
            chain.insert(0, before)
        is_short = len(chain) <= MAX_CATCH_UP_LINKS and _num_steps(chain) <= NUM_PARTS
        return chain if is_short and _is_voted_for(context, chain[:-1]) else []
    return []


def _is_voted_for(context: RunContext, links: Sequence[Proof]) -> bool:
    """Return whether each of `links` has the votes of enough members of the state before it, or of those that a later
    resume order names. The first one starts from this member's state. Strangers can make certificates of their own."""
    anchor, succession = anchor_of(context), context.signatures.succession
    rosters, sequence = anchor.rosters, anchor.sequence
    for link in links:
        if link.order is not None and link.sequence > sequence:
            rosters, sequence = (link.order.roster,), link.sequence
        if link.sequence < sequence or not succession.is_enough_of_any(rosters, link.voters):
            return False
        rosters = (link.roster,)
    return True


def _num_steps(chain: Sequence[Proof]) -> int:
    return sum(bool(link.outcome.part_digests) for link in chain)


async def _links(context: RunContext, peer: str) -> dict[bytes, Proof]:
    """Return the certificates that `peer` shows of states since this member's own, by the state's digest."""
    made_by: dict[bytes, Proof] = {}
    request = StandingRequest(run=context.run, step=context.replica.outer_step + 1)
    async with aclosing(context.history(peer, request)) as history:
        async for link in history:
            if not link.is_order:  # an order makes no state
                made_by[link.outcome.state_digest] = link
            if len(made_by) >= MAX_CATCH_UP_LINKS:
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
    damaged = await in_executor(context.executor, replica.damaged)
    if damaged is None or base is not replica.current:
        return
    logger.warning("this member's copy of outer step %d is damaged: repairing what differs", replica.outer_step)
    replica.num_mismatches += 1
    donors = [peer for peer in group.peer_ids if peer != context.network.peer_id]
    try:
        fetched = await context.fetcher.state(base.digest, donors, [damaged])
    except SwarmError as error:
        logger.warning("this member's state cannot be repaired now: %s", error)
        return
    if base is replica.current:
        replica.repair(fetched.state)


async def trainers(membership: Membership, run: str) -> dict[str, TrainerRecord]:
    """Return the records of the run's trainers, or of a sample of many. Empty if the lookup fails; callers look up
    again later."""
    try:
        return await membership.some_trainers(run)
    except SwarmError as error:
        logger.warning("could not look up who trains %s: %s", run, error)
        return {}


def claims_of(context: RunContext, records: Mapping[str, TrainerRecord]) -> dict[str, int]:
    """Return the outer steps that the records of other admitted peers claim, by peer."""
    others = {
        peer: each
        for peer, each in records.items()
        if peer != context.network.peer_id and context.signatures.admits(peer)
    }
    return {peer: each.outer_step for peer, each in others.items() if each.digest}


async def newest_shown(context: RunContext, membership: Membership) -> tuple[Proof | None, dict[str, TrainerRecord]]:
    """Look up the run's trainers. Return what `furthest` does for them, and their records."""
    records = await trainers(membership, context.run)
    return await furthest(context, claims_of(context, records)), records


async def furthest(context: RunContext, claims: Mapping[str, int]) -> Proof | None:
    """Return the proof of highest rank that any of these peers shows and that follows this member's state, if any does.

    A new replica without an endorsement takes the proof that most voters show, its own group's included.
    """
    replica, me = context.replica, context.network.peer_id
    if replica.is_new:
        peers = whom_a_newcomer_asks(claims, context.endorsements.newest, me, context.chance)
    else:
        peers = whom_to_ask(claims, replica.roster, context.chance)
    shown, failures = await context.newest_of(peers, StandingRequest(run=context.run, step=1))
    failed = {failure.peer_id or "": failure for failure in failures}
    for peer in failed.keys() - context.silent:
        logger.warning("%s did not show its state: %s", short_id(peer) if peer else "a peer", failed[peer])
    context.silent.clear()
    context.silent.update(failed)
    endorsement = context.endorsements.newest
    trusted = endorsement.roster if endorsement is not None and replica.proof is None else ()
    shown = await those_following(shown, partial(_counts, context), trusted)
    if replica.is_new and context.endorsements.newest is None:
        return most_supported(shown | ({me: replica.proof} if replica.proof else {}))
    return max(shown.values(), key=lambda proof: proof.rank, default=None)


async def _counts(context: RunContext, peer: str, proof: Proof) -> bool:
    """Return whether `proof`, which `peer` shows, counts in the comparison with those of others."""
    replica = context.replica
    if replica.is_new and context.endorsements.newest is None and proof.order is None:
        return True
    return proof.rank <= replica.rank or await follows(context, peer, proof)


async def follows(context: RunContext, peer: str, proof: Proof) -> bool:
    """Return whether `proof`, which `peer` shows, follows from what this member trusts, or from a later resume order of
    the run's author (see `ancestry`)."""
    try:
        links = await links_from(context, peer, proof, anchor_of(context))
    except SwarmError as error:
        logger.warning("%s shows a resume order that is not valid: %s", short_id(peer), error)
        return False
    if links is not None:
        context.replica.history.add(links)
    return links is not None


def anchor_of(context: RunContext) -> Anchor:
    """Return what this member trusts: its own state, or, before it has one, the author's newest endorsement."""
    replica, endorsement = context.replica, context.endorsements.newest
    if replica.is_new and endorsement is not None:
        return Anchor.at(endorsement)
    sequence = replica.order.sequence if replica.order else 0
    return Anchor(
        rosters=replica.anchors,
        rank=replica.rank,
        outer_step=replica.outer_step,
        sequence=sequence,
        order=replica.order,
    )
