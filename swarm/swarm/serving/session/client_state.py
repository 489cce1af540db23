"""Defines what all sessions of one client share: their options, connections, and what is known of servers.

`ClientState` has no task of its own; `close` ends those of its parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.serving.checking.spot_checks import SpotCheckOptions, SpotChecks
from swarm.serving.session.connection_pool import ConnectionPool
from swarm.serving.session.peer_health import PeerHealth
from swarm.serving.session.prefix_store import PrefixStore
from swarm.serving.session.route_finder import LocalSpans


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """`patience_s`: how long to look for a replacement. `max_replay_bytes`: what may be kept to survive failures.

    `codec` of the activations on the wire: "raw", "bf16" or "int8". `checks`: which answers are checked; None: none.
    `local_spans`: the spans at both ends of the model that this process runs itself; servers then run the blocks
    between.
    """

    patience_s: float = 20.0
    max_replay_bytes: int = 2**31
    max_step_tokens: int = 512
    codec: str = "raw"
    checks: SpotCheckOptions | None = None
    local_spans: LocalSpans | None = None


class ClientState:
    """Holds one client's connections to servers, their health, prefixes of earlier sessions, and the spot checks of
    answers that have ended. `convicted` returns the servers that are not asked."""

    def __init__(
        self,
        network: Network,
        membership: Membership,
        checks: SpotCheckOptions | None = None,
        *,
        convicted: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        checks = checks or SpotCheckOptions(share=0.0)
        self.connections = ConnectionPool(network)
        self.health = PeerHealth(membership, checks.reputation, convicted=convicted)
        self.prefixes = PrefixStore()
        self.checks = SpotChecks(network, membership, self.health.reputation, checks, convicted=convicted)

    async def close(self) -> None:
        await self.checks.close()
        await self.health.close()
        await self.connections.close()
