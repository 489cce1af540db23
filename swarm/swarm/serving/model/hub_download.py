"""Brings what one span needs of a model from a hub: config, tokenizer, index, and only the shards with its tensors.

Files lie in a directory of their own for each commit, so that what is there is never stale, and a download that broke
off goes on where it stopped. `download.json` beside them says which tensors the whole model has, read from the headers
of shards that were not brought: enough to plan with. Blocking; reports bytes as they come.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
)
from huggingface_hub.file_download import hf_hub_url, http_get
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]
from swarm_protocol.errors import ConfigError, IntegrityError, SwarmError

from swarm.serving.model.model_files import CONFIG, DOWNLOAD, INDEX, MAX_CONFIG_BYTES, SINGLE, ModelFiles, open_model
from swarm.serving.model.safetensors_reader import one_line, read_header
from swarm.serving.model.shape import SMALL_FILES
from swarm.serving.model.weights import needed_shards

OnProgress = Callable[[int, int], None]
"""Called with the bytes that are there and all that will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """One commit of a model on a hub, and the directory its files come to."""

    model_id: str
    commit: str
    directory: Path
    sizes: Mapping[str, int]
    sha256: Mapping[str, str]
    endpoint: str | None
    token: str | None

    def url(self, name: str) -> str:
        return hf_hub_url(self.model_id, name, revision=self.commit, endpoint=self.endpoint)


def find_model(
    model_id: str, cache_dir: Path, *, revision: str = "main", endpoint: str | None = None, token: str | None = None
) -> HubModel:
    """Ask the hub what `revision` of the model is, and bring its small files. Raises ConfigError, IntegrityError."""
    api = HfApi(endpoint=endpoint, token=token)
    model = _look_up(api, model_id, cache_dir, revision)
    with _in_its_directory(model):
        _fetch_all(model, [name for name in (*SMALL_FILES, INDEX) if name in model.sizes], lambda *_: None)
        if not (model.directory / DOWNLOAD).is_file():
            _write_atomically(model.directory / DOWNLOAD, json.dumps(_describe(api, model)))
    return model


def find_config(model_id: str, cache_dir: Path, *, revision: str = "main", endpoint: str | None = None) -> Path:
    """The directory of that model, with its config.json in it and nothing else brought. Raises as `find_model`."""
    model = _look_up(HfApi(endpoint=endpoint), model_id, cache_dir, revision)
    if _size(model, CONFIG) > MAX_CONFIG_BYTES:
        raise ConfigError(
            f"{CONFIG} of {model_id} is larger than {MAX_CONFIG_BYTES} bytes", remedy="name another model"
        )
    with _in_its_directory(model):
        _fetch_all(model, [CONFIG], lambda *_: None)
    return model.directory


def _look_up(api: HfApi, model_id: str, cache_dir: Path, revision: str) -> HubModel:
    with _in_words(model_id, revision):
        info = api.model_info(model_id, revision=revision, files_metadata=True)
    files = {file.rfilename: file for file in info.siblings or ()}
    commit = str(info.sha)
    model = HubModel(
        model_id=model_id,
        commit=commit,
        directory=cache_dir / model_id.replace("/", "--") / commit,
        sizes={name: file.size for name, file in files.items() if isinstance(file.size, int)},
        sha256={name: file.lfs.sha256 for name, file in files.items() if file.lfs},
        endpoint=api.endpoint,
        token=api.token if isinstance(api.token, str) else None,
    )
    if not any(name in model.sizes for name in (INDEX, SINGLE)):
        raise ConfigError(f"{model_id} has no safetensors weights", remedy="name a model that has")
    return model


@contextmanager
def _in_its_directory(model: HubModel) -> Iterator[None]:
    """Hold the directory of `model` against other processes, and say in words what goes wrong."""
    with _in_words(model.model_id, model.commit):
        model.directory.mkdir(parents=True, exist_ok=True)
        with FileLock(model.directory / ".lock"):
            yield


def download_blocks(model: HubModel, start: int, end: int, on_progress: OnProgress) -> ModelFiles:
    """Bring the shards that hold tensors of blocks `[start, end)`, none other; those that are there are not read again.

    Raises ConfigError if they cannot be brought or find no room, IntegrityError for one that is not what it should be.
    """
    files = open_model(model.directory)
    names = [shard.name for shard in needed_shards(files, start, end)]
    with _in_its_directory(model):
        _fetch_all(model, names, on_progress)
    return files


