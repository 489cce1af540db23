"""What a node tells of its training: events that scripts read, and whom it waits for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from swarm.training.member.trainer_events import ContributionLate
from swarm.training.member.waiting import Waiting
from swarm_node.node import Activity
from swarm_node.training import Training
from swarm_protocol.control_messages import TrainingStatus

PEERS = tuple(f"12D3KooW{number:06d}" for number in range(70))
SHOWN = TrainingStatus(run="r", outer_step=1, num_outer_steps=2, tokens_per_s=533.0)


class Emitted:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def emit(self, name: str, **fields: object) -> None:
        self.events.append({"event": name, **fields})


def training_of(emitter: Emitted, waiting: Waiting | None = None) -> Training:
    training = Training.__new__(Training)
    training._node = cast(Any, SimpleNamespace(emitter=emitter, activity=Activity()))
    training._run = cast(Any, SimpleNamespace(run_id="r"))
    training._trainer = cast(Any, SimpleNamespace(waiting=waiting, report=None))
    training._metrics = cast(Any, SimpleNamespace(tell=lambda event: None))
    training._begun = True
    return training


@pytest.mark.parametrize(
    ("late_s", "when"), [(2.04, "came 2.0 s after the round's group was formed"), (None, "was still computed")]
)
def test_contribution_that_comes_too_late_is_an_event(late_s: float | None, when: str) -> None:
    emitter = Emitted()
    training_of(emitter)._tell(ContributionLate(step=7, num_tokens=2560, late_s=late_s))
    expected = {"event": "contribution_late", "run": "r", "step": 7, "num_tokens": 2560, "late_s": late_s, "when": when}
    assert emitter.events == [expected]


@pytest.mark.parametrize(
    ("waiting", "waits_for"),
    [
        (None, ""),
        (Waiting(peers=(), seconds=3.0), "the round's result"),
        (Waiting(peers=PEERS[:2], seconds=3.0), "000000, 000001"),
        (
            Waiting(peers=PEERS, seconds=3.0),
            "000000, 000001, 000002, 000003, 000004, 000005, 000006, 000007 and 62 more",
        ),
    ],
)
def test_status_names_a_few_of_those_that_the_run_waits_for(waiting: Waiting | None, waits_for: str) -> None:
    status = training_of(Emitted(), waiting)._with_waiting(SHOWN)
    assert (status.waits_for, status.waits_s) == (waits_for, waiting.seconds if waiting else 0.0)
