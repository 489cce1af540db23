"""Checks, from the files' headers alone, that a model's directory has all weights of its config in the right shapes.

If a checkpoint is quantized, or has other names than transformers' model, only missing blocks are found; missing
weights within a block are found when it is loaded. No weights are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from swarm_protocol.errors import IntegrityError, first_few, printable_line

from swarm.serving.model.model_files import ModelFiles
from swarm.serving.model.safetensors_reader import read_header
from swarm.serving.model.weights import block_of_tensors, quiet_transformers

MAX_NAMED = 3
"""Tensors that a message names. It counts the others."""
MAX_NAME_CHARS = 160

Shape = tuple[int, ...]


def check_weights(files: ModelFiles) -> None:
    """Raises IntegrityError for missing tensors, and for tensors of another shape than the config says. It names them,
    and their file if it is known. Files that a download of one span left out do not count as missing."""
    by_file: dict[Path, list[str]] = {}
    shapes: dict[str, Shape] = {}
    for name, path in files.shards.items():
        by_file.setdefault(path, []).append(name)
    for path in sorted(filter(Path.is_file, by_file)):
        there = read_header(path)
        if lacking := [name for name in by_file[path] if name not in there]:
            raise IntegrityError(f"{path} lacks {_named(lacking)}", remedy="download it again")
        shapes |= {name: there[name].shape for name in by_file[path]}
    with quiet_transformers():
        lacking, wrong = _differences(files, shapes)
        lacking = lacking or _absent_blocks(files)
    if lacking:
        raise IntegrityError(f"{files.directory} lacks {_named(lacking)}", remedy="download the model again")
    if wrong:
        raise IntegrityError(
            f"{files.directory} has tensors of another shape than its config says: {_named(wrong)}",
            remedy="download the model again, with its config.json",
        )


def _differences(files: ModelFiles, shapes: Mapping[str, Shape]) -> tuple[list[str], list[str]]:
    """Return the model's tensors that no file has, and those of another shape than the config says, with both shapes.
    Both lists are empty if the checkpoint's names are not the model's."""
    model = files.whole_model
    prefix, tied = f"{model.base_model_prefix}.", getattr(model, "all_tied_weights_keys", None) or {}
    weights = model.state_dict()
    known = {name.removeprefix(prefix): name for name in weights}
    found = {name.removeprefix(prefix) for name in files.shards}
    if files.format is not None or not found <= known.keys():
        return [], []
    absent = [name for short, name in known.items() if short not in found and name not in tied]
    wanted = {name: tuple(weights[known[name.removeprefix(prefix)]].shape) for name in shapes}
    wrong = [
        f"{name} is {_written(shape)} in place of {_written(wanted[name])}"
        for name, shape in sorted(shapes.items())
        if shape != wanted[name]
    ]
    return absent, wrong


def _written(shape: Shape) -> str:
    return " x ".join(map(str, shape)) or "one number"


def _absent_blocks(files: ModelFiles) -> list[str]:
    found = set(block_of_tensors(files).values())
    return [f"block {block}" for block in range(files.num_blocks) if block not in found]


def _named(names: list[str]) -> str:
    return first_few(names, MAX_NAMED, lambda name: printable_line(name)[:MAX_NAME_CHARS])
