"""Volunteers without a given task: `HelperRole` looks for work that the network lacks, `StandbyRole` takes none.

`needs` ranks what the network lacks, thinnest first: models by the number of servers of their least served block, runs
by their number of members. The ranking comes from signed records, which are only claims of their peers;
`swarm_node.roles.volunteer.prepare_work` checks a need before it becomes work. Work that this node cannot take is
postponed, with the reason. The role's task owns all state. This module does not import torch.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from swarm.newest_items import NewestItems
from swarm_protocol.errors import ConfigError, SwarmError
from swarm_protocol.records import ServeRecord

from swarm_node.diagnostics import as_swarm_error
from swarm_node.formatting import plural
from swarm_node.machine.hardware import PROCESS_BYTES, share_of_limit
from swarm_node.machine.lean_imports import lean_imports
from swarm_node.network_snapshot import NetworkPoller, NetworkSnapshot
from swarm_node.node import Node, NodeRole, RelayUse
from swarm_node.settings.config import Config

POLL_S = 5.0
"""Seconds between polls while there is nothing to do. Records are renewed every 30 s."""
RETRY_S = 300.0
"""Seconds for which work that could not be taken is postponed."""
MAX_POSTPONED = 256
"""Maximum number of postponed names, since anyone can invent names."""
MAX_NAMED = 3
"""Maximum number of postponed names in a message. The newest are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNeed:
    """A model whose least served block has `num_helpers` servers.

    `revision` is the one that most servers have. `sources` are the hub commits that these servers name, the most named
    first. `manifest` is the digest of the signed manifest that most of them announce, or b"", and `holders` are the
    servers that have it.
    """

    name: str
    revision: str
    sources: tuple[str, ...]
    manifest: bytes
    holders: tuple[str, ...]
    num_helpers: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNeed:
    """A run with `num_helpers` members that have not finished it."""

    name: str
    num_helpers: int
    why: str


Need = ModelNeed | RunNeed


def needs(snapshot: NetworkSnapshot, me: str) -> list[Need]:
    """Return what the network lacks, thinnest first, then models, then by name. The records of `me` do not count."""
    found: list[Need] = []
    for name, servers in snapshot.models.items():
        if need := _model_need(name, {peer: each for peer, each in servers.records.items() if peer != me}):
            found.append(need)
    for name, trainers in snapshot.runs.items():
        active = [
            peer for peer, each in trainers.records.items() if each.state in {"joining", "training"} and peer != me
        ]
        if active:
            why = f"run {name} has {_counted(len(active), 'member')}"
            found.append(RunNeed(name=name, num_helpers=len(active), why=why))
    return sorted(found, key=lambda need: (need.num_helpers, isinstance(need, RunNeed), need.name))


def _model_need(name: str, servers: Mapping[str, ServeRecord]) -> ModelNeed | None:
    there = [record for record in servers.values() if record.state != "draining"]
    if not there:
        return None
    (revision, num_blocks), _ = Counter((each.revision, each.num_blocks) for each in there).most_common(1)[0]
    same = [each for each in there if (each.revision, each.num_blocks) == (revision, num_blocks)]
    changes = [0] * (num_blocks + 1)
    for record in same:
        changes[record.start] += 1
        changes[record.end] -= 1
    counts = list(accumulate(changes[:-1]))
    least = min(counts)
    thin = sum(count == least for count in counts)
    return ModelNeed(
        name=name,
        revision=revision,
        sources=tuple(source for source, _ in Counter(each.source for each in same if each.source).most_common()),
        manifest=(manifest := Counter(each.manifest for each in same).most_common(1)[0][0]),
        holders=tuple(
            peer_id
            for peer_id, each in servers.items()
            if each.state == "serving" and each.revision == revision and each.manifest == manifest
        ),
        num_helpers=least,
        why=f"{thin} of the {num_blocks} blocks of {name} {'has' if thin == 1 else 'have'} {_counted(least, 'server')}",
    )


def _counted(count: int, what: str) -> str:
    return f"only {plural(count, what)}" if count else f"no {what}"


class IdleRole(NodeRole):
    """A volunteer that was given no work."""

    name = "volunteer"

    def __init__(self, config: Config) -> None:
        self.computes = config.device != "cpu" or config.probe != "off"

    def relay(self, config: Config) -> RelayUse:
        return config.relay


