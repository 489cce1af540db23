from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import likeliest_tokens
from swarm.serving.model import model_cut
from swarm.serving.model.attention import cache_argument
from swarm.serving.model.batch import Batch, SequenceRows, Want
from swarm.serving.model.kv_pool import KVPool
from swarm.serving.model.model_files import open_model
from swarm.serving.model.safetensors_reader import StoredTensor
from swarm.serving.model.span import Span, threads
from swarm.serving.model.span_loading import load_span
from swarm.serving.model.weights import block_of_tensors
from swarm_protocol.errors import ConfigError, IntegrityError
from torch import Tensor
from transformers import AutoModelForCausalLM, BertConfig, BloomConfig, OPTConfig, PreTrainedModel

NUM_BLOCKS = 6
FAMILIES = ["llama", "llama-tied", "qwen3", "mistral", "mixtral", "gpt2"]
PROMPT = list(range(40, 65))
NUM_TOKENS = 12


NUM_PAGES = 3
ROOM = list(range(NUM_PAGES))


def run(span: Span, pool: KVPool, x: torch.Tensor, position: int = 0, want: Want = Want.ALL) -> torch.Tensor | None:
    """Run one sequence's rows alone in a batch."""
    piece = SequenceRows(num_tokens=len(x), position=position, pages=ROOM, want=want)
    (output,) = span.run(Batch(x=x, pieces=(piece,), start=span.start, end=span.end), pool)
    return output


