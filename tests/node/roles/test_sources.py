"""Models of a hub: which files are loaded and reported. Copies of run files in a home."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import AsyncMock, MagicMock

import pytest
from support.local_hub import COMMIT, MODEL, Hub, local_hub
from support.node_settings import resolve
from swarm.serving.model.model_files import open_model
from swarm.serving.model.span_loading import load_span
from swarm.serving.server.capability import VolunteerOptions
from swarm.serving.server.deployment import DTYPES
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_file import sign_run
from swarm_node import cli
from swarm_node.roles.serving import ModelServing, _options, model_name
from swarm_node.roles.sources import REPORT_S, ProgressReports, find_source
from swarm_node.settings.parsers import HubId, RunId, parse_model, parse_run
from swarm_node.shutdown import Shutdown
from swarm_node.storage.home import Home
from swarm_node.storage.kept_runs import copy_path, keep_copy, kept_copy
from swarm_protocol.errors import ConfigError, SessionError
from swarm_protocol.identity import Identity
from transformers import LlamaConfig, LlamaForCausalLM

NUM_BLOCKS = 4


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=NUM_BLOCKS, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "made", max_shard_size="40KB")
    with local_hub(tmp_path / "made", tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("someone/tiny", HubId("someone/tiny")),
        ("someone/Tiny-1.5_b@v2", HubId("someone/Tiny-1.5_b", "v2")),
        ("tiny", Path("tiny").absolute()),
        ("./someone/tiny", Path("someone/tiny").absolute()),
        ("/models/tiny", Path("/models/tiny")),
        ("a/b/c", Path("a/b/c").absolute()),
        ("../tiny", Path("../tiny").absolute()),
        ("-x/tiny", Path("-x/tiny").absolute()),
    ],
)
def test_parse_model_tells_directories_from_ids(text: str, model: Path | HubId) -> None:
    assert parse_model(text) == model
    assert model_name(model) == model.name


def test_parse_model_of_an_existing_directory_is_that_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone" / "tiny").mkdir(parents=True)
    assert parse_model("someone/tiny") == tmp_path / "someone" / "tiny"


def test_every_dtype_of_a_server_can_be_chosen() -> None:
    for name in DTYPES:
        assert resolve({"dtype": name}, env={}).dtype == name
    for short, name in {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.items():
        assert resolve({"dtype": short}, env={}).dtype == name
    with pytest.raises(ConfigError, match=", ".join(DTYPES)):
        resolve({"dtype": "float8"}, env={})


def test_source_on_a_hub_downloads_what_is_requested_and_reports_it(hub: Hub, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    source = find_source(HubId(MODEL), Home(tmp_path / "home"), lambda *progress: seen.append(progress))
    assert source.directory == tmp_path / "home" / "cache" / "models" / MODEL.replace("/", "--") / COMMIT
    assert not seen
    source.fetch_blocks(1, 3)
    num_shards = len(list(source.directory.glob("*.safetensors")))
    assert 0 < num_shards < len(list(hub.directory.glob("*.safetensors")))
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1] > 0


def test_error_of_an_unknown_hub_model_mentions_a_missing_directory(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the hub has no model modles/tiny: check its name") as caught:
        find_source(HubId("modles/tiny"), Home(tmp_path / "home"), lambda *_: None)
    assert caught.value.remedy.endswith("there is no directory modles/tiny here either")


def test_source_on_this_machine_is_used_without_a_download(tmp_path: Path) -> None:
    source = find_source(tmp_path, Home(tmp_path / "home"), lambda *_: pytest.fail("nothing is brought"))
    source.fetch_blocks(0, 1)
    assert source.directory == tmp_path


def test_download_reports_its_beginning_its_end_and_little_in_between() -> None:
    seen: list[int] = []
    now_s = 0.0
    reports = ProgressReports(lambda num_bytes, _total: seen.append(num_bytes), clock=lambda: now_s)
    reports(100, 100)
    assert not seen, "all files were there"
    for num_bytes in range(0, 101, 10):
        now_s += REPORT_S / 4
        reports(num_bytes, 100)
    assert seen == [0, 40, 80, 100]
    reports(100, 100)
    assert seen == [0, 40, 80, 100]


Scene = Callable[[VolunteerOptions, Path], None]


def serve(monkeypatch: pytest.MonkeyPatch, node: MagicMock, scene: Scene) -> None:
    """Let `ModelServing` serve MODEL, with `scene` in place of the volunteer's start, and leave at once."""

    def volunteer(*arguments: object, options: VolunteerOptions, **_others: object) -> AsyncMock:
        directory = arguments[2]
        assert isinstance(directory, Path)

        async def start() -> None:
            await asyncio.to_thread(scene, options, directory)
            node.work_end.request("done")

        return AsyncMock(start=start, failure=None)

    monkeypatch.setattr("swarm_node.roles.serving.SpanPlacer", volunteer)
    asyncio.run(ModelServing(node, HubId(MODEL), "tiny", numbered=False).until_leaving())


