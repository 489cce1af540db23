"""A volunteer that was given no work: it looks for what the network lacks, takes that, and looks again when it is done.

What cannot be taken here is left alone for a while, with the reason. The role's task owns everything.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from dataclasses import dataclass

from swarm_protocol.errors import SwarmError

from swarm_node.config import Config
from swarm_node.dashboard.poller import Looking
from swarm_node.needs import ModelNeed, Need, RunNeed, needs
from swarm_node.node import Node, RelayUse, RoleName
from swarm_node.standby import relay_use

LOOK_S = 5.0
"""Between looks while there is nothing to do: records are renewed every 30 s."""
RETRY_S = 300.0
"""How long work that could not be taken is left alone."""
MAX_LEFT_ALONE = 256
"""Names of such work that are remembered: anyone can make up more."""
MAX_TOLD = 3
"""Of these in one line, the newest."""


@dataclass(frozen=True, slots=True)
class _LeftAlone:
    until: float
    reason: str


class Helper:
    """A role that ends only when told to."""

    name: RoleName = "volunteer"
    num_steps = 5  # looks, then those of a volunteer with work

    def __init__(self, config: Config) -> None:
        self.computes = config.device != "cpu" or config.probe != "off"
        self._left_alone: dict[str, _LeftAlone] = {}
        self._told = ""
        self._num_taken = 0

    def relay(self, config: Config) -> RelayUse:
        return relay_use(config)

    async def run(self, node: Node) -> None:
        looking = Looking(node.network, node.membership)
        while not node.departure.leaving.is_set():
            for need in await self._look(node, looking):
                if await self._helped(node, need) or node.departure.leaving.is_set():
                    break
            else:
                self._tell_waiting(node)
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await node.departure.leaving.wait()

    async def _look(self, node: Node, looking: Looking) -> list[Need]:
        try:
            found = await looking.look()
        except SwarmError:  # nobody answers yet, or any more: the next look may find them
            return []
        now = asyncio.get_running_loop().time()
        self._left_alone = {name: each for name, each in self._left_alone.items() if each.until > now}
        kinds = {"models": ModelNeed, "runs": RunNeed, "any": ModelNeed | RunNeed}[node.config.take]
        wanted = [need for need in needs(found.look, node.network.peer_id) if isinstance(need, kinds)]
        return [need for need in wanted if need.name not in self._left_alone]

    async def _helped(self, node: Node, need: Need) -> bool:
        """Whether the work was taken, and done or ended by leaving."""
        # what trains and serves brings torch, which a node that only waits does without
        from swarm_node import taking  # noqa: PLC0415

        try:
            work = await taking.prepared(node, need)
        except SwarmError as error:
            self._leave_alone(need.name, error.message, RETRY_S)
            return False
        if self._num_taken:
            node.steps.more(self.num_steps)
        self._num_taken += 1
        self._told = ""
        node.steps.done("looks", need.why)
        try:
            await work()
        except SwarmError as error:
            if node.departure.leaving.is_set():
                raise
            self._leave_alone(need.name, error.message, RETRY_S)
            node.emitter.emit("warning", message=f"{need.name} is given up: {error.message}", remedy=error.remedy)
            return False
        self._leave_alone(need.name, "it is finished here", math.inf)
        return True

    def _leave_alone(self, name: str, reason: str, seconds: float) -> None:
        if len(self._left_alone) >= MAX_LEFT_ALONE:
            del self._left_alone[next(iter(self._left_alone))]
        self._left_alone[name] = _LeftAlone(asyncio.get_running_loop().time() + seconds, reason)

    def _tell_waiting(self, node: Node) -> None:
        node.activity.state = "idle"
        newest = list(self._left_alone.items())[-MAX_TOLD:]
        reasons = "; ".join(f"{name}: {each.reason}" for name, each in newest)
        if num_more := len(self._left_alone) - len(newest):
            reasons += f"; and {num_more} more"
        told = reasons or "nobody serves a model or trains a run that this node could help with"
        if told != self._told:
            self._told = told
            node.emitter.emit("waiting", reason=told)
