"""Holds what all sessions of one client share: options, connections, rows of earlier prompts, who has their pages, and
the health of servers.

`ClientState` has no task of its own; `close` ends those of its parts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarm_protocol.limits import PAGE_TOKENS

from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.newest_items import NewestItems
from swarm.serving.checking.spot_checks import SpotCheckOptions, SpotChecks
from swarm.serving.session.connection_pool import ConnectionPool, client_closed
from swarm.serving.session.peer_health import PeerHealth
from swarm.serving.session.replay_buffer import ReplayBuffer
from swarm.serving.session.route_finder import LocalSpans

if TYPE_CHECKING:
    from swarm.serving.session.session import Session

MAX_PREFIX_BYTES = 256 * 2**20
"""Maximum bytes of the prefix store: the rows of thousands of tokens at the span boundaries of a large model. A
session's own buffers may hold as much."""

MAX_HELD_PAGES = 16_384
"""Maximum page keys whose servers are remembered: those of a quarter of a million tokens, or of half as many where
several servers make a chain, since the first server of a chain has other keys than the others."""

MAX_HOLDERS = 16
"""Maximum servers that are remembered for a page: those that computed it last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """Options of sessions. `patience_s` is how long they look for a replacement, and `max_replay_bytes` how much they
    may keep to survive failures.

    `codec` encodes activations on the wire: "raw", "bf16" or "int8". With `drafts`, the last server gets the text from
    which it may take drafts. `checks` says which answers are checked; None checks none. `local_spans` are the spans at
    both ends of the model that this process runs itself; servers then run the blocks between them.
    """

    patience_s: float = 20.0
    max_replay_bytes: int = 2**31
    max_step_tokens: int = 512
    codec: str = "raw"
    drafts: bool = True
    checks: SpotCheckOptions | None = None
    local_spans: LocalSpans | None = None


class PageHolders:
    """Remembers which servers computed the pages of prompts and answers, by page key. They probably still have them, so
    a conversation goes on fastest there. One that does not computes them again, and then has them."""

    def __init__(self) -> None:
        self._peers = NewestItems[bytes, tuple[str, ...]](MAX_HELD_PAGES)

    def add(self, peer_id: str, keys: Sequence[bytes]) -> None:
        # the first pages are set last, so that they are dropped last: without them the others are of no use
        for key in reversed(keys):
            others = (other for other in self._peers.get(key, ()) if other != peer_id)
            self._peers[key] = (peer_id, *others)[:MAX_HOLDERS]

    def cached_tokens(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Return for each server how many of the first tokens of the pages with these keys it probably has."""
        found: dict[str, int] = {}
        holders = set(self._peers.get(keys[0], ())) if keys else set()
        for index, key in enumerate(keys):
            holders.intersection_update(self._peers.get(key, ()))
            if not holders:
                break
            found |= dict.fromkeys(holders, (index + 1) * PAGE_TOKENS)
        return found


class PrefixStore:
    """Keeps the rows of prompts' pages after a session, by page key and block. The page key also depends on the codec.

    A server may still hold the keys and values of these pages, but a client survives that server's death only if it has
    their inputs, too. New sessions fill their buffers from here. The least recently used pages are dropped first.
    `holders` are the servers that had the pages.
    """

    def __init__(self, max_bytes: int = MAX_PREFIX_BYTES) -> None:
        self.holders = PageHolders()
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._pages: OrderedDict[tuple[bytes, int], bytes] = OrderedDict()

    def keep(self, keys: Sequence[bytes], block: int, buffer: ReplayBuffer) -> None:
        """Remember the inputs of `block` for the pages with these keys, as far as the buffer has them."""
        # the first pages are kept last, so that they are dropped last: without them the others are of no use
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
        """Append the known pages to an empty buffer, up to the first unknown one."""
        assert not buffer.length
        for key in keys:
            page = self._pages.get((key, block))
            if page is None:
                return
            buffer.append(page)


class ClientState:
    """Holds one client's connections to servers, the servers' health, prefixes of earlier sessions, and spot checks of
    ended answers. `convicted` returns the convicted servers, which are not asked."""

    def __init__(
        self,
        network: Network,
        membership: Membership,
        checks: SpotCheckOptions | None = None,
        *,
        convicted: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        checks = checks or SpotCheckOptions(share=0.0)
        self.health = PeerHealth(membership, checks.reputation, convicted=convicted)
        self.connections = ConnectionPool(network, on_room=self.health.made_room)
        self.prefixes = PrefixStore()
        self.checks = SpotChecks(network, membership, self.health.reputation, checks, convicted=convicted)
        self._sessions: set[Session] = set()
        self._has_ended = False

    def check_open(self) -> None:
        """Raise SessionError once the sessions have ended."""
        if self._has_ended:
            raise client_closed()

    def enter(self, session: Session) -> None:
        """Register an open session. Raises SessionError once the sessions have ended."""
        self.check_open()
        self._sessions.add(session)

    def leave(self, session: Session) -> None:
        self._sessions.discard(session)

    def bytes_beside(self, session: Session, peer_id: str) -> int:
        """Return the bytes that all other sessions have under way to and from a server."""
        return sum(other.bytes_under_way(peer_id) for other in self._sessions if other is not session)

    def end_sessions(self) -> None:
        """Fail all open sessions, and all later ones and calls, with SessionError."""
        self._has_ended = True
        for session in list(self._sessions):
            session.give_up(client_closed())

    async def close(self) -> None:
        await self.checks.close()
        await self.health.close()
        await self.connections.close()
