"""The `swarm-node` command: its sub-commands, and what becomes of an error.

Only light modules are imported here, because `--help` and `status` should answer at once; whatever needs torch or
hivemind is imported by the command that uses it.

Exit codes: 0 done, 1 it cannot be done, 2 wrong usage, 70 a bug, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from swarm_protocol.errors import ConfigError
from swarm_protocol.version import software_version
from typer.exceptions import TyperException

from swarm_node import diagnostics, interrupts
from swarm_node.commands.command_options import Command, spread
from swarm_node.demo.command import demo
from swarm_node.events.emitter import Emitter

app = typer.Typer(
    name="swarm-node", epilog="Example: swarm-node demo", context_settings={"help_option_names": ["--help", "-h"]}
)

HERE = ("home",)
NETWORK = ("home", "name", "network_id", "peers", "listen", "announce")
DAEMON = (*NETWORK, "mdns", "relay_rate", "tethered", "drain_s", "metrics", "otlp", "log_format", "log_level")
LINK = ("max_upload", "max_download")
WORK = (
    *LINK,
    "relay",
    "run",
    "then_serve",
    "model",
    "take",
    "dtype",
    "blocks",
    "max_blocks",
    "max_memory",
    "monthly_traffic",
    "hours",
    "device",
    "threads",
    "probe",
)
HTTP = ("host", "port", "allowed_hosts", "trusted_proxies", "history", "checkpoints")
DATA = ("data", "tokenizer", "start")
TRAINING = (
    *DATA,
    "devices",
    "micro_batch",
    "autocast",
    "checkpoint_activations",
    "compile",
    "tensorboard",
    "keep_checkpoints",
    "keep_every",
)
ADDR = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW…"

COMMANDS = (
    Command(
        name="seed",
        purpose="Run a seed: the peer that others join through, and that relays for those behind a NAT.",
        code="swarm_node.commands.daemons:seed",
        settings=DAEMON,
        example="swarm-node seed --listen /ip4/0.0.0.0/tcp/4001",
    ),
    Command(
        name="join",
        purpose="Join a network with this machine: train a run, serve a model, or help where it is needed most.",
        code="swarm_node.commands.daemons:join",
        settings=(*DAEMON, *WORK, *TRAINING),
        example=f"swarm-node join --peers {ADDR} --run story.toml --then-serve",
    ),
    Command(
        name="run init",
        purpose="Write a run file to edit: every setting, with what it does and its default.",
        code="swarm_node.commands.run:init",
        settings=HERE,
        example="swarm-node run init story.toml",
        options={
            "PATH": "The new run file (default: run.toml).",
            "--start START": "Train this checkpoint further: a Hugging Face model directory, or OWNER/NAME[@REVISION].",
        },
    ),
    Command(
        name="run sign",
        purpose="Check a run file, pin its data and its checkpoint and sign it, so that others can join the run.",
        code="swarm_node.commands.run:sign",
        settings=(*HERE, *DATA),
        example="swarm-node run sign story.toml",
        options={
            "PATH": "The run file (default: run.toml).",
            "--identity FILE": "Sign with this key instead of the home's.",
            "--pin": "Pin a data set of the hub by its tokens, not only its commit: download and tokenize it now.",
            "--unpinned": "Leave the data open: who has other data, such as another Python's, may train too.",
        },
    ),
    Command(
        name="run show",
        purpose="Say what a run file describes, what it costs, and whether its signature holds.",
        code="swarm_node.commands.run:show",
        settings=(),
        example="swarm-node run show story.toml",
        options={"PATH": "The run file (default: run.toml)."},
    ),
    Command(
        name="run watch",
        purpose="Follow a run without training: its outer steps and its members.",
        code="swarm_node.commands.run:watch",
        settings=("peers", "network_id", "tensorboard"),
        example=f"swarm-node run watch story.toml --peers {ADDR}",
        options={"PATH": "The signed run file, or the run's id (default: run.toml)."},
    ),
    Command(
        name="run export",
        purpose="Write a run's certified state as a Hugging Face model: one that this home keeps, or the newest one.",
        code="swarm_node.commands.run:export",
        settings=(*HERE, "tokenizer", "peers", "network_id"),
        example="swarm-node run export story.toml --step 200",
        options={
            "PATH": "The signed run file, or the run's id (default: run.toml).",
            "--out DIR": "The new directory (default: the run's id and the step, here).",
            "--step STEP": "Outer step (default: the newest one that is there).",
        },
    ),
    Command(
        name="run resume",
        purpose="Let a run that waits for members that are gone go on without them, as only its author can.",
        code="swarm_node.commands.run:resume",
        settings=(*HERE, "peers", "network_id"),
        example=f"swarm-node run resume story.toml --peers {ADDR} --yes",
        options={
            "PATH": "The signed run file (default: run.toml).",
            "--identity FILE": "Sign with this key instead of the home's.",
            "--members FILE": "Let these peer ids go on, one a line (default: the last members that answer).",
            "--yes": "Sign and deliver it; without this, only say what would be signed.",
        },
    ),
    Command(
        name="models list",
        purpose="List the models of a network: their revisions, and whether all blocks are served.",
        code="swarm_node.commands.models:list_models",
        settings=(*HERE, "peers", "network_id"),
        example=f"swarm-node models list --peers {ADDR}",
    ),
    Command(
        name="models check",
        purpose="Say whether a model can be served here, and why not, from its config.json alone.",
        code="swarm_node.commands.models:check",
        settings=HERE,
        example="swarm-node models check OWNER/NAME",
        options={"MODEL": "A directory, or OWNER/NAME[@REVISION] on a hub."},
    ),
    Command(
        name="chat",
        purpose="Chat with a model of a network; a question on standard input is answered once.",
        code="swarm_node.commands.chat:run",
        settings=(*HERE, "peers", "network_id"),
        example=f"swarm-node chat story --peers {ADDR}",
        options={
            "MODEL": "The model's name, or NAME@REVISION for one of several that are served under it.",
            "--system SYSTEM": "What the model is told before the conversation.",
            "--temperature TEMPERATURE": "How freely words are drawn, from 0 (the likeliest) to 2 (default: 0.7).",
            "--max-tokens TOKENS": "Tokens of an answer at most (default: 512).",
        },
    ),
    Command(
        name="gateway",
        purpose="Speak OpenAI's API over a network's models, for any OpenAI client.",
        code="swarm_node.commands.daemons:gateway",
        settings=(
            *DAEMON,
            *LINK,
            *HTTP,
            "dashboard",
            "api_keys",
            "open_to_all",
            "requests_per_min",
            "tokens_per_min",
            "pin_model",
        ),
        example=f"swarm-node gateway --peers {ADDR} --port 8000",
    ),
    Command(
        name="dashboard",
        purpose="Show a network to whoever looks: its models, runs and nodes, live, read-only.",
        code="swarm_node.commands.daemons:dashboard",
        settings=(*DAEMON, *LINK, *HTTP),
        example=f"swarm-node dashboard --peers {ADDR} --host 0.0.0.0 --port 8000",
    ),
    Command(
        name="top",
        purpose="Watch a swarm in the terminal: its models, runs and nodes, live.",
        code="swarm_node.top.command:run",
        settings=("peers", "url", "network_id"),
        example=f"swarm-node top --peers {ADDR}",
        options={"--once": "Print the picture as plain text and exit, as where there is no terminal."},
    ),
    Command(
        name="status",
        purpose="Show what the daemon of this home is doing.",
        code="swarm_node.commands.this_node:status",
        settings=HERE,
        example="swarm-node status --json",
    ),
    Command(
        name="drain",
        purpose="Let the daemon of this home finish what it has in flight and leave.",
        code="swarm_node.commands.this_node:drain",
        settings=HERE,
        example="swarm-node drain",
    ),
    Command(
        name="stop",
        purpose="End the daemon of this home at once.",
        code="swarm_node.commands.this_node:stop",
        settings=HERE,
        example="swarm-node stop --home /srv/swarm",
    ),
    Command(
        name="doctor",
        purpose="Check this machine for what keeps nodes from working, and say what to do about it.",
        code="swarm_node.commands.doctor:run",
        settings=(*NETWORK, "mdns"),
        example=f"swarm-node doctor --peers {ADDR}",
    ),
    Command(
        name="plan",
        purpose="Say who would serve which blocks of a model, and how fast, before any node joins.",
        code="swarm_node.commands.plan:run",
        settings=("home", "model", "dtype"),
        example="swarm-node plan --model ~/models/story --nodes nodes.toml",
        options={
            "--nodes FILE": "TOML file: name, memory, and decode_ms_per_block or tokens_per_s in a [[nodes]] for each."
        },
    ),
    Command(
        name="simulate",
        purpose="Simulate a network of thousands of nodes, which come and go, and report what it carries.",
        code="swarm_node.commands.simulate:run",
        settings=(),
        example="swarm-node simulate scenario.toml --out report",
        options={
            "PATH": "The scenario file (TOML).",
            "--out FILE": "Write FILE.html and FILE.json (default: the scenario's name with -report, here).",
            "--seed SEED": "Seed of all that is random, in place of the file's; equal seeds give equal reports.",
        },
    ),
    Command(
        name="identity",
        purpose="Show this node's peer id, the name that others know it by.",
        code="swarm_node.commands.this_node:identity",
        settings=HERE,
        example="swarm-node identity --new",
        options={"--new": "Create the key; an existing one is never overwritten."},
    ),
)

GROUPS = {
    "run": typer.Typer(
        name="run",
        help="Make, sign, show, watch and export a training run.",
        epilog="Example: swarm-node run init run.toml",
    ),
    "models": typer.Typer(
        name="models",
        help="List a network's models (without a further word), or look at one before it is served.",
        epilog="Example: swarm-node models check OWNER/NAME",
    ),
}
USUAL = {"models": "list"}
"""The command that a group runs when none of its commands is named."""
for entry in COMMANDS:
    entry.add_to(GROUPS.get(entry.name.split()[0], app))
for group in GROUPS.values():
    app.add_typer(group)
app.command("demo", epilog="Example: swarm-node demo --nodes 4 --keep demo")(demo)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"swarm-node {software_version()}")
        raise typer.Exit


@app.callback()
def root(
    *,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Lend this machine to train and to serve language models together with others."""


