"""Defines what is simulated: a scenario's values, their bounds, and how they are read from a TOML table. Pure.

A scenario has classes of nodes, regions with latencies between them, kinds of NAT, churn, and what the nodes do: serve
a model to clients, train runs. Every value has a default, so a scenario says what differs.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from swarm_protocol import limits
from swarm_protocol.errors import ConfigError

T = TypeVar("T")

MAX_NODES = 100_000
MAX_MINUTES = 30 * 24 * 60.0
MAX_TABLES = 256
_TEXT = MappingProxyType({"text": True})


def _number(default: float, low: float, high: float, *, above: bool = False) -> Any:
    """Declare a field that is a number in `[low, high]`, or above `low`. An int as the default allows whole numbers
    only."""
    return field(
        default=default, metadata={"low": low, "high": high, "above": above, "whole": isinstance(default, int)}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A region that holds `share` of the nodes. `latency_ms` is one way between two nodes of it."""

    name: str = field(default="anywhere", metadata=_TEXT)
    share: float = _number(1.0, 0, 1e6, above=True)
    latency_ms: float = _number(20.0, 0, 10_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The latency one way between nodes of two regions."""

    between: tuple[str, str] = ("", "")
    latency_ms: float = _number(60.0, 0, 10_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nat:
    """Says how `share` of the nodes can be reached. Two nodes behind a "punched" NAT reach each other directly, a
    "relayed" one is reached through a relay by all but "open" ones."""

    kind: Literal["open", "punched", "relayed"] = field(
        default="open", metadata={"choices": ("open", "punched", "relayed")}
    )
    share: float = _number(1.0, 0, 1e6, above=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Churn:
    """Says how long a node stays, in minutes: "half-life" (after which half have left), "weibull" with scale and shape,
    a "trace" of sessions, or "none". `goodbye` is the share of leavers that say so. With `replace` another node joins
    for each that leaves."""

    model: Literal["none", "half-life", "weibull", "trace"] = field(
        default="none", metadata={"choices": ("none", "half-life", "weibull", "trace")}
    )
    half_life_minutes: float = _number(60.0, 0, MAX_MINUTES, above=True)
    scale_minutes: float = _number(90.0, 0, MAX_MINUTES, above=True)
    shape: float = _number(0.6, 0.05, 20)
    trace: str = field(default="", metadata=_TEXT)
    goodbye: float = _number(0.5, 0, 1)
    replace: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeClass:
    """One kind of volunteers: `share` of the nodes. `role` is what they do; an "idle" one only keeps records."""

    name: str = field(default="volunteer", metadata=_TEXT)
    share: float = _number(1.0, 0, 1e6, above=True)
    role: Literal["idle", "serve", "train", "gateway"] = field(
        default="idle", metadata={"choices": ("idle", "serve", "train", "gateway")}
    )
    up_mbit: float = _number(20.0, 0, 1e6, above=True)
    down_mbit: float = _number(100.0, 0, 1e6, above=True)
    memory_gib: float = _number(16.0, 0, 1e6, above=True)
    decode_ms_per_block: float = _number(3.0, 0, limits.MAX_BLOCK_MS, above=True)
    prefill_ms_per_token: float = _number(0.1, 0, limits.MAX_BLOCK_MS)
    training_tokens_per_s: float = _number(1000.0, 0, limits.MAX_TOKENS_PER_S, above=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model that nodes with the role "serve" carry. `kv_kib_per_token` is the cache of a token on one block."""

    name: str = field(default="model", metadata=_TEXT)
    blocks: int = _number(32, 1, limits.MAX_BLOCKS)
    block_mib: float = _number(400.0, 0, 1e6, above=True)
    kv_kib_per_token: float = _number(4.0, 0, 1e6, above=True)
    requests_per_minute: float = _number(60.0, 0, 1e6)
    prompt_tokens: int = _number(256, 1, 2**20)
    answer_tokens: int = _number(128, 1, 2**20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The runs that nodes with the role "train" join: as many as give each a place. A round has at most `members`, and
    each of these brings the work of a cluster of `cluster_size` trainers: `max_group` and `cluster_size` of a run."""

    members: int = _number(16, 1, limits.MAX_GROUP_MEMBERS)
    cluster_size: int = _number(8, 1, limits.MAX_GROUP_MEMBERS)
    million_parameters: float = _number(100.0, 0, 1e6, above=True)
    interval_minutes: float = _number(10.0, 0.1, 1440)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The question how many nodes of the class `vary`, at most `most`, are enough: such that the share of requests that
    is answered, of minutes in which all blocks are served, and of the trainers' time in intervals is so high, and that
    half of the answers come at `answer_tokens_per_s` or more."""

    vary: str = field(default="", metadata=_TEXT)
    most: int = _number(1000, 1, MAX_NODES)
    share_answered: float = _number(0.99, 0, 1)
    share_covered: float = _number(0.99, 0, 1)
    utilization: float = _number(0.8, 0, 1)
    answer_tokens_per_s: float = _number(0.0, 0, 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`warm_up_minutes` pass while the first nodes join; they do not count. Then `minutes` are measured."""

    name: str = field(default="scenario", metadata=_TEXT)
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
    """The trace: when each node joins and leaves, in seconds. Not in the file, which names another."""


_OF_MODEL: Mapping[str, str] = MappingProxyType(
    {"half_life_minutes": "half-life", "scale_minutes": "weibull", "shape": "weibull"}
)
_TABLES: Mapping[str, type[Any]] = MappingProxyType(
    {"churn": Churn, "model": Model, "training": Training, "plan": Plan}
)
_LISTS: Mapping[str, type[Any]] = MappingProxyType(
    {"regions": Region, "paths": Path, "nats": Nat, "classes": NodeClass}
)


def read_scenario(table: Mapping[str, Any], trace: str = "") -> Scenario:
    """Return the scenario in a parsed TOML file, with the text of its trace. Raises ConfigError with the key at
    fault."""
    _refuse_unknown(table, [each.name for each in fields(Scenario) if each.name != "sessions"], "the scenario")
    values: dict[str, Any] = {}
    for name, kind in _TABLES.items():
        if name in table:
            values[name] = _value(kind, table[name], f"[{name}]")
    for name, kind in _LISTS.items():
        if name in table:
            values[name] = _values(kind, table[name], name)
    _refuse_other_models(table.get("churn", {}), values.get("churn", Churn()).model)
    plain = {name: value for name, value in table.items() if name not in (*_TABLES, *_LISTS)}
    scenario = _value(Scenario, plain, "the scenario", values)
    _check(scenario)
    if scenario.churn.model != "trace":
        return scenario
    sessions = read_trace(trace)
    return replace(scenario, sessions=sessions, nodes=len(sessions))


def read_trace(text: str) -> tuple[tuple[float, float], ...]:
    """Read a trace: a line `join,leave` for each session, in seconds since the measurement began; # begins a
    comment."""
    sessions: list[tuple[float, float]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not (said := line.partition("#")[0].strip()):
            continue
        try:
            join_s, leave_s = map(float, said.split(","))
        except ValueError:
            raise _wrong(f"line {number} of the trace is {said[:60]!r}", "write join,leave in seconds") from None
        if not (math.isfinite(join_s) and join_s < leave_s and leave_s > 0):
            raise _wrong(f"line {number} of the trace ends before it begins", "write join,leave in seconds")
        sessions.append((join_s, leave_s))
    if not 2 <= len(sessions) <= MAX_NODES:
        raise _wrong(f"the trace has {len(sessions)} sessions", f"give 2 to {MAX_NODES:,} sessions")
    return tuple(sessions)


def _refuse_other_models(given: Mapping[str, Any], model: str) -> None:
    """Raises ConfigError for a key of [churn] that its model does not read: who gives it means another one."""
    for key, of_model in _OF_MODEL.items():
        if key in given and model != of_model:
            raise _wrong(f'{key} of [churn] does nothing with model = "{model}"', f'write model = "{of_model}"')


def _check(scenario: Scenario) -> None:
    """Raises ConfigError where values do not fit together."""
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


def _checked(wanted: Any, value: Any, where: str) -> Any:
    rules, what = wanted.metadata, f"{wanted.name} of {where} is {repr(value)[:60]}"
    if "choices" in rules:
        if value not in rules["choices"]:
            raise _wrong(what, f"use one of {', '.join(rules['choices'])}")
    elif "text" in rules:
        if not (isinstance(value, str) and value.isprintable() and 0 < len(value) <= 200):
            raise _wrong(what, "write a line of text")
    elif "low" in rules:
        is_number = isinstance(value, int if rules["whole"] else int | float) and not isinstance(value, bool)
        low, high = rules["low"], rules["high"]
        if not is_number or not low <= value <= high or (rules["above"] and value == low):
            kind = "a whole number" if rules["whole"] else "a number"
            at_least, at_most = _written(low), _written(high)
            bounds = f"above {at_least} and at most {at_most}" if rules["above"] else f"from {at_least} to {at_most}"
            raise _wrong(what, f"use {kind} {bounds}")
        return value if rules["whole"] else float(value)
    elif wanted.default is not MISSING and isinstance(wanted.default, bool):
        if not isinstance(value, bool):
            raise _wrong(what, "use true or false")
    else:
        if not (isinstance(value, list) and len(value) == 2 and all(isinstance(each, str) for each in value)):
            raise _wrong(what, "write the names of two regions")
        return tuple(value)
    return value


def _written(bound: float) -> str:
    """Write a bound in full, without an exponent."""
    return f"{int(bound):,}" if bound == int(bound) else f"{bound:g}"


def _refuse_unknown(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in given:
        if key not in known:
            raise _wrong(f"{where} has the unknown key {key[:60]!r}", _known(key, known))


def _known(key: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {close[0]}?" if close else f"use one of {', '.join(known)}"


def _wrong(what: str, remedy: str) -> ConfigError:
    return ConfigError(what, remedy=remedy)
