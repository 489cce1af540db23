"""Checks the place of a file that a command creates, before the command does anything that lasts."""

from __future__ import annotations

import os
from pathlib import Path

from swarm_protocol.errors import ConfigError


def check_new_file(path: Path, *, option: str = "--out") -> None:
    """Raises ConfigError unless a file can be created at `path`, which `option` names. No command overwrites one."""
    remedy = f"choose another {option}"
    folder = path.absolute().parent
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists already", remedy=f"move it away, or {remedy}")
    if not folder.is_dir():
        raise ConfigError(f"there is no directory {folder} to write {path.name} to", remedy=remedy)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{folder} is not writable for this user", remedy=remedy)
