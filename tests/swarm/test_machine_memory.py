from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest
from swarm.machine_memory import machine_memory
from swarm.network.libp2p.p2pd_process import max_memory_bytes

from swarm import machine_memory as module

GIB = 2**30


@pytest.mark.parametrize(
    ("limit", "used", "free_and_total", "daemon"),
    [
        (str(GIB), GIB // 4, (GIB * 3 // 4, GIB), GIB // 2),
        (str(8 * GIB), 9 * GIB, (0, 8 * GIB), 2 * GIB),
        (str(999 * GIB), GIB, (32 * GIB, 64 * GIB), 4 * GIB),
        ("max", GIB, (32 * GIB, 64 * GIB), 4 * GIB),
    ],
)
def test_memory_of_a_container_is_its_limit_and_bounds_the_libp2p_daemon(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    used: int,
    free_and_total: tuple[int, int],
    daemon: int,
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    monkeypatch.setattr(module, "CGROUP", tmp_path)
    whole = psutil.virtual_memory()._replace(available=32 * GIB, total=64 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: whole)
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 64 * GIB // 4096, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert machine_memory() == free_and_total
    monkeypatch.setitem(sys.modules, "psutil", None)  # the daemon starts without loading it
    assert max_memory_bytes() == daemon
