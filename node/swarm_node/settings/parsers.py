"""Turns the text of a flag, a TOML line or an environment variable into a typed value.

Each parser takes text and returns a value, or raises ValueError with the end of a sentence ("is not …"). Only ASCII
digits count, since readers could mistake others. `swarm_node.settings.config` lists the settings.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from swarm_protocol import limits
from swarm_protocol.checks import check_text
from swarm_protocol.version import check_network_id

_SIZE_UNITS = {"": 1, "B": 1}
_SIZE_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_BITS_PER_S = {"KBIT": 10**3, "MBIT": 10**6, "GBIT": 10**9}
_BYTES_PER_S = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_RATE_UNITS = {unit: bits / 8 for unit, bits in _BITS_PER_S.items()} | {
    f"{unit}/S": float(num_bytes) for unit, num_bytes in _BYTES_PER_S.items()
}
MIN_BYTES_PER_S, MAX_BYTES_PER_S = 12_500, 10**12 // 8
"""0.1 Mbit/s (`traffic.MIN_BYTES_PER_S`) to 1 Tbit/s."""
MIN_MONTHLY_BYTES, MAX_MONTHLY_BYTES = 10**9, 10**18
"""An idle node needs part of the minimum for its records. No link reaches the maximum."""
_MAX_SIZE_CHARS = 20
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s?([a-z]*)", re.ASCII)
_DURATION_UNITS_S: Mapping[str, float] = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
MAX_DURATION_S = 366 * 86400.0
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+(?:/s)?)", re.IGNORECASE | re.ASCII)


def parse_node_name(text: str) -> str:
    """Parse the node's display name."""
    try:
        return check_text(text, "name", max_chars=limits.MAX_NODE_NAME_CHARS, empty=False)
    except ValueError:
        raise ValueError(f"is not a name of 1 to {limits.MAX_NODE_NAME_CHARS} printable characters") from None


def parse_network_id(text: str) -> str:
    try:
        return check_network_id(text)
    except ValueError as error:
        raise ValueError("is not a network id: letters, digits and ._:@+-") from error


def parse_path(text: str) -> Path:
    if not text or "\0" in text:
        raise ValueError("is not a path")
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:
        raise ValueError("is not a path: there is no user of that name") from None


@dataclass(frozen=True, slots=True)
class HubId:
    """A model on a Hugging Face hub, at a branch, tag or commit."""

    model_id: str
    revision: str = "main"

    @property
    def name(self) -> str:
        """The last part of the id."""
        return self.model_id.rpartition("/")[2]

    def __str__(self) -> str:
        return self.model_id if self.revision == "main" else f"{self.model_id}@{self.revision}"


@dataclass(frozen=True, slots=True)
class RunId:
    """The id of a run. The run's signed file comes from its members."""

    run_id: str

    def __str__(self) -> str:
        return self.run_id


RUN_ID_FORM = "the run's id, which is its name and 12 hexadecimal digits, such as my-run-0123456789ab"
_RUN_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}-[0-9a-f]{12}")


def is_run_id(text: str) -> bool:
    return _RUN_ID.fullmatch(text) is not None


def parse_run(text: str) -> Path | RunId:
    """Return the run's id, unless a file of that name exists. Any other text is a path."""
    path = parse_path(text)
    return RunId(text) if is_run_id(text) and not path.exists() else path


_HUB_ID = re.compile(r"([A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@([A-Za-z0-9_][\w./-]*))?", re.ASCII)


def parse_model(text: str) -> Path | HubId:
    """Return a hub model for OWNER/NAME[@REVISION], unless a directory of that name exists. Any other text is a
    directory."""
    path = parse_path(text)
    match = _HUB_ID.fullmatch(text)
    return path if match is None or path.exists() else HubId(match[1], match[2] or "main")


@dataclass(frozen=True, slots=True)
class KeptSource:
    """The served name of a model, and the source of the files that a client keeps at home."""

    model: str
    source: Path | HubId

    def __str__(self) -> str:
        return f"{self.model}={self.source}"


