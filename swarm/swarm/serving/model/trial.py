"""Tries out whether a family's blocks give in parts what they give whole, on a miniature with random weights.

The miniature takes the way of a served model: written to a directory, loaded in two spans, fed in pieces and token by
token. What comes out is compared with transformers' own model. Blocking, for about a second.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from swarm_protocol.errors import ConfigError
from torch import Tensor

from swarm.building import BUILDING
from swarm.serving.model.batch import PAGE_TOKENS, Batch, Slice, Want
from swarm.serving.model.cut import causal_lm_class, quiet_transformers
from swarm.serving.model.kv_pool import KVPool
from swarm.serving.model.miniature import VOCAB, miniature
from swarm.serving.model.model_files import open_model
from swarm.serving.model.safetensors_reader import one_line
from swarm.serving.model.shape import context_tokens
from swarm.serving.model.span import OTHER_FAMILY, Span, load_span
from swarm.serving.model.threads import threads
from swarm.temporary_folder import temporary_folder

MAX_VALUES = 16 * 2**20
"""Of a miniature's weights: one that stays larger has sizes that are not known here."""

_STEPS = (7, 7, 7, 1, 1, 1, 1, 1, 1, 1)
"""Tokens of each pass: prompts in pieces, then an answer, together beyond a miniature's windows."""

_TOLERANCE = 1e-3

_SEEDS = (0, 1)
"""Of two miniatures one must agree: a router may find two experts equally good, and rounding decides."""


class NotTriedError(Exception):
    """This config has no miniature that transformers itself can run. Says nothing about serving it."""


def try_in_parts(config: Any) -> None:
    """Raises ConfigError if the family of `config` gives something else in parts, NotTriedError if that is not known.

    `config` is left as it is.
    """
    if not any(_gives_the_same(config, seed) for seed in _SEEDS):
        raise ConfigError(f"{config.model_type} gives other answers in parts than whole", remedy=OTHER_FAMILY)


def _gives_the_same(config: Any, seed: int) -> bool:
    generator = torch.Generator().manual_seed(seed)
    tokens_T = _tokens(config, generator)
    with (
        temporary_folder("trial") as folder,
        quiet_transformers(),
        threads(1, torch.get_num_threads()),  # what is so small takes many times as long on several
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
    """[T], from the vocabulary's middle: at its ends are tokens with a meaning of their own."""
    num_tokens, vocab = min(sum(_STEPS), context_tokens(config)), min(config.vocab_size, VOCAB)
    return torch.randint(vocab // 8, vocab - vocab // 8, (num_tokens,), generator=generator)


def _whole(config: Any, tokens_T: Tensor, generator: torch.Generator, folder: Path) -> Tensor:
    """The logits [T, V] of transformers' own model of the miniature, which is in `folder` afterwards."""
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
    piece = Slice(num_tokens=len(x), position=position, pages=range(pool.num_pages), want=Want.ALL)
    (output,) = span.run(Batch(x=x, slices=(piece,), start=span.start, end=span.end), pool)
    assert output is not None
    return output
