"""What a member has before its first round: the checkpoint's weights, and what it promised before it was started again.

No state: `trainer` calls these while it takes its seat and joins.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from swarm_protocol.errors import SwarmError
from torch import Tensor

from swarm.training.round.promise import Promise
from swarm.training.round.round_context import Seat
from swarm.training.state.replica import Held
from swarm.training.state.replica_state import ReplicaState

logger = logging.getLogger(__name__)


async def bring_weights(seat: Seat, bring: Callable[[], Tensor]) -> None:
    """Begin with the weights that `bring`, which blocks, has from the run's checkpoint. Raises what it raises."""
    theta_N = await asyncio.to_thread(bring)
    state = ReplicaState.initial(theta_N, seat.replica.config.overlap_steps)
    seat.replica.begin(await asyncio.get_running_loop().run_in_executor(seat.executor, Held.of, state))


async def recall(seat: Seat) -> Promise | None:
    """What this member promised before it was started again; the outcome it voted for is proposed if it has the
    parts."""
    if seat.promises is None:
        return None
    kept = await asyncio.get_running_loop().run_in_executor(seat.executor, seat.promises.read)
    if kept is None or kept.report.voted is None or kept.report.state_digest != seat.replica.digest:
        return kept
    try:
        origin = seat.notary.read_group(kept.report.voted_origin, seat.network.now()).group
        await seat.replica.propose(seat.executor, kept.report.voted.origin_digest, origin, kept.parts)
    except SwarmError as error:
        logger.warning("what this member voted for before its restart cannot be made again: %s", error)
    return kept
