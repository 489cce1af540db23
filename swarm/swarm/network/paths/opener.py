"""Opens TCP connections from the port on which the libp2p daemon listens, so that a NAT lets a peer's dial in.

A NAT lets packets in from an endpoint to which something was sent before. This node sends a SYN to the address at which
a peer is seen, while the peer's daemon dials this node. The two SYNs meet, and both systems make one connection of them
(RFC 9293, section 3.5, simultaneous open; RFC 5382 asks NATs to allow it). For libp2p the peer's daemon is the dialler.
This process passes the bytes to the listener of its own daemon, which answers them like any other dial. If the peer
does not dial, but its listener answers, the peer can be dialled without help: the connection is closed, and this node's
daemon dials.
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
"""Time for a peer's dial to meet this node's SYN. A relay has to tell the peer first, and a dropped SYN is sent again
after 1 s."""

REFUSED_PAUSE_S = 0.1
"""Pause after a NAT or a machine refused the connection, since the peer's own SYN may be on its way. It doubles each
time, so that at most six SYNs go to a machine that has nothing to do with the peer."""

FIRST_BYTES_S = 2.0
"""Time for the other side's first bytes once a connection is open."""

PROPOSAL_S = 0.5
"""Time for a dialler's proposal after its greeting. Both are one write, and so usually one packet."""

IDLE_S = 100.0
"""A connection without a byte for this time is closed. libp2p sends something every 30 s."""

_GREETING = b"\x13/multistream/1.0.0\n"
"""The first message of both sides. Only the dialler sends more before it has received something."""


@dataclass(frozen=True, slots=True)
class ListenEndpoint:
    """The endpoint at which a daemon listens: `bind` is the one to send SYNs from, and `reach` the one at which this
    process reaches the daemon."""

    bind: tuple[str, int]
    reach: tuple[str, int]


def listen_endpoints(listen: Sequence[str], addrs: Sequence[str]) -> dict[int, ListenEndpoint]:
    """Return by IP version the first TCP listener of the daemon that peers beyond this machine can use.

    `listen` are the daemon's listen addresses. `addrs` are its own addresses, which show the port if a listen address
    has port 0.
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
    """The program that answered is no libp2p host."""


async def open_path(here: ListenEndpoint, there: tuple[str, int], opened: Callable[[], None]) -> bool:
    """Send SYNs to `there` until the peer's dial meets one, then pass the connection's bytes until it ends, and return
    True.

    `opened` is called when the connection is open. Returns False if `there` can be dialled without help; the pair of
    ports is then free again. Raises OSError, TimeoutError or `NotALibp2pHost` if there is no connection.
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
                if sock.family == socket.AF_INET6:  # as the daemon does: another program may have this port of IPv4
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
    """Return the next bytes of a dialler, or b"" for a listener, which sends nothing more by itself."""
    with suppress(TimeoutError):
        async with asyncio.timeout(PROPOSAL_S):
            return await reader.read(1 << 16)
    return b""


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close by a reset, so that the daemon can use the pair of ports at once and not only after a minute."""
    sock = writer.get_extra_info("socket")
    with suppress(OSError, AttributeError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
