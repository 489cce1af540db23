"""Spot checks: what honest servers need of the tolerances, how often they draw other tokens, who is told apart, how
soon a liar is named, and the cost.

    .venv/bin/python -m pytest -m bench tests/bench/test_bench_spot_checks.py -s

Rows are recorded from a small Llama as servers compute them: a prompt, then decodes, in batches and with numbers of
threads that differ, in each kind of weights. Each comparison is of one answer's rows of a span, or of its draws,
against what another server computes of them: as one pass over the sequence, with another number of threads.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from bench.report import Report
from support.text_models import byte_tokenizer
from swarm.serving.checking.comparison import TOLERANCES, LargestLogits, compare_draws, draw_noise, row_errors
from swarm.serving.checking.finished_answer import Draw
from swarm.serving.model.batch import Batch, SequenceRows, Want
from swarm.serving.model.kv_pool import PAGE_TOKENS
from swarm.serving.model.model_files import ModelFiles, open_model
from swarm.serving.model.span import Span
from swarm.serving.model.span_loading import load_span
from swarm.serving.sampling.drawing import fingerprint, pick
from swarm.serving.server.deployment import DTYPES
from swarm_compression import get_row_codec
from swarm_protocol.identity import Identity
from swarm_protocol.served_evidence_messages import PositionDigests
from swarm_protocol.session_frames import SampledToken, TokenDraw
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1200)]

NUM_BLOCKS, HIDDEN, VOCAB = 4, 128, 512
SPAN = 2
NUM_SEQUENCES, NUM_PROMPT, NUM_TOKENS = 16, 16, 48
NUM_CHECKS = 100_000
"""Comparisons for each kind of weights."""

KINDS = ("float32", "float16", "bfloat16", "int8", "int4")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=352,
        num_hidden_layers=NUM_BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)  # large weights, so that blocks change their inputs much
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return open_model(directory)


def spans(files: ModelFiles, kind: str, dtype: torch.dtype | None = None) -> tuple[Span, Span]:
    bits: Any = kind if kind.startswith("int") else None
    dtype = dtype or DTYPES[kind]  # type: ignore[index]
    return load_span(files, 0, SPAN, dtype=dtype, bits=bits), load_span(files, SPAN, NUM_BLOCKS, dtype=dtype, bits=bits)


@torch.inference_mode()
def served(span: Span, x: Tensor, batch: int, num_prompt: int, num_threads: int) -> Tensor:
    """Return what a server gives for [N, T, …]: prompts, then decodes of `batch` sequences together. The result is
    float32 [N, T, C]."""
    torch.set_num_threads(num_threads)
    num_pages = -(-x.shape[1] // PAGE_TOKENS)
    outputs = []
    for low in range(0, len(x), batch):
        rows = x[low : low + batch]
        pool = span.new_pool(len(rows) * num_pages)
        pages = [list(range(i * num_pages, (i + 1) * num_pages)) for i in range(len(rows))]

        def step(start: int, end: int, rows: Tensor = rows, pool: Any = pool, pages: list[list[int]] = pages) -> Tensor:
            pieces = tuple(
                SequenceRows(num_tokens=end - start, position=start, pages=pages[i], want=Want.ALL)
                for i in range(len(rows))
            )
            flat = rows[:, start:end].flatten(0, 1).contiguous()
            found = span.run(Batch(x=flat, pieces=pieces, start=span.start, end=span.end), pool)
            return torch.stack([each.float() for each in found if each is not None])

        parts = [step(0, num_prompt)] if num_prompt else []
        parts += [step(at, at + 1) for at in range(num_prompt, rows.shape[1])]
        outputs.append(torch.cat(parts, dim=1))
    torch.set_num_threads(2)
    return torch.cat(outputs)


@torch.inference_mode()
def recomputed(span: Span, x: Tensor, num_threads: int) -> Tensor:
    """Return what another server gives for the whole sequences."""
    torch.set_num_threads(num_threads)
    output = torch.cat([span.forward(each[None], span.start, span.end).float() for each in x])
    torch.set_num_threads(2)
    return output


@dataclass
class Recorded:
    """Hold both halves' outputs as several servers computed them: [N, T, C] each."""

    middle: list[Tensor]
    logits: list[Tensor]
    expected_middle: list[Tensor]
    expected_logits: list[Tensor]


WAYS = ((1, NUM_PROMPT, 1), (4, NUM_PROMPT, 2), (16, NUM_PROMPT, 1), (16, 0, 2))
"""Sequences in a batch, positions that are run as a prompt, threads."""


def random_tokens() -> Tensor:
    return torch.randint(0, VOCAB, (NUM_SEQUENCES, NUM_TOKENS), generator=torch.Generator().manual_seed(1))


