"""Blocks `[start, end)` of a transformers model, with only their own weights in memory.

The family's own modules compute. A batch of many sequences goes through them in one pass, each row with its own
position, and attention reads a KV pool (`kv_pool`). For some families this is wrong: they run one sequence at a time,
through transformers' own attention and masks. `span_loading` finds out which. `engine` schedules the batches. A span is
not thread-safe: one thread runs it. Shapes: N rows of a batch, B sequences, T positions of each, H hidden
size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from swarm_protocol.errors import ConfigError
from torch import Tensor

from swarm.serving.model.attention import RAGGED, GatheredCache, PoolCache, RaggedCache, ShapeRecorder, cache_argument
from swarm.serving.model.batch import Batch, SequenceRows, Want, is_decode
from swarm.serving.model.fused_decode import FusedBlocks, fused_blocks
from swarm.serving.model.kv_pool import KVPool, KVShape
from swarm.serving.model.model_cut import ModelPart
from swarm.serving.model.shape import context_tokens

OTHER_FAMILY = "serve another family"

STEPS = (1, 16)
"""Numbers of rows for which `span_speed.measure` chooses the number of threads: one session's next token, and many
sessions'. Few rows may be faster with fewer threads than cores."""


class Span:
    """Blocks `[start, end)` of a model of `num_blocks`, ready to run. Raises ConfigError for a family that cannot be
    run.

    `is_ragged`: all pieces of a batch go through the blocks in one pass. `is_fused`: steps with only decodes use the
    fused blocks in place of the family's modules (see `fused`). `span_loading` sets both.
    """

    def __init__(self, model: Any, start: int, end: int, num_blocks: int) -> None:
        self._model = model
        self.start = start
        self.end = end
        self.num_blocks = num_blocks
        self.hidden_size = int(model.config.hidden_size)
        self.vocab_size = int(model.config.vocab_size)
        self.context_tokens = context_tokens(model.config)
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self.device: torch.device = next(model.parameters()).device
        self.part = ModelPart(model, start, num_blocks)
        self._cache_argument = cache_argument(model)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.is_ragged = False
        self.is_fused = False
        self.num_threads = torch.get_num_threads()
        self.step_threads = dict.fromkeys(STEPS, self.num_threads)

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def kv_bytes_per_token(self) -> int:
        """The exact bytes of one position in a pool, on all blocks."""
        return sum(shape.num_values for shape in self.kv_shapes) * self.dtype.itemsize

    def new_pool(self, num_pages: int) -> KVPool:
        return KVPool(self.kv_shapes, num_pages, self.dtype, self.device)

    @cached_property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """The shapes that each block caches of a position, found by a pass of one row."""
        recorder = ShapeRecorder()
        self.part.choose(self.start, self.end)
        self.part.attend_with(None)
        x = torch.zeros(1, 1, self.hidden_size, dtype=self.dtype, device=self.device)
        family = self._model.config.model_type
        try:
            with torch.inference_mode(), self.part.inputs(x) as (inputs, _):
                self._model.base_model(**inputs, **{self._cache_argument: recorder}, use_cache=True)
        except Exception as error:  # a family's own code may raise anything
            raise ConfigError(f"{family} does not run in parts: {error}", remedy=OTHER_FAMILY) from error
        if sorted(recorder.shapes) != list(range(self.end - self.start)):
            raise ConfigError(f"{family} caches something other than keys and values", remedy=OTHER_FAMILY)
        return tuple(recorder.shapes[layer] for layer in sorted(recorder.shapes))

    @cached_property
    def fused(self) -> FusedBlocks | None:
        return fused_blocks(list(self.part.blocks), self._model.base_model, self.dtype, self.device)

    @torch.inference_mode()
    def run(self, batch: Batch, pool: KVPool) -> list[Tensor | None]:
        """Append each piece's rows to its pages in `pool`, and return each piece's wanted outputs.

        These are hidden states [T, H], or logits [T, V] if the batch ends with the model's last block; [1, H] or [1, V]
        for `Want.LAST`. Floats at the model's first block are input embeddings.
        """
        x = batch.x.to(self.device, self.dtype if batch.x.is_floating_point() else None)
        self.part.choose(batch.start, batch.end)
        step = _step_like(len(x))
        with threads(self.step_threads[step] if step else self.num_threads, self.num_threads):
            if not self.is_ragged:
                return self.run_alone(x, batch.pieces, pool)
            if self.is_fused and all(is_decode(piece.num_tokens, piece.num_drafts) for piece in batch.pieces):
                return self.run_fused(x, batch.pieces, pool)
            return self.run_ragged(x, batch.pieces, pool)

    def run_fused(self, x: Tensor, pieces: Sequence[SequenceRows], pool: KVPool) -> list[Tensor | None]:
        """Run decodes, and the drafts after them, in one pass through the fused blocks."""
        assert self.fused is not None
        start, end = self.part.chosen
        x_NH = x if x.is_floating_point() else self._model.get_input_embeddings()(x)
        rows = [row for piece in pieces for row in _rows(piece)]
        hidden_NH = self.fused.run(x_NH, rows, pool, start - self.start, end - self.start)
        if end < self.num_blocks or all(piece.want is Want.NOTHING for piece in pieces):
            return _split(hidden_NH, pieces)
        logits_NV = self._model.get_output_embeddings()(self._model.base_model.norm(hidden_NH[_kept(pieces)]))
        return _split(logits_NV, pieces, is_kept=True)

    def run_ragged(self, x: Tensor, pieces: Sequence[SequenceRows], pool: KVPool) -> list[Tensor | None]:
        """Run all pieces in one pass over the weights."""
        self.part.attend_with(RAGGED)
        with RaggedCache(pool, pieces) as cache:
            return self._compute(x, pieces, cache)

    def run_alone(self, x: Tensor, pieces: Sequence[SequenceRows], pool: KVPool) -> list[Tensor | None]:
        """Run each piece in its own pass, through transformers' own attention and masks."""
        self.part.attend_with(None)
        outputs, row = [], 0
        for piece in pieces:
            rows = x[row : row + piece.num_tokens]
            outputs += self._compute(rows, [piece], GatheredCache(pool, piece))
            row += piece.num_tokens
        return outputs

    def forward(self, x: Tensor, start: int, end: int, *, head: bool = True, num_last: int = 0) -> Tensor:
        """Run whole sequences without a cache. Differentiable in `x`; the weights are frozen.

        `x` is hidden states [B, T, H], or for the first block token ids [B, T] or input embeddings [B, T, H]. Returns
        hidden states [B, T, H], or logits [B, T, V] after the last block. Without `head`, the last block returns hidden
        states after the model's last norm. With `num_last`, only the last `num_last` positions have logits.
        """
        x = x.to(self.device, self.dtype if x.is_floating_point() else None)
        self.part.choose(start, end)
        self.part.attend_with(None)
        with self.part.inputs(x) as (inputs, output):
            if end == self.num_blocks and head:
                kept = {"logits_to_keep": num_last} if num_last and self._keeps_logits else {}
                logits: Tensor = self._model(**inputs, use_cache=False, **kept).logits
                return logits[:, -num_last:]
            hidden: Tensor = self._model.base_model(**inputs, use_cache=False).last_hidden_state
            return output[0] if output else hidden

    def last_output(self, x: Tensor, start: int) -> Tensor:
        """Run whole sequences as `forward` does, up to the output [B, T, H] of the model's last block, for `head`."""
        x = x.to(self.device, self.dtype if x.is_floating_point() else None)
        self.part.choose(start, self.num_blocks)
        self.part.attend_with(None)
        with self.part.inputs(x, keeps_last=True) as (inputs, output):
            self._model.base_model(**inputs, use_cache=False)
        return output[0]

    def head(self, x_BTH: Tensor) -> Tensor:
        """Return the logits [B, T, V] for outputs of the model's last block, which `last_output` gave before.

        Each position counts alone, so long sequences can be given in slices. The family's own code computes what
        follows the last block, since some families scale or cap logits.
        """
        x_BTH = x_BTH.to(self.device, self.dtype)
        self.part.choose(self.num_blocks - 1, self.num_blocks)
        self.part.attend_with(None)
        with self.part.returning(x_BTH):
            logits: Tensor = self._model(inputs_embeds=x_BTH, use_cache=False).logits
        return logits

    def backward(self, x: Tensor, grad: Tensor, start: int, end: int, *, head: bool = True) -> Tensor:
        """Return the gradient with respect to hidden states `x` [B, T, H], given that of the output of `forward`.

        Raises ConfigError if the weights have no gradient, as 4-bit weights on some devices.
        """
        with torch.enable_grad():
            x = x.detach().to(self.device, self.dtype).requires_grad_()
            try:
                out = self.forward(x, start, end, head=head)
                (grad_BTH,) = torch.autograd.grad(out, x, grad.to(out))
            except RuntimeError as error:
                if "derivative" not in str(error):
                    raise
                raise ConfigError("this span's weights have no gradient", remedy="use another server") from error
        return grad_BTH

    @torch.inference_mode()
    def embed(self, tokens_T: Tensor) -> Tensor:
        """Return the input embeddings [T, H] of token ids, as `forward` takes them. Only for the first span."""
        assert self.is_first
        embedding: Tensor = self._model.get_input_embeddings()(tokens_T.to(self.device))
        return embedding

    def _compute(self, x: Tensor, pieces: Sequence[SequenceRows], cache: PoolCache) -> list[Tensor | None]:
        with self.part.inputs(x[None]) as (inputs, output):
            inputs |= {"position_ids": cache.positions, self._cache_argument: cache, "use_cache": True}
            if self.part.chosen[1] < self.num_blocks or all(piece.want is Want.NOTHING for piece in pieces):
                hidden = self._model.base_model(**inputs).last_hidden_state
                return _split(output[0][0] if output else hidden[0], pieces)
            if not self._keeps_logits:
                return _split(self._model(**inputs).logits[0], pieces)
            rows = torch.tensor(_kept(pieces), device=self.device)
            return _split(self._model(**inputs, logits_to_keep=rows).logits[0], pieces, is_kept=True)


