"""The demo's node processes, and what they have reported in their events.

`DemoState` collects the events for the display and the stages. `Fleet` starts the processes, follows their events,
kills them, and always ends them with the demo.

Each process runs in its own session, so that Ctrl-C in a terminal reaches only the demo, which then ends the processes
in order. Leaving `Fleet` asks each process to stop, and kills by pid those that still run after a grace period. A
second interruption kills at once. If the demo itself is killed, the nodes notice that their stdin ends, and leave.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from swarm_protocol.errors import SwarmError

EventFields = Mapping[str, Any]

STATES = {
    "ready": "ready",
    "training": "training",
    "run_finished": "trained",
    "loading": "loading",
    "serving": "serving",
    "draining": "draining",
    "stopped": "stopped",
}
"""A node's state after an event."""


@dataclass(slots=True)
class NodeState:
    """One node, with its latest report on each subject."""

    name: str
    state: str = "starting"
    peer_id: str = ""
    addrs: tuple[str, ...] = ()
    outer_step: int = 0
    tokens_per_s: float = 0.0
    span: tuple[int, int] | None = None
    model: str = ""
    checkpoint: str = ""
    url: str = ""
    error: str = ""


@dataclass(slots=True)
class DemoState:
    """Everything that the nodes reported: training and validation losses, digests and tokens by outer step."""

    num_nodes: int
    outer_steps: int = 0
    nodes: dict[str, NodeState] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    digests: dict[int, dict[str, str]] = field(default_factory=dict)
    bytes_sent: list[int] = field(default_factory=list)
    num_tokens: dict[int, int] = field(default_factory=dict)
    num_parameters: int = 1

    def apply(self, name: str, event: EventFields) -> None:
        """Add one event of the node `name`. Unknown events are ignored."""
        node, kind = self.node(name), event.get("event", "")
        node.state = STATES.get(kind, node.state)
        match kind:
            case "ready":
                node.peer_id, node.addrs = event["peer_id"], tuple(event["addrs"])
            case "interval":
                node.tokens_per_s = event["tokens_per_s"]
            case "outer_step":
                self._outer_step(node, event)
            case "validated":
                if event["loss"] is not None:
                    self.validation.setdefault(event["step"], event["loss"])
            case "exported":
                node.checkpoint = event["path"]
            case "serving":
                node.model, node.span = event["model"], (event["start"], event["end"])
            case "listening":
                node.url = event["url"]
            case "error":
                node.error = event["message"]

    def lose(self, name: str) -> None:
        """Record that the node was killed."""
        node = self.node(name)
        node.state, node.span = "killed", None

    def _outer_step(self, node: NodeState, event: EventFields) -> None:
        step = event["step"]
        node.outer_step, node.tokens_per_s = step, event["tokens_per_s"]
        if event["loss"] is not None:
            self.losses[step] = event["loss"]
        self.digests.setdefault(step, {})[node.name] = event["digest"]
        self.num_tokens[step] = event["num_tokens"]
        self.bytes_sent.append(event["bytes_sent"])

    def node(self, name: str) -> NodeState:
        """Return the node, empty before its first report."""
        return self.nodes.setdefault(name, NodeState(name))

    @property
    def trainers(self) -> list[NodeState]:
        return [node for name, node in self.nodes.items() if name.startswith("node-")]

    @property
    def outer_step(self) -> int:
        """Return the newest outer step that a node has committed."""
        return max(self.digests, default=0)

    def loss_curve(self) -> list[float]:
        """Return the training losses in the order of their outer steps."""
        return [self.losses[step] for step in sorted(self.losses)]

    def all_at(self, step: int) -> bool:
        """Return whether every trainer holds the state of `step`."""
        return len(self.digests.get(step, {})) == self.num_nodes

    def digests_equal(self) -> bool:
        """Return whether all nodes that committed an outer step have the same state, for every outer step."""
        return all(len(set(by_node.values())) == 1 for by_node in self.digests.values())

    @property
    def tokens_per_s(self) -> float:
        """Return the training speed of the whole swarm."""
        return sum(node.tokens_per_s for node in self.trainers)

    def bytes_per_param(self) -> float:
        """Return the mean bytes that one member sends in one outer step, per parameter."""
        return sum(self.bytes_sent) / max(1, len(self.bytes_sent)) / self.num_parameters

    def survives_any_death(self, num_blocks: int) -> bool:
        """Return whether at least two nodes serve every block."""
        served = Counter(block for node in self.trainers if node.span for block in range(*node.span))
        return all(served[block] >= 2 for block in range(num_blocks))

    def by_peer(self, peer_id: str) -> NodeState | None:
        return next((node for node in self.nodes.values() if node.peer_id == peer_id), None)


STOP_GRACE_S = 4.0
# one JSON line; the longest has the peer ids of a group
MAX_LINE_BYTES = 2**20


class DemoError(SwarmError):
    """The demo cannot continue."""

    code = "demo"


@dataclass(slots=True)
class NodeProcess:
    """One `swarm-node` process. `killed` means that the demo ended it, so that its end is not an error."""

    name: str
    log_path: Path
    process: asyncio.subprocess.Process
    killed: bool = False

    @property
    def ended(self) -> bool:
        return self.process.returncode is not None

    @property
    def was_read(self) -> bool:
        """Tell whether everything that the process printed has been read. It may end before that."""
        return self.process.stdout is not None and self.process.stdout.at_eof()


class Fleet:
    """All processes of one demo, with their files below `root`. Their events go to `state`, then to `on_event`."""

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

    async def __aexit__(self, *_: object) -> None:
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
            # killed processes end at once, so this wait is short even if the demo is cancelled
            await asyncio.gather(*(process.process.wait() for process in running))
            await asyncio.gather(*self._followers, return_exceptions=True)

    async def spawn(self, name: str, command: str, *arguments: str) -> NodeProcess:
        """Start `swarm-node <command> <arguments> --json` with its own home."""
        home, log_path = self.root / name, self.root / f"{name}.log"
        home.mkdir(mode=0o700, parents=True)
        with log_path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *self._program,
                *(command, "--home", str(home), "--name", name, "--tethered", "--json", *arguments),
                # never written to: it closes when the demo ends, and the node then leaves
                stdin=asyncio.subprocess.PIPE,
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
        """Send SIGKILL to that node, which ends it like a power failure."""
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
        """Raise DemoError for a process that ended by itself, or that printed anything but events."""
        for follower in self._followers:
            if follower.done():
                follower.result()
        for node in self.processes.values():
            if node.ended and node.was_read and not node.killed:
                logged = node.log_path.read_text(errors="replace").strip().splitlines()
                why = self.state.node(node.name).error or (logged[-1] if logged else "it printed nothing")
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
    """Return the environment without settings of another swarm, and with one thread per process, since they share the
    cores."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
    return kept | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
