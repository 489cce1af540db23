"""The gate of a node in a private network: greets peers, checks their chains of certificates, and admits only members.

Both sides show their chains, sealed with the network's secret, before anything else is asked or answered. They do so
once, for as long as both remember it. If an unknown peer asks for something, this node greets it over the peer's own
connection; from that a stranger learns only that it was sent bytes. Method names on the wire follow from the secret.

`PrivateGate.run` is a task of the network. It ends connections of former members and of strangers, passes on newer
lists of revocations, and ends the network once this node is no member itself.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from functools import partial
from weakref import WeakValueDictionary

from swarm_protocol import limits
from swarm_protocol.envelope import Envelope
from swarm_protocol.errors import PeerError, PeerRefused, PeerViolation, StartError, SwarmError
from swarm_protocol.network_invitation import SEAL_BYTES, PrivateGreeting

from swarm.ended_tasks import end_tasks
from swarm.network.interface import NotServed
from swarm.network.libp2p.daemon_errors import CONTROL_FAILURES
from swarm.network.libp2p.greeting import HELLO, Greeting, greeting_of, hello_of
from swarm.network.libp2p.host import Host
from swarm.network.peer_budgets import PeerSlots
from swarm.network.private.member_roll import REMEDY, MemberRoll
from swarm.network.relay.relay_access import NetworkPeers

CHECK_S = 3.0
"""Time between two looks at the connected peers, and so the time until an expired or revoked invitation ends the
connections of its node."""

STRANGER_S = 20.0
"""Time after which a connection of a peer that has not shown that it is a member is closed. Temporary hosts that dial
back a member's address are connected for less."""

EXCHANGE_S = 30.0
"""Time between two greetings with a random connected member, by which a node gets a list of revocations that it
missed."""

NUM_AT_ONCE = 16
"""Maximum peers that are greeted, or disconnected, at the same time."""

MAX_WAITING = 1024
"""Maximum calls and streams of peers that are not known as members, which wait for greetings. They hold slots that
members need: strangers may have an eighth of those for calls, and a quarter of those for streams."""

_METHOD_KINDS = frozenset({"call", "bulk", "stream"})

logger = logging.getLogger(__name__)


