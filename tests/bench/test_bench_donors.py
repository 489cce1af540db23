"""How fast a joiner gets a state of 64 MiB, by the number of donors: simulated links, virtual time.

    make bench                                             # or alone:
    .venv/bin/python -m pytest tests/bench/test_bench_donors.py -m bench -s

The donors have 20 Mbit/s up each and are 50 ms away, the joiner has 200 Mbit/s down. "ideal" is what the links carry.
"""

from __future__ import annotations

import time

import pytest
from bench.report import Report
from support.donor_world import MBIT_S, DonorWorld
from swarm.testing import virtual_time

pytestmark = pytest.mark.bench

NUM_VALUES = 8 << 20
STATE_BYTES = 8 * NUM_VALUES
UP_MBIT_S, DOWN_MBIT_S = 20.0, 200.0


def seconds(uplinks: list[float], down_mbit_s: float = DOWN_MBIT_S) -> float:
    async def main() -> float:
        async with DonorWorld(NUM_VALUES, down_mbit_s=down_mbit_s) as world:
            for up_mbit_s in uplinks:
                await world.donor(up_mbit_s)
            fetched, took_s = await world.fetch()
            assert fetched.num_bytes == STATE_BYTES
            return took_s

    return virtual_time.run(main())


CASES = {
    "1 donor": ([UP_MBIT_S], DOWN_MBIT_S),
    "2 donors": ([UP_MBIT_S] * 2, DOWN_MBIT_S),
    "4 donors": ([UP_MBIT_S] * 4, DOWN_MBIT_S),
    "8 donors": ([UP_MBIT_S] * 8, DOWN_MBIT_S),
    "16 donors": ([UP_MBIT_S] * 16, DOWN_MBIT_S),
    "8 donors, one of 0.5 Mbit/s": ([0.5] + [UP_MBIT_S] * 7, DOWN_MBIT_S),
    "4 donors of 5 to 40 Mbit/s": ([5.0, 10.0, 20.0, 40.0], DOWN_MBIT_S),
    "16 donors, a joiner of 5 Mbit/s": ([UP_MBIT_S] * 16, 5.0),
    "1 donor of 1 Gbit/s": ([1000.0], 1000.0),
}


@pytest.mark.timeout(300)
def test_bench_donors_bandwidth_adds_up() -> None:
    report = Report("a state of 64 MiB from several donors, simulated")
    took_s = {}
    for name, (uplinks, down_mbit_s) in CASES.items():
        started = time.perf_counter()
        took_s[name] = seconds(uplinks, down_mbit_s)
        real_s = time.perf_counter() - started
        mbit_s = STATE_BYTES / MBIT_S / took_s[name]
        report.row(name, seconds=took_s[name], Mbit_per_s=mbit_s, of_ideal=mbit_s / min(sum(uplinks), down_mbit_s))
        report.row(name, real_s=real_s)
    report.show()
    for num_donors in (2, 4, 8):
        assert took_s["1 donor"] / took_s[f"{num_donors} donors"] > 0.9 * num_donors
    assert took_s["1 donor"] * UP_MBIT_S * MBIT_S < 1.1 * STATE_BYTES
    assert took_s["16 donors"] * DOWN_MBIT_S * MBIT_S < 1.2 * STATE_BYTES
    assert took_s["8 donors, one of 0.5 Mbit/s"] < 1.25 * took_s["8 donors"]
    assert took_s["16 donors, a joiner of 5 Mbit/s"] * 5.0 * MBIT_S < 1.1 * STATE_BYTES
