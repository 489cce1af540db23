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

from swarm.network.multiaddr import check_announce_addr, check_listen_addr
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError

from swarm_node.settings.parsers import (
    Endpoint,
    HubId,
    Pin,
    RunId,
    one_of,
    parse_bool,
    parse_device,
    parse_endpoint,
    parse_host_name,
    parse_model,
    parse_network_id,
    parse_node_name,
    parse_path,
    parse_peer,
    parse_pin,
    parse_proxy,
    parse_run,
    parse_size,
    parse_span,
    parse_url,
    seconds,
    whole_number,
)


@dataclass(frozen=True, slots=True)
class Setting:
    """How one field of Config is read and explained. Without a `metavar` it is a switch; `many` may be repeated.

    `example` is what to write where the default would be no example.
    """

    parse: Callable[[str], object]
    metavar: str
    about: str
    many: bool = False
    example: str = ""


SETTINGS: Mapping[str, Setting] = {
    "home": Setting(
        parse_path, "DIR", "The node's directory: identity, control socket, cache, checkpoints, log.", example="~/swarm"
    ),
    "name": Setting(parse_node_name, "NAME", "Name that others see. Default: this machine's.", example="attic"),
    "network_id": Setting(parse_network_id, "ID", "Network to be part of; others are not spoken to."),
    "peers": Setting(
        parse_peer,
        "ADDR…",
        "Address of a peer to join through, as `seed` prints it. Not needed where peers are remembered.",
        many=True,
    ),
    "url": Setting(parse_url, "URL", "Dashboard to read from, instead of peers.", example="http://127.0.0.1:8000"),
    "listen": Setting(
        check_listen_addr, "ADDR", "Address to listen on; port 0: any free one; 0.0.0.0: for all to reach.", many=True
    ),
    "announce": Setting(
        check_announce_addr, "ADDR", "Address to tell others instead of the one listened on.", many=True
    ),
    "relay": Setting(
        one_of("auto", "use", "none"), "WHEN", "Be reached through a seed: auto (unless all is local), use or none."
    ),
    "run": Setting(
        parse_run,
        "RUN",
        "Train this run: its signed file, or its id, for which its members give the file.",
        example="run.toml",
    ),
    "then_serve": Setting(parse_bool, "", "Once the run is finished, serve its result.", example="true"),
    "model": Setting(
        parse_model,
        "MODEL",
        "Serve blocks of this Hugging Face model: a directory, or OWNER/NAME[@REVISION] on a hub.",
        example="~/models/story",
    ),
    "take": Setting(
        one_of("any", "models", "runs", "nothing"),
        "WHAT",
        "What to help with where neither a run nor a model is named: any, models, runs or nothing.",
    ),
    "dtype": Setting(
        one_of(
            *("float32", "bfloat16", "float16", "int8", "int4"),
            synonyms={"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"},
        ),
        "DTYPE",
        "Weights as they are held: float32, "
        "bfloat16, float16, or int8 or int4 that compute in bfloat16. Servers of different ones answer differently.",
    ),
    "blocks": Setting(parse_span, "START:END", "Serve exactly this half-open span of blocks.", example="0:8"),
    "max_blocks": Setting(whole_number(0, 4096), "N", "Serve at most so many blocks; 0: no limit.", example="8"),
    "max_memory": Setting(
        parse_size,
        "SIZE",
        "At most this much memory while it serves, the program's own included; 0: most of what is free.",
        example="6GiB",
    ),
    "device": Setting(one_of("auto", "cpu", "cuda", "mps"), "DEVICE", "Where to compute: auto, cpu, cuda or mps."),
    "threads": Setting(whole_number(0, 4096), "N", "CPU threads to compute with; 0: all cores.", example="4"),
    "probe": Setting(one_of("auto", "fresh", "off"), "WHEN", "Measure speed: auto (once), fresh or off."),
    "keep_checkpoints": Setting(whole_number(1, 1000), "N", "Checkpoints to keep of each run."),
    "keep_every": Setting(
        whole_number(0, 10_000_000),
        "N",
        "Keep the checkpoint of every N-th outer step for good, for run export; 0: of none.",
        example="100",
    ),
    "data": Setting(
        parse_path,
        "PATH",
        "What to train on where the run leaves that to its members: a file, or a folder of text, .jsonl, .parquet "
        "or .arrow files. Its tokens are kept in ~/.cache/swarm/tokens (XDG_CACHE_HOME) for all homes of this user.",
        example="~/books",
    ),
    "tokenizer": Setting(
        parse_path,
        "PATH",
        "The tokenizer of a run that leaves that to its members: a tokenizer.json, or its directory.",
        example="~/models/story",
    ),
    "start": Setting(
        parse_path,
        "DIR",
        "This machine's copy of the checkpoint that the run starts from: a Hugging Face model directory.",
        example="~/models/story",
    ),
    "devices": Setting(
        parse_device,
        "DEVICES",
        "Train on these together, as one member: cuda:0,cuda:1, or cpu for each process that is wanted.",
        many=True,
        example="cuda:0,cuda:1",
    ),
    "micro_batch": Setting(
        whole_number(0, 1 << 16),
        "N",
        "Samples that training computes at a time; 0: a whole batch.",
        example="1",
    ),
    "autocast": Setting(parse_bool, "", "Train with matrix products in bfloat16; weights stay fp32.", example="true"),
    "checkpoint_activations": Setting(
        parse_bool, "", "Train in less memory: compute activations again for the gradient.", example="true"
    ),
    "compile": Setting(parse_bool, "", "Train a model that torch has compiled; pays in long runs.", example="true"),
    "tensorboard": Setting(
        parse_path,
        "DIR",
        "Write the run's curves there as TensorBoard's event files: in a folder for each run and node.",
        example="~/curves",
    ),
    "host": Setting(str, "HOST", "Address for HTTP to listen on; 0.0.0.0: for all to reach."),
    "port": Setting(whole_number(0, 65535), "PORT", "Port for HTTP to listen on; 0: any free one."),
    "allowed_hosts": Setting(
        parse_host_name,
        "NAME…",
        "Public name that HTTP is asked for by, as through a proxy; *.NAME: those right below it; *: any. Others than "
        "these, addresses and names without a dot are refused.",
        many=True,
        example="swarm.example.org",
    ),
    "trusted_proxies": Setting(
        parse_proxy,
        "ADDR…",
        "Address or network of a proxy in front, whose X-Forwarded-For or Forwarded header says who asks. From others "
        "these headers are ignored.",
        many=True,
        example="127.0.0.1",
    ),
    "api_keys": Setting(
        parse_path,
        "FILE",
        "Ask for keys: lines of `name key [requests_per_min] [tokens_per_min]`, read again when they change.",
        example="keys.txt",
    ),
    "open_to_all": Setting(parse_bool, "", "Let others than this machine in without a key.", example="true"),
    "requests_per_min": Setting(
        whole_number(0, 10**9),
        "N",
        "Requests a minute for a key without its own, or for each address; 0: no limit. Default: 600 where others "
        "come in without a key.",
        example="60",
    ),
    "tokens_per_min": Setting(
        whole_number(0, 10**9), "N", "The same for tokens, of prompts and answers; 0: no limit.", example="100000"
    ),
    "pin_model": Setting(
        parse_pin,
        "MODEL@REVISION",
        "Use only that revision of a model, whatever else is served under its name; as `swarm-node models` shows it.",
        many=True,
        example="story@1a2b3c4d5e6f",
    ),
    "dashboard": Setting(parse_bool, "", "Show the network at /, to whoever reaches the gateway.", example="true"),
    "history": Setting(
        str,
        "FILE|URL",
        "What the dashboard remembers in: a file, or a database such as postgresql+pg8000://user@host/swarm. Default: "
        "history.sqlite in the home.",
        example="postgresql+pg8000://user@host/swarm",
    ),
    "checkpoints": Setting(
        parse_path,
        "DIR",
        "Let visitors of the dashboard download what lies here, in a folder for each run, named by its id.",
        example="~/swarm/checkpoints",
    ),
    "tethered": Setting(
        parse_bool, "", "Leave at once when standard input ends: whoever started this node is gone.", example="true"
    ),
    "drain_s": Setting(seconds(0, 3600), "SECONDS", "Time that work in flight gets to finish when leaving."),
    "metrics": Setting(
        parse_endpoint,
        "HOST:PORT",
        "Answer Prometheus there, under /metrics; port 0: any free one. Default: nothing listens.",
        example="127.0.0.1:9401",
    ),
    "otlp": Setting(
        parse_url,
        "URL",
        "Send traces of requests and rounds to this OpenTelemetry collector, by OTLP over HTTP.",
        example="http://127.0.0.1:4318",
    ),
    "log_format": Setting(one_of("human", "json"), "FORMAT", "Log lines: human or json."),
    "log_level": Setting(one_of("debug", "info", "warning", "error"), "LEVEL", "Least severe log lines that are kept."),
}


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
