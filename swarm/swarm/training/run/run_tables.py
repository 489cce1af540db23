"""The tables of a run's file: the default model, the initial weights, the data, the inner and the outer optimizer.

Values only. Each setting is declared once with its limits and its explanation, as in `run_config`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swarm.training.run.settings import (
    check_fields,
    choice,
    flag,
    is_digest,
    is_hub_id,
    is_revision,
    matching,
    number,
    setting,
    whole,
)

LOCAL = "local"
"""The value of `checkpoint` or `tokenizer` with which each member names its own copy."""

BYTE_VOCABULARY = 256
END_OF_TEXT = 0
"""The byte between two documents. It does not occur in text, so a byte-level model needs no additional token."""

MODULE_TYPE = "module"
"""The `model_type` of a run whose model is a module of the author's own."""


DEFAULT_MODEL: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": BYTE_VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": END_OF_TEXT,
}
"""A byte-level Llama of 1.1M parameters that two CPU cores train in a minute."""

MODEL_KEYS: Mapping[str, str] = {
    "model_type": "Model family, as in a config.json: llama, qwen3, gpt2, …",
    "vocab_size": "Vocabulary size: 256 for bytes; with a tokenizer, at least the tokenizer's size.",
    "hidden_size": "Width of the hidden states.",
    "intermediate_size": "Width of each layer's MLP.",
    "num_hidden_layers": "Number of layers.",
    "num_attention_heads": "Number of attention heads; must divide hidden_size.",
    "num_key_value_heads": "Number of key and value heads; must divide num_attention_heads.",
    "max_position_embeddings": "Maximum context length; at least data.window_tokens.",
    "tie_word_embeddings": "Whether input and output embeddings share weights.",
    "bos_token_id": "Id of the token at the beginning of a document.",
    "eos_token_id": "Id of the token at the end of a document.",
}
"""The explanations of the keys that every kind of model has."""

_UNUSED = re.compile(r"drop|jitter|aux_loss|output_router_logits")


def has_no_effect(key: str) -> bool:
    """Return whether training does not use a key of [model]: dropout and noise, without which a step can be repeated,
    and the additional loss of routers."""
    return _UNUSED.search(key) is not None


