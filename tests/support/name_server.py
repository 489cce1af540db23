"""A small real DNS server on loopback, with answers that a test writes: over UDP, and over TCP for long ones.

python name_server.py PORT ZONE.json      serves until it is ended, as in a network namespace
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

from dns import exception, flags, message, rcode, rdatatype, rrset

Zone = Mapping[str, Sequence[str]]
"""Records by "name TYPE", in lower case and without a final dot, such as {"seed.test A": ["203.0.113.7"]}."""

MAX_UDP_BYTES = 1232


class NameServer:
    """A DNS server.

    `silent` names are never answered, and `broken` ones get SERVFAIL. `asked` counts the queries by "name TYPE".
    """

    def __init__(self, zone: Zone, *, silent: Sequence[str] = (), broken: Sequence[str] = ()) -> None:
        self.zone = dict(zone)
        self.asked: list[str] = []
        self.port = 0
        self._silent = silent
        self._broken = broken

    def answer(self, packet: bytes, *, max_bytes: int) -> bytes | None:
        try:
            query = message.from_wire(packet)
            [question] = query.question
        except (exception.DNSException, ValueError):
            return None
        name = question.name.to_text(omit_final_dot=True).lower()
        key = f"{name} {rdatatype.to_text(question.rdtype)}"
        self.asked.append(key)
        if name in self._silent:
            return None
        reply = message.make_response(query, recursion_available=True)
        if name in self._broken:
            reply.set_rcode(rcode.SERVFAIL)
        elif key in self.zone:
            texts = [f'"{text}"' if question.rdtype == rdatatype.TXT else text for text in self.zone[key]]
            if texts:
                kind = rdatatype.to_text(question.rdtype)
                reply.answer.append(rrset.from_text(question.name, 60, "IN", kind, *texts))
        elif not any(known.split()[0] == name for known in self.zone):
            reply.set_rcode(rcode.NXDOMAIN)
        wire = reply.to_wire(max_size=65535)
        if len(wire) > max_bytes:
            reply.answer.clear()
            reply.flags |= flags.TC
            wire = reply.to_wire()
        return wire

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[NameServer]:
        loop = asyncio.get_running_loop()
        streams = await asyncio.start_server(self._converse, "127.0.0.1", port)
        self.port = streams.sockets[0].getsockname()[1]
        transport, _ = await loop.create_datagram_endpoint(lambda: _Datagrams(self), ("127.0.0.1", self.port))
        try:
            yield self
        finally:
            transport.close()
            streams.close()
            await streams.wait_closed()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        packet = await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
        if (wire := self.answer(packet, max_bytes=65535)) is not None:
            writer.write(len(wire).to_bytes(2, "big") + wire)
            await writer.drain()
        writer.close()


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, server: NameServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if (wire := self._server.answer(data, max_bytes=MAX_UDP_BYTES)) is not None:
            self._transport.sendto(wire, addr)


async def _serve(port: int, zone: Zone) -> None:
    async with NameServer(zone).serving(port):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())))
