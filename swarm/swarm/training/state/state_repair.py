"""A state that has changed in this member's memory is found when an attempt fails, and mended.

Among three or more, the others commit without a damaged member, which then sees that its result differs (`sync`). Of
two that differ nobody can say which one is damaged, and neither can go on: so each compares its state with the digest
that was committed, and whoever finds the damage fetches the chunks that differ. No state.
"""

from __future__ import annotations

import asyncio
import logging

from swarm_protocol.errors import SwarmError
from swarm_protocol.training_messages import Group

from swarm.training.round.round_context import Seat
from swarm.training.state.replica import Held

logger = logging.getLogger(__name__)


async def mend(seat: Seat, group: Group) -> None:
    """Before this member makes `group`'s outcome: if an earlier attempt at the step has failed, is its state whole?"""
    replica = seat.replica
    if group.attempt == (replica.proof.next_attempt if replica.proof else 0):
        return
    base = replica.current
    damaged = await asyncio.get_running_loop().run_in_executor(seat.executor, replica.damaged)
    if damaged is None or base is not replica.current:
        return
    logger.warning("this member's copy of outer step %d is damaged: repairing what differs", replica.outer_step)
    replica.num_mismatches += 1
    donors = [peer for peer in group.peer_ids if peer != seat.network.peer_id]
    try:
        fetched = await seat.fetcher.state(base.digest, donors, [damaged])
    except SwarmError as error:
        logger.warning("it cannot be repaired now: %s", error)
        return
    if base is replica.current:
        replica.mend(Held(state=fetched.state, manifest=fetched.manifest))
