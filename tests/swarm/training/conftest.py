"""Provides a run that a test can train: a model of 7,000 parameters on a folder of generated text."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from swarm.training.data.corpus import Corpus, load_bytes
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_tables import DataConfig, InnerConfig

TINY_MODEL = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def tiny_run() -> RunConfig:
    return RunConfig(
        name="tiny",
        seed=7,
        outer_steps=3,
        interval_steps=4,
        model=TINY_MODEL,
        data=DataConfig(window_tokens=16),
        inner=InnerConfig(batch_windows=2, warmup_steps=2),
    )


@pytest.fixture
def corpus_folder(tmp_path: Path) -> Path:
    """Write forty files of numbered sums, some of which are held out."""
    folder = tmp_path / "text"
    for index in range(40):
        draw = random.Random(index)
        lines = (f"assert {(a := draw.randrange(100))} + {(b := draw.randrange(100))} == {a + b}" for _ in range(40))
        path = folder / f"package_{index % 4}" / f"sums_{index}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def tiny_corpus(tiny_run: RunConfig, corpus_folder: Path) -> Corpus:
    return load_bytes(tiny_run.data, seed=tiny_run.seed, folder=corpus_folder)
