"""What a network lacks, thinnest first: models by the servers of their least served block, runs by their members. Pure.

Everything here follows from signed records, which say what their peers claim. What is taken is checked afterwards:
a run's file against its id, a model's commit against the revision that its servers announce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from swarm_protocol.records import ServeRecord, TrainerRecord

from swarm_node.dashboard.snapshot import Look


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNeed:
    """A model whose least served block has `num_helpers` servers. `revision` is the one that most servers have;
    `sources` are the hub commits that these servers name, the most named first."""

    name: str
    revision: str
    sources: tuple[str, ...]
    num_helpers: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNeed:
    """A run with `num_helpers` members that have not finished it."""

    name: str
    num_helpers: int
    why: str


Need = ModelNeed | RunNeed


def needs(look: Look, me: str) -> list[Need]:
    """What anyone could help with, thinnest first; of equals models, then by name. `me` counts for nothing."""
    found: list[Need] = []
    for name, servers in look.models.items():
        found += _model_need(name, {peer: each for peer, each in servers.records.items() if peer != me})
    for name, trainers in look.runs.items():
        found += _run_need(name, {peer: each for peer, each in trainers.records.items() if peer != me})
    return sorted(found, key=lambda need: (need.num_helpers, isinstance(need, RunNeed), need.name))


def _model_need(name: str, servers: Mapping[str, ServeRecord]) -> Iterable[Need]:
    there = [record for record in servers.values() if record.state != "draining"]
    if not there:
        return
    (revision, num_blocks), _ = Counter((each.revision, each.num_blocks) for each in there).most_common(1)[0]
    same = [each for each in there if (each.revision, each.num_blocks) == (revision, num_blocks)]
    changes = [0] * (num_blocks + 1)
    for record in same:
        changes[record.start] += 1
        changes[record.end] -= 1
    counts = list(accumulate(changes[:-1]))
    least = min(counts)
    thin = sum(count == least for count in counts)
    yield ModelNeed(
        name=name,
        revision=revision,
        sources=tuple(source for source, _ in Counter(each.source for each in same if each.source).most_common()),
        num_helpers=least,
        why=f"{thin} of the {num_blocks} blocks of {name} {'has' if thin == 1 else 'have'} {_counted(least, 'server')}",
    )


def _run_need(name: str, trainers: Mapping[str, TrainerRecord]) -> Iterable[Need]:
    active = [record for record in trainers.values() if record.state in {"joining", "training"}]
    if active:
        yield RunNeed(name=name, num_helpers=len(active), why=f"run {name} has {_counted(len(active), 'member')}")


def _counted(count: int, what: str) -> str:
    return f"no {what}" if not count else f"only {count} {what}{'' if count == 1 else 's'}"
