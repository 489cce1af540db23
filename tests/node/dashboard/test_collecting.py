"""Places of a dashboard's that its owner cannot have meant."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from swarm_node.dashboard.collecting import checkpoints, collecting
from swarm_node.settings.config import Config
from swarm_node.storage.home import Home
from swarm_protocol.errors import ConfigError


@pytest.mark.parametrize("place", ["{}/missing/history.sqlite", "sqlite:///{}/missing/history.sqlite"])
def test_history_in_a_directory_that_is_not_there_is_refused(tmp_path: Path, place: str) -> None:
    config = Config(home=tmp_path, name="test", history=place.format(tmp_path))
    with pytest.raises(ConfigError, match=r"no directory .*missing") as error:
        collecting(SimpleNamespace(config=config, home=Home(tmp_path)))  # type: ignore[arg-type]
    assert error.value.remedy == "check --history"
    assert not (tmp_path / "missing").exists()


def test_checkpoints_in_a_directory_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no directory .*missing") as error:
        checkpoints(Config(home=tmp_path, name="test", checkpoints=tmp_path / "missing"))
    assert error.value.remedy == "check --checkpoints"
