"""A Hugging Face model directory: its config, the files of its tensors, its revision, its small files, and the signed
manifest of a published model.

`weights` reads the tensors through `ModelFiles.shards`. Immutable values.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError, IntegrityError, one_line, printable_line, reason_of
from swarm_protocol.manifest_messages import PublishedManifest, SignedManifest, readable_manifest

from swarm.serving.model.formats import format_of
from swarm.serving.model.formats.format import CheckpointFormat, group, num_values
from swarm.serving.model.safetensors_reader import read_header
from swarm.serving.model.shape import INDEX, MANIFEST_FILE, SMALL_FILES, check_counts, context_tokens
from swarm.serving.sampling.sampling import checked_end_ids, checked_options, written_options
from swarm.threads import BUILDING
from swarm.whole_files import write_whole

CONFIG = "config.json"
GENERATION = "generation_config.json"
SINGLE = "model.safetensors"
DOWNLOAD = "download.json"
"""Written by `hub_download`, which may load only some shards: the commit, and the number of values of every tensor."""

SIZES = {
    "num_hidden_layers": limits.MAX_BLOCKS,
    "hidden_size": limits.MAX_COLUMNS,
    "vocab_size": limits.MAX_COLUMNS,
}
"""The sizes in every language model's config, with their limits: a row must fit into a message."""

_SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}

MAX_CONFIG_BYTES = 4 * 2**20
"""Maximum size of a config. One with a thousand labels has 100 kB."""

