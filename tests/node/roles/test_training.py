"""Tests of what a node reports and saves of its training: events for scripts, and the members that it waits for."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
import torch
from support.node_settings import resolve
from support.replica_states import with_head
from support.round_scripts import ready
from swarm.evidence_folder import EvidenceFolder
from swarm.network.link_diagnosis import LinkWatch, SlowLink
from swarm.network.traffic import NO_LIMITS
from swarm.testing import virtual_time
from swarm.training.data.local_data import LocalData
from swarm.training.evidence.bans import Ban, Verdict
from swarm.training.member.checkpoint_writer import PendingCheckpoint
from swarm.training.member.run_member import RunMemberOptions
from swarm.training.round.promise import Promise, PromiseFile
from swarm.training.run.run_config import RunConfig
from swarm.training.run.signed_run import SignedRun
from swarm.training.state.checkpoint import Checkpoint, save_checkpoint
from swarm.training.state.replica_state import ReplicaState
from swarm.training.trainer_events import (
    Admitted,
    ContributionLate,
    HeldOutScored,
    InvitationRefused,
    MemberConvicted,
    OnProbation,
    OtherHistory,
    RoundAborted,
    RunResumed,
    StateEndorsed,
    Waiting,
)
from swarm_node.events.emitter import Emitter
from swarm_node.metrics.metric_registry import Registry
from swarm_node.node import Activity
from swarm_node.roles import training as roles_training
from swarm_node.roles.training import LINKS_S, RunTraining
from swarm_node.shutdown import Shutdown
from swarm_node.storage.home import Home
from swarm_protocol.control_messages import TrainingStatus
from swarm_protocol.errors import ConfigError, RoundError
from swarm_protocol.limits import MAX_OUTER_STEP

PEERS = tuple(f"12D3KooW{number:08d}" for number in range(70))
SHOWN = TrainingStatus(run="r", outer_step=1, num_outer_steps=2, tokens_per_s=533.0)


class Emitted:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def emit(self, name: str, **fields: object) -> None:
        self.events.append({"event": name, **fields})


def training_of(emitter: Emitted, waiting: Waiting | None = None) -> RunTraining:
    training = RunTraining.__new__(RunTraining)
    training._node = cast(Any, SimpleNamespace(emitter=emitter, activity=Activity()))
    training._run = cast(Any, SimpleNamespace(run_id="r", config=RUN.config))
    training._trainer = cast(Any, SimpleNamespace(waiting=waiting, report=None, bans=()))
    training._metrics = cast(Any, SimpleNamespace(count=lambda event: None))
    training._saving = cast(Any, SimpleNamespace(after=lambda *_: None))
    training._links = LinkWatch()
    training._begun = True
    training._standing = {}
    return training


@pytest.mark.parametrize(
    ("late_s", "when"),
    [
        (2.04, "came 2.0 s after the round's group was formed"),
        (0.0, "was ready just as the round's group was formed without it"),
        (None, "was still being computed"),
    ],
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
        (Waiting(peers=(), seconds=3.0, num_lacking=1), "1 more member"),
        (Waiting(peers=PEERS[:2], seconds=3.0, num_lacking=2), "…00000000, …00000001"),
        (Waiting(peers=PEERS[:2], seconds=3.0, is_for_disk=True), "its own disk, which takes no vote,"),
        (
            Waiting(peers=PEERS, seconds=3.0),
            "…00000000, …00000001, …00000002, …00000003, …00000004, …00000005, …00000006, …00000007 and 62 more",
        ),
    ],
)
def test_status_names_a_few_of_those_that_the_run_waits_for(waiting: Waiting | None, waits_for: str) -> None:
    status = training_of(Emitted(), waiting)._with_waiting(SHOWN)
    assert (status.waits_for, status.waits_s) == (waits_for, waiting.seconds if waiting else 0.0)


def test_status_names_the_members_that_a_trainer_waits_for_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing() -> None: ...

    async def made() -> Any:
        return SimpleNamespace(waiting=Waiting(peers=PEERS[:1], seconds=3.0), bans=(), close=nothing)

    async def main() -> None:
        training = training_of(Emitted())
        training._node.metrics = Registry()
        training._node.config = cast(Any, SimpleNamespace(name="attic", tensorboard=None))
        training._node.network = cast(Any, SimpleNamespace(peer_id="me"))
        training._saving = cast(Any, SimpleNamespace(finish=nothing))
        monkeypatch.setattr(training, "_make_trainer", made)
        async with training.taking_part():
            assert training._node.activity.waits(SHOWN).waits_for == "…00000000"

    asyncio.run(main())


def test_curves_that_cannot_be_written_are_told_before_the_data_is_prepared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def main() -> None:
        training = training_of(Emitted())
        training._node.config = cast(Any, SimpleNamespace(name="attic", tensorboard=tmp_path))
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
        monkeypatch.setattr(training, "_make_trainer", lambda: pytest.fail("the data was prepared"))
        with pytest.raises(ConfigError, match="tensorboard library"):
            async with training.taking_part():
                pass

    asyncio.run(main())


RUN = SignedRun(config=RunConfig(name="x", outer_steps=9), peer_id="author", issued_at=1, signature=b"")
DIGEST = "ab" * 32
RESUMED = RunResumed(step=4, digest=DIGEST, roster=("a", "b"), sequence=7)


def make_training(folder: Path, out: io.StringIO, saved: list[PendingCheckpoint]) -> RunTraining:
    node = SimpleNamespace(
        home=Home(folder),
        config=SimpleNamespace(name="attic", invitation=(), keep_checkpoints=2, keep_every=0, tensorboard=None),
        metrics=Registry(),
        emitter=Emitter(json=True, out=out, err=io.StringIO()),
        steps=SimpleNamespace(done=lambda *_: None),
        activity=Activity(),
    )
    training = RunTraining(cast("Any", node), RUN)
    training._inner = cast("Any", SimpleNamespace(state=dict))
    training._trainer = cast(
        "Any",
        SimpleNamespace(
            report=None,
            replica=SimpleNamespace(
                current=ReplicaState.initial(torch.zeros(2)),
                certificate=b"before",
                history=SimpleNamespace(certificates=(b"first", b"before")),
            ),
            digest=DIGEST,
            alone="",
            between_intervals=lambda _function: Future(),
        ),
    )
    cast("Any", training._saving).soon = saved.append
    return training


def test_state_that_the_run_goes_on_from_is_saved_again_with_the_resume_order(tmp_path: Path) -> None:
    """Otherwise a member that forgets the order at a restart could not keep the votes that it has promised."""
    saved: list[PendingCheckpoint] = []
    training = make_training(tmp_path, io.StringIO(), saved)
    training._tell(Admitted(step=5, group=("a", "b")))
    training._tell(Admitted(step=5, group=("a", "b")))
    assert [each.checkpoint.certificate for each in saved] == [b"before"], "the same state must not be written again"
    assert saved[0].checkpoint.history == (b"first", b"before")
    cast("Any", training._trainer).replica.certificate = b"order"
    training._tell(RESUMED)
    assert [each.checkpoint.certificate for each in saved] == [b"before", b"order"]


def test_training_that_begins_with_a_resume_order_tells_the_step_of_its_state(tmp_path: Path) -> None:
    out = io.StringIO()
    make_training(tmp_path, out, [])._tell(RESUMED)
    told = {each["event"]: each for each in map(json.loads, out.getvalue().splitlines())}
    assert told["training"]["outer_step"] == told["run_resumed"]["step"] == RESUMED.step


def test_invalid_invitation_is_a_warning_and_the_steps_of_probation_are_reported(
    tmp_path: Path,
) -> None:
    out = io.StringIO()
    training = make_training(tmp_path, out, [])
    training._tell(InvitationRefused(step=7, serial="00000000000000ff", reason="is used up (1 of 1)"))
    for steps_left in (4, 1, 0):
        training._tell(OnProbation(step=7, steps_left=steps_left))
    told = [json.loads(line) for line in out.getvalue().splitlines()]
    [warning] = [each for each in told if each["event"] == "warning"]
    assert warning["message"].startswith(f"the invitation 00000000000000ff to {RUN.run_id} is used up (1 of 1): ")
    assert [each["words"] for each in told if each["event"] == "on_probation"] == [
        "on probation: 4 more outer steps until this node counts fully",
        "on probation: 1 more outer step until this node counts fully",
        "this node counts fully from the next outer step on",
    ]


def test_status_says_while_this_node_is_on_probation_and_which_step_is_endorsed(tmp_path: Path) -> None:
    out = io.StringIO()
    training = make_training(tmp_path, out, [])
    training._trainer = cast("Any", SimpleNamespace(report=None, waiting=None, state=None, bans=(), alone=""))
    assert training._with_waiting(SHOWN) == SHOWN
    endorsed = StateEndorsed(step=5, digest=DIGEST, sequence=1)
    training._tell(endorsed)
    training._tell(OnProbation(step=7, steps_left=3))
    told = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [each["outer_step"] for each in told if each["event"] == "training"] == [7], "it begins at its own state"
    status = training._with_waiting(SHOWN)
    assert (status.steps_left, status.probation_steps) == (3, RUN.config.probation_steps)
    assert (status.endorsed_step, status.endorses_other) == (5, False)
    training._tell(OnProbation(step=10, steps_left=0))
    training._tell(replace(endorsed, step=8, is_other=True))
    assert status.held_out == ""
    training._tell(HeldOutScored(step=10, scores={"5Z1T2a": -0.25, "b": 0.5, "c": 0.75}, own=0.5))
    status = training._with_waiting(SHOWN)
    assert status.held_out == "this node +0.500 nats a step; of 3 trainers, median +0.500, lowest -0.250 (…5Z1T2a)"
    assert (status.steps_left, status.probation_steps) == (0, 0)
    assert (status.endorsed_step, status.endorses_other) == (8, True)


def test_start_without_another_member_and_another_history_are_told_to_the_user(tmp_path: Path) -> None:
    out = io.StringIO()
    training = make_training(tmp_path, out, [])
    alone = "no other member was found, so this one begins the run from its initial state"
    training._trainer = cast("Any", SimpleNamespace(report=None, waiting=None, state=None, alone=alone))
    details: list[str] = []
    training._node.steps = cast("Any", SimpleNamespace(done=lambda _title, detail: details.append(detail)))
    training._tell(OtherHistory(step=2, peers=PEERS[:1]))
    training._tell(OnProbation(step=0, steps_left=3))
    warned, begun, _ = map(json.loads, out.getvalue().splitlines())
    assert warned["event"] == "warning"
    assert "another state of outer step 2 is shown by …00000000:" in warned["message"]
    assert details == [f"from outer step 0 of {RUN.config.outer_steps}; {alone}"]
    assert (begun["event"], begun["outer_step"], begun["is_alone"]) == ("training", 0, True)


def test_status_says_that_peers_show_another_history_until_the_author_resumes_one(tmp_path: Path) -> None:
    training = make_training(tmp_path, io.StringIO(), [])
    training._trainer = cast("Any", SimpleNamespace(report=None, waiting=None, state=None, bans=(), alone=""))
    training._saving = cast("Any", SimpleNamespace(after=lambda *_: None))
    training._tell(OtherHistory(step=MAX_OUTER_STEP, peers=PEERS))
    status = training._with_waiting(SHOWN)
    assert status.other_history.startswith(f"another state of outer step {MAX_OUTER_STEP} is shown by …00000000, ")
    training._tell(RunResumed(step=2, digest=DIGEST, sequence=1, roster=PEERS))
    assert training._with_waiting(SHOWN).other_history == ""


def test_newcomer_does_not_train_while_it_waits_for_the_endorsed_state(tmp_path: Path) -> None:
    out = io.StringIO()
    training = make_training(tmp_path, out, [])
    training._trainer = cast("Any", SimpleNamespace(report=None, waiting=None, state=None, has_joined=False, alone=""))
    training._node.traces = cast("Any", SimpleNamespace(round_aborted=lambda *_: None))
    waits = RoundAborted(step=5, attempt=0, reason="waiting for a member", missing=())
    training._tell(waits)
    assert [json.loads(line)["event"] for line in out.getvalue().splitlines()] == ["round_aborted"]
    cast("Any", training._trainer).has_joined = True
    training._tell(waits)
    assert "training" in [json.loads(line)["event"] for line in out.getvalue().splitlines()]


def test_convicted_member_is_reported_counted_and_in_the_status(tmp_path: Path) -> None:
    out = io.StringIO()
    training = make_training(tmp_path, out, [])
    reason = "it signed a wrong result of part 1"
    verdict = Verdict(peer_id="12D3KooW00000007", step=3, kind="wrong_reduction", reason=reason)
    bans = (Ban(verdict=verdict, data=b"", until=9), Ban(verdict=verdict, data=b"", until=None))
    training._trainer = cast("Any", SimpleNamespace(report=None, waiting=None, state=None, bans=bans))
    event = MemberConvicted(step=3, peer_id="12D3KooW00000007", kind="wrong_reduction", reason=reason, until=9)
    training._begun = True
    training._tell(event)
    assert training._with_waiting(SHOWN).convicted == (
        "…00000007 is banned until outer step 9: it signed a wrong result of part 1",
        "…00000007 is banned for good: it signed a wrong result of part 1",
    )
    (told,) = map(json.loads, out.getvalue().splitlines())
    assert (told["event"], told["peer_id"], told["run"]) == ("member_convicted", "12D3KooW00000007", RUN.run_id)
    assert (told["until"], told["how_long"]) == (9, "until outer step 9")
    assert b"swarm_trainer_convicted_total 1" in training._node.metrics.exposition()


def test_slow_link_is_reported_once_while_it_lasts_and_is_in_the_status() -> None:
    sender, other = (f"12D3KooW{index:08}" for index in (1, 2))
    slow = SlowLink(kind="link", sender=sender, receiver=other, slowdown=7.0)
    named = iter([(slow,), (slow,), (), (slow,)])

    async def main() -> None:
        told: list[dict[str, Any]] = []
        training = training_of(cast("Any", SimpleNamespace(emit=lambda name, **fields: told.append(fields))))

        async def trainers(_run: str) -> dict[str, Any]:
            training._links = cast("Any", SimpleNamespace(named=next(named), update=lambda _reports: None))
            return {}

        training._node.membership = cast("Any", SimpleNamespace(trainers=trainers))
        watching = asyncio.create_task(training._watch_links())
        await asyncio.sleep(4.5 * LINKS_S)
        watching.cancel()
        await asyncio.wait({watching})
        words = "…00000001 sends 7.0 times slower than usual to …00000002 in this run"
        assert [(each["kind"], each["words"]) for each in told] == [("link", words)] * 2
        status = training._with_waiting(TrainingStatus(run="r", outer_step=1, num_outer_steps=2))
        assert status.slow_links == (words,)

    virtual_time.run(main())


def test_member_s_own_data_and_tokenizer_are_used_for_training_and_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    books, words = tmp_path / "books", tmp_path / "words.json"
    seen: list[object] = []

    def prepared(_run: object, _options: object, data: LocalData, *_: object) -> NoReturn:
        seen.append((data.path, data.tokenizer))
        raise ConfigError("enough")

    training = make_training(tmp_path, io.StringIO(), [])
    training._node.config = resolve({"home": str(tmp_path), "data": str(books), "tokenizer": str(words)}, env={})
    training._node.hardware, training._node.work_end = cast("Any", SimpleNamespace(device="cpu")), Shutdown()
    monkeypatch.setattr(roles_training, "prepare", prepared)

    def export(_theta: object, _config: object, directory: Path, *, tokenizer: Path) -> None:
        directory.mkdir(parents=True)
        seen.append(tokenizer)

    monkeypatch.setattr(roles_training, "export_hf", export)
    with pytest.raises(ConfigError, match="enough"):
        training._prepare(None)
    training._export(ReplicaState.initial(torch.zeros(2)))
    assert seen == [(books, words), words]


def test_finished_run_is_reported_with_the_digest_of_the_state_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members that end with equal digests hold equal bits."""
    exported = list[ReplicaState]()

    async def nothing(*_: object) -> None: ...

    def export(state: ReplicaState) -> Path:
        exported.append(state)
        return Path("model")

    state = with_head(ReplicaState.initial(torch.zeros(2)), outer_step=RUN.config.outer_steps)
    state.theta_N[1] += 1
    training = training_of(emitter := Emitted())
    training._trainer = cast(Any, SimpleNamespace(run=nothing, state=state))
    for name, replacement in (("_stop_when_leaving", nothing), ("_watch_links", nothing), ("_export", export)):
        monkeypatch.setattr(training, name, replacement)
    assert asyncio.run(training.finish()) == Path("model")
    digest = state.hashed_again().digest
    assert digest != state.digest
    assert [event["digest"] for event in emitter.events] == [digest.hex()]
    assert [each.digest for each in exported] == [digest]


