"""`swarm.Trainer` over real sockets: a small module of an author's own, and a run that its file describes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from support.local_hub import MODEL, local_hub
from support.tiny_models import FAMILIES, write_model
from swarm.evidence_folder import EvidenceFolder
from swarm.network.libp2p.libp2p_options import Libp2pOptions, listen_addrs_for
from swarm.serving.model.hub_download import HubModel, OnProgress
from swarm.serving.model.model_files import open_model
from swarm.start_checkpoint import CheckpointSource, model_settings, pin_of
from swarm.trainer import MemberOptions
from swarm.training.member.run_member import RunMember, RunMemberOptions
from swarm.training.round.promise import PromiseFile
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_file import write_run
from swarm.training.run.run_model import module_run, weights_digest
from swarm.training.run.run_tables import DataConfig, InnerConfig, StartConfig
from swarm.training.state.checkpoint import load_newest
from swarm.training.trainer_events import IntervalFailed, InvitationRefused
from swarm_protocol.errors import ConfigError, IntegrityError, SessionError, StartError
from swarm_protocol.identity import Identity
from swarm_protocol.run_credentials import invite_to_run
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from swarm import Trainer

OPTIONS = MemberOptions(network_id="test")
RUN = RunConfig(
    name="own",
    outer_steps=3,
    interval_steps=4,
    min_group=2,
    quorum_grace_s=1.0,
    inner=InnerConfig(batch_windows=4),
)


def make_module() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


class Points:
    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x_2 = torch.randn(2, generator=torch.Generator().manual_seed(index))
        return x_2, x_2.sum().sin()


def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x_B2, y_B = batch
    return (module(x_B2).squeeze(1) - y_B).square().mean()


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    write_run(path, module_run(RUN, make_module(), num_samples=len(Points())), Identity.generate())
    return path


def own_trainer(run_path: Path, peers: tuple[str, ...], module: nn.Module, options: MemberOptions = OPTIONS) -> Trainer:
    return Trainer(run_path, peers=peers, model=module, optimizer=sgd, data=Points(), loss=loss, options=options)


def test_trainers_of_an_own_module_in_two_processes_end_with_equal_weights(run_path: Path, tmp_path: Path) -> None:
    """The real thing: here one person's member, and in a script of its own another's."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    module = make_module()
    before = weights_digest(module)
    with own_trainer(run_path, (), module, replace(OPTIONS, identity=tmp_path / "my.key")) as trainer:
        other = subprocess.Popen(
            [sys.executable, str(script), str(run_path), trainer.addrs[0]], stdout=subprocess.PIPE, text=True
        )
        try:
            steps = list(trainer)
            said = other.communicate()[0].splitlines()
        finally:
            other.kill()
            other.wait()
        assert list(trainer) == []
    assert [step.outer_step for step in steps] == [1, 2, 3]
    assert {len(step.group) for step in steps} == {2}
    assert [line.split() for line in said] == [
        *([str(step.outer_step), step.digest] for step in steps),
        ["weights", weights_digest(module)],
    ]
    assert weights_digest(module) != before
    assert trainer.module is module
    assert steps[-1].loss < steps[0].loss
    # what the member with a lasting key has promised outlives its process
    kept = PromiseFile(tmp_path / "my.key.votes" / trainer.run.run_id).read()
    assert kept is not None
    assert kept.own_prepare_vote is not None
    assert kept.report.step == kept.own_prepare_vote.vote.step == 3
    assert [path.name for path in tmp_path.glob("*.votes")] == ["my.key.votes"]


SCRIPT = """
import sys, torch
from torch import nn
from swarm import Trainer
from swarm.trainer import MemberOptions
from swarm.training.round.promise import PromiseFile
from swarm.training.run.run_model import weights_digest

torch.manual_seed(3)
module = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
points = [(x, x.sum().sin()) for x in (torch.randn(2, generator=torch.Generator().manual_seed(i)) for i in range(500))]
with Trainer(
    sys.argv[1],
    peers=sys.argv[2:],
    model=module,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    data=points,
    loss=lambda module, batch: (module(batch[0]).squeeze(1) - batch[1]).square().mean(),
    options=MemberOptions(network_id="test"),
) as trainer:
    for step in trainer:
        print(step.outer_step, step.digest, flush=True)
print("weights", weights_digest(module))
"""


