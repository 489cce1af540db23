"""What a loaded span computes, held against transformers' own modules before it is announced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm.serving.model import cut
from swarm.serving.model import span as span_module
from swarm.serving.model.caches import GatheredCache
from swarm.serving.model.model_files import open_model
from swarm.serving.model.span import Span, load_span
from swarm.serving.model.span_loading import load
from swarm.serving.server.server_options import ServerOptions
from swarm_protocol.errors import ConfigError
from transformers import OPTConfig


def test_load_of_a_span_whose_cache_gives_something_else_names_family_and_block(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ways through the cache are wrong alike, as where a family keeps what the cache does not."""
    seen = GatheredCache.update

    def shifted(cache: GatheredCache, keys: torch.Tensor, values: torch.Tensor, layer: int, *others: Any) -> Any:
        keys, values = seen(cache, keys, values, layer, *others)
        return keys, 1.1 * values if layer == 1 else values

    monkeypatch.setattr(GatheredCache, "update", shifted)
    monkeypatch.setattr(span_module, "can_be_ragged", lambda *_: False)
    load_span(open_model(llama_dir), 2, 3)
    with pytest.raises(ConfigError, match="block 3 of this llama gives something else than transformers' own modules"):
        load_span(open_model(llama_dir), 2, 4)


def test_load_of_a_span_that_does_not_run_says_why(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_span: Span, *_others: Any) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr(Span, "run", broken)
    with pytest.raises(ConfigError, match="block 2 of this llama does not run: list index out of range"):
        load_span(open_model(llama_dir), 2, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama-tied", "mixtral", "gpt2"])
def test_load_of_a_span_that_gives_the_same_leaves_it_whole(
    model_dirs: Callable[[str], Path], family: str, dtype: torch.dtype
) -> None:
    span = load_span(open_model(model_dirs(family)), 2, 6, dtype=dtype)
    assert span._chosen == (2, 6)


def test_load_of_a_family_that_is_cut_wrongly_is_refused_by_every_span_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_config: Callable[[Path, Any], Path]
) -> None:
    """Also by one whose own blocks compute rightly."""
    config = OPTConfig(vocab_size=256, hidden_size=32, num_hidden_layers=4, ffn_dim=64, num_attention_heads=4)
    directory = write_config(tmp_path / "model", config)
    monkeypatch.setattr(cut, "_BEFORE_BLOCKS", {("opt", "final_layer_norm"): True})
    load_span(open_model(directory), 1, 2)
    with pytest.raises(ConfigError, match="opt gives other answers in parts than whole"):
        load(directory, 1, 2, ServerOptions())
