"""Every format: what a span of such a checkpoint computes, reads, counts, and what of it is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_models import KINDS, write_quantized
from safetensors.torch import load_file, save_file
from swarm.serving.model.batch import Batch, Slice, Want
from swarm.serving.model.check import check_directory
from swarm.serving.model.files import open_model, weight_sizes
from swarm.serving.model.loading import weigh
from swarm.serving.model.span import Span, block_of_tensors, load_span
from swarm.serving.model.stored import StoredTensor
from swarm.serving.server_options import ServerOptions
from swarm_protocol.errors import ConfigError, IntegrityError

Pair = tuple[Path, Path]


@pytest.fixture(scope="session")
def pairs(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """`pairs("fp8")`: a tiny Llama in that format, and a plain one with the same values."""
    written: dict[str, Pair] = {}

    def get(kind: str) -> Pair:
        if kind not in written:
            parent = tmp_path_factory.mktemp(kind)
            written[kind] = parent / "quantized", parent / "plain"
            write_quantized(llama_dir, *written[kind], kind)
        return written[kind]

    return get


def outputs(span: Span, num_tokens: int = 20) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, span.hidden_size, generator=generator)
    if span.is_first:
        x = torch.randint(span.vocab_size, (num_tokens,), generator=generator)
    piece = Slice(num_tokens=num_tokens, position=0, pages=[0, 1], want=Want.ALL)
    (output,) = span.run(Batch(x=x, slices=(piece,), start=span.start, end=span.end), span.new_pool(2))
    assert output is not None
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_span_computes_with_the_values_that_codes_and_scales_stand_for(
    pairs: Callable[[str], Pair], kind: str, dtype: torch.dtype
) -> None:
    quantized, plain = map(open_model, pairs(kind))
    for start, end in [(0, 2), (2, 5), (5, 6)]:
        found, expected = (outputs(load_span(files, start, end, dtype=dtype)) for files in (quantized, plain))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
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
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4"])
def test_weigh_counts_a_quantized_checkpoint_as_what_is_made_of_it(
    pairs: Callable[[str], Pair], kind: str, dtype: Any
) -> None:
    quantized, plain = map(open_model, pairs(kind))
    assert weight_sizes(quantized) == weight_sizes(plain)
    options = ServerOptions(dtype=dtype)
    assert weigh(quantized, options) == weigh(plain, options)


@pytest.mark.parametrize("kind", KINDS)
def test_revision_changes_with_a_scale_and_with_how_the_config_says_to_read_it(
    llama_dir: Path, tmp_path: Path, kind: str
) -> None:
    directory = tmp_path / "quantized"
    write_quantized(llama_dir, directory, tmp_path / "plain", kind)
    revisions = {open_model(directory).revision(), open_model(tmp_path / "plain").revision()}
    change(directory, lambda name, value: value * 2 if "scale" in name or "absmax" in name else value)
    revisions.add(open_model(directory).revision())
    configure(directory, more_of_it=1)
    revisions.add(open_model(directory).revision())
    assert len(revisions) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_load_without_one_of_the_parts_names_weight_and_part(llama_dir: Path, tmp_path: Path, kind: str) -> None:
    directory = tmp_path / "quantized"
    write_quantized(llama_dir, directory, tmp_path / "plain", kind)
    files = open_model(directory)
    assert files.format is not None
    weight = "model.layers.2.mlp.up_proj.weight"
    for ending in files.format.needed:
        parts = {key: dict(part) for key, part in files.parts.items()}
        del parts[weight][ending]
        lacking = type(files)(
            directory=directory, config=files.config, shards=files.shards, format=files.format, parts=parts
        )
        with pytest.raises(IntegrityError, match=rf"weight {weight} .*(lacks its part|no scale)"):
            load_span(lacking, 2, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_load_of_parts_that_do_not_belong_together_is_refused(llama_dir: Path, tmp_path: Path, kind: str) -> None:
    """Each part is of no values, of too few, or of another kind of number."""
    directory = tmp_path / "quantized"
    write_quantized(llama_dir, directory, tmp_path / "plain", kind)
    files = open_model(directory)
    assert files.format is not None
    weight = "model.layers.2.self_attn.q_proj.weight"
    for ending in files.format.needed:
        name = files.parts[weight][ending]
        for spoil in (lambda x: x.flatten()[:0], lambda x: x.flatten()[:1].repeat(3), lambda x: x.to(torch.int64)):
            original = load_file(files.shards[name])
            save_file(original | {name: spoil(original[name])}, files.shards[name], metadata={"format": "pt"})
            with pytest.raises(IntegrityError, match=rf"{weight} cannot be read: .+"):
                load_span(open_model(directory), 2, 3)
            save_file(original, files.shards[name], metadata={"format": "pt"})
    load_span(open_model(directory), 2, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("fp8", "is not usable"),
        ([1], "is not usable"),
        ({}, "quant_method None is not supported; supported: .*fp8"),
        ({"quant_method": "x" * 1000}, "quant_method 'x{39} is not supported"),
        ({"quant_method": ["fp8"]}, "quant_method .* is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "this fp8 checkpoint cannot be .*weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size is no pair"),
        ({"quant_method": "fp8", "weight_block_size": [2**40, 1]}, "not a whole number in"),
    ],
)
def test_config_of_a_format_that_is_none_is_refused_before_weights_are_asked_for(
    llama_dir: Path, tmp_path: Path, settings: Any, message: str
) -> None:
    config = json.loads((llama_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(ConfigError, match=message) as refused:
        check_directory(tmp_path)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


def test_codes_without_a_word_in_the_config_are_refused(pairs: Callable[[str], Pair], tmp_path: Path) -> None:
    """Read as numbers they would be another model."""
    quantized = pairs("fp8")[0]
    config = json.loads((quantized / "config.json").read_text())
    del config["quantization_config"]
    for path in quantized.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(IntegrityError, match="float8_e4m3fn, and there is no scale or config"):
        load_span(open_model(tmp_path), 2, 3)


def change(directory: Path, how: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    for shard in directory.glob("*.safetensors"):
        changed = {name: how(name, value) for name, value in load_file(shard).items()}
        save_file(changed, shard, metadata={"format": "pt"})


def configure(directory: Path, **settings: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= settings
    path.write_text(json.dumps(config))
