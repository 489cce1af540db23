"""Weights of 8 and 4 bits beside bf16 on this machine's processor: a Llama of 0.3 B parameters, one session.

    make bench                                             # or alone:
    .venv/bin/python -m pytest tests/bench/test_bench_few_bits.py -m bench -s

The three take turns in one process. `held_MB` is what the layers' weights take.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from bench.report import Report, aim
from bench.test_bench_prefill import NUM_BLOCKS, VOCAB, write_model
from swarm.serving.model.batch import Batch, SequenceRows, Want
from swarm.serving.model.kv_pool import PAGE_TOKENS, KVPool
from swarm.serving.model.model_files import open_model
from swarm.serving.model.quantization import Bits
from swarm.serving.model.span import Span
from swarm.serving.model.span_loading import load_span
from swarm.serving.server.capability import weigh
from swarm.serving.server.deployment import Dtype, ServerOptions

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1200)]

NUM_ROUNDS = 3
PROMPT_TOKENS, CHUNK, NUM_TOKENS = 512, 256, 16
KINDS: dict[Dtype, Bits | None] = {"bfloat16": None, "int8": "int8", "int4": "int4"}


def step(span: Span, pool: KVPool, position: int, num_tokens: int) -> None:
    pages = range(-(-(position + num_tokens) // PAGE_TOKENS))
    piece = SequenceRows(num_tokens=num_tokens, position=position, pages=pages, want=Want.LAST)
    x = torch.randint(VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(position))
    span.run(Batch(x=x, pieces=(piece,), start=0, end=NUM_BLOCKS), pool)


def tokens_per_s(span: Span) -> tuple[float, float]:
    """Return the tokens a second of a prompt, and of the answer to it."""
    pool = span.new_pool(-(-(PROMPT_TOKENS + NUM_TOKENS) // PAGE_TOKENS))
    began = time.perf_counter()
    for position in range(0, PROMPT_TOKENS, CHUNK):
        step(span, pool, position, CHUNK)
    read = time.perf_counter()
    for index in range(NUM_TOKENS):
        step(span, pool, PROMPT_TOKENS + index, 1)
    return PROMPT_TOKENS / (read - began), NUM_TOKENS / (time.perf_counter() - read)


def test_few_bits_beside_bf16(tmp_path: Path) -> None:
    files = open_model(write_model(tmp_path / "model"))
    spans = {kind: load_span(files, 0, NUM_BLOCKS, dtype=torch.bfloat16, bits=bits) for kind, bits in KINDS.items()}
    seen: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(NUM_ROUNDS + 1):  # the first round warms up
        for kind, span in spans.items():
            seen[kind].append(tokens_per_s(span))
    report = Report("weights of few bits beside bf16, a 0.3 B Llama, one session")
    for kind in KINDS:
        prompt, answer = (statistics.median(values) for values in zip(*seen[kind][1:], strict=True))
        held_mb = NUM_BLOCKS * weigh(files, ServerOptions(dtype=kind)).block_bytes / 1e6
        report.row(kind, prompt_tokens_per_s=prompt, answer_tokens_per_s=answer, held_MB=held_mb)
    report.show()
    pairs = zip(seen["int8"][1:], seen["bfloat16"][1:], strict=True)
    aim(int8_answers_as_fast_as_bf16=statistics.median(small[1] / half[1] for small, half in pairs) >= 0.95)
