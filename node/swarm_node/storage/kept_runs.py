"""Keeps copies of runs' signed files, each beside the run's checkpoints: a restart needs no member, and commands know
which run the checkpoints belong to. Blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from swarm.training.run.run_file import load_checked_run
from swarm.training.run.signed_run import SignedRun
from swarm_protocol.errors import ConfigError, IntegrityError

from swarm_node.storage.home import Home, explained, write_private

logger = logging.getLogger(__name__)


def copy_path(home: Home, run_id: str) -> Path:
    return home.checkpoints / run_id / "run.toml"


def keep_copy(home: Home, run: SignedRun) -> None:
    """Keep the run's file in the home, replacing a damaged copy. Raises ConfigError if it cannot be written."""
    path, data = copy_path(home, run.run_id), run.text.encode()
    with explained("keep the run's file", path):
        if data and not (path.exists() and path.read_bytes() == data):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_private(path, data)


def kept_copy(home: Home, run_id: str, load: Callable[[Path], SignedRun] = load_checked_run) -> SignedRun | None:
    """Return the run if this home has an intact copy of its file, or None. `load` reads and checks the copy."""
    path = copy_path(home, run_id)
    try:
        run = load(path) if path.exists() else None
    except (ConfigError, IntegrityError) as error:
        logger.warning("the copy of the run in %s is not used: %s", path, error)
        return None
    return run if run is not None and run.run_id == run_id else None
