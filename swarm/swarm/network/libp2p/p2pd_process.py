"""Starts, watches and ends one libp2p daemon (hivemind's p2pd) as a child process.

The daemon ends by itself once its last persistent connection closes. The kernel closes it even if this process is
killed. Until the first one opens, `-idleTimeout` bounds the daemon's life. Both work on all operating systems. `Daemon`
owns the process, the folder of its sockets and the task that reads its output. A failed start raises StartError with a
remedy.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from swarm_protocol.errors import StartError

from swarm.machine_memory import total_memory
from swarm.network.libp2p.listening import claimed_ports, start_error
from swarm.network.libp2p.no_quic import without_quic
from swarm.network.peer_budgets import MAX_UNARY_BYTES
from swarm.temporary_folder import make_folder

IDLE_TIMEOUT_S = 15
"""Time for which the daemon lives without a client. It allows for a slow start, and bounds the life of an orphan."""

START_TIMEOUT_S = 15.0
"""Time-out of the daemon's start. A loaded machine has been seen to need 2 s."""

STOP_TIMEOUT_S = 3.0
_REAP_PAUSE_S = 0.005
_NUM_LAST_LINES = 20
_MAX_LINE_CHARS = 500
_TIMESTAMP = re.compile(r"^\d{4}[-/]\d\d[-/]\d\d[T ]\S+ ")
_CRASH_SIGNS = ("panic: ", "fatal error: ", "SIG")
"""First words of a crash report of the Go runtime."""

_CONFIGURATION = '{"Relay": {"Enabled": false}}'
"""Turns off the daemon's own relay, which no flag does. It would serve strangers until `relay` replaces it, and build a
table of the internet's networks, which takes a quarter of a second of processor time and 29 MB. Connections through
other relays do not need it."""

MAX_UNARY_MESSAGE_BYTES = MAX_UNARY_BYTES + 2**12
"""Maximum bytes of a request or an answer of a small call, with its ids and its protocol's name. The daemon waits
without a deadline for the rest of a stranger's request, and keeps what has come. Its default is 4 MiB."""

KEPT_CONNECTIONS = 2**12
"""Beyond twice as many, the daemon closes connections older than two minutes until so many are left.
`connection_limit`, which knows better what to close, keeps fewer. By its default the daemon closes all but 256 of more
than 512, fewer than a server has clients or a relay carries."""

MAX_FOLDER_BYTES = 90
"""Maximum path of the folder of sockets: macOS allows 103 bytes for the path of a socket, and Linux 107."""

LEAST_MEMORY_BYTES, MOST_MEMORY_BYTES = 512 * 2**20, 4 * 2**30
"""Bounds of `max_memory_bytes`. The daemon alone takes about 30 MiB, and 80 MiB more with 2,048 peers."""

MORE_MEMORY = "end other programs, or raise the limit: the libp2p daemon needs `ulimit -v 1048576`"

