"""Hosts in memory that call each other, for tests of decisions above the daemon: who gets which address, and
who dials.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace

from swarm.network.interface import NotServed
from swarm.network.libp2p.daemon_control import ControlError
from swarm_protocol.errors import PeerUnreachable

Answer = Callable[[str, bytes], Awaitable[bytes]]


class FakeHost:
    """The part of a `Host` that `swarm.network.paths` uses. `seen_at` are the addresses at which others see it."""

    def __init__(self, hosts: dict[str, FakeHost], peer_id: str, seen_at: Sequence[str], own: Sequence[str]) -> None:
        self.peer_id = peer_id
        self.seen_at = tuple(seen_at)
        self.own = tuple(own)
        self.peers: dict[str, tuple[str, ...]] = {}
        self.introduced: dict[str, str] = {}
        self.dialled: list[tuple[str, tuple[str, ...]]] = []
        self.known: dict[str, tuple[str, ...]] = {}
        self.control = SimpleNamespace(connect=self._connect)
        self._hosts = hosts
        self._answers: dict[str, Answer] = {}
        hosts[peer_id] = self

    def meet(self, other: FakeHost) -> None:
        """Connect the two directly."""
        self.peers[other.peer_id] = other.seen_at
        other.peers[self.peer_id] = self.seen_at

    def known_addrs(self, peer_id: str) -> Sequence[str]:
        return self.known.get(peer_id, ())

    async def addrs(self) -> tuple[str, ...]:
        return self.own

    @property
    def connected(self) -> dict[str, tuple[str, ...]]:
        return self.peers

    async def connected_peers(self) -> dict[str, tuple[str, ...]]:
        return dict(self.peers)

    async def serve(self, protocol: str, answer: Answer) -> None:
        self._answers[protocol] = answer

    async def call(
        self,
        peer_id: str,
        protocol: str,
        request: bytes,
        *,
        addrs: Sequence[str] | None = None,
        timeout_s: float | None = None,
    ) -> bytes:
        if peer_id not in self.peers:
            raise PeerUnreachable("nobody knows its address", peer_id=peer_id)
        answer = self._hosts[peer_id]._answers.get(protocol)
        if answer is None:
            raise NotServed(peer_id)
        async with asyncio.timeout(timeout_s):
            return await answer(self.peer_id, request)

    async def _connect(self, peer_id: str, addrs: Sequence[str]) -> None:
        """Connect to hosts that are seen at one of `addrs` and listen there."""
        self.dialled.append((peer_id, tuple(addrs)))
        other = self._hosts[peer_id]
        if not set(addrs) & {*other.own}:
            raise ControlError("i/o timeout")
        self.meet(other)
