"""`swarm-node run export`: it writes a state as a model that transformers loads, or lists the states that exist."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.training_swarm import AUTHOR, WINDOW_TOKENS, Swarm, SyntheticInner, certified
from swarm.network.membership import Membership
from swarm.network.memory.memory_network import MemoryInternet
from swarm.serving.model.model_files import load_manifest
from swarm.serving.model.shape import MANIFEST_FILE
from swarm.testing import virtual_time
from swarm.training.run.layout import Layout
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_file import write_run
from swarm.training.run.run_model import check_model
from swarm.training.run.run_tables import DataConfig, InnerConfig
from swarm.training.run.signed_run import SignedRun
from swarm.training.state.certificate import RunSignatures
from swarm.training.state.checkpoint import Checkpoint, save_checkpoint
from swarm.training.state.replica_state import ReplicaState
from swarm.training.trainer_events import OuterStep
from swarm_node import cli
from swarm_node.commands import run_export
from swarm_node.commands.run_export import newest_state
from swarm_node.events import emitter
from swarm_protocol.errors import ConfigError
from swarm_protocol.identity import Identity
from transformers import AutoModelForCausalLM

MODEL = {"model_type": "gpt2", "vocab_size": 256, "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 128}
CONFIG = RunConfig(
    name="tiny",
    outer_steps=6,
    interval_steps=2,
    min_group=2,
    model=MODEL,
    data=DataConfig(window_tokens=WINDOW_TOKENS),
    inner=InnerConfig(batch_windows=2),
)
NUM_VALUES = check_model(CONFIG)
PEER = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWHoK2zDpTB25vHJF4swgbFQqKcK3ruE4pJzSFjXSEDigi"
ADMITTED = Identity(b"admitted".ljust(32))


@dataclass(frozen=True, slots=True)
class Committed:
    state: ReplicaState
    certificate: bytes


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SignedRun:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWARM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SWARM_NETWORK_ID", "test")
    return write_run(tmp_path / "run.toml", CONFIG, AUTHOR)


def trained(run: SignedRun) -> tuple[list[Committed], float]:
    """Return the states of a run of two members, step by step, and when it ended."""
    found: dict[int, Committed] = {}

    async def main() -> float:
        async with Swarm(CONFIG) as swarm:
            swarm.run = run
            for name in ("m0", "m1"):
                await swarm.join(name, inner=SyntheticInner(num_values=NUM_VALUES, virtual_step_s=0.5))
            member = swarm.members["m0"]
            while CONFIG.outer_steps not in found:
                await asyncio.sleep(0.05)
                if (state := member.trainer.state) is not None and member.of(OuterStep):
                    found.setdefault(state.outer_step, Committed(state, member.trainer.certificate))
            return member.network.now()

    now = virtual_time.run(main())
    return [found[step] for step in sorted(found)], now


def keep(run: SignedRun, states: Sequence[Committed]) -> None:
    folder = Path("home", "checkpoints", run.run_id)
    for each in states:
        checkpoint = Checkpoint(state=each.state, inner={}, certificate=each.certificate)
        save_checkpoint(folder, checkpoint, keep=2, keep_every=3)


def events(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [problem for event in found for problem in emitter.problems(event)] == []
    return found


def test_export_of_a_kept_step_is_that_state_as_a_model(
    run: SignedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states, now = trained(run)
    monkeypatch.setattr(run_export, "time", SimpleNamespace(time=lambda: now))
    keep(run, states)
    assert cli.run(["run", "export", "--step", "3", "--out", "third", "--json"]) == 0
    [told] = events(capsys)
    state = states[2].state
    assert (told["outer_step"], told["digest"]) == (3, state.digest.hex())
    model = AutoModelForCausalLM.from_pretrained("third")
    assert torch.equal(Layout.of(model).flatten(model), state.theta_N)
    key = Identity.load_or_create(Path("home", "identity.key"))
    assert cli.run(["run", "export", "--step", "3", "--out", "signed", "--publish", "story", "--json"]) == 0
    exported, told = events(capsys)
    assert (exported["event"], told["event"]) == ("exported", "published")
    manifest = load_manifest(Path("signed", MANIFEST_FILE)).manifest
    assert (manifest.name, manifest.publisher) == ("story", key.peer_id)
    assert manifest.origin == f"run {run.run_id}, outer step 3"
    assert cli.run(["run", "export", "--json"]) == 0
    [told] = events(capsys)
    assert (told["outer_step"], told["path"]) == (6, f"{run.run_id}-step-6")
    assert cli.run(["run", "export", "--step", "4", "--json"]) == 1
    [error] = events(capsys)
    assert str(error["message"]).endswith("keeps no checkpoint of outer step 4, only of 3, 5, 6")


def test_export_refuses_a_state_without_a_certificate(run: SignedRun, capsys: pytest.CaptureFixture[str]) -> None:
    keep(run, [Committed(ReplicaState.initial(torch.zeros(NUM_VALUES)), b"")])
    assert cli.run(["run", "export", "--json"]) == 0
    warning, _ = events(capsys)
    assert "nothing proves that the run's members committed outer step 0" in str(warning["message"])


def test_export_counts_no_signers_that_the_run_does_not_admit(
    run: SignedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The strangers' certificate is for another state; if it counted, the export would be refused."""
    monkeypatch.setattr(run_export, "time", SimpleNamespace(time=lambda: 1.75e9))
    closed = replace(CONFIG, admission=tuple(sorted((run.peer_id, ADMITTED.peer_id))))
    run = write_run(Path("run.toml"), closed, AUTHOR)
    strangers = [RunSignatures(identity=Identity(bytes([n]) * 32), network_id="test", run=run.run_id) for n in (1, 2)]
    keep(run, [Committed(ReplicaState.initial(torch.zeros(NUM_VALUES)), certified(strangers, 3, 1.75e9))])
    assert cli.run(["run", "export", "--json"]) == 0
    warning, _ = events(capsys)
    assert "nothing proves that the run's members committed outer step 0" in str(warning["message"])


