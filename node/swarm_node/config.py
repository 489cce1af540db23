"""Every setting of a node: its default, its meaning, and where its value came from.

One table serves the TOML file (`key = value`), the environment (`SWARM_KEY`) and the command line (`--key`). Later
ones win, in this order, and the result is resolved once, at start. A name that nothing knows is an error with a
suggestion, because a setting that is silently ignored is worse than none.
"""

from __future__ import annotations

import difflib
import os
import socket
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from swarm_protocol import limits
from swarm_protocol.errors import ConfigError

from swarm_node.setting_table import SETTINGS
from swarm_node.settings import Endpoint, HubId, Pin, RunId

ENV_PREFIX = "SWARM_"
MAX_TOLD_CHARS = 120
"""Of a setting that is refused: a message stays a line."""

Value = str | bool | Sequence[str] | None
"""What a source gives for one setting, before it is parsed."""


def default_home() -> Path:
    """Where a node lives if nobody says otherwise. Raises ConfigError for a user who has no home directory."""
    data = os.environ.get("XDG_DATA_HOME")
    try:
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Application Support" / "swarm-node"
        return (Path(data) if data else Path.home() / ".local" / "share") / "swarm-node"
    except RuntimeError:
        raise ConfigError("this user has no home directory", remedy="choose where the node lives with --home") from None


