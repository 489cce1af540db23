"""TensorBoard's event files, read back with its own reader."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from swarm_node.events.emitter import Emitter
from swarm_node.events.tensorboard_files import recorded
from swarm_protocol.errors import ConfigError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

RUN = "story-0123456789ab"


def emitter() -> Emitter:
    return Emitter(json=False, out=io.StringIO(), err=io.StringIO())


def committed(emitter: Emitter, step: int, loss: float) -> None:
    fields = {"digest": "ab" * 32, "group": ("a", "b"), "num_trainers": 2, "num_tokens": 10, "tokens_per_s": 5.0}
    emitter.emit("committed", run=RUN, step=step, of=9, loss=loss, on_probation=(), num_on_probation=0, **fields)


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(folder)).Reload()
    return {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_recorded_curves_are_the_events_by_outer_step(tmp_path: Path) -> None:
    told = emitter()
    with recorded(told, tmp_path, RUN, "an/attic"):
        committed(told, 1, 2.5)
        committed(told, 2, float("nan"))
        told.emit("validated", run=RUN, step=2, loss=2.25)
        told.emit("validated", run=RUN, step=3, loss=None)
        told.say("nothing of that")
    committed(told, 3, 1.0)
    found = curves(tmp_path / RUN / "an-attic")
    assert found["loss/training"] == [(1, 2.5)]
    assert found["loss/validation"] == [(2, 2.25)]
    assert found["round/members"] == [(1, 2.0), (2, 2.0)]
    assert found["speed/tokens_per_s"] == [(1, 5.0), (2, 5.0)]


def test_recorded_without_a_folder_writes_nothing() -> None:
    told = emitter()
    with recorded(told, None, RUN, "attic"):
        committed(told, 1, 2.5)
    assert not told._listeners


def test_recorded_without_the_library_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with (
        pytest.raises(ConfigError, match="needs the tensorboard library") as caught,
        recorded(emitter(), tmp_path, RUN, "x"),
    ):
        pass
    assert "swarm-node[tensorboard]" in caught.value.remedy


def test_recorded_in_an_unwritable_folder_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--tensorboard"), recorded(emitter(), tmp_path / "file", RUN, "x"):
        pass


def test_recorded_on_a_disk_that_fills_up_warns_once_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    err = io.StringIO()
    told = Emitter(json=False, out=io.StringIO(), err=err)
    with recorded(told, tmp_path, RUN, "x"):
        monkeypatch.setattr(SummaryWriter, "add_scalar", full)
        committed(told, 1, 2.5)
        committed(told, 2, 2.5)
    assert err.getvalue().count("no longer written: No space left on device") == 1
