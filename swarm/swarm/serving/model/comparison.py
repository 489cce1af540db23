"""Compares a span that was loaded with transformers' own modules, on the weights that it serves.

Each block is given the same few rows twice: through the paged cache, as sessions are served, as a prompt and then a
token; and as a whole sequence without a cache, through transformers' own attention and masks. Block by block, so that
the error of half precision does not add up, and with two passes more over the weights than reading them took.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from swarm_protocol.errors import ConfigError
from torch import Tensor

from swarm.serving.model.batch import Batch, Slice, Want
from swarm.serving.model.ragged import is_close
from swarm.serving.model.safetensors_reader import one_line

if TYPE_CHECKING:
    from swarm.serving.model.kv_pool import KVPool
    from swarm.serving.model.span import Span

_NUM_ROWS, _NUM_DECODED = 6, 1


def check_computes(span: Span, family: str) -> None:
    """Raises ConfigError, which names the family and the block, if one gives something else than transformers'."""
    generator = torch.Generator().manual_seed(0)
    pool = span.new_pool(1)
    for block in range(span.start, span.end):
        try:
            with torch.inference_mode():
                is_same = _gives_the_same(span, pool, block, generator)
        except Exception as error:  # a family's own code raises what it likes
            raise ConfigError(
                f"block {block} of this {family} does not run: {one_line(error)}", remedy="serve another family"
            ) from error
        if not is_same:
            raise ConfigError(
                f"block {block} of this {family} gives something else than transformers' own modules",
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
        return True  # numbers too large for half precision, which made-up rows may give
    num_prompt = max(1, num_rows - _NUM_DECODED)
    parts = [(0, num_prompt), *((row, row + 1) for row in range(num_prompt, num_rows))]
    found = torch.cat([_served(span, pool, block, x[low:high], low) for low, high in parts])
    return is_close(found, expected)


def _served(span: Span, pool: KVPool, block: int, x: Tensor, position: int) -> Tensor:
    piece = Slice(num_tokens=len(x), position=position, pages=[0], want=Want.ALL)
    (output,) = span.run(Batch(x=x, slices=(piece,), start=block, end=block + 1), pool)
    assert output is not None
    return output
