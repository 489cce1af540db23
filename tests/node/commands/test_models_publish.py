"""`swarm-node models publish` and `models verify` on directories and on a hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.local_hub import MODEL, local_hub
from support.published_models import flip_a_byte
from support.tiny_models import FAMILIES, write_model
from swarm.serving.model.model_files import load_manifest
from swarm.serving.model.shape import MANIFEST_FILE
from swarm_node import cli
from swarm_node.commands import models
from swarm_protocol.identity import Identity


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    capsys.readouterr()
    code = cli.run(["models", *map(str, arguments)])
    err = capsys.readouterr().err
    assert err.startswith(("loading torch", "error: ")), "a command that takes seconds says so"
    return code, err


@pytest.fixture
def home(tmp_path: Path) -> Path:
    Identity.generate().save(tmp_path / "home" / "identity.key")
    return tmp_path / "home"


@pytest.fixture
def story(tmp_path: Path) -> Path:
    return write_model(tmp_path / "story", FAMILIES["llama"]())


def test_published_directory_is_verified_until_a_byte_of_it_changes(
    home: Path, story: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = story.parent / "story.manifest"
    assert run(capsys, "publish", story, "--home", home, "--name", "our-story", "--out", copy)[0] == 0
    published = load_manifest(copy)
    assert (story / MANIFEST_FILE).read_bytes() == copy.read_bytes()
    assert published.manifest.name == "our-story"
    assert published.publisher == Identity.load(home / "identity.key").peer_id
    code, err = run(capsys, "verify", story, "--manifest", copy)
    assert (code, f"{story} is our-story as {published.publisher} published it" in err) == (0, True)
    shard = published.manifest.weights[2].name
    flip_a_byte(story / shard)
    code, err = run(capsys, "verify", story)
    assert (code, f"{shard} is not the file in the manifest of our-story" in err) == (1, True)


def test_publish_without_a_key_or_over_another_s_manifest_is_refused(
    home: Path, story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = run(capsys, "publish", story, "--home", tmp_path / "empty")
    assert (code, "there is no identity in" in err) == (1, True)
    assert run(capsys, "publish", story, "--home", home)[0] == 0
    Identity.generate().save(tmp_path / "other.key")
    code, err = run(capsys, "publish", story, "--home", home, "--identity", tmp_path / "other.key")
    assert (code, f"already has a manifest, which {Identity.load(home / 'identity.key').peer_id} signed" in err) == (
        1,
        True,
    )
    code, err = run(capsys, "publish", story, "--home", home, "--name", "again")
    assert (code, "again is published, in place of story, by 12D3KooW" in err) == (0, True)


def test_publish_leaves_the_manifest_unchanged_when_it_cannot_write_its_copy(
    home: Path, story: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(capsys, "publish", story, "--home", home)
    kept = (story / MANIFEST_FILE).read_bytes()
    for out, said in ((home, "exists already"), (home / "none" / "copy", "there is no directory")):
        code, err = run(capsys, "publish", story, "--home", home, "--name", "other", "--out", out)
        assert (code, said in err) == (1, True)
    monkeypatch.setattr(models, "check_new_file", lambda _path: None)  # as on a disk that becomes full only then
    code, err = run(capsys, "publish", story, "--home", home, "--name", "other", "--out", home)
    assert (code, f"cannot write {home}: is a directory" in err) == (1, True)
    assert (story / MANIFEST_FILE).read_bytes() == kept


def test_publishing_the_same_files_again_keeps_the_manifest_and_says_so(
    home: Path, story: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "story is published by 12D3KooW" in run(capsys, "publish", story, "--home", home)[1]
    kept = (story / MANIFEST_FILE).read_bytes()
    monkeypatch.setattr(models.time, "time", lambda: 4e9)
    copy = story.parent / "copy"
    code, err = run(capsys, "publish", story, "--home", home, "--out", copy)
    assert (code, "story is already published, with the same files, by 12D3KooW" in err) == (0, True)
    assert (story / MANIFEST_FILE).read_bytes() == copy.read_bytes() == kept
    as_other = ("publish", story, "--home", home, "--name", "other")
    assert "other is published, in place of story, by" in run(capsys, *as_other)[1]
    renamed = (story / MANIFEST_FILE).read_bytes()
    (story / "chat_template.jinja").write_text("{{ messages }}")
    assert "other is published by" in run(capsys, *as_other)[1]
    assert len({kept, renamed, (story / MANIFEST_FILE).read_bytes()}) == 3


def test_invalid_name_or_place_is_refused_before_any_file_is_read(
    home: Path, story: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = run(capsys, "publish", story, "--home", home, "--name", "long " * 10_000)
    assert (code, "--name: a model cannot be published as" in err, len(err) < 500) == (2, True, True)
    code, err = run(capsys, "publish", story, "--home", home, "--out", story / ".." / "story" / MANIFEST_FILE)
    assert (code, f"{MANIFEST_FILE} in the model's directory is always written" in err) == (2, True)
    assert not (story / MANIFEST_FILE).exists()


def test_verify_without_a_manifest_or_a_model_says_what_is_missing(
    story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        ((), "DIR is missing"),
        ((tmp_path / "none",), "is not a Hugging Face model directory"),
        ((story,), f"there is no {MANIFEST_FILE} in {story}"),
        ((story, "--manifest", tmp_path / "none"), "cannot be read"),
        ((story, "--manifest", story / "config.json"), "is not a signed manifest"),
    ):
        code, err = run(capsys, "verify", *arguments)
        assert (code, message in err) == (1 if arguments else 2, True), err
        assert ("loading torch" in err) == ("--manifest" in arguments), "what is missing is said at once"
        assert "message version" not in err


def test_model_of_a_hub_is_downloaded_whole_and_names_its_commit(
    home: Path, story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_hub(story, tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        out = tmp_path / "hub.manifest"
        code, err = run(capsys, "publish", MODEL, "--home", home, "--out", out, "--json")
    assert code == 0, err
    manifest = load_manifest(out).manifest
    assert manifest.name == MODEL.split("/")[1]
    assert manifest.origin.startswith(f"{MODEL}@")
    published = load_manifest(out)
    capsys.readouterr()
    assert cli.run(["models", "verify", str(story), "--manifest", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["event"], found["digest"]) == ("verified", published.digest.hex())
