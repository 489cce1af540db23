"""Decides from a model's config alone whether its blocks can be served, before weights are downloaded.

The config is shrunk to a miniature that computes in the same way: fewer and narrower blocks and few experts, but the
same kinds of blocks, switches and factors. The miniature gets random weights, and is treated like a served model:
written to a directory, loaded as two spans, and run in pieces and token by token. The result is compared with
transformers' own model. Blocks for about a second; results are cached.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from swarm_protocol.errors import ConfigError, one_line
from torch import Tensor

from swarm.serving.model.batch import Batch, SequenceRows, Want
from swarm.serving.model.kv_pool import PAGE_TOKENS, KVPool
from swarm.serving.model.model_cut import cut
from swarm.serving.model.model_files import causal_lm_class, check_is_model, open_model, read_config
from swarm.serving.model.shape import check_span, context_tokens
from swarm.serving.model.span import OTHER_FAMILY, Span, threads
from swarm.serving.model.span_loading import load_span
from swarm.serving.model.weights import quiet_transformers
from swarm.temporary_folder import temporary_folder
from swarm.threads import BUILDING

MAX_VALUES = 16 * 2**20
"""Maximum weights of a miniature: a larger one has sizes that this module does not know."""

_STEPS = (7, 7, 7, 1, 1, 1, 1, 1, 1, 1)
"""Tokens of each pass: a prompt in pieces, then an answer. Together they exceed a miniature's windows."""

_TOLERANCE = 1e-3

_SEEDS = (0, 1)
"""Seeds of two miniatures, of which one must agree: a router may score two experts equally, so that rounding
decides."""

MAX_BLOCKS = 6

CONTEXT_TOKENS = 64

VOCAB = 128

_HEADS, _HEAD_SIZE, _WINDOW = 4, 16, 8

_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")

_NUM_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "swa_num_attention_heads")

_NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads")

_DROPPED = {"id2label", "label2id", "quantization_config"}

_MAX_OTHER = 64
"""Limit of other counts, such as codebooks: a config may claim a billion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedFamily:
    """A model that can be served. `family` is transformers' `model_type`.

    `untried` is the reason why its blocks could not be tried with the config alone. They are then tried when they are
    loaded.
    """

    family: str
    num_blocks: int
    untried: str = ""


def check_directory(directory: Path, blocks: tuple[int, int] | None = None) -> CheckedFamily:
    """Apply `check_config` to the config.json in `directory`, and check the span that is to be served."""
    with quiet_transformers():
        config = read_config(directory)
    if blocks is not None:
        check_span(*blocks, int(config.num_hidden_layers))
    return check_config(config)


def check_config(config: Any) -> CheckedFamily:
    """Raises ConfigError, with the reason, for a model that cannot be served. Does not change `config`."""
    check_is_model(config)
    causal_lm_class(config)
    settings = json.loads(config.to_json_string(use_diff=False))
    settings.pop("_name_or_path", None)  # the model's location does not change what its blocks compute
    untried = _untried(type(config), json.dumps(settings))  # type: ignore[arg-type]
    return CheckedFamily(family=str(config.model_type), num_blocks=int(config.num_hidden_layers), untried=untried)


@lru_cache(maxsize=64)  # `join` asks before it connects to peers, and again for each span that it loads
def _untried(kind: Any, settings: str) -> str:
    """Return why the config's blocks could not be tried; empty if they were tried. Raises ConfigError if they fail."""
    with quiet_transformers():  # problems such as an unknown rope type are raised, so no log is needed
        config = kind.from_dict(json.loads(settings))
    try:
        try_in_parts(config)
    except NotTriedError as error:
        _check_structure(config)
        return str(error)
    return ""


def _check_structure(config: Any) -> None:
    """Raises ConfigError for a model that cannot be built, or whose modules cannot be distinguished."""
    model_class = causal_lm_class(config)
    try:
        with BUILDING, quiet_transformers(), torch.device("meta"):
            cut(model_class(copy.deepcopy(config)), 0, 1)
    except ConfigError:
        raise
    except Exception as error:  # a family's own code raises what it likes
        raise ConfigError(
            f"transformers cannot build a {config.model_type} from this config: {one_line(error)}",
            remedy="restore the file that came with the model, or serve another one",
        ) from error


class NotTriedError(Exception):
    """This config has no miniature that transformers itself can run. It may still be served."""


def try_in_parts(config: Any) -> None:
    """Raises ConfigError if a model of `config` gives another result in parts, NotTriedError if that cannot be tried.

    Does not change `config`.
    """
    if not any(_gives_the_same(config, seed) for seed in _SEEDS):
        raise ConfigError(f"{config.model_type} gives another result in parts than as a whole", remedy=OTHER_FAMILY)


def _gives_the_same(config: Any, seed: int) -> bool:
    generator = torch.Generator().manual_seed(seed)
    tokens_T = _tokens(config, generator)
    with (
        temporary_folder("trial") as folder,
        quiet_transformers(),
        threads(1, torch.get_num_threads()),  # such small work takes many times as long on several threads
    ):
        expected_TV = _whole(config, tokens_T, generator, folder)
        try:
            found_TV = _in_parts(folder, tokens_T)
        except ConfigError:
            raise
        except Exception as error:  # a family's own code raises what it likes
            why = one_line(error.__cause__ or error)
            raise ConfigError(f"{config.model_type} does not run in parts: {why}", remedy=OTHER_FAMILY) from error
    scale = expected_TV.abs().amax().clamp(min=1e-6)
    return bool((found_TV - expected_TV).abs().amax() / scale <= _TOLERANCE)


