"""Real processes: volunteers train a run, export it, and serve it together, or look for work.

All are in one file, so that one worker runs them and imports once for all of them; see `support.forked_node`.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from safetensors import safe_open
from support.chat_command import chat_in_pipe, chat_in_terminal
from support.exposed_metrics import scraped
from support.forked_node import forking
from support.local_hub import local_hub
from support.node_process import Node, wait_until
from support.tiny_models import FAMILIES, write_model
from swarm.serving.model.model_files import open_model
from swarm.start_checkpoint import CheckpointSource, model_settings, pin_of
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_file import load_checked_run, write_run
from swarm.training.run.run_tables import DEFAULT_MODEL, DataConfig, StartConfig
from swarm.training.state.certificate import RunSignatures
from swarm.training.state.checkpoint import load_newest
from swarm_node.demo import demo_answer
from swarm_node.machine.lean_imports import UNUSED_PACKAGES
from swarm_protocol.identity import Identity
from transformers.utils.logging import is_progress_bar_enabled

from .conftest import RunHere, Seed, StartNode, run_node

# the grace is longer than any busy machine takes to leave: a node that ends unclean has waited for nothing until then
ALONE = ("--probe", "off", "--device", "cpu", "--threads", "1", "--drain-s", "100")
JOIN = ("join", "--network-id", "tests", *ALONE)
HELP = ("join", "--network-id", "helping", *ALONE)
DEFAULT_DATA = DataConfig()
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}


def test_forked_nodes_have_imported_what_a_started_one_does_as_quietly() -> None:
    with ProcessPoolExecutor(1, mp_context=forking()) as pool:
        assert not pool.submit(is_progress_bar_enabled).result(), "a progress bar leaves a named semaphore behind"
        imported = pool.submit(_imported).result()
    assert {"swarm_node.roles.volunteer", "transformers.models.llama.modeling_llama"} <= imported
    assert not set(UNUSED_PACKAGES) & imported


def _imported() -> set[str]:
    return set(sys.modules)


def written_run(folder: Path, *, outer_steps: int, num_nodes: int = 2, data: DataConfig = DEFAULT_DATA) -> Path:
    config = RunConfig(
        name="tiny",
        data=data,
        outer_steps=outer_steps,
        interval_steps=2,
        min_group=num_nodes,
        max_group=num_nodes,
        quorum_grace_s=0.5,
        model=dict(DEFAULT_MODEL) | SMALL,
    )
    write_run(folder / "run.toml", config, Identity.generate())
    return folder / "run.toml"


def named(node: Node, name: str) -> list[dict[str, object]]:
    return [event for event in node.events if event["event"] == name]


def test_join_trains_a_run_that_can_be_watched_and_then_serves_it(
    seed: Seed, start_node: StartNode, run_here: RunHere, tmp_path: Path
) -> None:
    run = written_run(tmp_path, outer_steps=2)
    serve = ("--then-serve", "--max-blocks", "2")
    first = start_node(*JOIN, "--peers", seed.addr, "--run", run, *serve, home="a", is_forked=True)
    while first.wait_for("step", timeout_s=100)["title"] != "warm-up":
        pass
    # a member that knows the run gets its file from the first one
    second = start_node(
        *JOIN, "--peers", seed.addr, "--run", load_checked_run(run).run_id, *serve, home="b", is_forked=True
    )
    nodes = [first, second]
    serving = [node.wait_for("serving", timeout_s=150) for node in nodes]
    steps = [[(event["step"], event["digest"]) for event in named(node, "outer_step")] for node in nodes]
    assert [step for step, _ in steps[0]] == [1, 2]
    assert steps[0] == steps[1], "replicas must be bit-identical"
    numbered = named(nodes[0], "step")
    assert [event["title"] for event in numbered[4:]] == ["takes", "schedule", "warm-up", "training"]
    assert {numbered[-1]["number"], *(event["of"] for event in numbered)} == {8}, "all steps must be done"
    assert "TRAINING step 1 of 2" in nodes[0].err_path.read_text()
    finished = [named(node, "run_finished")[0] for node in nodes]
    assert {event["digest"] for event in finished} == {steps[0][-1][1]}
    assert sorted((event["start"], event["end"]) for event in serving) == [(0, 2), (2, 4)]
    assert serving[0]["revision"] == serving[1]["revision"]
    assert serving[0]["model"] == finished[0]["run"]
    exported = Path(str(named(nodes[0], "exported")[0]["path"]))
    run_id = str(finished[0]["run"])
    assert load_checked_run(second.home / "checkpoints" / run_id / "run.toml") == load_checked_run(run)
    assert exported == nodes[0].home / "checkpoints" / run_id / run_id
    with safe_open(exported / "model.safetensors", framework="pt") as file:
        assert len(list(file.keys())) > 4
    [status] = run_node("status", "--home", nodes[0].home).events
    assert status["state"] == "serving"
    assert isinstance(status["serving"], dict)
    assert status["serving"]["model"] == finished[0]["run"]
    watched = run_here("run", "watch", run_id, "--network-id", "tests", "--peers", seed.addr)
    assert watched.code == 0
    assert [event["event"] for event in watched.events] == [
        *("watching", "members", "validated", "committed", "run_finished"),
    ]
    assert watched.events[2]["loss"] == named(nodes[0], "validated")[-1]["loss"]
    assert (watched.events[3]["step"], watched.events[3]["digest"]) == steps[0][-1]
    assert watched.events[0]["run"] == run_id
    assert watched.events[-1]["digest"] == finished[0]["digest"]
    for node in nodes:
        node.process.send_signal(signal.SIGTERM)
    assert [node.wait_end() for node in nodes] == [0, 0]
    for node in nodes:
        assert node.events[-1]["clean"] is True
        assert "Traceback" not in node.err_path.read_text()


def test_join_after_being_killed_resumes_from_its_checkpoint(seed: Seed, start_node: StartNode, tmp_path: Path) -> None:
    run = written_run(tmp_path, outer_steps=200, num_nodes=1)
    node = start_node(*JOIN, "--peers", seed.addr, "--run", run, "--metrics", "127.0.0.1:0", home="a", is_forked=True)
    while node.wait_for("checkpoint", timeout_s=100)["outer_step"] == 0:
        pass
    measured = scraped(str(named(node, "metrics")[0]["url"]))
    node.process.kill()
    node.wait_end()
    assert_rounds_are_measured(measured, num_told=len(named(node, "outer_step")))
    kept = max(int(str(event["outer_step"])) for event in named(node, "checkpoint"))
    checkpoint = load_newest(node.home / "checkpoints" / load_checked_run(run).run_id)
    assert checkpoint is not None
    # the proof to others that the state to resume from is the run's
    signatures = RunSignatures(identity=Identity.generate(), network_id="tests", run=load_checked_run(run).run_id)
    proof = signatures.check_certificate(checkpoint.certificate, time.time())
    assert proof.outcome.state_digest == checkpoint.state.hashed_again().digest
    again = start_node(*JOIN, "--peers", seed.addr, "--run", run, home="a", is_forked=True)
    resumed = int(str(again.wait_for("training", timeout_s=100)["outer_step"]))
    assert resumed >= kept
    assert int(str(again.wait_for("outer_step")["step"])) == resumed + 1
    again.process.send_signal(signal.SIGTERM)
    assert again.wait_end() == 0


def test_invited_node_counts_fully_at_its_first_step_and_an_uninvited_one_is_left_out(
    seed: Seed, start_node: StartNode, run_here: RunHere, tmp_path: Path
) -> None:
    author, path = Identity.generate(), tmp_path / "run.toml"
    config = RunConfig(name="tiny", outer_steps=2000, interval_steps=2, min_group=1, max_group=4, quorum_grace_s=0.5)
    write_run(path, replace(config, invitations="required", model=dict(DEFAULT_MODEL) | SMALL), author)
    author.save(tmp_path / "author.key")
    invite = ("run", "invite", path, "--identity", tmp_path / "author.key", "--network-id", "tests")
    word = tmp_path / "two.invitation"
    answer = run_here(*invite, "--uses", "2", "--out", word)
    assert (answer.code, answer.events[0]["max_uses"]) == (0, 2)
    joining = (*JOIN, "--peers", seed.addr, "--run", path)
    founder = start_node(*joining, "--invitation", word, home="founder", is_forked=True)
    while int(str(founder.wait_for("outer_step", timeout_s=100)["step"])) < 4:
        pass
    friend = start_node(*joining, "--invitation", word.read_text().strip(), home="friend", is_forked=True)
    refused = run_here(*joining, "--home", tmp_path / "refused")
    assert (refused.code, "takes only nodes with an invitation" in refused.error) == (1, True)
    entered = friend.wait_for("entered", timeout_s=100)
    assert str(entered["how"]).startswith(f"invited, serial {answer.events[0]['serial']}")
    friend.wait_for("outer_step")
    [status] = run_here("status", "--home", friend.home).events
    assert isinstance(status["training"], dict)
    assert (status["training"]["entered"], status["training"]["steps_left"]) == (entered["how"], 0)
    assert not named(friend, "on_probation")
    stranger = start_node(*joining, "--invitation", word, home="stranger", is_forked=True)  # has let in two by now
    while "wants an invitation" not in str(stranger.wait_for("round_aborted", timeout_s=100)["reason"]):
        pass
    [me] = [event["peer_id"] for event in stranger.events if event["event"] == "ready"]
    assert not any(str(me) in str(event["group"]) for event in named(stranger, "outer_step"))
    nodes = (founder, friend, stranger)
    for node in nodes:
        node.process.send_signal(signal.SIGTERM)
    # the two start together, and no group has the stranger, so that none waits for its whole grace
    assert [node.wait_end() for node in nodes] == [0, 0, 0]
    for node in nodes:
        assert node.events[-1]["clean"] is True
        assert word.read_text()[20:60] not in node.err_path.read_text()


def assert_rounds_are_measured(found: dict[str, float], *, num_told: int) -> None:
    """Check the metrics that were scraped while a trainer, alone in its run, trained.

    It reported `num_told` steps in all.
    """
    num_committed = found["swarm_trainer_rounds_total,committed"]
    assert 1 <= num_committed <= num_told
    assert found["swarm_trainer_outer_step"] == num_committed
    assert found["swarm_trainer_num_outer_steps"] == 200
    assert found["swarm_trainer_group_size"] == 1
    assert found["swarm_trainer_loss"] > 0
    assert found["swarm_trainer_tokens_total"] > 0
    assert found["swarm_trainer_outer_step_seconds_count"] == num_committed
    for phase in ("interval", "reduce", "commit"):
        assert found[f"swarm_trainer_phase_seconds_count,{phase}"] >= 1, phase
    assert found["swarm_node_state,training"] == 1


def test_join_trains_on_its_own_folder_and_reports_the_progress_of_tokenizing(
    seed: Seed, start_node: StartNode, tmp_path: Path
) -> None:
    run = written_run(tmp_path, outer_steps=2, num_nodes=1, data=DataConfig(source="files", window_tokens=32))
    books = tmp_path / "books"
    books.mkdir()
    for index in range(40):
        (books / f"{index}.txt").write_text(f"Es waren {index} mal ein König und eine Königin. " * 40)
    recording = ("--tensorboard", tmp_path / "curves", "--name", "attic")
    node = start_node(*JOIN, "--peers", seed.addr, "--run", run, "--data", books, *recording, home="a", is_forked=True)
    told = node.wait_for("tokenizing", timeout_s=100)
    while told["share"] != 1.0:
        told = node.wait_for("tokenizing")
    assert told["num_tokens"] == sum(path.stat().st_size + 1 for path in books.iterdir())
    node.wait_for("run_finished", timeout_s=100)
    assert node.wait_end() == 0
    losses = [float(str(event["loss"])) for event in named(node, "outer_step")]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415 - an extra

    drawn = EventAccumulator(str(tmp_path / "curves" / load_checked_run(run).run_id / "attic")).Reload()
    assert [each.value for each in drawn.Scalars("loss/training")] == pytest.approx(losses)
    assert [each.step for each in drawn.Scalars("loss/validation")] == [0, 2]
    assert f"tokens are cached in {told['folder']}, for all homes" in node.err_path.read_text()
    assert any(Path(str(told["folder"])).glob("*.tokens"))
    other = start_node(*JOIN, "--peers", seed.addr, "--run", run, "--data", books, home="b", is_forked=True)
    other.wait_for("training", timeout_s=100)
    assert named(other, "tokenizing") == [], "all homes on a machine share them"


CONTEXT_TOKENS = 16384


def test_models_are_listed_and_one_answers_in_a_pipe_and_in_a_terminal(
    seed: Seed, start_node: StartNode, run_here: RunHere, tmp_path: Path
) -> None:
    config = FAMILIES["llama"]()
    config.max_position_embeddings, config.eos_token_id = CONTEXT_TOKENS, None
    model = write_model(tmp_path / "long", config)
    server = start_node(*JOIN, "--peers", seed.addr, "--model", model, "--blocks", "0:6", home="server", is_forked=True)
    serving = server.wait_for("serving", timeout_s=100)
    peers = ("--home", str(tmp_path / "asking"), "--network-id", "tests", "--peers", seed.addr)
    found: list[dict[str, object]] = []

    def is_listed() -> bool:
        [listed] = run_here("models", *peers).events
        found[:] = [each for each in cast(Any, listed["models"]) if each["name"] == "long"]
        return bool(found)

    wait_until(is_listed, "the model is listed")
    [long] = found
    assert (long["served"], long["num_servers"], long["context_tokens"]) == ([[0, 6]], 1, CONTEXT_TOKENS)
    assert long["revision"] == serving["revision"]
    wanted = ("--temperature", "0", "--max-tokens", "12")
    code, answer, told = asyncio.run(chat_in_pipe(f"long@{long['revision']}", *wanted, *peers, text="def add("))
    assert (code, answer) == (0, demo_answer.complete_undisturbed(model, "def add(", 12) + "\n"), told
    assert "has no chat template" in told
    asyncio.run(chat_in_terminal("long", "--max-tokens", str(CONTEXT_TOKENS - 100), *peers))


def test_join_without_the_data_that_the_run_asks_for_says_what_to_name(
    seed: Seed, run_here: RunHere, tmp_path: Path
) -> None:
    run = written_run(tmp_path, outer_steps=2, data=DataConfig(source="files"))
    answer = run_here(*JOIN, "--peers", seed.addr, "--run", run, "--home", tmp_path / "home")
    assert "trains on each member's own files → name a file or folder: --data PATH" in answer.error
    assert answer.code == 1


def test_join_trains_a_checkpoint_further_and_refuses_another_one(
    seed: Seed, start_node: StartNode, run_here: RunHere, tmp_path: Path
) -> None:
    base, other = (write_model(tmp_path / name, FAMILIES["llama-tied"](), index) for index, name in enumerate("ab"))
    model = model_settings(open_model(base).config)
    config = RunConfig(
        name="further", model=model, outer_steps=1, interval_steps=1, min_group=1, start=StartConfig(checkpoint="local")
    )
    digest = pin_of(config, CheckpointSource(place=base, cache=tmp_path)).digest
    write_run(tmp_path / "run.toml", replace(config, start=replace(config.start, digest=digest)), Identity.generate())
    joining = (*JOIN, "--peers", seed.addr, "--run", tmp_path / "run.toml")
    refused = run_here(*joining, "--start", other, "--home", tmp_path / "refused")
    assert refused.code == 1
    assert "other weights than those that the run starts from" in refused.error
    node = start_node(*joining, "--start", base, home="first", is_forked=True)
    assert node.wait_for("run_finished", timeout_s=100)["outer_step"] == 1
    where = ("--home", node.home, "--network-id", "tests", "--out", tmp_path / "exported")
    exported = run_here("run", "export", load_checked_run(tmp_path / "run.toml").run_id, *where)
    assert [event["event"] for event in exported.events] == ["exported"]
    assert open_model(tmp_path / "exported").num_blocks == open_model(base).num_blocks


def test_join_with_a_run_that_was_changed_says_so(seed: Seed, run_here: RunHere, tmp_path: Path) -> None:
    run = written_run(tmp_path, outer_steps=2)
    run.write_text(run.read_text().replace("outer_steps = 2", "outer_steps = 3"))
    answer = run_here(*JOIN, "--peers", seed.addr, "--run", run, "--home", tmp_path / "home")
    assert "is not what its author signed" in answer.error
    assert answer.code == 1


def test_doctor_beside_a_seed_finds_no_problem(seed: Seed, run_here: RunHere, tmp_path: Path) -> None:
    answer = run_here("doctor", "--network-id", "tests", "--peers", seed.addr, "--home", tmp_path)
    found = {str(event["check"]): event["result"] for event in answer.events}
    assert list(found) == [
        *("versions", "libp2p", "home", "disk", "ports", "gpu", "seeds", "clock", "reachability"),
    ]
    assert set(found.values()) == {"ok"}, answer.events
    assert answer.code == 0
    wait_until(lambda: seed.node.process.poll() is None, "the seed goes on")


def test_doctor_of_another_network_fails_with_the_remedy(seed: Seed, run_here: RunHere, tmp_path: Path) -> None:
    answer = run_here("doctor", "--network-id", "others", "--peers", seed.addr, "--home", tmp_path)
    [failed] = [event for event in answer.events if event["result"] == "fail"]
    assert failed["check"] == "seeds"
    assert "same network id" in str(failed["remedy"])
    assert answer.code == 1


# --- volunteers without given work: they find some, say why they took it, and do it ---


@pytest.fixture
def lone_seed(start_node: StartNode) -> str:
    """Start a separate network, since that of the other tests would have work."""
    [addr] = start_node("seed", "--network-id", "helping", home="seed", is_light=True).wait_for("ready")["addrs"]  # type: ignore[misc]
    return str(addr)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with local_hub(write_model(tmp_path / "made", FAMILIES["llama"]()), tmp_path / "hub") as found:
        monkeypatch.setenv("HF_ENDPOINT", found.endpoint)
        yield


def step(node: Node, title: str) -> str:
    while (event := node.wait_for("step", timeout_s=100))["title"] != title:
        pass
    return str(event["detail"])


def test_join_alone_waits_then_trains_the_run_that_comes(lone_seed: str, start_node: StartNode, tmp_path: Path) -> None:
    helper = start_node(*HELP, "--peers", lone_seed, home="helper", is_light=True)
    assert "nobody serves a model or trains a run" in str(helper.wait_for("waiting")["reason"])
    mapped = {each.path for each in psutil.Process(helper.process.pid).memory_maps()}
    assert not [path for path in mapped if "libtorch" in path], "a node that waits does not load it"
    run = written_run(tmp_path, outer_steps=2)
    member = start_node(*HELP, "--peers", lone_seed, "--run", run, home="member", is_forked=True)
    assert step(helper, "looks").endswith("has only 1 member")
    finished = [node.wait_for("run_finished", timeout_s=100) for node in (helper, member)]
    assert finished[0]["digest"] == finished[1]["digest"]
    assert named(helper, "outer_step")
    assert "it is finished here" in str(helper.wait_for("waiting", timeout_s=100)["reason"])
    helper.process.send_signal(signal.SIGTERM)
    assert helper.wait_end() == 0


@pytest.mark.usefixtures("hub")
def test_join_alone_serves_the_blocks_that_no_server_has(lone_seed: str, start_node: StartNode) -> None:
    model = ("--model", "someone/tiny", "--dtype", "bfloat16", "--blocks", "0:4")
    server = start_node(*HELP, "--peers", lone_seed, *model, home="server", is_forked=True)
    told = server.wait_for("serving", timeout_s=100)
    helper = start_node(*HELP, "--peers", lone_seed, home="helper", is_forked=True)
    assert step(helper, "looks") == "2 of the 6 blocks of tiny have no server"
    serving = helper.wait_for("serving", timeout_s=100)
    assert serving["start"] <= 4  # type: ignore[operator]
    assert serving["end"] == 6
    assert serving["revision"] == told["revision"], "the same commit in the same dtype"
    helper.process.send_signal(signal.SIGTERM)
    assert helper.wait_end() == 0
