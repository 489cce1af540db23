"""`swarm-node run init`: a run file to edit, with the usual model or with that of a checkpoint to start from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from swarm_protocol.errors import ConfigError

from swarm_node.command_options import Flags
from swarm_node.commands.run import DEFAULT_PATH, run_path
from swarm_node.events import Emitter
from swarm_node.home import Home
from swarm_node.settings import parse_model

if TYPE_CHECKING:
    from swarm.training.run.run_config import RunConfig

DEFAULT_NAME = "my-run"
LEARNING_RATE = 1e-4
"""For weights that have been trained already: the usual one, which is for a small model's first steps, spoils them."""


def init(flags: Flags) -> int:
    path, emitter = run_path(flags), Emitter(json=flags.json)
    from swarm.training.run.run_config import RunConfig  # noqa: PLC0415
    from swarm.training.run.run_file import new_run_file  # noqa: PLC0415

    try:
        config = RunConfig(name=path.stem if path.stem != DEFAULT_PATH.stem else DEFAULT_NAME)
    except ValueError:
        config = RunConfig(name=DEFAULT_NAME)
    if start := flags.texts["start"]:
        config = _starting_from(config, start, flags.home())
    new_run_file(path, config)
    emitter.emit("run_written", path=str(path))
    return 0


def _starting_from(config: RunConfig, checkpoint: str, home: Path) -> RunConfig:
    """`config` for the model of a checkpoint, with its weights and tokenizer. Raises ConfigError, IntegrityError."""
    from swarm.serving.model.model_files import open_model  # noqa: PLC0415
    from swarm.training.data.tokenizer import TOKENIZER_FILE  # noqa: PLC0415
    from swarm.training.run.start_config import LOCAL, StartConfig  # noqa: PLC0415
    from swarm.training.state.start_weights import model_settings  # noqa: PLC0415

    from swarm_node.model_source import find_source  # noqa: PLC0415

    try:
        named = parse_model(checkpoint)
    except ValueError as error:
        raise ConfigError(f"--start: {checkpoint[:80]!r} {error}", remedy="name a directory or OWNER/NAME") from error
    source = find_source(named, Home(home), lambda *_: None)
    files = open_model(source.directory)
    start = StartConfig(checkpoint=LOCAL)
    if not isinstance(named, Path):
        commit = files.source.rpartition("@")[2]
        start = StartConfig(checkpoint=named.model_id, revision=commit)
    tokenizer = start.checkpoint if (files.directory / TOKENIZER_FILE).is_file() else "bytes"
    return replace(
        config,
        model=model_settings(files.config),
        start=start,
        data=replace(config.data, tokenizer=tokenizer),
        inner=replace(config.inner, learning_rate=LEARNING_RATE),
    )
