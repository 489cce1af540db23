"""Every setting of a node: its default, its meaning, and the origin of its value.

One class declares the settings of the TOML file (`key = value`), the environment (`SWARM_KEY`) and the command line
(`--key`). The command line takes precedence over the environment, the environment over the file, and the file over the
default. Settings are resolved once, at the start. An unknown name is an error with a suggestion, because silently
ignoring a setting is worse than refusing it. An empty value on the command line or in the file is also an error. An
empty variable counts as unset, because compose files write it for an unset one.

Each value carries its origin, so that messages name the flag, variable or file line at fault.
`swarm_node.commands.command_options` declares the options.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, GetPydanticSchema
from pydantic_core import PydanticUndefined, core_schema
from swarm.network.discovery.peer_names import check_peer
from swarm.network.multiaddr import check_announce_addr, check_listen_addr, is_loopback
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError
from swarm_protocol.network_invitation import NetworkInvitation
from swarm_protocol.run_credentials import RunInvitation

from swarm_node.lending.lending import Window, parse_window
from swarm_node.settings import invitation_words, parsers

Take = Literal["any", "models", "runs", "nothing"]
Dtype = Literal["float32", "bfloat16", "float16", "int8", "int4"]

T = TypeVar("T")
Parsed = Annotated[T, GetPydanticSchema(lambda kind, _handler: core_schema.is_instance_schema(kind))]
"""A value of one of our classes, which its parser has made and checked. Without this annotation pydantic would inspect
the class at each start."""


class UsageError(ConfigError):
    """A value is missing or cannot be read. The exit code is the same as for an unknown flag."""


Value = str | bool | Sequence[str] | None
"""The value of one setting in a source, before parsing."""


@dataclass(frozen=True, slots=True)
class Given:
    """A value as it was written, and its origin: a flag, a variable, or a line of the file."""

    origin: str
    value: Value


@dataclass(frozen=True, slots=True)
class Setting:
    """How one field of Config is read. Without a `metavar` it is a switch. With `many` it may be repeated.

    `parse` takes text, and raises ConfigError, or ValueError with the end of a sentence. `example` is shown in remedies
    if the default is not a good example.
    """

    parse: Callable[[str], object]
    metavar: str
    many: bool = False
    example: str = ""
    about: str = ""


def _setting(
    default: object, parse: Callable[[str], object], metavar: str, *, many: bool = False, example: str = ""
) -> Any:
    """Return a field with its `Setting`. A default that is a function is called for each Config."""
    extra: Any = {"setting": Setting(parse, metavar, many, example)}
    if callable(default):
        return Field(default_factory=default, json_schema_extra=extra)
    return Field(default, json_schema_extra=extra)


def _switch(*, default: bool = False) -> Any:
    return _setting(default, parsers.parse_bool, "", example="true")


def default_home() -> Path:
    """Return the platform's directory for a node's data. Raises ConfigError for a user without a home directory."""
    data = os.environ.get("XDG_DATA_HOME")
    try:
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Application Support" / "swarm-node"
        return (Path(data) if data else Path.home() / ".local" / "share") / "swarm-node"
    except RuntimeError:
        raise ConfigError("this user has no home directory", remedy="name the node's directory with --home") from None


def _host_name() -> str:
    name = socket.gethostname().split(".")[0][: limits.MAX_NODE_NAME_CHARS]
    return name if name.isprintable() and name else "node"


class Config(BaseModel):
    """The settings of one node. `origins` says, by name, where each value that is not a default came from.

    The docstring below a field is its help on the command line.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    home: Path = _setting(default_home, parsers.parse_path, "DIR", example="~/swarm")
    """The node's directory, for its identity, control socket, cache, checkpoints and log. Default: swarm-node in this
    user's data directory, such as ~/.local/share/swarm-node."""
    name: str = _setting(_host_name, parsers.parse_node_name, "NAME", example="attic")
    """The node's display name. Default: this machine's host name."""
    network_id: str = _setting("swarm", parsers.parse_network_id, "ID")
    """Id of the network. Nodes of other networks are refused."""
    peers: tuple[str, ...] = _setting(
        (),
        check_peer,
        "ADDR…",
        many=True,
        example="/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN",
    )
    """Address of a peer to join through, as `seed` prints it, or a DNS name with peers' addresses, such as
    swarm.example.org. Not needed if the node remembers peers or finds some by mDNS."""
    invite: Parsed[NetworkInvitation] | None = _setting(
        None, invitation_words.parse_invite, "STRING|FILE", example="invitation"
    )
    """Invitation to a private network, as the owner's `swarm-node invite` printed it, or a file with it. After joining,
    a node keeps it in its home."""
    url: str = _setting("", parsers.parse_url, "URL", example="http://127.0.0.1:8000")
    """Read from the dashboard at this address, instead of from peers."""
    listen: tuple[str, ...] = _setting(
        ("/ip4/127.0.0.1/tcp/0",), check_listen_addr, "ADDR", many=True, example="/ip4/0.0.0.0/tcp/4001"
    )
    """Address to listen on. Port 0: any free port, another one at each start; 0.0.0.0, or :: for IPv6: all interfaces.
    Without this setting, a node that joins through a peer on another machine listens on /ip4/0.0.0.0/tcp/0, and also on
    /ip6/::/tcp/0 if this machine has a public IPv6 address or a peer's address is IPv6."""
    announce: tuple[str, ...] = _setting(
        (), check_announce_addr, "ADDR", many=True, example="/ip4/203.0.113.7/tcp/4001"
    )
    """Address to advertise to other nodes instead of the listen address."""
    mdns: bool = _switch(default=True)
    """Discover nodes on the local network by mDNS, and be discovered by them. Has no effect if the node listens only on
    loopback."""
    relay: Literal["auto", "use", "none"] = _setting("auto", parsers.one_of("auto", "use", "none"), "WHEN")
    """Be reachable through relays. auto: only while other nodes cannot connect to this one directly; once they can, it
    relays for others. use: always. none: never. With use and none, it does not relay for others."""
    relay_rate: int = _setting(12_500_000, parsers.parse_relay_rate, "RATE", example="100mbit")
    """Maximum rate at which this node relays for others; never more than half of max-upload and max-download."""
    run: Path | Parsed[parsers.RunId] | None = _setting(None, parsers.parse_run, "RUN", example="run.toml")
    """Train this run: its signed file, or its id. With an id, the file is fetched from a member of the run."""
    invitation: tuple[Parsed[RunInvitation], ...] = _setting(
        (), invitation_words.parse_run_word, "STRING|FILE", many=True, example="alice.invitation"
    )
    """Invitation to the run, as `run invite` printed it, or a member's vouch, as `run vouch` printed it; or a file with
    either. If the run requires several vouches, repeat the option."""
    then_serve: bool = _switch()
    """Serve the trained model after the run has finished."""
    model: Path | Parsed[parsers.HubId] | None = _setting(None, parsers.parse_model, "MODEL", example="~/models/story")
    """Serve blocks of this Hugging Face model: a directory, or OWNER/NAME[@REVISION] on a hub."""
    manifest: Path | None = _setting(None, parsers.parse_path, "FILE", example="story.manifest")
    """Check the model's files against this signed manifest of its publisher. Default: swarm-model.manifest in the
    model's directory, if it exists."""
    take: Take = _setting("any", parsers.one_of(*get_args(Take)), "WHAT")
    """Work to look for if neither --run nor --model is given: any, models, runs or nothing."""
    dtype: Dtype = _setting(
        "float32",
        parsers.one_of(*get_args(Dtype), synonyms={"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}),
        "DTYPE",
    )
    """Data type of the weights: float32, bfloat16, float16, int8 or int4. int8 and int4 compute in bfloat16. Servers
    with different data types give different answers."""
    blocks: tuple[int, int] | None = _setting(None, parsers.parse_span, "START:END", example="0:8")
    """Serve exactly the blocks START to END - 1, such as 0:8. Default: the node chooses them."""
    max_blocks: int = _setting(0, parsers.whole_number(0, 4096), "N", example="8")
    """Serve at most this many blocks; 0: no limit."""
    max_memory: int = _setting(0, parsers.parse_size, "SIZE", example="6GiB")
    """Maximum memory to use while serving, including the program itself, such as 6GiB; 0: most of the free memory."""
    max_upload: int = _setting(0, parsers.parse_rate_limit, "RATE", example="20mbit")
    """Maximum upload rate, such as 20mbit or 2.5MB/s; 0: no limit."""
    max_download: int = _setting(0, parsers.parse_rate_limit, "RATE", example="100mbit")
    """Maximum download rate, such as 100mbit; 0: no limit."""
    monthly_traffic: int = _setting(0, parsers.parse_monthly_traffic, "SIZE", example="500GB")
    """Traffic budget for a calendar month, sent and received, such as 500GB; 0: no limit. The node takes no new work
    after 98 % of it."""
    hours: tuple[Parsed[Window], ...] = _setting((), parse_window, "HH:MM-HH:MM", many=True, example="22:00-07:00")
    """Work only during these hours of the day, in local time, such as 22:00-07:00; separate several with commas.
    Default: always."""
    device: str = _setting("auto", parsers.one_of("auto", "cpu", "cuda", "mps"), "DEVICE")
    """Device to compute on: auto, cpu, cuda or mps."""
    threads: int = _setting(0, parsers.whole_number(0, 4096), "N", example="4")
    """CPU threads for computation; 0: one for each core."""
    probe: str = _setting("auto", parsers.one_of("auto", "fresh", "off"), "WHEN")
    """When to measure this machine's speed: auto (once), fresh (at each start) or off (never)."""
    keep_checkpoints: int = _setting(2, parsers.whole_number(1, 1000), "N")
    """Number of recent checkpoints to keep for each run."""
    keep_every: int = _setting(0, parsers.whole_number(0, 10_000_000), "N", example="100")
    """Also keep the checkpoint of every N-th outer step permanently, for `run export`; 0: none."""
    data: Path | None = _setting(None, parsers.parse_path, "PATH", example="~/books")
    """Training data, for a run whose members use their own: a file, or a folder of text, .jsonl, .parquet or .arrow
    files. Tokens are cached in ~/.cache/swarm/tokens (XDG_CACHE_HOME) for all homes of this user."""
    tokenizer: Path | None = _setting(None, parsers.parse_path, "PATH", example="~/models/story")
    """Tokenizer, for a run whose members use their own copy: a tokenizer.json, or its directory."""
    start: Path | None = _setting(None, parsers.parse_path, "DIR", example="~/models/story")
    """Local copy of the checkpoint that the run starts from: a Hugging Face model directory."""
    devices: tuple[str, ...] = _setting((), parsers.parse_device, "DEVICES", many=True, example="cuda:0,cuda:1")
    """Train on several devices as one member, such as cuda:0,cuda:1, or cpu,cpu for two processes on the CPU."""
    micro_batch: int = _setting(0, parsers.whole_number(0, 1 << 16), "N", example="1")
    """Samples per forward and backward pass in training; 0: the whole batch."""
    autocast: bool = _switch()
    """Train with mixed precision: matrix products in bfloat16, weights in float32. Slower on a CPU without instructions
    for bfloat16."""
    checkpoint_activations: bool = _switch()
    """Train with activation checkpointing: less memory, more computation."""
    compile: bool = _switch()
    """Compile the model with torch.compile before training; worthwhile for long runs."""
    tensorboard: Path | None = _setting(None, parsers.parse_path, "DIR", example="~/curves")
    """Write the run's metrics as TensorBoard event files to this directory, in a folder for each run and node."""
    host: str = _setting("127.0.0.1", str, "HOST")
    """Address for the HTTP server to listen on; 0.0.0.0: all interfaces."""
    port: int = _setting(8000, parsers.whole_number(0, 65535), "PORT")
    """Port for the HTTP server to listen on; 0: any free port."""
    allowed_hosts: tuple[str, ...] = _setting(
        (), parsers.parse_host_name, "NAME…", many=True, example="swarm.example.org"
    )
    """Host name that the HTTP server accepts in requests, for example behind a proxy. *.NAME: all names directly below
    NAME; *: any name. IP addresses and names without a dot are always accepted, other names are refused."""
    trusted_proxies: tuple[str, ...] = _setting((), parsers.parse_proxy, "ADDR…", many=True, example="127.0.0.1")
    """Address or network of a trusted proxy in front of the HTTP server. The client's address is taken from its
    X-Forwarded-For or Forwarded header. From other senders these headers are ignored."""
    allowed_origins: tuple[str, ...] = _setting(
        (), parsers.parse_origin, "URL…", many=True, example="https://chat.example.org"
    )
    """Origin of web pages that may use the gateway from a browser, such as http://localhost:5173; *: any page, which
    requires API keys or --open-to-all. By default, browsers refuse pages of other origins."""
    api_keys: Path | None = _setting(None, parsers.parse_path, "FILE", example="keys.txt")
    """Require API keys from this file. Each line is `name key [requests_per_min] [tokens_per_min]`. The file is
    reloaded when it changes."""
    open_to_all: bool = _switch()
    """Accept requests from other machines without an API key."""
    requests_per_min: int | None = _setting(None, parsers.whole_number(0, 10**9), "N", example="60")
    """Maximum requests per minute for each key without its own limit, or for each client address if no keys are
    required; 0: no limit. Default: 600 if the gateway is open to other machines without a key, else 0."""
    tokens_per_min: int = _setting(0, parsers.whole_number(0, 10**9), "N", example="100000")
    """Maximum tokens per minute, prompts and answers together, for each key or client address as above; 0: no limit."""
    pin_model: tuple[Parsed[parsers.ModelPin], ...] = _setting(
        (), parsers.parse_pin, "MODEL@REVISION", many=True, example="story@1a2b3c4d5e6f"
    )
    """Use only this revision of a model, even if others are served under the same name; see `swarm-node models`."""
    publisher: tuple[str, ...] = _setting(
        (),
        parsers.parse_publisher_pin,
        "[MODEL=]PEER_ID",
        many=True,
        example="story=12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN",
    )
    """Use a model only if this publisher signed it; without MODEL, applies to every model. Default: for each name, the
    publisher of the model that was used first."""
    spot_check: float = _setting(0.01, parsers.number(0, 1), "SHARE", example="0.02")
    """Share of answers that other servers compute again afterwards, to check them; 0: none."""
    text_at_home: tuple[Parsed[parsers.KeptSource], ...] = _setting(
        (), parsers.parse_kept, "[MODEL=]SOURCE", many=True, example="story=~/models/story"
    )
    """Keep the text of requests to this model on this machine: run its first and last blocks here, and let servers run
    the others. SOURCE is a directory, or OWNER/NAME[@REVISION] on a hub. Requests to other models are then refused.
    Without MODEL, the model has the name of its source. The guide "Keep text at home" says what this hides, and what it
    does not."""
    blocks_at_home: int = _setting(1, parsers.whole_number(1, 4096), "N", example="2")
    """Number of first blocks to run here with --text-at-home. More blocks make it costlier for servers to reconstruct
    the text."""
    dashboard: bool = _switch(default=True)
    """Serve the dashboard at /, to everyone who can reach the gateway."""
    history: str = _setting("", str, "FILE|URL", example="postgresql://user@host/swarm")
    """Storage of the dashboard's history: a file, or a database such as postgresql://user@host/swarm. Default:
    history.sqlite in the home."""
    checkpoints: Path | None = _setting(None, parsers.parse_path, "DIR", example="~/swarm/checkpoints")
    """Let visitors of the dashboard download checkpoints from this directory, which has a folder for each run, named
    after the run's id."""
    tethered: bool = _switch()
    """Leave at once when standard input closes, as it does when the parent process ends."""
    drain_s: float = _setting(30.0, parsers.length_of_time(0, 3600, "such as 30s or 5m", bare_seconds=True), "TIME")
    """Maximum time to finish work in flight when the node leaves, such as 30s or 5m; 0: none. A number alone means
    seconds."""
    metrics: Parsed[parsers.Endpoint] | None = _setting(
        None, parsers.parse_endpoint, "HOST:PORT", example="127.0.0.1:9401"
    )
    """Serve Prometheus metrics at this address, under /metrics; port 0: any free port. Default: no metrics."""
    otlp: str = _setting("", parsers.parse_url, "URL", example="http://127.0.0.1:4318")
    """Send traces of requests and rounds to this OpenTelemetry collector by OTLP over HTTP."""
    log_format: str = _setting("human", parsers.one_of("human", "json"), "FORMAT")
    """Format of the log: human or json."""
    log_level: str = _setting("info", parsers.one_of("debug", "info", "warning", "error"), "LEVEL")
    """Minimum log level: debug, info, warning or error."""
    origins: Mapping[str, str] = Field(default_factory=dict, repr=False)

    @property
    def finds_local_peers(self) -> bool:
        """Return whether the node looks for others in its local network."""
        return self.mdns and not all(map(is_loopback, self.listen))

    def origin(self, name: str) -> str:
        """Return the origin of the value of `name`, for messages."""
        return self.origins.get(name, "the default")


SETTINGS: Mapping[str, Setting] = {
    name: replace(field.json_schema_extra["setting"], about=" ".join((field.description or "").split()))  # type: ignore[index, type-var, misc]
    for name, field in Config.model_fields.items()
    if field.json_schema_extra
}


def default_text(name: str) -> str:
    """Return the default as the help shows it, or "" for no default and for a switch that is off."""
    default = Config.model_fields[name].default
    if default in ((), None, "", PydanticUndefined) or default is False:
        return ""
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    if SETTINGS[name].metavar == "RATE" and default:  # stored in bytes per second, shown in the unit that users write
        return f"{default * 8 / 1e6:g}mbit"
    if SETTINGS[name].metavar == "TIME":
        return parsers.written_time(default)
    if default is True:
        return "true"
    return f"{default:g}" if isinstance(default, float) else str(default)
