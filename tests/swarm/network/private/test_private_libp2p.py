"""Tests of what a private network shows to members and to strangers, and when membership ends, with real hosts.

`test_member_roll` has the rules.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from support.network_worlds import eventually
from support.private_networks import Owner, private_node
from swarm.network.interface import NotServed, Stream
from swarm.network.libp2p.daemon_control import ControlError, read_delimited
from swarm.network.libp2p.greeting import HELLO
from swarm.network.libp2p.host import Host
from swarm.network.libp2p.libp2p_options import Libp2pOptions
from swarm.network.libp2p.p2pd_process import DaemonOptions
from swarm.network.libp2p_network import Libp2pNetwork
from swarm.network.multiaddr import PeerAddr, parse_peer_addr
from swarm.network.private import private_gate
from swarm.network.relay.circuit_messages import (
    HOP,
    MAX_MESSAGE_BYTES,
    CircuitStatus,
    check_hop_accepted,
    reserve_request,
)
from swarm_protocol.dht_messages import FindRequest, dht_id_of
from swarm_protocol.errors import ConfigError, PeerError, PeerRefused, PeerUnreachable, StartError, SwarmError
from swarm_protocol.identity import Identity
from swarm_protocol.network_invitation import NetworkInvitation, NetworkSecret, PrivateGreeting
from swarm_protocol.version import PROTOCOL_VERSION, Hello, software_version

IDENTIFY = "/ipfs/id/1.0.0"
MODEL = "orchid"
OWNER = Owner()

Case = Callable[[Path], Awaitable[None]]


def run(case: Case, folder: Path) -> None:
    uvloop.run(case(folder))  # type: ignore[arg-type]


BesideMember = Callable[[Callable[[Libp2pNetwork], Coroutine[Any, Any, None]]], None]


@pytest.fixture(scope="module")
def beside_member(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BesideMember]:
    """Run cases beside one member, which relays, for all cases that do not change it."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        member = runner.run(private_node(tmp_path_factory.mktemp("member") / "a", OWNER.invite(), relay="serve"))
        yield lambda case: runner.run(case(member))
        runner.run(member.close())


@asynccontextmanager
async def two_members(
    folder: Path, first: NetworkInvitation | None = None, second: NetworkInvitation | None = None, **options: Any
) -> AsyncIterator[tuple[Libp2pNetwork, Libp2pNetwork]]:
    a = await private_node(folder / "a", first or OWNER.invite(), **options)
    try:
        b = await private_node(folder / "b", second or OWNER.invite(), peers=await a.addrs())
        try:
            yield a, b
        finally:
            await b.close()
    finally:
        await a.close()


@asynccontextmanager
async def raw_host(identity_path: Path | None = None) -> AsyncIterator[Host]:
    """A host that speaks libp2p and our control protocol, and has no invitation."""
    host = await Host.start(DaemonOptions(identity_path=identity_path))
    unary = asyncio.create_task(host.unary.run())
    try:
        yield host
    finally:
        await host.stop()
        await unary


async def echo(_peer_id: str, request: bytes) -> bytes:
    return request


async def answered(call: Awaitable[bytes]) -> bytes | None:
    try:
        return await call
    except (PeerError, NotServed):
        return None


async def stranger_reads(host: Host, there: PeerAddr, protocol: str, request: bytes) -> bytes:
    """Return what a stream sends to a stranger that sends `request`, until it ends."""
    try:
        reader, writer = await host.control.open_stream(there.peer_id, protocol)
    except ControlError:
        return b""
    try:
        writer.write(request)
        async with asyncio.timeout(30):
            return await reader.read()
    except OSError:
        return b""
    finally:
        writer.transport.abort()


async def identified(host: Host, peer_id: str) -> bytes:
    """Return what libp2p's identify shows to anybody."""
    reader, writer = await host.control.open_stream(peer_id, IDENTIFY)
    try:
        return await read_delimited(reader, 1 << 20)
    finally:
        writer.transport.abort()


