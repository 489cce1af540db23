"""Downloads what one span needs of a model from a hub: config, tokenizer, index, and only the shards with its tensors.

Each commit has its own directory, so that its files are never stale. A broken download continues where it stopped, also
in a later process; `hf_hub_download` would drop a partial file. `download.json` has the sizes of all tensors of the
model, read from the headers of all shards, which is enough for planning. While the hub cannot be asked, as when a
machine starts before its connection, its last answer counts. Blocks, and reports bytes as they arrive.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

from filelock import FileLock
from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    hf_raise_for_status,
    http_stream_backoff,
)
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError, IntegrityError, SwarmError, one_line, reason_of

from swarm.serving.model.model_files import (
    CONFIG,
    DOWNLOAD,
    MAX_CONFIG_BYTES,
    SINGLE,
    ModelFiles,
    is_described,
    open_model,
)
from swarm.serving.model.safetensors_reader import MAX_HEADER_BYTES, read_header
from swarm.serving.model.shape import INDEX, MANIFEST_FILE, SMALL_FILES
from swarm.serving.model.weights import needed_shards
from swarm.whole_files import write_whole

RETRY_S = 1.0
MAX_FAILURES = 5
"""Maximum consecutive connections that bring no byte."""

MAX_INDEX_BYTES = MAX_HEADER_BYTES
"""Maximum size of the index of the weights, which names the same tensors as a header."""

MAX_TENSORS = 2**20
"""Maximum number of tensors in the headers of all shards. The largest published models have some 200,000."""

KEPT_FREE_BYTES = 1 << 30
"""Free bytes of the disk that a download leaves: strangers choose the models that a helper takes, and with a full disk
neither this node nor others' programs can keep anything. A download of less leaves as much again as it takes."""

_REFUSALS = (HFValidationError, RepositoryNotFoundError, RevisionNotFoundError)
"""Errors by which the hub says that it does not have a model, or not for this user."""

_ERRNO = re.compile(r"\[Errno -?\d+\] ")

