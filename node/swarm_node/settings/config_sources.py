"""Resolves the settings of one command: from flags, then the environment, then a TOML file, then defaults.

Every value keeps its origin for messages. `config` declares the settings.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm_protocol.errors import ConfigError
from swarm_protocol.toml_text import parse_toml

from swarm_node.settings.config import SETTINGS, Config, Given, UsageError, Value, default_home, default_text
from swarm_node.storage.home import cannot_look_into, read_text

ENV_PREFIX = "SWARM_"

CONFIG_FILE = "SWARM_CONFIG"
"""The variable that names the settings file, as `--config` does. It is not a setting itself."""

MAX_FILE_BYTES = 2**20
"""Maximum size of a settings file, far above that of all settings."""

MAX_SHOWN_CHARS = 120
"""Maximum length of a refused value in a message, so that the message remains one line."""


def resolve(flags: Mapping[str, Value], *, file: Path | None = None) -> Config:
    """Return the settings from `flags` (None: not given), the environment, and `file` or HOME/config.toml.

    Raises UsageError, which names the source at fault: a supervisor does not start the daemon again.
    """
    given = {**_environment(), **_flags(flags)}
    named = str(file) if file else os.environ.get(CONFIG_FILE)
    path = Path(named) if named else _home(given) / "config.toml"
    try:
        given = {**_from_file(path, is_named=bool(named)), **given}
    except ConfigError as error:
        raise UsageError(error.message, remedy=error.remedy) from error
    values = {name: _parsed(name, each) for name, each in given.items()}
    return Config(**values, origins={name: each.origin for name, each in given.items()})


def resolve_home(flags: Mapping[str, Value]) -> Path:
    """Return the node's home without reading its settings file, so that an invalid file does not keep a daemon from
    being ended.

    Raises ConfigError for an invalid home and for unknown variables.
    """
    return _home({**_environment(), **_flags(flags)})


def _flags(flags: Mapping[str, Value]) -> dict[str, Given]:
    return {name: Given("--" + name.replace("_", "-"), value) for name, value in flags.items() if value is not None}


def _home(given: Mapping[str, Given]) -> Path:
    home: Path = _parsed("home", given["home"]) if "home" in given else default_home()
    return home


def _environment() -> dict[str, Given]:
    """Return the variables SWARM_… that are not empty. Raises ConfigError for one that is not a setting."""
    given: dict[str, Given] = {}
    for variable in sorted(os.environ):
        name = variable.removeprefix(ENV_PREFIX).lower()
        if not variable.startswith(ENV_PREFIX) or variable == CONFIG_FILE:
            continue
        if name not in SETTINGS or not variable.isupper():
            what = f"environment variable {variable}"
            raise _unknown(what, name, tuple(SETTINGS), lambda known: ENV_PREFIX + known.upper())
        if os.environ[variable].strip():
            given[name] = Given(variable, os.environ[variable])
    return given


def _from_file(path: Path, *, is_named: bool) -> dict[str, Given]:
    """Return the settings in the TOML file. Only a file that was named must exist. Raises ConfigError."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        if is_named:
            raise ConfigError(f"there is no config file {path}", remedy="check --config, or leave it out") from None
        if isinstance(error, NotADirectoryError):
            remedy = "choose another directory with --home, or move the file away"
            raise ConfigError(
                f"cannot use the home directory {path.parent}: a file is in the way", remedy=remedy
            ) from None
        return {}
    except PermissionError as error:
        if not is_named:
            raise cannot_look_into(path.parent) from error
    except (OSError, ValueError):
        pass  # the file may exist, and `read_text` says what is wrong
    text = read_text(path, MAX_FILE_BYTES, "fix it, move it away, or name a settings file")
    table = parse_toml(text, f"config file {path}", remedy="fix it or move it away")
    known = [setting for setting in SETTINGS if setting != "home"]
    for name in table:
        if name not in known:
            raise _unknown(f"setting {name!r} in {path}", name, known)
    return {name: Given(f"{name} in {path}", _toml_value(name, path, value)) for name, value in table.items()}


def _toml_value(name: str, path: Path, value: object) -> Value:
    many = SETTINGS[name].many
    if isinstance(value, list) and many and all(isinstance(item, str) for item in value):
        return value
    if isinstance(value, str | int | float) and not many:
        return str(value).lower() if isinstance(value, bool) else str(value)
    wanted, form = ("a list of strings", '["…"]') if many else ("a single value", '"…"')
    raise ConfigError(f"{name} in {path} is not {wanted}", remedy=f"write {name} = {form}")


def _parsed(name: str, given: Given) -> Any:
    """Parse one value. An empty list in the file is a value. Raises UsageError, which names the origin."""
    setting, origin, value = SETTINGS[name], given.origin, given.value
    texts = [str(value)] if isinstance(value, str | bool) else list(value or ())
    if setting.many:
        texts = [part for text in texts for part in text.replace(",", " ").split()]
    if value != [] and not any(text.strip() for text in texts):
        raise UsageError(f"{origin} has no value", remedy=f"write {_spelled(name, origin)}, or leave it out")
    parsed = []
    for text in texts:
        try:
            parsed.append(setting.parse(text))
        except ConfigError as error:
            raise UsageError(f"{origin}: {error.message}", remedy=error.remedy) from error
        except ValueError as error:
            shown = text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"
            raise UsageError(f"{origin}: {shown!r} {error}", remedy=f"write {_spelled(name, origin)}") from error
    return tuple(parsed) if setting.many else parsed[0]


def _spelled(name: str, origin: str) -> str:
    """Return an example of the setting in the syntax of its source."""
    example = SETTINGS[name].example or default_text(name)
    if origin.startswith("--"):
        return f"{origin} {example}"
    if origin.startswith(ENV_PREFIX):
        return f"{origin}={example}"
    value = example if example.isdigit() or example == "true" else f'"{example}"'
    return f"{name} = [{value}]" if SETTINGS[name].many else f"{name} = {value}"


def _unknown(what: str, name: str, known: Sequence[str], spelled: Callable[[str], str] = str) -> UsageError:
    close = difflib.get_close_matches(name, known, n=1)
    remedy = f"use an option's name from `swarm-node COMMAND --help`, such as {spelled('max_memory')}"
    if close:
        remedy = f"did you mean {spelled(close[0])}?"
    elif name == "home":
        remedy = f"choose the home with --home or {ENV_PREFIX}HOME"
    return UsageError(f"unknown {what}", remedy=remedy)