def test_model_that_does_not_fit_at_the_end_of_a_run_says_where_its_state_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*_: object) -> None: ...

    def export(_state: ReplicaState) -> NoReturn:
        raise ConfigError("it cannot be written", remedy="free space there")

    step, checkpoints = RUN.config.outer_steps, tmp_path / "checkpoints" / RUN.run_id
    training = make_training(tmp_path, io.StringIO(), [])
    state = with_head(ReplicaState.initial(torch.zeros(2)), outer_step=step)
    training._trainer = cast(Any, SimpleNamespace(run=nothing, state=state))
    for name, replacement in (("_stop_when_leaving", nothing), ("_watch_links", nothing), ("_export", export)):
        monkeypatch.setattr(training, name, replacement)
    command = f"swarm-node run export {RUN.run_id}"
    of_others = f"export it from the other members while they are there: {command} --peers ADDR"
    for advice in (of_others, f"then export this node's checkpoint: {command} --home {tmp_path}"):
        training._saving = cast("Any", SimpleNamespace(finish=nothing))
        with pytest.raises(ConfigError, match="it cannot be written") as refused:
            asyncio.run(training.finish())
        assert refused.value.remedy.startswith("free space there; ")
        assert refused.value.remedy.endswith(advice)
        (checkpoints / f"step-{step:013d}").mkdir(parents=True, exist_ok=True)


