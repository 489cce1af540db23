from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("atheris", reason="atheris has no wheel for this platform; the property tests cover the decoders")

TESTS = Path(__file__).parents[1]


def fuzz(folder: Path, *arguments: str, seconds: int) -> subprocess.CompletedProcess[str]:
    fuzzer = [sys.executable, "-m", "protocol.fuzz_decoders", str(seconds), str(folder), *arguments]
    # in its own shell, since the peak of memory that libFuzzer bounds would begin with that of these tests
    command = ["/bin/sh", "-c", '"$@"; exit $?', "sh", *fuzzer]
    # the fuzzer imports what these tests import
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_fuzzer_finds_nothing_but_typed_errors(tmp_path: Path) -> None:
    outcome = fuzz(tmp_path, seconds=2)
    assert outcome.returncode == 0, outcome.stdout[-2000:] + outcome.stderr[-4000:]
    runs = re.search(r"Done (\d+) runs", outcome.stderr)
    assert runs is not None
    assert int(runs[1]) > 1000


def test_fuzzer_finds_a_planted_bug(tmp_path: Path) -> None:
    outcome = fuzz(tmp_path, "--plant", seconds=30)
    assert outcome.returncode != 0
    assert "planted" in outcome.stdout + outcome.stderr
    assert list(tmp_path.glob("crash-*"))
