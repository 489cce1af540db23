"""Batches of many sequences through spans of every family, compared with transformers on one machine."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import likeliest_tokens
from swarm.serving.model import model_cut, span_loading
from swarm.serving.model.attention import GatheredCache
from swarm.serving.model.batch import Batch, SequenceRows, Want
from swarm.serving.model.kv_pool import PAGE_TOKENS, KVPool
from swarm.serving.model.model_files import open_model
from swarm.serving.model.span import Span
from swarm.serving.model.span_loading import load_span
from swarm.serving.server.deployment import ServerOptions, load
from swarm_protocol.errors import ConfigError
from transformers import (
    BertConfig,
    BloomConfig,
    CTRLConfig,
    FalconConfig,
    Gemma2Config,
    GPTNeoConfig,
    GptOssConfig,
    GraniteConfig,
    ModernBertDecoderConfig,
    NanoChatConfig,
    OlmoConfig,
    OPTConfig,
    Phi3Config,
)

FAMILIES = ["llama", "llama-tied", "qwen3", "mistral", "mixtral", "gpt2"]
NUM_TOKENS = 12
CHUNK = 7
PROMPTS = [[(7 * sequence + 3 * i) % 250 + 2 for i in range(3 + 7 * sequence)] for sequence in range(9)]


class FedPrompt:
    """A prompt that is fed in uneven chunks, followed by its own greedy tokens."""

    def __init__(self, prompt: Sequence[int], pages: Sequence[int], chunk: int) -> None:
        self.tokens = list(prompt)
        self.num_prompt = len(prompt)
        self.position = 0
        self.pages = pages
        self.chunk = chunk

    def piece(self) -> SequenceRows:
        num_tokens = min(self.chunk, len(self.tokens) - self.position)
        return SequenceRows(num_tokens=num_tokens, position=self.position, pages=self.pages, want=Want.LAST)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]


@functools.cache
def loaded(directory: Path, start: int, end: int) -> Span:
    """Load a span for a test that is not about loading."""
    return load_span(open_model(directory), start, end)


def run_step(spans: Sequence[Span], pools: Sequence[KVPool], sequences: Sequence[FedPrompt]) -> None:
    pieces = [sequence.piece() for sequence in sequences]
    x = torch.tensor(
        [t for s, p in zip(sequences, pieces, strict=True) for t in s.tokens[s.position :][: p.num_tokens]]
    )
    for span, pool in zip(spans, pools, strict=True):
        want = Want.LAST if span.end == span.num_blocks else Want.ALL
        wanted = tuple(
            SequenceRows(num_tokens=p.num_tokens, position=p.position, pages=p.pages, want=want) for p in pieces
        )
        outputs = span.run(Batch(x=x, pieces=wanted, start=span.start, end=span.end), pool)
        x = torch.cat([output for output in outputs if output is not None])
    for sequence, piece, logits in zip(sequences, pieces, outputs, strict=True):
        assert logits is not None
        sequence.position += piece.num_tokens
        if sequence.position == len(sequence.tokens):
            sequence.tokens.append(int(logits[-1].argmax()))


def generate(spans: Sequence[Span], prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Generate with sequences on scattered or on adjacent pages."""
    num_pages = -(-(max(map(len, prompts)) + NUM_TOKENS) // PAGE_TOKENS)
    order = torch.randperm(num_pages * len(prompts), generator=torch.Generator().manual_seed(0)).tolist()
    sequences = []
    for sequence, prompt in enumerate(prompts):
        run = range(sequence * num_pages, (sequence + 1) * num_pages)
        pages = [order[page] for page in run] if len(prompts) > 1 and sequence % 2 else list(run)
        sequences.append(FedPrompt(prompt, pages, CHUNK + sequence))
    if len(prompts) > 1:
        taken = {page for sequence in sequences[1::2] for page in sequence.pages}
        free = iter(sorted(set(order) - taken))
        for sequence in sequences[::2]:
            sequence.pages = [next(free) for _ in sequence.pages]
    pools = [span.new_pool(num_pages * len(prompts)) for span in spans]
    while any(len(sequence.generated) < NUM_TOKENS for sequence in sequences):
        run_step(spans, pools, [sequence for sequence in sequences if len(sequence.generated) < NUM_TOKENS])
    return [sequence.generated for sequence in sequences]


@pytest.mark.parametrize(
    ("family", "cuts"), [("llama", (0, 6)), ("llama", (0, 2, 6)), *((family, (0, 1, 4, 6)) for family in FAMILIES)]
)
def test_run_batch_of_mixed_lengths_in_uneven_chunks_gives_the_tokens_of_local_generate(
    model_dirs: Callable[[str], Path], family: str, cuts: tuple[int, ...]
) -> None:
    directory = model_dirs(family)
    assert len(set(open_model(directory).shards.values())) > 3
    spans = [loaded(directory, start, end) for start, end in itertools.pairwise(cuts)]
    assert all(span.is_ragged for span in spans)
    answers = generate(spans, PROMPTS)
    assert answers == [likeliest_tokens(directory, *each) for each in zip(PROMPTS, answers, strict=True)]
    assert generate(spans, PROMPTS[5:6]) == answers[5:6]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_run_batch_on_pages_that_a_failed_sequence_left_gives_the_same_tokens(
    model_dirs: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    span = loaded(model_dirs(family), 0, 6)
    expected = generate([span], PROMPTS[:4])
    new_pool = span.new_pool
    spoilt = []

    def spoilt_pool(num_pages: int) -> KVPool:
        pool = new_pool(num_pages)
        for tensor in (*pool.keys_SKD, *pool.values_SKD):
            tensor.fill_(torch.nan)
        spoilt.append(pool)
        return pool

    monkeypatch.setattr(span, "new_pool", spoilt_pool)
    assert generate([span], PROMPTS[:4]) == expected
    assert len(spoilt) == 1


def whole_batch(span: Span, x: torch.Tensor, *, start: int, end: int, want: Want = Want.ALL) -> torch.Tensor:
    """Run one sequence alone on its own pool, from position 0."""
    pages = range(-(-len(x) // PAGE_TOKENS))
    piece = SequenceRows(num_tokens=len(x), position=0, pages=pages, want=want)
    (output,) = span.run(Batch(x=x, pieces=(piece,), start=start, end=end), span.new_pool(len(pages)))
    assert output is not None
    return output


@pytest.mark.parametrize("family", FAMILIES)
def test_run_some_blocks_of_a_span_equals_a_span_of_those(model_dirs: Callable[[str], Path], family: str) -> None:
    directory = model_dirs(family)
    whole, tokens = loaded(directory, 0, 6), torch.tensor(PROMPTS[4])
    logits = whole_batch(whole, tokens, start=0, end=6)
    x = tokens
    for start, end in [(0, 1), (1, 4), (4, 6)]:
        alone = whole_batch(loaded(directory, start, end), x, start=start, end=end)
        x = whole_batch(whole, x, start=start, end=end)
        assert torch.equal(x, alone)
    torch.testing.assert_close(x, logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(whole_batch(whole, tokens, start=0, end=6), logits)


def test_run_gives_each_piece_the_output_that_it_wants(llama_dir: Path) -> None:
    for start in (0, 4):
        for end in (5, 6):
            span = loaded(llama_dir, start, 6)
            x = torch.tensor(PROMPTS[2][:6]) if start == 0 else torch.randn(6, 32)
            pieces = tuple(
                SequenceRows(num_tokens=2, position=0, pages=[page], want=want)
                for page, want in enumerate([Want.ALL, Want.NOTHING, Want.LAST])
            )
            everything, nothing, last = span.run(Batch(x=x, pieces=pieces, start=start, end=end), span.new_pool(3))
            assert nothing is None
            assert everything is not None
            assert last is not None
            alone = [whole_batch(span, x[at : at + 2], start=start, end=end) for at in (0, 4)]
            torch.testing.assert_close(everything, alone[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(last, alone[1][-1:], rtol=1e-4, atol=1e-4)


def test_run_does_not_change_a_sequence_when_another_has_numbers_that_are_not_finite(llama_dir: Path) -> None:
    """Short decodes share a call, and its padding must not mix them."""
    span = load_span(open_model(llama_dir), 2, 4)
    x = torch.randn(2, 32)
    pieces = tuple(
        SequenceRows(num_tokens=1, position=p, pages=pages, want=Want.ALL) for p, pages in [(3, [2]), (40, [0, 1, 3])]
    )
    outputs = []
    for number in (0.0, torch.nan):
        pool = span.new_pool(4)
        for tensor in (*pool.keys_SKD, *pool.values_SKD):
            tensor[PAGE_TOKENS] = number  # the page of the second sequence
        outputs.append(span.run(Batch(x=x, pieces=pieces, start=2, end=4), pool))
    (ours, theirs), (ours_after, theirs_after) = outputs
    assert ours is not None
    assert theirs_after is not None
    assert theirs is not None
    assert torch.equal(ours, ours_after)  # type: ignore[arg-type]
    assert theirs.isfinite().all()
    assert theirs_after.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pool_of_a_span_takes_the_bytes_that_it_announces(llama_dir: Path, dtype: torch.dtype) -> None:
    """In theory: keys and values of 2 heads of width 8 on 3 blocks."""
    span = load_span(open_model(llama_dir), 1, 4, dtype=dtype)
    assert span.kv_bytes_per_token == 2 * 2 * 8 * 3 * dtype.itemsize
    pool = span.new_pool(5)
    assert pool.num_bytes == 5 * PAGE_TOKENS * span.kv_bytes_per_token
    assert pool.page_bytes == PAGE_TOKENS * span.kv_bytes_per_token
    assert whole_batch(span, torch.randn(20, 32), start=1, end=4).dtype == dtype


SHAPE = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}
NEO_SHAPE = {
    **{name: value for name, value in SHAPE.items() if not name.startswith("num_")},
    "num_layers": 6,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 3]],
    "window_size": 16,
}
CTRL_SHAPE = {"vocab_size": 256, "n_embd": 32, "dff": 64, "n_layer": 6, "n_head": 4, "n_positions": 256}


def phi3(original_context: int) -> Any:
    return Phi3Config(**SHAPE, rope_parameters=LONG_ROPE, original_max_position_embeddings=original_context)


OTHERS = {
    "capped logits": (True, lambda: Gemma2Config(**SHAPE, head_dim=8, sliding_window=8)),
    "sinks": (True, lambda: GptOssConfig(**SHAPE, head_dim=8, num_local_experts=4, sliding_window=8)),
    "norm without weights": (True, lambda: OlmoConfig(**SHAPE)),
    "scaled embeddings": (True, lambda: GraniteConfig(**SHAPE, embedding_multiplier=3.0, logits_scaling=2.0)),
    "frequencies of the longest": (True, lambda: phi3(original_context=128)),
    "normed before the first block": (True, lambda: NanoChatConfig(**SHAPE)),
    "blocks that are numbered otherwise": (False, lambda: GPTNeoConfig(**NEO_SHAPE)),
    "embeddings with a norm": (True, lambda: ModernBertDecoderConfig(**SHAPE, local_attention=16)),
    "scales what it is given in place": (True, lambda: CTRLConfig(**CTRL_SHAPE)),
    "a head of several layers": (True, lambda: BertConfig(**SHAPE, is_decoder=True)),
    "last norm written first": (True, lambda: OPTConfig(**SHAPE, ffn_dim=64)),
    "bias by position": (False, lambda: BloomConfig(**SHAPE, n_layer=6, n_head=4)),
    "attention of its own": (False, lambda: FalconConfig(**SHAPE, new_decoder_architecture=True, num_kv_heads=2)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_run_gives_the_tokens_of_local_generate_when_a_family_needs_one_pass_or_one_sequence(
    tmp_path: Path, write_config: Callable[[Path, Any], Path], what: str
) -> None:
    is_ragged, config = OTHERS[what]
    directory = write_config(tmp_path / "model", config())
    spans = [load_span(open_model(directory), start, end) for start, end in [(0, 2), (2, 6)]]
    assert [span.is_ragged for span in spans] == [is_ragged, is_ragged]
    prompts = PROMPTS[2::3]
    answers = generate(spans, prompts)
    assert answers == [likeliest_tokens(directory, *each) for each in zip(prompts, answers, strict=True)]


def test_context_ends_where_rotary_embeddings_would_change_for_all_positions(
    tmp_path: Path, write_config: Callable[[Path, Any], Path]
) -> None:
    files = open_model(write_config(tmp_path / "model", phi3(original_context=40)))
    assert (files.context_tokens, load_span(files, 0, 2).context_tokens) == (40, 40)


def test_load_names_family_and_block_when_the_cache_changes_the_result(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All calls with a cache are wrong in the same way, as for a family that keeps state outside the cache."""
    seen = GatheredCache.update

    def shifted(cache: GatheredCache, keys: torch.Tensor, values: torch.Tensor, layer: int, **others: Any) -> Any:
        keys, values = seen(cache, keys, values, layer, **others)
        return keys, 1.1 * values if layer == 1 else values

    monkeypatch.setattr(GatheredCache, "update", shifted)
    monkeypatch.setattr(span_loading, "find_ways", lambda *_: (False, False))
    load_span(open_model(llama_dir), 2, 3)
    with pytest.raises(ConfigError, match="block 3 of this llama gives another result than transformers' own modules"):
        load_span(open_model(llama_dir), 2, 4)


def test_load_says_why_a_span_does_not_run(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_span: Span, *_others: Any) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr(Span, "run", broken)
    with pytest.raises(ConfigError, match="block 2 of this llama does not run: list index out of range"):
        load_span(open_model(llama_dir), 2, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama-tied", "mixtral", "gpt2"])
def test_load_keeps_all_blocks_of_a_span_that_passes_the_check(
    model_dirs: Callable[[str], Path], family: str, dtype: torch.dtype
) -> None:
    span = load_span(open_model(model_dirs(family)), 2, 6, dtype=dtype)
    assert span.part.chosen == (2, 6)


def test_load_of_every_span_is_refused_when_its_family_is_cut_wrongly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_config: Callable[[Path, Any], Path]
) -> None:
    """This includes a span whose own blocks compute correctly."""
    config = OPTConfig(vocab_size=256, hidden_size=32, num_hidden_layers=4, ffn_dim=64, num_attention_heads=4)
    directory = write_config(tmp_path / "model", config)
    monkeypatch.setattr(model_cut, "_BEFORE_BLOCKS", {("opt", "final_layer_norm"): True})
    load_span(open_model(directory), 1, 2)
    with pytest.raises(ConfigError, match="opt gives another result in parts than as a whole"):
        load(directory, 1, 2, ServerOptions())