class PrivateGate:
    """Greets the peers of a private network, and decides which of them this node asks and answers."""

    def __init__(self, host: Host, roll: MemberRoll) -> None:
        self._host = host
        self._secret = roll.network_secret
        self._roll = roll
        self._network_peers = NetworkPeers(partial(self._greet_stranger, addrs=()), kept_s=0.0)  # the roll keeps them
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._strangers: dict[str, float] = {}  # by peer, the time since when it is connected
        self._seen: frozenset[str] = frozenset()  # the peers that were connected at the last look
        self._num_told = self._roll.number
        self._waiting = PeerSlots[str](per_peer=lambda: limits.MAX_CALLS_PER_PEER, in_all=MAX_WAITING)

    @property
    def revocations(self) -> bytes:
        """The newest signed list of revocations that this node has; b"" if it has none."""
        return self._roll.revocations

    # --- as `greeting.Gate` -----------------------------------------------------------------------------------------

    def wire_name(self, protocol: str) -> str:
        return self._secret.protocol_name(protocol)

    async def greet(self, peer_id: str, *, addrs: Sequence[str] | None = None) -> Greeting:
        """Exchange greetings with a peer, and note it as a member. Raises PeerUnreachable, PeerRefused (the peer is no
        member, or refuses this node), PeerViolation or PeerTimeout."""
        before = time.time()
        try:
            answer = await self._host.call(peer_id, HELLO, self._sealed(peer_id, before), addrs=addrs)
        except NotServed:
            raise PeerRefused(
                "the peer does not answer as a member of this private network",
                remedy="give the address of a member; an invitation to another network does not work here",
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
                await self._greet_stranger(peer_id, addrs=addrs)
        self._roll.check_answers(peer_id, method, time.time())

    async def admits(self, peer_id: str, protocol: str) -> bool:
        return protocol == HELLO or (
            await self.include(peer_id) and self._roll.may_call(peer_id, method_of(protocol), time.time())
        )

    # --- for the network --------------------------------------------------------------------------------------------

    async def answer(self, peer_id: str, request: bytes) -> bytes:
        """Answer a greeting. Raises NotServed for bytes that are no greeting, so that a stranger gets the same answer
        as for an unknown method."""
        try:
            greeting = self._opened(peer_id, request)
        except PeerViolation:
            raise NotServed(peer_id) from None
        try:
            self._roll.take_in(peer_id, greeting, time.time())
        except SwarmError as error:
            logger.debug("%s is not accepted as a member: %s", peer_id, error)
            return self._seal(peer_id, PrivateGreeting(hello=None, refusal=error.message[: limits.MAX_REFUSAL_CHARS]))
        return self._sealed(peer_id, time.time())

    async def include(self, peer_id: str) -> bool:
        """Return whether a connected peer is a member. It is greeted if it is not known as one (as in
        `NetworkPeers`)."""
        if not self._roll.rights_of(peer_id, time.time()):
            with self._waiting.taken(peer_id) as may_wait:
                if may_wait:
                    await self._network_peers.include(peer_id)
        return bool(self._roll.rights_of(peer_id, time.time()))

    async def _greet_stranger(self, peer_id: str, *, addrs: Sequence[str] | None) -> None:
        """Greet a peer, unless it has become known as a member meanwhile."""
        if not self._roll.rights_of(peer_id, time.time()):
            await self.greet(peer_id, addrs=addrs)

    def may_store(self, peer_id: str, envelope: Envelope) -> bool:
        return self._roll.may_store(peer_id, envelope, time.time())

    def believed(self, envelopes: Iterable[Envelope]) -> list[Envelope]:
        """Return the records that this node believes (see `MemberRoll.believes`)."""
        now = time.time()
        return [envelope for envelope in envelopes if self._roll.believes(envelope, now)]

    async def run(self, end_streams: Callable[[str, PeerRefused], None]) -> None:
        """Check connections until cancelled. Raises StartError once this node is no member any more.
        `end_streams(peer_id, refusal)` ends the streams with a peer."""
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
                except PeerError:  # if the daemon has ended, the unary connection reports it
                    continue
                await self._end_others(connected, end_streams)
                if not telling.done():  # slow members must not delay the checks of connections
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
            await end_tasks(telling)

    async def _end_others(self, connected: Collection[str], end_streams: Callable[[str, PeerRefused], None]) -> None:
        """Disconnect former members, and then strangers that were connected for STRANGER_S. Strangers are not greeted
        for this. A former member that has just connected may be about to show a new invitation, and has until the next
        look."""
        now, time_s = time.time(), asyncio.get_running_loop().time()
        ended = [peer_id for peer_id in self._seen.intersection(connected) if self._roll.has_ended(peer_id, now)]
        self._seen = frozenset(connected)
        self._strangers = {
            peer_id: self._strangers.get(peer_id, time_s)
            for peer_id in connected
            if peer_id not in ended and not self._roll.rights_of(peer_id, now)
        }
        for peer_id in ended:
            end_streams(peer_id, PeerRefused("the peer's invitation does not hold any more", peer_id=peer_id))
        await _for_each(self._disconnect, ended)
        late = [peer_id for peer_id, since in self._strangers.items() if time_s - since >= STRANGER_S]
        await _for_each(self._disconnect, late)

    async def _disconnect(self, peer_id: str) -> None:
        logger.info("closing the connection to %s, which is no member of this network", peer_id)
        try:
            async with asyncio.timeout(CHECK_S):
                await self._host.control.disconnect(peer_id)
        except (*CONTROL_FAILURES, TimeoutError) as error:
            logger.debug("%s is not disconnected: %s", peer_id, error)

    async def _tell(self, members: Sequence[str]) -> None:
        """Greet members, which exchanges lists of revocations."""

        async def tell(peer_id: str) -> None:
            try:
                async with asyncio.timeout(CHECK_S):
                    await self.greet(peer_id, addrs=())
            except (PeerError, TimeoutError) as error:
                logger.debug("cannot tell %s of revocations: %s", peer_id, error)

        await _for_each(tell, members)

    # --- bytes ------------------------------------------------------------------------------------------------------

    def _sealed(self, peer_id: str, now: float) -> bytes:
        return self._seal(peer_id, self._roll.greeting(hello_of(self._roll.network_id, now)))

    def _seal(self, peer_id: str, greeting: PrivateGreeting) -> bytes:
        return self._secret.seal(greeting.to_bytes(), _between(self._host.peer_id, peer_id))

    def _opened(self, peer_id: str, sealed: bytes) -> PrivateGreeting:
        """Open a sealed greeting of a peer. Raises PeerViolation."""
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
    """Return the method of a protocol /swarm/VERSION/NETWORK/KIND/METHOD; an empty text for the network's own
    protocols."""
    kind, _, method = protocol.removeprefix("/swarm/").split("/", 2)[-1].partition("/")
    return method if kind in _METHOD_KINDS else ""