def _tokens(config: Any, generator: torch.Generator) -> Tensor:
    """Draw token ids [T] from the middle of the vocabulary, since special tokens are at its ends."""
    num_tokens, vocab = min(sum(_STEPS), context_tokens(config)), min(config.vocab_size, VOCAB)
    return torch.randint(vocab // 8, vocab - vocab // 8, (num_tokens,), generator=generator)


def _whole(config: Any, tokens_T: Tensor, generator: torch.Generator, folder: Path) -> Tensor:
    """Return the logits [T, V] of transformers' own model of the miniature, and save the model in `folder`."""
    try:
        with BUILDING, torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = _built(type(config).from_dict(miniature(config.to_dict())))
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = 0.2 * noise if parameter.ndim > 1 else parameter.data + 0.1 * noise
        model.tie_weights()
        with torch.inference_mode():
            logits_TV: Tensor = model(tokens_T[None], use_cache=False).logits[0]
        model.save_pretrained(folder)
    except Exception as error:  # a family's own code raises what it likes
        raise NotTriedError(one_line(error)) from error
    if not logits_TV.isfinite().all():
        raise NotTriedError("its numbers are not finite")
    return logits_TV


def _built(config: Any) -> Any:
    model_class = causal_lm_class(config)
    with torch.device("meta"):
        num_values = sum(parameter.numel() for parameter in model_class(config).parameters())
    if num_values > MAX_VALUES:
        raise NotTriedError(f"it has {num_values} weights")
    return model_class(config).float().eval().requires_grad_(False)


def _in_parts(folder: Path, tokens_T: Tensor) -> Tensor:
    files = open_model(folder)
    middle = files.num_blocks // 2
    spans = [load_span(files, start, end) for start, end in itertools.pairwise(sorted({0, middle, files.num_blocks}))]
    pools = [span.new_pool(-(-len(tokens_T) // PAGE_TOKENS)) for span in spans]
    logits, position = [], 0
    for num_tokens in _STEPS:
        x = tokens_T[position : position + num_tokens]
        if not len(x):
            break
        for span, pool in zip(spans, pools, strict=True):
            x = _step(span, pool, x, position)
        logits.append(x)
        position += num_tokens
    return torch.cat(logits)


def _step(span: Span, pool: KVPool, x: Tensor, position: int) -> Tensor:
    piece = SequenceRows(num_tokens=len(x), position=position, pages=range(pool.num_pages), want=Want.ALL)
    (output,) = span.run(Batch(x=x, pieces=(piece,), start=span.start, end=span.end), pool)
    assert output is not None
    return output


_SIZES: Sequence[tuple[int, str]] = (
    (MAX_BLOCKS, " ".join(_DEPTHS)),
    (_HEADS, " ".join(_NUM_HEADS)),
    (
        _HEADS * _HEAD_SIZE,
        "hidden_size n_embd d_model embedding_size word_embed_proj_dim input_embedding_size output_embedding_size",
    ),
    (
        96,
        "intermediate_size intermediate_size_mlp ffn_dim ffn_hidden_size n_inner dff dim_ff "
        "moe_intermediate_size dense_intermediate_size expert_ffn_hidden_size decoder_ffn_dim "
        "shared_expert_intermediate_size shared_experts_intermediate_size shared_intermediate_size",
    ),
    (
        _HEAD_SIZE,
        "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim kv_channels swa_head_dim rotary_dim index_head_dim",
    ),
    (2 * _HEAD_SIZE, "qk_head_dim"),
    (24, "q_lora_rank kv_lora_rank o_lora_rank"),
    (VOCAB, "vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
    (8, "num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num"),
    (2, "H_cycles L_cycles"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k n_group num_expert_group"),
    (1, "topk_group"),
    (2 * CONTEXT_TOKENS, "max_position_embeddings n_positions n_ctx max_seq_len"),
    (CONTEXT_TOKENS, "original_max_position_embeddings"),
    (
        _WINDOW,
        "sliding_window attention_window_size local_attention window_size sliding_window_size attention_chunk_size",
    ),
)
"""The maximum of a miniature for each size, by names separated by spaces."""

_SIZE_OF = {name: size for size, names in _SIZES for name in names.split()}


def miniature(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shrunk `settings` of a transformers config and its nested configs."""
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
    """Shrink a list. A list with an entry for each block keeps those of the kept blocks."""
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
    """Return the first block of each kind that the lists distinguish, and others up to MAX_BLOCKS."""
    lists = [value for value in settings.values() if isinstance(value, list | tuple) and len(value) == depth]
    first: dict[str, int] = {}
    for block in range(depth if lists else 0):
        first.setdefault(str([values[block] for values in lists]), block)
    kinds = list(first.values())[:MAX_BLOCKS]
    others = [block for block in range(min(depth, 2 * MAX_BLOCKS)) if block not in kinds]
    return sorted([*kinds, *others[: MAX_BLOCKS - len(kinds)]])


def _first_int(settings: Mapping[str, Any], names: Sequence[str]) -> int:
    return next((settings[name] for name in names if type(settings.get(name)) is int), 0)
