"""Finds a run's signed file: at a path, or by the run's id in this home or from the run's members.

A copy is kept beside the run's checkpoints, so that a restart needs no member and `run export` knows their run.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.training.run.run_copy import find_run
from swarm.training.run.run_file import load_run
from swarm.training.run.run_model import check_model
from swarm.training.run.signed_run import SignedRun
from swarm_protocol.errors import ConfigError, IntegrityError

from swarm_node.storage.home import Home, explained

logger = logging.getLogger(__name__)


def copy_path(home: Home, run_id: str) -> Path:
    return home.checkpoints / run_id / "run.toml"


def keep_copy(home: Home, run: SignedRun) -> None:
    """Keep the run's file in the home. Raises ConfigError if the disk refuses."""
    path = copy_path(home, run.run_id)
    if not path.exists() and run.text:
        with explained("keep the run's file"):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.write_text(run.text, encoding="utf-8")
            partial.replace(path)


def kept_copy(home: Home, run_id: str) -> SignedRun | None:
    """Return the run, if this home keeps its file intact."""
    path = copy_path(home, run_id)
    try:
        run = load_run(path) if path.exists() else None
    except (ConfigError, IntegrityError) as error:
        logger.warning("the copy of the run in %s is not used: %s", path, error)
        return None
    return run if run is not None and run.run_id == run_id else None


async def run_of_id(network: Network, membership: Membership, home: Home, run_id: str) -> tuple[SignedRun, str]:
    """Return the run with that id, and in words where its file came from.

    Raises PeerTimeout if no member gives the file, ConfigError if its model cannot be trained.
    """
    if (kept := await asyncio.to_thread(kept_copy, home, run_id)) is not None:
        return kept, f"from its file in {home.path}"
    run = await find_run(network, membership, run_id)
    await asyncio.to_thread(check_model, run.config)
    return run, "its file came from a member"
