"""Files are written completely or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from swarm.whole_files import write_whole


def failing() -> Iterator[bytes]:
    yield b"half"
    raise OSError("the disk is full")


def test_file_is_replaced_and_flushed_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = list[str]()
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: flushed.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
    )
    for pieces in ((b"one",), (b"an", b"other")):
        write_whole(tmp_path / "file", pieces, is_flushed=True)
    assert (tmp_path / "file").read_bytes() == b"another"
    assert flushed == [str(tmp_path / ".file.partial"), str(tmp_path)] * 2


def test_file_stays_and_nothing_is_left_beside_it_when_writing_fails(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", (b"one",))
    with pytest.raises(OSError, match="the disk is full"):
        write_whole(tmp_path / "file", failing())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"one"
