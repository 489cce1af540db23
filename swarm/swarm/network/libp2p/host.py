"""One libp2p host: the daemon, its control socket, small calls and raw streams.

`daemon_errors` translates the daemon's errors. The caller of `Host.start` owns the host, and runs `run`, or `unary.run`
for a host of a few seconds. Other modules define methods, messages and records.

Callers that ask for the daemon's connections at the same time share one request (`SharedLook`). Many tasks poll the
connections, such as one for each introduction under way, and the time of each answer grows with the number of
connections. Every caller gets an answer to a request that was sent after its call, and the time between two requests
has a minimum. There is no task: one of the waiting callers asks for all.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from typing import NoReturn, TypeVar

from swarm_protocol.errors import StartError
from swarm_protocol.identity import check_peer_id
from swarm_protocol.records import PathKind

from swarm.ended_tasks import end_tasks
from swarm.held_counts import HeldCounts
from swarm.network.interface import NotServed
from swarm.network.ip_kinds import IpNetwork, provider_network_of
from swarm.network.libp2p import kept_frames
from swarm.network.libp2p.daemon_control import Control, ControlError
from swarm.network.libp2p.daemon_errors import CONTROL_FAILURES, NOT_DIALLED, STREAM_RESET, WITHHELD, translating
from swarm.network.libp2p.greeting import Gate
from swarm.network.libp2p.p2pd_process import Daemon, DaemonOptions
from swarm.network.libp2p.unary_connection import (
    UnaryAnswer,
    UnaryConnection,
)
from swarm.network.multiaddr import ip_of, is_relayed
from swarm.network.peer_budgets import UnreadBudget
from swarm.network.traffic import Traffic

RawStream = tuple[asyncio.StreamReader, asyncio.StreamWriter]

FindAddrs = Callable[[str], AsyncGenerator[Sequence[str], None]]
"""`find_addrs(peer_id)` yields sets of addresses to dial, those that are found fastest first. The next set is needed
only if no address of the last one answers."""

Connect = Callable[[str, Sequence[str]], Awaitable[None]]

OWN_PROTOCOLS = "/swarm/"
"""The beginning of the names of Swarm's own protocols."""

CONNECTED_S = 1.0
"""Time for which an introduced peer that was seen to be connected counts as connected."""

PING_S = 5.0
"""Time between two checks whether the daemon still answers."""

NUM_SILENT = 6
"""A daemon that gives no answer for as many times PING_S has hung: requests to it would wait without end."""

T = TypeVar("T")

PAUSE_S, CONNECTION_PAUSE_S = 0.02, 1e-4
"""Minimum time between two requests for connections, and what each connection adds to it. To read an answer takes a few
microseconds for each connection, and strangers can hold thousands and ask without end at which address they are seen.
The first request after a pause is sent at once."""

Connections = dict[str, tuple[str, ...]]
"""The remote addresses of all connections, by peer id. Callers share it, and must not change it."""


