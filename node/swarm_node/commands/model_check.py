"""`swarm-node models check`: whether a model can be served, from its config alone. No weights are read."""

from __future__ import annotations

from pathlib import Path

from swarm_protocol.errors import ConfigError

from swarm_node import logs
from swarm_node.events import Emitter
from swarm_node.options import Flags
from swarm_node.settings import HubId, parse_model


def run(flags: Flags) -> int:
    model = _model(flags)
    # torch takes seconds to import: what is refused above is refused at once
    from swarm.serving.model.check import check_directory  # noqa: PLC0415

    logs.quieten_libraries()
    if isinstance(model, HubId):
        raise ConfigError(f"{model} is not a directory", remedy="download it, and give its directory")
    checked = check_directory(model)
    emitter = Emitter(json=flags.json)
    if flags.json:
        emitter.emit("model_check", model=model.name, family=checked.family, num_blocks=checked.num_blocks)
    else:
        emitter.result(f"{model.name} can be served: {checked.family}, {checked.num_blocks} blocks")
    return 0


def _model(flags: Flags) -> Path | HubId:
    told = flags.paths["model"]
    if told is None:
        raise ConfigError("MODEL is missing", remedy="give a directory, or OWNER/NAME on a hub")
    try:
        return parse_model(str(told))
    except ValueError as error:
        raise ConfigError(f"{str(told)!r} {error}", remedy="give a directory, or OWNER/NAME on a hub") from error
