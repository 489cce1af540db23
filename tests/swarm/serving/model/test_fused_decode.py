"""Fused decodes, which bypass a family's modules, give what transformers gives, and leave the same in the pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from swarm.serving.model import fused_decode
from swarm.serving.model.batch import Batch, SequenceRows, Want, is_decode
from swarm.serving.model.kv_pool import PAGE_TOKENS, KVPool
from swarm.serving.model.model_files import open_model
from swarm.serving.model.packing import PackedLinear, can_pack
from swarm.serving.model.span import Span
from swarm.serving.model.span_loading import load_span
from torch import Tensor
from transformers import GraniteConfig, LlamaConfig, Ministral3Config, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaAttention

NUM_PAGES = 32
POSITIONS = (0, 5, PAGE_TOKENS - 1, PAGE_TOKENS, 3 * PAGE_TOKENS + 7)
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def decodes(positions: tuple[int, ...] = POSITIONS) -> tuple[SequenceRows, ...]:
    """Return one row for each sequence, on pages that are not adjacent."""
    pages = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(1)).tolist()
    pieces, used = [], 0
    for position in positions:
        num_pages = position // PAGE_TOKENS + 1
        own = pages[used : used + num_pages]
        used += num_pages
        pieces.append(SequenceRows(num_tokens=1, position=position, pages=own, want=Want.ALL))
    return tuple(pieces)


def filled_pool(span: Span, *, behind: float | None = None) -> KVPool:
    """Return a pool of the same numbers each time.

    `behind` fills the pages after POSITIONS with what a failed sequence left.
    """
    pool = span.new_pool(NUM_PAGES)
    generator = torch.Generator().manual_seed(2)
    for tensor in (*pool.keys_SKD, *pool.values_SKD):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
        for piece in decodes():
            if behind is not None and piece.position % PAGE_TOKENS == 0:
                page = piece.pages[piece.position // PAGE_TOKENS]
                tensor[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS] = behind
    return pool


def rows(span: Span, num_rows: int) -> Tensor:
    return torch.randn(num_rows, span.hidden_size, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module", params=["llama", "qwen3", "mistral", "mixtral"])
def span(request: pytest.FixtureRequest, model_dirs: Callable[[str], Path]) -> Span:
    return load_span(open_model(model_dirs(request.param)), 1, 4)


def test_run_fused_gives_and_caches_what_transformers_does(span: Span) -> None:
    assert span.is_fused
    pieces, x = decodes(), rows(span, len(POSITIONS))
    pools = [filled_pool(span) for _ in range(2)]
    with torch.inference_mode():
        expected, found = span.run_alone(x, pieces, pools[0]), span.run_fused(x, pieces, pools[1])
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
    tensors = zip(*([*pool.keys_SKD, *pool.values_SKD] for pool in pools), strict=True)
    for theirs, ours in tensors:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not can_pack(torch.float32), reason="no packed kernels on this processor")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_run_fused_computes_layers_of_the_same_rows_together(
    model_dirs: Callable[[str], Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    span = load_span(open_model(model_dirs(family)), 1, 4)
    assert span.is_fused
    widths = list[int]()
    product = PackedLinear.forward

    def counted(self: PackedLinear, x: Tensor) -> Tensor:
        widths.append(self.out_features)
        return product(self, x)

    monkeypatch.setattr(PackedLinear, "forward", counted)
    with torch.inference_mode():
        span.run_fused(rows(span, len(POSITIONS)), decodes(), filled_pool(span))
    assert len(widths) == 3 * 4  # queries, keys and values; the output projection; gate and up; down


def test_run_fused_of_some_of_the_blocks_gives_what_transformers_does(span: Span) -> None:
    pieces, x = decodes(), rows(span, len(POSITIONS))
    pools = [filled_pool(span) for _ in range(2)]
    found = span.run(Batch(x=x, pieces=pieces, start=2, end=3), pools[0])
    with torch.inference_mode():
        expected = span.run_alone(x, pieces, pools[1])
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
    tensors = zip(*([*pool.keys_SKD, *pool.values_SKD] for pool in pools), strict=True)
    for ours, theirs in tensors:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_run_fused_gives_the_same_beyond_the_precomputed_rotations(span: Span, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, x = decodes(), rows(span, len(POSITIONS))
    with torch.inference_mode():
        expected = span.run_fused(x, pieces, filled_pool(span))
        monkeypatch.setattr(fused_decode, "_TABLE_TOKENS", max(POSITIONS))
        found = span.run_fused(x, pieces, filled_pool(span))
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def test_run_of_decodes_is_fused_and_of_prompts_is_not(span: Span, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()
    for name in ("run_fused", "run_ragged"):
        run = getattr(span, name)
        monkeypatch.setattr(span, name, lambda *args, run=run, name=name: (calls.append(name), run(*args))[1])
    prompt = SequenceRows(num_tokens=2, position=0, pages=[31], want=Want.ALL)
    for pieces in (decodes(), (*decodes(), prompt)):
        x = rows(span, sum(piece.num_tokens for piece in pieces))
        span.run(Batch(x=x, pieces=pieces, start=1, end=4), filled_pool(span))
    assert calls == ["run_fused", "run_ragged"]


def test_run_fused_gives_for_drafts_what_it_gives_for_one_token_after_another(span: Span) -> None:
    first = decodes()[2]  # the drafts begin a page
    piece = replace(first, num_tokens=4, num_drafts=3, pages=[*first.pages, 31])
    x, pools = rows(span, 5), [filled_pool(span) for _ in range(2)]
    assert is_decode(piece.num_tokens, piece.num_drafts)
    with torch.inference_mode():
        for pool in pools:  # the place of the drafts has others, which were wrong
            span.run_fused(-x[1:], [piece], pool)
        batch = Batch(x=x, pieces=(decodes()[1], piece), start=1, end=4)
        _, together = span.run(batch, pools[0])
        assert together is not None
        for row in range(4):
            one = replace(first, position=first.position + row, pages=piece.pages)
            (alone,) = span.run_fused(x[1 + row : 2 + row], [one], pools[1])
            torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-4, atol=1e-5)


def test_run_fused_row_does_not_depend_on_the_rows_beside_it(span: Span) -> None:
    if "Mixtral" in type(span._model).__name__:
        pytest.skip("experts compute their rows together")
    pieces, x = decodes(), rows(span, len(POSITIONS))
    with torch.inference_mode():
        together = span.run_fused(x, pieces, filled_pool(span))
        for row, piece in enumerate(pieces):
            (alone,) = span.run_fused(x[row : row + 1], [piece], filled_pool(span))
            assert alone is not None
            assert torch.equal(alone, together[row])


def test_run_fused_ignores_and_clears_what_a_failed_sequence_left_on_a_page(span: Span) -> None:
    pieces, x = decodes(), rows(span, len(POSITIONS))
    pools = filled_pool(span), filled_pool(span, behind=torch.nan)
    with torch.inference_mode():
        clean, spoilt = (span.run_fused(x, pieces, pool) for pool in pools)
    for own, other in zip(spoilt, clean, strict=True):
        assert torch.equal(own, other)
    assert all(tensor.isfinite().all() for tensor in (*pools[1].keys_SKD, *pools[1].values_SKD))


def test_run_fused_confines_numbers_that_are_not_finite_to_their_row(span: Span) -> None:
    pieces, x = decodes(), rows(span, len(POSITIONS))
    x[1, 3] = torch.inf
    with torch.inference_mode():
        outputs = span.run_fused(x, pieces, filled_pool(span))
    assert [bool(out.isfinite().all()) for out in outputs if out is not None] == [True, False, True, True, True]


def test_run_fused_first_and_last_blocks_take_tokens_and_give_logits(model_dirs: Callable[[str], Path]) -> None:
    span = load_span(open_model(model_dirs("llama")), 0, 6)
    wants = [Want.LAST, Want.NOTHING, Want.ALL, Want.LAST, Want.NOTHING]
    pieces = tuple(
        SequenceRows(num_tokens=1, position=piece.position, pages=piece.pages, want=want)
        for piece, want in zip(decodes(), wants, strict=True)
    )
    x = torch.arange(2, 2 + len(pieces))
    with torch.inference_mode():
        expected = span.run_ragged(x, pieces, filled_pool(span))
        found = span.run_fused(x, pieces, filled_pool(span))
    assert [out is None for out in found] == [want is Want.NOTHING for want in wants]
    for own, other in zip(found, expected, strict=True):
        if own is not None:
            assert own.shape == (1, span.vocab_size)
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[[object], Path]:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 (seconds, for few tests)

    def write(config: object) -> Path:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        return tmp_path

    return write


LEAN = {
    "with biases": Qwen2Config(**SMALL),
    "with norms of heads": Qwen3Config(**SMALL, head_dim=16),
    "scaled rotations": LlamaConfig(
        **SMALL,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 128,
        },
    ),
    "windows in some blocks": Qwen2Config(
        **SMALL,
        use_sliding_window=True,
        sliding_window=24,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
}


@pytest.mark.parametrize("name", list(LEAN))
def test_load_of_a_family_like_llama_is_fused(write_config: Callable[[object], Path], name: str) -> None:
    span = load_span(open_model(write_config(LEAN[name])), 0, 3)
    assert span.is_fused
    pieces, x = decodes(), torch.arange(len(POSITIONS))
    with torch.inference_mode():
        expected, found = (run(x, pieces, filled_pool(span)) for run in (span.run_alone, span.run_fused))
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


def test_load_is_not_fused_when_a_family_combines_the_same_parts_differently(
    write_config: Callable[[object], Path],
) -> None:
    span = load_span(open_model(write_config(GraniteConfig(**SMALL, residual_multiplier=0.5))), 0, 3)
    assert span.fused is not None
    assert span.is_ragged
    assert not span.is_fused


def test_load_is_not_fused_when_the_config_has_a_window_that_the_blocks_ignore(
    write_config: Callable[[object], Path],
) -> None:
    """Checkpoints converted from another family have such configs. The difference shows at few of many positions."""
    config = LlamaConfig(**{**SMALL, "max_position_embeddings": 8192}, sliding_window=4096)
    span = load_span(open_model(write_config(config)), 0, 3)
    assert span.fused is not None
    assert span.is_ragged
    assert not span.is_fused


def test_load_is_not_fused_when_a_family_differs_only_at_late_positions(write_config: Callable[[object], Path]) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 128}
    config = Ministral3Config(**SMALL, head_dim=8, rope_parameters={**rope, "llama_4_scaling_beta": 0.5})
    span = load_span(open_model(write_config(config)), 0, 3)
    assert span.is_ragged
    assert not span.is_fused


def test_load_without_compiled_loops_is_not_fused(
    model_dirs: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_decode, "kernels", lambda: None)
    assert not load_span(open_model(model_dirs("llama")), 1, 4).is_fused


def test_load_is_not_fused_when_a_part_is_of_another_class(
    model_dirs: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaAttention, "sliding_window", [8, 8], raising=False)
    span = load_span(open_model(model_dirs("llama")), 1, 4)
    assert span.is_ragged
    assert not span.is_fused


def test_kernels_are_none_when_a_library_that_numba_needs_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fused_decode, "_compiled_kernels", Mock(side_effect=OSError("no libllvmlite")))
    assert fused_decode.kernels.__wrapped__() is None
    assert "no libllvmlite" in caplog.text


def test_load_in_half_precision_is_not_fused(model_dirs: Callable[[str], Path]) -> None:
    assert not load_span(open_model(model_dirs("llama")), 1, 4, dtype=torch.bfloat16).is_fused