def _describe(api: HfApi, model: HubModel) -> dict[str, Any]:
    """The number of values of every tensor, from the first bytes of every shard."""
    names = {SINGLE}
    if (index := model.directory / INDEX).is_file():
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    tensors: dict[str, int] = {}
    for name in sorted(names):
        header = api.parse_safetensors_file_metadata(model.model_id, name, revision=model.commit)
        tensors |= {tensor: math.prod(about.shape) for tensor, about in header.tensors.items()}
    return {"model_id": model.model_id, "commit": model.commit, "tensors": tensors}


def _fetch_all(model: HubModel, names: list[str], on_progress: OnProgress) -> None:
    sizes = {name: _size(model, name) for name in names}
    total, done = sum(sizes.values()), 0
    missing = sum(size - _part_bytes(model, name) for name, size in sizes.items() if not _is_there(model, name))
    if (free := shutil.disk_usage(model.directory).free) < missing:
        raise _no_room(model, f"{missing} bytes are missing and {free} free")
    on_progress(0, total)
    for name, size in sizes.items():
        if not _is_there(model, name):
            _fetch(model, name, size, partial(_report, on_progress, done, total))
        done += size
        on_progress(done, total)


def _report(on_progress: OnProgress, before: int, total: int, num_bytes: int) -> None:
    on_progress(before + num_bytes, total)


def _fetch(model: HubModel, name: str, size: int, on_bytes: Callable[[int], None]) -> None:
    """Bring one file, going on where a broken download of it stopped."""
    part = model.directory / f"{name}.part"
    part_bytes = _part_bytes(model, name)
    if part_bytes < size:
        with part.open("ab") as file:
            http_get(
                model.url(name),
                file,
                resume_size=part_bytes,
                headers=build_hf_headers(token=model.token),
                expected_size=size,
                tqdm_class=_meter(on_bytes, part_bytes),
            )
    expected = model.sha256.get(name)
    if expected and _digest(part) != expected:
        part.unlink()
        raise IntegrityError(f"{name} of {model.model_id} came with other bytes than its hub says", remedy="try again")
    if name.endswith(".safetensors"):
        read_header(part)  # names the part, which stays to be looked at
    part.replace(model.directory / name)


def _part_bytes(model: HubModel, name: str) -> int:
    """Of a broken download. One that is longer than the file is another file's."""
    part = model.directory / f"{name}.part"
    if part.is_file() and part.stat().st_size > _size(model, name):
        part.unlink()
    return part.stat().st_size if part.is_file() else 0


def _is_there(model: HubModel, name: str) -> bool:
    path = model.directory / name
    return path.is_file() and path.stat().st_size == _size(model, name)


def _size(model: HubModel, name: str) -> int:
    if name not in model.sizes or Path(name).name != name:
        raise IntegrityError(f"{model.model_id} names {name}, which is not there", remedy="name another revision")
    return model.sizes[name]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_atomically(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, "utf-8")
    part.replace(path)


def _meter(on_bytes: Callable[[int], None], num_bytes: int) -> Any:
    """Stands where the hub's library would make a progress bar."""

    class Meter:
        def __init__(self, **_options: Any) -> None:
            self.num_bytes = num_bytes

        def __enter__(self) -> Meter:
            return self

        def __exit__(self, *_error: object) -> None:
            pass

        def update(self, more: int) -> None:
            self.num_bytes += more
            on_bytes(self.num_bytes)

    return Meter


def _no_room(model: HubModel, why: str) -> ConfigError:
    return ConfigError(
        f"no room in {model.directory} for {model.model_id}: {why}",
        remedy="free some, or name another cache directory",
    )


@contextmanager
def _in_words(model_id: str, revision: str) -> Iterator[None]:
    """What the hub's library and the disk raise, in one line."""
    try:
        yield
    except SwarmError:
        raise
    except GatedRepoError as error:
        raise ConfigError(f"{model_id} is gated", remedy="accept its terms on the hub and set HF_TOKEN") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(f"the hub has no model {model_id}", remedy="check its name, or set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{model_id} has no revision {revision}", remedy="check its name") from error
    except EntryNotFoundError as error:
        raise ConfigError(
            f"a file of {model_id} has vanished from the hub: {one_line(error)}",
            remedy="try again, or name a revision that has it: OWNER/NAME@REVISION",
        ) from error
    except SafetensorsParsingError as error:
        raise IntegrityError(f"{model_id} has a damaged shard: {one_line(error)}") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ConfigError(f"the disk is full, {model_id} is not whole", remedy="free some and try again") from error
        raise _broken_off(model_id, error) from error
    except Exception as error:  # the client raises its HTTP library's errors, of which it has had several
        raise _broken_off(model_id, error) from error


def _broken_off(model_id: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"the download of {model_id} broke off: {one_line(error)}", remedy="try again: what came is kept"
    )
