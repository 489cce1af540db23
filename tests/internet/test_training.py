"""A run of a million parameters between every pair of hosts: two `swarm-node join` processes that know a seed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from bench.report import Report
from internet.conftest import OpenLab
from internet.lab_nodes import JOIN, LabNode
from internet.pairs import MAX_DIRECT_S, MAX_SEED_SHARE, Pair, each_pair
from internet.paths import PairMeter
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_file import write_run
from swarm.training.run.run_tables import InnerConfig
from swarm_protocol.identity import Identity

pytestmark = [pytest.mark.internet, pytest.mark.timeout(600)]

OUTER_STEPS = 40
END_S = 400.0
"""The longest time for a run, which took 200 s on two cores beside twenty busy processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Hold the figures of a run. The seed's bytes are those of the whole run with its greetings and records. `direct_s`
    counts from when both members were ready."""

    pair: Pair
    digests: set[object]
    steps: set[int]
    direct_s: float | None
    seed_share: float


def written_run(folder: Path) -> Path:
    """Write the default run with short intervals, since only the members' traffic matters."""
    inner = InnerConfig(batch_windows=1)
    run = RunConfig(name="lab", outer_steps=OUTER_STEPS, interval_steps=5, validation_interval=0, inner=inner)
    write_run(folder / "run.toml", run, Identity.generate())
    return folder / "run.toml"


def steps_of(node: LabNode) -> int:
    return sum(event["event"] == "outer_step" for event in node.events)


@pytest.fixture(scope="module")
def training(
    request: pytest.FixtureRequest, open_lab: OpenLab, figures: Report, tmp_path_factory: pytest.TempPathFactory
) -> Training:
    pair: Pair = request.param
    run = written_run(tmp_path_factory.mktemp("run"))
    with open_lab() as nodes:
        seed = nodes.seed()
        meter = PairMeter(nodes.lab, pair.one, pair.other)
        members = [nodes.start(host, *JOIN, "--run", run, peers=seed.public) for host in (pair.one, pair.other)]
        for member in members:
            nodes.wait_ready(member)
        direct_s = meter.wait_direct(within_s=MAX_DIRECT_S + 5)
        finished = [member.wait_for("run_finished", END_S) for member in members]
        assert [member.wait_end() for member in members] == [0, 0]
        shares = meter.shares()
    found = Training(
        pair=pair,
        digests={event["digest"] for event in finished},
        steps={steps_of(member) for member in members},
        direct_s=direct_s,
        seed_share=shares.seed_share,
    )
    figures.row(
        pair.name,
        run_MB=shares.pair_bytes / 1e6,
        seed_share_of_run=found.seed_share,
        run_direct_after_s="never" if direct_s is None else direct_s,
    )
    return found


@each_pair("training", with_path=False)
def test_pair_trains_a_run_to_its_end(training: Training) -> None:
    assert len(training.digests) == 1, "replicas must be bit-identical"
    assert min(training.steps) > OUTER_STEPS / 2, "a member took part in few of its rounds"


@each_pair("training", with_path=True)
def test_seed_carries_little_of_a_run(training: Training) -> None:
    assert training.direct_s is not None
    assert training.direct_s <= MAX_DIRECT_S
    assert training.seed_share <= MAX_SEED_SHARE
