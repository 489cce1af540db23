"""`swarm-node demo`: its options, its directory, and what remains of it in the end."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

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

    from swarm_node.demo.demo_plan import DemoPlan
    from swarm_node.demo.display import DemoSummary

SEE_HELP = "see swarm-node demo --help"
EXIT_TERMINATED = 128 + signal.SIGTERM

# the defaults of a plan, which are here because `demo_plan` imports numpy and `--help` should not wait for it
NUM_NODES = 4
# about a minute on two cores: 0.8M tokens, after which the validation loss is near 2
OUTER_STEPS = 12
INTERVAL_STEPS = 32
PROMPT = "def fibonacci(n):\n    if n"
MIN_NEW_TOKENS = 160
# after a minute of training the likeliest next byte is a space, without end: a text needs some randomness
TEMPERATURE = 0.7


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
    from swarm_node.demo.demo_plan import MAX_NODES, MAX_STEPS, NUM_CONTEXT_TOKENS, DemoPlan  # noqa: PLC0415

    temperature = flags.parsed("temperature", number(0, 2), SEE_HELP)
    min_tokens = flags.parsed("min_tokens", whole_number(2, NUM_CONTEXT_TOKENS // 2), SEE_HELP) or MIN_NEW_TOKENS
    try:
        return DemoPlan(
            num_nodes=flags.parsed("nodes", whole_number(2, MAX_NODES), SEE_HELP) or NUM_NODES,
            outer_steps=flags.parsed("outer_steps", whole_number(1, MAX_STEPS), SEE_HELP) or OUTER_STEPS,
            interval_steps=flags.parsed("interval_steps", whole_number(1, MAX_STEPS), SEE_HELP) or INTERVAL_STEPS,
            prompt=flags.options["prompt"] or PROMPT,
            temperature=TEMPERATURE if temperature is None else temperature,
            min_new_tokens=min_tokens,
            kill_after_tokens=max(1, min_tokens // 5),
            keep=flags.options["keep"],
        )
    except ValueError as error:
        raise UsageError(str(error), remedy=SEE_HELP) from None


async def _run(plan: DemoPlan, root: Path, console: Console, emitter: Emitter) -> DemoSummary:
    with uncollected():
        from swarm_node.demo import stages  # noqa: PLC0415
    from swarm_node.demo.demo_state import DemoState  # noqa: PLC0415
    from swarm_node.demo.display import Reporter, make_display, show_next, show_summary  # noqa: PLC0415
    from swarm_node.demo.nodes import Fleet  # noqa: PLC0415

    task = asyncio.current_task()
    assert task is not None
    for ending in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(ending, task.cancel)
    state = DemoState(num_nodes=plan.num_nodes)
    display = make_display(console, plan)
    reporter = Reporter(plan, state, display, emitter)
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
    """Make the directory of the demo's nodes; remove it in the end, unless it is to be kept or the demo failed."""
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