def run_chain(spans: Sequence[Span], pools: Sequence[KVPool], tokens: Sequence[int], position: int) -> torch.Tensor:
    x: torch.Tensor | None = torch.tensor(tokens)
    for span, pool in zip(spans, pools, strict=True):
        assert x is not None
        x = run(span, pool, x, position, Want.LAST if span.end == span.num_blocks else Want.ALL)
    assert x is not None
    return x[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_spans_with_chunked_prefill_give_the_tokens_of_local_generate(
    model_dirs: Callable[[str], Path], family: str
) -> None:
    """`test_span_loading` has batches that are split otherwise."""
    directory = model_dirs(family)
    files = open_model(directory)
    spans = [load_span(files, start, end) for start, end in itertools.pairwise((0, 1, 4, 6))]
    pools = [span.new_pool(NUM_PAGES) for span in spans]
    for at in range(0, len(PROMPT), 7):
        logits = run_chain(spans, pools, PROMPT[at : at + 7], at)
    tokens = []
    for index in range(NUM_TOKENS):
        tokens.append(int(logits.argmax()))
        logits = run_chain(spans, pools, tokens[-1:], len(PROMPT) + index)
    assert tokens == likeliest_tokens(directory, PROMPT, tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_load_middle_span_reads_only_its_own_tensors(
    model_dirs: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    files = open_model(model_dirs(family))
    read: list[str] = []
    really_read = StoredTensor.__getitem__

    def reading(tensor: StoredTensor, everything: Any) -> torch.Tensor:
        read.append(tensor.name)
        return really_read(tensor, everything)

    monkeypatch.setattr(StoredTensor, "__getitem__", reading)
    span = load_span(files, 2, 4)
    of_block = block_of_tensors(files)
    assert sorted(read) == sorted(name for name, block in of_block.items() if block in {2, 3})
    assert not span.is_first


def test_load_middle_span_leaves_out_modules_around_the_blocks(
    tmp_path: Path, write_config: Callable[[Path, Any], Path]
) -> None:
    shape = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = BertConfig(**shape, num_hidden_layers=6, is_decoder=True)
    files = open_model(write_config(tmp_path / "model", config))
    spans = [load_span(files, start, end) for start, end in ((0, 2), (2, 4), (4, 6))]
    held = [{name.split(".")[1] for name, _ in span._model.named_parameters()} for span in spans]
    assert held == [
        {"embeddings", "encoder"},
        {"encoder"},
        {"embeddings", "encoder", "predictions"},
    ]  # its ends are tied


def test_load_last_span_of_tied_model_reads_the_embedding_for_its_head(model_dirs: Callable[[str], Path]) -> None:
    directory = model_dirs("llama-tied")
    span = load_span(open_model(directory), 4, 6)
    whole = AutoModelForCausalLM.from_pretrained(directory)
    assert torch.equal(span._model.lm_head.weight, whole.model.embed_tokens.weight)


def test_load_leaves_nothing_on_the_meta_device(model_dirs: Callable[[str], Path]) -> None:
    for family in FAMILIES:
        span = load_span(open_model(model_dirs(family)), 2, 4)
        tensors = [*span._model.parameters(), *span._model.buffers()]
        assert tensors
        assert not any(tensor.is_meta for tensor in tensors)


def test_load_bfloat16_holds_half_the_bytes(llama_dir: Path) -> None:
    files = open_model(llama_dir)
    full, half = load_span(files, 0, 2), load_span(files, 0, 2, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    sizes = [sum(p.nbytes for p in span._model.parameters()) for span in (full, half)]
    assert sizes[0] == 2 * sizes[1]
    hidden = run(half, half.new_pool(NUM_PAGES), torch.tensor([1, 2, 3]))
    assert hidden is not None
    assert torch.isfinite(hidden).all()


def test_run_part_of_a_span_equals_that_part_loaded_alone_and_leaves_the_span_as_it_was(llama_dir: Path) -> None:
    files = open_model(llama_dir)
    whole, alone = load_span(files, 0, 6), load_span(files, 2, 5)
    tokens, hidden = torch.tensor(PROMPT), torch.randn(5, 32)
    before = run(whole, whole.new_pool(NUM_PAGES), tokens)
    piece = SequenceRows(num_tokens=5, position=0, pages=ROOM, want=Want.ALL)
    (part,) = whole.run(Batch(x=hidden, pieces=(piece,), start=2, end=5), whole.new_pool(NUM_PAGES))
    expected = run(alone, alone.new_pool(NUM_PAGES), hidden)
    after = run(whole, whole.new_pool(NUM_PAGES), tokens)
    assert part is not None
    assert before is not None
    assert torch.equal(part, expected)  # type: ignore[arg-type]
    assert torch.equal(before, after)  # type: ignore[arg-type]


def test_run_fills_the_cache_when_no_output_is_wanted(llama_dir: Path) -> None:
    span = load_span(open_model(llama_dir), 4, 6)
    pools = [span.new_pool(NUM_PAGES) for _ in range(2)]
    x = torch.randn(4, 32)
    assert run(span, pools[0], x[:3], want=Want.NOTHING) is None
    continued, at_once = run(span, pools[0], x[3:], 3), run(span, pools[1], x)
    assert at_once is not None
    torch.testing.assert_close(continued, at_once[3:])


@pytest.mark.parametrize("span", [(-1, 2), (3, 3), (4, 2), (0, 7)])
def test_load_span_outside_the_model_is_refused(llama_dir: Path, span: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="not within this model's 0:6"):
        load_span(open_model(llama_dir), *span)


@pytest.mark.parametrize(
    "config",
    [
        OPTConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, ffn_dim=64, num_attention_heads=4),
        BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
    ],
    ids=["opt", "bloom"],
)
def test_load_family_whose_ends_cannot_be_told_apart_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Any
) -> None:
    """These families would have such ends if their layout were not known."""
    monkeypatch.setattr(model_cut, "_BEFORE_BLOCKS", {})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="where it cannot be split"):
        load_span(open_model(tmp_path), 0, 1)


@pytest.fixture
def copied(llama_dir: Path, tmp_path: Path) -> Path:
    shutil.copytree(llama_dir, tmp_path / "model")
    return tmp_path / "model"


def shard_of(directory: Path, tensor: str) -> Path:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return directory / str(index["weight_map"][tensor])


TENSOR = "model.layers.3.mlp.up_proj.weight"


def test_load_truncated_shard_names_the_file(copied: Path) -> None:
    shard = shard_of(copied, TENSOR)
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(IntegrityError, match=shard.name):
        load_span(open_model(copied), 3, 4)


def test_load_shard_of_garbage_names_the_file(copied: Path) -> None:
    shard = shard_of(copied, TENSOR)
    shard.write_bytes(b"\xff" * 64)
    with pytest.raises(IntegrityError, match=shard.name):
        load_span(open_model(copied), 3, 4)


def test_load_tensor_missing_in_its_shard_names_both(copied: Path) -> None:
    shard = shard_of(copied, TENSOR)
    tensors = load_file(shard)
    del tensors[TENSOR]
    save_file(tensors, shard)
    with pytest.raises(IntegrityError, match=rf"{shard.name} lacks the tensor {TENSOR}"):
        load_span(open_model(copied), 3, 4)


def test_load_tensor_missing_everywhere_is_named(copied: Path) -> None:
    path = copied / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"][TENSOR]
    path.write_text(json.dumps(index))
    with pytest.raises(IntegrityError, match=r"model\.layers\.3\.mlp\.up_proj\.weight"):
        load_span(open_model(copied), 3, 4)
    load_span(open_model(copied), 0, 3)  # a span that does not need the tensor loads


def test_load_tensor_of_wrong_shape_is_refused(copied: Path) -> None:
    shard = shard_of(copied, TENSOR)
    tensors = load_file(shard)
    tensors[TENSOR] = torch.zeros(5, 5)
    save_file(tensors, shard)
    with pytest.raises(IntegrityError, match=r"model\.layers\.3\.mlp\.up_proj"):
        load_span(open_model(copied), 3, 4)


@pytest.mark.parametrize(("number", "dtype"), [(torch.nan, torch.float32), (1e6, torch.float16)])
def test_load_weights_that_are_not_finite_are_named(copied: Path, number: float, dtype: torch.dtype) -> None:
    shard = shard_of(copied, TENSOR)
    tensors = load_file(shard)
    tensors[TENSOR][3, 5] = number
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(IntegrityError, match=rf"{shard.name}: {TENSOR} has numbers that are not finite"):
        load_span(open_model(copied), 2, 4, dtype=dtype)
    load_span(open_model(copied), 0, 3, dtype=dtype)


def test_load_spans_at_once_leaves_transformers_as_it_was(model_dirs: Callable[[str], Path]) -> None:
    files, tie_weights = open_model(model_dirs("llama-tied")), PreTrainedModel.tie_weights
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda start: load_span(files, start % NUM_BLOCKS, start % NUM_BLOCKS + 1), range(24)))
    assert PreTrainedModel.tie_weights is tie_weights


