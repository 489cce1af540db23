"""Defines what all sessions of one client share: their options, connections, rows of earlier prompts, what is known of
servers, and their end.

`ClientState` has no task of its own; `close` ends those of its parts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm_protocol.errors import SessionError, SwarmError
from swarm_protocol.limits import PAGE_TOKENS

from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.serving.checking.spot_checks import SpotCheckOptions, SpotChecks
from swarm.serving.session.connection_pool import ConnectionPool
from swarm.serving.session.peer_health import PeerHealth
from swarm.serving.session.pipeline import ReplayBuffer
from swarm.serving.session.route_finder import LocalSpans

MAX_PREFIX_BYTES = 256 * 2**20
"""Thousands of tokens at the boundaries of a large model; a session's own buffers may hold as much."""


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


class PrefixStore:
    """The rows of prompts' pages that are kept after a session, by page key, which stands for the codec too, and block.

    A server may still hold the keys and values of these pages, but a client survives that server's death only if it
    has their inputs, too: sessions fill their buffers from here. The longest unused go first.
    """

    def __init__(self, max_bytes: int = MAX_PREFIX_BYTES) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._pages: OrderedDict[tuple[bytes, int], bytes] = OrderedDict()

    def keep(self, keys: Sequence[bytes], block: int, buffer: ReplayBuffer) -> None:
        """Remember the inputs of `block` for the pages with these keys, as far as the buffer has them."""
        # the first pages last, for without them the others are of no use
        for index in reversed(range(min(len(keys), buffer.length // PAGE_TOKENS))):
            name = keys[index], block
            if name in self._pages:
                self._pages.move_to_end(name)
                continue
            page = buffer.rows(index * PAGE_TOKENS, (index + 1) * PAGE_TOKENS)
            self._pages[name] = page
            self.num_bytes += len(page)
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= len(self._pages.popitem(last=False)[1])

    def forget(self, keys: Sequence[bytes]) -> None:
        """Forget the inputs of all blocks for the pages with these keys."""
        gone = set(keys)
        for name in [name for name in self._pages if name[0] in gone]:
            self.num_bytes -= len(self._pages.pop(name))

    def fill(self, keys: Sequence[bytes], block: int, buffer: ReplayBuffer) -> None:
        """Append to an empty buffer the pages that are known, without a gap."""
        assert not buffer.length
        for key in keys:
            page = self._pages.get((key, block))
            if page is None:
                return
            buffer.append(page)


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