def _kept(pieces: Sequence[SequenceRows]) -> list[int]:
    """Return the rows whose logits are wanted."""
    rows: list[int] = []
    after = 0
    for piece in pieces:
        after += piece.num_tokens
        rows += range(after - _num_kept(piece), after)
    return rows


def _num_kept(piece: SequenceRows) -> int:
    return (0, 1, piece.num_tokens)[piece.want]


def _split(rows: Tensor, pieces: Sequence[SequenceRows], *, is_kept: bool = False) -> list[Tensor | None]:
    """Return each piece's part of `rows`, which are all rows of the batch, or (`is_kept`) only the wanted ones."""
    outputs: list[Tensor | None] = []
    after = 0
    for piece in pieces:
        num_kept = _num_kept(piece)
        after += num_kept if is_kept else piece.num_tokens
        outputs.append(rows[after - num_kept : after] if num_kept else None)
    return outputs


def _rows(piece: SequenceRows) -> list[SequenceRows]:
    """Return a piece for each row."""
    if piece.num_tokens == 1:
        return [piece]
    return [replace(piece, position=piece.position + row, num_tokens=1) for row in range(piece.num_tokens)]


def _step_like(num_rows: int) -> int | None:
    """Return the entry of STEPS for a step of `num_rows`; None for a prompt's step, which uses all cores."""
    if num_rows < STEPS[1] // 2:
        return STEPS[0]
    return STEPS[1] if num_rows <= 2 * STEPS[1] else None


@contextmanager
def threads(num_threads: int, usual: int) -> Iterator[None]:
    """Compute with `num_threads`, and with `usual` again afterwards. The setting is process-wide: use it only in one
    place at a time."""
    if num_threads == usual:
        yield
        return
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(usual)