def test_run_uses_the_number_of_threads_found_for_steps_of_its_kind(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        span = load_span(open_model(llama_dir), 2, 4)
        span.step_threads = {1: 1, 16: 3}
        seen = []
        for name in ("run_fused", "run_ragged"):
            run = getattr(span, name)
            monkeypatch.setattr(
                span, name, lambda *args, run=run: (seen.append(torch.get_num_threads()), run(*args))[1]
            )
        for num_rows in (1, 7, 8, 32, 33):
            x = torch.zeros(num_rows, span.hidden_size)
            piece = SequenceRows(num_tokens=num_rows, position=0, pages=range(8), want=Want.NOTHING)
            span.run(Batch(x=x, pieces=(piece,), start=2, end=4), span.new_pool(8))
            assert torch.get_num_threads() == 2
        assert seen == [1, 1, 3, 3, 2]
    finally:
        torch.set_num_threads(before)


def test_number_of_threads_is_restored_after_a_failure() -> None:
    usual = torch.get_num_threads()

    def fail() -> None:
        with threads(usual + 1, usual):
            assert torch.get_num_threads() == usual + 1
            raise ValueError("why not")

    with pytest.raises(ValueError, match="why not"):
        fail()
    assert torch.get_num_threads() == usual


def test_cache_is_given_by_the_name_that_the_version_of_transformers_has() -> None:
    class Former(torch.nn.Module):
        def forward(self, input_ids: Tensor, past_key_values: object = None) -> None:
            del past_key_values

    class Renamed(torch.nn.Module):
        def forward(self, input_ids: Tensor, cache: object = None) -> None: ...

    assert [cache_argument(each) for each in (Former(), Renamed())] == ["past_key_values", "cache"]
