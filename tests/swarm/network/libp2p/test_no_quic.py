"""The daemon listens on TCP alone and never uses QUIC, whatever a peer announces by libp2p's identify; nor does it use
TLS, or relay.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from support.network_worlds import eventually, libp2p_node
from swarm.network.interface import NotServed
from swarm.network.libp2p import p2pd_process
from swarm.network.libp2p.daemon_control import ControlError
from swarm.network.libp2p.host import Host
from swarm.network.libp2p.no_quic import without_quic
from swarm.network.libp2p.p2pd_process import DaemonOptions
from swarm.network.relay.circuit_messages import HOP

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the filter of system calls is Linux's")

DIALS_S = 2.0
"""go-libp2p dials QUIC first, and TCP a quarter of a second later."""


@asynccontextmanager
async def running(options: DaemonOptions) -> AsyncIterator[Host]:
    host = await Host.start(options)
    unary = asyncio.create_task(host.unary.run())
    try:
        yield host
    finally:
        await host.stop()
        await unary


LISTENS = ("/ip4/127.0.0.1/tcp/0",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trap:
    """A peer that announces a QUIC address, which collects `datagrams`, by identify, and a peer that does not."""

    liar: Host
    honest: Host
    datagrams: socket.socket

    async def catch(self, *, nat_port_map: bool) -> int:
        """Let a host connect to the liar, lose it, and dial it again. Return the datagrams that were received."""
        async with running(DaemonOptions(listen=LISTENS, nat_port_map=nat_port_map)) as victim:
            [addr] = await victim.addrs()
            await self.liar.control.connect(victim.peer_id, [addr])
            await eventually(functools.partial(_has, victim, self.liar.peer_id))
            await asyncio.sleep(0.5)  # identify has no answer that shows when it is over
            await victim.control.disconnect(self.liar.peer_id)
            with contextlib.suppress(ControlError, TimeoutError):  # the host does not know the TCP address
                await asyncio.wait_for(victim.control.connect(self.liar.peer_id), DIALS_S)
            [other] = await self.honest.addrs()
            await victim.control.connect(self.honest.peer_id, [other])  # it connects over TCP
        num = 0
        while True:
            try:
                self.datagrams.recv(2048)
            except BlockingIOError:
                return num
            num += 1


@asynccontextmanager
async def trap() -> AsyncIterator[Trap]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(("127.0.0.1", 0))
        datagrams.setblocking(False)
        quic = f"/ip4/127.0.0.1/udp/{datagrams.getsockname()[1]}/quic-v1"
        async with (
            running(DaemonOptions(listen=LISTENS, announce=(quic,))) as liar,
            running(DaemonOptions(listen=LISTENS)) as honest,
        ):
            yield Trap(liar=liar, honest=honest, datagrams=datagrams)


async def _has(host: Host, peer_id: str) -> bool:
    return peer_id in await host.connected_peers()


@linux_only
def test_peer_that_announces_quic_is_never_dialled_by_quic(monkeypatch: pytest.MonkeyPatch) -> None:
    def unfiltered(start: Callable[[], Any]) -> Any:
        return start()

    async def main() -> None:
        async with trap() as liar:
            assert await liar.catch(nat_port_map=False) == await liar.catch(nat_port_map=True) == 0
            monkeypatch.setattr(p2pd_process, "without_quic", unfiltered)
            assert await liar.catch(nat_port_map=False) > 0

    uvloop.run(main())


def test_daemon_listens_on_tcp_alone(tmp_path: Path) -> None:
    async def main() -> None:
        listen = ("/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/0")
        async with await libp2p_node(tmp_path / "a", listen=listen) as node:
            sockets = psutil.Process(node.daemon_pid).net_connections("inet")
            assert {each.type for each in sockets} == {socket.SOCK_STREAM}
            assert len([each for each in sockets if each.status == psutil.CONN_LISTEN]) == 2

    uvloop.run(main())


@linux_only
@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6"])
def test_child_without_quic_uses_udp_and_learns_no_congestion_marks(family: str) -> None:
    level, option = ("IPPROTO_IP", "IP_RECVTOS") if family == "AF_INET" else ("IPPROTO_IPV6", "IPV6_RECVTCLASS")
    script = (
        f"import socket as s; u = s.socket(s.{family}, s.SOCK_DGRAM); u.setsockopt(s.SOL_SOCKET, s.SO_RCVBUF, 4096); "
        f"u.setsockopt(s.IPPROTO_IP, s.IP_TTL, 9); u.setsockopt(s.{level}, s.{option}, 1)"
    )
    ended = without_quic(
        lambda: subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    )
    assert "PermissionError" in ended.stderr
    subprocess.run([sys.executable, "-c", script], check=True)


def test_without_quic_raises_what_the_start_raises() -> None:
    def fail() -> None:
        raise FileNotFoundError("nothing there")

    with pytest.raises(FileNotFoundError, match="nothing there"):
        without_quic(fail)


def test_daemon_relays_for_nobody_by_itself() -> None:
    async def main() -> None:
        async with running(DaemonOptions(listen=LISTENS)) as ours, running(DaemonOptions()) as stranger:
            [addr] = await ours.addrs()
            await stranger.control.connect(ours.peer_id, [addr])
            with pytest.raises(NotServed):
                await stranger.open_stream(ours.peer_id, HOP)

    uvloop.run(main())


def test_peer_that_speaks_tls_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = p2pd_process.arguments

    def with_tls(options: DaemonOptions, control_socket: str, configuration: str) -> list[str]:
        return [*usual(options, control_socket, configuration), "-tls=1", "-noise=0"]

    async def main() -> None:
        async with running(DaemonOptions(listen=("/ip4/127.0.0.1/tcp/0",))) as ours:
            monkeypatch.setattr(p2pd_process, "arguments", with_tls)
            async with running(DaemonOptions()) as theirs:
                [addr] = await ours.addrs()
                with pytest.raises(ControlError, match="failed to negotiate security protocol"):
                    await theirs.control.connect(ours.peer_id, [addr])

    uvloop.run(main())
