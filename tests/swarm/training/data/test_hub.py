"""Tests data sets and tokenizers from a hub over real HTTP, and hubs that lack them, are silent or cannot be
reached."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
from huggingface_hub import file_download
from support.local_data_hub import COMMIT, DATA_SET, TOKENIZER, DataHub, local_data_hub
from support.text_models import byte_tokenizer
from swarm.training.data import hub
from swarm.training.data.corpus import load_corpus
from swarm.training.data.hub import OLDEST_LIBRARY, HubSource, bring_tokenizer, check_builder, check_library
from swarm.training.data.local_data import LocalData
from swarm.training.data.tokenizer import TOKENIZER_FILES, TokenizerFiles
from swarm.training.run.run_tables import DataConfig
from swarm_protocol.errors import ConfigError

STORIES = [f"Es war {index} mal ein König. " * 10 for index in range(60)]
RUN = DataConfig(source="hub", hub_id=DATA_SET, tokenizer=TOKENIZER, window_tokens=16)


@pytest.fixture
def data_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DataHub]:
    """Start the only hub that this process and its workers know."""
    folder = tmp_path / "hub"
    (folder / "datasets").mkdir(parents=True)
    lines = (json.dumps({"text": story, "id": index}) + "\n" for index, story in enumerate(STORIES))
    (folder / "datasets" / "train.jsonl").write_text("".join(lines))
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    tokenizer.save_pretrained(folder / "models")
    with local_data_hub(folder) as found:
        point_to(found.endpoint, tmp_path, monkeypatch)
        yield found


def point_to(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    for name, value in (("HF_ENDPOINT", endpoint), ("HF_HOME", str(tmp_path / "hf"))):
        monkeypatch.setenv(name, value)
    for name in ("HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_XET"):
        monkeypatch.setenv(name, "1")


def test_load_downloads_data_set_and_tokenizer_from_the_hub_once(data_hub: DataHub, tmp_path: Path) -> None:
    local = LocalData(cache=tmp_path / "cache")
    corpus = load_corpus(RUN, seed=0, vocab_size=257, local=local)
    assert corpus.vocab_size == 257
    # each document once, separated by the tokenizer's end of text
    num_tokens = sum(len(story.encode()) + 1 for story in STORIES)
    assert num_tokens - 64 < (corpus.num_samples + len(corpus.validation_batch(0, 10_000))) * 16 < num_tokens
    assert sum(path.endswith("/train.jsonl") for path in data_hub.asked if path.startswith("GET")) == 1
    data_hub.asked.clear()
    again = load_corpus(RUN, seed=0, vocab_size=257, local=local)
    assert again.digest == corpus.digest
    assert not [path for path in data_hub.asked if "resolve" in path]


@pytest.mark.parametrize(
    ("column", "told"), [("body", "has no column 'body': it has text, id"), ("id", "column 'id' of .* is not text")]
)
def test_passages_refuse_a_column_without_text(monkeypatch: pytest.MonkeyPatch, column: str, told: str) -> None:
    from datasets import Dataset  # noqa: PLC0415 - it takes 0.7 s to import, and each worker imports this file

    rows = Dataset.from_dict({"text": STORIES, "id": list(range(60))})
    monkeypatch.setattr(HubSource, "_rows", lambda _self: rows)
    source = HubSource(hub_id=DATA_SET, split="train", text_key=column, commit=COMMIT)
    with pytest.raises(ConfigError, match=told):
        list(source.passages())


def test_passages_come_from_the_configuration_that_the_run_names(data_hub: DataHub) -> None:
    folder = data_hub.folder / "datasets"
    (folder / "README.md").write_text(
        "---\nconfigs:\n"
        + "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("short", "long-1.0"))
        + "---\n"
    )
    for name in ("short", "long-1.0"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": f"a {name} story. " * 200}) + "\n")

    run = replace(RUN, hub_config="long-1.0", tokenizer="bytes", window_tokens=64)
    corpus = load_corpus(run, seed=0, vocab_size=257, local=LocalData(cache=data_hub.folder.parent / "cache"))
    assert "a long-1.0 st" in bytes(corpus.validation_batch(0, 1).flatten().tolist()).decode()
    # all others in one process: its libraries read once which hub they ask, and take a second to import
    done = subprocess.run([sys.executable, "-c", CHOICES, DATA_SET], capture_output=True, text=True, check=True)
    short, no_configuration, no_split = done.stdout.splitlines()
    assert "a short st" in short
    assert "long-1.0" in no_configuration
    assert "train" in no_split
    for refused in (no_configuration, no_split):
        assert refused.endswith("set the run's data.hub_config and data.split")


CHOICES = """
import sys
from swarm.training.data.hub import HubSource
from swarm_protocol.errors import ConfigError

