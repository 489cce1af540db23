"""Relays connections to peers that cannot be dialled, over the connections that these peers hold to this node.

The daemon's own relay, which is off, limits each connection to 128 KiB and two minutes, and no flag changes that
reliably. So this process answers libp2p's relay protocol itself, without limits of volume and time. It bounds the
number of circuits, the bytes a second with a fair share for each peer (`relay_access`), and the time without a byte.
Nodes of other networks are refused (`relay_access`). Both ends run libp2p's encryption inside the circuit and prove
their peer ids to each other. So a relay sees only who connects with whom, when, and how many bytes they send, and it
can do no more harm than to let a connection fail.

Deviation from the specification: a reservation lasts exactly as long as the stream that asked for it, so that both
sides notice at once that the other one has left. `Relay` owns its socket; its tasks run in a task group of the caller.
`reservations` has the side that asks for a reservation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, get_args

from swarm_protocol.proto import p2pd_pb2

from swarm.network.libp2p.daemon_control import ControlError, IncomingStreams, read_delimited, read_message
from swarm.network.libp2p.daemon_errors import CONTROL_FAILURES
from swarm.network.libp2p.host import Host, RawStream
from swarm.network.multiaddr import addr_text, is_relayed, peer_id_bytes, peer_id_text
from swarm.network.peer_budgets import PeerSlots, greediest
from swarm.network.rate import write
from swarm.network.relay.circuit_messages import (
    HOP,
    MAX_MESSAGE_BYTES,
    STOP,
    CircuitStatus,
    check_stop_accepted,
    hop_status,
    parse_hop_request,
    stop_request,
)
from swarm.network.relay.relay_access import MAX_PIECE_BYTES, NO_LIMIT, Ends, RelayBudget
from swarm.network.traffic import TrafficLimits

OPENING_TIMEOUT_S = 4.0
"""Time-out of reading a request, and of the target's acceptance. The daemon that dials through this node waits 5 s."""

SPLICE_BYTES = MAX_PIECE_BYTES
"""Maximum bytes that one read of a circuit returns. A circuit with slow receivers holds up to four times this."""

LINGER_S = 5.0
"""Time for the last bytes to reach one end after the other end has closed."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """Bounds what a relay holds for others. A request or a reservation costs one open file, a circuit two and up to
    3 MiB while its ends are slow. Together they take fewer than the 1,024 files that a process may usually open, and
    leave some for the node itself.

    `circuits_per_pair` bounds the circuits from one peer to another. libp2p needs a single one, and without this bound
    one peer could use up all circuits of another peer.

    `requests` bounds the requests of all peers at a time, those with a reservation or circuit included. Beyond it each
    peer may still have a few, as in `PeerSlots`.

    `idle_s`: a circuit without a byte for this time is closed, at the latest after twice this time. libp2p itself sends
    something every 30 s, so this only closes circuits whose ends have vanished.

    `bytes_per_s` bounds all circuits in both directions together. They also get at most half of what the owner lets the
    node send, or receive.
    """

    reservations: int = 256
    circuits: int = 256
    circuits_per_peer: int = 64
    circuits_per_pair: int = 4
    requests: int = 640
    idle_s: float = 100.0
    bytes_per_s: float = math.inf

    def within(self, traffic: TrafficLimits) -> float:
        """Return the bytes a second for all circuits within the owner's limits."""
        return min(self.bytes_per_s, traffic.up_bytes_per_s / 2, traffic.down_bytes_per_s / 2)


RefusalReason = Literal["refused", "stranger", "failed", "idle"]
"""Why a request was refused or a circuit was closed. "refused": no room, or no reservation. "stranger": a peer of
another network. "failed": the target did not accept the connection. "idle": no byte came for too long."""


@dataclass(slots=True)
class RelayCounts:
    """Counts of a relay. `throttled_s` is the total time that pieces of all circuits have waited for the budget."""

    reservations: int = 0  # now
    circuits: int = 0  # now
    refusals: dict[RefusalReason, int] = field(default_factory=lambda: dict.fromkeys(get_args(RefusalReason), 0))
    relayed_bytes: int = 0
    throttled_s: float = 0.0


class CircuitRefused(Exception):
    """The relay refuses a request with `status`, and counts it under `reason`."""

    def __init__(self, status: CircuitStatus, reason: RefusalReason = "refused") -> None:
        self.status = status
        self.reason = reason