def parse_kept(text: str) -> KeptSource:
    """Parse `[MODEL=]SOURCE`. Without MODEL, the model has the name of its source.

    Text that begins like a path is a SOURCE even if it contains "=", since no model's name begins so.
    """
    name, equals, source = ("", "", "") if text.startswith(("/", ".", "~")) else text.partition("=")
    found = parse_model(source if equals else text)
    if equals and not name:
        raise ValueError("is not a directory or OWNER/NAME on a hub, nor MODEL= and one of them")
    return KeptSource(name if equals else found.name, found)


@dataclass(frozen=True, slots=True)
class ModelPin:
    """The only revision of a model to use, by the beginning of its digest."""

    model: str
    revision: str

    def __str__(self) -> str:
        return f"{self.model}@{self.revision}"


def parse_pin(text: str) -> ModelPin:
    from swarm.router.revisions import MIN_PIN_CHARS, split_pin  # noqa: PLC0415 - numpy, which few commands need

    name, revision = split_pin(text)
    if not revision:
        raise ValueError(f"is not NAME@REVISION, with {MIN_PIN_CHARS} or more of the revision's digits")
    return ModelPin(name, revision)


def parse_publisher_pin(text: str) -> str:
    """Check `[MODEL=]PEER_ID` and return it. Raises ConfigError."""
    from swarm.client.publishers import parse_publisher  # noqa: PLC0415 - the client, which few commands need

    parse_publisher(text)
    return text


def parse_device(text: str) -> str:
    """Parse a torch device. Whether it exists is checked when training begins."""
    if not re.fullmatch(r"cpu|mps|cuda(?::\d{1,3})?", text, re.ASCII):
        raise ValueError("is not cpu, mps, cuda or cuda:N")
    return text


def parse_bool(text: str) -> bool:
    if text.lower() in {"1", "true", "yes", "on"}:
        return True
    if text.lower() in {"0", "false", "no", "off"}:
        return False
    raise ValueError("is neither true nor false")


def parse_size(text: str) -> int:
    """Parse `6GiB`, `500 MB` or plain bytes; 0 means no limit."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or len(match[1]) > _MAX_SIZE_CHARS or match[2].upper() not in _SIZE_UNITS:
        raise ValueError("is not a size such as 6GiB or 500MB")
    return int(float(match[1]) * _SIZE_UNITS[match[2].upper()])


def parse_rate_limit(text: str) -> int:
    """Parse `20mbit` or `2.5MB/s` as bytes per second; 0 means no limit."""
    if text.strip() == "0":
        return 0
    match = _RATE.fullmatch(text.strip())
    if match is None or len(match[1]) > _MAX_SIZE_CHARS or match[2].upper() not in _RATE_UNITS:
        raise ValueError("is not a rate such as 20mbit, 500kbit or 2.5MB/s")
    bytes_per_s = float(match[1]) * _RATE_UNITS[match[2].upper()]
    if bytes_per_s and not MIN_BYTES_PER_S <= bytes_per_s <= MAX_BYTES_PER_S:
        raise ValueError("is not a rate from 0.1mbit to 1000gbit, nor 0 for no limit")
    return int(bytes_per_s)


def parse_relay_rate(text: str) -> int:
    """Parse a rate like `parse_rate_limit`, but refuse 0, with which an owner might mean to relay nothing."""
    bytes_per_s = parse_rate_limit(text)
    if not bytes_per_s:
        raise ValueError("is not a rate from 0.1mbit to 1000gbit")
    return bytes_per_s


def parse_monthly_traffic(text: str) -> int:
    """Parse the bytes of a month, such as `500GB`; 0 means no limit."""
    num_bytes = parse_size(text)
    if num_bytes and not MIN_MONTHLY_BYTES <= num_bytes <= MAX_MONTHLY_BYTES:
        raise ValueError("is not the traffic of a month from 1GB upwards, nor 0 for no limit")
    return num_bytes


def length_of_time(low_s: float, high_s: float, example: str, *, bare_seconds: bool = False) -> Callable[[str], float]:
    """Return a parser of durations from `low_s` to `high_s` seconds. It returns seconds.

    A duration is a number and a unit: `90s`, `5m` or `5min`, `12h`, `30d`. With `bare_seconds`, a number alone means
    seconds.
    """
    units = {**_DURATION_UNITS_S, "": 1.0} if bare_seconds else _DURATION_UNITS_S

    def parse(text: str) -> float:
        match = _DURATION.fullmatch(text.strip())
        seconds = float(match[1]) * units[match[2]] if match and match[2] in units else -1.0
        if not low_s <= seconds <= high_s:
            raise ValueError(f"is not a duration from {written_time(low_s)} to {written_time(high_s)}, {example}")
        return seconds

    return parse


def written_time(seconds: float) -> str:
    """Return a duration in the form that `length_of_time` reads, in the largest unit that gives a whole number."""
    fitting = [unit for unit in ("d", "h", "m") if seconds and seconds % _DURATION_UNITS_S[unit] == 0]
    unit = fitting[0] if fitting else "s"
    return f"{seconds / _DURATION_UNITS_S[unit]:g}{unit}"


def parse_span(text: str) -> tuple[int, int]:
    """Parse `A:B`, the half-open span of blocks from A up to but not including B."""
    match = re.fullmatch(r"(\d{1,6}):(\d{1,6})", text.strip(), re.ASCII)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError("is not a span START:END with START below END, such as 0:8")
    return int(match[1]), int(match[2])


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """Return a parser of integers in `[low, high]`."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,12}", text.strip(), re.ASCII) or not low <= int(text) <= high:
            raise ValueError(f"is not a whole number from {low} to {high}")
        return int(text)

    return parse