_PAGE_BYTES = 4096
_PAGES_PER_FILE = 4096  # at most 16 MiB are read from each file, so that a start does not read the whole model


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """`shards` maps each tensor's name in the checkpoint to its file.

    `parts` has for each weight the tensors from which it is made, by their endings (see `formats`). A weight that is
    not quantized is its own part, "". `format` is None if no weight is quantized. `manifest` is the signed manifest of
    a published model, else None. `manifest.verification` checks the files against it.
    """

    directory: Path
    config: Any
    shards: Mapping[str, Path]
    format: CheckpointFormat | None
    parts: Mapping[str, Mapping[str, str]]
    manifest: PublishedManifest | None = None

    @property
    def num_blocks(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @cached_property
    def whole_model(self) -> Any:
        """transformers' model of all blocks on the meta device, for its names and shapes. Built once.

        Raises ConfigError as `causal_lm_class` does.
        """
        model_class = causal_lm_class(self.config)
        with BUILDING, torch.device("meta"):
            return model_class(copy.deepcopy(self.config))

    @property
    def context_tokens(self) -> int:
        """The longest sequence of the model, at most the network's limit."""
        return context_tokens(self.config)

    def revision(self, dtype: str = "float32") -> str:
        """Return a hex digest of the checkpoint and `dtype`, so that routes never mix weights.

        It covers both configs, also the default sampling options, and evenly spaced pages of every weight file, which
        is all of a file up to 16 MiB. So another training step or fine-tune changes it, but a few flipped bytes may
        not. For a download it depends on the commit, since servers have different shards; for a published model on its
        manifest, which covers every byte.
        """
        if self.manifest is not None:
            return self.manifest.revision(dtype)
        if (download := _read_download(self.directory)) is not None:
            return hub_revision(download["commit"], dtype)
        digest = hashlib.blake2b(dtype.encode(), digest_size=16)
        configs = [path for name in (CONFIG, GENERATION) if (path := self.directory / name).is_file()]
        for path in [*configs, *sorted(set(self.shards.values()))]:
            num_bytes = path.stat().st_size
            digest.update(f"{path.name}\0{num_bytes}\0".encode())
            num_pages = -(-num_bytes // _PAGE_BYTES)
            stride = max(1, -(-num_pages // _PAGES_PER_FILE)) * _PAGE_BYTES
            with path.open("rb") as file:
                for offset in range(0, num_bytes, stride):
                    file.seek(offset)
                    digest.update(file.read(_PAGE_BYTES))
        return digest.hexdigest()

    @property
    def source(self) -> str:
        """The commit on a hub from which the files came, OWNER/NAME@COMMIT; empty for other directories."""
        download = _read_download(self.directory)
        return f"{download['model_id']}@{download['commit']}" if download else ""

    def small_files(self) -> dict[str, bytes]:
        """Read the existing files of SMALL_FILES.

        Raises ConfigError for one that is too large, IntegrityError for a JSON file that is none, and for end tokens
        or default sampling options that no request could have: with half a tokenizer, or these, every request would
        fail at the client.
        """
        found = {name: self.directory / name for name in SMALL_FILES if (self.directory / name).is_file()}
        for name, path in found.items():
            if path.stat().st_size > limits.MAX_MODEL_FILE_BYTES:
                raise ConfigError(
                    f"{path} is larger than {limits.MAX_MODEL_FILE_BYTES} bytes, and cannot be sent to clients",
                    remedy=f"check that {name} is the file you meant",
                )
        return {name: _read_small(path) for name, path in found.items()}


def _read_small(path: Path) -> bytes:
    content = path.read_bytes()
    if path.suffix == ".json":
        try:
            value = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise IntegrityError(f"{path} is damaged: {one_line(error)}", remedy="download it again") from error
        if path.name == GENERATION:
            _check_options(path.parent, value)
    return content


def _check_options(directory: Path, generation: Any) -> None:
    try:
        checked_options(written_options(generation))
        checked_end_ids(generation.get("eos_token_id"), f"{GENERATION}: eos_token_id")
    except (ValueError, TypeError) as error:
        raise IntegrityError(
            f"clients refuse the model in {directory}: {one_line(error)}", remedy="correct that file"
        ) from error


def hub_revision(commit: str, dtype: str) -> str:
    """Return `ModelFiles.revision` of a commit of a model on a hub that is not published."""
    return hashlib.blake2b(f"hub\0{commit}\0{dtype}".encode(), digest_size=16).hexdigest()


def open_model(directory: Path, published: PublishedManifest | None = None) -> ModelFiles:
    """Read the config and the tensor index of `directory`, but no weights. The manifest is `published`, or the one in
    the directory.

    Raises ConfigError if it is not a usable model directory, IntegrityError if a file in it is damaged.
    """
    config = read_config(directory)
    shards, format_ = _find_shards(directory), format_of(config)
    return ModelFiles(
        directory=directory,
        config=config,
        shards=shards,
        format=format_,
        parts=group(shards, format_),
        manifest=published or manifest_beside(directory),
    )


def read_config(directory: Path) -> Any:
    """Return transformers' config of the model in `directory`. Raises ConfigError if there is none, or it is
    unusable."""
    if not (directory / CONFIG).is_file():
        raise ConfigError(
            f"{directory} holds no {CONFIG}",
            remedy="name a directory written by save_pretrained or downloaded from a hub",
        )
    from transformers import AutoConfig  # noqa: PLC0415 (over half a second)

    try:
        _check_settings(directory / CONFIG)
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # each family checks its own settings, and may raise anything
        raise ConfigError(
            f"{directory}/{CONFIG} is not usable: {one_line(error)}",
            remedy="restore the file that came with the model, or serve another one; a newer model may need "
            "a newer transformers",
        ) from error
    check_is_model(config)
    return config


def _check_settings(path: Path) -> None:
    """Raises ValueError for a config that transformers would take too long to read, or whose model it does not know."""
    from transformers import CONFIG_MAPPING, __version__  # noqa: PLC0415

    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError(f"it is larger than {MAX_CONFIG_BYTES} bytes")
    settings = json.loads(path.read_text("utf-8"))
    if not isinstance(settings, dict):
        raise ValueError("it is not an object")  # noqa: TRY004
    check_counts(settings)
    family = settings.get("model_type")
    if isinstance(family, str) and family not in CONFIG_MAPPING:
        raise ValueError(f"transformers {__version__} does not know models of type {family!r:.40}")


def check_is_model(config: Any) -> None:
    """Raises ConfigError for a config without the sizes of a language model (such as one that combines several models),
    and for sizes that the network cannot serve."""
    for name, most in SIZES.items():
        try:
            size = getattr(config, name, None)
        except Exception:  # a family's own code may raise anything for a size that it lacks
            size = None
        if type(size) is not int:
            raise ConfigError(
                f"{config.model_type} is not a language model with transformer blocks",
                remedy="serve a causal language model",
            )
        if size < 1:
            raise ConfigError(f"{name} is {size}", remedy="restore the config.json that came with the model")
        if size > most:
            raise ConfigError(
                f"{name} is {size}, more than {most}, the largest that can be served",
                remedy="serve another model",
            )


def causal_lm_class(config: Any) -> Any:
    """Return the transformers class for `config`. Raises ConfigError unless it is a decoder-only model that can be
    split into blocks."""
    name = str(config.model_type)
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING  # noqa: PLC0415 (over half a second)

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder:
        raise ConfigError(f"{name} is not a decoder-only language model", remedy="serve a causal language model")
    layer_types = set(getattr(config, "layer_types", None) or ())
    if not layer_types <= _SUPPORTED_LAYER_TYPES or getattr(config, "num_kv_shared_layers", None):
        raise ConfigError(f"{name} has blocks that share state and cannot be split", remedy="serve another family")
    format_of(config)
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def _find_shards(directory: Path) -> dict[str, Path]:
    if (directory / INDEX).is_file():
        return _read_index(directory)
    single = directory / SINGLE
    if (download := _read_download(directory)) is not None:
        return dict.fromkeys(download["tensors"], single)
    if not single.is_file():
        raise ConfigError(
            f"{directory} holds neither {SINGLE} nor {INDEX}",
            remedy="only safetensors checkpoints are served; convert with save_pretrained",
        )
    return dict.fromkeys(read_header(single), single)


def _read_index(directory: Path) -> dict[str, Path]:
    path = directory / INDEX
    try:
        weight_map = json.loads(path.read_text("utf-8"))["weight_map"]
        shards = {str(name): directory / str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise IntegrityError(f"{path} is damaged: {one_line(error)}", remedy="download it again") from error
    is_partial = (directory / DOWNLOAD).is_file()
    for shard in sorted(set(shards.values())):
        if shard.parent != directory or not (is_partial or shard.is_file()):
            named = printable_line(shard.name)
            raise ConfigError(f"{path} names {named}, which is not there", remedy="download the missing file")
    return shards


def is_described(directory: Path) -> bool:
    """Return whether `directory` is a download, and its DOWNLOAD can be read."""
    try:
        return _read_download(directory) is not None
    except IntegrityError:
        return False


def _read_download(directory: Path) -> dict[str, Any] | None:
    path = directory / DOWNLOAD
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text("utf-8"))
        return {"model_id": str(found["model_id"]), "commit": str(found["commit"]), "tensors": dict(found["tensors"])}
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{path} is damaged: {one_line(error)}", remedy="delete it and download again") from error


def weight_sizes(files: ModelFiles) -> dict[str, int]:
    """Return the number of values of each weight, from the files' headers. Raises IntegrityError."""
    sizes = _tensor_sizes(files)
    found = {
        name: {ending: sizes[part] for ending, part in parts.items() if part in sizes}
        for name, parts in files.parts.items()
    }
    return {name: num_values(name, parts, files.format) for name, parts in found.items() if parts}


def _tensor_sizes(files: ModelFiles) -> dict[str, int]:
    """Return the number of values of each tensor of the checkpoint."""
    if (download := _read_download(files.directory)) is not None:
        return {name: int(num) for name, num in download["tensors"].items()}
    sizes: dict[str, int] = {}
    for shard in sorted(set(files.shards.values())):
        sizes |= {name: entry.num_values for name, entry in read_header(shard).items()}
    return sizes


def manifest_beside(directory: Path) -> PublishedManifest | None:
    """Return the manifest in a model's directory, or None for a model that is not published. Raises IntegrityError."""
    path = directory / MANIFEST_FILE
    return load_manifest(path) if path.is_file() else None


def load_manifest(path: Path) -> PublishedManifest:
    """Read a signed manifest. Raises ConfigError if the file cannot be read, IntegrityError if it is damaged."""
    try:
        with path.open("rb") as file:
            data = file.read(SignedManifest.MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the manifest {path} cannot be read: {reason_of(error)}", remedy="check its path") from error
    return readable_manifest(data, str(path))


def keep_beside(published: PublishedManifest, directory: Path) -> Path:
    """Write the manifest to a model's directory, atomically. Raises ConfigError on failure."""
    path = directory / MANIFEST_FILE
    try:
        write_whole(path, (published.signed,))
    except OSError as error:
        raise ConfigError(
            f"the manifest cannot be written to {path}: {reason_of(error)}",
            remedy="make the directory writable, and check that its disk has space",
        ) from error
    return path
