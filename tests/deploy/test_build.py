"""The script that builds an image without Docker: what it would run, and what it refuses. No image is built here."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from support.deploy_commands import DEPLOY, text

SCRIPT = DEPLOY / "build"
WITHOUT_TESTS = DEPLOY / "without-tests"


def build(*words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Build as where neither buildah nor debootstrap is installed."""
    return subprocess.run(
        ["/bin/bash", SCRIPT, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={"PATH": "/usr/bin:/bin"},
        cwd=cwd,
    )


def planned(*words: str | Path, cwd: Path | None = None) -> list[list[str]]:
    """The commands of a dry run."""
    done = build("--dry-run", *words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line.removeprefix("+ ")) for line in done.stdout.splitlines() if line.startswith("+ ")]


def build_arguments(commands: list[list[str]]) -> dict[str, str]:
    [command] = [each for each in commands if each[:2] == ["buildah", "build"]]
    values = [command[at + 1] for at, word in enumerate(command) if word == "--build-arg"]
    return dict(value.split("=", 1) for value in values)


def test_a_dry_run_builds_the_cpu_image_and_runs_the_demo_in_it_as_its_user() -> None:
    commands = planned()
    assert [each[:2] for each in commands] == [["buildah", "build"], ["buildah", "from"], ["buildah", "run"]]
    built, _, ran = commands
    assert built[-1] == "."
    for option, value in (
        ("--isolation", "chroot"),
        ("--file", "deploy/Dockerfile"),
        ("--ignorefile", "deploy/Dockerfile.dockerignore"),
        ("--target", "cpu"),
        ("--tag", "localhost/swarm-node:cpu"),
    ):
        assert built[built.index(option) + 1] == value
    assert build_arguments(commands) == {}
    assert ran[-2:] == ["swarm-node", "demo"]
    assert "--user" not in ran, "the image's own, which tests/deploy/test_dockerfile.py holds"
    assert [each[1] for each in planned("--no-demo")] == ["build", "from"]


def test_a_base_can_be_made_of_debian_s_packages() -> None:
    commands = planned("--base", "debootstrap", "--mirror", "http://mirror.example.org/debian")
    first = commands[0]
    assert first[0] == "debootstrap"
    assert first[-1] == "http://mirror.example.org/debian"
    base = next(each[-1] for each in commands if each[:2] == ["buildah", "commit"])
    assert build_arguments(commands)["PYTHON"] == base
    assert build_arguments(planned("--base", "registry.example.org/python"))["PYTHON"] == "registry.example.org/python"


def test_torch_comes_from_an_index_or_from_a_directory_of_wheels(tmp_path: Path) -> None:
    assert build_arguments(planned("--torch", "https://example.org/whl"))["TORCH_INDEX"] == "https://example.org/whl"
    (tmp_path / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl").write_bytes(b"")
    commands = planned("--torch", tmp_path)
    assert build_arguments(commands)["TORCH_INDEX"] == "file:///torch-index"
    [built] = [each for each in commands if each[:2] == ["buildah", "build"]]
    assert built[built.index("--volume") + 1].endswith("/index:/torch-index:ro")


def test_files_are_those_of_the_directory_that_it_is_called_in(tmp_path: Path) -> None:
    (tmp_path / "own.pem").write_text("certificates")
    (tmp_path / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl").write_bytes(b"")
    [built] = [
        each for each in planned("--ca", "own.pem", "--torch", ".", cwd=tmp_path) if each[:2] == ["buildah", "build"]
    ]
    assert f"{tmp_path}/own.pem:/etc/ssl/certs/ca-certificates.crt:ro" in built
    assert 'torch=$(realpath "$torch")' in text("build"), "a dry run copies no wheel"


def test_every_argument_that_is_passed_is_one_of_the_dockerfile() -> None:
    passed = set(re.findall(r'--build-arg "?(\w+)=', text("build")))
    assert passed == {"PYTHON", "TORCH_INDEX"}
    assert passed <= set(re.findall(r"^ARG (\w+)=", text("Dockerfile"), re.MULTILINE))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--target", "tpu"], "--target is cpu or cuda, not tpu"),
        (["--tag"], "--tag needs a value"),
        (["--colour", "red"], "there is no option --colour"),
        (["--torch", "/nonexistent"], "neither a URL nor a directory with torch's wheel"),
        (["--torch", "https://example.org", "--target", "cuda"], "--torch is for the cpu image"),
        (["--ca", "/nonexistent"], "there is no readable file /nonexistent"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(words: list[str], why: str) -> None:
    done = build("--dry-run", *words)
    assert done.returncode == 2
    assert why in done.stderr.splitlines()[-1]
    assert "+ " not in done.stdout


def test_without_buildah_it_says_what_to_install(tmp_path: Path) -> None:
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    done = subprocess.run(
        ["/bin/bash", SCRIPT], capture_output=True, text=True, check=False, timeout=120, env={"PATH": str(tmp_path)}
    )
    assert (done.returncode, done.stderr) == (2, "deploy/build: there is no buildah: apt-get install buildah\n")


BUILDAH = """\
#!/bin/bash
case $1 in mount) echo {root} ;; esac
echo "$@" >> {told}
"""


@pytest.mark.parametrize(("num_bytes", "code"), [(1_900_000_000, 0), (2_000_000_000, 2)])
def test_a_cpu_image_of_two_gigabytes_or_more_fails_before_the_demo(tmp_path: Path, num_bytes: int, code: int) -> None:
    """A buildah that builds nothing, and an image of one file without contents."""
    root, told, programs = tmp_path / "root", tmp_path / "told", tmp_path / "bin"
    packages = root / "opt" / "swarm" / "lib" / "python3.11" / "site-packages"
    for folder in (packages, root / "usr" / "lib", programs):
        folder.mkdir(parents=True)
    with (packages / "libtorch_cpu.so").open("wb") as file:
        file.truncate(num_bytes)
    (programs / "buildah").write_text(BUILDAH.format(root=root, told=told))
    (programs / "buildah").chmod(0o755)
    done = subprocess.run(
        ["/bin/bash", SCRIPT],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={"PATH": f"{programs}:/usr/bin:/bin"},
    )
    assert done.returncode == code, done.stderr
    assert ("at most 2000000000 are allowed" in done.stderr) == bool(code)
    ran = [line.split()[0] for line in told.read_text().splitlines()]
    assert ran == ["build", "from", "mount", *([] if code else ["run"]), "rm"]


@pytest.mark.parametrize("script", [SCRIPT, WITHOUT_TESTS], ids=lambda script: script.name)
def test_the_scripts_can_be_run_and_shellcheck_finds_nothing(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["/bin/bash", "-n", script], check=True, timeout=10)
    shellcheck = shutil.which("shellcheck")
    if not shellcheck:
        pytest.skip("shellcheck is not installed: a shell has parsed the script, no more")
    done = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "")


def test_only_tests_are_removed_from_an_environment(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    kept = ["pandas/testing/tools.py", "torch/bin/torch_shm_manager", "torch/latest.py"]
    removed = ["pandas/tests/io/test_csv.py", "torch/test/Dict_test", "torch/bin/test_api", "torch/bin/FileStoreTest"]
    for name in kept + removed:
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).touch()
    subprocess.run([WITHOUT_TESTS, tmp_path], check=True, timeout=10)
    assert sorted(str(path.relative_to(packages)) for path in packages.rglob("*") if path.is_file()) == kept
