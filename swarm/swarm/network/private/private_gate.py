"""The gate of a node in a private network: greets peers, checks their chains, and lets nobody else be answered.

Each side shows its chain before anything else is asked or answered, sealed with the network's secret, once for as long
as both remember it. A peer that this node does not know, and that asks for something, is greeted back over its own
connection; a stranger learns from that only that it was sent bytes. Method names on the wire follow from the secret.

`PrivateGate.run` is a task of the network: it ends connections of those who are members no more, or never were, passes
on newer lists of revocations, and ends the network once this node is no member itself.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from weakref import WeakValueDictionary

from swarm_protocol import limits
from swarm_protocol.envelope import Envelope
from swarm_protocol.errors import PeerError, PeerRefused, PeerViolation, StartError, SwarmError
from swarm_protocol.network_invitation import SEAL_BYTES, NetworkInvitation, PrivateGreeting

from swarm.network.interface import NotServed
from swarm.network.libp2p.greeting import HELLO, Greeting, greeting_of, hello_of
from swarm.network.libp2p.host import CONTROL_FAILURES, Host
from swarm.network.private.member_roll import REMEDY, MemberRoll
from swarm.network.relay.relay_access import NetworkPeers

CHECK_S = 3.0
"""Time between two looks at who is connected. An invitation that ends, or is revoked here, ends its connections so
soon."""

STRANGER_S = 20.0
"""Time for a connection whose peer has not shown that it is a member. Nodes that dial back a member's address, to see
whether it can be reached, are strangers for less."""

EXCHANGE_S = 30.0
"""Time between two greetings with a member that is drawn by chance, so that a list of revocations that somebody missed
comes to it."""

NUM_AT_ONCE = 16
"""Peers that are greeted, or whose connections are closed, at a time."""

_METHOD_KINDS = frozenset({"call", "bulk", "stream"})

logger = logging.getLogger(__name__)


class PrivateGate:
    """Greets the peers of a private network, and says which of them this node asks and answers."""

    def __init__(self, host: Host, invitation: NetworkInvitation, *, revocations: bytes = b"") -> None:
        """Raises ConfigError if the invitation makes this node no member."""
        self._host = host
        self._secret = invitation.network_secret
        self._roll = MemberRoll(invitation, host.peer_id, time.time(), revocations=revocations)
        self._network_peers = NetworkPeers(lambda peer_id: self.greet(peer_id, addrs=()))
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._strangers: dict[str, float] = {}  # since when they are connected
        self._num_told = self._roll.number

    @property
    def revocations(self) -> bytes:
        """The newest signed list of revocations that this node has heard of; empty: none."""
        return self._roll.revocations

    # --- as `greeting.Gate` -----------------------------------------------------------------------------------------

    def wire_name(self, protocol: str) -> str:
        return self._secret.protocol_name(protocol)

    async def greet(self, peer_id: str, *, addrs: Sequence[str] | None = None) -> Greeting:
        """Raises PeerUnreachable, PeerRefused (no member of this network), PeerViolation or PeerTimeout."""
        before = time.time()
        try:
            answer = await self._host.call(peer_id, HELLO, self._sealed(peer_id, before), addrs=addrs)
        except NotServed:
            raise PeerRefused(
                "it does not answer as a member of this private network",
                remedy="give the address of a member; an invitation to another network leads nowhere here",
                peer_id=peer_id,
            ) from None
        greeting = self._opened(peer_id, answer)
        try:
            self._roll.take_in(peer_id, greeting, time.time())
        except PeerError:
            raise
        except SwarmError as error:
            raise PeerViolation(error.message, peer_id=peer_id) from None
        assert greeting.hello is not None, "take_in refuses a greeting without one"
        return greeting_of(greeting.hello, before)

    async def enter(self, peer_id: str, protocol: str, addrs: Sequence[str] | None) -> None:
        if protocol == HELLO:
            return
        method = method_of(protocol)
        self._roll.check_own(method, peer_id, time.time())
        if not self._roll.rights_of(peer_id, time.time()):
            async with self._locks.setdefault(peer_id, asyncio.Lock()):
                if not self._roll.rights_of(peer_id, time.time()):
                    await self.greet(peer_id, addrs=addrs)
        self._roll.check_answers(peer_id, method, time.time())

    async def admits(self, peer_id: str, protocol: str) -> bool:
        return protocol == HELLO or (
            await self.include(peer_id) and self._roll.may_call(peer_id, method_of(protocol), time.time())
        )

    # --- for the network --------------------------------------------------------------------------------------------

    async def answer(self, peer_id: str, request: bytes) -> bytes:
        """Answer a greeting. Raises NotServed for bytes that are no greeting, as for any unknown method."""
        try:
            greeting = self._opened(peer_id, request)
        except PeerViolation:
            raise NotServed(peer_id) from None
        try:
            self._roll.take_in(peer_id, greeting, time.time())
        except SwarmError as error:
            logger.debug("%s is not taken for a member: %s", peer_id, error)
            return self._seal(peer_id, PrivateGreeting(hello=None, refusal=error.message[: limits.MAX_REFUSAL_CHARS]))
        return self._sealed(peer_id, time.time())

    async def include(self, peer_id: str) -> bool:
        """Return whether a peer that is connected is a member, as `NetworkPeers` does."""
        if self._roll.rights_of(peer_id, time.time()):
            return True
        if await self._network_peers.include(peer_id) and not self._roll.rights_of(peer_id, time.time()):
            self._network_peers.forget(peer_id)  # it was one when it was asked last
            await self._network_peers.include(peer_id)
        return bool(self._roll.rights_of(peer_id, time.time()))

    def may_store(self, peer_id: str, envelope: Envelope) -> bool:
        return self._roll.may_store(peer_id, envelope, time.time())

    def believed(self, envelopes: Iterable[Envelope]) -> list[Envelope]:
        """Return the records whose signers may publish them, as far as this node knows."""
        now = time.time()
        return [envelope for envelope in envelopes if self._roll.believes(envelope, now)]

    async def run(self, end_streams: Callable[[str, PeerRefused], None]) -> None:
        """Raises StartError once this node is no member any more. `end_streams` ends those with a peer."""
        loop = asyncio.get_running_loop()
        exchange_at = loop.time() + EXCHANGE_S
        telling = asyncio.create_task(self._tell([]), name="tell members of revocations")
        try:
            while True:
                await asyncio.sleep(CHECK_S)
                if (trouble := self._roll.trouble(time.time())) is not None:
                    raise StartError(trouble, remedy=f"{REMEDY}, and start with --invite")
                try:
                    connected = await self._host.connected_peers()
                except PeerError:  # if the daemon has ended, the unary connection says so
                    continue
                await self._end_others(connected, end_streams)
                if not telling.done():  # members that are slow to answer keep nobody else connected
                    continue
                telling.result()
                members = [peer_id for peer_id in connected if self._roll.rights_of(peer_id, time.time())]
                if self._num_told < self._roll.number:
                    self._num_told = self._roll.number
                elif members and loop.time() >= exchange_at:
                    exchange_at = loop.time() + EXCHANGE_S
                    members = [random.choice(members)]
                else:
                    continue
                telling = asyncio.create_task(self._tell(members), name="tell members of revocations")
        finally:
            telling.cancel()
            await asyncio.wait({telling})

    async def _end_others(self, connected: Iterable[str], end_streams: Callable[[str, PeerRefused], None]) -> None:
        """Disconnect members whose invitation has ended, and then strangers that had their time, who are not asked."""
        now, time_s = time.time(), asyncio.get_running_loop().time()
        ended = [peer_id for peer_id in connected if self._roll.has_ended(peer_id, now)]
        self._strangers = {
            peer_id: self._strangers.get(peer_id, time_s)
            for peer_id in connected
            if peer_id not in ended and not self._roll.rights_of(peer_id, now)
        }
        for peer_id in ended:
            end_streams(peer_id, PeerRefused("the peer's invitation does not hold any more", peer_id=peer_id))
        await _for_each(self._disconnect, ended)
        self._roll.forget_ended(now)
        late = [peer_id for peer_id, since in self._strangers.items() if time_s - since >= STRANGER_S]
        await _for_each(self._disconnect, late)

    async def _disconnect(self, peer_id: str) -> None:
        logger.info("the connection to %s is closed: it is not a member of this network", peer_id)
        try:
            async with asyncio.timeout(CHECK_S):
                await self._host.control.disconnect(peer_id)
        except (*CONTROL_FAILURES, TimeoutError) as error:
            logger.debug("%s is not disconnected: %s", peer_id, error)

    async def _tell(self, members: Sequence[str]) -> None:
        """Greet members, which brings the list of revocations."""

        async def tell(peer_id: str) -> None:
            try:
                async with asyncio.timeout(CHECK_S):
                    await self.greet(peer_id, addrs=())
            except (PeerError, TimeoutError) as error:
                logger.debug("%s is not told of revocations: %s", peer_id, error)

        await _for_each(tell, members)

    # --- bytes ------------------------------------------------------------------------------------------------------

    def _sealed(self, peer_id: str, now: float) -> bytes:
        return self._seal(peer_id, self._roll.greeting(hello_of(self._roll.network_id, now)))

    def _seal(self, peer_id: str, greeting: PrivateGreeting) -> bytes:
        return self._secret.seal(greeting.to_bytes(), _between(self._host.peer_id, peer_id))

    def _opened(self, peer_id: str, sealed: bytes) -> PrivateGreeting:
        """Raises PeerViolation."""
        if len(sealed) > PrivateGreeting.MAX_BYTES + SEAL_BYTES:
            raise PeerViolation("a greeting is too long", peer_id=peer_id)
        return PrivateGreeting.from_bytes(self._secret.open(sealed, _between(peer_id, self._host.peer_id)))


async def _for_each(do: Callable[[str], Awaitable[None]], peer_ids: Iterable[str]) -> None:
    turns = asyncio.Semaphore(NUM_AT_ONCE)

    async def take_turn(peer_id: str) -> None:
        async with turns:
            await do(peer_id)

    await asyncio.gather(*map(take_turn, peer_ids))


def _between(sender: str, receiver: str) -> bytes:
    return f"greeting {sender} {receiver}".encode()


def method_of(protocol: str) -> str:
    """Return the method that a protocol, /swarm/VERSION/NETWORK/KIND/METHOD, is for; empty: the network's own."""
    kind, _, method = protocol.removeprefix("/swarm/").split("/", 2)[-1].partition("/")
    return method if kind in _METHOD_KINDS else ""
