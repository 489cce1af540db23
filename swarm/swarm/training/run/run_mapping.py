"""Turns a run's settings into the plain values of its file, and back.

A setting that was added after runs had been signed has an implied value, which files without it mean. A run with that
value keeps the id that it had before the setting existed. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from types import MappingProxyType
from typing import Any

from swarm.training.run.run_config import DEFAULT_AGGREGATOR, RunConfig
from swarm.training.run.run_tables import MODEL_KEYS, DataConfig, InnerConfig, OuterConfig, StartConfig
from swarm.training.run.settings import (
    ImpossibleRun,
    ImpossibleValues,
    explanations,
    implied_values,
    refuse_unknown_keys,
    table_of,
    with_floats,
)
from swarm.trust.aggregators import aggregator_names, parameter_names

_TABLES: Mapping[str, type[Any]] = {
    "start": StartConfig,
    "data": DataConfig,
    "inner": InnerConfig,
    "outer": OuterConfig,
}

LATER_SETTINGS: Mapping[str, Any] = MappingProxyType(
    implied_values(RunConfig)
    | {path: value for key, table in _TABLES.items() for path, value in implied_values(table, f"{key}.").items()}
)
"""Settings that were added after runs had been signed, such as "data.revision", with their implied values. See
`settings.setting`."""

ABOUT: Mapping[str, str] = MappingProxyType(
    explanations(RunConfig)
    | {path: text for key, table in _TABLES.items() for path, text in explanations(table, f"{key}.").items()}
    | {f"model.{key}": text for key, text in MODEL_KEYS.items()}
)
"""The explanation of every setting and table, by its name, such as "data.split"."""


def to_mapping(config: RunConfig) -> dict[str, Any]:
    """Return plain values, as they stand in a run file. `from_mapping` returns an equal config."""
    plain = {each.name: getattr(config, each.name) for each in fields(config)}
    plain["model"] = dict(config.model)
    plain["admission"] = list(config.admission)
    plain["inviters"] = list(config.inviters)
    plain["aggregation"] = dict(config.aggregation)
    for table in _TABLES:
        plain[table] = asdict(plain[table])
    return plain


def identifying_mapping(config: RunConfig) -> dict[str, Any]:
    """Return what a run's id is made of: `to_mapping` without the later settings that have their implied value."""
    mapping = to_mapping(config)
    for path, implied in LATER_SETTINGS.items():
        table, _, key = path.rpartition(".")
        values = mapping[table] if table else mapping
        if values[key] == implied:
            del values[key]
        if table and not values:
            del mapping[table]
    return mapping


def with_implied(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was signed, with the implied values of settings that did not exist then. These are not today's
    defaults."""
    full = {"aggregator": "mean", **mapping}
    for setting, implied in LATER_SETTINGS.items():
        table, _, key = setting.rpartition(".")
        if not table:
            full.setdefault(key, implied)
        elif isinstance(values := full.get(table, {}), Mapping):
            full[table] = {key: implied, **values}
    return full


def completed(written: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """Return `written`, with the values of `config` for all settings that it lacks."""
    full = {**to_mapping(config), **written}
    for key, table in to_mapping(config).items():
        if isinstance(table, Mapping):
            full[key] = {**table, **written.get(key, {})}
    return full


def from_mapping(mapping: Mapping[str, Any]) -> RunConfig:
    """Return the run that these plain values mean.

    Raises ConfigError that names all impossible values, or an unknown key, each with its remedy.
    """
    refuse_unknown_keys(mapping, {each.name for each in fields(RunConfig)}, "the run")
    values = with_floats(RunConfig, mapping)
    values.setdefault("name", "")
    _check_aggregation_keys(values)
    problems = list[str]()
    for key, table in _TABLES.items():
        try:
            values[key] = table_of(table, key, mapping.get(key, {}))
        except ImpossibleValues as error:
            problems += error.problems
            values[key] = table()
    try:
        config = RunConfig(**values)
    except ImpossibleValues as error:
        problems[:0] = error.problems
    if problems:
        raise ImpossibleRun(problems)
    return config


def _check_aggregation_keys(values: Mapping[str, Any]) -> None:
    """Raises ConfigError for a key that the chosen aggregator does not have. RunConfig names other problems."""
    name, given = values.get("aggregator", DEFAULT_AGGREGATOR), values.get("aggregation", {})
    if name in aggregator_names() and isinstance(given, Mapping):
        refuse_unknown_keys(given, parameter_names(name), f"[aggregation], which is {name}'s,")
