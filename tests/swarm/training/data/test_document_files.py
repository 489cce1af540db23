"""Tests how a member's own files become documents, and which damaged files are refused."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import feather, ipc, parquet
from swarm.training.data import document_files
from swarm.training.data.document_files import FileSource
from swarm.training.data.source import PASSAGE_LENGTH
from swarm_protocol.errors import ConfigError, IntegrityError

STORIES = ["Es war einmal ein König.\n", "", "Öl und Wasser\nmischen sich nicht", "drei\r\n"]


def documents(root: Path, text_key: str = "text") -> list[str]:
    found, pieces = [], []
    for passage in FileSource.find(root, text_key).passages():
        pieces.append(passage.text)
        if passage.ends:
            found.append("".join(pieces))
            pieces = []
    assert not pieces
    return found


def write_parquet(path: Path, column: str = "text", values: object = STORIES) -> None:
    parquet.write_table(pa.table({"id": [0, 1, 2, 3], column: values}), path)


def write_stream(path: Path) -> None:
    table = pa.table({"text": STORIES})
    with pa.OSFile(str(path), "wb") as file, ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


def write_lines(path: Path) -> None:
    path.write_text("\n\n".join(json.dumps({"text": story, "id": 1}) for story in STORIES))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", write_lines),
        ("a.parquet", write_parquet),
        ("a.ARROW", write_stream),
        ("a.feather", lambda path: feather.write_feather(pa.table({"text": STORIES}), path)),
    ],
)
def test_passages_are_the_rows_of_each_kind_of_file(tmp_path: Path, name: str, write: Callable[[Path], None]) -> None:
    write(tmp_path / name)
    assert documents(tmp_path / name) == STORIES


def test_passages_of_a_folder_come_in_order_of_names_with_their_progress(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/README", ".git/config", "a/.hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"this is {name}")
    (tmp_path / "link.txt").symlink_to(tmp_path / "b.txt")
    (tmp_path / "empty.txt").touch()
    os.mkfifo(tmp_path / "pipe")
    assert documents(tmp_path) == ["this is a/README", "this is a/z.md", "this is b.txt"]
    shares = [passage.share for passage in FileSource.find(tmp_path, "text").passages()]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


@pytest.mark.parametrize("line", ["ein Satz über Bäume\n", "ohne Zeilenende ü"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_passages_of_a_long_document_are_cut_and_lose_nothing(tmp_path: Path, line: str, name: str) -> None:
    text = line * (5 * PASSAGE_LENGTH // len(line))
    (tmp_path / name).write_text(text if name == "a.txt" else json.dumps({"text": text}))
    passages = list(FileSource.find(tmp_path, "text").passages())
    assert len(passages) > 2
    assert "".join(each.text for each in passages) == text
    assert [each.ends for each in passages] == [False] * (len(passages) - 1) + [True]
    assert max(len(each.text) for each in passages) <= 2 * PASSAGE_LENGTH
    if line.endswith("\n"):
        assert all(each.text.endswith("\n") for each in passages[:-1])


@pytest.mark.parametrize(
    ("data", "byte"),
    [(b"gr\xfc\xdfe", 2), (b"a" * PASSAGE_LENGTH + b"\n" + b"bc\xff", PASSAGE_LENGTH + 3), (b"abc\xc3", 3)],
)
def test_passages_refuse_text_that_is_not_utf8_and_name_the_byte(tmp_path: Path, data: bytes, byte: int) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(ConfigError, match=rf"a.txt is not UTF-8 text: byte {byte} is"):
        documents(tmp_path)


def test_passages_name_the_right_byte_when_a_bad_one_follows_a_cut_character(tmp_path: Path) -> None:
    # without a line end, the block of twice the length ends in the middle of the second "ü"
    data = b"a" * (2 * PASSAGE_LENGTH - 1) + "ü".encode() + b"x\xff"
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(ConfigError, match=rf"byte {len(data) - 1} is"):
        documents(tmp_path)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"text": "x"', "line 2 of .*a.jsonl is not JSON"),
        (b"\xff\xfe{", "line 2 of .*a.jsonl is not JSON"),
        (b"[" * 100_000, "line 2 of .*a.jsonl is not JSON"),
        (b'{"body": "x"}', "line 2 of .*a.jsonl has no text under 'text'"),
        (b'{"text": 3}', "line 2 of .*a.jsonl has no text under 'text'"),
        (b'["text"]', "line 2 of .*a.jsonl has no text under 'text'"),
        (b'{"text": "\\ud800"}', "line 2 of .*a.jsonl holds half of a character"),
        (b'{"text": "' + b"x" * 2000 + b'"}', "line 2 of .*a.jsonl is over 1000 bytes"),
    ],
)
def test_passages_refuse_a_bad_line_of_json_and_name_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, told: str
) -> None:
    if len(line) < 10_000:
        monkeypatch.setattr(document_files, "MAX_LINE_BYTES", 1000)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(ConfigError, match=told):
        documents(tmp_path)


def test_passages_refuse_a_table_without_the_column_and_name_its_columns(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", column="body")
    write_stream(tmp_path / "b.arrow")
    with pytest.raises(ConfigError, match=r"a.parquet has no column 'text': it has id, body"):
        documents(tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"b.arrow has no column 'body': it has text"):
        documents(tmp_path / "b.arrow", "body")
    assert documents(tmp_path / "a.parquet", "body") == STORIES


def test_passages_refuse_a_column_of_numbers_and_skip_empty_rows(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", values=[1, 2, 3, 4])
    with pytest.raises(ConfigError, match=r"column 'text' of .*a.parquet is int64, not text"):
        documents(tmp_path)
    write_parquet(tmp_path / "a.parquet", values=["x", None, "y", None])
    assert documents(tmp_path) == ["x", "y"]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_passages_refuse_a_table_whose_text_is_not_utf8(tmp_path: Path, name: str) -> None:
    latin_1 = pa.array([b"fine", b"gr\xfc\xdfe"]).view(pa.string())
    table = pa.table({"text": latin_1})
    if name == "a.parquet":
        parquet.write_table(table, tmp_path / name)
    else:
        feather.write_feather(table, tmp_path / name, compression="uncompressed")
    with pytest.raises(ConfigError, match=rf"{name} holds text that is not UTF-8"):
        documents(tmp_path)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.feather"])
def test_passages_of_a_damaged_table_raise_integrity_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "a.parquet":
        write_parquet(path)
    else:
        (write_stream if name == "a.arrow" else lambda at: feather.write_feather(pa.table({"text": STORIES}), at))(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(IntegrityError, match=rf"{name} is damaged"):
        documents(tmp_path)


def test_passages_of_a_table_name_the_extra_when_pyarrow_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(tmp_path / "a.parquet")
    for name in [each for each in sys.modules if each.split(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError) as caught:
        documents(tmp_path)
    assert "swarm-node[data]" in caught.value.remedy


def test_find_refuses_a_path_with_nothing_to_read(tmp_path: Path) -> None:
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    for path, told in (
        (tmp_path, "there is no text in"),
        (tmp_path / "empty", "there is no text in"),
        (tmp_path / "gone", "gone cannot be read: No such file"),
        (tmp_path / "pipe", "pipe is neither a file nor a folder"),
    ):
        with pytest.raises(ConfigError, match=told):
            FileSource.find(path, "text")


def _remove(path: Path) -> None:
    path.unlink()


def _lock(path: Path) -> None:
    path.unlink()
    path.mkdir()  # a folder cannot be opened as a file, even by a superuser


def _shrink(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more\n")


def _rewrite(path: Path) -> None:
    before = path.stat()
    path.write_bytes(b"y" * before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (_remove, "b.txt cannot be read: No such file"),
        (_lock, "b.txt cannot be read: Is a directory"),
        (_shrink, "b.txt changed while it was read"),
        (_grow, "b.txt changed while it was read"),
        (_rewrite, "b.txt changed while it was read"),
    ],
)
def test_passages_name_a_file_that_was_damaged_before_it_was_opened(
    tmp_path: Path, harm: Callable[[Path], None], told: str
) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("x\n" * 100)
    passages = FileSource.find(tmp_path, "text").passages()
    next(passages)
    harm(tmp_path / "b.txt")
    with pytest.raises(IntegrityError, match=told):
        list(passages)


@pytest.mark.parametrize("harm", [_shrink, _grow, _rewrite])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.arrow"])
def test_passages_raise_an_error_and_no_signal_when_a_file_is_damaged_while_it_is_read(
    tmp_path: Path, harm: Callable[[Path], None], name: str
) -> None:
    path, texts = tmp_path / name, ["x" * 1000 + "\n"] * 3000
    match path.suffix:
        case ".txt":
            path.write_text("".join(texts))
        case ".jsonl":
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        case ".parquet":
            parquet.write_table(pa.table({"text": texts}), path, row_group_size=300)
        case _:
            table = pa.table({"text": texts})
            with pa.OSFile(str(path), "wb") as file, ipc.new_file(file, table.schema) as writer:
                writer.write_table(table, max_chunksize=300)
    passages = FileSource.find(tmp_path, "text").passages()
    next(passages)
    harm(path)
    with pytest.raises(IntegrityError, match=f"{name} changed while it was read"):
        list(passages)


def test_key_changes_when_names_sizes_or_times_change(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x\n" * 100)
    keys = [FileSource.find(tmp_path, "text").key, FileSource.find(tmp_path, "text").key]
    assert keys[0] == keys[1]
    for harm in (_shrink, _rewrite, lambda at: at.rename(at.with_name("b.txt"))):
        harm(path)
        keys.append(FileSource.find(tmp_path, "text").key)
    keys.append(FileSource.find(tmp_path, "body").key)
    assert len(set(keys)) == 5