def node_in(tmp_path: Path) -> MagicMock:
    config = resolve({"home": str(tmp_path / "home"), "dtype": "int8", "max_memory": "64GiB"}, env={})
    return MagicMock(
        **{"network.network_id": "test"},
        work_end=Shutdown(),
        config=config,
        home=Home(config.home),
        hardware=MagicMock(device="cpu", memory_bytes=2**36),
    )


@pytest.mark.usefixtures("hub")
def test_serving_a_model_of_a_hub_reports_its_blocks_and_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = node_in(tmp_path)

    def scene(options: VolunteerOptions, directory: Path) -> None:
        assert options.server.dtype == "int8"
        options.fetch_blocks(1, 3)
        assert load_span(open_model(directory), 1, 3).end == 3

    serve(monkeypatch, node, scene)
    events = [call.args[0] for call in node.emitter.emit.call_args_list]
    assert events[0] == "loading"
    assert set(events[1:]) == {"downloading"}
    last = node.emitter.emit.call_args_list[-1].kwargs
    assert last["num_bytes"] == last["total_bytes"] > 0


@pytest.mark.usefixtures("hub")
def test_serving_that_is_left_while_it_downloads_ends_without_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = node_in(tmp_path)
    given_up = []

    def scene(options: VolunteerOptions, _directory: Path) -> None:
        node.work_end.request("Ctrl-C")
        with pytest.raises(SessionError, match="the node leaves") as caught:
            options.fetch_blocks(0, NUM_BLOCKS)
        given_up.append(caught)
        raise caught.value

    serve(monkeypatch, node, scene)
    assert given_up


@pytest.mark.usefixtures("hub")
def test_plan_of_a_model_of_a_hub_needs_no_weights_and_knows_their_dtype(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = tmp_path / "nodes.toml"
    nodes.write_text('[[nodes]]\nname = "attic"\nmemory = "1GB"\ndecode_ms_per_block = 2.0\n')
    home = tmp_path / "home"
    for dtype in ("float32", "bfloat16"):
        told = ["plan", "--home", str(home), "--model", MODEL, "--dtype", dtype, "--nodes", str(nodes)]
        assert cli.run(told) == 0
    whole, half = [line for line in capsys.readouterr().out.splitlines() if "tokens of cache" in line]
    assert whole != half
    assert not list((home / "cache").rglob("*.safetensors"))
    assert cli.run(["plan", "--home", str(home), "--model", "no/such", "--nodes", str(nodes)]) != 0
    assert "the hub has no model no/such" in capsys.readouterr().err


def test_serving_uses_no_more_memory_than_the_machine_has_whatever_the_setting(hub: Hub, tmp_path: Path) -> None:
    node = node_in(tmp_path)
    node.hardware.memory_bytes = 2**33
    assert _options(node, hub.directory, "float32", None).max_bytes < 2**33
    node.hardware.memory_bytes = 2**40
    assert 2**33 < _options(node, hub.directory, "float32", None).max_bytes < 2**36
    node.hardware.memory_bytes = 2**26
    with pytest.raises(ConfigError, match=r"to work: the model needs .* more: allow .* MiB with --max-memory$"):
        _options(node, hub.directory, "float32", None)


RUN = sign_run(RunConfig(name="kept"), Identity(bytes(32)), issued_at=1_700_000_000)


def test_copy_of_a_run_is_equal_and_a_damaged_one_is_ignored(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert kept_copy(home, RUN.run_id) is None
    keep_copy(home, RUN)
    assert kept_copy(home, RUN.run_id) == RUN
    path = copy_path(home, RUN.run_id)
    assert [each.name for each in path.parent.iterdir()] == ["run.toml"]
    path.write_text(path.read_text().replace("seed = 0", "seed = 1"))
    assert kept_copy(home, RUN.run_id) is None
    other = sign_run(RunConfig(name="kept"), Identity(bytes(32)), issued_at=1_700_000_001)
    path.write_text(other.text)
    assert kept_copy(home, RUN.run_id) is None
    for damaged in (b"", b"\xff", path.read_bytes()):  # as a power failure may leave it
        path.write_bytes(damaged)
        keep_copy(home, RUN)
        assert kept_copy(home, RUN.run_id) == RUN


def test_a_run_is_named_by_its_id_unless_there_is_a_file_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_run(RUN.run_id) == RunId(RUN.run_id)
    assert parse_run("run.toml") == tmp_path / "run.toml"
    assert parse_run(f"./{RUN.run_id}") == tmp_path / RUN.run_id
    Path(RUN.run_id).touch()
    assert parse_run(RUN.run_id) == tmp_path / RUN.run_id