def test_trainer_of_a_run_that_its_file_describes_gives_its_model_and_stays_while_it_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = iter([True, False])
    monkeypatch.setattr(RunMember, "is_watched", property(lambda _: next(asked)))
    tiny = {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
    }
    run = replace(RUN, outer_steps=2, min_group=1, model=tiny, data=DataConfig(window_tokens=16))
    write_run(tmp_path / "run.toml", run, Identity.generate())
    with Trainer(tmp_path / "run.toml", peers=[], options=OPTIONS) as trainer:
        assert [step.outer_step for step in trainer] == [1, 2]
        assert trainer.module(torch.zeros(1, 3, dtype=torch.int64)).logits.shape == (1, 3, 256)
    assert not list(asked), "it left at once"


def test_trainer_of_a_run_that_starts_from_a_checkpoint_begins_with_its_weights(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", FAMILIES["llama-tied"]())
    run = replace(
        RUN,
        outer_steps=1,
        interval_steps=1,
        min_group=1,
        model=model_settings(open_model(base).config),
        start=StartConfig(checkpoint="local"),
        data=DataConfig(window_tokens=16),
        inner=InnerConfig(learning_rate=1e-9),
    )
    digest = pin_of(run, CheckpointSource(place=base, cache=tmp_path)).digest
    write_run(tmp_path / "run.toml", replace(run, start=replace(run.start, digest=digest)), Identity.generate())
    with Trainer(tmp_path / "run.toml", peers=[], options=replace(OPTIONS, start=str(base))) as trainer:
        assert [step.outer_step for step in trainer] == [1]
        found = dict(trainer.module.named_parameters())
    for name, parameter in AutoModelForCausalLM.from_pretrained(base).named_parameters():
        torch.testing.assert_close(found[name], parameter, atol=1e-6, rtol=0.0)


def test_trainer_that_leaves_ends_the_download_of_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = threading.Event()

    def endless(_model: HubModel, _start: int, _end: int, on_progress: OnProgress) -> None:
        while True:
            on_progress(1, 2)
            began.set()

    base = write_model(tmp_path / "base", FAMILIES["llama-tied"]())
    start = StartConfig(checkpoint=MODEL, digest="ab" * 32)
    settings = model_settings(open_model(base).config)
    run = replace(RUN, min_group=1, model=settings, start=start, data=DataConfig(window_tokens=16))
    write_run(tmp_path / "run.toml", run, Identity.generate())
    with local_hub(base, tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setattr("swarm.start_checkpoint.download_blocks", endless)
        with Trainer(tmp_path / "run.toml", peers=[], options=OPTIONS):
            assert began.wait(30.0)


def test_what_the_author_s_function_raises_reaches_the_author(run_path: Path) -> None:
    def broken(module: nn.Module, batch: object) -> Tensor:
        raise ZeroDivisionError("mine")

    write_run(run_path, replace(module_run(RUN, make_module()), min_group=1), Identity.generate())
    trainer = Trainer(run_path, peers=[], model=make_module(), optimizer=sgd, data=[None], loss=broken, options=OPTIONS)
    with trainer, pytest.raises(ZeroDivisionError, match="mine"):
        list(trainer)
    assert weights_digest(trainer.module) == weights_digest(make_module())


def test_leaving_before_anyone_else_is_there_takes_no_time_and_keeps_the_first_weights(run_path: Path) -> None:
    module = make_module()
    with own_trainer(run_path, (), module) as trainer:
        pass
    assert weights_digest(module) == weights_digest(make_module())
    with pytest.raises(SessionError, match="has been used"):
        trainer.__enter__()


def test_run_whose_members_all_stopped_goes_on_from_their_checkpoints(run_path: Path, tmp_path: Path) -> None:
    run = module_run(replace(RUN, outer_steps=6), make_module(), num_samples=len(Points()))
    write_run(run_path, run, Identity.generate())
    keys = [tmp_path / name for name in ("a.key", "b.key")]

    def train(num_steps: int | None) -> tuple[list[int], list[int]]:
        """Return the steps that the first member saw, and the last step of each."""
        modules = make_module(), make_module()
        first, second = (replace(OPTIONS, identity=key, checkpoints=tmp_path / "kept") for key in keys)
        with (
            own_trainer(run_path, (), modules[0], first) as trainer,
            own_trainer(run_path, trainer.addrs, modules[1], second) as other,
        ):
            steps = [step.outer_step for step in islice(trainer, num_steps)]
        last = []
        for key, each in zip(keys, (trainer, other), strict=True):
            peer_id = Identity.load_or_create(key).peer_id
            newest = load_newest(tmp_path / "kept" / each.run.run_id / peer_id)
            assert newest is not None
            assert each._state is not None
            assert newest.state.digest == each._state.digest
            last.append(newest.state.outer_step)
        if num_steps is None:
            assert weights_digest(modules[0]) == weights_digest(modules[1])
        return steps, last

    steps, last = train(2)
    assert steps == [1, 2]
    assert max(last) < 6
    assert train(None) == ([*range(max(last) + 1, 7)], [6, 6])


def test_checkpoints_of_a_member_without_a_lasting_key_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="key ends with the session") as refused:
        MemberOptions(checkpoints=tmp_path)
    assert "identity=FILE" in refused.value.remedy


def test_second_process_with_the_same_identity_and_run_is_refused(run_path: Path, tmp_path: Path) -> None:
    """Both would sign for one member, and be banned for what they say."""
    trainer = own_trainer(run_path, (), make_module(), MemberOptions(identity=str(tmp_path / "my.key")))
    with (
        PromiseFile(tmp_path / "my.key.votes" / trainer.run.run_id).locked(),
        pytest.raises(ConfigError, match="another process trains this run"),
        trainer,
    ):
        raise AssertionError("it has joined")


def test_member_enters_a_run_that_requires_an_invitation(run_path: Path) -> None:
    author = Identity.generate()
    run = replace(RUN, outer_steps=1, min_group=1, invitations="required")
    write_run(run_path, module_run(run, make_module(), num_samples=len(Points())), author)
    run_id = own_trainer(run_path, (), make_module()).run.run_id
    invitation = invite_to_run(author, run_id, network_id="test", now=time.time(), lifetime_s=600.0)
    options = replace(OPTIONS, invitations=(invitation.text(),))
    with own_trainer(run_path, (), make_module(), options) as trainer:
        assert [step.outer_step for step in trainer] == [1]


def test_invitation_that_is_used_up_is_told(run_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own_trainer(run_path, (), make_module())._on_event(InvitationRefused(step=1, serial="ff", reason="is used up"))
    assert "the invitation with serial ff is used up" in caplog.text


def test_trainer_computes_with_denormal_numbers_when_the_program_flushes_them(
    run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves: list[float] = []

    async def take_part(_trainer: Trainer) -> None:
        halves.append(torch.full((1,), 2.0**-126).mul_(0.5).item())

    monkeypatch.setattr(Trainer, "_take_part", take_part)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor flushes nothing")
    try:
        with own_trainer(run_path, (), make_module()):
            pass
    finally:
        torch.set_flush_denormal(False)
    assert halves == [2.0**-127]


def test_interval_that_fails_again_for_one_reason_is_logged_each_time_the_number_has_doubled(
    run_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = own_trainer(run_path, (), make_module())
    for step, reason in (*[(1, "the loss is nan")] * 7, (2, "the loss is nan"), (2, "no data")):
        trainer._on_event(IntervalFailed(step=step, reason=reason))
    assert [record.message.partition("outer step ")[2] for record in caplog.records] == [
        "1: the loss is nan",
        "1: the loss is nan (2 times in a row)",
        "1: the loss is nan (4 times in a row)",
        "2: the loss is nan",
        "2: no data",
    ]


def test_invitation_that_cannot_be_read_is_refused_before_joining(run_path: Path) -> None:
    with pytest.raises(ConfigError, match="invitation"):
        own_trainer(run_path, (), make_module(), replace(OPTIONS, invitations=("nothing",)))


def test_member_that_the_run_does_not_let_in_is_refused_before_joining(
    run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def create(_options: Libp2pOptions) -> None:
        raise AssertionError("it goes to the network")

    monkeypatch.setattr("swarm.trainer.Libp2pNetwork.create", create)
    author = Identity.generate()
    invitation = invite_to_run(author, "another-run", network_id="test", now=time.time(), lifetime_s=600.0)
    options = replace(OPTIONS, invitations=(invitation,))
    with (
        pytest.raises(ConfigError, match="is to the run another-run, not to"),
        own_trainer(run_path, (), make_module(), options),
    ):
        raise AssertionError("it has joined")
    named = replace(module_run(RUN, make_module()), min_group=1, admission=(author.peer_id,))
    write_run(run_path, named, author)
    stranger = Trainer(run_path, peers=[], model=make_module(), optimizer=sgd, data=[None], loss=loss, options=OPTIONS)
    with pytest.raises(ConfigError, match="admits only the peers in its setting admission") as refused, stranger:
        raise AssertionError("it has joined")
    assert refused.value.remedy == "ask its author to add that peer id and to sign the run again"


@pytest.fixture
def member_options(monkeypatch: pytest.MonkeyPatch) -> list[RunMemberOptions]:
    """Record the options of the members that trainers make, in order."""
    seen: list[RunMemberOptions] = []

    class Recorded(RunMember):
        def __init__(self, *args: object, options: RunMemberOptions, **kwargs: object) -> None:
            seen.append(options)
            super().__init__(*args, options=options, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("swarm.trainer.RunMember", Recorded)
    return seen


def test_member_with_a_lasting_key_keeps_evidence_and_endorsement_beside_it(
    run_path: Path, tmp_path: Path, member_options: list[RunMemberOptions]
) -> None:
    with own_trainer(run_path, (), make_module(), replace(OPTIONS, identity=tmp_path / "my.key")) as trainer:
        pass
    (options,) = member_options
    assert options.evidence is not None
    options.evidence.keep("liar", b"proof")
    folder = tmp_path / "my.key.votes" / trainer.run.run_id
    assert EvidenceFolder(folder / "evidence", trainer.run.text, "test").read() == [b"proof"]
    assert options.endorsements == folder


def test_member_with_a_key_of_one_session_keeps_nothing(run_path: Path, member_options: list[RunMemberOptions]) -> None:
    with own_trainer(run_path, (), make_module()):
        pass
    (options,) = member_options
    assert (options.promises, options.evidence, options.endorsements) == (None, None, None)


BEYOND = f"/ip4/203.0.113.7/tcp/4001/p2p/{Identity.generate().peer_id}"


@pytest.mark.parametrize(
    ("peers", "listen"),
    [
        ((), None),
        ((f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}",), None),
        ((BEYOND,), None),
        ((BEYOND,), ("/ip4/127.0.0.1/tcp/0",)),
        ((BEYOND,), ()),
    ],
)
def test_member_is_reached_by_the_peers_that_it_joins_through_as_a_node_is(
    run_path: Path, monkeypatch: pytest.MonkeyPatch, peers: tuple[str, ...], listen: tuple[str, ...] | None
) -> None:
    seen = []

    async def create(options: Libp2pOptions) -> None:
        seen.append((options.listen, options.relay))
        raise StartError("enough is seen")

    monkeypatch.setattr("swarm.trainer.Libp2pNetwork.create", create)
    with pytest.raises(StartError), own_trainer(run_path, peers, make_module(), replace(OPTIONS, listen=listen)):
        raise AssertionError("it has joined")
    assert seen == [(listen_addrs_for(peers) if listen is None else listen, "auto")]


def test_weights_of_a_session_without_a_state_are_an_error_that_says_so(run_path: Path, tmp_path: Path) -> None:
    trainer = own_trainer(run_path, (), make_module())
    with pytest.raises(SessionError, match="before the training has ended"):
        _ = trainer.module
    nobody = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"
    trainer = own_trainer(run_path, (nobody,), make_module())
    with pytest.raises(StartError), trainer:
        raise AssertionError("it has joined")
    with pytest.raises(SessionError, match="left before it had a state"):
        _ = trainer.module


def test_peers_that_are_not_there_are_one_error(run_path: Path) -> None:
    nobody = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"
    with pytest.raises(StartError), own_trainer(run_path, (nobody,), make_module()):
        raise AssertionError("it has joined")


@pytest.mark.parametrize("missing", ["model", "optimizer", "data", "loss"])
def test_module_without_all_it_needs_is_refused(run_path: Path, missing: str) -> None:
    given = {"model": make_module(), "optimizer": sgd, "data": Points(), "loss": loss}
    del given[missing]
    with pytest.raises(ConfigError, match=f"lacks {missing}"):
        Trainer(run_path, peers=[], **given)  # type: ignore[arg-type]


def test_module_run_without_a_module_and_other_weights_are_refused(run_path: Path) -> None:
    with pytest.raises(ConfigError, match="module of its author's own"):
        Trainer(run_path, peers=[])
    with pytest.raises(IntegrityError, match="other weights"):
        own_trainer(run_path, (), nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)))


def test_iterating_before_joining_is_refused(run_path: Path) -> None:
    with pytest.raises(SessionError, match="with Trainer"):
        next(iter(own_trainer(run_path, (), make_module())))