def number(low: float, high: float) -> Callable[[str], float]:
    """Return a parser of numbers in `[low, high]`."""

    def parse(text: str) -> float:
        try:
            value = float(text) if text.isascii() and "_" not in text else math.nan
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise ValueError(f"is not a number from {low:g} to {high:g}")
        return value

    return parse


_NO_SYNONYMS: Mapping[str, str] = {}


def one_of(*choices: str, synonyms: Mapping[str, str] = _NO_SYNONYMS) -> Callable[[str], str]:
    """Return a parser for a fixed set of words, some of which have synonyms."""

    def parse(text: str) -> str:
        chosen = synonyms.get(text, text)
        if chosen not in choices:
            raise ValueError(f"is not one of {', '.join(choices)}")
        return chosen

    return parse


def parse_url(text: str) -> str:
    """Parse the address of a web page, such as a dashboard, without trailing slashes."""
    try:
        found = urlsplit(text)
        is_one = found.scheme in {"http", "https"} and bool(found.hostname) and found.port != 0 and text.isprintable()
    except ValueError:  # an invalid port
        is_one = False
    if not is_one:
        raise ValueError("is not an address such as http://127.0.0.1:8000")
    return text.rstrip("/")


_HOST_NAME = re.compile(r"\*|(?:\*\.)?[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?")


def parse_host_name(text: str) -> str:
    """Parse a host name, `*.NAME` for all names directly below NAME, or `*` for any name."""
    name = text.strip().lower()
    if not _HOST_NAME.fullmatch(name) or len(name) > 255:
        raise ValueError("is not a host name, without a scheme and a port")
    return name


def parse_origin(text: str) -> str:
    """Parse the origin of web pages as browsers write it, or `*` for any. A default port is left out."""
    if text == "*":
        return text
    found = urlsplit(parse_url(text).lower())
    if found.path or found.query or found.fragment or found.username is not None:
        raise ValueError("is not an origin such as https://chat.example.org, without a path")
    default_port = {"http": ":80", "https": ":443"}[found.scheme]
    return f"{found.scheme}://{found.netloc.removesuffix(default_port)}"


def parse_proxy(text: str) -> str:
    """Parse an address, or a network such as 10.0.0.0/8."""
    try:
        return str(ipaddress.ip_network(text, strict=False))
    except ValueError:
        raise ValueError("is not an address or network") from None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address to listen on. Port 0 means any free port."""

    host: str
    port: int


_ENDPOINT = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([A-Za-z0-9.-]+)):(\d{1,5})", re.ASCII)


def parse_endpoint(text: str) -> Endpoint:
    """Parse `HOST:PORT`, with an IPv6 address in brackets."""
    match = _ENDPOINT.fullmatch(text.strip())
    if match is None or int(match[3]) > 65535:
        raise ValueError("is not HOST:PORT")
    return Endpoint(match[1] or match[2], int(match[3]))