def test_model_of_an_earlier_state_stays_until_the_next_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, is_disk_full = make_training(tmp_path, io.StringIO(), []), False
    training._node.config = resolve({"home": str(tmp_path)}, env={})

    def export(theta_N: torch.Tensor, _config: object, directory: Path, **_: object) -> None:
        if is_disk_full:
            raise ConfigError("the disk is full")
        directory.mkdir(parents=True)
        (directory / "weights").write_text(str(theta_N.tolist()))

    monkeypatch.setattr(roles_training, "export_hf", export)
    for number in (1.0, 2.0):
        place = training._export(ReplicaState.initial(torch.tensor([number])))
    is_disk_full = True
    with pytest.raises(ConfigError, match="the disk is full"):
        training._export(ReplicaState.initial(torch.tensor([3.0])))
    assert [(path.name, path.read_text()) for path in place.rglob("*")] == [("weights", "[2.0]")]
    assert [path.name for path in place.parent.iterdir()] == [place.name]


def test_restarted_member_has_its_state_certificate_promises_and_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its promises it could vote twice for one step, and the run could have two histories."""
    training = make_training(tmp_path, io.StringIO(), [])
    node, folder = training._node, tmp_path / "checkpoints" / RUN.run_id
    node.membership = node.identity = cast("Any", None)
    node.network = cast("Any", SimpleNamespace(network_id="test"))
    node.limits = NO_LIMITS
    state = ReplicaState.initial(torch.ones(2))
    save_checkpoint(folder, Checkpoint(state=state, inner={}, certificate=b"proof", history=(b"first",)), keep=1)
    setup = SimpleNamespace(theta_N=torch.zeros(2))
    monkeypatch.setattr(training, "_prepare", lambda _resumed: setup)
    monkeypatch.setattr(roles_training, "RunMember", lambda *_, options, **__: options)
    options: RunMemberOptions = cast("Any", asyncio.run(training._make_trainer()))
    assert options.state is not None
    assert options.state.hashed_again().manifest == state.manifest
    assert (options.certificate, options.history) == (b"proof", (b"first",))
    assert options.promises is not None
    promise = Promise(report=ready(1), first_attempt=7)
    options.promises.write(promise)
    assert PromiseFile(folder / "votes").read() == promise
    assert options.evidence is not None
    options.evidence.keep("12D3KooW00000007", b"evidence")
    assert EvidenceFolder(folder / "evidence", RUN.text, "test").read() == [b"evidence"]


def test_training_that_is_cancelled_while_it_prepares_leaves_no_worker_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node may go on, if only the hours in which it lends are over."""
    training = make_training(tmp_path, io.StringIO(), [])
    began, goes_on, closed = threading.Event(), threading.Event(), threading.Event()

    def prepared(_resumed: object) -> Any:
        began.set()
        assert goes_on.wait(30.0)
        return SimpleNamespace(inner=SimpleNamespace(close=closed.set))

    async def main() -> None:
        taking_part = asyncio.create_task(training.taking_part().__aenter__())
        assert await asyncio.to_thread(began.wait, 30.0)
        taking_part.cancel()
        await asyncio.wait({taking_part})
        assert taking_part.cancelled()

    monkeypatch.setattr(training, "_prepare", prepared)
    asyncio.run(main())
    assert not closed.is_set()
    goes_on.set()
    assert closed.wait(30.0)


