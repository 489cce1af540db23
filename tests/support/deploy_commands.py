"""What the files in `deploy/` would have `swarm-node` do, put before the program's own parser and settings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from support.node_settings import resolve
from support.private_networks import Owner
from swarm_node import cli
from swarm_node.commands.command_options import spread
from swarm_node.settings.config import SETTINGS, Config
from swarm_protocol.identity import Identity

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PEER_ID = Identity(bytes(32)).peer_id
NO_HOME = Path("/nonexistent/swarm")

_COMMAND = re.compile(r"swarm-node(?::\w+)? +(?P<words>[a-z][^`|&;#)\n]*)")


def text(name: str) -> str:
    return (DEPLOY / name).read_text(encoding="utf-8")


def shell_commands(script: str) -> Iterator[list[str]]:
    """The words after each `swarm-node` in a script, or after an image of that name."""
    for found in _COMMAND.finditer(script.replace("\\\n", " ")):
        yield shlex.split(found["words"].replace("PEER_ID", PEER_ID).rstrip("\"'"))


def config_of(words: Sequence[str], environment: Mapping[str, str] | None = None) -> Config:
    """The settings that `swarm-node WORDS…` gets. Raises what the program would refuse them with."""
    command, words = cli._command(), cli.with_usual(spread(words))
    while commands := getattr(command, "commands", None):
        assert words, "a command is missing"
        assert words[0] in commands, f"there is no command {words[0]!r}"
        command, words = commands[words[0]], words[1:]
    context = command.make_context(command.name, list(words))
    options = {each.name for each in command.params if each.param_type_name == "option" and each.name in SETTINGS}
    given = {name: value for name in options if (value := context.params[name]) not in (None, [], ())}
    if "invite" in given:  # a file that the reader has
        given["invite"] = Owner().invite().text()
    given.pop("invitation", None)  # a file or a word that the reader has
    return resolve({"home": str(NO_HOME)} | given, env=environment or {})