class SharedLook:
    """Shares the daemon's answers about its connections among callers that ask at the same time."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._turn = asyncio.Lock()
        self._num_asked = 0
        self._next_at = -math.inf
        self._answer: Connections = {}
        self._answered = 0  # the number of the request that `_answer` answers

    async def look(self) -> Connections:
        """Return the connections at a time after this call. Raises what `Control` raises; another waiting caller then
        asks again."""
        num_asked = self._num_asked
        async with self._turn:
            if self._answered > num_asked:
                return self._answer
            loop = asyncio.get_running_loop()
            if (pause_s := self._next_at - loop.time()) > 0:
                await asyncio.sleep(pause_s)
            self._next_at = loop.time() + PAUSE_S
            self._num_asked += 1
            number = self._num_asked
            self._answer = await self._control.connected_peers()
            self._next_at += CONNECTION_PAUSE_S * sum(map(len, self._answer.values()))
            self._answered = number
            return self._answer


class Host:
    """One running libp2p daemon, with the state that this process keeps for it: connections, traffic, budgets.

    Its methods raise PeerUnreachable, PeerRefused or NotServed in place of the daemon's errors.
    """

    def __init__(self, daemon: Daemon, control: Control, unary: UnaryConnection, peer_id: str) -> None:
        self.daemon = daemon
        self.control = control
        self.unary = unary
        self.peer_id = peer_id
        self.traffic = Traffic()
        self.unread = UnreadBudget(self.provider_of)
        self.unacknowledged = UnreadBudget(
            self.provider_of, max_peer_bytes=kept_frames.PEER_BYTES, max_host_bytes=kept_frames.HOST_BYTES
        )
        self.connected: dict[str, tuple[str, ...]] = {}
        """The peers that were connected at the last `look`, with the addresses of their connections."""
        self.introduced: dict[str, PathKind] = {}
        """By peer id, the kind of each connection that came from an introduction."""
        self._connections = SharedLook(control)
        self._connected_at: dict[str, float] = {}  # by introduced peer, when it was last seen to be connected
        self._num_calls = HeldCounts[str]()
        self.find_addrs: FindAddrs = lambda _peer_id: _only(())  # there is no DHT to ask yet
        self.known_addrs: Callable[[str], Sequence[str]] = lambda _peer_id: ()
        """Returns the known addresses of a peer that are worth a dial, without asking other nodes."""
        self.gate: Gate | None = None
        """The gate of a private network, which is set before anything is served or asked."""
        self.connect: Connect = control.connect
        """Dials a peer at given addresses. Raises what `Control.connect` raises."""

    @classmethod
    async def start(cls, options: DaemonOptions) -> Host:
        """Start a daemon and connect to it. Raises StartError."""
        daemon = await Daemon.start(options)
        try:
            control = Control(daemon.control_socket)
            peer_id, _ = await control.identify()
            return cls(daemon, control, await UnaryConnection.open(control), peer_id)
        except CONTROL_FAILURES as error:
            await daemon.stop()
            raise StartError(f"the libp2p daemon does not answer: {error}", remedy="start again") from error
        except BaseException:
            await daemon.stop()
            raise

    async def run(self) -> NoReturn:
        """Run the unary connection. Raises StartError once the daemon has ended, or has hung and was killed."""
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._kill_if_silent())
            await self.unary.run()
            watching.cancel()
        await self.daemon.ended()
        raise self.daemon.failure()

    async def _kill_if_silent(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            if not await self._answers():
                self.daemon.kill_silent()
                return self.unary.close()

    async def _answers(self) -> bool:
        """Return whether the daemon answers in time. This counts waits instead of reading the clock: while the loop
        stands still, it reads nothing, and that time must not count."""
        ping = asyncio.create_task(self.unary.ping())
        try:
            for _ in range(NUM_SILENT):
                answered, _ = await asyncio.wait((ping,), timeout=PING_S)
                if answered:
                    return True
            return False
        finally:
            await end_tasks(ping)

    async def stop(self) -> None:
        self.unary.close()
        await self.daemon.stop()

    async def addrs(self) -> tuple[str, ...]:
        """Return this host's own addresses now, without /p2p. Raises PeerUnreachable if the daemon cannot be asked."""
        with translating(self.peer_id):
            _, addrs = await self.control.identify()
        return addrs

    async def connected_peers(self) -> dict[str, tuple[str, ...]]:
        """Return the peers with an open connection, with the remote addresses. Callers share the result, and must not
        change it. Raises PeerUnreachable if the daemon cannot be asked."""
        with translating(self.peer_id):
            return await self._connections.look()

    async def look(self) -> dict[str, tuple[str, ...]]:
        """Do as `connected_peers`, and keep the result as `connected`."""
        self.connected = await self.connected_peers()
        self.introduced = {peer_id: kind for peer_id, kind in self.introduced.items() if peer_id in self.connected}
        self._connected_at = {peer_id: self._connected_at.get(peer_id, 0.0) for peer_id in self.introduced}
        self.traffic.note(self.path_kinds())
        return self.connected

    def note_connected(self, peer_id: str, addr: str) -> None:
        """Note the address of a peer that has connected since the last `look`, so that it counts for its network."""
        if peer_id not in self.connected:
            self.connected = {**self.connected, peer_id: (addr,)}

    def provider_of(self, peer_id: str) -> IpNetwork | None:
        """Return the provider's network from which a peer, or its relay, is connected as far as is known."""
        ips = map(ip_of, self.connected.get(peer_id, ()))
        return next((provider_network_of(ip) for ip in ips if ip), None)

    def path_kinds(self) -> dict[str, PathKind]:
        """Return the kind of path to each peer that was connected at the last `look`."""
        return {
            peer_id: "relayed" if addrs and all(map(is_relayed, addrs)) else self.introduced.get(peer_id, "direct")
            for peer_id, addrs in self.connected.items()
        }

    async def call(
        self,
        peer_id: str,
        protocol: str,
        request: bytes,
        *,
        addrs: Sequence[str] | None = None,
        timeout_s: float | None = None,
    ) -> bytes:
        """Call a peer. If the daemon does not reach it, dial it at `addrs`, or at those that `find_addrs` finds if
        `addrs` is None.

        Raises PeerUnreachable, PeerRefused (the peer works on too many calls of this node, or this node does not dial
        it now), NotServed, or TimeoutError after `timeout_s`; in a private network also what `Gate.enter` raises.
        """
        async with asyncio.timeout(timeout_s):
            if self.gate is not None:
                await self.gate.enter(peer_id, protocol, addrs)
            wire_name = self.wire_name(protocol)
            with translating(peer_id), self._num_calls.holding(peer_id):
                self.traffic.sent(peer_id, len(request))
                response = await self._dialling(peer_id, addrs, lambda: self.unary.call(peer_id, wire_name, request))
        self.traffic.received(peer_id, len(response))
        return response

    def called_peers(self) -> Collection[str]:
        """Return the peers to which calls of this node are under way."""
        return self._num_calls.keys()

    def num_calls(self, peer_id: str) -> int:
        """Return the number of calls under way with a peer, in both directions."""
        return self._num_calls[peer_id] + self.unary.num_calls(peer_id)

    def wire_name(self, protocol: str) -> str:
        """Return the name of a protocol on the wire: in a private network one that only members can relate to it."""
        is_hidden = self.gate is not None and protocol.startswith(OWN_PROTOCOLS)
        return self.gate.wire_name(protocol) if self.gate is not None and is_hidden else protocol

    async def admits(self, peer_id: str, protocol: str) -> bool:
        """Return whether to answer a peer that asks for `protocol`. Its peer id must be of the kind that nodes have,
        since messages allow no other, and in a private network it must be a member with the right to ask."""
        try:
            check_peer_id(peer_id)
        except ValueError:
            return False
        return self.gate is None or await self.gate.admits(peer_id, protocol)

    async def serve(self, protocol: str, answer: UnaryAnswer) -> None:
        """Answer calls of `protocol`. Raises PeerUnreachable if the daemon cannot be asked."""

        async def counted(peer_id: str, request: bytes) -> bytes:
            if not await self.admits(peer_id, protocol):
                raise NotServed(peer_id)
            self.traffic.received(peer_id, len(request))
            response = await answer(peer_id, request)
            self.traffic.sent(peer_id, len(response))
            return response

        with translating(self.peer_id):
            await self.unary.serve(self.wire_name(protocol), counted)

    async def accept_streams(self, protocol: str, socket_path: str) -> None:
        """Have the daemon pass streams of `protocol` to the socket at `socket_path`. Raises PeerUnreachable if the
        daemon cannot be asked."""
        with translating(self.peer_id):
            await self.control.accept_streams(self.wire_name(protocol), socket_path)

    async def open_stream(self, peer_id: str, protocol: str, *, addrs: Sequence[str] | None = None) -> RawStream:
        """Open a stream to a peer, which is dialled as in `call`. Raises PeerUnreachable or NotServed, and in a private
        network what `Gate.enter` raises."""
        if self.gate is not None:
            await self.gate.enter(peer_id, protocol, addrs)
        wire_name = self.wire_name(protocol)

        async def open_one() -> RawStream:
            try:
                return await self.control.open_stream(peer_id, wire_name)
            except ControlError as error:
                if STREAM_RESET not in str(error):
                    raise
            # another connection has replaced the one that the daemon chose; nothing was sent on the stream yet
            return await self.control.open_stream(peer_id, wire_name)

        with translating(peer_id):
            return await self._dialling(peer_id, addrs, open_one)

    async def _dialling(self, peer_id: str, addrs: Sequence[str] | None, act: Callable[[], Awaitable[T]]) -> T:
        """Run `act`. If the daemon could not reach the peer, dial the peer and run `act` once more."""
        if not await self._may_dial(peer_id):
            await self._dial(peer_id, addrs)
        try:
            return await act()
        except ControlError as error:
            if not any(sign in str(error) for sign in NOT_DIALLED) or not await self._dial(peer_id, addrs):
                raise
        return await act()

    async def _may_dial(self, peer_id: str) -> bool:
        """Return False if an introduced peer is no longer connected. The daemon would then dial the address at which
        the peer was seen, which a NAT let in only for a moment, and wait for seconds."""
        if peer_id not in self.introduced:
            return True
        now = asyncio.get_running_loop().time()
        if self._connected_at.get(peer_id, 0.0) < now - CONNECTED_S:
            if peer_id not in await self.connected_peers():
                self.introduced.pop(peer_id, None)  # another call may have done so meanwhile
                return False
            self._connected_at[peer_id] = now
        return True

    async def _dial(self, peer_id: str, addrs: Sequence[str] | None) -> bool:
        searched = self.find_addrs(peer_id) if addrs is None else _only(addrs)
        return await connect_somewhere(self.connect, peer_id, searched)


async def connect_somewhere(
    connect: Connect, peer_id: str, searched: AsyncGenerator[Sequence[str], None], *, tried: Collection[str] = ()
) -> bool:
    """Connect at the first set of `searched` addresses that answers, skipping sets that were `tried` already. Return
    whether one answered. Raises ControlError if none did, and some dials were not made."""
    is_withheld = False
    async with aclosing(searched):
        async for found in searched:
            if set(found).issubset(tried):
                continue
            try:
                await connect(peer_id, found)
                return True
            except CONTROL_FAILURES as error:
                is_withheld |= str(error) == WITHHELD
    if is_withheld:
        raise ControlError(WITHHELD)
    return False


async def _only(addrs: Sequence[str]) -> AsyncGenerator[Sequence[str], None]:
    if addrs:
        yield addrs