_is_column = matching(r"[\w.-]{1,64}")
_COLUMN_RULE = "use 1 to 64 letters, digits, '_', '-' and '.'"
_SOURCES = ("python-stdlib", "files", "hub")
_INNER_OPTIMIZERS = ("adamw", "muon")
_SCHEDULES = ("constant", "linear", "cosine")
_OUTER_OPTIMIZERS = ("nesterov", "average")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartConfig:
    """The initial weights of a run. `digest` is their `run_model.weights_digest`, which every member checks. `genesis`
    is the digest of the state before the first outer step (see `replica_state.genesis_digest`)."""

    checkpoint: str = setting(
        "",
        'OWNER/NAME on the Hugging Face hub, or "local": each member gives the directory of its own copy (join '
        "--start). Empty: random weights from the seed.",
        lambda value: value in ("", LOCAL) or is_hub_id(value),
        'use OWNER/NAME or "local", or leave it out',
        implied="",
    )
    revision: str = setting("", "Branch, tag or commit on the hub; run sign replaces it by the commit.", implied="")
    digest: str = setting(
        "", "Digest of the weights: nodes with other weights are refused. Filled in by run sign.", implied=""
    )
    genesis: str = setting(
        "",
        "Digest of the run's initial state: a newcomer cannot be given another one. Filled in by run sign for runs "
        "from a checkpoint, and for models of up to 256 million parameters. Empty: not pinned.",
        lambda value: value == "" or is_digest(value),
        "leave it empty: run sign fills it in",
        implied="",
    )

    def __post_init__(self) -> None:
        checks = check_fields(self, "start")
        fits = self.revision == "" or (self.is_on_hub and is_revision(self.revision))
        checks.require(
            "revision", fits, "use a branch, tag or commit of a checkpoint on the hub, and leave it out otherwise"
        )
        fits = self.digest == "" or (bool(self.checkpoint) and is_digest(self.digest))
        checks.require(
            "digest", fits, "use the 64 hexadecimal digits that run sign fills in for a checkpoint, or leave it out"
        )
        checks.finish()

    @property
    def is_on_hub(self) -> bool:
        return self.checkpoint not in ("", LOCAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The data of a run, and how it becomes tokens. An empty revision means the newest one, an empty `digest` any
    data."""

    source: str = choice(
        "python-stdlib",
        _SOURCES,
        f"{', '.join(_SOURCES)}: the standard library's source, each member's own files (join --data; text, JSON "
        "lines, parquet or arrow), or a data set of the Hugging Face hub.",
    )
    hub_id: str = setting("", 'OWNER/NAME of the data set; for source = "hub".')
    hub_config: str = setting("", "Configuration of the data set, if it has several.")
    split: str = setting("train", "Split of the data set.", _is_column, _COLUMN_RULE)
    text_key: str = setting(
        "text", "Column of the data set, or key of JSON lines, that contains the text.", _is_column, _COLUMN_RULE
    )
    revision: str = setting(
        "", "Branch, tag or commit of the data set; run sign replaces it by the commit.", implied=""
    )
    tokenizer: str = setting(
        "bytes",
        '"bytes", OWNER/NAME on the hub, or "local": each member gives the directory of its own copy.',
        lambda value: value in ("bytes", LOCAL) or is_hub_id(value),
        'use "bytes", "local", or OWNER/NAME',
    )
    tokenizer_revision: str = setting(
        "", "Branch, tag or commit of the tokenizer on the hub; run sign replaces it by the commit.", implied=""
    )
    digest: str = setting(
        "",
        "Digest of the data: nodes with other data are refused. Filled in by run sign, if the data is available.",
        lambda value: value == "" or is_digest(value),
        "use the 64 hexadecimal digits that run sign fills in, or leave it out",
    )
    window_tokens: int = whole(128, (1, 1 << 20), "Tokens per sample.")

    def __post_init__(self) -> None:
        checks, is_hub = check_fields(self, "data"), self.source == "hub"
        fits = is_hub_id(self.hub_id) if is_hub else self.hub_id == ""
        checks.require("hub_id", fits, 'use OWNER/NAME with source = "hub", and leave it out otherwise')
        fits = self.hub_config == "" or (is_hub and _is_column(self.hub_config))
        checks.require("hub_config", fits, f'{_COLUMN_RULE} with source = "hub", and leave it out otherwise')
        for key, can_have in (("revision", is_hub), ("tokenizer_revision", is_hub_id(self.tokenizer))):
            value = getattr(self, key)
            fits = value == "" or (can_have and is_revision(value))
            checks.require(key, fits, "use a branch, tag or commit on the hub; leave it out for other sources")
        checks.finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerConfig:
    """The inner optimizer of each replica, see `inner.optimizers`.

    The defaults suit the default model: in 10 outer steps four replicas bring its validation loss from 5.5 to 2.5
    (`tests/bench/test_bench_default_run.py`).
    """

    optimizer: str = choice(
        "adamw",
        _INNER_OPTIMIZERS,
        f"{' or '.join(_INNER_OPTIMIZERS)}: Muon updates the hidden layers' matrices, AdamW the rest.",
    )
    batch_windows: int = whole(4, (1, 1 << 16), "Samples per inner step.")
    learning_rate: float = number(3e-3, (1e-9, 1.0), "Peak learning rate.")
    warmup_steps: int = whole(
        20, (0, 1 << 20), "Inner steps of a replica over which its learning rate rises to the peak."
    )
    schedule: str = choice(
        "constant",
        _SCHEDULES,
        f"Learning rate schedule over the run: {', '.join(_SCHEDULES)}; multiplied by the warm-up.",
    )
    final_ratio: float = number(
        0.1, (0.0, 1.0), "Final learning rate as a fraction of the peak; for linear and cosine."
    )
    weight_decay: float = number(0.1, (0.0, 1.0), "Decoupled weight decay; applied to matrices only.")
    beta1: float = number(0.9, (0.0, 0.9999), "Decay rate of AdamW's first moment.")
    beta2: float = number(0.95, (0.0, 0.99999), "Decay rate of AdamW's second moment.")
    muon_momentum: float = number(0.95, (0.0, 0.9999), "Muon's momentum.")
    fresh_moments: bool = flag(
        False,
        "Reset the optimizer's moments at each interval, so that intervals depend only on state, lease and settings. "
        "Required for validation_rate.",
        implied=False,
    )
    clip_norm: float = number(1.0, (1e-6, 1e6), "Maximum gradient norm; larger gradients are scaled down.")

    def __post_init__(self) -> None:
        check_fields(self, "inner").finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterConfig:
    """The outer optimizer, see `apply_outer_step`. "average" does not use the other settings."""

    optimizer: str = choice(
        "nesterov",
        _OUTER_OPTIMIZERS,
        f"{' or '.join(_OUTER_OPTIMIZERS)}: DiLoCo's Nesterov momentum, or the aggregate unchanged.",
    )
    learning_rate: float = number(0.7, (1e-9, 10.0), "Learning rate of the Nesterov optimizer.")
    momentum: float = number(
        0.6,
        (0.0, 0.9999),
        "Momentum of the Nesterov optimizer. 0.6 suits tens of outer steps; DiLoCo's 0.9 suits hundreds.",
    )

    def __post_init__(self) -> None:
        check_fields(self, "outer").finish()