logger = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]
"""Called with the number of downloaded bytes and the total. A SwarmError that it raises ends the download."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """One commit of a model on a hub, and the directory of its files."""

    model_id: str
    commit: str
    directory: Path
    sizes: Mapping[str, int]
    sha256: Mapping[str, str]
    endpoint: str | None

    def url(self, name: str) -> str:
        return hf_hub_url(self.model_id, name, revision=self.commit, endpoint=self.endpoint)


def find_model(model_id: str, cache_dir: Path, *, revision: str = "main", endpoint: str | None = None) -> HubModel:
    """Find `revision` of the model on the hub, and download its small files. Raises ConfigError or IntegrityError."""
    api = HfApi(endpoint=endpoint)
    model = _look_up(api, model_id, cache_dir, revision)
    with _locked_directory(model):
        small = [name for name in (*SMALL_FILES, INDEX, MANIFEST_FILE) if name in model.sizes]
        for name in small:
            _check_size(model, name, MAX_INDEX_BYTES if name == INDEX else limits.MAX_MODEL_FILE_BYTES)
        _fetch_all(model, small, lambda *_: None)
        if not is_described(model.directory):
            write_whole(model.directory / DOWNLOAD, (json.dumps(_describe(api, model)).encode(),))
    return model


def find_config(model_id: str, cache_dir: Path, *, revision: str = "main", endpoint: str | None = None) -> Path:
    """Return the directory of the model, after a download of only its config.json. Raises as `find_model`."""
    model = _look_up(HfApi(endpoint=endpoint), model_id, cache_dir, revision)
    _check_size(model, CONFIG, MAX_CONFIG_BYTES)
    with _locked_directory(model):
        _fetch_all(model, [CONFIG], lambda *_: None)
    return model.directory


def _check_size(model: HubModel, name: str, most: int) -> None:
    """Raises ConfigError for a file that is not small. A helper takes models that strangers name."""
    if _size(model, name) > most:
        raise ConfigError(f"{name} of {model.model_id} is larger than {most} bytes", remedy="name another model")


def _look_up(api: HfApi, model_id: str, cache_dir: Path, revision: str) -> HubModel:
    folder = cache_dir / model_id.replace("/", "--")
    kept = folder / f"{quote(revision, safe='')}.json"
    try:
        with _translated_errors(model_id, revision, downloads=False):
            info = api.model_info(model_id, revision=revision, files_metadata=True)
    except ConfigError as error:
        answer = _read_answer(kept)
        if answer is None or isinstance(error.__cause__, _REFUSALS):
            raise
        logger.warning("%s: its last answer counts", error.message)
    else:
        files = {file.rfilename: file for file in info.siblings or ()}
        answer = {
            "commit": str(info.sha),
            "sizes": {name: file.size for name, file in files.items() if isinstance(file.size, int)},
            "sha256": {name: file.lfs.sha256 for name, file in files.items() if file.lfs},
        }
        _keep_answer(kept, answer)
    model = HubModel(model_id=model_id, directory=folder / answer["commit"], endpoint=api.endpoint, **answer)
    if not any(name in model.sizes for name in (INDEX, SINGLE)):
        raise ConfigError(f"{model_id} has no safetensors weights", remedy="name a model that has them")
    return model


def _read_answer(path: Path) -> dict[str, Any] | None:
    """Return the hub's last answer about a revision, or None if there is none that can be read."""
    try:
        found = json.loads(path.read_text("utf-8"))
        return {"commit": str(found["commit"]), "sizes": dict(found["sizes"]), "sha256": dict(found["sha256"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep_answer(path: Path, answer: Mapping[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, (json.dumps(answer).encode(),))
    except OSError as error:
        logger.warning("the hub's answer is not kept in %s: %s", path, reason_of(error))


@contextmanager
def _locked_directory(model: HubModel) -> Iterator[None]:
    """Lock the directory of `model` against other processes, and translate errors."""
    with _translated_errors(model.model_id, model.commit):
        model.directory.mkdir(parents=True, exist_ok=True)
        with FileLock(model.directory / ".lock"):
            yield


def download_blocks(model: HubModel, start: int, end: int, on_progress: OnProgress) -> ModelFiles:
    """Download the missing shards that hold tensors of blocks `[start, end)`.

    Raises ConfigError if they cannot be downloaded or do not fit on the disk, IntegrityError for a shard with a wrong
    digest.
    """
    files = open_model(model.directory)
    names = [shard.name for shard in needed_shards(files, start, end)]
    with _locked_directory(model):
        _fetch_all(model, names, on_progress)
    return files


def _describe(api: HfApi, model: HubModel) -> dict[str, Any]:
    """Return the contents of `download.json`. Reads the header of every shard. Raises ConfigError for more shards or
    tensors than any model has."""
    names = {SINGLE}
    if (index := model.directory / INDEX).is_file():
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    tensors: dict[str, int] = {}
    for name in sorted(names):
        if len(names) > limits.MAX_WEIGHT_FILES or len(tensors) > MAX_TENSORS:
            raise ConfigError(
                f"{model.model_id} has more than {limits.MAX_WEIGHT_FILES} files of weights, or {MAX_TENSORS} tensors",
                remedy="name another model",
            )
        header = api.parse_safetensors_file_metadata(model.model_id, name, revision=model.commit)
        tensors |= {tensor: math.prod(about.shape) for tensor, about in header.tensors.items()}
    return {"model_id": model.model_id, "commit": model.commit, "tensors": tensors}


def _fetch_all(model: HubModel, names: list[str], on_progress: OnProgress) -> None:
    sizes = {name: _size(model, name) for name in names}
    total, done = sum(sizes.values()), 0
    missing = sum(size - _part_bytes(model, name) for name, size in sizes.items() if not _is_there(model, name))
    if (free := shutil.disk_usage(model.directory).free) < missing + (kept := min(missing, KEPT_FREE_BYTES)):
        raise ConfigError(
            f"no space in {model.directory} for {model.model_id}: it needs {missing} more bytes, and {free} are free, "
            f"of which {kept} are kept free",
            remedy="free some space, or name another cache directory",
        )

    def on_bytes(num_bytes: int) -> None:
        on_progress(done + num_bytes, total)

    on_bytes(0)
    for name, size in sizes.items():
        if not _is_there(model, name):
            _fetch(model, name, size, on_bytes)
        done += size
        on_bytes(0)


def _fetch(model: HubModel, name: str, size: int, on_bytes: Callable[[int], None]) -> None:
    """Download one file, and continue an earlier partial download of it."""
    part = model.directory / f"{name}.part"
    part.touch()  # an empty file needs no request
    num_failures = 0
    while (part_bytes := _part_bytes(model, name)) < size:
        broken: Exception | None = None
        try:
            _append(model, name, part, on_bytes)
        except (SwarmError, HfHubHTTPError, OSError):  # SwarmError: `on_bytes` ends the download
            raise
        except Exception as error:  # the connection broke; the client has used several HTTP libraries
            broken = error
        num_failures = 0 if _part_bytes(model, name) > part_bytes else num_failures + 1
        if num_failures > MAX_FAILURES:
            raise broken or OSError(f"{name} ends after {part_bytes} of {size} bytes")
        if broken or num_failures:
            time.sleep(RETRY_S)
    expected = model.sha256.get(name)
    if expected and _digest(part) != expected:
        part.unlink()
        raise IntegrityError(f"{name} of {model.model_id} does not match the digest on its hub", remedy="try again")
    if name.endswith(".safetensors"):
        read_header(part)  # an error names the part, which is kept for inspection
    part.replace(model.directory / name)


def _append(model: HubModel, name: str, part: Path, on_bytes: Callable[[int], None]) -> None:
    """Append the missing bytes of the file to `part`, until the connection ends. Raises OSError for too many bytes."""
    size = _size(model, name)
    with part.open("ab") as file:
        headers = build_hf_headers() | {
            "Range": f"bytes={file.tell()}-",
            "Accept-Encoding": "identity",  # sizes and offsets are those of the uncompressed file
        }
        with http_stream_backoff(
            "GET",
            model.url(name),
            headers=headers,
            timeout=HF_HUB_DOWNLOAD_TIMEOUT,
            follow_redirects=True,
            retry_on_exceptions=(),  # `_fetch` continues after a broken connection
            retry_on_status_codes=(HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS),
        ) as response:
            hf_raise_for_status(response)
            if response.status_code != HTTPStatus.PARTIAL_CONTENT:
                file.seek(0)  # else `tell` counts the old contents
                file.truncate()
            for chunk in response.iter_bytes():
                file.write(chunk)
                if file.tell() > size:
                    raise OSError(f"{name} has more than the {size} bytes that its hub names")
                on_bytes(file.tell())


def _part_bytes(model: HubModel, name: str) -> int:
    """Return the size of a partial download. One that is longer than the file is deleted, since it is of another
    file."""
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


@contextmanager
def _translated_errors(model_id: str, revision: str, *, downloads: bool = True) -> Iterator[None]:
    """Translate errors of the hub's library and the disk to SwarmErrors with one line.

    Without `downloads`, the block only asks the hub.
    """
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
    except Exception as error:  # the client raises its HTTP library's errors, of which it has had several
        raise _broken_off(model_id, error, downloads=downloads) from error


def _broken_off(model_id: str, error: Exception, *, downloads: bool) -> ConfigError:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return ConfigError(f"the disk is full, {model_id} is not complete", remedy="free some space and try again")
    if isinstance(error, OSError) and error.filename:  # errors of connections name no file
        return ConfigError(
            f"cannot keep {model_id} in {error.filename}: {reason_of(error)}",
            remedy="make it writable for this user, or choose another directory with --home",
        )
    what = f"the download of {model_id} failed" if downloads else f"the hub cannot be asked for {model_id}"
    return ConfigError(
        f"{what}: {_ERRNO.sub('', one_line(error))}",
        remedy="check the network and HTTPS_PROXY, name a mirror of the hub with HF_ENDPOINT, or give the path of a "
        f"local copy{'; what was downloaded is kept' if downloads else ''}",
    )