def record(files: ModelFiles, kind: str, served_kind: str = "") -> Recorded:
    """Record `kind`, or a liar that serves `served_kind` under its name."""
    first, last = spans(files, kind)
    liars = spans(files, served_kind, torch.bfloat16) if served_kind else (first, last)
    tokens = random_tokens()
    hidden = served(first, tokens, *WAYS[0])
    ways = WAYS[:1] if served_kind else WAYS
    return Recorded(
        middle=[served(liars[0], tokens, *way) for way in ways],
        logits=[served(liars[1], hidden, *way) for way in ways],
        expected_middle=[recomputed(first, tokens, threads) for threads in (1, 2)],
        expected_logits=[recomputed(last, hidden, threads) for threads in (1, 2)],
    )


def row_shares(
    recorded: Recorded, kind: str, codec: str, rng: random.Random, number: int
) -> Iterator[tuple[float, float]]:
    """Yield for random answers, prompts and lengths the median and the largest share of what is tolerated."""
    tolerance = TOLERANCES[kind].after(SPAN).with_codec(codec)
    errors = []
    for given in recorded.middle:
        coded = get_row_codec(codec)
        flat = coded.decode(coded.encode(given.flatten(0, 1)), NUM_SEQUENCES * NUM_TOKENS, HIDDEN).double().numpy()
        errors += [
            row_errors(flat, expected.flatten(0, 1).double().numpy()).reshape(NUM_SEQUENCES, NUM_TOKENS)
            for expected in recorded.expected_middle
        ]
    table = np.concatenate(errors)
    for _ in range(number):
        rows = table[rng.randrange(len(table)), rng.randrange(NUM_TOKENS // 2) :][: rng.randrange(4, NUM_TOKENS)]
        yield float(np.median(rows)) / tolerance.median_row, float(rows.max()) / tolerance.row


def largest(logits_V: np.ndarray, temperature: float) -> LargestLogits:
    ids = np.argsort(-logits_V)[:64]
    scaled = logits_V / (temperature or 1.0)
    log_sum = float(scaled.max() + np.log(np.exp(scaled - scaled.max()).sum()))
    return LargestLogits(values_K=logits_V[ids], ids_K=ids, log_sum=log_sum)


def draw_shares(recorded: Recorded, kind: str, rng: random.Random, number: int) -> Iterator[tuple[float, float]]:
    """Yield for random draws the noise that they need and the difference of their fingerprints, as shares."""
    tolerance = TOLERANCES[kind].after(NUM_BLOCKS - SPAN)
    found = [each.flatten(0, 1).double().numpy() for each in recorded.expected_logits]
    for count in range(number):
        given = rng.choice(recorded.logits).flatten(0, 1)
        at = rng.randrange(len(given))
        draw = TokenDraw(
            temperature=rng.choice([0.0, 0.7, 1.0]), top_p=rng.choice([1.0, 0.9]), seed=count, index=16 * (count % 4)
        )
        token = SampledToken(token_id=pick(given[at], draw), fingerprint=fingerprint(given[at]))
        logits = largest(rng.choice(found)[at], draw.temperature)
        noise = draw_noise(logits, draw, token.token_id) / logits.scale / tolerance.draw
        each = Draw(position=at, draw=draw, token=token)
        difference = compare_draws([each], [logits], tolerance, has_plain_draws=False)
        yield noise, difference.share


@pytest.mark.parametrize("kind", KINDS)
def test_honest_servers_raise_no_alarm_in_a_hundred_thousand_checks(files: ModelFiles, kind: str) -> None:
    rng = random.Random(kind)
    recorded = record(files, kind)
    num_draws = NUM_CHECKS // 10
    num_rows = (NUM_CHECKS - num_draws) // 3
    worst = {
        codec: np.array(list(row_shares(recorded, kind, codec, rng, num_rows))).max(0)
        for codec in ("raw", "bf16", "int8")
    }
    draws = np.array(list(draw_shares(recorded, kind, rng, num_draws))).max(0)
    report = Report("spot checks of honest servers: the most of each tolerance that was needed")
    report.row(
        f"{kind}",
        **{f"{codec} median": float(shares[0]) for codec, shares in worst.items()},
        **{f"{codec} row": float(shares[1]) for codec, shares in worst.items()},
        draw=float(draws[0]),
        fingerprint=float(draws[1]),
    )
    report.show()
    assert max(shares.max() for shares in worst.values()) < 1
    assert draws.max() < 1
    assert worst["raw"].max() < 1 / 2
    assert draws.max() < 1 / 2


@pytest.mark.parametrize("kind", KINDS)
def test_share_of_draws_that_rounding_changes(files: ModelFiles, kind: str) -> None:
    """Compare the tokens that equal seeds draw after an answer was decoded alone, decoded in a batch of 16, and run
    again as one prompt, as after a failure."""
    first, last = spans(files, kind)
    tokens = random_tokens()
    alone_NV, batch_NV = (
        served(last, served(first, tokens, *way), *way).flatten(0, 1)
        for way in ((1, NUM_PROMPT, 1), (16, NUM_PROMPT, 1))
    )
    again_NV = recomputed(last, recomputed(first, tokens, 1), 1).flatten(0, 1)
    report = Report("the share of draws that give another token at another honest server")
    for temperature, num_draws in ((0.0, 1), (0.25, 100), (1.0, 100)):
        others = {"in_batch": batch_NV, "run_again": again_NV}
        shares = {name: changed(alone_NV, other_NV, temperature, num_draws) for name, other_NV in others.items()}
        report.row(f"{kind}, temperature {temperature:g}", **shares, perplexity=perplexity(alone_NV, temperature))
        if kind == "float32":
            assert max(shares.values()) < 3e-4
    report.show()


def perplexity(logits_NV: Tensor, temperature: float) -> float:
    """Return the geometric mean of how many equally likely tokens would be as uncertain as a draw."""
    return float(torch.distributions.Categorical(logits=logits_NV / (temperature or 1e-9)).entropy().mean().exp())


def changed(logits_NV: Tensor, others_NV: Tensor, temperature: float, num_draws: int) -> float:
    """Return the share of `num_draws` draws at each decoded position that give another token."""
    is_other = [
        pick(logits_NV[at], draw) != pick(others_NV[at], draw)
        for at in range(len(logits_NV))
        for draw in (TokenDraw(temperature=temperature, seed=seed, index=at) for seed in range(num_draws))
        if at % NUM_TOKENS >= NUM_PROMPT
    ]
    return sum(is_other) / len(is_other)


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "int8"])
def test_server_that_swaps_in_four_bit_weights_is_told_apart(files: ModelFiles, kind: str) -> None:
    rng = random.Random(kind)
    recorded = record(files, kind, "int4")
    rows = np.array(list(row_shares(recorded, kind, "raw", rng, 2000)))
    draws = np.array(list(draw_shares(recorded, kind, rng, 2000)))
    report = Report("a server with int4 weights under another name: the least of each tolerance that it exceeds")
    report.row(
        f"{kind}",
        **{"least median": float(rows[:, 0].min()), "least fingerprint": float(draws[:, 1].min())},
        **{"draws caught": float((draws[:, 0] > 1).mean())},
    )
    report.show()
    assert rows[:, 0].min() > 1.5
    assert draws[:, 1].min() > 1


