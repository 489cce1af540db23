"""The publishers that a home remembers survive a restart; a broken or foreign file costs the memory only."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from support.published_models import PUBLISHER, STRANGER
from swarm_node.storage.client_models import publishers_in
from swarm_protocol.errors import ConfigError


def test_publisher_is_remembered_for_its_network_and_a_pin_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "publishers.json"
    known = publishers_in(path, "test", ())
    assert known.standing("story", PUBLISHER.peer_id) == "new"
    known.answered("story", PUBLISHER.peer_id)
    known.answered("story", STRANGER.peer_id)
    again = publishers_in(path, "test", ())
    assert again.standing("story", PUBLISHER.peer_id) == "remembered"
    assert again.believed("story") == {PUBLISHER.peer_id}
    pinned = publishers_in(path, "test", [f"story={STRANGER.peer_id}"])
    assert pinned.believed("story") == {STRANGER.peer_id}
    assert not publishers_in(path, "other", ()).believed("story")
    with pytest.raises(ConfigError, match="is not a publisher"):
        publishers_in(path, "test", ["nobody"])


@pytest.mark.parametrize(
    "content",
    ["{", "[]", json.dumps({"network_id": "test", "publishers": {"../x": "y"}}), json.dumps({"network_id": "test"})],
)
def test_file_without_sense_is_told_of_and_forgotten(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "publishers.json"
    path.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert not publishers_in(path, "test", ()).believed("story")
    assert "who publishes which model is lost" in caplog.text