class StandbyRole(IdleRole):
    """A role without work. It ends only when asked to."""

    num_steps = 2

    async def run(self, node: Node) -> None:
        node.activity.state = "idle"
        node.steps.done("takes", f"no work, because of {node.config.origin('take')}")
        node.steps.done("standing by", f"to work, {_way_to_work(node.config)}")
        await node.work_end.leaving.wait()


def _way_to_work(config: Config) -> str:
    if config.invite is not None and not {"serve", "train"} & set(config.invite.terms.rights):
        return "ask the network's owner for an invitation with the right to serve or to train"
    return f"restart this node without {config.origin('take')}, or with --run RUN or --model MODEL in its place"


class HelperRole(IdleRole):
    """A role that takes work until it is asked to leave."""

    num_steps = 5  # finding work, then the steps of a volunteer with work

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        # event loop time until which it is postponed, and why
        self._postponed = NewestItems[str, tuple[float, str]](MAX_POSTPONED)
        self._reported: dict[str, str] | None = None

    async def run(self, node: Node) -> None:
        self._check_memory(node)
        poller = NetworkPoller(node.network, node.membership)
        while not node.work_end.leaving.is_set():
            for need in await self._find_needs(node, poller):
                if await self._help(node, need) or node.work_end.leaving.is_set():
                    break
            else:
                self._report_waiting(node)
                await node.work_end.wait(POLL_S)

    def _check_memory(self, node: Node) -> None:
        """Warn if the owner's limit leaves no memory for any block, since the node would wait for models in vain."""
        config, held = node.config, PROCESS_BYTES if node.hardware.device == "cpu" else 0
        if not config.max_memory or config.take == "runs":
            return
        try:
            share_of_limit(config.max_memory, held)
        except ConfigError as error:
            node.emitter.warning(f"this node can serve no model: {error.message}", remedy=error.remedy)

    async def _find_needs(self, node: Node, poller: NetworkPoller) -> list[Need]:
        try:
            snapshot, _ = await poller.poll()
        except SwarmError:  # no node answers now; the next poll may find some
            return []
        now = asyncio.get_running_loop().time()
        for name in [name for name, (until_s, _) in self._postponed.items() if until_s <= now]:
            del self._postponed[name]
        kinds = {"models": ModelNeed, "runs": RunNeed, "any": ModelNeed | RunNeed}[node.config.take]
        wanted = [need for need in needs(snapshot, node.network.peer_id) if isinstance(need, kinds)]
        return [need for need in wanted if need.name not in self._postponed]

    async def _help(self, node: Node, need: Need) -> bool:
        """Do the work for `need`. Return whether it was taken, and done or ended by leaving."""
        # imports torch, which a node that only waits does not need
        with lean_imports():
            from swarm_node.roles import volunteer  # noqa: PLC0415

        # torch and transformers may raise anything for a stranger's run or model: this must end the work and not the
        # node
        try:
            work = await volunteer.prepare_work(node, need)
        except Exception as error:
            self._postpone(need.name, as_swarm_error(error).message, RETRY_S)
            return False
        node.steps.expect(self.num_steps)
        node.steps.done("looks", need.why)
        try:
            await work()
        except Exception as error:
            if node.work_end.leaving.is_set():
                raise
            told = as_swarm_error(error)
            self._postpone(need.name, told.message, RETRY_S)
            node.emitter.warning(f"this node stops working on {need.name}: {told.message}", remedy=told.remedy)
            return False
        self._postpone(need.name, "it is finished here", math.inf)
        return True

    def _postpone(self, name: str, reason: str, seconds: float) -> None:
        self._postponed[name] = (asyncio.get_running_loop().time() + seconds, reason)

    def _report_waiting(self, node: Node) -> None:
        """Report why the node has no work, unless it has already reported these reasons."""
        node.activity.state = "idle"
        reasons = {name: reason for name, (_, reason) in self._postponed.items()}
        if reasons == self._reported:
            return
        news = [f"{name}: {reason}" for name, reason in reasons.items() if (self._reported or {}).get(name) != reason]
        self._reported = reasons
        told = "; ".join(news[-MAX_NAMED:])
        if len(news) > MAX_NAMED:
            told += f"; and {len(news) - MAX_NAMED} more"
        if told or not reasons:
            reason = told or "nobody serves a model or trains a run that this node could help with"
            node.emitter.emit("waiting", reason=reason)
