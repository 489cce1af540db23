"""What `run sign` pins: the run's data, and the checkpoint that it starts from. Blocks: it reads them whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from swarm.trainer.checkpoint import CheckpointSource, check_source, pin_of
from swarm.training.data import LocalData, load_corpus
from swarm.training.module_run import is_module_run
from swarm.training.run_config import RunConfig
from swarm.training.start_config import LOCAL
from swarm_protocol.errors import ConfigError

from swarm_node.config import Config
from swarm_node.events import Emitter
from swarm_node.home import Home
from swarm_node.model_source import Reports

Pins = Mapping[tuple[str, str], str]
"""Values of a run file by table and key."""


def data_pins(run: RunConfig, config: Config, emitter: Emitter, *, pin: bool, unpinned: bool) -> Pins:
    """Those of the data that is here, or those that the run has; empty ones if it is to be `unpinned`. `pin`: of a data
    set of the hub, too.

    Raises ConfigError if there are none.
    """
    if pin and unpinned:
        raise ConfigError("--pin and --unpinned contradict each other", remedy="give one of them")
    if unpinned or is_module_run(run):
        return {("data", "digest"): ""}
    lacking = {
        "--data PATH": run.data.source == "files" and config.data is None,
        "--tokenizer PATH": run.data.tokenizer == "local" and config.tokenizer is None,
        "--pin": run.data.source == "hub" and not pin,
    }
    if missing := [option for option, lacks in lacking.items() if lacks]:
        remedy = f"sign with {' and '.join(missing)} to pin it"
        if not run.data.digest:
            raise ConfigError(
                f"the data ({described_data(run)}) is not pinned: each member would train on what it has",
                remedy=f"{remedy}, or with --unpinned if that is what you want",
            )
        message = f"the data ({described_data(run)}) was not looked at: it stays pinned to {run.data.digest[:12]}"
        emitter.emit("warning", message=message, remedy=remedy)
        return {}
    local = LocalData(
        path=config.data,
        tokenizer=config.tokenizer,
        on_progress=lambda progress: emitter.say(
            f"tokenizing: {progress.share:.0%} read, {progress.num_tokens} tokens"
        ),
    )
    vocab_size = int(run.model.get("vocab_size", 0))
    # as it is now: a pin from before would be answered with the tokens that were kept of it
    data = replace(run.data, digest="")
    return {("data", "digest"): load_corpus(data, seed=run.seed, vocab_size=vocab_size, local=local).digest}


def start_pins(run: RunConfig, config: Config, emitter: Emitter) -> Pins:
    """Those of the checkpoint that the run starts from: none if it starts from none, or has them and the checkpoint is
    not here.

    Raises ConfigError or IntegrityError if it cannot be had, or does not fit the run's model.
    """
    check_source(run.start, config.start)
    if not run.start.checkpoint or is_module_run(run):
        return {}
    if run.start.checkpoint == LOCAL and config.start is None:
        remedy = "sign with --start DIR to pin it"
        if not run.start.digest:
            raise ConfigError("the checkpoint that the run starts from is not pinned", remedy=remedy)
        message = f"the checkpoint was not looked at: it stays pinned to {run.start.digest[:12]}"
        emitter.emit("warning", message=message, remedy=remedy)
        return {}
    found = pin_of(run, checkpoint_source(run, config, emitter))
    if found.differing:
        emitter.emit(
            "warning",
            message=f"[model] computes something else than the checkpoint: they differ in {', '.join(found.differing)}",
            remedy="copy these from the checkpoint's config.json, unless you want it so",
        )
    return {("start", "revision"): found.revision, ("start", "digest"): found.digest}


def checkpoint_source(run: RunConfig, config: Config, emitter: Emitter) -> CheckpointSource:
    """Where this node has the run's checkpoint from; downloads are told."""

    def downloading(num_bytes: int, total_bytes: int) -> None:
        emitter.emit("downloading", model=run.start.checkpoint, num_bytes=num_bytes, total_bytes=total_bytes)

    return CheckpointSource(
        place=config.start, cache=Home(config.home).cache / "models", on_progress=Reports(downloading)
    )


def described_data(run: RunConfig) -> str:
    data = run.data
    which = ", ".join(filter(None, [data.hub_config, data.split]))
    source = f"{data.hub_id} ({which})" if data.source == "hub" else data.source
    return source if data.tokenizer == "bytes" else f"{source} through the tokenizer {data.tokenizer}"
