"""Runs a role only while the node lends. At the end of a shift the role's work ends as if the node left; it begins
again by itself.

Each time in which the node lends is a *shift*, and has its own `Shutdown` in `Node.work_end`. The daemon's task that
runs the role calls this instead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from swarm_node.lending.lending import Break
from swarm_node.node import Node, NodeRole
from swarm_node.shutdown import FORCED_S, Shutdown

LOOK_S = 5.0
"""Interval in seconds between checks whether a break begins or ends."""


async def run_in_shifts(node: Node, role: NodeRole, on_shift: Callable[[bool], None]) -> None:
    """Run `role` in each shift, until the node leaves or the role is done. Raises what the role raises.

    `on_shift` is called with True when a shift begins, and with False when a break begins.
    """
    while not node.shutdown.leaving.is_set():
        if (pause := node.break_now) is not None:
            on_shift(False)
            await _rest(node, pause)
            continue
        on_shift(True)
        node.steps.expect(role.num_steps)
        if not await _work_a_shift(node, role):
            return


async def _rest(node: Node, pause: Break) -> None:
    node.activity.state = "paused"
    node.emitter.emit("paused", reason=pause.words(time.time()), until=pause.until)
    await node.announce()
    while not node.shutdown.leaving.is_set() and node.break_now is not None:
        await node.shutdown.wait(LOOK_S)
    node.activity.state = "starting"
    await node.announce()


async def _work_a_shift(node: Node, role: NodeRole) -> bool:
    """Run the role for one shift. Return whether a break ended it, and not the role itself or the node's leaving."""
    work_end = node.work_end = Shutdown()
    work_end.grace_s = node.shutdown.grace_s
    work = asyncio.create_task(role.run(node), name="work of a shift")
    watch = asyncio.create_task(_end_in_time(node, work_end, work), name="end of a shift")
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        if watch.done():
            watch.result()
            await asyncio.wait({work})
    finally:
        watch.cancel()
        work.cancel()
        await asyncio.wait({work, watch})
        node.work_end = node.shutdown
    if not work.cancelled():
        work.result()
    return work_end.leaving.is_set() and not node.shutdown.leaving.is_set()


async def _end_in_time(node: Node, work_end: Shutdown, work: asyncio.Task[None]) -> None:
    """End the work within the grace period when a break begins. If the node leaves, the daemon ends it."""
    while (pause := node.break_now) is None:
        if await node.shutdown.wait(LOOK_S):
            work_end.request(node.shutdown.reason)
            await node.shutdown.forced.wait()
            work_end.force(node.shutdown.reason)
            return
    reason = pause.words(time.time())
    node.emitter.emit("pausing", reason=reason, seconds=work_end.grace_s)
    work_end.request(reason)
    await asyncio.wait({work}, timeout=work_end.grace_s)
    work_end.force(reason)
    await asyncio.wait({work}, timeout=FORCED_S)
    work.cancel()
