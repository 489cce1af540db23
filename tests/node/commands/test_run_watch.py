"""`run watch`: what it prints and when it ends, over a scripted observer in virtual time."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from support.node_settings import resolve
from support.replica_states import state_of
from swarm.testing import virtual_time
from swarm.training.outside.observer import CommittedStep
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_file import write_run
from swarm.training.run.run_model import module_run
from swarm.training.run.signed_run import SignedRun, sign_mapping, to_mapping
from swarm.training.state.checkpoint import Checkpoint, save_checkpoint
from swarm.training.trainer_events import OtherHistory
from swarm_node import cli
from swarm_node.commands import run_watch
from swarm_node.commands.run_watch import RunWatcher
from swarm_node.events.emitter import Emitter
from swarm_node.roles.volunteer import VolunteerRole, schedule_of
from swarm_node.settings.config import Config
from swarm_protocol.commit_messages import Endorsement
from swarm_protocol.errors import ConfigError, PeerTimeout
from swarm_protocol.identity import Identity
from swarm_protocol.records import TrainerRecord, ValidationReport

RUN = SignedRun(config=RunConfig(name="x", outer_steps=2), peer_id="author", issued_at=1, signature=b"")


def member(state: str = "training") -> TrainerRecord:
    return TrainerRecord(run=RUN.run_id, outer_step=1, digest=bytes(32), tokens_per_s=50.0, state=state)  # type: ignore[arg-type]


def step(number: int) -> CommittedStep:
    return CommittedStep(outer_step=number, loss=1.5, digest="ab" * 32, group=("a", "b"), num_trainers=2, num_tokens=10)


class Scripted:
    """Plays back what an observer would find, one look after the other, and repeats the last one."""

    def __init__(self, *looks: tuple[Mapping[str, TrainerRecord], list[CommittedStep] | PeerTimeout]) -> None:
        self._looks = list(looks)
        self.run = RUN
        self.outer_step = 0
        self.roster: tuple[str, ...] = ()
        self.endorsement: Endorsement | None = None
        self.other_history: OtherHistory | None = None

    async def look_for_other_history(self, _members: Mapping[str, TrainerRecord]) -> OtherHistory | None:
        return self.other_history

    async def members(self) -> Mapping[str, TrainerRecord]:
        return self._looks[0][0]

    async def look(self, _members: Mapping[str, TrainerRecord]) -> list[CommittedStep]:
        found = self._looks.pop(0)[1] if len(self._looks) > 1 else self._looks[0][1]
        if isinstance(found, PeerTimeout):
            raise found
        self.outer_step = max([self.outer_step, *(each.outer_step for each in found)])
        self.roster = found[-1].group if found else self.roster
        return found


def told(observer: Scripted) -> list[dict[str, object]]:
    out = io.StringIO()
    watching = RunWatcher(observer, Emitter(json=True, out=out, err=io.StringIO()))  # type: ignore[arg-type]
    try:
        virtual_time.run(watching.until_finished())
    finally:
        observer.told = [json.loads(line) for line in out.getvalue().splitlines()]  # type: ignore[attr-defined]
    return observer.told  # type: ignore[attr-defined, no-any-return]


def test_watch_prints_members_and_steps_until_the_run_is_finished() -> None:
    both = {"a": member(), "b": member("joining")}
    events = told(Scripted(({}, []), (both, []), (both, [step(1)]), ({"a": member("finished")}, [step(2)])))
    assert [event["event"] for event in events] == ["members", "committed", "members", "committed", "run_finished"]
    assert events[0]["summary"] == "1 joining, 1 training"
    assert (events[1]["step"], events[1]["of"], events[1]["tokens_per_s"]) == (1, 2, 50.0)
    assert events[-1]["digest"] == "ab" * 32


def test_watch_warns_once_of_members_that_follow_another_history() -> None:
    looks = [({"a": member()}, [])] * 30
    observer = Scripted(*looks, ({"a": member("finished")}, [step(2)]))
    observer.other_history = OtherHistory(step=1, peers=("peer-b", "peer-c"))
    (event,) = [each for each in told(observer) if each["event"] == "warning"]
    assert event["message"] == (
        "another state of outer step 1 is shown by …peer-b, …peer-c: the run was begun twice, or it is made up"
    )
    assert "run resume" in str(event["remedy"])


def test_watch_prints_an_endorsement_of_the_author_once() -> None:
    observer = Scripted(({"a": member()}, []), ({"a": member()}, [step(1)]), ({"a": member("finished")}, [step(2)]))
    roster = (Identity(bytes(32)).peer_id,)
    observer.endorsement = Endorsement(run="x", sequence=7, outer_step=1, state_digest=bytes(32), roster=roster)
    (event,) = [each for each in told(observer) if each["event"] == "state_endorsed"]
    assert (event["step"], event["digest"], event["sequence"]) == (1, bytes(32).hex(), 7)


def test_watch_prints_a_measurement_once_as_most_members_report_it() -> None:
    def says(outer_step: int, loss: float) -> TrainerRecord:
        return replace(member(), validation=ValidationReport(outer_step=outer_step, loss=loss))

    first = {"a": says(1, 2.5), "b": says(1, 2.5), "liar": says(9, 0.0), "new": member()}
    second = {"a": says(2, 1.5), "b": says(2, 1.5), "liar": says(2, 99.0)}
    events = told(Scripted((first, []), (first, [step(1)]), (second, [step(2)])))
    assert [(each["step"], each["loss"]) for each in events if each["event"] == "validated"] == [(1, 2.5), (2, 1.5)]


def test_watch_ignores_measurements_of_a_step_that_was_not_committed() -> None:
    """One of two members could otherwise send the last measurement that anyone receives."""
    liar = replace(member(), validation=ValidationReport(outer_step=10**6, loss=0.0))
    honest = [replace(member(), validation=ValidationReport(outer_step=number, loss=2.5)) for number in (1, 2)]
    looks = [({"a": each, "liar": liar}, [step(number)]) for number, each in enumerate(honest, 1)]
    events = told(Scripted(*looks))
    assert [each["step"] for each in events if each["event"] == "validated"] == [1, 2]


def test_watch_ends_with_one_line_when_there_is_no_member() -> None:
    with pytest.raises(PeerTimeout, match=f"no member trains {RUN.run_id} in this network"):
        told(Scripted(({}, [])))


def test_watch_waits_for_the_first_member() -> None:
    events = told(Scripted(*[({}, list[CommittedStep]())] * 120, ({"a": member()}, [step(2)])))
    assert events[-1]["event"] == "run_finished"


def test_watch_of_a_file_says_once_how_long_it_waits_for_the_first_member() -> None:
    nobody = Scripted(*[({}, list[CommittedStep]())] * 60, ({"a": member()}, [step(2)]))
    here = Scripted(({"a": member()}, [step(2)]))
    for observer, times in ((nobody, 1), (here, 0)):
        err = io.StringIO()
        watching = RunWatcher(observer, Emitter(json=True, out=io.StringIO(), err=err))  # type: ignore[arg-type]
        virtual_time.run(watching.until_finished())
        line = f"no member of {RUN.run_id} was found: nobody trains it yet, or it is over and all members have left"
        assert err.getvalue().count(f"{line}; waiting up to 3 min for a member; Ctrl-C stops this") == times


def test_watch_of_a_run_id_says_that_it_waits_for_the_first_member(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = iter([PeerTimeout("nobody"), PeerTimeout("nobody"), RUN])

    async def find_run(*_: object, timeout_s: float) -> SignedRun:
        await asyncio.sleep(timeout_s)
        if isinstance(found := next(looks), PeerTimeout):
            raise found
        return found

    monkeypatch.setattr(run_watch, "find_run", find_run)
    err = io.StringIO()
    emitter = Emitter(json=True, out=io.StringIO(), err=err)
    found = virtual_time.run(run_watch._file_of(RUN.run_id, MagicMock(), MagicMock(), emitter))
    assert found is RUN
    assert err.getvalue().count("all members have left; waiting up to 3 min for a member; Ctrl-C stops this") == 1
    looks = iter([PeerTimeout("nobody")] * 100)
    with pytest.raises(PeerTimeout):
        virtual_time.run(run_watch._file_of(RUN.run_id, MagicMock(), MagicMock(), emitter))


def test_watch_prints_the_last_step_when_all_members_leave() -> None:
    observer = Scripted(({"a": member()}, [step(1)]), ({}, []))
    with pytest.raises(PeerTimeout, match="any more: it is at outer step 1 of 2"):
        told(observer)
    assert [event["event"] for event in observer.told] == ["members", "committed", "members"]  # type: ignore[attr-defined]


def test_watch_says_for_what_and_for_how_long_a_run_waits() -> None:
    alone = ({"a": member()}, list[CommittedStep]())
    observer = Scripted(({"a": member(), "b": member()}, [step(1)]), *[alone] * 260, ({"a": member()}, [step(2)]))
    err = io.StringIO()
    watching = RunWatcher(observer, Emitter(json=True, out=io.StringIO(), err=err))  # type: ignore[arg-type]
    virtual_time.run(watching.until_finished())
    said = [line for line in err.getvalue().splitlines() if "waits" in line]
    words = "waits: 1 of the 2 members that a step needs is there"
    assert said == [f"{words} (for {seconds} s)" for seconds in (5, 60, 120, 240)]
    assert err.getvalue().count("→ it goes on once another node joins: swarm-node join --run FILE --peers ADDR") == 4


def test_watch_names_lost_members_and_the_resume_order_that_lets_the_run_go_on() -> None:
    looks = [({"b": member()}, [step(1)]), *[({"b": member()}, list[CommittedStep]())] * 10, ({}, [step(2)])]
    (event,) = [each for each in told(Scripted(*looks)) if each["event"] == "run_waits"]
    assert event["reason"] == "1 of the 2 members of the last step that the next one needs is there; missing: …a"
    assert (event["ready"], event["needed"], event["missing"]) == (1, 2, ["a"])
    assert "swarm-node run resume" in str(event["remedy"])


def test_watch_writes_curves_of_the_observed_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def visiting(_config: Config) -> AsyncIterator[tuple[None, None]]:
        yield None, None

    monkeypatch.setattr(run_watch, "visiting", visiting)
    monkeypatch.setattr(run_watch, "Observer", lambda *_: Scripted(({"a": member()}, [step(2)])))
    config = resolve({"home": str(tmp_path), "tensorboard": str(tmp_path)}, env={})
    emitter = Emitter(json=True, out=io.StringIO(), err=io.StringIO())
    virtual_time.run(run_watch._watch(RUN, config, emitter))
    assert list((tmp_path / RUN.run_id / "watch").iterdir())


def test_watch_of_a_run_whose_last_state_this_home_keeps_ends_without_asking_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, story = tmp_path / "run.toml", RunConfig(name="x", outer_steps=2)
    run = sign_mapping(story, to_mapping(story), Identity(bytes(32)), 1)
    path.write_text(run.text)
    state = state_of(torch.ones(3), outer_step=2)
    save_checkpoint(tmp_path / "checkpoints" / run.run_id, Checkpoint(state=state, inner={}))
    monkeypatch.setattr(run_watch, "_watch", lambda *_: pytest.fail("members would be asked"))
    peer = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWHoK2zDpTB25vHJF4swgbFQqKcK3ruE4pJzSFjXSEDigi"
    assert cli.run(["run", "watch", str(path), "--home", str(tmp_path), "--peers", peer, "--json"]) == 0
    (event,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (event["event"], event["outer_step"], event["digest"]) == ("run_finished", 2, state.digest.hex())


def test_watch_reports_once_that_members_do_not_answer() -> None:
    silent = ({"a": member()}, PeerTimeout("no answer"))
    events = told(Scripted(silent, silent, silent, ({"a": member()}, [step(2)])))
    warnings = [event["message"] for event in events if event["event"] == "warning"]
    assert warnings == ["the run's progress cannot be seen: no answer"]


def test_watch_ends_without_an_error_when_the_last_members_have_just_left() -> None:
    """A record proves nothing, so it is not reported as `run_finished`."""
    done = replace(member("finished"), outer_step=2, loss=1.25)
    observer = Scripted(({"a": member()}, [step(1)]), ({"a": done}, PeerTimeout("it is gone")), ({}, []))
    events = told(observer)
    assert [event["event"] for event in events] == [
        *("members", "committed", "members", "members", "run_left"),
    ]
    last = events[-1]
    assert (last["outer_step"], last["loss"], last["digest"], last["checked"]) == (2, 1.25, bytes(32).hex(), 1)


@pytest.mark.parametrize(
    "other", [member(), member("joining"), replace(member("finished"), outer_step=2, digest=b"")], ids=lambda m: m.state
)
def test_watch_ends_with_an_error_when_only_some_members_say_that_the_run_is_finished(other: TrainerRecord) -> None:
    """Anybody may claim it."""
    done = replace(member("finished"), outer_step=2)
    observer = Scripted(
        ({"a": done}, PeerTimeout("silent")), ({"a": done, "b": other}, PeerTimeout("silent")), ({}, [])
    )
    with pytest.raises(PeerTimeout, match="no member trains"):
        told(observer)


def test_watch_reports_each_way_in_which_members_are_gone_once() -> None:
    looks = [({"a": member()}, PeerTimeout(reason)) for reason in ("gone", "refused", "gone", "refused")]
    events = told(Scripted(*looks, ({"a": member()}, [step(2)])))
    warnings = [event["message"] for event in events if event["event"] == "warning"]
    assert [warning.rpartition(": ")[2] for warning in warnings] == ["gone", "refused"]


def test_node_refuses_a_module_run_before_it_joins(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    write_run(path, module_run(RunConfig(name="own"), torch.nn.Linear(2, 1)), Identity.generate())
    with pytest.raises(ConfigError, match=r"module of its author's own.*swarm\.Trainer"):
        VolunteerRole(Config(home=tmp_path, name="test", run=path))


def test_node_refuses_data_that_the_run_does_not_use_before_it_joins(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    write_run(path, RunConfig(name="x"), Identity.generate())
    with pytest.raises(ConfigError, match="the run trains on the standard library"):
        VolunteerRole(Config(home=tmp_path, name="test", run=path, data=tmp_path))


def test_schedule_says_how_a_run_streams() -> None:
    assert schedule_of(RunConfig(name="x")) == "40 outer steps of 20 inner steps"
    assert schedule_of(RunConfig(name="x", outer_steps=1, interval_steps=1)) == "1 outer step of 1 inner step"
    streaming = RunConfig(name="x", fragments=4, overlap_steps=2)
    assert schedule_of(streaming).endswith(", each of which moves one of 4 fragments, beside the next 2 inner steps")
