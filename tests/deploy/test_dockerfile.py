"""The image's recipe: pinned, with no build tools in what ships, run by nobody special, and fed only what it needs."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib

import pytest
from support.deploy_commands import DEPLOY, ROOT, text
from support.node_settings import resolve

DOCKERFILE = re.sub(r"^#.*\n", "", text("Dockerfile"), flags=re.MULTILINE).replace("\\\n", " ")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def stages() -> dict[str, tuple[str, str]]:
    """By name: the stage or image that it starts from, and its instructions."""
    parts = re.findall(r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM|\Z)", DOCKERFILE, flags=re.MULTILINE | re.DOTALL)
    return {name: (source, body) for source, name, body in parts}


def shipped(target: str) -> str:
    """All that is done in the stages that `target` consists of."""
    source, body = stages()[target]
    return (shipped(source) if source in stages() else "") + body


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_image_has_no_build_tools_and_is_run_by_nobody_special(target: str) -> None:
    done = shipped(target)
    assert not re.search(r"\bgcc\b|\bpip\b|build-essential|\bmake\b|\bgit\b", done)
    assert re.findall(r"^USER (.+)", done, re.MULTILINE) == ["10001:10001"]
    assert re.findall(r"^COPY (\S+) ", done, re.MULTILINE) == [f"--from=build-{target}"]
    assert done.count("HEALTHCHECK") == 1
    assert 'ENTRYPOINT ["tini"' in done


def test_default_image_is_the_one_for_cpus() -> None:
    assert stages()[list(stages())[-1]] == ("cpu", ""), "the last one, which is cpu's by another name"


def test_builders_that_go_through_all_stages_before_cpu_get_no_cuda() -> None:
    names = list(stages())
    assert [name for name in names[: names.index("cpu")] if "cuda" in name] == []


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_everything_that_is_installed_is_pinned(target: str) -> None:
    done = shipped(f"build-{target}")
    assert "PIP_CONSTRAINT=/source/constraints.txt" in done
    assert ("whl/cpu" in done) == (target == "cpu")
    assert ('--index-url "${TORCH_INDEX}" torch' in done) == (target == "cpu")
    [extras] = re.findall(r'pip install "\.\[([\w,]+)\]"', done)
    offered = PROJECT["project"]["optional-dependencies"]
    assert set(extras.split(",")) == set(offered) - {"dev"}
    pinned = {
        line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    needed = [*PROJECT["project"]["dependencies"], *(line for extra in extras.split(",") for line in offered[extra])]
    names = {re.split(r"[<>=;\[]", line)[0].strip().lower().replace("_", "-") for line in needed}
    assert names - pinned == set()


def test_python_is_one_that_the_package_takes() -> None:
    [minor] = re.findall(r"^ARG PYTHON=python:3\.(\d+)-slim", DOCKERFILE, re.MULTILINE)
    assert int(minor) >= int(PROJECT["project"]["requires-python"].removeprefix(">=3."))


def test_the_environment_of_the_image_is_understood() -> None:
    environment = dict(re.findall(r"\b(SWARM_\w+)=(\S+)", DOCKERFILE))
    assert str(resolve({}, env=environment).home) == "/var/lib/swarm"


def test_the_builder_gets_what_the_package_is_made_of_and_nothing_else() -> None:
    lines = [line for line in text("Dockerfile.dockerignore").splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    sent = {line[1:] for line in lines if line.startswith("!")}
    folders = {package.split("/")[0] for package in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    project = PROJECT["project"]
    files = {"pyproject.toml", "constraints.txt", project["readme"], *project["license-files"]}
    assert sent == folders | files | {"deploy/without-tests"}
    # the last matching line wins: a key within those folders stays here
    assert lines.index("**/*.key") > max(lines.index(f"!{name}") for name in sent)


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint")
    if not hadolint:
        pytest.skip("hadolint is not installed: the Dockerfile was checked by the tests beside this one alone")
    done = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "")