_STATUS_SIGNS = ("Control socket:", "Peer Addrs:", "/")
"""First words of lines of the daemon's normal output: its sockets and addresses."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonOptions:
    """Options that differ between hosts. With an empty `listen` a host is reachable only through relays. Without
    `identity_path` it gets a random identity."""

    identity_path: Path | None = None
    listen: tuple[str, ...] = ()
    announce: tuple[str, ...] = ()
    nat_port_map: bool = False


def max_memory_bytes() -> int:
    """Return the memory that the daemon may take: a quarter of the machine's or container's, within bounds. Beyond it,
    `connection_limit` closes connections. Beyond half of it, Go's runtime gives back what it does not use."""
    return min(MOST_MEMORY_BYTES, max(LEAST_MEMORY_BYTES, total_memory() // 4))


def p2pd_path() -> Path:
    """Return the path of the daemon in hivemind's wheel. The package is not imported, since that takes seconds."""
    package = importlib.util.find_spec("hivemind")
    folders = package.submodule_search_locations if package else None
    folder = folders[0] if folders else Path(sysconfig.get_path("platlib"), "hivemind")
    return Path(folder, "hivemind_cli", "p2pd")


def arguments(options: DaemonOptions, control_socket: str, configuration: str) -> list[str]:
    """Return the daemon's flags: no public bootstrap peers, no search for relays, and no DHT.

    With -dhtServer or -dhtClient the daemon would find peers' addresses by itself. But -dhtServer serves go-libp2p's
    DHT to strangers, too, who have filled its memory; and if all nodes used -dhtClient, none would answer. `record_dht`
    finds the addresses instead.
    """
    args = [
        f"-listen=/unix{control_socket}",
        f"-idleTimeout={IDLE_TIMEOUT_S}s",
        f"-f={configuration}",
        f"-persistentConnMaxMsgSize={MAX_UNARY_MESSAGE_BYTES}",
        "-relay=0",  # the package `relay` relays, and keeps reservations at other relays
        "-relayDiscovery=0",
        "-autoRelay=0",
        "-autonat=0",  # the package `paths` finds this node's addresses, and makes direct connections behind NATs
        f"-natPortMap={int(options.nat_port_map)}",
        "-connManager=1",
        f"-connLo={KEPT_CONNECTIONS}",
        f"-connHi={2 * KEPT_CONNECTIONS}",
        "-tls=0",  # only Noise: peers could choose TLS, and Go's TLS of this version has known vulnerabilities
    ]
    args.append(f"-hostAddrs={','.join(options.listen)}" if options.listen else "-noListenAddrs")
    if options.announce:
        args.append(f"-announceAddrs={','.join(options.announce)}")
    if options.identity_path is not None:
        args.append(f"-id={options.identity_path}")
    return args


class Daemon:
    """One daemon process. It is no asyncio subprocess: uvloop's cannot set a process group, and asyncio's needs a
    thread that waits for it."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self._crash = ""  # the first line of a crash report, which has the cause
        self._was_silent = False  # whether this process killed it since it gave no answer
        self._ready = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read_output(), name="p2pd output")
        self._reader.add_done_callback(self._reader_ended)

    @classmethod
    async def start(cls, options: DaemonOptions) -> Daemon:
        """Start a daemon, and wait until it is ready. Raises StartError with the cause; then nothing is left behind."""
        with claimed_ports(options.listen):
            folder = make_folder("p2pd")
            if len(os.fsencode(folder)) > MAX_FOLDER_BYTES:
                folder.rmdir()
                raise StartError(
                    f"the folder of temporary files has too long a path for the sockets in it: {folder.parent}",
                    remedy="set TMPDIR to a folder with a shorter path",
                )
            try:
                configuration = folder / "p2pd.json"
                configuration.write_text(_CONFIGURATION)
                args = arguments(options, str(folder / "p2pd.sock"), str(configuration))
                daemon = cls(without_quic(partial(_spawn, args)), folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await daemon._ready
            except TimeoutError:
                await daemon.stop()
                raise StartError(
                    f"the libp2p daemon did not start within {START_TIMEOUT_S:.0f} s",
                    remedy="check whether the machine is overloaded",
                ) from None
            except BaseException:
                await daemon.stop()
                raise
            return daemon

    @property
    def control_socket(self) -> str:
        return str(self._folder / "p2pd.sock")

    @property
    def listen_socket(self) -> str:
        """The path of the socket at which this process accepts streams from the daemon."""
        return str(self._folder / "streams.sock")

    @property
    def relay_socket(self) -> str:
        """The path of the socket at which this process accepts requests to its relay from the daemon."""
        return str(self._folder / "relay.sock")

    @property
    def pid(self) -> int:
        return self._process.pid

    def memory_bytes(self) -> int:
        """Return the memory that the process takes now; 0 if it has ended."""
        import psutil  # noqa: PLC0415 - only for nodes that stay

        try:
            return int(psutil.Process(self.pid).memory_info().rss)
        except psutil.Error:
            return 0

    def failure(self) -> StartError:
        """Return how the process ended, as far as is known, with a remedy."""
        if self._was_silent:
            return StartError(
                "the libp2p daemon gave no answer any more, and was ended",
                remedy="restart this node or program; check whether the machine is overloaded",
            )
        code = self._process.poll()
        if code is None:
            return StartError(
                "the libp2p daemon ended its connection to this node", remedy="restart this node or program"
            )
        if code < 0:  # its last output does not have the cause then
            return StartError(
                f"the libp2p daemon ended (killed by signal {-code})",
                remedy="restart this node or program; the machine may have run out of memory",
            )
        cause = self._crash or (self._last_lines[-1] if self._last_lines else "")
        again = "restart this node or program; if that does not help, swarm-node doctor checks the usual causes"
        how = f"the libp2p daemon ended (exit status {code}){': ' + cause if cause else ''}"
        return StartError(how, remedy=MORE_MEMORY if cause.endswith("memory") else again)

    def kill_silent(self) -> None:
        """Kill a daemon that gives no answer."""
        self._was_silent = True
        self._process.kill()

    async def ended(self) -> None:
        """Wait until the process has ended, for at most STOP_TIMEOUT_S. Its connection has already ended."""
        await asyncio.wait((self._reader,), timeout=STOP_TIMEOUT_S)

    async def stop(self) -> None:
        """Stop the daemon. Even if it is cancelled, it waits until the child has ended, and then raises
        CancelledError."""
        stopping = asyncio.create_task(self._stop())
        cancelled = False
        while not stopping.done():
            try:
                await asyncio.wait((stopping,))
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError
        stopping.result()

    async def _stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            await asyncio.wait((self._reader,), timeout=STOP_TIMEOUT_S)
        if self._process.poll() is None:
            self._process.kill()
        await asyncio.wait((self._reader,))
        await self._reap()
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # marks it as retrieved, even if no task waits for it
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _read_output(self) -> None:
        """Read the daemon's output until the process ends."""
        output = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), self._process.stdout
        )
        while line := await _read_line(output):
            self._take_line(_TIMESTAMP.sub("", " ".join(line.decode(errors="replace").split()))[:_MAX_LINE_CHARS])
        transport.close()
        await self._reap()
        if not self._ready.done():
            self._ready.set_exception(start_error(" ".join(self._last_lines), self.failure()))

    async def _reap(self) -> None:
        while self._process.poll() is None:  # noqa: ASYNC110 - the process is about to end
            await asyncio.sleep(_REAP_PAUSE_S)

    def _reader_ended(self, reader: asyncio.Task[None]) -> None:
        if reader.cancelled() or (error := reader.exception()) is None:
            return
        logger.error("cannot read the output of the libp2p daemon", exc_info=error)
        self._process.kill()  # otherwise it would block on unread output, and its end would not be noticed
        assert self._process.stdout is not None
        self._process.stdout.close()
        if not self._ready.done():
            remedy = "check whether this process has run out of open files"
            self._ready.set_exception(
                StartError(f"cannot read the output of the libp2p daemon: {error}", remedy=remedy)
            )

    def _take_line(self, line: str) -> None:
        if line.startswith("Peer ID:") and not self._ready.done():
            self._ready.set_result(None)
        elif line.startswith(_CRASH_SIGNS):
            self._crash = self._crash or line
        elif line and not line.startswith(_STATUS_SIGNS):
            self._last_lines.append(line)


