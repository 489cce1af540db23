"""Opens TCP connections from the port on which the libp2p daemon listens, so that a NAT lets a peer's dial come in.

A NAT passes packets from an endpoint to which something was sent before. This node sends a SYN to where a peer is seen,
while that peer's daemon dials this node: the two SYNs meet, and both systems call it one connection (RFC 9293, section
3.5, simultaneous open; RFC 5382 asks NATs to allow it). The peer's daemon is the side that began, as always; this side
passes the bytes to its own daemon's listener, which so answers a dial like any other. If nobody dials but a listener
answers, the peer can be dialled as it is: the connection is closed, and the daemon dials.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from swarm.network.multiaddr import ip_of, tcp_endpoint
from swarm.network.rate import write
from swarm.network.relay.relay import Circuit, RelayCounts

OPEN_S = 4.0
"""Time for a peer's dial to meet ours: its relay has to tell it, and a SYN that was dropped is sent again after 1 s."""

REFUSED_PAUSE_S = 0.1
"""Pause after a NAT or a machine refused the connection: the peer's own SYN may be on its way. It doubles each time, so
that six SYNs at most go to a machine that never asked for any."""

FIRST_BYTES_S = 2.0
"""Time for the first bytes of the other side, once a connection is open."""

PROPOSAL_S = 0.5
"""Time for a dialler's proposal after its greeting. Both are one write, and so one packet as a rule."""

IDLE_S = 100.0
"""A connection without a byte for so long is closed. libp2p says something every 30 s."""

_GREETING = b"\x13/multistream/1.0.0\n"
"""The first message of both sides. Only the side that dialled has more to say before it has heard something."""


@dataclass(frozen=True, slots=True)
class ListenEndpoint:
    """The endpoint at which a daemon listens: the one to bind, and the one at which this process reaches it."""

    bind: tuple[str, int]
    reach: tuple[str, int]


def listen_endpoints(listen: Sequence[str], addrs: Sequence[str]) -> dict[int, ListenEndpoint]:
    """Return the daemon's TCP listener for each IP version, of those that peers beyond this machine can use.

    `listen` is what it was told, `addrs` are its addresses, which tell the port where it could choose.
    """
    endpoints: dict[int, ListenEndpoint] = {}
    for addr in listen:
        ip, endpoint = ip_of(addr), tcp_endpoint(addr)
        if ip is None or endpoint is None or ip.is_loopback or ip.version in endpoints:
            continue
        host = {4: "127.0.0.1", 6: "::1"}[ip.version] if ip.is_unspecified else endpoint[0]
        port = endpoint[1] or next(
            (found[1] for each in addrs if (found := tcp_endpoint(each)) and found[0] == host), 0
        )
        if port:
            endpoints[ip.version] = ListenEndpoint(bind=(endpoint[0], port), reach=(host, port))
    return endpoints


class NotALibp2pHost(Exception):
    """Another program than a libp2p host answered."""


async def open_path(here: ListenEndpoint, there: tuple[str, int], opened: Callable[[], None]) -> bool:
    """Send SYNs to `there` until its dial has met them, then carry the connection until it ends, and return True.

    `opened` is called when the connection is there. Returns False if `there` can be dialled as it is, and its port is
    free again. Raises OSError, TimeoutError or `NotALibp2pHost` if nothing came of it.
    """
    reader, writer = await _connect(here.bind, there)
    try:
        async with asyncio.timeout(FIRST_BYTES_S):
            first = await reader.readexactly(len(_GREETING))
        if first != _GREETING:
            raise NotALibp2pHost
        if not (proposal := await _proposal(reader)):
            return False
        inside = await asyncio.open_connection(*here.reach)
        try:
            write(inside[1], first + proposal)
            opened()
            await Circuit((reader, writer), inside, RelayCounts()).run(IDLE_S)
        finally:
            inside[1].transport.abort()
        return True
    except asyncio.IncompleteReadError:
        raise NotALibp2pHost from None
    finally:
        _reset(writer)


async def _connect(bind: tuple[str, int], there: tuple[str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    pause_s = REFUSED_PAUSE_S
    async with asyncio.timeout(OPEN_S):
        while True:
            sock = socket.socket(socket.AF_INET6 if ":" in there[0] else socket.AF_INET)
            try:
                sock.setblocking(False)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                if sock.family == socket.AF_INET6:  # as the daemon does: the same port of IPv4 may be another's
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind(bind)
                await loop.sock_connect(sock, there)
                return await asyncio.open_connection(sock=sock)
            except ConnectionRefusedError:
                sock.close()
                await asyncio.sleep(pause_s)
                pause_s *= 2
            except BaseException:
                sock.close()
                raise


async def _proposal(reader: asyncio.StreamReader) -> bytes:
    """Return the next bytes of a dialler, or none of a listener, which waits for ours."""
    with suppress(TimeoutError):
        async with asyncio.timeout(PROPOSAL_S):
            return await reader.read(1 << 16)
    return b""


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close at once, without the minute in which the system would keep the pair of ports from the daemon's dial."""
    sock = writer.get_extra_info("socket")
    with suppress(OSError, AttributeError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
