"""The real network: `Network` over libp2p. Peers behind NATs are reached through relays if there is no direct path.

`Libp2pNetwork` puts the other modules together, as `Libp2pOptions` says. `p2pd_process` runs hivemind's go-libp2p
daemon, `host` speaks to it, `peer_methods` carries messages, `record_dht` keeps records and addresses, and
`network_entry` finds the first peers. `relay` carries other nodes' connections, and keeps reservations at other relays.
One task of the network, `_run`, owns all other tasks. `close` ends it, and so does the daemon's death.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial

from swarm_protocol import limits
from swarm_protocol.dht_messages import Contact
from swarm_protocol.envelope import Envelope
from swarm_protocol.errors import PeerUnreachable, StartError, SwarmError
from swarm_protocol.identity import Identity
from swarm_protocol.records import Reachability

from swarm.network.dht.own_records import OwnRecords, tell_address_changes
from swarm.network.dht.record_dht import DhtCounts, RecordDht
from swarm.network.dht.record_storage import RecordValidator
from swarm.network.discovery.local_discovery import LocalDiscovery, LocalPeers, local_addrs
from swarm.network.discovery.peer_names import HURRIED_TIMEOUT_S, TIMEOUT_S, GivenPeers
from swarm.network.identity_check import start_host
from swarm.network.interface import SigningNetwork, Stream, StreamHandler, UnaryHandler
from swarm.network.libp2p.connection_limit import ConnectionLimit
from swarm.network.libp2p.greeting import (
    HELLO,
    NUM_ASKED,
    Greeting,
    ask_greetings,
    check_network_peer,
    hello_answer,
    method_prefix,
)
from swarm.network.libp2p.host import Host
from swarm.network.libp2p.libp2p_options import Libp2pOptions
from swarm.network.libp2p.path_watch import PathWatch
from swarm.network.libp2p.reconnection import Reconnector
from swarm.network.multiaddr import is_loopback, parse_peer_addr
from swarm.network.network_entry import NetworkEntry, connect, join
from swarm.network.partition_watch import PartitionWatch
from swarm.network.paths.dial_policy import DialPolicy
from swarm.network.paths.direct_paths import DirectPaths, wants_relays
from swarm.network.peer_methods import PeerMethods
from swarm.network.private.member_roll import MemberRoll
from swarm.network.private.private_gate import PrivateGate
from swarm.network.relay.relay import Relay, RelayCounts, RelayLimits
from swarm.network.relay.relay_access import NetworkPeers
from swarm.network.relay.reservations import RelayCandidate, Reservations, relay_candidates
from swarm.network.traffic import Traffic

logger = logging.getLogger(__name__)

NEARBY_S = 3.0
"""Time for nodes of the local network to answer, if no other peer was reached. A second query is sent after about one
second."""


class Libp2pNetwork(SigningNetwork):
    """Implements `Network` over libp2p. Use it as a context, or `close` it."""

    def __init__(
        self, identity: Identity, host: Host, options: Libp2pOptions, given: GivenPeers, gate: PrivateGate | None
    ) -> None:
        super().__init__(identity, options.network_id)
        self._options, self._given, self._gate = options, given, gate
        # it owns the daemon with all connections, and every task
        self._host = host
        self._tasks = asyncio.TaskGroup()
        # calls and streams
        reconnector = Reconnector(host)
        self._watch = PathWatch(host, reconnector, self._kept_peers)
        self._methods = PeerMethods(host, self._tasks, self._watch, options.network_id)
        # addresses and paths
        self._reservations = Reservations(host, self._relay_candidates, reconnector.drop, wanted=wants_relays(options))
        self._relay = Relay(
            host,
            self._tasks,
            RelayLimits(bytes_per_s=options.relay_bytes_per_s),
            (gate or NetworkPeers(partial(check_network_peer, host, network_id=options.network_id))).include,
            serves=options.relay == "serve",
        )
        self._paths = DirectPaths(
            host, options, self._reservations, self._relay, asked=self._askable, on_change=self._announce
        )
        # records
        validator = RecordValidator(options.network_id, self.now)
        self._dht = RecordDht(host, f"{method_prefix(options.network_id)}dht/", validator, self._methods)
        self._records = OwnRecords(self._dht, identity, options.network_id, self.now, self._end_as_copy)
        self.entry = NetworkEntry()
        """The peers through which this node joined."""
        self.traffic = host.traffic
        """The meter of this node's traffic."""
        self.links = host.traffic.links
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = loop.create_future()  # has the error if the start fails
        self._failure: asyncio.Future[SwarmError] = loop.create_future()
        self._main = asyncio.create_task(self._run(), name=f"libp2p network {identity.peer_id}")

    @classmethod
    async def create(cls, options: Libp2pOptions, traffic: Traffic | None = None) -> Libp2pNetwork:
        """Start a host, and join the network through `options.peers`. On return the network is ready and known to
        others.

        `traffic` counts what the network sends and receives, and has its limits; None means no limits.
        Raises ConfigError or StartError, with a cause of one line and a remedy; then nothing is left running.
        """
        identity, roll = Identity.load(options.identity_path), None
        if options.invitation is not None:  # one that does not hold is refused before anything runs
            roll = MemberRoll(options.invitation, identity.peer_id, time.time(), revocations=options.revocations)
        given = GivenPeers(options.peers, own_peer_id=identity.peer_id, listen=options.listen)
        await given.look_up(timeout_s=HURRIED_TIMEOUT_S if options.remembered else TIMEOUT_S)
        policy = DialPolicy.of_machine(listen=options.listen, given=[peer.addr for peer in given.addrs])
        options = options.with_addrs(given.addrs, policy.worth_knowing)
        host = await start_host(options, given, policy)
        host.traffic = traffic or host.traffic
        host.gate = gate = PrivateGate(host, roll) if roll is not None else None
        network = cls(identity, host, options, given, gate)
        try:
            await asyncio.wait((network._ready,))
            network._ready.result()
        except BaseException:
            network._ready.cancel()  # if this task was cancelled, nobody asks for its error
            await network.close()
            raise
        return network

    async def __aenter__(self) -> Libp2pNetwork:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def known_peers(self) -> tuple[Contact, ...]:
        """The nodes in the routing table with their addresses that are worth a dial, to be remembered for later
        starts."""
        policy = self._paths.policy()
        found = (replace(contact, addrs=policy.worth_knowing(contact.addrs)) for contact in self._dht.contacts())
        return tuple(contact for contact in found if contact.addrs)

    async def reachability(self, *, timeout_s: float = 0.0) -> Reachability:
        """Return how others reach this node, as confirmed by peers. Wait up to `timeout_s` for the first
        confirmation."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._paths.survey.measured.wait()
        return self._paths.own.reachability

    async def ask_greetings(self) -> list[Greeting]:
        """Greet a few connected peers, drawn by chance. Return the answers: their versions and clocks."""
        connected = list(self.traffic.peer_paths())
        asked = random.sample(connected, min(NUM_ASKED, len(connected)))
        return await ask_greetings(self._host, asked, self.network_id)

    def allow_relaying(self, may_relay: bool) -> None:
        """Say whether this node may relay for others if it can. Initially it may."""
        self._paths.may_relay = may_relay
        self._paths.update()

    @property
    def is_behind_symmetric_nat(self) -> bool:
        """Return whether peers see this node at different ports, so that another NAT cannot be opened for it."""
        return self._paths.own.is_behind_symmetric_nat

    @property
    def was_dialled_back(self) -> bool:
        """Return whether any peer has answered that it tried to reach this node, successfully or not."""
        return self._paths.own.was_asked

    @property
    def relays(self) -> frozenset[str]:
        """The peer ids of the nodes that relay for this one now."""
        return self._reservations.held

    def active_relay_counts(self) -> RelayCounts | None:
        """Return what this node relays for others, or None while it is no relay."""
        return self._relay.counts if self._relay.serves else None

    @property
    def relay_counts(self) -> RelayCounts:
        """Return what this node relays for others, also while it is no relay."""
        return self._relay.counts

    @property
    def revocations(self) -> bytes:
        """Return the signed list of revocations that this node of a private network has, for the next start; b"" if it
        has none."""
        return self._gate.revocations if self._gate else b""

    @property
    def dht_counts(self) -> DhtCounts:
        """Return the counts of this node's part of the record DHT."""
        return self._dht.counts

    @property
    def daemon_pid(self) -> int:
        """The process id of the libp2p daemon, a child process."""
        return self._host.daemon.pid

    def now(self) -> float:
        return time.time()

    # --- calls and streams --------------------------------------------------------------------------------------------

    async def call(
        self,
        peer_id: str,
        method: str,
        request: bytes,
        *,
        timeout_s: float,
        max_bytes: int = limits.MAX_MESSAGE_BYTES,
    ) -> bytes:
        self._check_open()
        return await self._methods.call(peer_id, method, request, timeout_s=timeout_s, max_bytes=max_bytes)

    def stream(self, peer_id: str, method: str, *, timeout_s: float | None) -> AbstractAsyncContextManager[Stream]:
        self._check_open()
        return self._methods.stream(peer_id, method, timeout_s=timeout_s)

    async def serve(self, method: str, handler: UnaryHandler) -> None:
        self._check_open()
        await self._methods.serve(method, handler)

    async def serve_stream(self, method: str, handler: StreamHandler) -> None:
        self._check_open()
        await self._methods.serve_stream(method, handler)

    def release(self, *methods: str) -> None:
        self._methods.release(*methods)

    # --- records ------------------------------------------------------------------------------------------------------

    async def publish(self, key: str, payload: bytes, *, lifetime_s: float) -> bool:
        self._check_open()
        return await self._records.publish(key, payload, lifetime_s=lifetime_s)

    async def lookup(self, keys: Sequence[str], *, timeout_s: float, max_records: int = 0) -> list[Envelope]:
        self._check_open()
        found = await self._records.lookup(keys, timeout_s=timeout_s, max_records=max_records)
        return found if self._gate is None else self._gate.believed(found)

    def provider_of(self, peer_id: str) -> Hashable:
        return self._host.provider_of(peer_id) or peer_id

    async def addrs(self) -> tuple[str, ...]:
        self._check_open()
        await self._paths.own.refresh()
        return tuple(f"{addr}/p2p/{self.peer_id}" for addr in self._paths.own.to_announce())

    # --- life and death -----------------------------------------------------------------------------------------------

    async def wait_failed(self) -> SwarmError:
        """Wait until this network has failed for good, and return the reason."""
        return await asyncio.shield(self._failure)

    async def close(self) -> None:
        self._main.cancel()  # `Host.stop` goes on nevertheless
        await asyncio.wait((self._main,))

    async def _run(self) -> None:
        """Own the host and every task. It ends when it is cancelled, or when the start, a task or the daemon fails."""
        try:
            async with self._tasks:
                self._tasks.create_task(self._host.run())
                await self._enter()
                self._ready.set_result(None)
        except BaseExceptionGroup as group:
            self._fail(group.exceptions[0])
        except (SwarmError, asyncio.CancelledError) as error:
            self._fail(error)
        finally:
            self._methods.close()
            self._relay.close()
            await self._host.stop()

    async def _enter(self) -> None:
        """Answer peers, join through those that are known, and start what goes on while this node is in the network."""
        start = self._tasks.create_task
        start(ConnectionLimit(self._host, self._used_peers).run(), name="limit connections")
        await self._methods.start()
        await self._relay.start()
        await self._paths.start(self._tasks, method_prefix(self._network_id), self._watch.replace)
        await self._dht.serve()
        self._dht.known.on_answer = self.links.answered
        if self._gate is not None:
            self._dht.may_store = self._gate.may_store
            start(self._gate.run(self._watch.end_streams), name="private gate")
        self._host.find_addrs = self._dht.find_addrs
        self._host.known_addrs = lambda peer_id: self._paths.policy().worth_knowing(self._dht.known_addrs(peer_id))
        await self._host.serve(HELLO, self._gate.answer if self._gate else hello_answer(self._network_id))
        remembered = [contact for contact in self._options.remembered if contact.peer_id != self.peer_id]
        discovery = start_discovery(self._options, self.peer_id, lambda: self._dht.known.own_addrs, self._tasks)
        self.entry = entry = await join(
            self._host,
            self._given,
            remembered,
            self._network_id,
            find_nearby=partial(discovery.first, timeout_s=NEARBY_S) if discovery else None,
            may_be_first=self._options.may_be_first,
            patience_s=self._options.patience_s,
        )
        await self._host.look()  # the addresses of these peers decide which addresses of others are worth a dial
        start(self._watch.run())
        start(self._reservations.run())
        await asyncio.gather(self._reservations.wait_answered(entry.peer_ids), self._paths.survey.observe())
        self._paths.update()
        start(self._paths.survey.run())
        start(self._paths.follow_relays())
        answers = await asyncio.gather(*(self._dht.ping(peer_id) for peer_id in entry.peer_ids))
        await self._dht.refresh()
        start(tell_address_changes(self._dht, self._watch.used_peers))
        met = [peer_id for peer_id, answered in zip(entry.peer_ids, answers, strict=True) if answered]
        again = self._records.publish_again
        watch = PartitionWatch(self._host, self._dht, self._given, self._network_id, again, met=met, known=remembered)
        start(watch.run())
        if discovery:
            for contact in discovery.nearby.contacts:
                if contact.peer_id in entry.nearby:
                    discovery.nearby.reached(contact)
            start(LocalPeers(discovery, self._dht, self._reach, again).run(), name="meet local peers")

    # --- what the parts ask for ---------------------------------------------------------------------------------------

    def _kept_peers(self) -> set[str]:
        """Return the relays that make this node reachable, and the seeds through which others find it."""
        return {*self._reservations.held, *(seed.peer_id for seed in self._given.addrs)}

    def _used_peers(self) -> set[str]:
        """Return the peers whose connections carry something of this node or of peers that it relays for."""
        return {*self._watch.used_peers(), *self._relay.used_peers}

    def _relay_candidates(self) -> list[RelayCandidate]:
        given = (*self._given.addrs, *map(parse_peer_addr, self._options.relays))
        return relay_candidates(self.peer_id, given, self._dht.contacts())

    async def _reach(self, contact: Contact) -> None:
        await connect(self._host, contact.peer_id, contact.addrs, self._network_id)

    def _askable(self) -> list[str]:
        """Return the peers to ask about this node's own addresses: first those through which it joined, then the others
        in random order."""
        others = [peer_id for peer_id in self._dht.peers() if peer_id not in self.entry.peer_ids]
        return [*self.entry.peer_ids, *random.sample(others, len(others))]

    def _announce(self, addrs: tuple[str, ...]) -> None:
        self._dht.known.own_addrs = addrs

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            self._ready.cancel()
        elif not self._ready.done():
            self._ready.set_exception(error)
        elif not self._failure.done():
            if not isinstance(error, SwarmError):  # a bug in one of the network's tasks
                logger.error("a task of the network failed", exc_info=error)
                error = SwarmError(
                    "this node's network failed internally", remedy="restart this node or program; its log says why"
                )
            self._failure.set_result(error)

    def _end_as_copy(self) -> None:
        self._fail(
            StartError(
                f"the identity {self.peer_id} is in use by another running node",
                remedy="stop one of the two, and give it its own identity (another home folder)",
            )
        )

    def _check_open(self) -> None:
        if self._main.cancelling() or self._main.done() or self._failure.done():
            raise PeerUnreachable("this node's network has ended", remedy="restart this node or program")


def start_discovery(
    options: Libp2pOptions, peer_id: str, own_addrs: Callable[[], Sequence[str]], tasks: asyncio.TaskGroup
) -> LocalDiscovery | None:
    """Start discovery in the local network if the options ask for it and the node listens beyond its machine."""
    if not options.mdns or all(map(is_loopback, options.listen)):
        return None
    discovery = LocalDiscovery(
        options.network_id,
        peer_id,
        lambda subnets: local_addrs(options.listen, own_addrs(), subnets),
        secret=options.invitation.network_secret if options.invitation else None,
    )
    tasks.create_task(discovery.run(), name="local discovery")
    return discovery
