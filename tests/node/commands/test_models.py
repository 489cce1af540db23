"""`swarm-node models check` on sound, damaged and hostile models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.local_hub import MODEL, local_hub
from swarm.serving.model.model_files import DOWNLOAD
from swarm_node import cli, daemon
from swarm_protocol.identity import Identity
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, T5Config

PEER = Identity.generate().peer_id


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.run(["models", "check", *arguments])
    captured = capsys.readouterr()
    begun, said, err = captured.err.partition("loading torch and transformers, which takes some seconds\n")
    if code == 2:
        return code, captured.out, captured.err
    assert (begun, bool(said)) == ("", True), "a command that takes seconds says so"
    return code, captured.out, err


def refused_join(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path, *arguments: str
) -> str:
    """Return the error of `join` with this model. Fails unless it is refused before the network is joined."""
    monkeypatch.setattr(daemon, "run", lambda *_: pytest.fail("the network is joined"))
    home, peer = str(model.with_name("home")), f"/ip4/127.0.0.1/tcp/9/p2p/{PEER}"
    assert cli.run(["join", "--model", str(model), "--home", home, "--peers", peer, *arguments]) == 1
    return capsys.readouterr().err


def test_models_check_of_a_config_alone_says_first_that_there_are_no_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LlamaConfig(num_hidden_layers=7).save_pretrained(tmp_path / "story")
    alone = f"there are no weights in {tmp_path / 'story'}: its config.json describes a model that can be served"
    assert check(capsys, str(tmp_path / "story")) == (0, f"{alone}: llama, 7 blocks\n", "")
    code, out, _ = check(capsys, str(tmp_path / "story"), "--json")
    assert code == 0
    found = json.loads(out)
    del found["time"]
    assert found == {
        "event": "model_check",
        "model": "story",
        "family": "llama",
        "num_blocks": 7,
        "untried": "",
        "lacks": "weights",
    }


def test_models_check_names_the_tensor_or_file_that_is_missing_or_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    for is_tied in (True, False):
        config = LlamaConfig(**sizes, num_hidden_layers=2, tie_word_embeddings=is_tied)
        LlamaForCausalLM(config).save_pretrained(tmp_path / "story", max_shard_size="20kB")
        assert check(capsys, str(tmp_path / "story"))[0::2] == (0, "")
    index = tmp_path / "story" / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    lost = "model.layers.1.mlp.up_proj.weight"
    index.write_text(json.dumps({"weight_map": {name: file for name, file in weight_map.items() if name != lost}}))
    assert f"lacks {lost}\n" in check(capsys, str(tmp_path / "story"))[2]
    shard = weight_map[lost]
    index.write_text(json.dumps({"weight_map": {**weight_map, "lm_head.bias": shard}}))
    assert f"{shard} lacks lm_head.bias\n" in check(capsys, str(tmp_path / "story"))[2]
    index.write_text(json.dumps({"weight_map": weight_map}))
    LlamaConfig(**(sizes | {"intermediate_size": 128}), num_hidden_layers=2).save_pretrained(tmp_path / "story")
    code, _, err = check(capsys, str(tmp_path / "story"))
    wrong = "model.layers.0.mlp.down_proj.weight is 32 x 64 in place of 32 x 128"
    assert (code, f"has tensors of another shape than its config says: {wrong}, " in err, "and 3 more\n" in err) == (
        1,
        True,
        True,
    )
    config.save_pretrained(tmp_path / "story")
    place, whole = tmp_path / "story" / weight_map[lost], load_file(tmp_path / "story" / weight_map[lost])
    save_file({**whole, lost: whole[lost].T.contiguous()}, place)
    code, _, err = check(capsys, str(tmp_path / "story"))
    assert (code, f"config says: {lost} is 32 x 64 in place of 64 x 32\n" in err) == (1, True)
    (tmp_path / "story" / shard).unlink()
    code, _, err = check(capsys, str(tmp_path / "story"))
    assert (code, f"names {shard}, which is not there" in err) == (1, True)
    tensors = dict.fromkeys(weight_map, 1)
    (tmp_path / "story" / DOWNLOAD).write_text(json.dumps({"model_id": "a/b", "commit": "c", "tensors": tensors}))
    assert check(capsys, str(tmp_path / "story"))[0] == 0, "a download leaves out what its span does not need"


def test_models_check_says_that_there_is_no_tokenizer_and_names_a_damaged_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).save_pretrained(tmp_path / "story")
    code, out, _ = check(capsys, str(tmp_path / "story"))
    place = tmp_path / "story"
    text = f"story can be served: llama, 1 block\nclients cannot send it text: there is no tokenizer in {place}\n"
    assert (code, out) == (0, text)
    assert json.loads(check(capsys, str(place), "--json")[1])["lacks"] == "tokenizer"
    (tmp_path / "story" / "tokenizer.json").write_text('{"version": "1.0", "mod')
    code, _, err = check(capsys, str(tmp_path / "story"))
    assert (code, "tokenizer.json is damaged: " in err) == (1, True)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ('{"do_sample": true, "temperature": 9}', "temperature is 9"),
        ('{"do_sample": true, "top_k": -5}', "top_k is -5"),
        ('{"eos_token_id": "x"}', "eos_token_id is 'x', not a whole number in "),
        ('{"eos_token_id": [1, null]}', "eos_token_id is None, not a whole number in "),
        (json.dumps({"eos_token_id": [1] * 65}), "eos_token_id has 65 tokens, more than 64"),
        ("[]", "it is not an object"),
    ],
)
def test_models_check_refuses_default_options_with_which_no_client_could_ask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], written: str, said: str
) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).save_pretrained(tmp_path / "story")
    (tmp_path / "story" / "generation_config.json").write_text(written)
    code, out, err = check(capsys, str(tmp_path / "story"))
    assert (code, out) == (1, "")
    assert f"generation_config.json: {said}" in err


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ('{"weight_map": {"\\u001b[2J": "model.safetensors"}}', "lacks [2J"),
        (json.dumps({"weight_map": {"a" * 1000: "model.safetensors"}}), f"lacks {'a' * 100}"),
        ('{"weight_map": {"a": "\\u001b[2J"}}', "names [2J, which is not there"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "names model.safetensors, which is not there"),
        ('{"weight_map":' + "[" * 200_000, "is damaged: "),
    ],
    ids=["escape-in-tensor", "long-tensor", "escape-in-file", "outside", "deep"],
)
def test_models_check_of_a_hostile_index_prints_one_short_line(
    index: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).save_pretrained(tmp_path / "story")
    (tmp_path / "story" / "model.safetensors.index.json").write_text(index)
    code, _, err = check(capsys, str(tmp_path / "story"))
    line, _remedy = err.splitlines()
    assert code == 1
    assert said in line
    assert line.isprintable()
    assert len(line) < 400 + len(str(tmp_path))


def test_models_check_of_another_kind_of_model_says_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    T5Config().save_pretrained(tmp_path)
    code, _, err = check(capsys, str(tmp_path))
    assert code == 1
    assert err.startswith("error: t5 is not a decoder-only language model")


def test_models_check_of_an_unknown_rope_type_prints_only_the_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = {**LlamaConfig(num_hidden_layers=2).to_dict(), "rope_scaling": {"rope_type": "spiral", "factor": 2.0}}
    config.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, _, err = check(capsys, str(tmp_path))
    assert code == 1
    assert err.startswith("error: transformers cannot build a llama from this config: there is no 'spiral'\n")
    assert not [each for each in caplog.records if each.name.startswith("transformers")]


def test_models_check_without_a_model_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = check(capsys)
    assert code == 2
    assert err.startswith("error: MODEL is missing")


def test_models_check_of_a_hub_s_model_downloads_only_its_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "made")
    with local_hub(tmp_path / "made", tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        found = check(capsys, MODEL, "--home", str(tmp_path / "home"))
        assert found == (0, "tiny can be served: llama, 2 blocks\n", f"asking the hub for {MODEL}\n")
        code, _, err = check(capsys, "someone/else", "--home", str(tmp_path / "home"))
        assert [name for name, _ in hub.asked] == ["config.json"]
    assert code == 1
    assert err.startswith("asking the hub for someone/else\nerror: the hub has no model someone/else")


@pytest.mark.parametrize(
    ("config", "blocks", "reason"),
    [
        (MambaConfig(), [], "mamba has blocks that share state and cannot be split"),
        (LlamaConfig(num_hidden_layers=9), ["--blocks", "5:20"], "blocks 5:20 are not within this model's 0:9"),
    ],
)
def test_join_with_an_unsupported_model_is_refused_before_it_connects_or_reads_weights(
    config: object,
    blocks: list[str],
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config.save_pretrained(tmp_path / "model")  # type: ignore[attr-defined]
    assert reason in refused_join(capsys, monkeypatch, tmp_path / "model", *blocks)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (Path.unlink, "names {shard}, which is not there"),
        (lambda shard: shard.write_bytes(shard.read_bytes()[:-8]), "{shard} is damaged: "),
    ],
    ids=["missing", "truncated"],
)
def test_join_with_a_missing_or_truncated_weight_file_is_refused_by_its_name_before_it_connects(
    spoil: Callable[[Path], object],
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    story = tmp_path / "story"
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2)).save_pretrained(story, max_shard_size="20kB")
    shard = max(story.glob("*.safetensors"))
    spoil(shard)
    assert reason.format(shard=shard.name) in refused_join(capsys, monkeypatch, story)


def test_join_with_end_tokens_that_no_client_takes_is_refused_before_it_connects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    story = tmp_path / "story"
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).save_pretrained(story)
    (story / "generation_config.json").write_text('{"eos_token_id": "x"}')
    assert "generation_config.json: eos_token_id is 'x'" in refused_join(capsys, monkeypatch, story)
