"""How a member that is a few outer steps behind follows: by the parts of the steps in between, one after the other.

A step's parts take about a byte a parameter with int8, a state eight. A joiner whose link takes longer for the state
than the run for an outer step would otherwise fetch one state after the other, and never arrive. No state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from swarm_protocol.errors import SwarmError
from swarm_protocol.training_messages import StandingRequest

from swarm.network.interface import EndOfStream
from swarm.training.round.certificate import Proof
from swarm.training.round.round_context import CALL_TIMEOUT_S, Seat
from swarm.training.state.replica import NUM_PARTS, Held
from swarm.training.state.state_transfer import Fetched

logger = logging.getLogger(__name__)

MAX_LINKS = 4 * NUM_PARTS
"""Rounds that only admit members lie between those that leave parts."""

LINKS_S = 3 * CALL_TIMEOUT_S
"""For all peers together: whoever drips or is silent delays a member by no more."""


async def rebuild(seat: Seat, proof: Proof, holders: Sequence[str]) -> tuple[Held, int]:
    """Apply the certified parts to this member's state, which they start from; also how many bytes they have.

    Raises SwarmError if they cannot be had, or lead to another state.
    """
    parts = await seat.fetcher.parts(proof.origin, proof.outcome, holders, seat.codec)
    mine = await seat.replica.propose(seat.executor, proof.outcome.origin_digest, proof.origin, parts)
    held = seat.replica.proposal(proof.outcome)
    if held is None:
        raise SwarmError(f"they lead to {mine.state_digest.hex()[:12]} here")
    return held, sum(map(len, parts))


async def catch_up(seat: Seat, proof: Proof, holders: Sequence[str]) -> Fetched | None:
    """The state that `proof` is about, with all states before it adopted. None if the parts do not lead there.

    The certificates in between need no trust of their own: each is of the very state that the next one, and at last
    `proof`, says it starts from.
    """
    num_bytes = 0
    try:
        async with asyncio.timeout(LINKS_S):
            chain = await _chain(seat, proof, holders)
        for link in chain:
            others = (peer for peer in link.voters if peer != seat.network.peer_id)
            held, size = await rebuild(seat, link, list(dict.fromkeys((*holders, *others))))
            num_bytes += size
            if link is proof:
                donors = tuple(sorted(holders))
                return Fetched(state=held.state, manifest=held.manifest, donors=donors, num_bytes=num_bytes)
            seat.replica.adopt(held, link)
    except TimeoutError:
        logger.warning("fetching the state, since nobody showed what led to it within %.0f s", LINKS_S)
    except SwarmError as error:
        logger.warning("fetching the state, since the parts in between cannot be had: %s", error)
    return None


async def _chain(seat: Seat, proof: Proof, peers: Sequence[str]) -> list[Proof]:
    """From this member's state to `proof`, which comes last, as the first of `peers` shows that can; else empty."""
    for peer in peers:
        try:
            made_by = await _links(seat, peer)
        except SwarmError as error:
            logger.warning("%s does not show what led to its state: %s", peer[-6:], error)
            continue
        chain = [proof]
        while chain[0].origin.state_digest != seat.replica.digest and len(chain) <= MAX_LINKS:
            before = made_by.get(chain[0].origin.state_digest)
            if before is None:
                return []
            chain.insert(0, before)
        return chain if len(chain) <= MAX_LINKS and _num_steps(chain) <= NUM_PARTS else []
    return []


def _num_steps(chain: Sequence[Proof]) -> int:
    return sum(bool(link.outcome.part_digests) for link in chain)


async def _links(seat: Seat, peer: str) -> dict[bytes, Proof]:
    """What made each state since this member's own, by the state's digest."""
    made_by: dict[bytes, Proof] = {}
    async with seat.network.stream(peer, seat.methods.history, timeout_s=CALL_TIMEOUT_S) as stream:
        await stream.send(StandingRequest(run=seat.run, step=seat.replica.outer_step + 1).to_bytes())
        await stream.finish()
        for _ in range(MAX_LINKS):
            try:
                link = await seat.check(await stream.receive())
            except EndOfStream:
                break
            if not link.is_order:  # which makes no state
                made_by[link.outcome.state_digest] = link
    return made_by
