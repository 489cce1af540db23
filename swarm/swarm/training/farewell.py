"""The end of a run: whoever is done stays for those who are a step behind, to whom it gives the last state."""

from __future__ import annotations

import asyncio

from swarm_protocol.errors import PeerError

from swarm.network.membership import Membership

LINGER_S = 30.0
LOOK_S = 1.0


async def let_others_finish(membership: Membership, run: str, me: str, leaving: asyncio.Event | None = None) -> None:
    """Stay until all other members of `run` have the last state too, but at most LINGER_S, or until `leaving`."""
    leaving = leaving or asyncio.Event()
    until_s = asyncio.get_running_loop().time() + LINGER_S
    while asyncio.get_running_loop().time() < until_s and await _someone_is_behind(membership, run, me):
        try:
            async with asyncio.timeout(LOOK_S):
                await leaving.wait()
            return
        except TimeoutError:
            continue


async def _someone_is_behind(membership: Membership, run: str, me: str) -> bool:
    try:
        trainers = await membership.trainers(run)
    except PeerError:
        return False
    return any(record.state in {"joining", "training"} for peer_id, record in trainers.items() if peer_id != me)
