"""A simulated internet inside one event loop: the second implementation of `interface.Network`.

`MemoryInternet` has all nodes, and as a `MemoryRoutes` their links and faults; `MemoryNetwork` is one node in it. Under
`testing.virtual_time`, whole swarms run on it in milliseconds, in the same way for the same seed. Messages are bytes,
failures have their wire form, and records pass the same checks as in the real network. So code that works here fails in
the real network only for reasons of the real network.

Handlers run in tasks that their node owns and that `close` ends. An internet must be used in one event loop only.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from swarm_protocol import limits
from swarm_protocol.envelope import Envelope, seal_record
from swarm_protocol.errors import (
    IntegrityError,
    PeerError,
    PeerRefused,
    PeerTimeout,
    PeerUnreachable,
    PeerViolation,
)
from swarm_protocol.identity import Identity
from swarm_protocol.network_invitation import NetworkInvitation
from swarm_protocol.version import Hello, check_hello, software_version

from swarm.network.interface import (
    ServedMethods,
    SigningNetwork,
    Stream,
    StreamHandler,
    UnaryHandler,
    failure_for_caller,
    too_many_calls,
    too_many_streams,
)
from swarm.network.link_meter import LinkMeter
from swarm.network.memory.memory_link import LinkModel
from swarm.network.memory.memory_records import RecordStore, newest
from swarm.network.memory.memory_routes import DETECTION_S, AccessLink, MemoryRoutes
from swarm.network.memory.memory_stream import StreamEnd
from swarm.network.peer_budgets import PeerSlots, UnreadBudget, call_slots, stream_slots
from swarm.network.private.member_roll import MemberRoll
from swarm.network.rate import Rate

EPOCH_S = 1_750_000_000.0
"""Unix time in seconds when the loop's clock is zero."""

logger = logging.getLogger(__name__)

_CALL = "call/"
_Serve = Callable[[str, StreamEnd], Awaitable[None]]


