"""Tests of how a libp2p node starts, and the error when it cannot."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import socket
import sysconfig
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.free_ports import free_port
from support.network_worlds import eventually, libp2p_node
from swarm.network import network_entry
from swarm.network.identity_check import check_identity_is_free
from swarm.network.libp2p import greeting, listening, p2pd_process
from swarm.network.libp2p.host import Host
from swarm.network.libp2p.libp2p_options import Libp2pOptions
from swarm.network.libp2p.p2pd_process import DaemonOptions
from swarm.network.libp2p_network import Libp2pNetwork
from swarm.network.multiaddr import parse_peer_addr
from swarm.network.network_entry import ClockError, NetworkEntry, NobodyReached
from swarm.network.paths.dial_policy import DialPolicy
from swarm_protocol.dht_messages import Contact
from swarm_protocol.errors import ConfigError, PeerRefused, StartError, SwarmError
from swarm_protocol.identity import Identity
from swarm_protocol.version import PROTOCOL_VERSION, Hello

pytestmark = pytest.mark.usefixtures("copies_are_searched_for")

STRANGER = Identity(bytes(32)).peer_id


Case = Callable[[Libp2pNetwork], Coroutine[Any, Any, None]]
BesideSeed = Callable[[Case], None]


@pytest.fixture(scope="module")
def beside_seed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BesideSeed]:
    """Run cases beside one seed, which relays, for all cases that do not change it."""
    with asyncio.Runner() as runner:
        seed = runner.run(libp2p_node(tmp_path_factory.mktemp("seed") / "seed", relay="serve"))
        yield lambda case: runner.run(case(seed))
        runner.run(seed.close())


async def failure(path: Path, **options: object) -> SwarmError:
    """Return the error that ends the start, and check that nothing is left of it."""
    children, tasks = set(psutil.Process().children()), asyncio.all_tasks()
    with pytest.raises((ConfigError, StartError)) as caught:
        await libp2p_node(path, **options)
    assert set(psutil.Process().children()) <= children

    async def tasks_are_the_same() -> bool:
        return asyncio.all_tasks() <= tasks  # a seed may still be answering

    await eventually(tasks_are_the_same)
    assert caught.value.remedy
    assert "\n" not in str(caught.value)
    return caught.value


@asynccontextmanager
async def running_host() -> AsyncIterator[Host]:
    host = await Host.start(DaemonOptions(listen=("/ip4/127.0.0.1/tcp/0",)))
    running = asyncio.create_task(host.unary.run())
    yield host
    await host.stop()
    await running


async def addr_of(host: Host) -> str:
    _, addrs = await host.control.identify()
    return f"{addrs[0]}/p2p/{host.peer_id}"


@asynccontextmanager
async def bare_host(hello: Hello | None, skew_s: float = 0.0) -> AsyncIterator[str]:
    """Yield the address of a libp2p host that answers `hello`, or is no Swarm node at all."""

    async def answer(_peer_id: str, _request: bytes) -> bytes:
        assert hello is not None
        return dataclasses.replace(hello, sent_at=time.time() + skew_s).to_bytes()

    async with running_host() as host:
        if hello is not None:
            await host.serve(greeting.HELLO, answer)
        yield await addr_of(host)


def test_start_beside_dead_seeds_does_not_wait_for_them(
    beside_seed: BesideSeed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_entry, "SEED_TIMEOUT_S", 3600)

    async def case(seed: Libp2pNetwork) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts and sends nothing
            silent_addr = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{STRANGER}"
            refusing_addr = f"/ip4/127.0.0.1/tcp/1/p2p/{STRANGER}"
            peers = (silent_addr, refusing_addr, *await seed.addrs())
            async with asyncio.timeout(60), await libp2p_node(tmp_path / "b", peers=peers) as node:
                assert await node.publish("k", b"", lifetime_s=10)

    beside_seed(case)


def test_start_with_only_dead_seeds_names_each_and_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_entry, "SEED_TIMEOUT_S", 0.5)

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            silent_addr = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{STRANGER}"
            refusing_addr = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity(b'1' * 32).peer_id}"
            error = await failure(tmp_path / "b", peers=(silent_addr, refusing_addr))
            assert isinstance(error, StartError)
            assert f"{refusing_addr}: connection refused" in error.message
            assert f"{silent_addr}: no answer" in error.message

    asyncio.run(main())


def test_start_at_a_seed_with_another_peer_id_names_the_one_it_has(beside_seed: BesideSeed, tmp_path: Path) -> None:
    async def case(seed: Libp2pNetwork) -> None:
        addr = (await seed.addrs())[0].replace(seed.peer_id, STRANGER)
        error = await failure(tmp_path / "b", peers=(addr,))
        assert isinstance(error, StartError)
        assert f"another peer answers there: {seed.peer_id}" in error.message

    beside_seed(case)


def test_start_at_a_port_of_something_else_says_so(tmp_path: Path) -> None:
    async def serve_http(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve_http, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            error = await failure(tmp_path / "b", peers=(f"/ip4/127.0.0.1/tcp/{port}/p2p/{STRANGER}",))
            assert "no libp2p host" in error.message

    asyncio.run(main())


def test_start_in_another_network_is_refused_by_name(
    beside_seed: BesideSeed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def case(seed: Libp2pNetwork) -> None:
        error = await failure(tmp_path / "b", network_id="two", peers=await seed.addrs())
        assert isinstance(error, ConfigError)
        assert "'test'" in error.message
        assert "'two'" in error.message
        assert str(error).count(error.remedy) == 1
        assert not caplog.records  # the error has the whole text

    beside_seed(case)


@pytest.mark.parametrize(
    ("hello", "skew_s", "kind", "words"),
    [
        (
            Hello(network_id="test", software_version="9", protocol_version=PROTOCOL_VERSION + 1),
            0,
            ConfigError,
            f"speaks protocol {PROTOCOL_VERSION + 1}",
        ),
        (Hello(network_id="test", software_version="9"), 3600, ClockError, "clock is 60 min behind"),
        (Hello(network_id="test", software_version="9"), -3600, ClockError, "clock is 60 min ahead"),
        (None, 0, ConfigError, "no Swarm node that answers strangers: check .* --invite"),
    ],
    ids=["version", "clock behind", "clock ahead", "no Swarm node"],
)
def test_start_at_an_incompatible_seed_says_why(
    tmp_path: Path, hello: Hello | None, skew_s: float, kind: type[SwarmError], words: str
) -> None:
    async def main() -> None:
        async with bare_host(hello, skew_s) as addr:
            children = len(psutil.Process().children())
            with pytest.raises(kind, match=words) as caught:
                await libp2p_node(tmp_path / "b", peers=(addr,))
            assert caught.value.remedy
            assert len(psutil.Process().children()) == children

    asyncio.run(main())


def test_start_at_a_seed_that_is_being_started_waits_until_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals, greet = list[str](), greeting.greet

    async def main() -> None:
        async with running_host() as seed:

            async def greet_and_serve(*arguments: Any) -> Any:
                try:
                    return await greet(*arguments)
                except PeerRefused as error:
                    refusals.append(error.message)
                    await seed.serve(greeting.HELLO, greeting.hello_answer("test"))
                    raise

            monkeypatch.setattr(network_entry, "greet", greet_and_serve)
            node = await libp2p_node(tmp_path / "b", peers=(await addr_of(seed),))
            assert node.entry.given == (seed.peer_id,)
            await node.close()

    asyncio.run(main())
    assert len(refusals) == 1


def test_start_on_an_occupied_port_names_the_port(tmp_path: Path) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            error = await failure(tmp_path / "a", listen=(f"/ip4/127.0.0.1/tcp/{port}",))
            assert f"127.0.0.1:{port}" in error.message
            assert "occupied" in error.message

    asyncio.run(main())


def test_start_on_the_port_of_another_libp2p_host_names_the_port(beside_seed: BesideSeed, tmp_path: Path) -> None:
    async def case(seed: Libp2pNetwork) -> None:
        addr = (await seed.addrs())[0].partition("/p2p/")[0]
        error = await failure(tmp_path / "b", listen=(addr,))
        assert f"127.0.0.1:{addr.split('/')[4]}" in error.message
        assert "occupied" in error.message

    beside_seed(case)


def test_of_two_hosts_that_start_on_one_port_at_once_one_is_refused() -> None:
    async def main() -> None:
        port = free_port()
        options = DaemonOptions(listen=(f"/ip4/127.0.0.1/tcp/{port}",))
        started = await asyncio.gather(Host.start(options), Host.start(options), return_exceptions=True)
        hosts = [each for each in started if isinstance(each, Host)]
        for host in hosts:
            await host.stop()
        assert [str(each) for each in started if each not in hosts] == [
            f"a listen port is occupied: 127.0.0.1:{port}: choose another port, or 0 for any free one"
        ]
        await (await Host.start(options)).stop()

    asyncio.run(main())


def test_start_on_an_address_of_another_machine_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        error = await failure(tmp_path / "a", listen=("/ip4/192.0.2.1/tcp/0",))
        assert "does not have a listen address" in error.message

    asyncio.run(main())


def test_start_error_for_an_address_that_the_system_refuses_says_what_to_listen_on() -> None:
    output = "failed to listen on any addresses: [listen tcp6 [fe80::1]:0: bind: invalid argument]"
    error = listening.start_error(output, StartError("the libp2p daemon ended"))
    assert error.message == "the system refuses a listen address: listen tcp6 [fe80::1]:0: bind: invalid argument"
    assert "/ip6/::" in error.remedy


def test_start_with_a_folder_of_temporary_files_that_is_too_long_for_sockets_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    async def main() -> None:
        error = await failure(tmp_path / "a")
        assert error.message == f"the folder of temporary files has too long a path for the sockets in it: {folder}"
        assert error.remedy == "set TMPDIR to a folder with a shorter path"

    asyncio.run(main())
    assert not list(folder.iterdir())


def test_start_names_the_file_of_an_unusable_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    p2pd = tmp_path / "p2pd"
    monkeypatch.setattr(p2pd_process, "p2pd_path", lambda: p2pd)

    async def main() -> None:
        assert f"missing: {p2pd}" in (await failure(tmp_path / "a")).message
        p2pd.write_bytes(b"\x7fELF of another machine")
        assert f"cannot be run: {p2pd}" in (await failure(tmp_path / "a")).message
        p2pd.chmod(0o755)
        assert "does not run on" in (await failure(tmp_path / "a")).message
        p2pd.write_text("#!/bin/sh\necho '2026/11/21 01:37:54 all   is lost'\nexit 3\n")
        error = await failure(tmp_path / "a")
        assert error.message == "the libp2p daemon ended (exit status 3): all is lost"
        assert "swarm-node doctor" in error.remedy

    asyncio.run(main())


def test_start_where_hivemind_is_not_installed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert p2pd_process.p2pd_path().is_file()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path / "packages"))

    async def main() -> None:
        error = await failure(tmp_path / "a")
        assert f"missing: {tmp_path}/packages/hivemind/hivemind_cli/p2pd" in error.message
        assert error.remedy == "reinstall hivemind from its wheel"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [("panic: no room", "swarm-node doctor"), ("fatal error: failed to reserve page summary memory", "ulimit -v")],
)
def test_crash_of_the_daemon_is_reported_by_its_cause_and_not_by_its_trace(
    cause: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    p2pd = tmp_path / "p2pd"
    trace = "\n".join(f"goroutine {index} [running]:" for index in range(50))
    p2pd.write_text(f"#!/bin/sh\ncat <<END\nPeer Addrs:\n/ip4/1.2.3.4/tcp/1\n{cause}\n{trace}\nEND\nexit 2\n")
    p2pd.chmod(0o755)
    monkeypatch.setattr(p2pd_process, "p2pd_path", lambda: p2pd)

    async def main() -> None:
        error = await failure(tmp_path / "a")
        assert error.message == f"the libp2p daemon ended (exit status 2): {cause}"
        assert remedy in error.remedy

    asyncio.run(main())


def test_start_that_cannot_read_the_daemons_output_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async def no_pipe(*_: object) -> None:
            raise OSError("too many open files")

        monkeypatch.setattr(asyncio.get_running_loop(), "connect_read_pipe", no_pipe)
        error = await failure(tmp_path / "a")
        assert "cannot read the output of the libp2p daemon: too many open files" in error.message

    asyncio.run(main())
    assert "cannot read the output of the libp2p daemon" in caplog.text


def test_start_with_a_daemon_that_says_nothing_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    p2pd = tmp_path / "p2pd"
    p2pd.write_text("#!/bin/sh\nexec sleep 60\n")
    p2pd.chmod(0o755)
    monkeypatch.setattr(p2pd_process, "p2pd_path", lambda: p2pd)
    monkeypatch.setattr(p2pd_process, "START_TIMEOUT_S", 0.3)

    async def main() -> None:
        assert "did not start within" in (await failure(tmp_path / "a")).message

    asyncio.run(main())


def test_start_with_an_unreadable_identity_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    path.write_bytes(b"garbage")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=str(path)):
        asyncio.run(Libp2pNetwork.create(Libp2pOptions(identity_path=path, network_id="test")))


@pytest.mark.parametrize(
    "options",
    [
        {"network_id": "with space"},
        {"peers": ("/ip4/127.0.0.1/tcp/1",)},
        {"listen": ("/dns4/localhost/tcp/1",)},
        {"announce": ("/ip4/127.0.0.1/tcp/0",)},
        {"relay": "use"},
        {"relay": "serve", "listen": ()},
    ],
)
def test_options_that_contradict_each_other_are_refused_with_a_remedy(
    tmp_path: Path, options: dict[str, object]
) -> None:
    with pytest.raises(ConfigError) as caught:
        Libp2pOptions(identity_path=tmp_path / "a", **{"network_id": "test", **options})  # type: ignore[arg-type]
    assert caught.value.remedy


def test_copied_identity_is_refused_by_name_while_the_other_runs(beside_seed: BesideSeed, tmp_path: Path) -> None:
    async def case(seed: Libp2pNetwork) -> None:
        peers = await seed.addrs()
        original = await libp2p_node(tmp_path / "a", peers=peers)
        (tmp_path / "copy").write_bytes((tmp_path / "a").read_bytes())
        (tmp_path / "copy").chmod(0o600)
        with pytest.raises(StartError, match=f"{original.peer_id} is in use by another running node"):
            await libp2p_node(tmp_path / "copy", peers=peers)
        await original.close()
        async with await libp2p_node(tmp_path / "copy", peers=peers) as copy:
            assert copy.peer_id == original.peer_id

    beside_seed(case)


def test_copy_of_a_node_behind_a_relay_is_refused(beside_seed: BesideSeed, tmp_path: Path) -> None:
    async def case(seed: Libp2pNetwork) -> None:
        options: dict[str, Any] = {"peers": await seed.addrs(), "listen": (), "relay": "use"}
        async with await libp2p_node(tmp_path / "a", **options) as original:
            with pytest.raises(StartError, match=f"{original.peer_id} is in use by another running node"):
                await libp2p_node(tmp_path / "a", **options)
        assert seed.relay_counts.refusals["stranger"] == 0

    beside_seed(case)


def contact_of(network: Libp2pNetwork, addr: str) -> Contact:
    return Contact(peer_id=network.peer_id, addrs=(addr.partition("/p2p/")[0],))


def test_start_without_seeds_joins_through_remembered_peers_and_finds_a_copy(
    beside_seed: BesideSeed, tmp_path: Path
) -> None:
    async def case(a: Libp2pNetwork) -> None:
        dead = f"/ip4/127.0.0.1/tcp/1/p2p/{STRANGER}"
        async with await libp2p_node(tmp_path / "b", peers=await a.addrs()) as b:
            gone = Contact(peer_id=STRANGER, addrs=("/ip4/127.0.0.1/tcp/2",))
            remembered = (gone, contact_of(a, (await a.addrs())[0]))
            for peers in ((), (dead,)):
                async with await libp2p_node(tmp_path / "c", peers=peers, remembered=remembered) as c:
                    assert c.entry == NetworkEntry(remembered=(a.peer_id,))
                    assert await c.publish("k", b"", lifetime_s=10)
            with pytest.raises(StartError, match=f"{b.peer_id} is in use by another running node"):
                await libp2p_node(tmp_path / "b", remembered=remembered)

    beside_seed(case)


def test_start_fails_when_all_remembered_peers_are_gone_unless_it_may_be_the_first(tmp_path: Path) -> None:
    async def main() -> None:
        remembered = (Contact(peer_id=STRANGER, addrs=("/ip4/127.0.0.1/tcp/1",)),)
        error = await failure(tmp_path / "a", remembered=remembered)
        assert error.message == "none of the peers that this node remembers (1) could be reached"
        async with await libp2p_node(tmp_path / "a", remembered=remembered, may_be_first=True) as first:
            assert first.entry == NetworkEntry()

    asyncio.run(main())


@pytest.mark.parametrize("peers", [(), (f"/ip4/127.0.0.1/tcp/1/p2p/{STRANGER}",)])
def test_start_fails_with_the_remembered_peers_version_when_they_were_all_updated(
    tmp_path: Path, peers: tuple[str, ...]
) -> None:
    newer = Hello(network_id="test", software_version="9", protocol_version=PROTOCOL_VERSION + 1)

    async def main() -> None:
        async with bare_host(newer) as addr:
            seed = parse_peer_addr(addr)
            remembered = (Contact(peer_id=seed.peer_id, addrs=(addr.partition("/p2p/")[0],)),)
            error = await failure(tmp_path / "a", peers=peers, remembered=remembered)
        assert isinstance(error, NobodyReached), "it is one of those that are asked again, since it may lie"
        assert f"one that answered cannot be joined: peer speaks protocol {PROTOCOL_VERSION + 1}" in error.message
        assert error.remedy == "update this node"

    asyncio.run(main())


def test_clock_of_one_remembered_peer_ends_no_start_and_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with bare_host(Hello(network_id="test", software_version="9"), skew_s=3600) as addr:
            liar = parse_peer_addr(addr)
            remembered = (Contact(peer_id=liar.peer_id, addrs=(liar.addr,)),)
            async with await libp2p_node(tmp_path / "a", remembered=remembered) as node:
                assert node.entry.remembered == (liar.peer_id,)
                assert "clock is 60 min behind" in str(node.entry.clock_error)

    asyncio.run(main())


def test_announced_addresses_of_a_remembered_peer_are_dialled_only_inside_its_network(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        knocks: list[object] = []

        async def knocked(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            knocks.append(writer.get_extra_info("peername"))
            writer.close()

        service = await asyncio.start_server(knocked, "127.0.0.1", 0)
        place = f"/ip4/127.0.0.1/tcp/{service.sockets[0].getsockname()[1]}"
        announced = (place, f"{place}/p2p/{Identity(bytes(31) + b'1').peer_id}/p2p-circuit")
        options: dict[str, Any] = {
            "listen": ("/ip4/0.0.0.0/tcp/0",),
            "remembered": (Contact(peer_id=STRANGER, addrs=announced),),
            "relay": "use",
            "relays": (f"{place}/p2p/{STRANGER}",),
        }
        error = await failure(tmp_path / "a", **options)
        assert error.message == "none of the peers that this node remembers (1) could be reached"
        async with await libp2p_node(tmp_path / "a", **options, may_be_first=True) as first:
            assert await first.addrs()
        assert knocks == []
        service.close()

    asyncio.run(main())


def test_search_for_a_copy_dials_no_address_that_the_dial_policy_refuses(
    beside_seed: BesideSeed, tmp_path: Path
) -> None:
    async def case(seed: Libp2pNetwork) -> None:
        async with await libp2p_node(tmp_path / "a", peers=await seed.addrs()) as a:
            given = [parse_peer_addr((await seed.addrs())[0])]
            elsewhere = DialPolicy(own=("/ip4/44.1.1.1/tcp/1",), given=())
            await check_identity_is_free(given, a.peer_id, "test", elsewhere)

    beside_seed(case)


def test_remembered_peers_are_not_dialled_when_given_ones_answer(beside_seed: BesideSeed, tmp_path: Path) -> None:
    async def case(a: Libp2pNetwork) -> None:
        async with await libp2p_node(tmp_path / "b", peers=await a.addrs()) as b:
            remembered = (contact_of(b, (await b.addrs())[0]),)
            async with await libp2p_node(tmp_path / "c", peers=await a.addrs(), remembered=remembered) as c:
                assert c.entry == NetworkEntry(given=(a.peer_id,))

    beside_seed(case)


def test_node_that_restarts_at_its_old_address_is_no_copy_of_itself(beside_seed: BesideSeed, tmp_path: Path) -> None:
    async def case(seed: Libp2pNetwork) -> None:
        listen = (f"/ip4/127.0.0.1/tcp/{free_port()}",)
        for _ in range(2):  # the seed still knows its old address
            await (await libp2p_node(tmp_path / "a", peers=await seed.addrs(), listen=listen)).close()

    beside_seed(case)


def test_seed_that_finds_itself_among_its_peers_starts_alone(tmp_path: Path) -> None:
    async def main() -> None:
        identity = Identity.load_or_create(tmp_path / "a")
        own = f"/ip4/127.0.0.1/tcp/1/p2p/{identity.peer_id}"
        async with await libp2p_node(tmp_path / "a", peers=(own,)) as seed:
            assert parse_peer_addr((await seed.addrs())[0]).peer_id == identity.peer_id

    asyncio.run(main())
