"""Finds the files of a served model and the signed file of a run.

A model's files come from a local directory, which is used as it is, or from a hub, from which only the needed files are
downloaded. A run's file is at a path, or for a run's id in this home or at the run's members.

Functions block and must run in threads, except `run_of_id`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.serving.model.hub_download import OnProgress, download_blocks, find_config, find_model
from swarm.start_checkpoint import CheckpointSource
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_copy import find_run
from swarm.training.run.run_model import check_model
from swarm.training.run.signed_run import SignedRun
from swarm_protocol.errors import ConfigError

from swarm_node.events.emitter import Emitter
from swarm_node.settings.config import Config
from swarm_node.settings.parsers import HubId
from swarm_node.storage.home import Home
from swarm_node.storage.kept_runs import kept_copy

if TYPE_CHECKING:
    from swarm.serving.model.family_check import CheckedFamily

T = TypeVar("T")
REPORT_S = 2.0
"""Minimum time in seconds between two reports of a download."""

FetchBlocks = Callable[[int, int], None]
"""A function that downloads the weights of blocks [start, end) into the directory."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A directory with config, tokenizer and index, and a function that downloads the weights of blocks into it."""

    directory: Path
    fetch_blocks: FetchBlocks


def find_source(model: Path | HubId, home: Home, on_progress: OnProgress) -> ModelSource:
    """Return the source. This function and `fetch_blocks` raise ConfigError or IntegrityError if the hub lacks
    something."""
    if isinstance(model, Path):
        return ModelSource(model, lambda _start, _end: None)
    found = _on_hub(find_model, model, home)

    def fetch_blocks(start: int, end: int) -> None:
        download_blocks(found, start, end, on_progress)

    return ModelSource(found.directory, fetch_blocks)


def check_served(model: Path | HubId, home: Home, blocks: tuple[int, int] | None = None) -> CheckedFamily:
    """Check from the config alone whether `model`, or its `blocks` if given, can be served.

    Of a model on a hub only config.json is downloaded. Raises ConfigError or IntegrityError, with the reason.
    """
    from swarm.serving.model.family_check import check_directory  # noqa: PLC0415 (transformers' models: over two seconds)

    return check_directory(model if isinstance(model, Path) else _on_hub(find_config, model, home), blocks)


def _on_hub(find: Callable[..., T], model: HubId, home: Home) -> T:
    """Return what `find_model` or `find_config` finds.

    The remedy mentions directories, because a mistyped directory is looked up on the hub.
    """
    home.check_own()
    endpoint = os.environ.get("HF_ENDPOINT")
    try:
        return find(model.model_id, home.cache / "models", revision=model.revision, endpoint=endpoint)
    except ConfigError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.filename:
            raise  # found on the hub, but the cache cannot hold it
        remedy = f"{error.remedy}; there is no directory {model.model_id} here either"
        raise ConfigError(error.message, remedy=remedy) from error


class ProgressReports:
    """Limits the reports of a download: its start, its end, and between them one every REPORT_S.

    Reports nothing if everything is already there.
    """

    def __init__(self, report: OnProgress, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._report = report
        self._clock = clock
        self._next_s = 0.0
        self._is_under_way = False

    def __call__(self, num_bytes: int, total_bytes: int) -> None:
        is_whole = num_bytes == total_bytes
        if is_whole and not self._is_under_way:
            return
        if is_whole or not self._is_under_way or self._clock() >= self._next_s:
            self._is_under_way = not is_whole
            self._next_s = self._clock() + REPORT_S
            self._report(num_bytes, total_bytes)


async def run_of_id(network: Network, membership: Membership, home: Home, run_id: str) -> tuple[SignedRun, str]:
    """Return the run with that id, and a description of where its file came from.

    Raises PeerTimeout if no member gives the file, and ConfigError if its model cannot be trained.
    """
    if (kept := await asyncio.to_thread(kept_copy, home, run_id)) is not None:
        return kept, f"from its file in {home.path}"
    run = await find_run(network, membership, run_id)
    await asyncio.to_thread(check_model, run.config)
    return run, "its file came from a member"


def checkpoint_source(run: RunConfig, config: Config, emitter: Emitter) -> CheckpointSource:
    """Return the source of the run's start checkpoint for this node. Downloads are reported as events. Raises
    ConfigError for a home of another user."""
    home = Home(config.home)
    home.check_own()
    reports = ProgressReports(partial(emitter.progress, "downloading", run.start.checkpoint))
    return CheckpointSource(place=config.start, cache=home.cache / "models", on_progress=reports)
