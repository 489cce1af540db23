"""Shrinks a model's config to a miniature that computes the same way: fewer blocks, narrower, with few experts.

What is kept is what decides how blocks compute: which kinds of blocks there are, whether heads share keys, every switch
and factor. No state, no weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MAX_BLOCKS = 6
CONTEXT_TOKENS = 64
VOCAB = 128

_HEADS, _HEAD_SIZE, _WINDOW = 4, 16, 8
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_NUM_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "swa_num_attention_heads")
_NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads")
_SIZES: Sequence[tuple[int, Sequence[str]]] = (
    (MAX_BLOCKS, _DEPTHS),
    (_HEADS, _NUM_HEADS),
    (
        _HEADS * _HEAD_SIZE,
        (
            *("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim"),
            *("input_embedding_size", "output_embedding_size"),
        ),
    ),
    (
        96,
        (
            *("intermediate_size", "intermediate_size_mlp", "ffn_dim", "ffn_hidden_size", "n_inner", "dff", "dim_ff"),
            *("moe_intermediate_size", "dense_intermediate_size", "expert_ffn_hidden_size", "decoder_ffn_dim"),
            *("shared_expert_intermediate_size", "shared_experts_intermediate_size", "shared_intermediate_size"),
        ),
    ),
    (
        _HEAD_SIZE,
        (
            *("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_channels", "swa_head_dim"),
            *("rotary_dim", "index_head_dim"),
        ),
    ),
    (2 * _HEAD_SIZE, ("qk_head_dim",)),
    (24, ("q_lora_rank", "kv_lora_rank", "o_lora_rank")),
    (VOCAB, ("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size")),
    (8, ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num")),
    (
        2,
        (
            *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "n_group"),
            "num_expert_group",
        ),
    ),
    (1, ("topk_group",)),
    (2 * CONTEXT_TOKENS, ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")),
    (CONTEXT_TOKENS, ("original_max_position_embeddings",)),
    (
        _WINDOW,
        (
            *("sliding_window", "attention_window_size", "local_attention", "window_size", "sliding_window_size"),
            "attention_chunk_size",
        ),
    ),
)
_SIZE_OF = {name: size for size, names in _SIZES for name in names}
_DROPPED = {"id2label", "label2id", "quantization_config"}
_MAX_OTHER = 64
"""Of anything else that is counted, such as codebooks: a config may name a billion."""


def miniature(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` of a transformers config, shrunk; those of parts of it too."""
    depth = _first_int(settings, _DEPTHS)
    kept = _kept_blocks(settings, depth) if depth else []
    small: dict[str, Any] = {}
    for name, value in settings.items():
        if name in _DROPPED:
            continue
        if name == "per_layer_config" and isinstance(value, Mapping):
            small[name] = _of_blocks(value, kept)
        elif isinstance(value, Mapping):
            small[name] = miniature(value)
        elif isinstance(value, list | tuple):
            small[name] = _list(name, value, kept, depth)
        elif name in _NUM_KV_HEADS:
            small[name] = _kv_heads(value, _first_int(settings, _NUM_HEADS))
        else:
            small[name] = _number(name, value)
    return small


def _number(name: str, value: Any) -> Any:
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if name.endswith(("_token_id", "_token_index")):
        return min(value, VOCAB - 1)
    if name in _SIZE_OF:
        return min(value, _SIZE_OF[name])
    return min(value, _MAX_OTHER) if name.startswith(("num_", "n_")) else value


def _list(name: str, values: Sequence[Any], kept: Sequence[int], depth: int) -> list[Any]:
    """One with an entry for each block keeps those of the blocks that are kept."""
    if name in {"long_factor", "short_factor"}:
        return list(values[: _HEAD_SIZE // 2])
    if depth and len(values) == depth:
        values = [values[block] for block in kept]
    return [_number(name, value) for value in values]


def _kv_heads(value: Any, num_heads: int) -> Any:
    if not isinstance(value, int) or value < 1:
        return value
    return _HEADS if value == num_heads else min(value, 2)


def _of_blocks(by_block: Mapping[Any, Any], kept: Sequence[int]) -> dict[str, Any]:
    whole = {int(block): value for block, value in by_block.items() if str(block).isdigit()}
    return {str(index): miniature(whole[block]) for index, block in enumerate(kept) if block in whole}


def _kept_blocks(settings: Mapping[str, Any], depth: int) -> list[int]:
    """A first block of each kind that lists tell apart, and as many others as there is room for."""
    lists = [value for value in settings.values() if isinstance(value, list | tuple) and len(value) == depth]
    first: dict[str, int] = {}
    for block in range(depth if lists else 0):
        first.setdefault(str([values[block] for values in lists]), block)
    kinds = list(first.values())[:MAX_BLOCKS]
    others = [block for block in range(min(depth, 2 * MAX_BLOCKS)) if block not in kinds]
    return sorted([*kinds, *others[: MAX_BLOCKS - len(kinds)]])


def _first_int(settings: Mapping[str, Any], names: Sequence[str]) -> int:
    return next((settings[name] for name in names if type(settings.get(name)) is int), 0)
