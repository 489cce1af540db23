"""Downloads from the Hugging Face hub what a run uses: rows of a data set as documents, and a tokenizer's files.

The `datasets` library downloads a data set into its own cache, in the worker process; it comes with the extra
`swarm-node[data]`. The library follows every path in a data set's card as if the user had given it: files of this
machine, other hosts, other repositories. A repository's author is a stranger, so `check_card` checks the card before
the library reads it, and `check_builder` checks the resulting files before they are read. Blocks. No state.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import yaml  # type: ignore[import-untyped]
from huggingface_hub import DatasetCard, HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm
from swarm_protocol.errors import ConfigError, SwarmError, one_line, reason_of

from swarm.training.data.source import Passage, cut
from swarm.training.run.settings import is_commit

CARD_FILES = ("README.md", ".huggingface.yaml")
KINDS = ("arrow", "csv", "json", "parquet", "text")
"""File formats that runs train on. Others can refer to further files, as HDF5 does, or contain no text."""
_PLACES = ("data_files", "data_dir")

OLDEST_LIBRARY = (5, 2)
"""The oldest version of `datasets` that is used, as the extra `data` says."""

ANSWER_S = 10.0
"""Time limit for the hub to name a commit."""
_ROWS = 256


def check_card(name: str, settings: Sequence[Any]) -> None:
    """Raises ConfigError for a card of data set `name` that names anything outside its repository. `settings` are the
    parsed contents of its CARD_FILES."""
    for each in settings:
        configs = each.get("configs") if isinstance(each, Mapping) else None
        for config in configs if isinstance(configs, list) else ():
            for key in _PLACES if isinstance(config, Mapping) else ():
                for path in _texts(config.get(key)):
                    if not is_inside(path):
                        raise _outside(name, path)


def is_inside(path: str) -> bool:
    """Return whether `path` in a card can only be a file or folder of the card's own repository."""
    try:
        scheme = urlsplit(path).scheme
    except ValueError:
        return False
    is_relative = not scheme and not path.startswith(("/", "~")) and "::" not in path and "\\" not in path
    return is_relative and ".." not in PurePosixPath(path).parts


def check_builder(name: str, builder: Any, base: str) -> None:
    """Raises ConfigError unless the library's `builder` for data set `name` reads only files of KINDS below `base`."""
    kind = type(builder).__module__.rpartition(".")[2]
    if kind not in KINDS:
        raise ConfigError(
            f"{name} has files of kind {kind}, which runs cannot train on", remedy=f"use one of {', '.join(KINDS)}"
        )
    for files in (builder.config.data_files or {}).values():
        for file in files:
            if not str(file).startswith(base) or not is_inside(str(file).removeprefix(base)):
                raise _outside(name, str(file))


def check_library(version: str) -> None:
    """Raises ConfigError for a `datasets` version below OLDEST_LIBRARY. Older ones can run a repository's code, which
    no check of a card prevents."""
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_LIBRARY:
        oldest = ".".join(map(str, OLDEST_LIBRARY))
        raise ConfigError(
            f"the datasets library is version {version}, older than {oldest}", remedy="pip install 'swarm-node[data]'"
        )


