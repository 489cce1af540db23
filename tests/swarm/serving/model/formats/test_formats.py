"""Every checkpoint format: what a span computes, reads and counts, and which files are refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.quantized_models import KINDS, write_quantized
from support.tiny_models import write_model
from swarm.serving.model.batch import Batch, SequenceRows, Want
from swarm.serving.model.family_check import check_directory
from swarm.serving.model.model_files import ModelFiles, open_model, weight_sizes
from swarm.serving.model.safetensors_reader import StoredTensor
from swarm.serving.model.span import Span
from swarm.serving.model.span_loading import load_span
from swarm.serving.model.weights import block_of_tensors
from swarm.serving.server.capability import weigh
from swarm.serving.server.deployment import ServerOptions
from swarm_protocol.errors import ConfigError, IntegrityError
from transformers import GptOssConfig

Pair = tuple[Path, Path]


@pytest.fixture(scope="session")
def gpt_oss_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = GptOssConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=4, max_position_embeddings=256, sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return write_model(tmp_path_factory.mktemp("gpt-oss"), config)


@pytest.fixture(scope="session")
def pairs(llama_dir: Path, gpt_oss_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """`pairs("fp8")` returns a tiny model in that format, and a plain one with the same values."""
    written: dict[str, Pair] = {}

    def get(kind: str) -> Pair:
        if kind not in written:
            parent = tmp_path_factory.mktemp(kind)
            written[kind] = parent / "quantized", parent / "plain"
            write_quantized(gpt_oss_dir if kind == "mxfp4" else llama_dir, *written[kind], kind)
        return written[kind]

    return get


def outputs(span: Span, num_tokens: int = 20) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, span.hidden_size, generator=generator)
    if span.is_first:
        x = torch.randint(span.vocab_size, (num_tokens,), generator=generator)
    piece = SequenceRows(num_tokens=num_tokens, position=0, pages=[0, 1], want=Want.ALL)
    (output,) = span.run(Batch(x=x, pieces=(piece,), start=span.start, end=span.end), span.new_pool(2))
    assert output is not None
    return output


@pytest.mark.parametrize(("start", "end", "dtype"), [(0, 1, torch.float32), (5, 6, torch.bfloat16)])
@pytest.mark.parametrize("kind", KINDS)
def test_span_computes_with_the_values_that_codes_and_scales_stand_for(
    pairs: Callable[[str], Pair], kind: str, start: int, end: int, dtype: torch.dtype
) -> None:
    quantized, plain = map(open_model, pairs(kind))
    found, expected = (outputs(load_span(files, start, end, dtype=dtype)) for files in (quantized, plain))
    assert torch.equal(found, expected)


def test_experts_are_dequantized_one_by_one_before_transformers_merges_them(
    model_dirs: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = replace(KINDS["fp8"], name=r"experts\.\d+\.w\d\.weight$")
    monkeypatch.setitem(KINDS, "experts", experts)
    directories = tmp_path / "quantized", tmp_path / "plain"
    write_quantized(model_dirs("mixtral"), *directories, "experts")
    assert torch.equal(*(outputs(load_span(open_model(one), 1, 2)) for one in directories))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mxfp4"])  # experts are not linear layers
def test_span_of_a_quantized_checkpoint_is_made_smaller_as_a_plain_one(pairs: Callable[[str], Pair], kind: str) -> None:
    spans = [load_span(open_model(one), 2, 3, dtype=torch.bfloat16, bits="int8") for one in pairs(kind)]
    assert torch.equal(*map(outputs, spans))


@pytest.mark.parametrize("kind", KINDS)
def test_load_reads_only_the_parts_of_its_own_blocks(
    pairs: Callable[[str], Pair], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = open_model(pairs(kind)[0])
    read: list[str] = []
    really_read = StoredTensor.__getitem__

    def reading(tensor: StoredTensor, everything: Any) -> torch.Tensor:
        read.append(tensor.name)
        return really_read(tensor, everything)

    monkeypatch.setattr(StoredTensor, "__getitem__", reading)
    load_span(files, 2, 4)
    own = [name for name, block in block_of_tensors(files).items() if block in {2, 3}]
    assert set(read) == {part for name in own for part in files.parts[name].values()}


@pytest.mark.parametrize("kind", KINDS)
def test_weigh_counts_a_quantized_checkpoint_as_it_is_after_loading(pairs: Callable[[str], Pair], kind: str) -> None:
    quantized, plain = map(open_model, pairs(kind))
    assert weight_sizes(quantized) == weight_sizes(plain)
    for dtype in ("bfloat16", "int4"):
        options = ServerOptions(dtype=dtype)
        assert weigh(quantized, options) == weigh(plain, options)


@pytest.mark.parametrize("kind", KINDS)
def test_revision_changes_with_a_scale_and_with_the_config_of_the_format(
    pairs: Callable[[str], Pair], tmp_path: Path, kind: str
) -> None:
    directory = copied(pairs(kind), tmp_path)
    revisions = {open_model(one).revision() for one in (directory, pairs(kind)[1])}
    change(directory, lambda name, value: value + 1 if re.search("scale|absmax|SCB", name) else value)
    revisions.add(open_model(directory).revision())
    configure(directory, more_of_it=1)
    revisions.add(open_model(directory).revision())
    assert len(revisions) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_load_without_one_of_the_parts_names_the_weight(pairs: Callable[[str], Pair], kind: str) -> None:
    files = open_model(pairs(kind)[0])
    assert files.format is not None
    weight = a_weight(files)
    for ending in files.format.needed:
        parts = {key: dict(part) for key, part in files.parts.items()}
        del parts[weight][ending]
        lacking = replace(files, parts=parts)
        with pytest.raises(IntegrityError, match=rf"weight {weight} .*(lacks its part|no scale)"):
            load_span(lacking, 2, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_load_of_parts_that_do_not_belong_together_is_refused(
    pairs: Callable[[str], Pair], tmp_path: Path, kind: str
) -> None:
    """A part has too few values, or another kind of number."""
    directory = copied(pairs(kind), tmp_path)
    files = open_model(directory)
    assert files.format is not None
    weight = a_weight(files)
    for ending in files.format.needed:
        name = files.parts[weight][ending]
        for spoil in (lambda x: x.flatten()[:1].repeat(3), lambda x: x.to(torch.int64)):
            original = load_file(files.shards[name])
            save_file(original | {name: spoil(original[name])}, files.shards[name], metadata={"format": "pt"})
            with pytest.raises(IntegrityError, match=rf"{weight} cannot be read: .+"):
                load_span(open_model(directory), 2, 3)
            save_file(original, files.shards[name], metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("fp8", "is not usable"),
        ([1], "is not usable"),
        ({}, "quant_method None is not supported; supported: .*fp8"),
        ({"quant_method": "x" * 1000}, "quant_method 'x{39} is not supported"),
        ({"quant_method": ["fp8"]}, "quant_method .* is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "this fp8 checkpoint cannot be .*weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size is not a pair"),
        ({"quant_method": "fp8", "weight_block_size": [2**40, 1]}, "not a whole number in"),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3, not 2, 4 or 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "128"}, "group_size is '128'"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format is none of"),
        ({"quant_method": "gptq", "bits": [4]}, r"bits is \[4\]"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version is none of gemm"),
        ({"quant_method": "awq", "bits": 8}, "bits is not 4"),
        ({"quant_method": "awq", "group_size": -2}, "group_size is -2"),
        ({"quant_method": "bitsandbytes"}, "neither load_in_8bit nor load_in_4bit"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bnb_4bit_quant_type is none of fp4, nf4"),
    ],
)
def test_config_of_an_unknown_format_is_refused_before_weights_are_read(
    llama_dir: Path, tmp_path: Path, settings: Any, message: str
) -> None:
    config = json.loads((llama_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(ConfigError, match=message) as refused:
        check_directory(tmp_path)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


def test_quantized_weights_are_refused_when_the_config_does_not_name_the_format(
    pairs: Callable[[str], Pair], tmp_path: Path
) -> None:
    """Read as plain numbers they would make another model."""
    quantized = pairs("fp8")[0]
    config = json.loads((quantized / "config.json").read_text())
    del config["quantization_config"]
    for path in quantized.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(IntegrityError, match="float8_e4m3fn, and no scale or config"):
        load_span(open_model(tmp_path), 2, 3)


def copied(pair: Pair, tmp_path: Path) -> Path:
    return shutil.copytree(pair[0], tmp_path / "changed")


def a_weight(files: ModelFiles) -> str:
    """Return a weight of block 2 that has parts."""
    return next(name for name, parts in sorted(files.parts.items()) if ".2." in name and len(parts) > 1)


def change(directory: Path, how: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    for shard in directory.glob("*.safetensors"):
        changed = {name: how(name, value) for name, value in load_file(shard).items()}
        save_file(changed, shard, metadata={"format": "pt"})


def configure(directory: Path, **settings: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= settings
    path.write_text(json.dumps(config))
