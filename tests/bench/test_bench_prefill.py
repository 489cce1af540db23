"""The time to the first token at bf16 of one server's engine beside transformers alone: a Llama of 0.3 B parameters.

    make bench                                             # or alone:
    .venv/bin/python -m pytest tests/bench/test_bench_prefill.py -m bench -s

In one process with the same threads. The two take turns, and the figure is the median of each pair's ratio.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

import pytest
import torch
from bench.report import Report, aim
from swarm.serving.engine.engine import Engine
from swarm.serving.model.batch import Want
from swarm.serving.model.kv_pool import PAGE_TOKENS
from swarm.serving.sampling.sampling import Pick
from swarm.serving.server.deployment import LoadedSpan, ServerOptions, load
from swarm_protocol.session_frames import TokenDraw
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1200)]

NUM_ROUNDS = 5
NUM_THREADS = 2
LENGTHS = (512, 1024)
VOCAB = 32_000
NUM_BLOCKS = 20
BOUND = 1.1
OPTIONS = ServerOptions(dtype="bfloat16")


def write_model(directory: Path) -> Path:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=NUM_BLOCKS,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    assert 0.25e9 < model.num_parameters() < 0.35e9
    model.save_pretrained(directory)
    return directory


def prompt(length: int, round_: int) -> torch.Tensor:
    """Return a prompt. No two prompts share a page that the engine could keep."""
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(1000 * length + round_))


async def ours_s(loaded: LoadedSpan, length: int, round_: int) -> float:
    pool = loaded.span.new_pool(-(-length // PAGE_TOKENS))
    engine = Engine(loaded.span, pool, OPTIONS, revision="r", speed=loaded.speed)
    running = asyncio.create_task(engine.run())
    ids, chunk = prompt(length, round_), loaded.max_step_tokens
    sequence = engine.open(client="c", start=0, end=NUM_BLOCKS, max_tokens=length)
    since = time.perf_counter()
    for at in range(0, length, chunk):  # as clients send them
        pick = Pick(TokenDraw()) if at + chunk >= length else None
        await sequence.step(ids[at : at + chunk], Want.NOTHING, pick)
    taken_s = time.perf_counter() - since
    running.cancel()
    await asyncio.wait({running})
    engine.close()
    return taken_s


def theirs_s(model: LlamaForCausalLM, length: int, round_: int) -> float:
    ids = prompt(length, round_)[None]
    since = time.perf_counter()
    with torch.inference_mode():
        model(input_ids=ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax().item()
    return time.perf_counter() - since


def test_first_token_at_bf16_beside_local_transformers(tmp_path: Path) -> None:
    logging.disable_progress_bar()
    torch.set_num_threads(NUM_THREADS)
    directory = write_model(tmp_path / "model")
    loaded = load(directory, 0, NUM_BLOCKS, OPTIONS)
    local = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    report = Report(f"first token of a 0.3 B Llama at bf16, {NUM_THREADS} threads")
    ratios: dict[int, float] = {}
    for length in LENGTHS:
        pairs = []
        for round_ in range(NUM_ROUNDS + 1):
            pairs.append((asyncio.run(ours_s(loaded, length, round_)), theirs_s(local, length, round_)))
        pairs = pairs[1:]  # the first pair warms up
        ratios[length] = statistics.median(ours / theirs for ours, theirs in pairs)
        ours_ms, theirs_ms = (1000 * statistics.median(times) for times in zip(*pairs, strict=True))
        report.row(f"{length} tokens", local_ms=theirs_ms, engine_ms=ours_ms, ratio=ratios[length])
    report.show()
    aim(first_tokens_as_soon_as_from_transformers=max(ratios.values()) <= BOUND)
