"""The demo's processes: started, followed by their events, killed, and always ended with the demo.

Each runs in a session of its own, so that a terminal's Ctrl-C reaches only the demo, which then ends them in order.
`Fleet` owns them: leaving it asks each to stop, and kills by pid those that have not after a grace period; a second
interruption kills at once. If the demo itself is killed, they notice that their stdin ends, and leave.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from swarm_protocol.errors import SwarmError

from swarm_node.demo.demo_state import DemoState, EventFields

STOP_GRACE_S = 4.0
# one JSON line; the longest has a group's peer ids
MAX_LINE_BYTES = 2**20


class DemoError(SwarmError):
    """The demo cannot go on."""

    code = "demo"


@dataclass(slots=True)
class NodeProcess:
    """One `swarm-node` process. `killed`: we ended it, so its end is no error."""

    name: str
    log_path: Path
    process: asyncio.subprocess.Process
    killed: bool = False

    @property
    def ended(self) -> bool:
        return self.process.returncode is not None


class Fleet:
    """All processes of one demo below `root`. Their events go to `state`, then to `on_event`."""

    def __init__(
        self,
        root: Path,
        state: DemoState,
        on_event: Callable[[str, EventFields], None],
        *,
        program: Sequence[str] = (sys.executable, "-m", "swarm_node"),
    ) -> None:
        self.root = root
        self.state = state
        self._on_event = on_event
        self._program = program
        self.processes: dict[str, NodeProcess] = {}
        self._changed = asyncio.Event()
        self._followers: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        running = [process for process in self.processes.values() if not process.ended]
        try:
            for process in running:
                process.killed = True
                process.process.terminate()
            waiting = [asyncio.ensure_future(process.process.wait()) for process in running]
            if waiting:
                await asyncio.wait(waiting, timeout=STOP_GRACE_S)
        finally:
            for process in running:
                if not process.ended:
                    process.process.kill()
            for follower in self._followers:
                follower.cancel()
            # killed processes end at once, so this waits for them even when it is cancelled
            await asyncio.gather(*(process.process.wait() for process in running))
            await asyncio.gather(*self._followers, return_exceptions=True)

    async def spawn(self, name: str, command: str, *arguments: str) -> NodeProcess:
        """Start `swarm-node <command> <arguments> --json` with a home of its own."""
        home, log_path = self.root / name, self.root / f"{name}.log"
        home.mkdir(mode=0o700, parents=True)
        with log_path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *self._program,
                *(command, "--home", str(home), "--name", name, "--tethered", "--json", *arguments),
                stdin=asyncio.subprocess.PIPE,  # never written to: it ends when we do, and with it the node
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=_environment(),
                start_new_session=True,
                limit=MAX_LINE_BYTES,
            )
        node = self.processes[name] = NodeProcess(name, log_path, process)
        follower = asyncio.create_task(self._follow(node), name=f"follow {name}")
        follower.add_done_callback(lambda _done: self._changed.set())
        self._followers.add(follower)
        return node

    def kill(self, name: str) -> None:
        """Send SIGKILL to that node, as a power failure would end it."""
        self.processes[name].killed = True
        self.processes[name].process.kill()
        self.state.lose(name)

    async def until(self, condition: Callable[[], bool], *, within_s: float, what: str) -> None:
        """Wait until `condition()`, checked after each event. Raises DemoError if a node ends or time runs out."""
        try:
            async with asyncio.timeout(within_s):
                while not condition():
                    self.check()
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise DemoError(f"{what} took more than {within_s:.0f} s", remedy=f"the logs are in {self.root}") from None

    def check(self) -> None:
        """Raise DemoError for a process that ended by itself, or that prints anything but events."""
        for follower in self._followers:
            if follower.done():
                follower.result()
        for node in self.processes.values():
            if node.ended and not node.killed:
                logged = node.log_path.read_text(errors="replace").strip().splitlines()
                why = self.state.node(node.name).error or (logged[-1] if logged else "it said nothing")
                raise DemoError(
                    f"{node.name} ended early (exit {node.process.returncode}): {why}",
                    remedy=f"its log is {node.log_path}",
                )

    async def _follow(self, node: NodeProcess) -> None:
        assert node.process.stdout is not None
        async for line in node.process.stdout:
            self._take(node.name, line)
        await node.process.wait()

    def _take(self, name: str, line: bytes) -> None:
        try:
            event = json.loads(line)
        except ValueError as error:
            raise DemoError(f"{name} printed something that is not an event: {line[:200]!r}") from error
        self.state.apply(name, event)
        self._on_event(name, event)
        self._changed.set()


def _environment() -> dict[str, str]:
    """Return our environment without another swarm's settings, and one thread a process: they share the cores."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
    return kept | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
