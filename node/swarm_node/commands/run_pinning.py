"""Computes what `run sign` pins: the data, and the checkpoint to start from. Blocks while it reads them in full."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from swarm.start_checkpoint import check_source, pin_of
from swarm.training.data.corpus import load_corpus
from swarm.training.data.hub import commit_of_data_set, commit_of_tokenizer
from swarm.training.data.local_data import LocalData
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_model import check_model, initial_theta
from swarm.training.run.run_tables import LOCAL, DataConfig
from swarm.training.run.settings import is_hub_id
from swarm.training.state.replica_state import MAX_DRAWN_VALUES, genesis_digest
from swarm_protocol.errors import ConfigError

from swarm_node.events.emitter import Emitter
from swarm_node.roles.sources import checkpoint_source
from swarm_node.settings.config import Config, UsageError

PinnedValues = Mapping[tuple[str, str], str]
"""Values to write into a run file, by table and key."""


def data_pins(run: RunConfig, config: Config, emitter: Emitter, *, pin: bool, unpinned: bool) -> PinnedValues:
    """Return the pins of the run's data, or empty pins if the data is to be `unpinned`.

    Data on a hub is pinned by its commits, and with `pin` also by the digest of its tokens. Data that is not on this
    machine keeps the run's present pins. Raises ConfigError if there are none.
    """
    if pin and unpinned:
        raise UsageError("--pin and --unpinned contradict each other", remedy="give one of them")
    if unpinned or run.trains_module:
        return {("data", key): "" for key in ("digest", "revision", "tokenizer_revision")}
    commits = hub_pins(run.data)
    if missing := _lacking(run, config, pin=pin):
        if run.data.digest:
            _tell_kept(run, emitter, f"sign with {' and '.join(missing)} to pin it")
            return commits
        if _lacks_start(run, config):
            missing.append("--start DIR")
        raise ConfigError(
            f"the data ({described_data(run)}) is not pinned: members could train on different data",
            remedy=f"sign with {' and '.join(missing)} to pin it, or with --unpinned if that is what you want",
        )
    is_read = pin or run.data.source != "hub"
    digest = _read_digest(run, config, commits, emitter) if is_read else _kept_digest(run, commits, emitter)
    return {**commits, ("data", "digest"): digest}


def _lacking(run: RunConfig, config: Config, *, pin: bool) -> list[str]:
    """Return the options without which the run's data cannot be read here."""
    lacking = {
        "--data PATH": run.data.source == "files" and config.data is None,
        "--tokenizer PATH": run.data.tokenizer == "local" and config.tokenizer is None,
        "--pin": run.data.source == "hub" and run.data.tokenizer == "local" and not pin,
    }
    return [option for option, lacks in lacking.items() if lacks]


def _read_digest(run: RunConfig, config: Config, commits: PinnedValues, emitter: Emitter) -> str:
    """Return the digest of the run's tokens, which are made from its data now."""
    local = LocalData(
        path=config.data,
        tokenizer=config.tokenizer,
        on_progress=lambda progress: emitter.say(
            f"tokenizing: {progress.share:.0%} read, {progress.num_tokens} tokens"
        ),
    )
    vocab_size = int(run.model.get("vocab_size", 0))
    # without the earlier pin: the tokens cached for it would be returned
    data = replace(
        run.data,
        digest="",
        revision=commits.get(("data", "revision"), ""),
        tokenizer_revision=commits.get(("data", "tokenizer_revision"), ""),
    )
    return load_corpus(data, seed=run.seed, vocab_size=vocab_size, local=local).digest


def hub_pins(data: DataConfig) -> PinnedValues:
    """Return the commits of the hub repositories that `data` uses. Raises ConfigError."""
    found = dict[tuple[str, str], str]()
    if data.source == "hub":
        found["data", "revision"] = commit_of_data_set(data.hub_id, data.revision)
    if is_hub_id(data.tokenizer):
        found["data", "tokenizer_revision"] = commit_of_tokenizer(data.tokenizer, data.tokenizer_revision)
    return found


def _kept_digest(run: RunConfig, commits: PinnedValues, emitter: Emitter) -> str:
    """Return the run's digest, or "" if the data now comes from other commits."""
    digest, remedy = run.data.digest, "sign with --pin to also pin its tokens"
    if not digest:
        return ""
    if all(getattr(run.data, key) == commit for (_, key), commit in commits.items()):
        _tell_kept(run, emitter, remedy)
        return digest
    message = "the data's digest is removed, because the commits that are signed now may have other data"
    emitter.warning(message, remedy=remedy)
    return ""


def _tell_kept(run: RunConfig, emitter: Emitter, remedy: str) -> None:
    message = f"the data ({described_data(run)}) was not read: it stays pinned to {run.data.digest[:12]}"
    emitter.warning(message, remedy=remedy)


def start_pins(run: RunConfig, config: Config, emitter: Emitter) -> PinnedValues:
    """Return the pins of the checkpoint that the run starts from, and of its genesis.

    A checkpoint that is not on this machine keeps its present pin. Raises ConfigError or IntegrityError if the
    checkpoint cannot be loaded or does not fit the run's model.
    """
    check_source(run.start, config.start)
    if run.trains_module:
        return {}
    if not run.start.checkpoint:
        return {("start", "genesis"): _drawn_genesis(run, emitter)}
    if _lacks_start(run, config):
        remedy = "sign with --start DIR to pin it"
        if not run.start.digest:
            raise ConfigError("the checkpoint that the run starts from is not pinned", remedy=remedy)
        message = f"the checkpoint was not read: it stays pinned to {run.start.digest[:12]}"
        emitter.warning(message, remedy=remedy)
        return {("start", "genesis"): ""}  # other settings may have changed the genesis
    found = pin_of(run, checkpoint_source(run, config, emitter))
    if found.differing:
        emitter.warning(
            f"[model] differs from the checkpoint in {', '.join(found.differing)}",
            remedy="copy these from the checkpoint's config.json, unless the difference is intended",
        )
    return {
        ("start", "revision"): found.revision,
        ("start", "digest"): found.digest,
        ("start", "genesis"): found.genesis,
    }


def _drawn_genesis(run: RunConfig, emitter: Emitter) -> str:
    """Return the digest of the first state of a run that starts from random weights, or "" if drawing them takes too
    long."""
    if (num_values := check_model(run)) > MAX_DRAWN_VALUES:
        message = f"the run's first state is not pinned: drawing {num_values:,} parameters takes long"
        emitter.warning(message, remedy="endorse the run soon after its first step")
        return ""
    return genesis_digest(initial_theta(run), run)


def _lacks_start(run: RunConfig, config: Config) -> bool:
    return run.start.checkpoint == LOCAL and config.start is None


def described_data(run: RunConfig) -> str:
    data = run.data
    which = ", ".join(filter(None, [data.hub_config, data.split]))
    source = f"{data.hub_id} ({which})" if data.source == "hub" else data.source
    return source if data.tokenizer == "bytes" else f"{source} through the tokenizer {data.tokenizer}"
