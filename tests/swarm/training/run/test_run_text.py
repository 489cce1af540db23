"""The run file that people edit: every setting explained, and edits that leave their words alone."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping

import pytest
from swarm.training.run.run_config import ABOUT, DEFAULT_MODEL, RunConfig
from swarm.training.run.run_file import template, with_signature, with_value

CONFIG = RunConfig(name="story")
SIGNATURE = {"peer_id": "me", "issued_at": 7, "signature": "abc="}


def settings() -> set[str]:
    mapping = CONFIG.to_mapping() | {"aggregation": {}}  # each aggregator has its own
    inner = {f"{key}.{name}" for key, table in mapping.items() if isinstance(table, Mapping) for name in table}
    return set(mapping) | inner


def test_about_explains_every_setting_and_nothing_else() -> None:
    assert settings() == set(ABOUT)
    assert {f"model.{key}" for key in DEFAULT_MODEL} <= set(ABOUT)


def test_template_is_the_run_with_a_comment_above_each_setting() -> None:
    text = template(CONFIG, "story.toml")
    assert RunConfig.from_mapping(tomllib.loads(text)) == CONFIG
    lines = text.splitlines()
    bare = [line for before, line in zip(["", *lines], lines, strict=False) if "=" in line and line[0] not in "#["]
    unexplained = [line for line in bare if not lines[lines.index(line) - 1].startswith("# ")]
    assert (len(bare), unexplained) == (len(settings()) - 6, [])
    assert max(map(len, lines)) <= 110
    assert "Default: 40." in text


def test_template_has_only_those_parameters_of_the_aggregator_that_are_not_usual() -> None:
    config = RunConfig(name="story", aggregator="trimmed_mean", aggregation={"trim": 0.3})
    assert tomllib.loads(template(config, "story.toml"))["aggregation"] == {"trim": 0.3}
    assert tomllib.loads(template(CONFIG, "story.toml"))["aggregation"] == {}


def test_with_signature_keeps_comments_and_replaces_an_earlier_signature() -> None:
    text = "# mine\nname = 'x'  # a name\n[signature]  # old\n# kept\npeer_id = 'you'\n\n[data]\nsplit = 'train'\n"
    signed = with_signature(text, SIGNATURE)
    assert tomllib.loads(signed) == {"name": "x", "data": {"split": "train"}, "signature": SIGNATURE}
    assert [line for line in ("# mine", "# a name", "# kept") if line not in signed] == []
    assert with_signature(signed, SIGNATURE) == signed


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("[data]\ndigest = ''  # pinned\nsplit = 'a'\n", "[data]\ndigest = \"d\"  # pinned\nsplit = 'a'\n"),
        ("[data]\nsplit = 'a'\n[inner]\n", "[data]\ndigest = \"d\"\nsplit = 'a'\n[inner]\n"),
        ("name = 'x'\n", "name = 'x'\n\n[data]\ndigest = \"d\"\n"),
    ],
    ids=["there", "missing", "no table"],
)
def test_with_value_changes_one_line(text: str, outcome: str) -> None:
    assert with_value(text, "data", "digest", "d") == outcome


def test_template_of_every_name_is_read_back() -> None:
    for name in ("a", "my-run.2", "x" * 64):
        assert re.search(f'^name = "{re.escape(name)}"$', template(RunConfig(name=name), "p"), re.M)
