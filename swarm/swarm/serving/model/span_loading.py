"""Loads a span of a model, and checks its results against transformers' own modules before it is announced.

A ragged batch bypasses a family's own masks and biases, which transformers does not declare. So a loaded span is tried
once on random rows over the same random cache, within and far beyond every window: in one ragged pass, as fused
decodes, and through transformers' own attention and masks. Then each block computes the same few rows twice: through
the paged cache, as a prompt and then a token, and as a whole sequence without a cache. Blocks are compared one by one,
so that errors of half precision do not add up. In addition to reading the weights, this takes two passes over them.
Blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from swarm_protocol.errors import ConfigError, one_line
from torch import Tensor

from swarm.serving.model.batch import Batch, SequenceRows, Want
from swarm.serving.model.kv_pool import PAGE_TOKENS, KVPool
from swarm.serving.model.model_files import ModelFiles
from swarm.serving.model.packing import pack_linears
from swarm.serving.model.quantization import Bits
from swarm.serving.model.shape import check_span, context_tokens
from swarm.serving.model.span import Span
from swarm.serving.model.weights import read_model, read_quantized

_NUM_PAGES = 9
_BEHIND_PAGE = 8
"""The page for positions outside of a window. Its values are so large that the result shows if they are read."""

_FAR_TOKENS = 64  # positions outside of the windows
_MAX_LOUD = 8192  # the largest half-precision number is 65504

_NUM_ROWS, _NUM_DECODED = 6, 1

_Run: TypeAlias = Callable[[Tensor, Sequence[SequenceRows], KVPool], list[Tensor | None]]


def load_span(
    files: ModelFiles,
    start: int,
    end: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    bits: Bits | None = None,
) -> Span:
    """Read blocks `[start, end)`, the embedding for block 0 and the norm and head for the last block.

    With `bits`, each block's weights are quantized before the next one is read. `dtype` is that of the computation.

    Raises ConfigError for a span or a family that cannot be served. Raises IntegrityError, which names tensor and file,
    for a tensor that is missing, unreadable, of a wrong shape, or not finite.
    """
    num_blocks = files.num_blocks
    check_span(start, end, num_blocks)
    if bits:
        model = read_quantized(files, start, end, dtype, device, bits)
    else:
        model = read_model(files, start, end, dtype).to(device).eval().requires_grad_(False)
        pack_linears(model)
    span = Span(model, start, end, num_blocks)
    # checked now, so that a family that cannot be served is refused before it is announced
    span.is_ragged, span.is_fused = find_ways(span, model.config)
    check_computes(span, str(files.config.model_type))
    span.part.choose(start, end)
    return span


def find_ways(span: Span, config: Any) -> tuple[bool, bool]:
    """Return whether the span can run ragged, and whether it can run fused.

    It can if all pieces of a batch (ragged), or decodes alone (fused), give the same results in one pass as through
    transformers' own attention and masks.
    """
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return False, False
    window = _window(config)
    pieces = _pieces(config, window)
    rows = torch.split(_rows(span, sum(piece.num_tokens for piece in pieces)), [piece.num_tokens for piece in pieces])
    alone, ragged, fused = _pools(span, window)
    with torch.inference_mode():
        expected = span.run_alone(torch.cat(rows), pieces, alone)

    def agrees(run: _Run, chosen: Sequence[int], pool: KVPool) -> bool:
        with torch.inference_mode():
            try:
                found = run(torch.cat([rows[i] for i in chosen]), [pieces[i] for i in chosen], pool)
            except Exception:  # a family's own code may raise anything for unexpected inputs
                return False
        return all(map(is_close, found, [expected[i] for i in chosen]))

    if not agrees(span.run_ragged, range(len(pieces)), ragged):
        return False, False
    decodes = [i for i, piece in enumerate(pieces) if piece.num_tokens == 1]
    return True, span.fused is not None and agrees(span.run_fused, decodes, fused)


def _rows(span: Span, num_rows: int) -> Tensor:
    """Return random rows of a batch."""
    generator = torch.Generator().manual_seed(0)
    if span.is_first:
        return torch.randint(span.vocab_size, (num_rows,), generator=generator).to(span.device)
    return torch.randn(num_rows, span.hidden_size, generator=generator).to(span.device, span.dtype)


def _pools(span: Span, window: int) -> list[KVPool]:
    """Return three pools with the same random cache."""
    generator = torch.Generator().manual_seed(1)
    pools = [span.new_pool(_NUM_PAGES) for _ in range(3)]
    for tensors in zip(*([*pool.keys_SKD, *pool.values_SKD] for pool in pools), strict=True):
        values = torch.randn(tensors[0].shape, generator=generator)
        for tensor in tensors:
            tensor.copy_(values)
    for pool in pools:
        for values_SKD in pool.values_SKD:
            values_SKD[_BEHIND_PAGE * PAGE_TOKENS :] *= max(1, min(window, _MAX_LOUD))
    return pools


def _window(config: Any) -> int:
    """Return the window of some or all blocks; 0 if the config has none."""
    return max(getattr(config, "sliding_window", None) or 0, 0)


def _pieces(config: Any, window: int) -> list[SequenceRows]:
    """Return pieces at a start and in a middle, and decodes, near and far. Far pieces reuse a few pages, and have
    others outside of the window."""
    far = window + _FAR_TOKENS - 1
    far = min(far, context_tokens(config) - 4)
    num_behind = max(0, far + 1 - window) // PAGE_TOKENS if window else 0

    def piece(num_tokens: int, position: int, pages: Sequence[int], num_behind: int = 0) -> SequenceRows:
        num_pages = -(-(position + num_tokens) // PAGE_TOKENS)
        seen = [_BEHIND_PAGE if i < num_behind else pages[i % len(pages)] for i in range(num_pages)]
        return SequenceRows(num_tokens=num_tokens, position=position, pages=seen, want=Want.ALL)

    near = [piece(3, 0, [0]), piece(2, 5, [1]), piece(1, 7, [2]), piece(1, 17, [4, 3])]
    return [*near, piece(3, far, [5, 6], num_behind), piece(1, far, [7], num_behind)]


def is_close(found: Tensor | None, expected: Tensor | None) -> bool:
    """Return whether the median row agrees: in half precision, a router may send single rows to another expert."""
    assert found is not None
    assert expected is not None
    tolerance = 1e-3 if expected.dtype == torch.float32 else 5e-2
    scale = expected.float().abs().amax(-1).clamp(min=1e-6)
    errors = (found.float() - expected.float()).abs().amax(-1) / scale
    return bool(errors.median() <= tolerance)


def check_computes(span: Span, family: str) -> None:
    """Raises ConfigError, which names family and block, if a block gives another result than transformers'."""
    generator = torch.Generator().manual_seed(0)
    pool = span.new_pool(1)
    for block in range(span.start, span.end):
        try:
            with torch.inference_mode():
                is_same = _gives_the_same(span, pool, block, generator)
        except Exception as error:  # a family's own code may raise anything
            raise ConfigError(
                f"block {block} of this {family} does not run: {one_line(error)}", remedy="serve another family"
            ) from error
        if not is_same:
            raise ConfigError(
                f"block {block} of this {family} gives another result than transformers' own modules",
                remedy="serve another family",
            )


def _gives_the_same(span: Span, pool: KVPool, block: int, generator: torch.Generator) -> bool:
    num_rows = min(_NUM_ROWS, span.context_tokens)
    if block == 0:
        x = torch.randint(span.vocab_size, (num_rows,), generator=generator)
    else:
        x = torch.randn(num_rows, span.hidden_size, generator=generator)
    expected = span.forward(x[None], block, block + 1)[0]
    if not expected.isfinite().all():
        return True  # random rows may give numbers too large for half precision
    num_prompt = max(1, num_rows - _NUM_DECODED)
    parts = [(0, num_prompt), *((row, row + 1) for row in range(num_prompt, num_rows))]
    found = torch.cat([_served(span, pool, block, x[low:high], low) for low, high in parts])
    return is_close(found, expected)


def _served(span: Span, pool: KVPool, block: int, x: Tensor, position: int) -> Tensor:
    piece = SequenceRows(num_tokens=len(x), position=position, pages=[0], want=Want.ALL)
    (output,) = span.run(Batch(x=x, pieces=(piece,), start=block, end=block + 1), pool)
    assert output is not None
    return output
