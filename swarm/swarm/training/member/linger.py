"""Lingering at the end of a run: a member that is done stays to serve the last state to members that lack it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarm_protocol.errors import PeerError

from swarm.network.membership import Membership

LINGER_S = 30.0
LOOK_S = 1.0


async def let_others_finish(
    membership: Membership,
    run: str,
    me: str,
    leaving: asyncio.Event | None = None,
    on_wait: Callable[[tuple[str, ...], float], None] = lambda _peers, _seconds: None,
) -> None:
    """Return once all other members of `run` have the last state too, after LINGER_S, or when `leaving` is set.

    If one look is not enough, `on_wait` is called once with the peers that this waits for and the seconds left.
    """
    leaving = leaving or asyncio.Event()
    now = asyncio.get_running_loop().time
    until_s, num_looks = now() + LINGER_S, 0
    while now() < until_s and (behind := await _behind(membership, run, me)):
        num_looks += 1
        if num_looks == 2:
            on_wait(behind, until_s - now())
        try:
            async with asyncio.timeout(LOOK_S):
                await leaving.wait()
            return
        except TimeoutError:
            continue


async def _behind(membership: Membership, run: str, me: str) -> tuple[str, ...]:
    try:
        trainers = await membership.trainers(run)
    except PeerError:
        return ()
    others = {peer_id: record for peer_id, record in trainers.items() if peer_id != me}
    return tuple(peer_id for peer_id, record in others.items() if record.state in {"joining", "training"})