def _outside(name: str, path: str) -> ConfigError:
    return ConfigError(
        f"{name} names a file outside its repository: {path[:120]!r}",
        remedy="use a data set whose card names only its own files",
    )


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts within nested lists and tables."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """Implements `DocumentSource`: a split of a data set at one commit, in its configuration `config`, or in its only
    or default one."""

    hub_id: str
    config: str = ""
    split: str
    text_key: str
    commit: str

    @classmethod
    def find(cls, hub_id: str, config: str, split: str, text_key: str, revision: str = "") -> HubSource:
        """Find the data set at `revision`, or at its newest commit. Raises ConfigError if there is none, or the hub
        does not answer."""
        commit = commit_of_data_set(hub_id, revision)
        return cls(hub_id=hub_id, config=config, split=split, text_key=text_key, commit=commit)

    @property
    def name(self) -> str:
        return f"the data set {self.hub_id}"

    @property
    def key(self) -> str:
        return " ".join(["hub", self.hub_id, self.commit, *filter(None, [self.config]), self.split, self.text_key])

    def passages(self) -> Iterator[Passage]:
        with _translated_errors(self.name):
            rows = self._rows()
            if self.text_key not in rows.column_names:
                raise ConfigError(
                    f"{self.name} has no column {self.text_key!r}: it has {', '.join(rows.column_names[:20])}",
                    remedy="set the run's data.text_key to the column of the text",
                )
            done = 0
            for batch in rows.select_columns([self.text_key]).iter(batch_size=_ROWS):
                texts = batch[self.text_key]
                done += len(texts)
                for text in texts:
                    if text is None:
                        continue
                    if not isinstance(text, str):
                        raise ConfigError(
                            f"column {self.text_key!r} of {self.name} is not text",
                            remedy="the run's data.text_key must name a column of text",
                        )
                    for piece, ends in cut(text):
                        yield Passage(piece, ends, done / len(rows))

    def _rows(self) -> Any:
        """Return the split, in the library's cache. Raises ConfigError for a card that names files outside its
        repository."""
        from datasets import __version__, load_dataset_builder  # noqa: PLC0415

        check_library(__version__)
        check_card(self.name, self._card())
        try:
            builder = load_dataset_builder(self.hub_id, self.config or None, revision=self.commit)
            check_builder(self.name, builder, f"hf://datasets/{self.hub_id}@{self.commit}/")
            builder.download_and_prepare()
            return builder.as_dataset(split=self.split)
        except ValueError as error:  # its message names the choices
            raise ConfigError(
                f"{self.name} has several configurations, or not the chosen one or split: {one_line(error)}",
                remedy="set the run's data.hub_config and data.split",
            ) from error

    def _card(self) -> list[Any]:
        """Return the parsed settings of each of CARD_FILES that the repository has."""
        return [
            DatasetCard.load(path).data.to_dict() if path.suffix == ".md" else yaml.safe_load(path.read_text("utf-8"))
            for name in CARD_FILES
            if (path := self._file(name)) is not None
        ]

    def _file(self, name: str) -> Path | None:
        """Return the local path of the repository's file `name`; None if there is none."""
        try:
            place = hf_hub_download(
                self.hub_id,
                name,
                repo_type="dataset",
                revision=self.commit,
                endpoint=_endpoint(),
                etag_timeout=ANSWER_S,
                tqdm_class=_NoBar,
            )
        except LocalEntryNotFoundError:
            raise  # the hub does not answer
        except EntryNotFoundError:
            return None
        return Path(place)


class _NoBar(tqdm):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "disable": True})  # type: ignore[no-untyped-call]


def commit_of_data_set(hub_id: str, revision: str = "") -> str:
    """Return the commit that `revision` names, or the newest one. Raises ConfigError."""
    return _commit(f"the data set {hub_id}", HfApi(endpoint=_endpoint()).dataset_info, hub_id, revision)


def commit_of_tokenizer(hub_id: str, revision: str = "") -> str:
    """Return the commit that `revision` names, or the newest one. Raises ConfigError."""
    return _commit(f"the tokenizer {hub_id}", HfApi(endpoint=_endpoint()).model_info, hub_id, revision)


def _commit(what: str, info: Callable[..., Any], hub_id: str, revision: str) -> str:
    if is_commit(revision):
        return revision  # works without the hub
    with _translated_errors(what):
        return str(info(hub_id, revision=revision or None, timeout=ANSWER_S).sha)


def bring_tokenizer(hub_id: str, patterns: Sequence[str], revision: str = "") -> Path:
    """Download the tokenizer's files that match `patterns`, at `revision` or the newest commit, and return their
    directory. If the hub does not answer, the files of an earlier download are used."""
    with _translated_errors(f"the tokenizer {hub_id}"):
        place = snapshot_download(
            hub_id,
            revision=revision or None,
            allow_patterns=list(patterns),
            endpoint=_endpoint(),
            etag_timeout=ANSWER_S,
            tqdm_class=_NoBar,
        )
    return Path(place)


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT")


@contextmanager
def _translated_errors(what: str) -> Iterator[None]:
    """Translate errors of the hub's libraries to ConfigError with a message of one line."""
    try:
        yield
    except SwarmError:
        raise
    except ImportError as error:
        raise ConfigError(
            f"{what} cannot be read without the datasets library", remedy="pip install 'swarm-node[data]'"
        ) from error
    except GatedRepoError as error:
        raise ConfigError(f"{what} is gated", remedy="accept its terms on the hub and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{what} has no such revision on the hub", remedy="check it in the run file") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(f"the hub does not have {what}", remedy="check its name, or set HF_TOKEN") from error
    except Exception as error:  # the clients raise their HTTP library's errors, of which they have had several
        if isinstance(error, OSError) and error.filename:  # errors of connections name no file
            raise ConfigError(
                f"cannot keep {what} in {error.filename}: {reason_of(error)}",
                remedy="make it writable for this user, or choose another cache directory with HF_HOME",
            ) from error
        raise ConfigError(
            f"{what} cannot be downloaded from the hub: {one_line(error)}",
            remedy="check the connection and try again (finished files are kept); HF_ENDPOINT names another hub",
        ) from error