def test_node_no_longer_shows_its_training_when_that_was_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = make_training(tmp_path, io.StringIO(), [])
    node, trainer = training._node, training._trainer

    async def nothing() -> None: ...

    async def made() -> Any:
        training._show(0)
        return trainer

    async def main() -> None:
        with pytest.raises(RoundError):
            async with training.taking_part():
                raise RoundError("the device has no memory left")

    cast("Any", trainer).close = cast("Any", training._saving).finish = nothing
    node.config, node.network = resolve({"home": str(tmp_path)}, env={}), cast("Any", SimpleNamespace(peer_id="me"))
    monkeypatch.setattr(training, "_make_trainer", made)
    asyncio.run(main())
    assert node.activity.training is None


def test_checkpoints_are_kept_as_the_settings_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[Path, int, int]] = []

    def writer(folder: Path, *, keep: int, keep_every: int, **_: object) -> None:
        written.append((folder, keep, keep_every))

    node = make_training(tmp_path, io.StringIO(), [])._node
    node.config = resolve({"home": str(tmp_path), "keep_checkpoints": "5", "keep_every": "3"}, env={})
    monkeypatch.setattr(roles_training, "CheckpointWriter", writer)
    RunTraining(node, RUN)
    assert written == [(tmp_path / "checkpoints" / RUN.run_id, 5, 3)]
