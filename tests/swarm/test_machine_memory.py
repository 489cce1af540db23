from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import psutil
import pytest
from swarm.machine_memory import machine_memory
from swarm.network.libp2p.p2pd_process import max_memory_bytes

from swarm import machine_memory as module

GIB = 2**30


@pytest.mark.parametrize(
    ("groups", "folder"),
    [
        ("0::/", ""),
        ("0::/system.slice/swarm.service", "system.slice/swarm.service"),
        ("0::/system.slice/swarm.service", "system.slice"),
        ("0::/docker/1234", ""),
        ("2:cpu:/\n1:memory:/docker/1234\n0::/", "memory/docker/1234"),
        ("2:cpu:/\n1:memory:/docker/1234\n0::/", "memory"),
    ],
    ids=["container", "service", "group above", "container without a namespace", "version 1", "container of version 1"],
)
@pytest.mark.parametrize(
    ("limit", "used", "free_and_total", "daemon"),
    [
        (str(GIB), GIB // 4, (GIB * 3 // 4, GIB), GIB // 2),
        (str(8 * GIB), 9 * GIB, (0, 8 * GIB), 2 * GIB),
        (str(999 * GIB), GIB, (32 * GIB, 64 * GIB), 4 * GIB),
        ("max", GIB, (32 * GIB, 64 * GIB), 4 * GIB),
    ],
)
def test_memory_of_a_container_or_service_is_its_limit_and_bounds_the_libp2p_daemon(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str,
    folder: str,
    limit: str,
    used: int,
    free_and_total: tuple[int, int],
    daemon: int,
) -> None:
    (tmp_path / "groups").write_text(f"{groups}\n")
    names = ("limit_in_bytes", "usage_in_bytes") if "memory" in folder else ("max", "current")
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, used), strict=True):
        (tmp_path / folder / f"memory.{name}").write_text(f"{value}\n")
    monkeypatch.setattr(module, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(module, "CGROUP", tmp_path)
    whole = psutil.virtual_memory()._replace(available=32 * GIB, total=64 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: whole)
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 64 * GIB // 4096, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert machine_memory() == free_and_total
    monkeypatch.setitem(sys.modules, "psutil", None)  # the daemon starts without loading it
    assert max_memory_bytes() == daemon


def test_memory_of_a_process_ends_where_its_address_space_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "statm").write_text(f"{GIB // resource.getpagesize()} 1 1 1 0 1 0\n")
    monkeypatch.setattr(module, "OWN", tmp_path / "statm")
    monkeypatch.setattr(module, "GROUPS", tmp_path / "none")
    whole = psutil.virtual_memory()._replace(available=32 * GIB, total=64 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: whole)
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (4 * GIB, 8 * GIB))
    assert machine_memory() == (3 * GIB, 4 * GIB)
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert machine_memory() == (32 * GIB, 64 * GIB)
