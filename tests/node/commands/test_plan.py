"""`swarm-node plan`: its output, and its messages about bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from swarm_node import cli
from swarm_node.commands.plan import parse_nodes
from swarm_node.machine.hardware import PROCESS_BYTES, limit_for, share_of_limit
from swarm_protocol.errors import ConfigError
from transformers import LlamaConfig, LlamaForCausalLM

ATTIC = '[[nodes]]\nname = "attic"\nmemory = "800MB"\ndecode_ms_per_block = 2.0\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("planned") / "tiny"
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def nodes_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "nodes.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_plan_says_which_node_serves_which_blocks_why_and_how_fast(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = nodes_file(tmp_path, ATTIC + "rtt = { client = 9.0 }\n")
    assert cli.run(["plan", "--model", str(model), "--nodes", str(path)]) == 0
    out = capsys.readouterr().out
    assert "attic  0:4" in out
    assert "4 of 4 blocks have no server" in out
    assert "the whole model fits beside the cache of" in out
    assert "speed: 125.0 tokens/s" in out
    assert "18.0 ms a token over attic 0:4" in out


def test_plan_with_a_gap_says_what_closes_it(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = nodes_file(tmp_path, ATTIC.replace("800MB", str(limit_for(600_000))))
    assert cli.run(["plan", "--model", str(model), "--nodes", str(path), "--json"]) == 0
    event = json.loads(capsys.readouterr().out)
    assert event["event"] == "plan"
    assert event["nodes"][0]["end"] == event["lacking"][0]["start"] < event["lacking"][0]["end"] == 4
    assert event["lacking"][0]["memory_bytes"] > limit_for(600_000)
    assert (event["tokens_per_s"], event["chain"], event["chain_ms"]) == (0, [], None)
    assert cli.run(["plan", "--model", str(model), "--nodes", str(path)]) == 0
    assert "→ a node with" in capsys.readouterr().out


def test_wrong_nodes_file_is_refused_before_torch_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_node.commands.plan.say_loading", lambda _: pytest.fail("torch would be loaded"))
    (tmp_path / "config.json").write_text("{}")
    path = nodes_file(tmp_path, ATTIC.replace("800MB", "much"))
    assert cli.run(["plan", "--model", str(tmp_path), "--nodes", str(path)]) == 1
    assert f"memory of node 1 in {path} " in capsys.readouterr().err


def test_nodes_file_reads_every_key(tmp_path: Path) -> None:
    cellar = '[[nodes]]\nname = "cellar"\nmemory = 1000\ntokens_per_s = 25\nrelayed = true\n'
    text = ATTIC + cellar + "prefill_ms_per_token = 0.5\nrtt = { attic = 1, client = 2.5 }\n"
    one, two = parse_nodes(text, tmp_path, 4)
    assert (one.name, one.memory_bytes, one.decode_ms, one.client_rtt_ms) == ("attic", 800_000_000, 2.0, None)
    assert (two.decode_ms, two.prefill_ms, two.relayed, two.memory_bytes) == (10.0, 0.5, True, 1000)
    assert (two.rtt_ms, two.client_rtt_ms) == ({"attic": 1.0}, 2.5)


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        ("", "names no nodes", "[[nodes]]"),
        ("nodes = 3", "names no nodes", "[[nodes]]"),
        ("node = []", "unknown key 'node'", "did you mean nodes?"),
        ("outer_steps = 3", "the nodes file ", "use one of nodes"),
        ("[[nodes", "is not valid TOML", "[[nodes]]"),
        ("nodes = " + "1" * 5000, "is not valid TOML", "[[nodes]]"),
        (ATTIC.replace("memory", "memroy"), "unknown key 'memroy'", "did you mean memory?"),
        (ATTIC.replace("800MB", "lots"), "is not a size", "24GiB"),
        (ATTIC.replace("800MB", "0"), "is 0 bytes", "24GiB"),
        (ATTIC.replace("800MB", "9999999TiB"), "bytes", "24GiB"),
        (ATTIC.replace("2.0", "-1"), "decode_ms_per_block of node 1", "above 0"),
        (ATTIC.replace("2.0", "nan"), "is nan", "above 0"),
        (ATTIC.replace("2.0", "true"), "is True", "above 0"),
        (ATTIC.replace("2.0", "1e99"), "is 1e+99", "600000"),
        (ATTIC.replace("2.0", "0"), "is 0", "above 0"),
        (ATTIC + "tokens_per_s = 3", "decode_ms_per_block or tokens_per_s", "one of them"),
        (ATTIC + "rtt = { cellar = 3 }", "unknown key 'cellar'", "attic"),
        (ATTIC + "rtt = { client = -3 }", "rtt.client", "from 0"),
        (ATTIC + 'relayed = "yes"', "wrong type", "relayed = true"),
        (ATTIC + ATTIC, "two nodes", "rename"),
        (ATTIC.replace("attic", "client"), "'client'", "rename"),
        (ATTIC.replace('"attic"', '""'), "has no name", "attic"),
        (ATTIC.replace("attic", "\\u0007"), "name of node 1 in", "attic"),
        (ATTIC.replace("800MB", "much"), "memory of node 1 in", "24GiB"),
        (ATTIC * 1001, "1001 nodes", "fewer"),
    ],
)
def test_malformed_nodes_file_is_refused_with_one_line(tmp_path: Path, text: str, message: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_nodes(text, tmp_path / "nodes.toml", 4)
    assert message in caught.value.message
    assert remedy in (caught.value.remedy or "")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(("data", "words"), [(b"\xff\xfe", "is not a text file"), (b"#" * 2**21, "larger than")])
def test_nodes_file_that_is_no_text_or_too_large_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes, words: str
) -> None:
    path = tmp_path / "nodes.toml"
    path.write_bytes(data)
    assert cli.run(["plan", "--model", str(model), "--nodes", str(path)]) == 1
    said = capsys.readouterr().err
    assert words in said
    assert "nodes file" in said


def test_nodes_file_is_read_once_so_that_the_plan_is_of_the_file_that_was_checked(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = nodes_file(tmp_path, ATTIC)
    monkeypatch.setattr("swarm_node.commands.plan.say_loading", lambda _: path.write_text("nodes = 3"))
    assert cli.run(["plan", "--model", str(model), "--nodes", str(path)]) == 0
    assert "attic  0:4" in capsys.readouterr().out


def test_plan_without_model_nodes_or_config_fails_with_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = nodes_file(tmp_path, ATTIC)
    for arguments, message in (
        (["--model", str(model)], "--nodes FILE is missing"),
        (["--nodes", str(path)], "--model MODEL is missing"),
        (["--model", str(tmp_path), "--nodes", str(path)], "holds no config.json"),
        (["--model", str(model), "--nodes", str(tmp_path / "none")], "cannot read"),
        (["--model", str(model), "--nodes", str(tmp_path)], "cannot read"),
    ):
        assert cli.run(["plan", *arguments]) == (2 if "missing" in message else 1)
        first, *_ = capsys.readouterr().err.splitlines()
        assert message in first


def test_plan_counts_the_memory_of_the_program_itself(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node that would be refused with this --max-memory serves nothing in a plan either."""
    path = nodes_file(tmp_path, ATTIC.replace("800MB", str(PROCESS_BYTES + 10**7)))
    assert cli.run(["plan", "--model", str(model), "--nodes", str(path), "--json"]) == 0
    event = json.loads(capsys.readouterr().out)
    assert event["nodes"][0]["start"] is None
    told = event["lacking"][0]["memory_bytes"]
    path = nodes_file(tmp_path, ATTIC.replace("800MB", str(told)))
    assert cli.run(["plan", "--model", str(model), "--nodes", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lacking"] == []
    assert share_of_limit(limit_for(10**9), PROCESS_BYTES).model_bytes in range(10**9, 10**9 + 10)
