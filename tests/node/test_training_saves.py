"""Which events of a trainer have its state saved, and what its first event says of where it begins."""

from __future__ import annotations

import io
import json
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from swarm.training.member.trainer_events import Admitted, RunResumed
from swarm.training.run.run_config import RunConfig
from swarm.training.run.signed_run import SignedRun
from swarm.training.state.replica_state import ReplicaState
from swarm_node.checkpoint_writer import Snapshot
from swarm_node.events import Emitter
from swarm_node.home import Home
from swarm_node.metrics.metric_registry import Registry
from swarm_node.node import Activity
from swarm_node.training import Training

RUN = SignedRun(config=RunConfig(name="x", outer_steps=9), peer_id="author", issued_at=1, signature=b"")
DIGEST = "ab" * 32
RESUMED = RunResumed(step=4, digest=DIGEST, roster=("a", "b"), sequence=7)


def make_training(folder: Path, out: io.StringIO, saved: list[Snapshot]) -> Training:
    node = SimpleNamespace(
        home=Home(folder),
        config=SimpleNamespace(keep_checkpoints=2, keep_every=0, tensorboard=None),
        metrics=Registry(),
        emitter=Emitter(json=True, out=out, err=io.StringIO()),
        steps=SimpleNamespace(done=lambda *_: None),
        activity=Activity(),
    )
    training = Training(cast("Any", node), RUN)
    training._inner = cast("Any", SimpleNamespace(state=dict))
    training._trainer = cast(
        "Any",
        SimpleNamespace(
            report=None,
            state=ReplicaState.initial(torch.zeros(2)),
            certificate=b"before",
            digest=DIGEST,
            between_intervals=lambda _function: Future(),
        ),
    )
    training._saving = cast("Any", SimpleNamespace(soon=saved.append))
    return training


def test_state_that_the_run_goes_on_from_is_saved_again_with_the_resume_order(tmp_path: Path) -> None:
    """A member that forgets the order at a restart has promised votes that it then cannot keep."""
    saved: list[Snapshot] = []
    training = make_training(tmp_path, io.StringIO(), saved)
    training._tell(Admitted(step=5, group=("a", "b")))
    training._tell(Admitted(step=5, group=("a", "b")))
    assert [each.certificate for each in saved] == [b"before"], "the same state again is not written again"
    cast("Any", training._trainer).certificate = b"order"
    training._tell(RESUMED)
    assert [each.certificate for each in saved] == [b"before", b"order"]


def test_training_that_begins_with_a_resume_order_tells_the_step_of_its_state(tmp_path: Path) -> None:
    out = io.StringIO()
    make_training(tmp_path, out, [])._tell(RESUMED)
    told = {each["event"]: each for each in map(json.loads, out.getvalue().splitlines())}
    assert told["training"]["outer_step"] == told["run_resumed"]["step"] == RESUMED.step
