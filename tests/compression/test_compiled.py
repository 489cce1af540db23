"""Processes that need the same loop for the first time: one of them compiles it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from swarm_compression import compiled as module

pytest.importorskip("numba")

LOOP = """
def doubled(x_N):
    for i in range(x_N.size):
        x_N[i] *= 2
"""
PROGRAM = """
import os
import sys
import swarm_compression
print(*{"numba", "triton"} & sys.modules.keys(), flush=True)
import numba
import numpy as np
from doubling import doubled
from swarm_compression.compiled import compiled

may_go, go = os.pipe()
for _ in range(2):
    if os.fork() == 0:
        os.close(go)
        os.read(may_go, 1)
        loop = compiled(doubled, numba.void(numba.float64[:]))
        x_N = np.ones(3)
        loop(x_N)
        print(sum(loop.stats.cache_hits.values()), x_N.sum(), flush=True)
        os._exit(0)
os.close(go)
for _ in range(2):
    os.wait()
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines of a process that imports the package, and then of two that need the same loop at once."""
    folder = tmp_path_factory.mktemp("loops")
    (folder / "doubling.py").write_text(LOOP)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), "NUMBA_CACHE_DIR": ""}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment)
    return done.stdout.splitlines()


def test_import_does_not_load_numba(said: list[str]) -> None:
    assert said[0] == ""


def test_second_process_finds_the_loop_in_the_cache_when_two_start_together(said: list[str]) -> None:
    assert sorted(said[1:]) == ["0 6.0", "1 6.0"]


def test_process_does_not_wait_for_one_that_never_ends_compiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAIT_S", 0.1)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "tripling.py").write_text(LOOP.replace("doubled", "tripled").replace("2", "3"))
    import numba  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415
    from tripling import tripled  # noqa: PLC0415

    with (tmp_path / "tripling.py").open("rb") as source:
        fcntl.flock(source, fcntl.LOCK_EX)
        loop = module.compiled(tripled, numba.void(numba.float64[:]))
    x_N = np.ones(2)
    loop(x_N)
    assert x_N.tolist() == [3, 3]
