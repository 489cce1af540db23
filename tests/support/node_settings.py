"""Settings resolved from an environment that the test gives, and from no other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

from swarm_node.settings import config_sources
from swarm_node.settings.config import Config, Value


def resolve(flags: Mapping[str, Value], *, env: Mapping[str, str] | None = None, file: Path | None = None) -> Config:
    """Resolve as `config_sources.resolve` does, with `env` in place of all variables SWARM_…."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(config_sources.ENV_PREFIX)}
    with patch.dict(os.environ, {**others, **(env or {})}, clear=True):
        return config_sources.resolve(flags, file=file)