def _host_name() -> str:
    name = socket.gethostname().split(".")[0][: limits.MAX_NODE_NAME_CHARS]
    return name if name.isprintable() and name else "node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What a node was told; what each field means is in SETTINGS. `origins` says, by name, where each value that is
    not a default came from."""

    home: Path
    name: str
    network_id: str = "swarm"
    peers: tuple[str, ...] = ()
    url: str = ""
    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    announce: tuple[str, ...] = ()
    relay: str = "auto"
    run: Path | RunId | None = None
    then_serve: bool = False
    model: Path | HubId | None = None
    take: Literal["any", "models", "runs", "nothing"] = "any"
    dtype: Literal["float32", "bfloat16", "float16", "int8", "int4"] = "float32"
    blocks: tuple[int, int] | None = None
    max_blocks: int = 0
    max_memory: int = 0
    device: str = "auto"
    threads: int = 0
    probe: str = "auto"
    keep_checkpoints: int = 2
    keep_every: int = 0
    data: Path | None = None
    tokenizer: Path | None = None
    start: Path | None = None
    devices: tuple[str, ...] = ()
    micro_batch: int = 0
    autocast: bool = False
    checkpoint_activations: bool = False
    compile: bool = False
    tensorboard: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    allowed_hosts: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
    api_keys: Path | None = None
    open_to_all: bool = False
    requests_per_min: int | None = None
    tokens_per_min: int = 0
    pin_model: tuple[Pin, ...] = ()
    dashboard: bool = True
    history: str = ""
    checkpoints: Path | None = None
    tethered: bool = False
    drain_s: float = 30.0
    metrics: Endpoint | None = None
    otlp: str = ""
    log_format: str = "human"
    log_level: str = "info"
    origins: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def origin(self, name: str) -> str:
        """Where the value of `name` came from, for messages."""
        return self.origins.get(name, "the default")


_DEFAULTS: Mapping[str, object] = {item.name: item.default for item in fields(Config)}


def resolve(flags: Mapping[str, Value], *, env: Mapping[str, str] | None = None, file: Path | None = None) -> Config:
    """Defaults, then the file, then the environment, then `flags` (None: not given).

    The file is `file`, or HOME/config.toml if there is one. Raises ConfigError, which names the source at fault.
    """
    env = os.environ if env is None else env
    sources = [_from_env(env), _from_flags(flags)]
    given = _merge(sources)
    home = _parse_home(given)
    path = file or (Path(env["SWARM_CONFIG"]) if env.get("SWARM_CONFIG") else None)
    given = _merge([_from_file(path or home / "config.toml", required=path is not None), *sources])
    values = {name: _parse(name, origin, value) for name, (origin, value) in given.items()}
    values |= {"home": home, "name": values.get("name") or _host_name()}
    return Config(**values, origins={name: origin for name, (origin, _) in given.items()})


def resolve_home(flags: Mapping[str, Value], *, env: Mapping[str, str] | None = None) -> Path:
    """Where the node lives, whatever its file says by now: a daemon can be ended, too, that could not start any more.

    Raises ConfigError for a home that cannot be, and for unknown variables.
    """
    return _parse_home(_merge([_from_env(os.environ if env is None else env), _from_flags(flags)]))


def _parse_home(given: _Given) -> Path:
    home: Path = _parse("home", *given["home"]) if "home" in given else default_home()
    return home


_Given = dict[str, tuple[str, Value]]  # setting -> (where it was given, what was given)


def _merge(sources: Iterable[_Given]) -> _Given:
    return {name: given for source in sources for name, given in source.items()}


def _from_flags(flags: Mapping[str, Value]) -> _Given:
    return {name: ("--" + name.replace("_", "-"), value) for name, value in flags.items() if value is not None}


def _from_env(env: Mapping[str, str]) -> _Given:
    given: _Given = {}
    for variable in sorted(env):
        if not variable.startswith(ENV_PREFIX) or variable == "SWARM_CONFIG":
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name not in SETTINGS or variable != variable.upper():
            raise _unknown(
                f"environment variable {variable}", name, tuple(SETTINGS), lambda at: ENV_PREFIX + at.upper()
            )
        value = env[variable]
        given[name] = (variable, _split(value) if SETTINGS[name].many else value)
    return given


def _from_file(path: Path, *, required: bool) -> _Given:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        if required:
            raise ConfigError(f"there is no config file {path}", remedy="check --config, or leave it out") from None
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}", remedy="fix it or move it away") from error
    given: _Given = {}
    for name, value in table.items():
        if name not in SETTINGS or name == "home":
            known = [setting for setting in SETTINGS if setting != "home"]
            raise _unknown(f"setting {name!r} in {path}", name, known)
        given[name] = (f"{name} in {path}", _toml_value(name, path, value))
    return given


def _toml_value(name: str, path: Path, value: object) -> Value:
    many = SETTINGS[name].many
    if isinstance(value, list) and many and all(isinstance(item, str) for item in value):
        return value
    if isinstance(value, str | int | float) and not many:
        return value if isinstance(value, bool) else str(value)
    wanted, form = ("a list of strings", '["…"]') if many else ("a single value", '"…"')
    raise ConfigError(f"{name} in {path} is not {wanted}", remedy=f"write {name} = {form}")


def _split(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _parse(name: str, origin: str, value: Value) -> Any:
    setting = SETTINGS[name]
    texts = [str(value)] if isinstance(value, str | bool) else list(value or ())
    if setting.many:
        texts = [part for text in texts for part in _split(text)]
    parsed = []
    for text in texts:
        try:
            parsed.append(setting.parse(text))
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error.message}", remedy=error.remedy) from error
        except ValueError as error:
            told = text if len(text) <= MAX_TOLD_CHARS else f"{text[:MAX_TOLD_CHARS]}…"
            raise ConfigError(f"{origin}: {told!r} {error}", remedy=f"write {_spelled(name, origin)}") from error
    return tuple(parsed) if setting.many else parsed[0]


def _spelled(name: str, origin: str) -> str:
    """An example of the setting, as it is written where it was given."""
    example = SETTINGS[name].example or default_text(name)
    if origin.startswith("--"):
        return f"{origin} {example}"
    if origin.startswith(ENV_PREFIX):
        return f"{origin}={example}"
    return f"{name} = {example}" if example.isdigit() or example == "true" else f'{name} = "{example}"'


def _unknown(what: str, name: str, known: Sequence[str], spelled: Callable[[str], str] = str) -> ConfigError:
    close = difflib.get_close_matches(name, known, n=1)
    remedy = f"did you mean {spelled(close[0])}?" if close else f"known are {', '.join(map(spelled, known))}"
    return ConfigError(f"unknown {what}", remedy=remedy)


def default_text(name: str) -> str:
    """The default as help shows it, empty where that says nothing."""
    default = _DEFAULTS[name]
    if default in ((), None, "", 0, MISSING):
        return ""
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)
