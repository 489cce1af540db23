"""The walks of the architecture page: each function that a step names is in its file, and no walk names too
many files.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.site_pages import ROOT, written

PAGE = written("explanation")["explanation/architecture.md"]
WALKS = dict(re.findall(r"^### (.+)\n\n((?:(?!^##).*\n)+)", PAGE, flags=re.MULTILINE))
HOP = re.compile(r"^ *(?:\d+\.|-) `([\w/]+\.py)`, (.*?)(?=^ *(?:\d+\.|-) `|\n\n|\Z)", flags=re.MULTILINE | re.DOTALL)
NUM_FILES = {
    "A server dies in mid-answer": 6,
    "An int8 slice is reduced": 6,
    "A step is committed": 6,
    "A newcomer is admitted and counts": 7,
    "Evidence travels, and bans": 6,
}
"""How many files these walks may take; the others five. More means that the code has taken a detour."""


def hops(walk: str) -> list[tuple[str, str]]:
    return HOP.findall(WALKS[walk])


def file_of(path: str) -> Path:
    packages = [ROOT / each for each in ("swarm", "node", "protocol", "compression")]
    named = [each for package in packages for each in package.rglob(Path(path).name)]
    found = [each for each in named if each.as_posix().endswith(f"/{path}")]
    assert len(found) == 1, f"{path} names {len(found)} files"
    return found[0]


def assert_is_in(name: str, path: str) -> None:
    code = file_of(path).read_text("utf-8")
    owner, _, method = name.rpartition(".")
    assert re.search(rf"^ *(?:async def|def|class) {method}\b", code, flags=re.MULTILINE), f"{name} in {path}"
    assert not owner or re.search(rf"^class {owner}\b", code, flags=re.MULTILINE), f"{owner} in {path}"


def test_number_of_walks_equals_that_in_the_headline() -> None:
    assert len(WALKS) == 11
    assert "## Eleven behaviours, step by step" in PAGE
    assert "eleven behaviours followed" in written("explanation")["explanation/index.md"]
    assert set(WALKS) > set(NUM_FILES)


@pytest.mark.parametrize("walk", WALKS)
def test_functions_that_a_walk_names_are_in_its_files(walk: str) -> None:
    assert len(hops(walk)) >= 3
    for path, text in hops(walk):
        where, *_ = text.partition(": ")
        names = re.findall(r"`(_?\w+(?:\.\w+)?)`", where)
        assert names, f"no function is named at {path}"
        for name in names:
            assert_is_in(name, path)


@pytest.mark.parametrize("walk", WALKS)
def test_walk_numbers_each_file_that_its_steps_name_and_has_few_files(walk: str) -> None:
    numbers = [int(number) for number in re.findall(r"^(\d+)\. `", WALKS[walk], flags=re.MULTILINE)]
    files = {path for path, _ in hops(walk)}
    assert numbers == list(range(1, len(files) + 1))
    named = {path for _, text in hops(walk) for path in re.findall(r"`([\w/]+\.py)`", text)}
    assert not named - files, "a file that a step names must be counted, too"
    assert len(files) <= NUM_FILES.get(walk, 5)


def test_names_in_the_text_between_steps_are_in_the_named_files() -> None:
    told = re.findall(r"`(_?\w+(?:\.\w+)?)` in\s+`([\w/]+\.py)`", PAGE)
    assert len(told) > 30
    for name, path in told:
        assert_is_in(name, path)
