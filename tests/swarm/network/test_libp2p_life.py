"""Tests of what a libp2p network leaves behind, and what happens when its daemon or its process dies."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
from support.network_worlds import eventually, libp2p_node
from swarm.network.interface import Stream
from swarm.network.libp2p import host
from swarm.network.libp2p_network import Libp2pNetwork
from swarm_protocol.envelope import seal_record
from swarm_protocol.errors import PeerUnreachable, StartError
from swarm_protocol.identity import Identity

pytestmark = pytest.mark.usefixtures("copies_are_searched_for")


def p2pd_of(network: Libp2pNetwork) -> int:
    return network._host.daemon.pid


def sockets_of(pid: int) -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"swarm-p2pd-{pid}-*"))


async def echo(_peer_id: str, request: bytes) -> bytes:
    return request


def test_closed_networks_leave_no_task_file_socket_or_child(tmp_path: Path) -> None:
    async def main() -> None:
        process = psutil.Process()
        num_files = process.num_fds()
        # other tests of this process keep their own hosts
        children, sockets = set(process.children()), set(sockets_of(os.getpid()))

        async def echo_stream(_peer_id: str, stream: Stream) -> None:
            await stream.send(await stream.receive())
            await stream.receive()

        a = await libp2p_node(tmp_path / "a")
        b = await libp2p_node(tmp_path / "b", peers=await a.addrs())
        await a.serve("echo", echo)
        await a.serve_stream("echo", echo_stream)
        await b.call(a.peer_id, "echo", bytes(5 * 2**20), timeout_s=30)
        await b.publish("k", b"", lifetime_s=10)
        await a.lookup(["k"], timeout_s=30)
        async with b.stream(a.peer_id, "echo", timeout_s=30) as stream:
            await stream.send(b"x")
            await stream.receive()
        assert set(sockets_of(os.getpid())) > sockets
        await asyncio.gather(a.close(), a.close(), b.close())
        await a.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert set(process.children()) <= children
        assert set(sockets_of(os.getpid())) <= sockets

        async def files_closed() -> bool:
            return process.num_fds() <= num_files

        await eventually(files_closed)

    asyncio.run(main())


def test_start_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with await libp2p_node(tmp_path / "seed") as seed:
            peers, children = await seed.addrs(), set(psutil.Process().children())
            for delay_s in (0.0, 0.05, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4):
                starting = asyncio.create_task(libp2p_node(tmp_path / "a", peers=peers))
                await asyncio.sleep(delay_s)
                starting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await (await starting).close()  # it was faster
                assert set(psutil.Process().children()) == children
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_pending_calls_fail_with_the_reason_when_the_daemon_dies(tmp_path: Path) -> None:
    async def main() -> None:
        a = await libp2p_node(tmp_path / "a")
        b = await libp2p_node(tmp_path / "b", peers=await a.addrs())

        async def hang(_peer_id: str, _request: bytes) -> bytes:
            await asyncio.Event().wait()
            return b""

        await a.serve("hang", hang)
        pending = asyncio.create_task(b.call(a.peer_id, "hang", b"", timeout_s=60))
        waiting = asyncio.create_task(b.wait_failed())
        await asyncio.sleep(0)
        os.kill(p2pd_of(b), signal.SIGKILL)
        with pytest.raises(PeerUnreachable):
            await asyncio.wait_for(pending, 30)
        reason = await asyncio.wait_for(waiting, 30)
        assert isinstance(reason, StartError)
        assert (
            reason.message == "the libp2p daemon ended (killed by signal 9)"
        )  # without the addresses that it had listed
        assert "restart this node or program" in reason.remedy
        with pytest.raises(PeerUnreachable):
            await b.call(a.peer_id, "hang", b"", timeout_s=30)
        with pytest.raises(PeerUnreachable):
            await b.serve("late", hang)
        await b.close()
        await a.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


async def again_and_again(ask: Callable[[], Awaitable[object]]) -> NoReturn:
    while True:
        await ask()


def test_daemon_that_hangs_is_killed_and_fails_the_network_but_a_busy_loop_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "PING_S", 0.1)

    async def main() -> None:
        a = await libp2p_node(tmp_path / "a")
        b = await libp2p_node(tmp_path / "b", peers=await a.addrs())
        await a.serve("echo", echo)
        for _ in range(2):
            time.sleep(2 * host.NUM_SILENT * host.PING_S)  # the loop stands still
            assert await b.call(a.peer_id, "echo", b"works", timeout_s=30) == b"works"
        os.kill(p2pd_of(b), signal.SIGSTOP)
        # the daemon may still answer before all its threads have stopped
        pending = asyncio.create_task(again_and_again(lambda: b.call(a.peer_id, "echo", b"", timeout_s=60)))
        asked = asyncio.create_task(again_and_again(b.addrs))  # requests to the daemon, which have no deadline
        reason = await asyncio.wait_for(b.wait_failed(), 30)
        assert isinstance(reason, StartError)
        assert "gave no answer any more" in reason.message
        for waiting in (pending, asked):
            with pytest.raises(PeerUnreachable):
                await waiting
        await b.close()
        await a.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_bug_in_a_task_of_the_network_ends_it_with_the_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        network = await libp2p_node(tmp_path / "a")

        async def bug() -> None:
            raise KeyError("a bug")

        network._methods._server._incoming._tasks.create_task(bug())  # as the stream server and the watch have theirs
        reason = await asyncio.wait_for(network.wait_failed(), 30)
        assert "failed internally" in reason.message
        assert "restart this node or program" in reason.remedy
        await network.close()

    asyncio.run(main())
    assert "KeyError: 'a bug'" in caplog.text


def live_until_killed(identity_path: Path, pipe: Connection) -> None:
    async def main() -> None:
        pipe.send(p2pd_of(await libp2p_node(identity_path)))
        await asyncio.Event().wait()

    asyncio.run(main())


def test_daemon_never_outlives_a_killed_parent(tmp_path: Path) -> None:
    here, there = multiprocessing.Pipe()
    # a fork has all modules already, whose import takes seconds
    parent = multiprocessing.get_context("fork").Process(target=live_until_killed, args=(tmp_path / "a", there))
    parent.start()
    with here, there:
        assert here.poll(30)
        daemon = psutil.Process(here.recv())
    assert parent.pid is not None
    folders = sockets_of(parent.pid)
    assert folders
    parent.kill()
    parent.join()

    def has_ended() -> bool:
        try:
            return daemon.status() == psutil.STATUS_ZOMBIE  # there may be nobody to collect an orphan
        except psutil.NoSuchProcess:
            return True

    async def main() -> None:
        async def ended() -> bool:
            return has_ended()

        await eventually(ended)
        async with await libp2p_node(tmp_path / "b"):
            assert not any(folder.exists() for folder in folders)  # the next start removes its files

    asyncio.run(main())


def test_daemon_is_in_our_session_and_gets_no_interrupt_from_the_terminal(tmp_path: Path) -> None:
    async def main() -> None:
        async with await libp2p_node(tmp_path / "a") as network:
            assert os.getpgid(p2pd_of(network)) != os.getpgrp()  # Ctrl-C is sent to our whole process group
            assert os.getsid(p2pd_of(network)) == os.getsid(0)

    asyncio.run(main())


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux")
def test_daemon_threads_use_the_batch_scheduler_and_this_process_does_not(tmp_path: Path) -> None:
    before = os.sched_getscheduler(0)
    if before not in (os.SCHED_OTHER, os.SCHED_BATCH):
        pytest.skip("these tests run under another policy, which is the daemon's too")

    async def main() -> None:
        async with await libp2p_node(tmp_path / "a") as network:
            threads = psutil.Process(p2pd_of(network)).threads()
            assert {os.sched_getscheduler(thread.id) for thread in threads} == {os.SCHED_BATCH}
            assert os.sched_getscheduler(0) == before  # nor does this process change

    asyncio.run(main())


def test_network_ends_with_an_error_when_another_process_published_our_record(tmp_path: Path) -> None:
    async def main() -> None:
        a = await libp2p_node(tmp_path / "a")
        b = await libp2p_node(tmp_path / "b", peers=await a.addrs())
        b._records._known_until = b.now()  # as if it had run for a while
        await b.publish("k", b"mine", lifetime_s=30)
        await b.lookup(["k"], timeout_s=30)
        assert not b._failure.done()
        stolen = seal_record(
            Identity.load(tmp_path / "b"),
            network_id="test",
            key="k",
            payload=b"not mine",
            issued_at=b.now() + 1,
            lifetime_s=30,
        )
        assert await a._dht.store(stolen)
        await b.lookup(["k"], timeout_s=30)
        reason = await asyncio.wait_for(b.wait_failed(), 30)
        assert f"{b.peer_id} is in use by another running node" in reason.message
        await b.close()
        await a.close()

    asyncio.run(main())


def test_own_record_from_before_a_crash_is_not_taken_for_a_copy(tmp_path: Path) -> None:
    async def main() -> None:
        async with await libp2p_node(tmp_path / "a") as a:
            before = await libp2p_node(tmp_path / "b", peers=await a.addrs())
            await before.publish("k", b"before", lifetime_s=300)
            await before.close()
            async with await libp2p_node(tmp_path / "b", peers=await a.addrs()) as after:
                assert [found.payload for found in await after.lookup(["k"], timeout_s=30)] == [b"before"]
                await after.publish("k", b"after", lifetime_s=30)
                for network in (a, after):
                    assert [found.payload for found in await network.lookup(["k"], timeout_s=30)] == [b"after"]
                assert not after._failure.done()

    asyncio.run(main())
