"""What `swarm-node join` refuses before it takes the time to load anything."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from swarm.training.data.token_file import TokenWriter
from swarm_node import config
from swarm_node.commands.daemons import _check_work
from swarm_protocol.errors import ConfigError


def test_join_does_without_data_that_is_gone_if_the_tokens_that_the_run_pins_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = tmp_path / "swarm" / "tokens"
    cache.mkdir(parents=True)
    (cache / "broken.tokens").write_text("")
    writer = TokenWriter(cache / "one.tokens", 256)
    writer.add(np.arange(9), held_out=False)
    digest = writer.finish().digest
    writer.close()
    run = tmp_path / "run.toml"
    told = config.resolve({"home": str(tmp_path), "run": str(run), "data": "/no/such"}, env={})
    run.write_text('[data]\ndigest = "another"\n')
    with pytest.raises(ConfigError, match="/no/such is not there"):
        _check_work(told)
    run.write_text(f'[data]\ndigest = "{digest}"\n')
    _check_work(told)
