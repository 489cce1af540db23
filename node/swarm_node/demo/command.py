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
from typing import TYPE_CHECKING, Annotated

import typer
from swarm.heap import uncollected
from swarm_protocol.errors import ConfigError

from swarm_node import interrupts
from swarm_node.events.emitter import Emitter
from swarm_node.settings.config import UsageError
from swarm_node.storage.home import explained

if TYPE_CHECKING:
    from rich.console import Console

    from swarm_node.demo.demo_plan import DemoPlan
    from swarm_node.demo.display import DemoSummary
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


def demo(
    *,
    nodes: Annotated[int, typer.Option(metavar="N", help="Volunteers to start.")] = NUM_NODES,
    outer_steps: Annotated[int, typer.Option(metavar="N", help="Outer steps to train.")] = OUTER_STEPS,
    interval_steps: Annotated[
        int, typer.Option(metavar="N", help="Inner steps between two outer steps.")
    ] = INTERVAL_STEPS,
    min_tokens: Annotated[
        int,
        typer.Option(
            metavar="N", help="Minimum length of the completion, which goes on until the killed node is noticed."
        ),
    ] = MIN_NEW_TOKENS,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="Text to complete.")] = PROMPT,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="Sampling temperature; 0: always the likeliest byte.")
    ] = TEMPERATURE,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep all files, including the trained model, in DIR.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print events as JSON lines on stdout.")] = False,
) -> int:
    """Try everything on this machine: train a model together, serve it together, and kill a node in between."""
    # torch, rich and openai take seconds to import: --help should not wait for them
    from rich.console import Console  # noqa: PLC0415

    from swarm_node.demo.demo_plan import DemoPlan  # noqa: PLC0415

    try:
        plan = DemoPlan(
            num_nodes=nodes,
            outer_steps=outer_steps,
            interval_steps=interval_steps,
            prompt=prompt,
            temperature=temperature,
            min_new_tokens=min_tokens,
            kill_after_tokens=max(1, min_tokens // 5),
            keep=keep,
        )
    except ValueError as error:
        raise UsageError(str(error), remedy="see swarm-node demo --help") from None
    console = Console(stderr=json)
    interrupts.raise_in_command()
    try:
        with home_root(keep, console) as root:
            summary = asyncio.run(_run(plan, root, console, Emitter(json=json)))
    except asyncio.CancelledError:
        return EXIT_TERMINATED
    return 0 if summary.digests_equal and summary.tokens_identical else 1


async def _run(plan: DemoPlan, root: Path, console: Console, emitter: Emitter) -> DemoSummary:
    with uncollected():
        from swarm_node.demo import stages  # noqa: PLC0415
    from swarm_node.demo.demo_state import DemoState  # noqa: PLC0415
    from swarm_node.demo.display import Reporter, make_display, show_next, show_summary  # noqa: PLC0415
    from swarm_node.demo.nodes import Fleet  # noqa: PLC0415

    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
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
