"""What a data set's repository may say of its own files: which of them are rows of text, and nothing outside it.

The `datasets` library follows what a card names as if the user had: files of this machine, other hosts, other
repositories. A repository's author is a stranger, so the card is checked before the library reads it, and what the
library made of it before that is read. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from swarm_protocol.errors import ConfigError

CARD_FILES = ("README.md", ".huggingface.yaml")
KINDS = ("arrow", "csv", "json", "parquet", "text")
"""Of files. Others can point to files outside themselves, as HDF5 does, or hold no text."""
_PLACES = ("data_files", "data_dir")


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
    """Whether `path`, as it stands in a card, can only be a file or folder of the card's own repository."""
    try:
        scheme = urlsplit(path).scheme
    except ValueError:
        return False
    is_relative = not scheme and not path.startswith(("/", "~")) and "::" not in path and "\\" not in path
    return is_relative and ".." not in PurePosixPath(path).parts


def check_builder(name: str, builder: Any, base: str) -> None:
    """Raises ConfigError unless `builder`, the library's for data set `name`, reads nothing but files of KINDS below
    `base`."""
    kind = type(builder).__module__.rpartition(".")[2]
    if kind not in KINDS:
        raise ConfigError(
            f"{name} has files of kind {kind}, which runs do not train on", remedy=f"use one of {', '.join(KINDS)}"
        )
    for files in (builder.config.data_files or {}).values():
        for file in files:
            if not str(file).startswith(base) or not is_inside(str(file).removeprefix(base)):
                raise _outside(name, str(file))


def _outside(name: str, path: str) -> ConfigError:
    return ConfigError(
        f"{name} names a file outside its repository: {path[:120]!r}",
        remedy="use a data set whose card names its own files alone",
    )


def _texts(value: Any) -> Iterator[str]:
    """All texts within nested lists and tables."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each)
