"""The sizes of a model that bound messages and caches, the limits on its config, and its small files.

Imports neither torch nor transformers: the tokenizer process uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from swarm_protocol import limits
from swarm_protocol.checks import Checked, whole
from swarm_protocol.errors import ConfigError

_FOLLOWS_THE_LONGEST = {"dynamic", "longrope"}
"""Rotary embeddings that rotate all positions differently once one position is beyond the original context."""


Width: TypeAlias = Annotated[int, whole(limits.MAX_MESSAGE_BYTES // 4, low=1)]
"""A row must fit into a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape(Checked):
    """The sizes of a model with which a client checks what servers send. Raises ValueError, since they come from a
    server."""

    name: str
    revision: str
    num_blocks: Annotated[int, whole(limits.MAX_BLOCKS, low=1)]
    hidden_size: Width
    vocab_size: Width


def check_span(start: int, end: int, num_blocks: int) -> None:
    """Raises ConfigError for a span outside a model of `num_blocks`."""
    if not 0 <= start < end <= num_blocks:
        raise ConfigError(
            f"blocks {start}:{end} are not within this model's 0:{num_blocks}", remedy="choose a span within them"
        )


_NUM_HEADS = {"num_attention_heads", "num_key_value_heads"}
_COUNTED = ("layer", "cycles", "label", "experts")


def check_counts(settings: Mapping[str, Any]) -> None:
    """Raises ValueError for more layers, cycles, experts or labels than any model has, and for fewer than one head.

    transformers would create an object for each of the former, and divide by the latter. `settings` are those of a
    config.json, which transformers has not read yet.
    """
    for key, value in settings.items():
        if isinstance(value, dict):
            check_counts(value)
        elif _counts(key) and isinstance(value, int | float) and value > limits.MAX_BLOCKS:
            raise ValueError(f"{key} is {value}, more than {limits.MAX_BLOCKS}")
        elif key in _NUM_HEADS and type(value) is int and value < 1:
            raise ValueError(f"{key} is {value}")


def _counts(key: str) -> bool:
    return "size" not in key and (key.startswith("num_") or any(what in key for what in _COUNTED))


def context_tokens(config: Any) -> int:
    """Return the longest sequence that a transformers config allows, at most the network's limit.

    If rotary embeddings depend on the longest position, it is the original context: beyond that the keys of all
    positions change, but those in a cache are already computed.
    """
    named = [getattr(config, "max_position_embeddings", None), *map(_original_context, _rope_settings(config))]
    return min([int(value) for value in named if value and value > 0] + [limits.MAX_SESSION_TOKENS])


def _rope_settings(config: Any) -> list[Mapping[str, Any]]:
    """Return the rotary settings of the model, and of each kind of its blocks."""
    settings = getattr(config, "rope_parameters", None) or {}
    return [settings, *(value for value in settings.values() if isinstance(value, Mapping))]


def _original_context(settings: Mapping[str, Any]) -> int | None:
    if settings.get("rope_type") not in _FOLLOWS_THE_LONGEST:
        return None
    return settings.get("original_max_position_embeddings")


INDEX = "model.safetensors.index.json"
MANIFEST_FILE = "swarm-model.manifest"
"""The signed manifest of a published model, in its directory."""

SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""The files that a server sends to clients, for the tokenizer and the model's shape. No code and no weights."""
