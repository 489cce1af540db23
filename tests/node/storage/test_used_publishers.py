"""The publishers that a home remembers survive a restart; a broken or foreign file costs only this memory."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.published_models import PUBLISHER, STRANGER
from swarm.client import publishers
from swarm_node.storage import client_models
from swarm_node.storage.client_models import publishers_in, used_in
from swarm_node.storage.home import locked_by
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


def test_two_processes_with_one_home_keep_each_other_s_publishers(tmp_path: Path) -> None:
    path = tmp_path / "publishers.json"
    gateway, chat = (publishers_in(path, "test", ()) for _ in range(2))
    chat.answered("story", PUBLISHER.peer_id)
    chat.answered("both", PUBLISHER.peer_id)
    gateway.answered("poem", PUBLISHER.peer_id)
    gateway.answered("both", STRANGER.peer_id)
    again = publishers_in(path, "test", ())
    assert {again.standing(model, PUBLISHER.peer_id) for model in ("story", "poem", "both")} == {"remembered"}
    revisions = tmp_path / "revisions.json"
    gateway_used, chat_used = (used_in(revisions, "test") for _ in range(2))
    chat_used.add("story", "a")
    gateway_used.add("poem", "b")
    gateway_used.add("story", "c")
    assert [list(used_in(revisions, "test").of(model)) for model in ("story", "poem")] == [["a", "c"], ["b"]]


def test_publisher_that_another_process_writes_at_the_same_moment_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "publishers.json"
    known = publishers_in(path, "test", ())
    with ThreadPoolExecutor(1) as thread:
        with locked_by(tmp_path / "publishers.lock"):  # as the other process does while it reads and writes
            answered = thread.submit(known.answered, "story", PUBLISHER.peer_id)
            with pytest.raises(TimeoutError):
                answered.result(0.3)
            path.write_text(json.dumps({"network_id": "test", "publishers": {"poem": PUBLISHER.peer_id}}))
        answered.result(10)
    assert set(json.loads(path.read_text())["publishers"]) == {"story", "poem"}


def test_publishers_of_two_processes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (publishers, client_models):
        monkeypatch.setattr(module, "MAX_REMEMBERED", 4)
    path = tmp_path / "publishers.json"
    first, second = (publishers_in(path, "test", ()) for _ in range(2))
    for number in range(6):
        first.answered(f"first-{number}", PUBLISHER.peer_id)
        second.answered(f"second-{number}", PUBLISHER.peer_id)
    assert len(json.loads(path.read_text())["publishers"]) == 4
    assert publishers_in(path, "test", ()).believed("second-5") == {PUBLISHER.peer_id}


@pytest.mark.parametrize(
    "content",
    ["{", "[]", json.dumps({"network_id": "test", "publishers": {"../x": "y"}}), json.dumps({"network_id": "test"})],
)
def test_malformed_file_is_a_warning_and_ignored(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "publishers.json"
    path.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert not publishers_in(path, "test", ()).believed("story")
    assert "who publishes which model is lost" in caplog.text
