"""Downloads of some blocks from a hub that runs on this machine."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.local_hub import MODEL, Hub, digest, local_hub
from swarm.serving.model import hub_download
from swarm.serving.model.hub_download import HubModel, download_blocks, find_model
from swarm.serving.model.model_files import DOWNLOAD, open_model
from swarm.serving.model.span_loading import load_span
from swarm.serving.server.capability import weigh
from swarm.serving.server.deployment import ServerOptions
from swarm_protocol.errors import ConfigError, IntegrityError, SessionError


@pytest.fixture
def hub(llama_dir: Path, tmp_path: Path) -> Iterator[Hub]:
    with local_hub(llama_dir, tmp_path / "hub") as hub:
        yield hub


@pytest.fixture
def find(hub: Hub, tmp_path: Path) -> Callable[[], HubModel]:
    return lambda: find_model(MODEL, tmp_path / "cache", endpoint=hub.endpoint)


@pytest.fixture(autouse=True)
def no_pause_before_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_download.time, "sleep", lambda _: None)


def shards_of(directory: Path, *blocks: int) -> set[str]:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return {
        str(file)
        for name, file in index["weight_map"].items()
        if any(name.startswith(f"model.layers.{block}.") for block in blocks)
    }


def test_download_gets_only_the_shards_of_the_blocks(hub: Hub, find: Callable[[], HubModel], llama_dir: Path) -> None:
    seen: list[tuple[int, int]] = []
    model = find()
    files = download_blocks(model, 2, 4, lambda *progress: seen.append(progress))
    needed = shards_of(hub.directory, 2, 3)
    assert (
        {path.name for path in model.directory.glob("*.safetensors")}
        == needed
        < {path.name for path in hub.directory.glob("*.safetensors")}
    )
    total = sum((hub.directory / name).stat().st_size for name in needed)
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    x = torch.randn(1, 3, 32)
    with torch.no_grad():
        expected = load_span(open_model(llama_dir), 2, 4).forward(x, 2, 4)
        assert torch.equal(load_span(files, 2, 4).forward(x, 2, 4), expected)
    with pytest.raises(ConfigError, match="is not there: download the blocks"):
        load_span(files, 0, 6)


def test_download_gets_nothing_when_repeated_and_only_the_rest_for_more_blocks(
    hub: Hub, find: Callable[[], HubModel]
) -> None:
    download_blocks(find(), 2, 4, lambda *_: None)
    before = {name: num for name, num in hub.sent.items() if name.endswith(".safetensors")}
    download_blocks(find(), 2, 4, lambda *_: None)
    assert {name: hub.sent[name] for name in before} == before
    model = find()
    download_blocks(model, 0, 6, lambda *_: None)
    assert {name: hub.sent[name] for name in shards_of(hub.directory, 2)} == {
        name: before[name] for name in shards_of(hub.directory, 2)
    }
    load_span(open_model(model.directory), 0, 6)


def test_found_model_can_be_planned_with_before_any_shard_is_downloaded(
    hub: Hub, find: Callable[[], HubModel], llama_dir: Path
) -> None:
    model = find()
    assert not list(model.directory.glob("*.safetensors"))
    partial, whole = open_model(model.directory), open_model(llama_dir)
    assert weigh(partial, ServerOptions()) == weigh(whole, ServerOptions())
    assert max(num for name, num in hub.sent.items() if name.endswith(".safetensors")) <= 100_001
    revision = partial.revision()
    download_blocks(model, 2, 4, lambda *_: None)
    assert open_model(model.directory).revision() == revision != whole.revision()


def test_download_resumes_where_it_stopped(
    hub: Hub, find: Callable[[], HubModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = min(shards_of(hub.directory, 2, 3))
    model = find()
    hub.cuts[shard] = 700
    with monkeypatch.context() as patched:
        patched.setattr(hub_download, "MAX_FAILURES", -1)
        with pytest.raises(ConfigError, match=f"the download of {MODEL} failed: .*: check the network.* is kept"):
            download_blocks(model, 2, 4, lambda *_: None)
    hub.asked.clear()
    seen: list[int] = []
    download_blocks(find(), 2, 4, lambda done, _: seen.append(done))
    assert (shard, "bytes=700-") in hub.asked
    assert digest(model.directory / shard) == digest(hub.directory / shard)
    assert not list(model.directory.glob("*.part"))
    assert 700 not in seen[:1]


def test_download_is_not_retried_when_its_caller_ends_it(hub: Hub, find: Callable[[], HubModel]) -> None:
    seen: list[int] = []

    def end(done: int, _total: int) -> None:
        seen.append(done)
        if done:
            raise SessionError("no more")

    with pytest.raises(SessionError, match="no more"):
        download_blocks(find(), 2, 4, end)
    assert len(seen) == 2


def test_download_survives_a_connection_that_breaks(hub: Hub, find: Callable[[], HubModel]) -> None:
    shard = min(shards_of(hub.directory, 2))
    model = find()
    hub.cuts[shard] = 500
    download_blocks(model, 2, 3, lambda *_: None)
    assert not hub.cuts
    assert [name for name, wanted in hub.asked if wanted != "bytes=0-100000"].count(shard) == 2
    assert digest(model.directory / shard) == digest(hub.directory / shard)


def test_download_starts_again_when_the_hub_ignores_ranges(hub: Hub, find: Callable[[], HubModel]) -> None:
    hub.ignores_ranges = True
    hub.cuts = {"config.json": 200}
    model = find()
    assert not hub.cuts
    assert digest(model.directory / "config.json") == digest(hub.directory / "config.json")


def test_download_of_an_empty_file_gives_an_empty_file(hub: Hub, find: Callable[[], HubModel]) -> None:
    (hub.directory / "added_tokens.json").touch()
    assert (find().directory / "added_tokens.json").read_bytes() == b""


def test_download_waits_for_a_hub_that_is_busy(hub: Hub, find: Callable[[], HubModel]) -> None:
    shard = min(shards_of(hub.directory, 2))
    model = find()
    hub.num_busy = 2
    download_blocks(model, 2, 3, lambda *_: None)
    assert not hub.num_busy
    assert digest(model.directory / shard) == digest(hub.directory / shard)


def test_download_is_refused_by_name_when_the_bytes_differ(hub: Hub, find: Callable[[], HubModel]) -> None:
    model = find()
    shard = min(shards_of(hub.directory, 2))
    data = bytearray((hub.directory / shard).read_bytes())
    data[-1] ^= 1
    (hub.directory / shard).write_bytes(data)
    with pytest.raises(IntegrityError, match=f"{shard} of {MODEL} does not match the digest"):
        download_blocks(model, 2, 3, lambda *_: None)
    assert not (model.directory / shard).exists()


def test_download_fails_with_one_line_when_a_file_has_vanished(hub: Hub, find: Callable[[], HubModel]) -> None:
    model = find()
    hub.vanished = shards_of(hub.directory, 2)
    with pytest.raises(ConfigError, match=f"a file of {MODEL} has vanished from the hub") as caught:
        download_blocks(model, 2, 3, lambda *_: None)
    assert "\n" not in str(caught.value)


def test_download_of_a_truncated_shard_is_refused_by_name(hub: Hub, find: Callable[[], HubModel]) -> None:
    """It is truncated on the hub itself, so that its size and digest are as announced."""
    shard = min(shards_of(hub.directory, 2))
    (hub.directory / shard).write_bytes((hub.directory / shard).read_bytes()[:-8])
    with pytest.raises(IntegrityError, match=shard):
        download_blocks(find(), 2, 3, lambda *_: None)


def test_download_of_a_shard_that_ends_early_is_given_up(hub: Hub, find: Callable[[], HubModel]) -> None:
    shard = min(shards_of(hub.directory, 2))
    model = find()
    path = hub.directory / shard
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ConfigError, match=rf"failed: {shard} ends after \d+ of \d+ bytes"):
        download_blocks(model, 2, 3, lambda *_: None)


def test_download_of_a_shard_that_does_not_end_is_given_up(hub: Hub, find: Callable[[], HubModel]) -> None:
    shard = min(shards_of(hub.directory, 2))
    model = find()
    path = hub.directory / shard
    path.write_bytes(path.read_bytes() + bytes(8))
    with pytest.raises(ConfigError, match=rf"failed: {shard} has more than the \d+ bytes"):
        download_blocks(model, 2, 3, lambda *_: None)


def test_download_is_refused_before_it_starts_when_the_disk_has_no_room(
    hub: Hub, find: Callable[[], HubModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = find()
    num_bytes = sum((hub.directory / name).stat().st_size for name in shards_of(hub.directory, 2))
    hub.asked.clear()
    free = 100
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(ConfigError, match=r"more bytes, and 100 are free"):
        download_blocks(model, 2, 3, lambda *_: None)
    monkeypatch.setattr(hub_download, "KEPT_FREE_BYTES", 1000)
    free = num_bytes + 999
    with pytest.raises(ConfigError, match=rf"{num_bytes} more bytes, and {free} are free, of which 1000 are kept free"):
        download_blocks(model, 2, 3, lambda *_: None)
    assert not hub.asked
    free += 1
    download_blocks(model, 2, 3, lambda *_: None)


@pytest.mark.parametrize(
    ("name", "num_bytes"), [("tokenizer.json", 49 << 20), ("model.safetensors.index.json", 33 << 20)]
)
def test_oversized_small_files_are_refused_before_they_are_downloaded(
    hub: Hub, find: Callable[[], HubModel], name: str, num_bytes: int
) -> None:
    with (hub.directory / name).open("ab") as file:
        file.truncate(num_bytes)
    with pytest.raises(ConfigError, match=f"{name} of {MODEL} is larger than"):
        find()
    assert not hub.asked


@pytest.mark.parametrize("bound", ["limits.MAX_WEIGHT_FILES", "MAX_TENSORS"])
def test_headers_are_not_all_read_when_there_are_too_many_shards_or_tensors(
    hub: Hub, find: Callable[[], HubModel], monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(f"swarm.serving.model.hub_download.{bound}", 1)
    with pytest.raises(ConfigError, match=f"{MODEL} has more than .* files of weights, or .* tensors"):
        find()
    shards = shards_of(hub.directory, *range(6))
    assert len({name for name, _ in hub.asked} & shards) < 2 < len(shards)


def test_download_fails_with_one_line_when_the_disk_fills_up(
    find: Callable[[], HubModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = find()

    def full(*_arguments: Any, **_options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub_download, "_append", full)
    with pytest.raises(ConfigError, match=f"the disk is full, {MODEL} is not complete"):
        download_blocks(model, 2, 3, lambda *_: None)


def test_find_names_the_directory_that_cannot_be_written(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(ConfigError, match=f"cannot keep {MODEL} in {tmp_path}/cache.*: not a directory: make it"):
        find_model(MODEL, tmp_path / "cache", endpoint=hub.endpoint)


def test_find_refuses_an_unknown_model_with_a_clear_message(hub: Hub, tmp_path: Path) -> None:
    for name in ("nobody/nothing", "not a name"):
        with pytest.raises(ConfigError, match=f"the hub has no model {name}"):
            find_model(name, tmp_path, endpoint=hub.endpoint)


def test_find_fails_with_one_line_when_the_hub_is_unreachable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"the hub cannot be asked for {MODEL}: Connection refused: ") as caught:
        find_model(MODEL, tmp_path, endpoint="http://127.0.0.1:9")
    assert "\n" not in str(caught.value)
    assert "HF_ENDPOINT" in caught.value.remedy
    assert "is kept" not in caught.value.remedy, "nothing was downloaded"


def test_find_goes_by_the_last_answer_while_the_hub_cannot_be_asked(
    hub: Hub, find: Callable[[], HubModel], tmp_path: Path
) -> None:
    model = find()
    download_blocks(model, 2, 4, lambda *_: None)
    away = "http://127.0.0.1:9"
    found = find_model(MODEL, tmp_path / "cache", endpoint=away)
    assert found == replace(model, endpoint=away)
    load_span(download_blocks(found, 2, 4, lambda *_: None), 2, 4)
    with pytest.raises(ConfigError, match=f"the download of {MODEL} failed"):
        download_blocks(found, 0, 6, lambda *_: None)
    (answer,) = (tmp_path / "cache").glob("*/*.json")
    (tmp_path / "cache" / "nobody--nothing").mkdir()
    shutil.copy(answer, tmp_path / "cache" / "nobody--nothing" / answer.name)
    with pytest.raises(ConfigError, match="the hub has no model nobody/nothing"):
        find_model("nobody/nothing", tmp_path / "cache", endpoint=hub.endpoint)
    answer.write_text("{}")
    with pytest.raises(ConfigError, match=f"the hub cannot be asked for {MODEL}"):
        find_model(MODEL, tmp_path / "cache", endpoint=away)


def test_find_describes_the_model_again_when_its_description_is_damaged(find: Callable[[], HubModel]) -> None:
    description = find().directory / DOWNLOAD
    whole = description.read_text()
    description.write_text("")  # as a loss of power may leave it
    open_model(find().directory)
    assert description.read_text() == whole
