"""Our all-reduce beside hivemind's averager: seconds, bytes, error, memory, and how it grows with members and values.

    make bench                                             # or alone:
    .venv/bin/python -m pytest tests/bench/test_bench_allreduce.py -m bench -s

Every member is a process with a libp2p daemon of its own. Rounds are interleaved, figures are medians; the first round
warms up and is not counted. Timed is the reduction, from the formed group to the decoded mean at every member: neither
side's matchmaking counts. Where other work shares the cores, compare CPU seconds, not seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from bench.allreduce_members import Stuck, Swarm, group_of, hiveminds, ours, swarm
from bench.report import Report, aim

pytestmark = pytest.mark.bench

NUM_ROUNDS = 8
NUM_MEMBERS = 4
NUM_VALUES = 10_000_000
SIZES = {
    2: (1_000_000, 10_000_000, 100_000_000),
    4: (1_000_000, 10_000_000, 100_000_000),
    8: (1_000_000, 10_000_000, 100_000_000),
}


@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")  # warnings of hivemind
def test_bench_allreduce_beside_hivemind(tmp_path: Path) -> None:
    own: list[tuple[float, float]] = []
    said: list[dict[str, float]] = []
    theirs: list[tuple[float, float]] = []
    peer = Peer()
    with swarm(ours, NUM_MEMBERS, str(tmp_path)) as members, peer.started():
        group = group_of(members.peer_ids, NUM_VALUES).to_bytes()
        for count in range(NUM_ROUNDS + 1):
            seconds, cpu_s, answers = members.round_s(group)
            own.append((seconds, cpu_s))
            said += answers if count else []
            theirs.extend(peer.round())
        errors = members.ask("error", NUM_MEMBERS)
    sent = max(each["sent_bytes"] for each in said) / NUM_VALUES
    peak = max(each["peak_bytes"] for each in said) / NUM_VALUES
    own_s, own_cpu_s = _medians(own[1:])
    report = Report(
        f"all-reduce of {NUM_VALUES} values among {NUM_MEMBERS} processes over libp2p; peak: RSS; CPU: all processes"
    )
    report.row(
        "int8", seconds=own_s, cpu_seconds=own_cpu_s, sent_bytes_per_value=sent, peak_bytes_per_value=peak,
        relative_error=max(errors),
    )  # fmt: skip
    ratio = None
    if len(theirs) > 1:
        their_s, their_cpu_s = _medians(theirs[1:])
        ratio = their_s / own_s
        report.row("hivemind, fp16", seconds=their_s, cpu_seconds=their_cpu_s, int8_is_faster=ratio)
    if peer.troubles:
        report.row("hivemind, fp16", trouble="; ".join(peer.troubles))
    report.show()
    assert sent <= 2.1
    assert max(errors) < 0.01
    assert ratio is not None, "hivemind finished no round, so that there is nothing to compare with"
    aim(three_times_as_fast_as_hivemind=ratio >= 3, a_peak_of_1_3_bytes_a_value=peak < 1.3)


class Peer:
    """Run hivemind's averager. If it gets stuck, the report says so and the bench goes on."""

    def __init__(self) -> None:
        self.troubles: list[str] = []
        self._members: Swarm | None = None

    @contextmanager
    def started(self) -> Iterator[None]:
        with ExitStack() as stack:
            try:
                self._members = stack.enter_context(swarm(hiveminds, NUM_MEMBERS, NUM_VALUES, NUM_MEMBERS))
            except Stuck as stuck:
                self.troubles.append(f"{stuck} (start)")
            yield

    def round(self) -> list[tuple[float, float]]:
        """Return the seconds and CPU seconds of one round, or none if it failed."""
        if self._members is None:
            return []
        try:
            seconds, cpu_s, averaged = self._members.round_s()
        except Stuck as stuck:
            self._members = None
            self.troubles.append(str(stuck))
            return []
        if not all(averaged):
            self.troubles.append("failed in a round")
            return []
        return [(seconds, cpu_s)]


def _medians(rounds: list[tuple[float, float]]) -> tuple[float, float]:
    seconds, cpu_s = zip(*rounds, strict=True)
    return statistics.median(seconds), statistics.median(cpu_s)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_members", SIZES)
def test_bench_allreduce_scaling(num_members: int, tmp_path: Path) -> None:
    report = Report(f"all-reduce among {num_members} processes over libp2p; peak: RSS")
    with swarm(ours, num_members, str(tmp_path)) as members:
        for num_values in SIZES[num_members]:
            group = group_of(members.peer_ids, num_values).to_bytes()
            rounds = [members.round_s(group) for _ in range(3 if num_values > NUM_VALUES else 4)][1:]
            said = rounds[-1][2]
            seconds, cpu_s = _medians([each[:2] for each in rounds])
            report.row(
                f"{num_values // 1_000_000}M values",
                seconds=seconds,
                cpu_seconds=cpu_s,
                Mvalues_per_s=num_values / seconds / 1e6,
                sent_bytes_per_value=max(each["sent_bytes"] for each in said) / num_values,
                peak_bytes_per_value=max(each["peak_bytes"] for each in said) / num_values,
            )
    report.show()
