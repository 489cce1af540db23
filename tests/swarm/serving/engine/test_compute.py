"""One pass over several sequences on an accelerator."""

from __future__ import annotations

from unittest.mock import patch

import torch
from support.arithmetic_span import ids
from swarm.serving.engine import compute as engine_compute
from swarm.serving.engine.compute import BatchPiece, compute
from swarm.serving.model.batch import Batch, SequenceRows, Want
from swarm.serving.model.kv_pool import KVPool, KVShape
from torch import Tensor


class Prompt:
    """A span that gets a piece of a prompt, and whose caller wants no output."""

    start, end, num_blocks, hidden_size, vocab_size, context_tokens = 0, 1, 1, 4, 64, 2**20

    def run(self, batch: Batch, pool: KVPool, /) -> list[Tensor | None]:
        return [None] * len(batch.pieces)


def test_pass_measures_the_accelerators_time_when_no_output_is_wanted() -> None:
    """An accelerator computes after the call has returned."""
    now_s = 0.0

    def wait(device: torch.device) -> None:
        nonlocal now_s
        now_s += 0.25 * (device == pool.device)

    pool = KVPool([KVShape(num_heads=1, key_width=1, value_width=1)], 1, torch.float32, "meta")
    rows = SequenceRows(num_tokens=3, position=0, pages=[0], want=Want.NOTHING)
    piece = BatchPiece(x=ids(1, 2, 3), rows=rows, want=Want.NOTHING, pick=None)
    with (
        patch.object(torch.accelerator, "synchronize", wait),
        patch.object(engine_compute.time, "perf_counter", lambda: now_s),
    ):
        [result], pass_ms = compute(Prompt(), pool, [piece], (0, 1))
    assert result.error is None
    assert pass_ms == 250.0