def test_stranger_with_the_addresses_learns_no_name_and_gets_no_answer(
    beside_member: BesideMember, tmp_path: Path
) -> None:
    async def case(a: Libp2pNetwork) -> None:
        async with await private_node(tmp_path / "b", OWNER.invite(), peers=await a.addrs()) as b:
            calls: list[str] = []

            async def count(peer_id: str, request: bytes) -> bytes:
                calls.append(peer_id)
                return request

            async def take(peer_id: str, stream: Stream) -> None:
                calls.append(peer_id)
                await stream.send(b"secret")

            await a.serve(f"serving.files/{MODEL}", count)
            await a.serve_stream(f"serving.lane/{MODEL}", take)
            assert await b.publish("notes", b"record", lifetime_s=60)
            assert await b.call(a.peer_id, f"serving.files/{MODEL}", b"x", timeout_s=30) == b"x", (
                "a member must be answered"
            )
            there = parse_peer_addr((await a.addrs())[0])
            async with raw_host() as stranger:
                await stranger.control.connect(there.peer_id, [there.addr])
                told = await identified(stranger, a.peer_id)
                assert b"/ipfs/ping/1.0.0" in told, "identify must be readable"
                for word in (b"private-", b"swarm/", MODEL.encode(), OWNER.identity.peer_id.encode(), b"serving"):
                    assert word not in told
                names = {each.decode() for each in re.findall(rb"/[a-z2-7]{32}(?![a-z2-7])", told)}
                assert len(names) >= 10, "the methods must be listed, under names that reveal nothing"
                find = FindRequest(keys=(dht_id_of("notes"),)).to_bytes()
                hello = Hello(network_id=OWNER.network_id, software_version=software_version()).to_bytes()
                own = f"/swarm/{PROTOCOL_VERSION}/{OWNER.network_id}/"
                guessed = {HELLO, *(own + each for each in ("dht/find", "dht/store", "call/ping", "paths/observe"))}
                for name in (*guessed, *names):
                    for request in (find, hello, b""):
                        assert await answered(stranger.call(a.peer_id, name, request)) is None, name
                    assert await stranger_reads(stranger, there, name, bytes(16) + request) == b"", name
                assert calls == [b.peer_id], "no handler may learn of the stranger"
                reader, writer = await stranger.control.open_stream(a.peer_id, HOP)
                writer.write(reserve_request())
                with pytest.raises(ValueError, match=f"status {CircuitStatus.PERMISSION_DENIED}"):
                    check_hop_accepted(await read_delimited(reader, MAX_MESSAGE_BYTES))
                writer.transport.abort()

    beside_member(case)


def test_stranger_that_copies_the_names_and_is_greeted_back_learns_nothing(beside_member: BesideMember) -> None:
    """It serves the greeting under the name that identify shows, and gets what members get, which is encrypted."""

    async def case(a: Libp2pNetwork) -> None:
        there = parse_peer_addr((await a.addrs())[0])
        secret = NetworkSecret(OWNER.secret)
        heard: list[bytes] = []

        async def listen(_peer_id: str, request: bytes) -> bytes:
            heard.append(request)
            return request  # what was sealed for it, sent back

        async with raw_host() as stranger:
            await stranger.serve(secret.protocol_name(HELLO), listen)
            await stranger.control.connect(there.peer_id, [there.addr])
            find = secret.protocol_name(f"/swarm/{PROTOCOL_VERSION}/{OWNER.network_id}/dht/find")
            assert await answered(stranger.call(a.peer_id, find, b"")) is None
            assert len(heard) == 1
            assert all(word not in heard[0] for word in (b"private", OWNER.identity.public_key, a.peer_id.encode()))

    beside_member(case)


