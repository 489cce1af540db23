"""The output in the tutorials equals that of the program, except for keys, digests and times."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from swarm.simulation.report import Measurements, Report, report_of
from swarm.simulation.scenario import Scenario
from swarm_node import cli
from swarm_node.commands import simulate

RESEARCHER = Path(__file__).parents[2] / "docs" / "tutorials" / "researcher.md"
VARYING = ((r"12D3KooW\S+?(?=,)", "PEER"), (r"\b[0-9a-f]{12}\b", "DIGEST"), (r"[-\d]{10} [:\d]{8} UTC", "TIME"))


def steady(text: str) -> list[str]:
    for pattern, name in VARYING:
        text = re.sub(pattern, name, text)
    return text.strip().splitlines()


def test_researcher_s_tutorial_shows_what_signing_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = RESEARCHER.read_text(encoding="utf-8")
    (changes,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    shown = next(block for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL) if block.startswith("run "))
    assert cli.run(["run", "init", "lesson.toml"]) == 0
    text = Path("lesson.toml").read_text(encoding="utf-8")
    for line in changes.splitlines():
        text = re.sub(rf"^{line.partition(' =')[0]} = .*", line, text, count=1, flags=re.MULTILINE)
    Path("lesson.toml").write_text(text, encoding="utf-8")
    assert cli.run(["identity", "--new", "--home", "researcher"]) == 0
    capsys.readouterr()
    assert cli.run(["run", "sign", "lesson.toml", "--home", "researcher"]) == 0
    assert steady(capsys.readouterr().out) == steady(shown)


def test_readme_is_short_signs_with_the_tutorial_s_home_and_says_what_plan_reads() -> None:
    root = Path(__file__).parents[2]
    readme, guide = ((root / name).read_text(encoding="utf-8") for name in ("README.md", "docs/guides/serve.md"))
    assert len(readme.split()) <= 900
    signs = re.compile(r"^swarm-node (identity --new|run sign) (?:\S+\.toml )?--home (\S+)", re.MULTILINE)
    assert len(signs.findall(readme)) == 2
    assert signs.findall(readme) == signs.findall(RESEARCHER.read_text(encoding="utf-8"))
    assert "[`nodes.toml`](docs/guides/serve.md#plan-before-anyone-joins)" in readme
    assert "\n## Plan before anyone joins\n" in guide


def test_scenarios_of_the_guide_can_be_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are read and checked. To simulate the first takes 11 s, and the second more than a minute."""
    page = (Path(__file__).parents[2] / "docs" / "guides" / "simulate.md").read_text(encoding="utf-8")
    asked = list[Scenario]()

    def simulated(scenario: Scenario, **_options: object) -> Report:
        asked.append(scenario)
        return report_of(scenario, Measurements())

    monkeypatch.setattr(simulate, "simulate", simulated)
    for number, block in enumerate(re.findall(r"```toml\n(.*?)```", page, re.DOTALL)):
        path = tmp_path / f"{number}.toml"
        path.write_text(block, encoding="utf-8")
        assert cli.run(["simulate", str(path), "--out", str(tmp_path / "report")]) == 0
    assert [(each.nodes, each.minutes) for each in asked] == [(30, 20), (300, 30)]