class MemoryInternet(MemoryRoutes):
    """All nodes of one simulation. The methods may cause faults at any time, which take effect at once.

    `default_link` is the link between any two peers, or a function that returns it for the sender and the receiver.
    """

    def __init__(
        self,
        seed: int = 0,
        default_link: LinkModel | Callable[[str, str], LinkModel] | None = None,
        *,
        detection_s: float = DETECTION_S,
    ) -> None:
        super().__init__(seed, default_link or LinkModel(), detection_s)
        self._nodes: dict[str, MemoryNetwork] = {}
        self._num_created = 0

    def network(
        self,
        identity: Identity | None = None,
        network_id: str = "test",
        *,
        up_bytes_per_s: float = math.inf,
        down_bytes_per_s: float = math.inf,
        clock_offset_s: float = 0.0,
        invitation: NetworkInvitation | None = None,
    ) -> MemoryNetwork:
        """Return a new node, which is reachable at once. Without `identity`, its identity follows from the seed and the
        number of nodes created before. With an `invitation`, the node is in that private network.

        All links of a node share its uplink and its downlink. Raises ValueError if a node with the identity is up.
        """
        self._num_created += 1
        identity = identity or Identity(hashlib.sha256(f"{self._seed}/{self._num_created}".encode()).digest())
        access = AccessLink(up=Rate(up_bytes_per_s), down=Rate(down_bytes_per_s), clock_offset_s=clock_offset_s)
        return self._start(identity, invitation.network_id if invitation else network_id, access, invitation)

    def crash(self, peer_id: str, *, detection_s: float | None = None) -> None:
        """End the node without notice to others: its handlers are cancelled, and everything that it holds is lost.

        Its calls and streams break at once at its own end, and after `detection_s` at the other end (0 is like a killed
        process, whose kernel resets its connections). The object cannot be used any more; `restart` makes a new one.
        """
        node = self._nodes[peer_id]
        node._stop()
        delay_s = self._detection_s if detection_s is None else detection_s
        for end, (caller, server) in list(self._conversations.items()):
            if peer_id in {caller, server}:
                own, far = (end, end.other) if caller == peer_id else (end.other, end)
                own.break_off(PeerUnreachable("this node has crashed", peer_id=own.peer_id))
                asyncio.get_running_loop().call_later(
                    delay_s, far.break_off, PeerUnreachable("the connection broke", peer_id=peer_id)
                )
        for pair in [pair for pair in self._pipes if peer_id in pair]:
            self._pipes.pop(pair).close()

    def restart(self, peer_id: str) -> MemoryNetwork:
        """Return a new node with the identity, links, uplink and downlink of a crashed or closed one. It serves and
        stores nothing yet."""
        node = self._nodes[peer_id]
        return self._start(node._identity, node.network_id, node._access, node._invitation)

    async def close(self) -> None:
        """Close every node that is up."""
        for node in self._nodes.values():
            await node.close()

    def _start(
        self, identity: Identity, network_id: str, access: AccessLink, invitation: NetworkInvitation | None
    ) -> MemoryNetwork:
        if self._is_up(identity.peer_id):
            raise ValueError(f"{identity.peer_id} is live already")
        for pair in [pair for pair in self._pipes if identity.peer_id in pair]:
            del self._pipes[pair]
        self._access[identity.peer_id] = access
        node = MemoryNetwork(self, identity, network_id, access, invitation)
        self._nodes[identity.peer_id] = node
        return node

    def _is_up(self, peer_id: str) -> bool:
        return peer_id in self._nodes and self._nodes[peer_id].is_up

    def _reaches(self, a: str, b: str) -> bool:
        return self._is_up(b) and not self._separated(a, b)

    def _neighbours(self, node: MemoryNetwork) -> list[MemoryNetwork]:
        """Return the other nodes of the same network that `node` can reach now."""
        return [
            other
            for peer_id, other in self._nodes.items()
            if other is not node
            and other.network_id == node.network_id
            and self._reaches(node.peer_id, peer_id)
            and node._is_acquainted(other)
        ]