for config, split in (("short", "train"), ("tall", "train"), ("short", "test")):
    try:
        print(next(HubSource.find(sys.argv[1], config, split, "text").passages()).text[:50])
    except ConfigError as error:
        print(error, error.remedy)
"""


@pytest.mark.parametrize(
    "place", ["{here}", "file://{here}", "../../../../..{here}", "https://example.org/s.jsonl", "zip://a.jsonl::{here}"]
)
@pytest.mark.parametrize(
    ("file", "form"),
    [
        ("README.md", "---\nconfigs:\n- config_name: default\n  data_files: '{place}'\n---\n"),
        ("README.md", "---\nconfigs:\n- config_name: default\n  data_dir: '{place}'\n---\n"),
        (
            ".huggingface.yaml",
            "configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: [train.jsonl, '{place}']\n",
        ),
    ],
    ids=["files", "folder", "yaml"],
)
def test_load_refuses_a_data_set_whose_card_names_files_of_others(
    data_hub: DataHub, tmp_path: Path, place: str, file: str, form: str
) -> None:
    secret = tmp_path / "secret.jsonl"
    secret.write_text(json.dumps({"text": "nobody's business " * 100}) + "\n")
    (data_hub.folder / "datasets" / file).write_text(form.format(place=place.format(here=secret)))
    source = HubSource(hub_id=DATA_SET, split="train", text_key="text", commit=COMMIT)
    with pytest.raises(ConfigError, match="names a file outside its repository"):
        next(source.passages())
    assert not any(path.endswith(".jsonl") for path in data_hub.asked)


def test_load_refuses_a_data_set_whose_file_format_can_point_elsewhere(data_hub: DataHub, tmp_path: Path) -> None:
    (data_hub.folder / "datasets" / "train.jsonl").rename(data_hub.folder / "datasets" / "train.h5")
    run = replace(RUN, tokenizer="bytes")
    with pytest.raises(ConfigError, match="has files of kind hdf5, which runs cannot train on"):
        load_corpus(run, seed=0, vocab_size=257, local=LocalData(cache=tmp_path / "cache"))


def test_check_builder_refuses_files_that_the_library_found_elsewhere() -> None:
    base = f"hf://datasets/{DATA_SET}@{COMMIT}/"

    def builder(file: str) -> SimpleNamespace:
        kind = type("Builder", (SimpleNamespace,), {"__module__": "datasets.packaged_modules.json.json"})
        return kind(config=SimpleNamespace(data_files={"train": [f"{base}train.jsonl", file]}))  # type: ignore[no-any-return]

    check_builder("it", builder(f"{base}more/x.jsonl"), base)
    for file in ("/etc/passwd", "hf://datasets/someone/else@main/x.jsonl", f"{base}../x.jsonl"):
        with pytest.raises(ConfigError, match="outside its repository"):
            check_builder("it", builder(file), base)


def test_find_sends_no_request_when_a_commit_is_named(data_hub: DataHub) -> None:
    assert HubSource.find(DATA_SET, "", "train", "text", COMMIT).commit == COMMIT
    assert data_hub.asked == []


def test_find_refuses_a_revision_that_the_hub_does_not_have(data_hub: DataHub) -> None:
    with pytest.raises(ConfigError, match="has no such revision on the hub"):
        HubSource.find(DATA_SET, "", "train", "text", "v9")


@pytest.mark.parametrize("key", ["revision", "tokenizer_revision"])
def test_load_takes_data_set_and_tokenizer_at_the_named_revisions(data_hub: DataHub, tmp_path: Path, key: str) -> None:
    run, local = replace(RUN, **{key: "v9"}), LocalData(cache=tmp_path / "cache")
    with pytest.raises(ConfigError, match="has no such revision on the hub"):
        load_corpus(run, seed=0, vocab_size=257, local=local)


def test_tokenizer_is_downloaded_at_the_signed_commit(data_hub: DataHub) -> None:
    TokenizerFiles.find(TOKENIZER, None, COMMIT)
    assert not any("/revision/main" in path for path in data_hub.asked)


def test_find_gives_another_source_when_the_commit_changes(data_hub: DataHub) -> None:
    source = HubSource.find(DATA_SET, "", "train", "text")
    assert source.commit == COMMIT
    assert COMMIT in source.key


def test_find_refuses_a_data_set_that_the_hub_does_not_have(data_hub: DataHub) -> None:
    with pytest.raises(ConfigError, match="hub does not have the data set someone/else"):
        HubSource.find("someone/else", "", "train", "text")
    with pytest.raises(ConfigError, match="hub does not have the tokenizer someone/else"):
        bring_tokenizer("someone/else", TOKENIZER_FILES)


def test_find_names_a_remedy_when_the_hub_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        point_to(f"http://127.0.0.1:{unused.getsockname()[1]}", tmp_path, monkeypatch)
        for find in (
            lambda: HubSource.find(DATA_SET, "", "train", "text"),
            lambda: bring_tokenizer(TOKENIZER, TOKENIZER_FILES),
        ):
            with pytest.raises(ConfigError, match="cannot be downloaded from the hub") as caught:
                find()
            assert "check the connection" in caught.value.remedy


def test_cache_that_cannot_be_written_is_named_with_the_reason(data_hub: DataHub, tmp_path: Path) -> None:
    (tmp_path / "hf").touch()
    with pytest.raises(ConfigError, match=rf"cannot keep .* in {tmp_path}/hf.*: not a directory") as caught:
        bring_tokenizer(TOKENIZER, TOKENIZER_FILES)
    assert "HF_HOME" in caught.value.remedy


def test_find_gives_up_when_the_hub_accepts_and_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        point_to(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path, monkeypatch)
        with pytest.raises(ConfigError, match="cannot be downloaded from the hub"):
            HubSource.find(DATA_SET, "", "train", "text")


def test_bring_gives_up_when_the_hub_falls_silent_during_a_download(
    data_hub: DataHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is six times the library's timeout of ten seconds. Data sets are downloaded by the same call."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.05)
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda _: None))
    data_hub.falls_silent = True
    with pytest.raises(ConfigError, match=r"the tokenizer .* cannot be downloaded from the hub: timed out"):
        bring_tokenizer(TOKENIZER, TOKENIZER_FILES)
    assert data_hub.fell_silent.wait(60.0)


def test_tokenizer_that_was_downloaded_is_used_when_the_hub_cannot_be_reached(
    data_hub: DataHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = TokenizerFiles.find(TOKENIZER, None)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert TokenizerFiles.find(TOKENIZER, None) == before


def test_passages_name_the_extra_when_the_datasets_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    source = HubSource(hub_id=DATA_SET, split="train", text_key="text", commit=COMMIT)
    with pytest.raises(ConfigError) as caught:
        next(source.passages())
    assert "swarm-node[data]" in caught.value.remedy


@pytest.mark.parametrize("version", ["2.14.5", "5.1.9"])
def test_passages_refuse_an_old_datasets_library_before_any_request(
    data_hub: DataHub, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """Old versions run code of the repository."""
    monkeypatch.setattr("datasets.__version__", version)
    source = HubSource(hub_id=DATA_SET, split="train", text_key="text", commit=COMMIT)
    with pytest.raises(ConfigError, match=f"version {version}, older than 5.2") as caught:
        next(source.passages())
    assert "swarm-node[data]" in caught.value.remedy
    assert not data_hub.asked


def test_oldest_accepted_datasets_library_is_the_one_that_the_extra_requires() -> None:
    oldest = ".".join(map(str, OLDEST_LIBRARY))
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
    assert f"datasets>={oldest}" in project["optional-dependencies"]["data"]
    for version in (f"{oldest}.0", f"{oldest}rc1", "10.0"):
        check_library(version)