def test_stolen_chain_is_refused_under_another_key(beside_member: BesideMember) -> None:
    """A node with the secret and a member's chain, and without an invitation, is no member."""

    async def case(a: Libp2pNetwork) -> None:
        invitation = OWNER.invite()
        there = parse_peer_addr((await a.addrs())[0])
        secret = invitation.network_secret
        victim = Identity.generate()
        async with raw_host() as thief:
            await thief.control.connect(there.peer_id, [there.addr])
            hello = Hello(network_id=OWNER.network_id, software_version=software_version())
            greeting = PrivateGreeting(hello=hello, chain=invitation.chain_for(victim.peer_id)).to_bytes()
            about = f"greeting {thief.peer_id} {a.peer_id}".encode()
            answer = await thief.call(a.peer_id, secret.protocol_name(HELLO), secret.seal(greeting, about))
            back = f"greeting {a.peer_id} {thief.peer_id}".encode()
            told = PrivateGreeting.from_bytes(secret.open(answer, back))
            assert told == PrivateGreeting(hello=None, refusal="the chain of certificates is another node's")
            find = secret.protocol_name(f"/swarm/{PROTOCOL_VERSION}/{OWNER.network_id}/dht/find")
            assert await answered(thief.call(a.peer_id, find, FindRequest().to_bytes())) is None

    beside_member(case)


def test_stranger_that_stays_connected_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_gate, "STRANGER_S", 0.5)
    monkeypatch.setattr(private_gate, "CHECK_S", 0.2)

    async def case(folder: Path) -> None:
        async with two_members(folder) as (a, b), raw_host() as stranger:
            there = parse_peer_addr((await a.addrs())[0])
            await stranger.control.connect(there.peer_id, [there.addr])
            await eventually(partial(is_connected, a, stranger.peer_id))

            async def is_gone() -> bool:
                return not await is_connected(a, stranger.peer_id)

            await eventually(is_gone)
            assert await is_connected(a, b.peer_id), "members must stay connected"

    run(case, tmp_path)


async def is_connected(node: Libp2pNetwork, peer_id: str) -> bool:
    return peer_id in await node._host.connected_peers()


def test_receivers_enforce_rights(tmp_path: Path) -> None:
    async def case(folder: Path) -> None:
        async with two_members(folder, second=OWNER.invite("join")) as (a, b):
            await a.serve(f"serving.files/{MODEL}", echo)
            await a.serve("train.vote/story", echo)
            await a.serve("train.standing/story", echo)
            with pytest.raises(PeerRefused, match="right to ask"):
                await b.call(a.peer_id, f"serving.files/{MODEL}", b"", timeout_s=30)
            with pytest.raises(PeerRefused, match="right to train"):
                await b.call(a.peer_id, "train.vote/story", b"", timeout_s=30)
            assert await b.call(a.peer_id, "train.standing/story", b"x", timeout_s=30) == b"x", (
                "members must be able to watch"
            )
            b._gate._roll.check_own = lambda *_: None  # type: ignore[union-attr, method-assign]
            with pytest.raises(PeerRefused, match="does not serve"):
                await b.call(a.peer_id, f"serving.files/{MODEL}", b"", timeout_s=30)
            with pytest.raises(PeerRefused, match="does not serve"):
                await b.call(a.peer_id, "train.vote/story", b"", timeout_s=30)
            with pytest.raises((PeerError, SwarmError)):
                async with b.stream(a.peer_id, f"serving.lane/{MODEL}", timeout_s=30) as stream:
                    await stream.receive()
            await b.serve(f"serving.files/{MODEL}", echo)
            with pytest.raises(PeerRefused, match="right to serve"):
                await a.call(b.peer_id, f"serving.files/{MODEL}", b"", timeout_s=30)

    run(case, tmp_path)


@pytest.mark.usefixtures("copies_are_searched_for")
def test_members_accept_each_other_over_a_relay_and_after_a_restart(tmp_path: Path) -> None:
    async def case(folder: Path) -> None:
        relay = await private_node(folder / "relay", OWNER.invite(), relay="serve")
        peers = await relay.addrs()
        hidden = {"peers": peers, "listen": (), "relay": "use"}
        a = await private_node(folder / "a", OWNER.invite(), **hidden)
        b = await private_node(folder / "b", OWNER.invite(), **hidden)
        await a.serve("echo", echo)

        async def reaches() -> bool:
            return await answered(b.call(a.peer_id, "echo", b"x", timeout_s=30)) == b"x"

        await eventually(reaches)
        await a.close()
        a = await private_node(folder / "a", OWNER.invite(), **hidden)
        await a.serve("echo", echo)
        await eventually(reaches)
        for node in (a, b, relay):
            await node.close()

    run(case, tmp_path)