@contextmanager
def _batch_scheduling() -> Iterator[None]:
    """Start the child processes of the context with the batch scheduling policy (Linux). They get their share of the
    cores, but do not preempt computing threads at each wake-up, and so move more bytes at once."""
    try:
        is_set = os.sched_getscheduler(0) == os.SCHED_OTHER
        if is_set:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # for this thread; a child inherits it
    except (AttributeError, OSError):  # not Linux, or a sandbox that forbids it
        is_set = False
    try:
        yield
    finally:
        if is_set:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


async def _read_line(output: asyncio.StreamReader) -> bytes:
    try:
        return await output.readline()
    except ValueError:  # a log line longer than the buffer, which is not needed
        return b"...\n"


def _spawn(args: Sequence[str]) -> subprocess.Popen[bytes]:
    path = p2pd_path()
    try:
        with _batch_scheduling():
            return subprocess.Popen(  # noqa: S603 - a fixed binary, without a shell
                [str(path), *args],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={"GOLOG_LOG_LEVEL": "error", "GOMEMLIMIT": str(max_memory_bytes() // 2), **os.environ},
                # Ctrl-C in the terminal is for this process alone: the daemon must outlive the drain. A separate
                # session would be wrong, since the kernel schedules sessions against each other: on a busy machine the
                # daemon moved less than half of the bytes there.
                process_group=0,
            )
    except FileNotFoundError:
        raise StartError(f"the libp2p daemon is missing: {path}", remedy="reinstall hivemind from its wheel") from None
    except PermissionError:
        raise StartError(f"the libp2p daemon cannot be run: {path}", remedy=f"chmod +x {path}") from None
    except OSError as error:
        raise StartError(
            f"the libp2p daemon does not run on {platform.system()} {platform.machine()}: {error.strerror}",
            remedy="reinstall hivemind from the wheel for this machine, or build it with HIVEMIND_BUILDGO=1",
        ) from None
