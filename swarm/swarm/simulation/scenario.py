"""Defines the scenario of a simulation: its values, their bounds, and how they are read from a TOML table. Pure.

A scenario describes classes of nodes, regions with the latencies between them, kinds of NAT, churn, and the work of the
nodes: serving a model to clients, and training runs. Every value has a default, so a file lists only what differs.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from swarm_protocol import limits
from swarm_protocol.errors import ConfigError

T = TypeVar("T")

MAX_NODES = 100_000
MAX_MINUTES = 30 * 24 * 60.0
MAX_TABLES = 256
MAX_TEXT = 200


def _key(default: object, read: Callable[[Any], object]) -> Any:
    """Declare a field that `read` takes from the value of its key. `read` raises ValueError with the remedy."""
    return field(default=default, metadata={"read": read})


def _number(default: float, low: float, high: float, *, above: bool = False) -> Any:
    """Declare a number in `[low, high]`, or in `(low, high]` if `above`. It is a whole number if the default is one."""
    is_whole = isinstance(default, int)
    bounds = f"above {_written(low)} and at most" if above else f"from {_written(low)} to"

    def read(value: Any) -> float:
        is_number = isinstance(value, int if is_whole else int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (above and value == low):
            raise ValueError(f"use a {'whole ' if is_whole else ''}number {bounds} {_written(high)}")
        return value if is_whole else float(value)

    return _key(default, read)


def _text(default: str) -> Any:
    """Declare one line of text."""

    def read(value: Any) -> str:
        if not (isinstance(value, str) and value.isprintable() and 0 < len(value) <= MAX_TEXT):
            raise ValueError(f"write a line of text of at most {MAX_TEXT} characters")
        return value

    return _key(default, read)


def _choice(default: str, *others: str) -> Any:
    """Declare a text that is one of these."""

    def read(value: Any) -> object:
        if value not in (default, *others):
            raise ValueError(f"use one of {', '.join((default, *others))}")
        return value

    return _key(default, read)


def _flag(value: Any) -> bool:
    if value is not True and value is not False:
        raise ValueError("use true or false")
    return value


def _two_names(value: Any) -> tuple[str, ...]:
    if not (isinstance(value, list) and len(value) == 2 and all(isinstance(each, str) for each in value)):
        raise ValueError("write the names of two regions")
    return tuple(value)


def _written(bound: float) -> str:
    """Write a bound in full, without an exponent."""
    return f"{int(bound):,}" if bound == int(bound) else f"{bound:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """One region. `share` is its weight among the regions when a node's region is drawn. `latency_ms` is the one-way
    latency between two of its nodes."""

    name: str = _text("anywhere")
    share: float = _number(1.0, 0, 1e6, above=True)
    latency_ms: float = _number(20.0, 0, 10_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The one-way latency between nodes of two regions. Regions without a path have this class's default."""

    between: tuple[str, str] = _key(("", ""), _two_names)
    latency_ms: float = _number(60.0, 0, 10_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nat:
    """Describes how `share` of the nodes are reached. "open" and "punched" nodes reach each other directly. A "relayed"
    node reaches "open" ones directly, and all others through a relay."""

    kind: Literal["open", "punched", "relayed"] = _choice("open", "punched", "relayed")
    share: float = _number(1.0, 0, 1e6, above=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Churn:
    """Describes how long nodes stay. With the model "half-life" half of them have left after `half_life_minutes`,
    "weibull" has a scale and a shape, "trace" names a file of sessions, and with "none" all nodes stay. `goodbye` is
    the share of the leaving nodes that announce it. With `replace` another node joins for each that leaves."""

    model: Literal["none", "half-life", "weibull", "trace"] = _choice("none", "half-life", "weibull", "trace")
    half_life_minutes: float = _number(60.0, 0, MAX_MINUTES, above=True)
    scale_minutes: float = _number(90.0, 0, MAX_MINUTES, above=True)
    shape: float = _number(0.6, 0.05, 20)
    trace: str = _text("")
    goodbye: float = _number(0.5, 0, 1)
    replace: bool = _key(True, _flag)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeClass:
    """A class of nodes: its share of all nodes, its role and its hardware. Nodes with the role "idle" only keep
    records."""

    name: str = _text("volunteer")
    share: float = _number(1.0, 0, 1e6, above=True)
    role: Literal["idle", "serve", "train", "gateway"] = _choice("idle", "serve", "train", "gateway")
    up_mbit: float = _number(20.0, 0, 1e6, above=True)
    down_mbit: float = _number(100.0, 0, 1e6, above=True)
    memory_gib: float = _number(16.0, 0, 1e6, above=True)
    decode_ms_per_block: float = _number(3.0, 0, limits.MAX_BLOCK_MS, above=True)
    prefill_ms_per_token: float = _number(0.1, 0, limits.MAX_BLOCK_MS)
    training_tokens_per_s: float = _number(1000.0, 0, limits.MAX_TOKENS_PER_S, above=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model that nodes with the role "serve" serve. `kv_kib_per_token` is the cache that one token takes on one
    block. All gateways together send `requests_per_minute`."""

    name: str = _text("model")
    blocks: int = _number(32, 1, limits.MAX_BLOCKS)
    block_mib: float = _number(400.0, 0, 1e6, above=True)
    kv_kib_per_token: float = _number(4.0, 0, 1e6, above=True)
    requests_per_minute: float = _number(60.0, 0, 1e6)
    prompt_tokens: int = _number(256, 1, 2**20)
    answer_tokens: int = _number(128, 1, 2**20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The runs that nodes with the role "train" join. `members` and `cluster_size` are a run's `max_group` and
    `cluster_size`, so a run has `members * cluster_size` places. There are about as many runs as give each trainer of
    the beginning a place."""

    members: int = _number(16, 1, limits.MAX_GROUP_MEMBERS)
    cluster_size: int = _number(8, 1, limits.MAX_GROUP_MEMBERS)
    million_parameters: float = _number(100.0, 0, 1e6, above=True)
    interval_minutes: float = _number(10.0, 0.1, 1440)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Goals for which the smallest sufficient number of nodes of the class `vary` is searched, up to `most`.

    The goals are minimum values: for the share of requests that are answered, the share of minutes in which all blocks
    are served, the share of their time that trainers spend in intervals, and the median speed of an answer. 0 stands
    for no goal."""

    vary: str = _text("")
    most: int = _number(1000, 1, MAX_NODES)
    share_answered: float = _number(0.99, 0, 1)
    share_covered: float = _number(0.99, 0, 1)
    utilization: float = _number(0.8, 0, 1)
    answer_tokens_per_s: float = _number(0.0, 0, 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A whole scenario. The first nodes join during `warm_up_minutes`, which are not measured. `minutes` are measured
    after them."""

    name: str = _text("scenario")
    nodes: int = _number(1000, 2, MAX_NODES)
    minutes: float = _number(60.0, 0, MAX_MINUTES, above=True)
    warm_up_minutes: float = _number(10.0, 1, MAX_MINUTES)
    seed: int = _number(0, 0, 2**63 - 1)
    probes_per_minute: float = _number(60.0, 0, 1e5)
    churn: Churn = field(default_factory=Churn)
    regions: tuple[Region, ...] = (Region(),)
    paths: tuple[Path, ...] = ()
    nats: tuple[Nat, ...] = (Nat(),)
    classes: tuple[NodeClass, ...] = (NodeClass(),)
    model: Model | None = None
    training: Training | None = None
    plan: Plan | None = None
    sessions: tuple[tuple[float, float], ...] = ()
    """The trace: when each node joins and leaves, in seconds since the measurement began. It is no key of a scenario
    file, which names a trace file with the key `trace` of [churn]."""


_CHURN_KEYS: Mapping[str, str] = {"half_life_minutes": "half-life", "scale_minutes": "weibull", "shape": "weibull"}
_TABLES: Mapping[str, type[Any]] = {"churn": Churn, "model": Model, "training": Training, "plan": Plan}
_LISTS: Mapping[str, type[Any]] = {"regions": Region, "paths": Path, "nats": Nat, "classes": NodeClass}


def read_scenario(table: Mapping[str, Any], trace: str = "") -> Scenario:
    """Return the scenario of a parsed TOML file. `trace` is the text of the trace file that it names, if any. Raises
    ConfigError that names the wrong key."""
    _refuse_unknown(table, [each.name for each in fields(Scenario) if each.name != "sessions"], "the scenario")
    values: dict[str, Any] = {}
    for name, kind in _TABLES.items():
        if name in table:
            values[name] = _value(kind, table[name], f"[{name}]")
    for name, kind in _LISTS.items():
        if name in table:
            values[name] = _values(kind, table[name], name)
    _refuse_ignored_keys(table.get("churn", {}), values.get("churn", Churn()).model)
    plain = {name: value for name, value in table.items() if name not in (*_TABLES, *_LISTS)}
    scenario = _value(Scenario, plain, "the scenario", values)
    _check(scenario)
    if scenario.churn.model != "trace":
        return scenario
    sessions = read_trace(trace)
    return replace(scenario, sessions=sessions, nodes=len(sessions))


def read_trace(text: str) -> tuple[tuple[float, float], ...]:
    """Read a trace: one line `join,leave` for each session, in seconds since the measurement began. # begins a comment.
    A session that began before counts as one of a node that joins during the warm-up. Raises ConfigError."""
    sessions: list[tuple[float, float]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not (content := line.partition("#")[0].strip()):
            continue
        try:
            join_s, leave_s = map(float, content.split(","))
        except ValueError:
            raise _wrong(f"line {number} of the trace is {content[:60]!r}", "write join,leave in seconds") from None
        if not (math.isfinite(join_s) and join_s < leave_s and leave_s > 0):
            raise _wrong(
                f"line {number} of the trace is not a session that ends after it begins and after second 0",
                "write join,leave in seconds since the measurement began",
            )
        sessions.append((join_s, leave_s))
    if not 2 <= len(sessions) <= MAX_NODES:
        raise _wrong(f"the trace has {len(sessions)} sessions", f"give 2 to {MAX_NODES:,} sessions")
    return tuple(sessions)


def _refuse_ignored_keys(given: Mapping[str, Any], model: str) -> None:
    """Raise ConfigError for a key of [churn] that the chosen model ignores: its author meant another model."""
    for key, churn_model in _CHURN_KEYS.items():
        if key in given and model != churn_model:
            raise _wrong(f'{key} of [churn] does nothing with model = "{model}"', f'write model = "{churn_model}"')


def _check(scenario: Scenario) -> None:
    """Raise ConfigError if values contradict each other."""
    for what in ("regions", "classes"):
        names = [each.name for each in getattr(scenario, what)]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise _wrong(f"two {what} are called {twice!r}", "give each its own name")
    _check_paths(scenario)
    roles = {each.role for each in scenario.classes}
    for table, role in (("model", "serve"), ("training", "train")):
        if (getattr(scenario, table) is None) == (role in roles):
            raise _wrong(f'[{table}] and classes with role = "{role}" belong together', "give both or neither")
    if "gateway" in roles and scenario.model is None:
        raise _wrong('there is role = "gateway" without a [model]', "say which model clients ask for")
    if (scenario.churn.model == "trace") != bool(scenario.churn.trace):
        raise _wrong('trace and model = "trace" of [churn] belong together', "give both or neither")
    _check_places(scenario.training)
    _check_plan(scenario, scenario.plan)


def _check_paths(scenario: Scenario) -> None:
    known, pairs = [region.name for region in scenario.regions], set[frozenset[str]]()
    for path in scenario.paths:
        one, other = path.between
        for name in path.between:
            if name not in known:
                raise _wrong(f"a path leads to the unknown region {name!r}", _known(name, known))
        if one == other:
            raise _wrong(f"a path leads from {one!r} to itself", "give latency_ms of the region")
        if (pair := frozenset(path.between)) in pairs:
            raise _wrong(f"two paths are between {one!r} and {other!r}", "give one: it counts in both directions")
        pairs.add(pair)


def _check_places(training: Training | None) -> None:
    num_places = training.members * training.cluster_size if training is not None else 0
    if num_places > limits.MAX_TRAINERS:
        what = f"members times cluster_size of [training] is {num_places}"
        raise _wrong(what, f"use at most {limits.MAX_TRAINERS} in all")


def _check_plan(scenario: Scenario, plan: Plan | None) -> None:
    if plan is None:
        return
    planned = [each.name for each in scenario.classes if each.role in ("serve", "train")]
    if not planned:
        raise _wrong(
            "a [plan] needs a class that serves or trains", 'give one of [[classes]] role = "serve" or "train"'
        )
    if plan.vary not in planned:
        raise _wrong(f"[plan] varies {plan.vary!r}, which neither serves nor trains", _known(plan.vary, planned))
    if scenario.churn.trace:
        raise _wrong("a [plan] changes the number of nodes, which a trace decides", "give one of the two")


def _values(kind: type[T], given: Any, name: str) -> tuple[T, ...]:
    if not isinstance(given, list) or not 0 < len(given) <= MAX_TABLES:
        raise _wrong(f"{name} is not a list of 1 to {MAX_TABLES} tables", f"write [[{name}]] above each")
    return tuple(_value(kind, each, f"[[{name}]] number {index}") for index, each in enumerate(given, 1))


def _value(kind: type[T], given: Any, where: str, more: Mapping[str, Any] = MappingProxyType({})) -> T:
    if not isinstance(given, Mapping):
        raise _wrong(f"{where} is not a table", f"write {where} on a line and its keys below")
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    _refuse_unknown(given, list(known), where)
    values = {name: _checked(known[name], value, where) for name, value in given.items()}
    return kind(**values, **more)


def _checked(declared: Any, value: Any, where: str) -> Any:
    try:
        return declared.metadata["read"](value)
    except ValueError as error:
        raise _wrong(f"{declared.name} of {where} is {repr(value)[:60]}", str(error)) from None


def _refuse_unknown(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in given:
        if key not in known:
            raise _wrong(f"{where} has the unknown key {key[:60]!r}", _known(key, known))


def _known(key: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {close[0]}?" if close else f"use one of {', '.join(known)}"


def _wrong(what: str, remedy: str) -> ConfigError:
    return ConfigError(what, remedy=remedy)