class MemoryNetwork(SigningNetwork):
    """One node of a MemoryInternet. Implements `interface.Network`; made by `MemoryInternet.network`."""

    def __init__(
        self,
        internet: MemoryInternet,
        identity: Identity,
        network_id: str,
        access: AccessLink,
        invitation: NetworkInvitation | None = None,
    ) -> None:
        super().__init__(identity, network_id)
        self.is_up = True
        self.links = LinkMeter()
        self.unread = UnreadBudget()
        self.provider_of = internet.provider_of
        self._internet = internet
        self._access = access
        self._handlers = ServedMethods[_Serve]()
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots: dict[bool, PeerSlots[str]] = {True: call_slots(), False: stream_slots()}  # by whether it is a call
        self._records = RecordStore(network_id, self.now)
        self._invitation = invitation
        self._roll = MemberRoll(invitation, identity.peer_id, self.now()) if invitation else None

    def now(self) -> float:
        return EPOCH_S + asyncio.get_running_loop().time() + self._access.clock_offset_s

    async def call(
        self,
        peer_id: str,
        method: str,
        request: bytes,
        *,
        timeout_s: float,
        max_bytes: int = limits.MAX_MESSAGE_BYTES,
    ) -> bytes:
        try:
            async with asyncio.timeout(timeout_s), self._conversation(peer_id, f"{_CALL}{method}", timeout_s) as end:
                end.unread.max_message_bytes = max_bytes
                await end.send(request)
                return await end.receive()
        except TimeoutError:
            raise PeerTimeout(f"no answer to {method} within {timeout_s} s", peer_id=peer_id) from None

    @asynccontextmanager
    async def stream(self, peer_id: str, method: str, *, timeout_s: float | None) -> AsyncIterator[Stream]:
        async with self._conversation(peer_id, f"stream/{method}", timeout_s) as end:
            await end.accepted()
            yield end

    async def serve(self, method: str, handler: UnaryHandler) -> None:
        async def answer(peer_id: str, end: StreamEnd) -> None:
            await end.send(await handler(peer_id, await end.receive()))

        self._add_handler(f"{_CALL}{method}", answer)

    async def serve_stream(self, method: str, handler: StreamHandler) -> None:
        self._add_handler(f"stream/{method}", handler)

    def release(self, *methods: str) -> None:
        self._handlers.release(*(name for method in methods for name in (f"{_CALL}{method}", f"stream/{method}")))

    async def publish(self, key: str, payload: bytes, *, lifetime_s: float) -> bool:
        envelope = seal_record(
            self._identity,
            network_id=self.network_id,
            key=key,
            payload=bytes(payload),
            issued_at=self._records.issue_time(key, self.peer_id),
            lifetime_s=lifetime_s,
        )
        return await self.offer(key, envelope.to_bytes())

    async def offer(self, key: str, record: bytes) -> bool:
        """Offer bytes that claim to be a record to every node in reach, as a hostile peer can. Return whether another
        node took them."""
        self._check_up()
        self._records.take(key, record)
        neighbours = self._internet._neighbours(self)
        reached = [node.peer_id for node in neighbours]
        await asyncio.sleep(self._internet._usual_round_trip_s(self.peer_id, reached))
        return sum(node._take_record(self.peer_id, key, record) for node in neighbours if node.is_up) > 0

    async def lookup(
        self,
        keys: Sequence[str],
        *,
        timeout_s: float,
        max_records: int = 0,  # noqa: ARG002 - a simulation always returns all records
    ) -> list[Envelope]:
        self._check_up()
        neighbours = self._internet._neighbours(self)
        round_trip_s = self._internet._usual_round_trip_s(self.peer_id, [node.peer_id for node in neighbours])
        await asyncio.sleep(min(round_trip_s, timeout_s))
        if round_trip_s > timeout_s:
            raise PeerTimeout(f"no records within {timeout_s} s")
        found = newest([node._records for node in (self, *neighbours)], keys)
        return [each for each in found if self._roll is None or self._roll.believes(each, self.now())]

    async def addrs(self) -> tuple[str, ...]:
        return (f"/memory/1/p2p/{self.peer_id}",)

    async def close(self) -> None:
        if self.is_up:
            for end, pair in list(self._internet._conversations.items()):
                if self.peer_id in pair:
                    own = end if pair[0] == self.peer_id else end.other
                    own.hang_up()
                    own.break_off(PeerUnreachable("this node has closed", peer_id=own.peer_id))
            self._stop()
        # a handler may close its own node, and cannot wait for itself
        if others := self._tasks - {asyncio.current_task()}:
            await asyncio.wait(others)

    def _stop(self) -> None:
        self.is_up = False
        self._handlers.clear()
        self._records.clear()
        for task in self._tasks:
            task.cancel()

    def _check_up(self) -> None:
        if not self.is_up:
            raise PeerUnreachable("this node has closed or crashed", peer_id=self.peer_id)

    def _add_handler(self, method: str, serve: _Serve) -> None:
        self._check_up()
        self._handlers.add(method, serve)

    @asynccontextmanager
    async def _conversation(self, peer_id: str, method: str, timeout_s: float | None) -> AsyncIterator[StreamEnd]:
        target, is_call = await self._reach(peer_id, timeout_s), method.startswith(_CALL)
        self._meet(target, _method_of(method))
        # `call` sets one deadline for the whole call
        meters = (self.links, self.unread), (target.links, target.unread)
        end = self._internet._connect(self.peer_id, peer_id, meters, None if is_call else timeout_s)
        end.is_call = is_call
        try:
            end.open(method, lambda: target._accept(self.peer_id, method, end.other))
            yield end
        finally:
            del self._internet._conversations[end]
            end.hang_up()

    async def _reach(self, peer_id: str, timeout_s: float | None) -> MemoryNetwork:
        """Return a peer that can be reached. Raises PeerUnreachable: at once if there never was such a peer, else after
        the detection time or `timeout_s`."""
        self._check_up()
        if peer_id == self.peer_id or peer_id not in self._internet._nodes:
            raise PeerUnreachable("no route to the peer", peer_id=peer_id)
        if not self._internet._reaches(self.peer_id, peer_id):
            detection_s = self._internet._detection_s
            await asyncio.sleep(detection_s if timeout_s is None else min(timeout_s, detection_s))
            raise PeerUnreachable("the peer does not answer", peer_id=peer_id)
        other = self._internet._nodes[peer_id]
        # greetings of the same network with equal clocks always pass
        if self.network_id != other.network_id or self._access.clock_offset_s != other._access.clock_offset_s:
            check_hello(self._hello(), other._hello(), peer_id)
        return other

    def _meet(self, other: MemoryNetwork, method: str = "") -> None:
        """Exchange chains of certificates with another node, as the gate of a private network does in the real network,
        and check that this node may ask the other for `method`. Raises PeerError."""
        now = self.now()
        if self._roll is None and other._roll is None:
            return
        if self._roll is None or other._roll is None:
            raise PeerRefused("the peer does not answer as a member of this private network", peer_id=other.peer_id)
        self._roll.check_own(method, other.peer_id, now)
        try:
            other._roll.take_in(self.peer_id, self._roll.greeting(self._hello()), other.now())
            self._roll.take_in(other.peer_id, other._roll.greeting(other._hello()), now)
        except IntegrityError as error:
            raise PeerViolation(error.message, peer_id=other.peer_id) from None
        self._roll.check_answers(other.peer_id, method, now)

    def _is_acquainted(self, other: MemoryNetwork) -> bool:
        try:
            self._meet(other)
        except PeerError:
            return False
        return True

    def _take_record(self, peer_id: str, key: str, record: bytes) -> bool:
        """Keep a record that a peer offers, if the peer may store it here."""
        roll = self._roll
        return self._records.take(key, record, lambda each: roll is None or roll.may_store(peer_id, each, self.now()))

    def _hello(self) -> Hello:
        return Hello(network_id=self.network_id, software_version=software_version(), sent_at=self.now())

    def _accept(self, peer_id: str, method: str, end: StreamEnd) -> None:
        """Start the handler of a conversation that has arrived at this node, or refuse it."""
        if not self.is_up:
            return  # the caller's end breaks after the detection time
        serve, wanted = self._handlers.get(method), _method_of(method)
        if serve is None or (self._roll is not None and not self._roll.may_call(peer_id, wanted, self.now())):
            end.fail(PeerRefused(f"the peer does not serve {wanted}", peer_id=self.peer_id))
            return
        is_call = end.other.is_call
        slots = self._slots[is_call]
        if not slots.has_room(peer_id):
            end.fail(too_many_calls(self.peer_id) if is_call else too_many_streams())
            return
        slots.take(peer_id)
        end.accept()
        task = asyncio.get_running_loop().create_task(self._answer(serve, peer_id, end), name=f"{method} of {peer_id}")
        end.handler_task = task
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            slots.give_back(peer_id)

        task.add_done_callback(ended)

    async def _answer(self, serve: _Serve, peer_id: str, end: StreamEnd) -> None:
        try:
            await serve(peer_id, end)
        except asyncio.CancelledError:
            end.hang_up()  # the caller may still wait, if the handler was cancelled by something else
            raise
        except Exception as error:
            end.fail(failure_for_caller(error, peer_id))
        else:
            end.complete()


def _method_of(name: str) -> str:
    """Return the method of a handler's name, `call/METHOD` or `stream/METHOD`."""
    return name.partition("/")[2]
