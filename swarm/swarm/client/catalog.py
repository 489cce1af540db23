"""What a client knows of the swarm's models: who serves which, and how it is whole. One per client, on its event loop.

Remembers MAX_MODELS of them, and who serves them for MODELS_FRESH_S.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from swarm_protocol.errors import ConfigError
from swarm_protocol.records import ServeRecord

from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.router.routing import best_revision, missing_spans

MAX_MODELS = 8

MODELS_FRESH_S = 2.0
"""How long a list of models is good for; a gateway asks for it with each request."""

Servers = Mapping[str, ServeRecord]
"""Of one revision of a model, by peer id."""

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """What the swarm has of a model. It can answer when no blocks are `missing`.

    `unreachable` has also the blocks of servers that this client has just failed to reach, whatever their records say.
    `age_s`: of the servers that are counted on, none was last heard of longer ago; one that was killed is counted on
    until its record expires or somebody here has tried to reach it.
    """

    name: str
    revision: str
    num_blocks: int
    num_servers: int
    missing: tuple[tuple[int, int], ...]
    unreachable: tuple[tuple[int, int], ...]
    age_s: float


class Catalog:
    def __init__(self, network: Network, membership: Membership) -> None:
        self._network = network
        self._membership = membership
        self._seen: dict[str, tuple[float, Servers]] = {}
        self._all: tuple[float, Mapping[str, Servers]] = (-MODELS_FRESH_S, {})

    async def models(self) -> Mapping[str, Servers]:
        """By name, those that somebody serves a part of. Raises PeerTimeout."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._all[0] >= MODELS_FRESH_S:
            names = await self._membership.models()
            self._all = (now_s, {name: await self.newest_servers(name) for name in names})
        return {name: servers for name, servers in self._all[1].items() if servers}

    async def newest_servers(self, model: str) -> Servers:
        """Of the best revision, looked up now. Raises PeerTimeout, ValueError if that cannot be a model's name."""
        return best_revision(await self._membership.servers(model))

    async def seen_servers(self, model: str) -> Servers:
        """As `newest_servers`, looked up again after MODELS_FRESH_S; a session does so when one fails."""
        now_s = asyncio.get_running_loop().time()
        seen_s, servers = self._seen.get(model, (0.0, {}))
        if not servers or now_s - seen_s >= MODELS_FRESH_S:
            servers = await self.newest_servers(model)
            if servers:
                _keep(self._seen, model, (now_s, servers))
        return servers

    async def servers(self, model: str) -> Servers:
        """Of the revision that can answer, one or more. Raises ConfigError if there are none."""
        try:
            servers = await self.seen_servers(model)
        except ValueError as error:
            raise ConfigError(str(error), remedy="give the model's name as its servers tell it") from error
        if not servers:
            known = ", ".join(await self._membership.models()) or "none"
            raise ConfigError(f"nobody serves a model {model!r}; known models: {known}", remedy="use one of these")
        return servers


def status_of(name: str, servers: Servers, avoid: Collection[str], ages_s: Mapping[str, float]) -> ModelStatus:
    """Of one server or more; those to `avoid` cannot be reached."""
    record = next(iter(servers.values()))
    reached = {peer_id: record for peer_id, record in servers.items() if peer_id not in avoid}
    return ModelStatus(
        name=name,
        revision=record.revision,
        num_blocks=record.num_blocks,
        num_servers=sum(record.state == "serving" for record in servers.values()),
        missing=missing_spans(servers, record.num_blocks),
        unreachable=missing_spans(reached, record.num_blocks),
        age_s=max((ages_s.get(peer_id, 0.0) for peer_id in reached), default=0.0),
    )


def _keep(cache: dict[K, T], key: K, value: T) -> None:
    """The oldest goes when there are too many."""
    cache.pop(key, None)
    if len(cache) >= MAX_MODELS:
        del cache[next(iter(cache))]
    cache[key] = value