def main() -> None:
    """Run the command of this process's arguments, and end with its exit code."""
    # imports make hundreds of thousands of objects that stay: a collection at each 700 takes a sixth of their time
    gc.set_threshold(10_000)
    code = run(sys.argv[1:])
    logging.shutdown()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # nothing of ours is left to do, while the teardown of torch, gRPC and uvloop takes time, and has been seen to spin
    # without end after a failure
    os._exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. Nothing but SystemExit from typer's completion escapes."""
    emitter = Emitter(json="--json" in arguments)
    diagnostics.quieten_imports()
    try:
        code = app(args=_or_help(with_usual(spread(arguments))), prog_name="swarm-node", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except TyperException as error:
        emitter.error(
            ConfigError(
                error.format_message().rstrip("."), remedy=" ".join(["see swarm-node", *_known(arguments), "--help"])
            )
        )
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return interrupts.EXIT_INTERRUPTED
    except BrokenPipeError:
        # the reader of our output has closed it; keep the interpreter from complaining about that when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return diagnostics.EXIT_FAILURE
    except Exception as error:
        emitter.error(diagnostics.as_swarm_error(error))
        return diagnostics.exit_code(error)


def _or_help(arguments: list[str]) -> list[str]:
    """Show the help where no command is named."""
    is_group = len(arguments) == 1 and arguments[0] in GROUPS
    return [*arguments, "--help"] if not arguments or is_group else arguments


def with_usual(arguments: list[str]) -> list[str]:
    """Let `models --peers …` mean `models list --peers …`."""
    group, *rest = arguments or [""]
    is_bare = group in USUAL and (not rest or (rest[0].startswith("-") and not {"--help", "-h"} & set(rest)))
    return [group, USUAL[group], *rest] if is_bare else arguments


def _known(arguments: Sequence[str]) -> list[str]:
    """Return the words of the command, or of the group, that was meant."""
    names = [*(entry.name.split() for entry in COMMANDS), ["demo"], *([name] for name in GROUPS)]
    return max((words for words in names if words == list(arguments[: len(words)])), key=len, default=[])
