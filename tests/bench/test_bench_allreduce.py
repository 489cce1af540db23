"""Our all-reduce beside hivemind's averager: seconds, bytes, error, memory, and how it grows with members and values.

    make bench                                             # or alone:
    .venv/bin/python -m pytest tests/bench/test_bench_allreduce.py -m bench -s

Every member is a process with a libp2p daemon of its own. Rounds are interleaved, figures are medians; the first round
warms up and is not counted. Timed is the reduction, from the formed group to the decoded mean at every member.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from bench.allreduce_members import group_of, hiveminds, ours, swarm
from bench.report import Report

pytestmark = pytest.mark.bench

NUM_ROUNDS = 5
NUM_MEMBERS = 4
NUM_VALUES = 10_000_000
SIZES = {2: (1_000_000, 10_000_000, 100_000_000), 4: (1_000_000, 10_000_000, 100_000_000), 8: (1_000_000, 10_000_000)}


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # hivemind's own
def test_bench_allreduce_beside_hivemind(tmp_path: Path) -> None:
    own_s, theirs_s, said = [], [], []
    with (
        swarm(ours, NUM_MEMBERS, str(tmp_path)) as own,
        swarm(hiveminds, NUM_MEMBERS, NUM_VALUES, NUM_MEMBERS) as theirs,
    ):
        group = group_of(own.peer_ids, NUM_VALUES).to_bytes()
        for _ in range(NUM_ROUNDS + 1):
            seconds, said = own.round_s(group)
            own_s.append(seconds)
            seconds, averaged = theirs.round_s()
            theirs_s.append(seconds)
            assert all(each is not None for each in averaged)
        errors = own.ask("error", NUM_MEMBERS)
    sent = max(each["sent_bytes"] for each in said) / NUM_VALUES
    peak = max(each["peak_bytes"] for each in said) / NUM_VALUES
    ratio = statistics.median(theirs_s[1:]) / statistics.median(own_s[1:])
    report = Report(f"all-reduce of {NUM_VALUES} values among {NUM_MEMBERS} processes over libp2p; peak: RSS")
    report.row(
        "int8", seconds=statistics.median(own_s[1:]), sent_bytes_per_value=sent, peak_bytes_per_value=peak,
        relative_error=max(errors), faster=ratio,
    )  # fmt: skip
    report.row("hivemind, fp16", seconds=statistics.median(theirs_s[1:]), faster=1.0)
    report.show()
    assert ratio >= 3
    assert sent <= 2.1
    assert max(errors) < 0.01
    assert peak < 1.3


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_members", SIZES)
def test_bench_allreduce_scaling(num_members: int, tmp_path: Path) -> None:
    report = Report(f"all-reduce among {num_members} processes over libp2p; peak: RSS")
    with swarm(ours, num_members, str(tmp_path)) as members:
        for num_values in SIZES[num_members]:
            group = group_of(members.peer_ids, num_values).to_bytes()
            rounds = [members.round_s(group) for _ in range(3 if num_values > NUM_VALUES else 4)][1:]
            said = rounds[-1][1]
            seconds = statistics.median(seconds for seconds, _ in rounds)
            report.row(
                f"{num_values // 1_000_000}M values",
                seconds=seconds,
                Mvalues_per_s=num_values / seconds / 1e6,
                sent_bytes_per_value=max(each["sent_bytes"] for each in said) / num_values,
                peak_bytes_per_value=max(each["peak_bytes"] for each in said) / num_values,
            )
    report.show()