def test_invitation_that_expires_ends_calls_streams_and_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_gate, "CHECK_S", 0.2)
    later_s = 0.0
    monkeypatch.setattr(private_gate, "time", SimpleNamespace(time=lambda: time.time() + later_s))

    async def case(folder: Path) -> None:
        nonlocal later_s
        async with two_members(folder, second=OWNER.invite(lifetime_s=3600.0)) as (a, b):
            begun, ended = asyncio.Event(), asyncio.Event()

            async def hold(_peer_id: str, stream: Stream) -> None:
                begun.set()
                try:
                    await stream.receive()
                finally:
                    ended.set()

            await a.serve_stream(f"serving.lane/{MODEL}", hold)
            async with b.stream(a.peer_id, f"serving.lane/{MODEL}", timeout_s=30) as stream:
                await begun.wait()
                later_s = 3600.0
                with pytest.raises((PeerRefused, PeerUnreachable)):
                    await stream.receive()
                async with asyncio.timeout(30):
                    await ended.wait()
            assert "expired" in str(await b.wait_failed()), "its own node must end with the reason"

            async def is_gone() -> bool:
                return not await is_connected(a, b.peer_id)

            await eventually(is_gone)
            expired = OWNER.invite(lifetime_s=0.001)
            with pytest.raises((ConfigError, StartError), match="expired"):
                await private_node(folder / "c", expired, peers=await a.addrs())

    run(case, tmp_path)


def test_revocation_spreads_to_all_members_and_disconnects_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_gate, "CHECK_S", 0.2)

    async def case(folder: Path) -> None:
        revoked = OWNER.invite("ask")
        async with two_members(folder, second=revoked) as (a, b):
            c = await private_node(folder / "c", OWNER.invite(), peers=await a.addrs())
            list_ = OWNER.revoke(revoked.terms.serial)
            messenger = await private_node(
                folder / "m", OWNER.invite(), peers=await c.addrs(), revocations=list_, listen=()
            )

            async def all_know() -> bool:
                return a.revocations == c.revocations == list_

            await eventually(all_know, timeout_s=10.0)  # the members tell each other, and none has to ask
            assert "revoked" in str(await b.wait_failed())
            with pytest.raises(ConfigError, match="revoked"):
                await private_node(folder / "b2", revoked, peers=await a.addrs())
            with pytest.raises(ConfigError, match="revoked"):
                await private_node(folder / "b3", revoked, peers=await a.addrs(), revocations=list_)
            for node in (messenger, c):
                await node.close()

    run(case, tmp_path)


def test_private_network_needs_an_invitation_to_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a private network"):
        Libp2pOptions(identity_path=tmp_path / "a", network_id=OWNER.network_id)
    with pytest.raises(ConfigError, match="the invitation is to"):
        Libp2pOptions(identity_path=tmp_path / "a", network_id="swarm", invitation=OWNER.invite())


def test_invitation_to_another_network_is_refused(beside_member: BesideMember, tmp_path: Path) -> None:
    async def case(a: Libp2pNetwork) -> None:
        with pytest.raises(ConfigError, match="does not answer as a member of this private network"):
            await private_node(tmp_path / "b", Owner(seed=20).invite(), peers=await a.addrs())

    beside_member(case)


def test_bound_invitation_admits_only_its_node(beside_member: BesideMember, tmp_path: Path) -> None:
    async def case(a: Libp2pNetwork) -> None:
        identity = Identity.load_or_create(tmp_path / "b")
        bound = OWNER.invite(node=identity.peer_id)
        b = await private_node(tmp_path / "b", bound, peers=await a.addrs())
        await a.serve("echo", echo)
        assert await b.call(a.peer_id, "echo", b"x", timeout_s=30) == b"x"
        with pytest.raises(ConfigError, match="alone"):
            await private_node(tmp_path / "c", bound, peers=await a.addrs())
        await b.close()

    beside_member(case)
