"""`swarm-node demo`: its options, the plan made from them, its directory, and what is kept at the end."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.heap import uncollected
from swarm_protocol.errors import ConfigError

from swarm_node import interrupts
from swarm_node.commands.command_options import Flags
from swarm_node.events.emitter import Emitter
from swarm_node.settings.config import UsageError
from swarm_node.settings.parsers import number, whole_number
from swarm_node.storage.home import explained

if TYPE_CHECKING:
    from rich.console import Console

    from swarm_node.demo.display import DemoSummary

SEE_HELP = "see swarm-node demo --help"
EXIT_TERMINATED = 128 + signal.SIGTERM

NUM_NODES = 4
# about a minute on two cores: 0.8M tokens, after which the validation loss is near 2
OUTER_STEPS = 12
INTERVAL_STEPS = 32
PROMPT = "def fibonacci(n):\n    if n"
MIN_NEW_TOKENS = 160
# after a minute of training, the likeliest next byte is always a space: readable text needs some randomness
TEMPERATURE = 0.7
MAX_NODES = 16
"""More nodes would only share the same cores."""

MAX_STEPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """The size of one demo, and its prompt. Raises ValueError if prompt and completion are too long."""

    num_nodes: int = NUM_NODES
    outer_steps: int = OUTER_STEPS
    interval_steps: int = INTERVAL_STEPS
    prompt: str = PROMPT
    temperature: float = TEMPERATURE
    min_new_tokens: int = MIN_NEW_TOKENS
    keep: Path | None = None

    def __post_init__(self) -> None:
        # the other half of the context is for tokens generated until the killed node is noticed
        num_prompt_bytes, limit = len(self.prompt.encode()), num_context_tokens() // 2
        if not 0 < num_prompt_bytes <= limit - self.min_new_tokens:
            raise ValueError(
                f"a prompt of {num_prompt_bytes} bytes and a completion of {self.min_new_tokens} are too long: "
                f"use at most {limit} together"
            )

    @property
    def room_tokens(self) -> int:
        """Return the length of the longest completion in tokens. A byte is a token."""
        return num_context_tokens() - len(self.prompt.encode())

    @property
    def kill_after_tokens(self) -> int:
        return max(1, self.min_new_tokens // 5)

    @property
    def num_blocks(self) -> int:
        return int(_model()["num_hidden_layers"])

    @property
    def blocks_per_node(self) -> int:
        """Return half the model, so that a chain is two nodes and any one of four may die. With fewer nodes, each takes
        all blocks."""
        return -(-self.num_blocks // 2) if self.num_nodes >= 4 else self.num_blocks


def num_context_tokens() -> int:
    return int(_model()["max_position_embeddings"])


def _model() -> Mapping[str, Any]:
    from swarm.training.run.run_tables import DEFAULT_MODEL  # noqa: PLC0415  - --help should not wait for it

    return DEFAULT_MODEL


def demo(flags: Flags) -> int:
    # torch, rich and openai take seconds to import: --help should not wait for them
    from rich.console import Console  # noqa: PLC0415

    plan = _plan(flags)
    console = Console(stderr=flags.json)
    interrupts.raise_in_command()
    try:
        with home_root(plan.keep, console) as root:
            summary = asyncio.run(_run(plan, root, console, Emitter(json=flags.json)))
    except asyncio.CancelledError:
        return EXIT_TERMINATED
    return 0 if summary.digests_equal and summary.tokens_identical else 1


def _plan(flags: Flags) -> DemoPlan:
    given = {
        "num_nodes": flags.parsed("nodes", whole_number(2, MAX_NODES), SEE_HELP),
        "outer_steps": flags.parsed("outer_steps", whole_number(1, MAX_STEPS), SEE_HELP),
        "interval_steps": flags.parsed("interval_steps", whole_number(1, MAX_STEPS), SEE_HELP),
        "prompt": flags.options["prompt"] or None,
        "temperature": flags.parsed("temperature", number(0, 2), SEE_HELP),
        "min_new_tokens": flags.parsed("min_tokens", whole_number(2, num_context_tokens() // 2), SEE_HELP),
        "keep": flags.options["keep"],
    }
    try:
        return DemoPlan(**{name: value for name, value in given.items() if value is not None})
    except ValueError as error:
        raise UsageError(str(error), remedy=SEE_HELP) from None


async def _run(plan: DemoPlan, root: Path, console: Console, emitter: Emitter) -> DemoSummary:
    with uncollected():
        from swarm_node.demo import stages  # noqa: PLC0415
    from swarm_node.demo.display import Reporter, make_display, show_next, show_summary  # noqa: PLC0415
    from swarm_node.demo.nodes import DemoState, Fleet  # noqa: PLC0415

    task = asyncio.current_task()
    assert task is not None
    for ending in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(ending, task.cancel)
    state = DemoState(num_nodes=plan.num_nodes, outer_steps=plan.outer_steps)
    display = make_display(console)
    reporter = Reporter(state, display, emitter)
    try:
        async with Fleet(root, state, reporter.node_said) as fleet:
            result = await stages.run(stages.Demo(plan=plan, state=state, fleet=fleet, reporter=reporter))
    finally:
        display.close()
    show_summary(console, result)
    show_next(console, result, plan.keep)
    emitter.emit("summary", **asdict(result))
    return result


@contextmanager
def home_root(keep: Path | None, console: Console) -> Iterator[Path]:
    """Make the directory of the demo's nodes. Remove it at the end, unless it is to be kept or the demo failed."""
    if keep is None:
        root = Path(tempfile.mkdtemp(prefix="swarm-demo-"))
    else:
        root = keep.absolute()
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            raise ConfigError(f"{root} is not an empty directory", remedy="choose another --keep")
        with explained("keep the demo", option="--keep"):
            root.mkdir(parents=True, exist_ok=True)
    try:
        yield root
    except Exception:
        console.print(f"every node's log is kept in {root}", highlight=False, markup=False)
        keep = root
        raise
    finally:
        if keep is None:
            shutil.rmtree(root, ignore_errors=True)
