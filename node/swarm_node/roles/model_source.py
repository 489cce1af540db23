"""Where a served model's files come from: a directory on this machine, or a hub, and then no more of it than is needed.

Blocking, for threads. A local directory is used as it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from swarm.serving.model.family_check import CheckedFamily, check_directory
from swarm.serving.model.hub_download import OnProgress, download_blocks, find_config, find_model
from swarm_protocol.errors import ConfigError

from swarm_node.settings.parsers import HubId
from swarm_node.storage.home import Home

REPORT_S = 2.0
"""Between two reports of a download."""

FetchBlocks = Callable[[int, int], None]
"""Has blocks [start, end) in the directory afterwards."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A directory with config, tokenizer and index, and how to have the weights of blocks there too."""

    directory: Path
    bring: FetchBlocks


def find_source(model: Path | HubId, home: Home, on_progress: OnProgress) -> ModelSource:
    """Raises ConfigError or IntegrityError for a model that a hub does not have, as does `bring`."""
    if isinstance(model, Path):
        return ModelSource(model, lambda _start, _end: None)
    with _maybe_mistyped(model):
        found = find_model(model.model_id, _cache(home), revision=model.revision, endpoint=_endpoint())

    def bring(start: int, end: int) -> None:
        download_blocks(found, start, end, on_progress)

    return ModelSource(found.directory, bring)


def check_served(model: Path | HubId, home: Home, blocks: tuple[int, int] | None = None) -> CheckedFamily:
    """Say from its config alone whether `model` can be served, and `blocks` of it, if named.

    Of a model on a hub config.json is brought, and nothing else. Raises ConfigError or IntegrityError, with the reason.
    """
    if isinstance(model, Path):
        return check_directory(model, blocks)
    with _maybe_mistyped(model):
        directory = find_config(model.model_id, _cache(home), revision=model.revision, endpoint=_endpoint())
    return check_directory(directory, blocks)


def _cache(home: Home) -> Path:
    return home.cache / "models"


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT")


@contextmanager
def _maybe_mistyped(model: HubId) -> Iterator[None]:
    """Whoever mistypes a directory asks a hub, too."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            error.message, remedy=f"{error.remedy}; there is no directory {model.model_id} here either"
        ) from error


class ProgressReports:
    """Passes on what a download reports: its beginning, its end, and in between every REPORT_S.

    Nothing at all where all is there already.
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
