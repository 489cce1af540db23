"""Defines what all sessions of one client share: their options, connections, what is known of servers, and their end.

`ClientState` has no task of its own; `close` ends those of its parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swarm_protocol.errors import SessionError, SwarmError

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
        self._sessions: set[Callable[[SwarmError], None]] = set()
        self._has_ended = False

    def enter(self, give_up: Callable[[SwarmError], None]) -> None:
        """Note an open session, which gives up when the sessions end. Raises SessionError once they have ended."""
        if self._has_ended:
            raise _closed()
        self._sessions.add(give_up)

    def leave(self, give_up: Callable[[SwarmError], None]) -> None:
        self._sessions.discard(give_up)

    def end_sessions(self) -> None:
        """Fail all open sessions with SessionError, and those to come."""
        self._has_ended = True
        for give_up in list(self._sessions):
            give_up(_closed())

    async def close(self) -> None:
        await self.checks.close()
        await self.health.close()
        await self.connections.close()


def _closed() -> SessionError:
    return SessionError("the client has been closed", remedy="read answers inside its `with` block")
