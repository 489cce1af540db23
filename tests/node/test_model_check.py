"""`swarm-node models check`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from swarm_node import cli
from transformers import LlamaConfig, T5Config


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run(["models", "check", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_models_check_of_a_config_alone_says_that_it_can_be_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LlamaConfig(num_hidden_layers=7).save_pretrained(tmp_path / "story")
    assert check(capsys, str(tmp_path / "story")) == (0, "story can be served: llama, 7 blocks\n", "")
    code, out, _ = check(capsys, str(tmp_path / "story"), "--json")
    assert code == 0
    found = json.loads(out)
    assert {name: found[name] for name in ("event", "model", "family", "num_blocks")} == {
        "event": "model_check",
        "model": "story",
        "family": "llama",
        "num_blocks": 7,
    }


def test_models_check_of_another_kind_of_model_says_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    T5Config().save_pretrained(tmp_path)
    code, _, err = check(capsys, str(tmp_path))
    assert code == 1
    assert err.startswith("error: t5 is not a decoder-only language model")


def test_models_check_without_a_model_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = check(capsys)
    assert code == 1
    assert err.startswith("error: MODEL is missing")
