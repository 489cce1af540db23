"""Carries bytes between the nodes of a simulated internet: links, pipes, conversations, and partitions.

`MemoryRoutes` knows nodes only by their peer ids. The handlers at the ends of a conversation belong to
`memory_network`.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from swarm_protocol.errors import PeerUnreachable

from swarm.network.link_meter import LinkMeter
from swarm.network.memory.memory_link import LinkModel, Pipe
from swarm.network.memory.memory_stream import StreamEnd
from swarm.network.peer_budgets import UnreadBudget
from swarm.network.rate import Rate

DETECTION_S = 1.0
"""Time until other peers notice that a peer has crashed, or that a route is cut."""

NUM_ROUND_TRIPS_TO_RESUME = 6
"""Round trips until a stream goes on over another path: those of TCP, of libp2p's encryption and multiplexer, and of
the request to resume."""


Meters = tuple[LinkMeter, UnreadBudget]
"""They measure and bound what a node receives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessLink:
    """A node's uplink, downlink and clock, which remain when the node crashes."""

    up: Rate
    down: Rate
    clock_offset_s: float


class MemoryRoutes:
    """The routes between all nodes of one simulation. The methods may cause faults at any time, which take effect at
    once."""

    def __init__(
        self, seed: int, default_link: LinkModel | Callable[[str, str], LinkModel], detection_s: float
    ) -> None:
        self._seed = seed
        self._default_link = default_link
        self._detection_s = detection_s
        self.providers: dict[str, str] = {}
        """By peer id, the provider's network of each node that shares one with others."""
        self._access: dict[str, AccessLink] = {}
        self._links: dict[tuple[str, str], LinkModel] = {}
        self._pipes: dict[tuple[str, str], Pipe] = {}
        self._conversations: dict[StreamEnd, tuple[str, str]] = {}
        self._islands: dict[str, int] = {}
        self._num_partitions = 0

    def link(self, a: str, b: str, link: LinkModel, back: LinkModel | None = None) -> None:
        """Set the link from `a` to `b`, and the link from `b` to `a`, which is `back` if it is given, else `link`."""
        for pair, each in (((a, b), link), ((b, a), back or link)):
            self._links[pair] = each
            if pair in self._pipes:
                self._pipes[pair].set_link(each)

    def partition(self, groups: Iterable[Iterable[str]]) -> None:
        """Cut the routes between the groups; peers in no group form one more. It replaces an earlier partition.

        Bytes under way are held back. After the detection time, calls and streams over a cut route break with
        PeerUnreachable.
        """
        self._islands = {peer_id: index for index, group in enumerate(groups, start=1) for peer_id in group}
        self._num_partitions += 1
        for (sender, receiver), pipe in self._pipes.items():
            if self._separated(sender, receiver):
                pipe.hold()
            else:
                pipe.release()
        asyncio.get_running_loop().call_later(self._detection_s, self._break_separated, self._num_partitions)

    def heal(self) -> None:
        """Restore all routes. Bytes that were held back arrive."""
        self._islands = {}
        self._num_partitions += 1
        for pipe in self._pipes.values():
            pipe.release()

    def replace_path(self, a: str, b: str) -> None:
        """Break the path between two peers, and replace it at once by another one. Calls under way fail. Streams go on
        after NUM_ROUND_TRIPS_TO_RESUME."""
        pipes = [self._pipe(a, b), self._pipe(b, a)]
        for pipe in pipes:
            pipe.hold()
        for end, pair in list(self._conversations.items()):
            if set(pair) == {a, b} and end.is_call:
                end.break_off(PeerUnreachable("the connection broke", peer_id=pair[1]))
                end.other.break_off(PeerUnreachable("the connection broke", peer_id=pair[0]))
        loop = asyncio.get_running_loop()
        if not self._separated(a, b):
            for pipe in pipes:
                loop.call_later(NUM_ROUND_TRIPS_TO_RESUME * self._round_trip_s(a, b), pipe.release)

    def provider_of(self, peer_id: str) -> str:
        return self.providers.get(peer_id, peer_id)

    def _separated(self, a: str, b: str) -> bool:
        return self._islands.get(a, 0) != self._islands.get(b, 0)

    def _round_trip_s(self, a: str, b: str) -> float:
        return sum(self._link_of(pair).latency_s for pair in ((a, b), (b, a)))

    def _usual_round_trip_s(self, a: str, others: Sequence[str]) -> float:
        """Return the median round trip from `a`: a real lookup asks several peers at once and does not wait for the
        slowest. Return 0 without `others`."""
        return statistics.median(self._round_trip_s(a, other) for other in others) if others else 0.0

    def _link_of(self, pair: tuple[str, str]) -> LinkModel:
        link = self._links.get(pair, self._default_link)
        return link(*pair) if callable(link) else link

    def _pipe(self, sender: str, receiver: str) -> Pipe:
        pair = (sender, receiver)
        if pair not in self._pipes:
            self._pipes[pair] = Pipe(
                self._link_of(pair),
                up=self._access[sender].up,
                down=self._access[receiver].down,
                rng=partial(random.Random, f"{self._seed}/{sender}/{receiver}"),
            )
        return self._pipes[pair]

    def _connect(self, caller: str, server: str, meters: tuple[Meters, Meters], timeout_s: float | None) -> StreamEnd:
        """Return the caller's end of a new conversation. `meters` are the caller's and the server's."""
        end = StreamEnd(server, self._pipe(caller, server), *meters[0], timeout_s=timeout_s)
        end.other = StreamEnd(caller, self._pipe(server, caller), *meters[1], timeout_s=None)
        end.other.other = end
        self._conversations[end] = (caller, server)
        return end

    def _break_separated(self, partition: int) -> None:
        if partition != self._num_partitions:
            return  # healed or replaced meanwhile
        for end, (caller, server) in list(self._conversations.items()):
            if self._separated(caller, server):
                end.break_off(PeerUnreachable("the route to the peer is gone", peer_id=server))
                end.other.break_off(PeerUnreachable("the route to the peer is gone", peer_id=caller))
