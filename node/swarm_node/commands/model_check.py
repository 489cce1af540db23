"""`swarm-node models check`: whether a model can be served, from its config alone. No weights are read."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from swarm_protocol.errors import ConfigError

from swarm_node import logs
from swarm_node.command_options import Flags
from swarm_node.events import Emitter
from swarm_node.home import Home
from swarm_node.settings import HubId, parse_model


def check(flags: Flags) -> int:
    model, home = _model(flags), Home(flags.home())
    # torch takes seconds to import: what is refused above is refused at once
    from swarm_node.model_source import check_served  # noqa: PLC0415

    logs.quieten_libraries()
    checked = check_served(model, home)
    emitter = Emitter(json=flags.json)
    if flags.json:
        emitter.emit("model_check", model=model.name, **asdict(checked))
        return 0
    emitter.result(f"{model.name} can be served: {checked.family}, {checked.num_blocks} blocks")
    if checked.untried:
        emitter.result(
            f"its blocks are tried out when they are loaded: this config alone was not enough, {checked.untried}"
        )
    return 0


def _model(flags: Flags) -> Path | HubId:
    told = flags.texts["model"]
    if not told:
        raise ConfigError("MODEL is missing", remedy="give a directory, or OWNER/NAME on a hub")
    try:
        return parse_model(told)
    except ValueError as error:
        raise ConfigError(f"{told!r} {error}", remedy="give a directory, or OWNER/NAME on a hub") from error
