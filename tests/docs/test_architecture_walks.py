"""The walks of the architecture page: each hop's functions are in its file, and no walk takes too many files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.site_pages import ROOT, written

PAGE = written("explanation")["explanation/architecture.md"]
WALKS = dict(re.findall(r"^### (.+)\n\n((?:(?!^##).*\n)+)", PAGE, flags=re.MULTILINE))
HOP = re.compile(r"^ *(?:\d+\.|-) `([\w/]+\.py)`, (.*?)(?=^ *(?:\d+\.|-) `|\n\n|\Z)", flags=re.MULTILINE | re.DOTALL)
LOST = {"A server dies in mid-answer", "An int8 slice is reduced", "A step is committed"}
"""The three behaviours in which readers lost the way: six files each; all others five."""


def hops(walk: str) -> list[tuple[str, str]]:
    return HOP.findall(WALKS[walk])


def file_of(path: str) -> Path:
    found = [each for each in (ROOT / "swarm" / "swarm").rglob(Path(path).name) if each.as_posix().endswith(f"/{path}")]
    found += [ROOT / path] if (ROOT / path).is_file() else []
    assert len(found) == 1, f"{path} names {len(found)} files"
    return found[0]


def test_walks_are_those_of_the_eight_behaviours() -> None:
    assert len(WALKS) == 8
    assert set(WALKS) >= LOST


@pytest.mark.parametrize("walk", WALKS)
def test_walk_names_functions_that_are_in_its_files(walk: str) -> None:
    assert len(hops(walk)) >= 3
    for path, text in hops(walk):
        code, (where, *_) = file_of(path).read_text("utf-8"), text.partition(": ")
        names = re.findall(r"`(_?\w+(?:\.\w+)?)`", where)
        assert names, f"no function is named at {path}"
        for name in names:
            owner, _, method = name.rpartition(".")
            assert re.search(rf"^ *(?:async def|def|class) {method}\b", code, flags=re.MULTILINE), f"{name} in {path}"
            assert not owner or re.search(rf"^class {owner}\b", code, flags=re.MULTILINE), f"{owner} in {path}"


@pytest.mark.parametrize("walk", WALKS)
def test_walk_takes_few_files(walk: str) -> None:
    numbers = [int(number) for number in re.findall(r"^(\d+)\. `", WALKS[walk], flags=re.MULTILINE)]
    files = {path for path, _ in hops(walk)}
    assert numbers == list(range(1, len(files) + 1))
    assert len(files) <= (6 if walk in LOST else 5)