class Relay:
    """Answers peers that ask for a reservation, or for a circuit to a peer with a reservation, within `RelayLimits`."""

    def __init__(
        self,
        host: Host,
        tasks: asyncio.TaskGroup,
        limits: RelayLimits,
        is_of_network: Callable[[str], Awaitable[bool]],
        *,
        serves: bool,
    ) -> None:
        """`is_of_network(peer_id)` distinguishes peers of this node's network from strangers."""
        self.counts = RelayCounts()
        self._serves = serves
        self._is_of_network = is_of_network
        self._budget = RelayBudget(limits.within(host.traffic.limits), host.traffic.relayed)
        self._host = host
        self._limits = limits
        self._reserved: dict[str, asyncio.StreamWriter] = {}
        self._circuits: dict[asyncio.StreamWriter, Ends] = {}  # by the source's stream, the source and the target
        self._requests = PeerSlots[str](per_peer=lambda: self._limits.circuits_per_peer + 1, in_all=limits.requests)
        self._incoming = IncomingStreams(tasks, self._serve_one, limit=SPLICE_BYTES)

    @property
    def serves(self) -> bool:
        """Return whether this node relays for others. Setting it to False ends all reservations, but no circuits."""
        return self._serves

    @serves.setter
    def serves(self, serves: bool) -> None:
        self._serves = serves
        if not serves:
            for writer in self._reserved.values():
                writer.transport.abort()

    @property
    def reserved(self) -> Collection[str]:
        """The peers with a reservation, which can be reached through this node."""
        return self._reserved.keys()

    @property
    def used_peers(self) -> set[str]:
        """The peers with a reservation or a circuit."""
        return {*self._reserved, *chain.from_iterable(self._circuits.values())}

    async def start(self) -> None:
        """Have the daemon pass requests to this relay. Raises PeerUnreachable if the daemon has ended."""
        path = self._host.daemon.relay_socket
        await self._incoming.listen(path)
        await self._host.accept_streams(HOP, path)

    def close(self) -> None:
        self._incoming.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        slot = contextlib.ExitStack()
        try:
            async with asyncio.timeout(OPENING_TIMEOUT_S):
                info = await read_message(reader, p2pd_pb2.StreamInfo)
                peer_id = peer_id_text(info.peer)
                has_room = slot.enter_context(self._requests.taken(peer_id))
                target = await self._read_request(peer_id, info.addr, reader, has_room=has_room)
            await self._admit(peer_id, target)
            if target is None:
                await self._reserve(peer_id, reader, writer)
            else:
                await self._relay(peer_id, target, (reader, writer))
        except CircuitRefused as refusal:
            self.counts.refusals[refusal.reason] += 1
            write(writer, hop_status(refusal.status))
            await _close(writer)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError, ControlError):
            pass  # the peer sent nothing in time, or has left
        finally:
            writer.transport.abort()
            slot.close()

    async def _read_request(
        self, peer_id: str, addr: bytes, reader: asyncio.StreamReader, *, has_room: bool
    ) -> str | None:
        """Return the peer to connect with, or None for a reservation. Raises CircuitRefused."""
        if not has_room:
            raise CircuitRefused(CircuitStatus.RESOURCE_LIMIT_EXCEEDED)
        try:
            if is_relayed(addr_text(addr)):
                raise CircuitRefused(CircuitStatus.PERMISSION_DENIED)  # a relayed peer may not use this relay
            self._host.note_connected(peer_id, addr_text(addr))
            target = parse_hop_request(await read_delimited(reader, MAX_MESSAGE_BYTES))
            return None if target is None else peer_id_text(target)
        except ValueError:
            raise CircuitRefused(CircuitStatus.MALFORMED_MESSAGE) from None

    async def _admit(self, peer_id: str, target: str | None) -> None:
        """Raises CircuitRefused unless this node serves as a relay and the peer is of this network."""
        if not self._serves:
            raise CircuitRefused(CircuitStatus.RESERVATION_REFUSED if target is None else CircuitStatus.NO_RESERVATION)
        if not await self._is_of_network(peer_id):
            raise CircuitRefused(CircuitStatus.PERMISSION_DENIED, "stranger")

    async def _reserve(self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hold a reservation until the peer leaves or asks again. If it asks again, the end of its first stream was not
        noticed, and the new stream replaces it."""
        previous = self._reserved.pop(peer_id, None)
        if previous is not None:
            previous.transport.abort()
        if not self._serves or not self._make_reservation_room(peer_id):
            raise CircuitRefused(CircuitStatus.RESERVATION_REFUSED)
        self._reserved[peer_id] = writer
        self.counts.reservations = len(self._reserved)
        try:
            write(writer, hop_status(CircuitStatus.OK))
            await reader.read(1)
        finally:
            if self._reserved.get(peer_id) is writer:
                del self._reserved[peer_id]
            self.counts.reservations = len(self._reserved)

    def _make_reservation_room(self, peer_id: str) -> bool:
        """Return whether a peer may have a reservation. If all are held, the network that holds most of them loses its
        newest one to a peer of a network that would still hold fewer."""
        if len(self._reserved) < self._limits.reservations:
            return True
        greedy = self._greedy_holder(peer_id, list(self._reserved))
        if greedy is None:
            return False
        self._reserved.pop(greedy).transport.abort()
        return True

    def _greedy_holder(self, peer_id: str, holders: Sequence[str]) -> str | None:
        """Return which of the `holders` of all places, oldest first, loses its newest one to a peer: one of the network
        that holds most. Return None if the peer's network would then hold as many."""
        provider_of = self._host.provider_of
        num_held = Counter(map(provider_of, holders))
        greedy = greediest(Counter(reversed(holders)), provider_of)
        return greedy if num_held[provider_of(peer_id)] + 1 < num_held[provider_of(greedy)] else None

    async def _relay(self, source: str, target: str, there: RawStream) -> None:
        self._make_circuit_room(source, target)
        self._circuits[there[1]] = (source, target)
        self.counts.circuits = len(self._circuits)
        try:
            here = await self._open(source, target)
            try:
                write(there[1], hop_status(CircuitStatus.OK))
                circuit = Circuit(there, here, self.counts, self._budget, (source, target))
                await circuit.run(self._limits.idle_s)
            finally:
                here[1].transport.abort()
        finally:
            self._circuits.pop(there[1], None)
            self.counts.circuits = len(self._circuits)

    def _make_circuit_room(self, source: str, target: str) -> None:
        """Raises CircuitRefused if there is no room for a circuit. If other peers hold all circuits, or all of the
        target, the sources' network that holds most of them loses one, as in `_make_reservation_room`: the newest of
        its source with most."""
        if target not in self._reserved:
            raise CircuitRefused(CircuitStatus.NO_RESERVATION)
        limits = self._limits
        own = [ends for ends in self._circuits.values() if source in ends]
        if len(own) >= limits.circuits_per_peer or own.count((source, target)) >= limits.circuits_per_pair:
            raise CircuitRefused(CircuitStatus.RESOURCE_LIMIT_EXCEEDED)
        held = {writer: ends for writer, ends in self._circuits.items() if target in ends}
        if len(held) < limits.circuits_per_peer:
            if len(self._circuits) < limits.circuits:
                return
            held = self._circuits
        greedy = self._greedy_holder(source, [opener for opener, _ in held.values()])
        if greedy is None:
            raise CircuitRefused(CircuitStatus.RESOURCE_LIMIT_EXCEEDED)
        newest = next(writer for writer, (opener, _) in reversed(held.items()) if opener == greedy)
        del self._circuits[newest]
        newest.transport.abort()

    async def _open(self, source: str, target: str) -> RawStream:
        """Return a stream to `target`, which has accepted it as a connection from `source`. Raises CircuitRefused."""
        try:
            async with asyncio.timeout(OPENING_TIMEOUT_S):
                reader, writer = await self._host.control.open_stream(target, STOP, SPLICE_BYTES)
                try:
                    write(writer, stop_request(peer_id_bytes(source)))
                    check_stop_accepted(await read_delimited(reader, MAX_MESSAGE_BYTES))
                except BaseException:
                    writer.transport.abort()
                    raise
        except (*CONTROL_FAILURES, TimeoutError, ValueError) as error:
            logger.debug("%s cannot be relayed to %s: %s", source, target, error)
            raise CircuitRefused(CircuitStatus.CONNECTION_FAILED, "failed") from None
        return reader, writer


class Circuit:
    """Two joined byte streams. Bytes are read from one end only as fast as the other takes them."""

    def __init__(
        self,
        one: RawStream,
        other: RawStream,
        counts: RelayCounts,
        budget: RelayBudget = NO_LIMIT,
        peers: Ends = ("", ""),
    ) -> None:
        """`peers` are the peers at the two ends, to which `budget` charges the bytes."""
        self._ends = (one, other)
        self._counts = counts
        self._budget = budget
        self._peers = peers
        self._num_bytes = 0

    async def run(self, idle_s: float) -> None:
        """Copy bytes until either end has closed or failed, or nothing has moved for `idle_s`."""
        (reader, writer), (other_reader, other_writer) = self._ends
        copies = {
            asyncio.create_task(self._copy(reader, other_writer)),
            asyncio.create_task(self._copy(other_reader, writer)),
        }
        try:
            num_bytes = -1
            done: set[asyncio.Task[None]] = set()
            while not done and num_bytes != self._num_bytes:
                num_bytes = self._num_bytes
                done, _ = await asyncio.wait(copies, timeout=idle_s, return_when=asyncio.FIRST_COMPLETED)
            self._counts.refusals["idle"] += not done
        finally:
            for copy in copies:
                copy.cancel()
            ended = await asyncio.gather(*copies, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):  # a bug, which must end only this circuit
                logger.error("a circuit failed", exc_info=error)
        await asyncio.gather(_close(writer), _close(other_writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # one end has left, which ends the circuit
            while data := await reader.read(self._budget.piece_bytes):
                waited_s = await self._budget.take(self._peers, len(data))
                self._counts.throttled_s += waited_s  # added after the wait, since other circuits add to it meanwhile
                write(writer, data)
                await writer.drain()
                self._num_bytes += len(data)
                self._counts.relayed_bytes += len(data)


async def _close(writer: asyncio.StreamWriter) -> None:
    """Close a connection once its written bytes have been sent, for which the other side has LINGER_S."""
    writer.close()
    with contextlib.suppress(OSError):
        async with asyncio.timeout(LINGER_S):
            await writer.wait_closed()
