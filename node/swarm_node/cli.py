"""The `swarm-node` command: runs the sub-commands of `command_list`, and turns errors into messages and exit codes.

Only light modules are imported here, because `--help` and `status` must answer at once. A command itself imports torch
or hivemind if it needs them.

Exit codes: 0 done, 1 cannot be done, 2 wrong usage, 70 a bug, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from swarm_protocol.errors import ConfigError
from swarm_protocol.version import PROTOCOL_VERSION, software_version, version_text
from typer.exceptions import TyperException

from swarm_node import diagnostics, interrupts
from swarm_node.commands.command_list import COMMANDS
from swarm_node.commands.command_options import spread
from swarm_node.events.emitter import Emitter
from swarm_node.settings.config import UsageError

app = typer.Typer(
    name="swarm-node",
    epilog="Example: swarm-node demo",
    context_settings={"help_option_names": ["--help", "-h"]},
    rich_markup_mode=None,  # rich's tables leave 18 of 80 columns for the help of an option
)

EXIT_USAGE = 2

GROUPS = {
    "run": typer.Typer(
        name="run",
        help="Create, sign, show, watch, export, resume and endorse training runs; invite or vouch for nodes, and "
        "revoke invitations.",
        epilog="Example: swarm-node run init run.toml",
    ),
    "evidence": typer.Typer(
        name="evidence",
        help="List the evidence in a home (the default), or check an evidence file.",
        epilog="Example: swarm-node evidence verify FILE",
    ),
    "models": typer.Typer(
        name="models",
        help="List the models of a network (the default); check, publish or verify a model.",
        epilog="Example: swarm-node models check OWNER/NAME",
    ),
    "invite": typer.Typer(
        name="invite",
        help="Create (the default), list and revoke invitations to a private network that this home owns.",
        epilog="Example: swarm-node invite --new-network",
    ),
}
USUAL = {"evidence": "list", "models": "list", "invite": "create"}
"""The command that a group runs if none of its commands is named."""
for entry in COMMANDS:
    entry.add_to(GROUPS.get(entry.name.split()[0], app))
for group in GROUPS.values():
    app.add_typer(group, short_help=str(group.info.help))


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"swarm-node {version_text(software_version(), PROTOCOL_VERSION)}")
        raise typer.Exit


@app.callback()
def root(
    *,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Lend this machine to train and serve language models together with others."""


def main() -> None:
    """Run the command in this process's arguments, and exit with its exit code."""
    # imports create hundreds of thousands of lasting objects: collecting at each 700 takes a sixth of the import time
    gc.set_threshold(10_000)
    _prepare_streams()
    code = run(sys.argv[1:])
    logging.shutdown()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # skip the teardown of torch, gRPC and uvloop: it takes time, and has been seen to spin without end after a failure
    os._exit(code)


def _prepare_streams() -> None:
    """Open standard streams that were closed before the start: else the next files would have their numbers, and get
    what libraries print. Escape what the locale cannot encode, such as marks, and paths that are no text."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            nothing = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(nothing, "r" if name == "stdin" else "w"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. Only SystemExit of typer's completion escapes."""
    emitter = Emitter(json="--json" in arguments)
    diagnostics.quieten_imports()
    try:
        words = _or_help(with_usual(spread(arguments)))
        code = _command()(args=words, prog_name="swarm-node", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except TyperException as error:
        emitter.error(
            ConfigError(
                error.format_message().rstrip("."), remedy=" ".join(["see swarm-node", *_known(arguments), "--help"])
            )
        )
        return error.exit_code
    except UsageError as error:
        emitter.error(error)
        return EXIT_USAGE
    except (KeyboardInterrupt, typer.Abort):
        return interrupts.EXIT_INTERRUPTED
    except BrokenPipeError:
        # the reader closed our output: keep the interpreter from reporting this when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return diagnostics.EXIT_FAILURE
    except Exception as error:
        emitter.error(diagnostics.as_swarm_error(error))
        return diagnostics.exit_code(error)


@functools.cache
def _command() -> Any:
    """Return the tree of all commands. Building it takes a while, so it is cached."""
    return typer.main.get_command(app)


def _or_help(arguments: list[str]) -> list[str]:
    """Add --help if no command is named."""
    is_group = len(arguments) == 1 and arguments[0] in GROUPS
    return [*arguments, "--help"] if not arguments or is_group else arguments


def with_usual(arguments: list[str]) -> list[str]:
    """Let `models --peers …` mean `models list --peers …`."""
    group, *rest = arguments or [""]
    is_bare = group in USUAL and (not rest or (rest[0].startswith("-") and not {"--help", "-h"} & set(rest)))
    return [group, USUAL[group], *rest] if is_bare else arguments


def _known(arguments: Sequence[str]) -> list[str]:
    """Return the words of the command or group that was meant."""
    names = [*(entry.name.split() for entry in COMMANDS), *([name] for name in GROUPS)]
    return max((words for words in names if words == list(arguments[: len(words)])), key=len, default=[])
