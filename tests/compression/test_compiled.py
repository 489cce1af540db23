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
import sys
import numba
import numpy as np
from doubling import doubled
from swarm_compression.compiled import compiled

print("ready", flush=True)
sys.stdin.readline()
loop = compiled(doubled, numba.void(numba.float64[:]))
x_N = np.ones(3)
loop(x_N)
print(sum(loop.stats.cache_hits.values()), x_N.sum())
"""


def test_second_process_finds_the_loop_in_the_cache_when_two_start_together(tmp_path: Path) -> None:
    (tmp_path / "doubling.py").write_text(LOOP)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "NUMBA_CACHE_DIR": ""}
    command = [sys.executable, "-c", PROGRAM]
    pipe = subprocess.PIPE
    both = [subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True) for _ in range(2)]
    try:
        for each in both:
            assert each.stdout is not None
            assert each.stdout.readline() == "ready\n"
        for each in both:
            assert each.stdin is not None
            each.stdin.write("\n")
            each.stdin.flush()
        assert sorted(each.communicate()[0] for each in both) == ["0 6.0\n", "1 6.0\n"]
    finally:
        for each in both:
            each.kill()
            each.wait()


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
