"""The wheel has everything that an installed package needs beside its modules.

Hatchling includes all files that git does not ignore. No wheel is built here, since that needs the network.
"""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest
from swarm_node.dashboard import pages

ROOT = Path(__file__).parents[2]
WHEEL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
DASHBOARD = Path(pages.__file__).parent


def test_wheel_includes_whole_packages_without_exceptions() -> None:
    assert set(WHEEL) == {"packages"}, "a pattern that leaves files out has to be checked against what is needed"
    for package in WHEEL["packages"]:
        assert (ROOT / package / "py.typed").is_file()


@pytest.mark.parametrize("folder", [DASHBOARD / "static", DASHBOARD / "templates"])
def test_files_read_at_run_time_are_in_a_package_and_not_ignored(folder: Path) -> None:
    files = [file for file in folder.iterdir() if file.is_file()]
    assert files
    assert any(folder.is_relative_to(ROOT / package) for package in WHEEL["packages"])
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: what git ignores is not known")
    asked = ["git", "check-ignore", "--no-index", *map(str, files)]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, ""), "hatchling leaves out what git ignores"


def test_each_static_file_has_a_media_type_and_is_served() -> None:
    assert set(pages.static_files()) == {file.name for file in (DASHBOARD / "static").iterdir()}


def test_each_named_template_exists() -> None:
    environment = pages._environment()
    for name in environment.list_templates():
        environment.get_template(name)
    assert {"base.html", "overview.html", "missing.html"} <= set(environment.list_templates())
