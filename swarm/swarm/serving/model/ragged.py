"""Whether a family's blocks compute a ragged batch rightly: from what its config says, then by trying.

transformers lets a family compute what its attention function never hears of: masks of its own, biases by position.
So a span is tried out once: the same rows over the same random cache, near and far beyond every window, through one
ragged pass and through transformers' own attention and masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swarm.serving.model.batch import PAGE_TOKENS, Slice, Want
from swarm.serving.model.kv_pool import KVPool
from swarm.serving.model.shape import context_tokens

if TYPE_CHECKING:
    from swarm.serving.model.span import Span

_NUM_PAGES = 9
_BEHIND_PAGE = 8
"""What lies behind a window, where there is one. Its values are so large that whoever looks there shows it."""

_FAR_TOKENS = 64  # as many positions are behind the windows
_MAX_LOUD = 8192  # in half precision numbers end at 65504


def can_be_ragged(span: Span, config: Any) -> bool:
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return False
    window = _window(config)
    return _agree(span, span.run_ragged, _slices(config, window), window)


def can_be_lean(span: Span, config: Any) -> bool:
    """For a span that can be ragged: as that, by decodes."""
    window = _window(config)
    return _agree(span, span.run_lean, [piece for piece in _slices(config, window) if piece.num_tokens == 1], window)


def _agree(
    span: Span,
    run: Callable[[Tensor, Sequence[Slice], KVPool], list[Tensor | None]],
    slices: Sequence[Slice],
    window: int,
) -> bool:
    """Whether `run` gives what transformers' own attention and masks do."""
    num_rows = sum(piece.num_tokens for piece in slices)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, span.hidden_size, generator=generator)
    if span.is_first:
        x = torch.randint(span.vocab_size, (num_rows,), generator=generator)
    x = x.to(span.device, span.dtype if x.is_floating_point() else None)
    pools = [span.new_pool(_NUM_PAGES) for _ in range(2)]
    for tensors in zip(*([*pool.keys_SKD, *pool.values_SKD] for pool in pools), strict=True):
        values = torch.randn(tensors[0].shape, generator=generator)
        for tensor in tensors:
            tensor.copy_(values)
    for pool in pools:
        for values_SKD in pool.values_SKD:
            values_SKD[_BEHIND_PAGE * PAGE_TOKENS :] *= max(1, min(window, _MAX_LOUD))
    with torch.inference_mode():
        expected = span.run_alone(x, slices, pools[0])
        try:
            found = run(x, slices, pools[1])
        except Exception:  # a family's own code raises what it likes when it is given what it does not expect
            return False
    return all(map(is_close, found, expected))


def _window(config: Any) -> int:
    """What some or all blocks look back at most; 0: nothing is said."""
    return max(getattr(config, "sliding_window", None) or 0, 0)


def _slices(config: Any, window: int) -> list[Slice]:
    """A start, a middle, decodes near and far. Far ones see the same few pages again and again, and others behind the
    window."""
    far = window + _FAR_TOKENS - 1
    far = min(far, context_tokens(config) - 4)
    num_behind = max(0, far + 1 - window) // PAGE_TOKENS if window else 0

    def piece(num_tokens: int, position: int, pages: Sequence[int], num_behind: int = 0) -> Slice:
        num_pages = -(-(position + num_tokens) // PAGE_TOKENS)
        seen = [_BEHIND_PAGE if i < num_behind else pages[i % len(pages)] for i in range(num_pages)]
        return Slice(num_tokens=num_tokens, position=position, pages=seen, want=Want.ALL)

    near = [piece(3, 0, [0]), piece(2, 5, [1]), piece(1, 7, [2]), piece(1, 17, [4, 3])]
    return [*near, piece(3, far, [5, 6], num_behind), piece(1, far, [7], num_behind)]


def is_close(found: Tensor | None, expected: Tensor | None) -> bool:
    """By the middle row: in half precision a router may send one or another row to another expert."""
    assert found is not None
    assert expected is not None
    tolerance = 1e-3 if expected.dtype == torch.float32 else 5e-2
    scale = expected.float().abs().amax(-1).clamp(min=1e-6)
    errors = (found.float() - expected.float()).abs().amax(-1) / scale
    return bool(errors.median() <= tolerance)
