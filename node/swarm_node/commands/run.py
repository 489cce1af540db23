"""`swarm-node run init`, `sign` and `show`, and the argument checks of `run export`.

`init` writes a run file with the default model or the model of a checkpoint to start from. `sign` checks, pins and
signs the run file. Other commands of a run are in `run_watch`, `run_export`, `run_orders` and `run_invite`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from swarm_protocol.errors import ConfigError
from swarm_protocol.limits import MAX_OUTER_STEP

from swarm_node import diagnostics, interrupts
from swarm_node.commands.command_options import (
    DEFAULT_PATH,
    Flags,
    file_or_id,
    run_file,
    say_loading,
    say_lookup,
    signing_identity,
)
from swarm_node.events.emitter import Emitter
from swarm_node.formatting import moment, plural, size
from swarm_node.machine.lean_imports import lean_imports
from swarm_node.settings.config import UsageError
from swarm_node.settings.parsers import RunId, parse_model, whole_number
from swarm_node.storage.home import Home

if TYPE_CHECKING:
    from swarm.training.run.run_config import RunConfig
    from swarm.training.run.run_cost import Cost
    from swarm.training.run.run_file import InspectedRun


DEFAULT_NAME = "my-run"
LEARNING_RATE = 1e-4
"""Learning rate for weights that are already trained. The default is for a new small model and would spoil them."""

EXIT_UNSIGNED = 1


def init(flags: Flags) -> int:
    path, emitter = flags.options["path"] or DEFAULT_PATH, Emitter(json=flags.json)
    from swarm.training.run.run_config import RunConfig  # noqa: PLC0415
    from swarm.training.run.run_file import new_run_file  # noqa: PLC0415

    try:
        config = RunConfig(name=path.stem if path.stem != DEFAULT_PATH.stem else DEFAULT_NAME)
    except ValueError:
        config = RunConfig(name=DEFAULT_NAME)
    if start := flags.options["start"]:
        config = _starting_from(config, start, flags.home(), emitter)
    new_run_file(path, config)
    emitter.emit("run_written", path=str(path))
    emitter.say(f"next: swarm-node run sign {shlex.quote(str(path))}")
    return 0


def sign(flags: Flags) -> int:
    path, settings = run_file(flags), flags.resolve()
    identity = signing_identity(flags)
    emitter = Emitter(json=flags.json)
    say_loading(emitter)
    from swarm.training.run.run_cost import warnings_of  # noqa: PLC0415
    from swarm.training.run.run_file import InspectedRun, read_config, sign_file, signed_run_id  # noqa: PLC0415
    from swarm.training.run.settings import ImpossibleRun  # noqa: PLC0415

    from swarm_node.commands.run_pinning import data_pins, start_pins  # noqa: PLC0415

    diagnostics.quieten_libraries()
    try:
        with lean_imports():
            config = read_config(path)
    except ImpossibleRun as error:
        for problem in error.problems:
            emitter.emit("run_problem", problem=problem)
        which = "one setting is" if len(error.problems) == 1 else f"{len(error.problems)} settings are"
        message = f"{path} cannot be signed: {which} invalid"
        raise ConfigError(message, remedy="correct the problems listed above") from error
    interrupts.raise_in_command()
    pins = data_pins(config, settings, emitter, pin=flags.options["pin"], unpinned=flags.options["unpinned"])
    before = signed_run_id(path)
    run = sign_file(path, identity, pins={**pins, **start_pins(config, settings, emitter)})
    for warning in warnings_of(run.config):
        emitter.warning(*warning)
    _print_run(emitter, path, InspectedRun(config=run.config, run=run))
    if before not in ("", run.run_id):
        emitter.say(f"the run's id was {before} until now: nodes that joined that run continue with it")
    brought = {
        " --data PATH": run.config.data.source == "files",
        " --tokenizer PATH": run.config.data.tokenizer == "local",
        " --start DIR": run.config.start.checkpoint == "local",
    }
    command = f"swarm-node join --run {shlex.quote(str(path))} --peers ADDR"
    emitter.say(
        f"{path} is signed; to train it: {command}{''.join(each for each, needed in brought.items() if needed)}"
    )
    return 0


def show(flags: Flags) -> int:
    path, emitter = run_file(flags), Emitter(json=flags.json)
    say_loading(emitter)
    from swarm.training.run.run_file import inspect_run  # noqa: PLC0415

    diagnostics.quieten_libraries()
    with lean_imports():
        found = inspect_run(path)
    _print_run(emitter, path, found)
    return 0 if found.run else EXIT_UNSIGNED


def export(flags: Flags) -> int:
    checkpoints: Path | None = flags.options["checkpoint"]
    config, which = flags.member(), _exported_run(flags, checkpoints)
    if not {"peers", "invite"} & {*config.origins}:
        config = config.model_copy(update={"peers": ()})  # drop the seeds of an invitation that the home keeps
    outer_step = flags.parsed("step", whole_number(0, MAX_OUTER_STEP), "write --step 200")
    out: Path | None = flags.options["out"]
    if out is not None and os.path.lexists(out):
        raise ConfigError(f"{out} exists already", remedy="move it away, or choose another --out")
    if isinstance(which, Path):
        from swarm.training.run.run_file import load_signed_run  # noqa: PLC0415 - as in `sign`

        load_signed_run(which)  # refuse an unsigned run before torch is imported
    name = flags.options["publish"]
    if name:
        from swarm_node.commands.models import publication_name  # noqa: PLC0415 - which other commands do not need

        publication_name(name, "--publish")
    publisher, emitter = signing_identity(flags) if name else None, Emitter(json=flags.json)
    say_loading(emitter)
    from swarm_node.commands.run_export import export_run  # noqa: PLC0415

    return export_run(which, outer_step, out, config, emitter, name=name, publisher=publisher, checkpoints=checkpoints)


def _starting_from(config: RunConfig, checkpoint: str, home: Path, emitter: Emitter) -> RunConfig:
    """Return `config` with the model, weights and tokenizer of a checkpoint. Raises ConfigError, IntegrityError."""
    try:
        named = parse_model(checkpoint)
    except ValueError as error:
        raise UsageError(f"--start: {checkpoint[:80]!r} {error}", remedy="give a directory or OWNER/NAME") from error
    say_lookup(named, emitter)
    # torch and transformers take seconds to import, so they are imported late
    from swarm.serving.model.model_files import open_model  # noqa: PLC0415
    from swarm.start_checkpoint import model_settings  # noqa: PLC0415
    from swarm.training.data.tokenizer import TOKENIZER_FILE  # noqa: PLC0415
    from swarm.training.run.run_tables import LOCAL, StartConfig  # noqa: PLC0415

    from swarm_node.roles.sources import find_source  # noqa: PLC0415

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


def _exported_run(flags: Flags, checkpoints: Path | None) -> Path | RunId:
    """Return the run to export: the one in PATH, or the one whose file is beside the checkpoints. Raises
    ConfigError."""
    if checkpoints is None:
        return file_or_id(flags)
    if not checkpoints.is_dir():
        found = "it is a file" if checkpoints.exists() else "it does not exist"
        raise ConfigError(
            f"{checkpoints} is not a directory of checkpoints: {found}",
            remedy="name HOME/checkpoints/RUN_ID, one of its step-… directories, or a copy of either",
        )
    if flags.values.get("peers"):
        raise UsageError(
            "--checkpoint and --peers are both given", remedy="leave out --peers: --checkpoint asks no peer"
        )
    beside = (checkpoints / DEFAULT_PATH.name, checkpoints.absolute().parent / DEFAULT_PATH.name)
    kept = next((path for path in beside if path.is_file()), None)
    return kept if kept is not None and not flags.options["path"] else file_or_id(flags)


def _print_run(emitter: Emitter, path: Path, found: InspectedRun) -> None:
    from swarm.training.run.run_cost import cost_of  # noqa: PLC0415

    from swarm_node.commands.run_pinning import described_data  # noqa: PLC0415

    config, run, cost = found.config, found.run, cost_of(found.config)
    if not emitter.json:
        emitter.result("\n".join(_lines(found, cost)))
        if run is None:
            emitter.say(f"  → sign it with your key: swarm-node run sign {path}")
        return
    emitter.emit(
        "run",
        path=str(path),
        run=run.run_id if run else None,
        name=config.name,
        signed_by=run.peer_id if run else None,
        issued_at=run.issued_at if run else None,
        problem=found.problem,
        parameters=cost.num_parameters,
        outer_steps=config.outer_steps,
        interval_steps=config.interval_steps,
        data=described_data(config),
        data_digest=config.data.digest,
        data_revision=config.data.revision,
        start=config.start.checkpoint,
        start_digest=config.start.digest,
        genesis=config.start.genesis,
        member_tokens=cost.member_tokens,
        group_tokens=cost.group_tokens,
        member_bytes=cost.member_bytes,
        memory_bytes=cost.memory_bytes,
    )


def _lines(found: InspectedRun, cost: Cost) -> Iterator[str]:
    from swarm.training.round.quorum import Succession  # noqa: PLC0415

    from swarm_node.commands.run_pinning import described_data  # noqa: PLC0415

    config, run = found.config, found.run
    if run is None:
        yield f"run        {config.name}"
        yield f"signature  not valid: {found.problem}"
    else:
        yield f"run        {run.run_id}"
        yield f"signature  valid: {run.peer_id}, {moment(run.issued_at)}"
    yield f"model      {config.model.get('model_type')}, {cost.num_parameters:,} parameters"
    optimizer, unit = f" ({config.inner.optimizer})", "tokens"
    if config.trains_module:
        optimizer, unit = "", "samples"
        yield "data       read by the author's own module, which also defines the inner optimizer"
    else:
        yield f"data       {described_data(config)}, {_pinned(config.data.digest, config.data.revision)}"
    if config.start.checkpoint:
        name = config.start.checkpoint if config.start.is_on_hub else "each member's own copy of a checkpoint"
        commit = f"@{config.start.revision[:12]}" if config.start.revision else ""
        yield f"start      {name}{commit}, {_pinned(config.start.digest)}"
    if config.start.genesis:
        yield f"genesis    pinned to {config.start.genesis[:12]}, the first state of every member"
    limit = f", {config.interval_s:g} s at most" if config.interval_s else ""
    interval = f"{plural(config.interval_steps, 'inner step')}{optimizer}{limit}"
    yield f"training   {plural(config.outer_steps, 'outer step')} of {interval}; {_outer_method(config)}"
    least, most = cost.group_tokens
    rule, entrance = config.probation, config.entrance
    yield f"group      {config.min_group} to {config.max_group} members, {_combined(config)}, {entrance.who_may_join}"
    if welcome := entrance.who_is_welcome(len(config.inviters)):
        yield f"invited    {welcome}"
    if rule.steps:
        yield (
            f"newcomers  count fully after {plural(rule.steps, 'outer step')}; until then they have {rule.share:.0%} "
            "of weight and seats at most, and no votes"
        )
    yield f"votes      {Succession.of(config).in_words}"
    if config.cluster_size > 1:
        followers = f"{config.cluster_size - 1} more trainers" if config.cluster_size > 2 else "one more trainer"
        yield f"clusters   each member brings the work of {followers}: {config.max_trainers} can train"
    yield f"{unit:<10} {cost.member_tokens:,} for each member and outer step; {least:,} to {most:,} for each round"
    head = f", and up to {size(cost.head_bytes)} for each head" if config.cluster_size > 1 else ""
    yield f"traffic    up to {size(cost.member_bytes)} for each member and outer step, as {config.codec}{head}"
    yield f"memory     {size(cost.memory_bytes)} for each member on a CPU, plus activations"


def _combined(config: RunConfig) -> str:
    mixing = config.make_aggregator().mixing
    return f"{mixing.name.replace('_', ' ')} and {config.aggregator}" if mixing is not None else config.aggregator


def _pinned(digest: str, revision: str = "") -> str:
    if not digest and revision:
        return f"pinned to commit {revision[:12]}"
    return f"pinned to {digest[:12]}" if digest else "not pinned"


def _outer_method(config: RunConfig) -> str:
    if config.fragments == 1 and not config.overlap_steps:
        return f"DiLoCo with {config.outer.optimizer}"
    fragments, overlap = plural(config.fragments, "fragment"), plural(config.overlap_steps, "step")
    return f"{fragments}, {overlap} of overlap, {config.outer.optimizer}"