def test_liar_is_named_within_three_hundred_requests_with_ninety_five_percent() -> None:
    """A server that lies in every answer is named by the first of its answers that is drawn."""
    report = Report("requests until a liar is named, by the share that is checked")
    shares = (0.005, 0.01, 0.0152, 0.02)
    for share in shares:
        rng = random.Random(share)
        first = np.array([1 + int(np.log(1 - rng.random()) / np.log(1 - share)) for _ in range(100_000)])
        within = float((first <= 300).mean())
        report.row(
            f"share {share}",
            median=float(np.median(first)),
            p95=float(np.percentile(first, 95)),
            p99=float(np.percentile(first, 99)),
            **{"within 300": within},
        )
        assert within == pytest.approx(1 - (1 - share) ** 300, abs=0.01)
    report.show()


def test_one_percent_of_checks_costs_less_than_two_percent(files: ModelFiles) -> None:
    """Compare an answer of 64 tokens to a prompt of 128 on half of the model with the work that its server does for
    checks. One thread is used, since more would wait for each other on a model this small."""
    span = load_span(files, 0, SPAN)
    tokens = torch.randint(0, VOCAB, (1, 192), generator=torch.Generator().manual_seed(1))
    identity = Identity(bytes(32))

    def signs() -> None:
        digests = PositionDigests()
        for position in range(128, 192):
            digests.add_rows(position, rows[position * each : (position + 1) * each], each)
            digests.add_rows(position, rows[position * each : (position + 1) * each], each)
        digests.add_rows(0, rows[: 128 * each], each)
        digests.add_rows(0, rows[: 128 * each], each)
        digests.digest(192)
        identity.sign(bytes(400))

    rows, each = bytes(192 * 4 * HIDDEN), 4 * HIDDEN
    answers, checks, signatures = [], [], []
    for _ in range(7):
        answers.append(timed(lambda: served(span, tokens, 1, 128, 1)))
        checks.append(timed(lambda: recomputed(span, tokens, 1)))
        signatures.append(timed(signs))
    answer_ms, check_ms, sign_ms = (1000 * statistics.median(each) for each in (answers, checks, signatures))
    share = (sign_ms + 0.01 * check_ms) / answer_ms
    report = Report("what checks of 1 % of the answers cost a server")
    report.row("an answer", answer_ms=answer_ms, check_ms=check_ms, sign_ms=sign_ms, share=share)
    report.show()
    assert share < 0.02


def timed(run: Callable[[], object]) -> float:
    since_s = time.perf_counter()
    run()
    return time.perf_counter() - since_s
