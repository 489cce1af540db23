"""How fast vectors become bytes and back, beside a copy of memory and eager torch, in GB/s of fp32.

make bench                                             # or alone:
.venv/bin/python -m pytest tests/bench/test_bench_codecs.py -m bench -s
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch
from bench.report import Report
from compression.plain_int8 import PLAIN
from swarm_compression import codec_names, get_codec, warm_up
from swarm_compression.int8 import BLOCK_VALUES, load_kernels

pytestmark = pytest.mark.bench

NUM_ROUNDS = 15
NUM_CORES = 2
FRAME_VALUES = 1 << 18
LARGE_VALUES = 1 << 24
TARGET_GB_PER_S = 4.0

Work = dict[tuple[str, str], Callable[[], object]]


def work_of_codecs(x_N: torch.Tensor) -> Work:
    """(codec, column): what to time. All write to buffers that are there before."""
    out_N, acc_N, work = torch.zeros_like(x_N), torch.zeros_like(x_N), {}
    work["memcpy", "encode"] = work["memcpy", "decode"] = partial(out_N.copy_, x_N)
    for name in codec_names():
        codec = get_codec(name)
        wire = bytearray(codec.encode(x_N))
        work[name, "encode"] = partial(codec.encode_into, x_N, wire)
        work[name, "decode"] = partial(codec.decode_into, wire, out_N)
        work[name, "accumulate"] = partial(codec.accumulate, wire, 0.25, acc_N)
    scale_K, code_N = np.empty(x_N.numel() // BLOCK_VALUES, np.float32), np.empty(x_N.numel(), np.int8)
    plain = PLAIN
    work["int8, eager torch", "encode"] = partial(plain.quantize, x_N.numpy(), scale_K, code_N)
    work["int8, eager torch", "decode"] = partial(plain.dequantize, code_N, scale_K, out_N.numpy())
    work["int8, eager torch", "accumulate"] = partial(
        plain.accumulate, code_N, scale_K, np.float32(0.25), acc_N.numpy()
    )
    return work


def gb_per_s(work: Work, num_values: int) -> dict[tuple[str, str], list[float]]:
    """Return the speed of each codec. They are timed in turn, so that other work on the machine slows all of them
    alike. Small vectors are timed in a loop."""
    rates, num_loops = defaultdict(list), max(1, (1 << 21) // num_values)
    for round_ in range(NUM_ROUNDS + 1):
        for key, step in work.items():
            since = time.perf_counter()
            for _ in range(num_loops):
                step()
            if round_:  # the first round warms caches
                rates[key].append(4e-9 * num_values * num_loops / (time.perf_counter() - since))
    return rates


@pytest.fixture(autouse=True)
def cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_CORES)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_values", [FRAME_VALUES, LARGE_VALUES])
def test_bench_codecs(num_values: int) -> None:
    warm_up()
    x_N = torch.randn(num_values, generator=torch.Generator().manual_seed(0))
    rates = gb_per_s(work_of_codecs(x_N), num_values)
    report = Report(f"codecs, GB/s of fp32, {num_values} values, {NUM_CORES} cores: median (best)")
    for (name, column), samples in rates.items():
        report.row(name, **{column: statistics.median(samples), f"{column}_best": max(samples)})
    report.show()
    # the best round is disturbed least by other work on the machine
    for column in ("encode", "decode", "accumulate"):
        assert max(rates["int8", column]) >= TARGET_GB_PER_S


def test_bench_warm_up_from_the_cache() -> None:
    """This is the wait of a process when an earlier one has compiled, besides a third of a second to import numba."""
    load_kernels.__wrapped__()
    since = time.perf_counter()
    load_kernels.__wrapped__()
    Report("loading the compiled int8 loops").row("cached", ms=(time.perf_counter() - since) * 1e3).show()
