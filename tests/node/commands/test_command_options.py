"""Shell completion in a real bash, which sources the script and asks for the next words."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from swarm_node import cli
from swarm_node.commands.command_options import models, run_files

FOLDER = Path(sys.executable).parent
BASH = shutil.which("bash") or ""
ASK = """
source {script}
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_swarm_node_completion swarm-node
printf '%s\\n' "${{COMPREPLY[@]}}"
complete -p swarm-node
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the script that bash sources."""
    folder = tmp_path_factory.mktemp("completion")
    # with a second command, bash stays its parent: a program whose parent is no shell gets no script
    command = [BASH, "--norc", "--noprofile", "-c", "swarm-node --show-completion; exit $?"]
    shown = subprocess.run(command, env=shell_environment(folder), capture_output=True, timeout=120, check=True)
    (folder / "swarm-node.bash").write_bytes(shown.stdout)
    return folder / "swarm-node.bash"


def shell_environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SWARM_", "_SWARM"))}
    return kept | {"PATH": f"{FOLDER}:{os.environ['PATH']}", "HOME": str(home), "SHELL": BASH}


@pytest.mark.skipif(not BASH, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("swarm-node run s", ["show", "sign"]),
        ("swarm-node join --max", ["--max-blocks", "--max-download", "--max-memory", "--max-upload"]),
    ],
)
def test_bash_completes_commands_and_options(words: str, expected: list[str], script: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [BASH, "--norc", "--noprofile", "-c", ASK.format(script=script, words=words)],
        env=shell_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    *found, registered = done.stdout.splitlines()
    assert sorted(found) == expected
    assert "-o default" in registered, "where nothing else fits, as for a run file, bash completes paths"
    assert done.stderr == ""


@pytest.mark.skipif(not BASH, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("swarm-node join --run books/", ["books/poems.toml"]),
        ("swarm-node plan --model '~/s'", ["~/small"]),
    ],
)
def test_bash_completes_run_files_and_models(words: str, expected: list[str], script: Path, tmp_path: Path) -> None:
    _fill(tmp_path)
    done = subprocess.run(
        [BASH, "--norc", "--noprofile", "-c", ASK.format(script=script, words=words)],
        env=shell_environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    *found, _registered = done.stdout.splitlines()
    assert sorted(filter(None, found)) == expected
    assert done.stderr == ""


def test_only_run_files_and_models_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fill(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert (run_files(""), run_files("n"), models("")) == (["story.toml"], [], ["small"])


def _fill(folder: Path) -> None:
    for path in ("story.toml", "notes.txt", "books/poems.toml", "small/config.json", "empty/model.bin"):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).touch()
    (folder / "folder.toml").mkdir()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_there_for_each_shell(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_SWARM_NODE_COMPLETE", f"source_{shell}")
    with pytest.raises(SystemExit) as ended:
        cli.run([])
    assert ended.value.code == 0
    assert f"_SWARM_NODE_COMPLETE=complete_{shell}" in capsys.readouterr().out


@pytest.mark.skipif(not BASH, reason="needs bash")
def test_install_writes_the_script_where_bash_reads_it(tmp_path: Path) -> None:
    subprocess.run(
        [BASH, "--norc", "--noprofile", "-c", "swarm-node --install-completion; exit $?"],
        env=shell_environment(tmp_path),
        capture_output=True,
        timeout=120,
        check=True,
    )
    [line] = [line for line in (tmp_path / ".bashrc").read_text().splitlines() if line.startswith("source")]
    assert "_swarm_node_completion" in Path(line.split(maxsplit=1)[1].strip("'")).read_text()
