"""Memory that is asked for ahead is there, and what was in it stays."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import json
import mmap
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from swarm.heap import (
    _MADV_COLLAPSE,
    _MADV_POPULATE_WRITE,
    absent,
    make_resident,
    release_code,
    uncollected,
)
from swarm.serving.model import kv_pool
from swarm.serving.model.kv_pool import PAGE_TOKENS, KVPool, KVShape


def can_ask() -> bool:
    """Linux since 5.14."""
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        try:
            memory.madvise(_MADV_POPULATE_WRITE)
        except OSError:
            return False
    return sys.platform == "linux"


asks = pytest.mark.skipif(not can_ask(), reason="this system has no such call")

NUM_BYTES = 2**23


def fresh(num_bytes: int) -> torch.Tensor:
    """Zeros that nobody has touched: what the C library gives, however much it is, may have been in use before."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def num_resident(address: int, num_bytes: int) -> int:
    """Return how many of the system's pages that lie wholly in this memory are resident."""
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    num_pages = (address + num_bytes - begin) // mmap.PAGESIZE
    found = (ctypes.c_ubyte * num_pages)()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(num_pages * mmap.PAGESIZE), found)
    return sum(page & 1 for page in found)


@asks
def test_make_resident_gives_memory_and_leaves_what_is_in_it() -> None:
    memory = fresh(2 * NUM_BYTES)
    memory[5] = 7
    assert num_resident(memory.data_ptr(), NUM_BYTES) < NUM_BYTES // mmap.PAGESIZE // 2
    make_resident(memory.data_ptr() + 3, NUM_BYTES - 3)
    assert num_resident(memory.data_ptr(), NUM_BYTES) == NUM_BYTES // mmap.PAGESIZE
    assert memory[5] == 7
    assert not memory[6:NUM_BYTES].any()


@asks
def test_pool_make_resident_of_some_pages_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(num_slots: int, num_heads: int, width: int, dtype: torch.dtype, _device: str) -> torch.Tensor:
        return fresh(num_slots * num_heads * width * dtype.itemsize).view(dtype).view(num_slots, num_heads, width)

    monkeypatch.setattr(kv_pool, "_zeros", zeros)
    page_bytes = PAGE_TOKENS * 8 * 64 * 4
    pool = KVPool([KVShape(num_heads=8, key_width=64, value_width=64)], 512, torch.float32, "cpu")
    pool.make_resident(64, 128)
    for tensor in (*pool.keys_SKD, *pool.values_SKD):
        asked = num_resident(tensor.data_ptr() + 64 * page_bytes, 64 * page_bytes)
        assert asked == 64 * page_bytes // mmap.PAGESIZE
        assert num_resident(tensor.data_ptr() + 256 * page_bytes, 256 * page_bytes) == 0


def test_pool_num_pages_at_once_is_of_all_blocks_together() -> None:
    narrow, wide = (KVShape(num_heads=num, key_width=64, value_width=64) for num in (8, 24))
    assert KVPool([narrow], 512, torch.float32, "cpu").num_pages_at_once == 64
    assert KVPool([narrow, wide], 512, torch.float32, "cpu").num_pages_at_once == 32


def test_what_is_made_uncollected_stays_out_of_later_collections() -> None:
    num_frozen = gc.get_freeze_count()
    with suppress(ImportError), uncollected():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    assert gc.get_freeze_count() > num_frozen


def test_absent_packages_seem_not_to_be_installed_until_the_end() -> None:
    assert "this" not in sys.modules
    with absent("this", "json"):
        assert importlib.util.find_spec("this") is None
        assert importlib.import_module("json") is json
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("this")
    assert importlib.util.find_spec("this") is not None
    assert sys.modules["json"] is json


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_release_code_unmaps_code_that_still_runs_afterwards() -> None:
    def code_kb() -> int:
        sizes = [part.split() for part in Path("/proc/self/smaps").read_text().split("VmFlags:")]
        return sum(int(each[each.index("Rss:") + 1]) for each in sizes if "r-xp" in each and "Rss:" in each)

    expected, before_kb = torch.linspace(0, 1, 9).exp().sum(), code_kb()
    release_code()
    assert code_kb() < 0.9 * before_kb
    assert torch.linspace(0, 1, 9).exp().sum() == expected


SMALL_OBJECTS = """
from pathlib import Path

from swarm.heap import resident_bytes, use_huge_pages


def huge_bytes():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages:"))


texts = [str(number) for number in range(600_000)]  # some 35 MB
before = huge_bytes()
assert resident_bytes() > 35e6
use_huge_pages()
assert huge_bytes() > before + 20e6
assert texts == [str(number) for number in range(600_000)]
"""


def can_collapse() -> bool:
    """Return whether this is Linux since 6.1, with huge pages."""
    if sys.platform != "linux":
        return False
    with mmap.mmap(-1, 2**22, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = bytes(2**22)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        begin += -begin % 2**21
        return ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(2**21), _MADV_COLLAPSE) == 0


def test_small_objects_come_to_lie_in_huge_pages_and_are_the_same() -> None:
    """In a process of its own: that of the tests has a gigabyte besides."""
    if not can_collapse():
        pytest.skip("this system has no such call")
    subprocess.run([sys.executable, "-c", SMALL_OBJECTS], check=True)
