"""A month of nodes that come and go, in the dashboard's history: a real file, in virtual time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Connection
from swarm_node.dashboard.history import reader
from swarm_node.dashboard.history.recorder import Fact, FactRecorder, PresenceFact, SamplesFact, SeriesSample, StepFact
from swarm_node.dashboard.history.retention import HOUR_S, Retention, RetentionLimits
from swarm_node.dashboard.history.store import Store, open_store
from swarm_node.dashboard.views import StepView
from swarm_node.formatting import DAY_S

START = 1_800_000_000.0
DAYS = 30
SERIES = [f"tokens_per_s/model-{number}" for number in range(12)]
GROUP = 16


class Swarm:
    """A node stays for about four hours and is away for one: about five sessions a day each, looked at once an hour."""

    def __init__(self, num_nodes: int) -> None:
        self._random = random.Random(5)
        self.nodes = [f"12D3KooW{number:044}" for number in range(num_nodes)]
        self._present = set(self.nodes)

    def look(self, at: float) -> PresenceFact:
        leaving = self._random.sample(sorted(self._present), len(self._present) // 4)
        self._present = set(self.nodes) - set(leaving)
        return PresenceFact(at, frozenset(self._present))

    def step(self, number: int, at: float) -> StepFact:
        group = tuple(self._random.sample(self.nodes[:64], GROUP))
        view = StepView(
            outer_step=number,
            at=at,
            loss=3.0,
            digest="d" * 64,
            num_members=GROUP,
            num_tokens=GROUP * 1000,
            seconds=600.0,
            phases_s={"interval": 500.0, "group": 1.0, "reduce": 60.0, "commit": 2.0, "apply": 1.0},
            bytes_per_parameter=None,
        )
        return StepFact(run="run-1", group=group, step=view)


def samples(at: float) -> SamplesFact:
    return SamplesFact(at, tuple(SeriesSample(name=name, unit="tok/s", value=at % 97) for name in SERIES))


def commit(store: Store, writing: FactRecorder, facts: list[Fact]) -> None:
    with store.writing() as connection:
        writing.write(connection, facts)


def tidy(retention: Retention, now: float) -> None:
    for _ in retention.tidy(now):
        pass


def check_month(folder: Path, num_nodes: int) -> None:
    """Write a month of `num_nodes` nodes to a history in `folder`, and check its size, and the time that reading takes.

    An hour without a look is no gap here: rows come of who came and went, and hundreds of looks at the same add none.
    """
    file = folder / "history.sqlite3"
    limits = RetentionLimits(steps_in_full=300)
    store, _ = open_store(file)
    writing, retention, swarm = FactRecorder(limits), Retention(store, limits), Swarm(num_nodes)
    first = START - (DAYS + 3) * DAY_S  # three days more than are kept
    num_hours = (DAYS + 3) * 24
    facts: list[Fact] = []
    for hour in range(num_hours):
        began = first + hour * HOUR_S
        facts.append(swarm.look(began))
        sample_every = 60 if hour >= num_hours - 48 else 3600
        facts += [samples(began + at) for at in range(0, 3600, 5 if hour >= num_hours - 2 else sample_every)]
        facts.append(swarm.step(hour, began))
        if hour % 12 == 11:
            commit(store, writing, facts)
            facts.clear()
            tidy(retention, began + HOUR_S)
    tidy(retention, START)
    used = store.used_bytes()
    on_disk = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{used / 2**20:.1f} MiB used, {on_disk / 2**20:.1f} MiB on disk")
    assert retention.squeeze == 0
    assert used > 2**20
    assert used < 3 * 2**19 + num_nodes * 2**14
    assert on_disk < used + 2**23
    asked: dict[str, Callable[[Connection], object]] = {
        "presence": lambda found: reader.read_presence(found, swarm.nodes[7], START - DAYS * DAY_S),
        "turnover": lambda found: reader.read_turnover(found, START - DAY_S),
        "month": lambda found: reader.read_series(found, SERIES[3], 720, START, limits),
        "day": lambda found: reader.read_series(found, SERIES[3], 24, START, limits),
        "steps": lambda found: reader.read_steps(found, "run-1", 500),
        "contributions": lambda found: reader.read_contributions(found, "run-1"),
    }
    took = {name: cpu_s(store, read) for name, read in asked.items()}
    print({name: f"{seconds * 1000:.1f} ms" for name, seconds in took.items()})
    assert max(took.values()) < 0.25
    store.close()


def cpu_s(store: Store, read: Callable[[Connection], object]) -> float:
    """Return the time of this thread: a busy machine does not count."""
    with store.reading(60.0) as connection:
        began = time.thread_time()
        assert read(connection)
        return time.thread_time() - began