def test_export_with_another_state_s_certificate_is_refused(
    run: SignedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states, now = trained(run)
    monkeypatch.setattr(run_export, "time", SimpleNamespace(time=lambda: now))
    keep(run, [Committed(states[2].state, states[3].certificate)])
    assert cli.run(["run", "export", "--json"]) == 1
    assert "is of another state" in str(events(capsys)[0]["message"])


def test_export_without_any_checkpoint_says_where_to_look(run: SignedRun, capsys: pytest.CaptureFixture[str]) -> None:
    for named in ("run.toml", run.run_id):
        assert cli.run(["run", "export", named, "--json"]) == 1
        [error] = events(capsys)
        assert f"keeps no checkpoint of {run.run_id}" in str(error["message"])
        assert "--peers" in str(error["remedy"])


def test_export_from_a_home_or_from_its_folder_of_runs_names_the_folder_of_the_run(
    run: SignedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(run, [Committed(ReplicaState.initial(torch.zeros(NUM_VALUES)), b"")])
    for given in ("home", "home/checkpoints"):
        assert cli.run(["run", "export", "--checkpoint", given, "--json"]) == 1
        [error] = events(capsys)
        assert error["message"] == f"{given} keeps no checkpoint of {run.run_id}"
        assert error["remedy"] == f"name the folder of the run: --checkpoint home/checkpoints/{run.run_id}"


def test_export_of_a_checkpoint_directory_needs_no_home_and_no_run_file(
    run: SignedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is finished, and its folder was copied from a member's home to another machine."""
    states, now = trained(run)
    monkeypatch.setattr(run_export, "time", SimpleNamespace(time=lambda: now))
    keep(run, states)
    folder = Path("home", "checkpoints", run.run_id).rename("copy")
    Path("run.toml").rename(folder / "run.toml")
    third = folder / f"step-{3:013d}"
    for given, step in ((folder, 6), (third, 3)):
        assert cli.run(["run", "export", "--checkpoint", str(given), "--json"]) == 0
        [told] = events(capsys)
        assert (told["run"], told["outer_step"]) == (run.run_id, step)
        assert told["digest"] == states[step - 1].state.digest.hex()
    (third / "state.safetensors").write_bytes(b"garbage")
    for arguments, said in (
        (("--checkpoint", "copy", "--step", "4"), "copy keeps no checkpoint of outer step 4, only of 3, 5, 6"),
        (("--checkpoint", str(third), "--out", "x"), "is not whole: the state is cut off"),
        (("--checkpoint", "nowhere"), "nowhere is not a directory of checkpoints: it does not exist"),
        (("--checkpoint", "copy/run.toml"), "is not a directory of checkpoints: it is a file"),
    ):
        assert cli.run(["run", "export", *arguments, "--json"]) == 1
        assert said in str(events(capsys)[-1]["message"])
    assert cli.run(["run", "export", "--checkpoint", "copy", "--peers", PEER]) == cli.EXIT_USAGE
    assert "--checkpoint and --peers are both given" in capsys.readouterr().err


def test_export_refuses_an_invalid_model_name_before_it_writes_a_file(
    run: SignedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(run, [Committed(ReplicaState.initial(torch.zeros(NUM_VALUES)), b"")])
    assert cli.run(["run", "export", "--out", "model", "--publish", "Bad Name/.."]) == cli.EXIT_USAGE
    error, remedy = capsys.readouterr().err.strip().splitlines()
    assert error == "error: --publish: a model cannot be published as 'Bad Name/..'"
    assert remedy.startswith("  → give --publish at most ")
    assert not Path("model").exists()


def visit_a_network_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def alone(_config: object) -> AsyncIterator[tuple[object, object]]:
        network = MemoryInternet().network(ADMITTED)
        async with Membership(network) as membership:
            yield network, membership
        await network.close()

    monkeypatch.setattr(run_export, "visiting", alone)
    monkeypatch.setattr(run_export, "asyncio", SimpleNamespace(run=virtual_time.run, to_thread=asyncio.to_thread))


@pytest.mark.usefixtures("run")
def test_export_without_the_run_s_tokenizer_is_refused_before_members_are_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    visit_a_network_of_nobody(monkeypatch)
    write_run(Path("own.toml"), replace(CONFIG, data=replace(CONFIG.data, tokenizer="local")), AUTHOR)
    assert cli.run(["run", "export", "own.toml", "--peers", PEER, "--json"]) == 1
    [error] = events(capsys)
    assert "tokenizer" in str(error["message"])


@pytest.mark.parametrize("keeps", [False, True])
def test_export_once_the_members_have_left_says_what_can_be_exported_instead(
    run: SignedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], keeps: bool
) -> None:
    visit_a_network_of_nobody(monkeypatch)
    if keeps:
        keep(run, [Committed(ReplicaState.initial(torch.zeros(NUM_VALUES)), b"")])
    assert cli.run(["run", "export", "--peers", PEER, "--json"]) == 1
    said = capsys.readouterr()
    assert said.err.splitlines()[:2] == [
        "loading torch and transformers, which takes some seconds",
        "looking for members that train run.toml, for about 20 s if none answers",
    ]
    [error] = map(json.loads, said.out.splitlines())
    assert str(error["message"]).startswith(f"no member of {run.run_id} shows a certified state")
    remedy = str(error["remedy"])
    if keeps:
        assert remedy.startswith("leave out --peers: ")
        assert remedy.endswith(f"checkpoints/{run.run_id} keeps the checkpoints of outer steps 0")
    else:
        assert "--checkpoint with a copy of HOME/checkpoints/" in remedy
        assert "--then-serve" in remedy


def test_newest_state_comes_from_the_members_while_they_train(run: SignedRun) -> None:
    async def main() -> None:
        async with Swarm(CONFIG) as swarm:
            swarm.run = run
            for name in ("m0", "m1"):
                await swarm.join(name, inner=SyntheticInner(num_values=NUM_VALUES, virtual_step_s=0.5))
            member = swarm.members["m0"]
            while len(member.of(OuterStep)) < 2:
                await asyncio.sleep(0.05)
            network = swarm.internet.network(Identity(b"visitor".ljust(32)))
            async with Membership(network) as membership:
                said = list[str]()
                state = await newest_state(network, membership, run, NUM_VALUES, None, said.append)
                assert re.fullmatch(r"fetching the state of outer step \d+ from \d members?: .* at most", said[-1])
                digests = {event.step: event.digest for event in member.of(OuterStep)}
                assert state.outer_step >= 2
                assert state.hashed_again().digest.hex() == digests[state.outer_step]
                with pytest.raises(ConfigError, match=r"members only hold outer step \d, not 1"):
                    await newest_state(network, membership, run, NUM_VALUES, 1, said.append)
            await network.close()

    virtual_time.run(main())
