"""A run as its author signed it: the plain values of a RunConfig as TOML that people can read, with a signature in a
last table.

    name = "my-run"
    …
    [signature]
    peer_id = "12D3KooW…"
    issued_at = 1767225600
    signature = "…"

The signature is over a canonical form of every value in the file, so comments and spacing are free, while a changed,
added or removed value is an IntegrityError. A setting that was added after runs had been signed has an implied value,
which files without it mean. A run with that value keeps the id that it had before the setting existed.

Pure. `run_file` reads and writes files. That the model can be built needs torch, and is checked elsewhere
(`run_model.check_model`): this module is also imported where torch is not.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from swarm_protocol.errors import ConfigError, IntegrityError
from swarm_protocol.identity import Identity, verify
from swarm_protocol.toml_text import parse_toml

from swarm.training.run.run_config import DEFAULT_AGGREGATOR, RunConfig
from swarm.training.run.run_tables import MODEL_KEYS, DataConfig, InnerConfig, OuterConfig, StartConfig
from swarm.training.run.settings import (
    ImpossibleRun,
    ImpossibleValues,
    declared,
    refuse_unknown_keys,
    table_of,
    with_floats,
)
from swarm.trust.aggregators import aggregator_names, parameter_names

MAX_RUN_FILE_BYTES = 1 << 16
_PURPOSE = b"swarm-run:"
_SIGNATURE_KEYS = ("peer_id", "issued_at", "signature")


_TABLES: Mapping[str, type[Any]] = {
    "start": StartConfig,
    "data": DataConfig,
    "inner": InnerConfig,
    "outer": OuterConfig,
}


def _declared(what: str) -> dict[str, Any]:
    found = declared(RunConfig, what)
    for key, table in _TABLES.items():
        found |= declared(table, what, f"{key}.")
    return found


LATER_SETTINGS: Mapping[str, Any] = MappingProxyType(_declared("implied"))
"""Settings that were added after runs had been signed, such as "data.revision", with their implied values. See
`settings.setting`."""

ABOUT: Mapping[str, str] = MappingProxyType(
    _declared("about") | {f"model.{key}": text for key, text in MODEL_KEYS.items()}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedRun:
    """A run and its author. Only `verify_mapping`, which has checked the signature, and `sign_mapping`, which has just
    made it, make one. Neither builds the model: that is checked by those about to train it.

    `text` is a run file, for `parse_signed_run`, with the values that were signed, as they were written, and no
    comments.
    """

    config: RunConfig
    peer_id: str
    issued_at: int
    signature: bytes
    text: str = field(default="", repr=False, compare=False)
    run_id: str = field(init=False, repr=False, compare=False)
    """The run's name and a digest of its settings, its author and the time of signing: no two runs share it."""

    def __post_init__(self) -> None:
        content = _signed_bytes(identifying_mapping(self.config), self.peer_id, self.issued_at)
        object.__setattr__(self, "run_id", f"{self.config.name}-{hashlib.sha256(content).hexdigest()[:12]}")

    def check_author(self, peer_id: str, deed: str) -> None:
        """Raises ConfigError unless `peer_id` signed the run, whose author alone may do the `deed`."""
        if peer_id != self.peer_id:
            raise ConfigError(
                f"{self.run_id} was signed by {self.peer_id}, and only that key can {deed}",
                remedy="sign with the author's key: give --identity, or the home that holds it",
            )

    def check_names(self, peer_id: str) -> None:
        """Raises ConfigError if the run admits only peers that it names, and not `peer_id`, which is empty for a node
        that has no key yet."""
        if (named := self.config.only_named) and peer_id not in named:
            which = "that peer id" if peer_id else "the peer id that swarm-node identity --new shows"
            raise ConfigError(
                f"{self.run_id} admits only the peers that it names, and not "
                f"{peer_id or 'this node, which has no key yet'}",
                remedy=f"ask its author to name {which}, and to sign it anew",
            )


def parse_signed_run(data: bytes, where: str) -> SignedRun:
    """Return the run in a run file that another machine sent, once its signature is checked; `where` names its source
    in errors. The model is not built: an unknown run should not cost seconds and memory. Blocks for milliseconds.

    Raises ConfigError if it cannot be a run, IntegrityError if it is not what was signed.
    """
    return verify_mapping(parse_toml(decode_text(data, where), where), where)


def verify_mapping(mapping: Mapping[str, Any], path: Path | str) -> SignedRun:
    """Check the signature and the values of a file's parsed contents. Raises as `parse_signed_run`."""
    table, mapping = mapping.get("signature"), without_signature(mapping)
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path} is not signed", remedy=f"sign it first: swarm-node run sign {path}")
    refuse_unknown_keys(table, _SIGNATURE_KEYS, "[signature]")
    peer_id, issued_at, signature = _signature_of(table, path)
    try:
        verify(peer_id, _signed_bytes(mapping, peer_id, issued_at), signature)
    except IntegrityError as error:
        raise IntegrityError(
            f"{path} is not what its author signed", remedy="get the file again, or sign it anew", peer_id=peer_id
        ) from error
    config = from_mapping(with_implied(mapping))
    text = to_toml({**mapping, "signature": table})
    return SignedRun(config=config, peer_id=peer_id, issued_at=issued_at, signature=signature, text=text)


def sign_mapping(config: RunConfig, mapping: Mapping[str, Any], identity: Identity, issued_at: int) -> SignedRun:
    """Sign a run as `identity`. `mapping` is `config` as it is written."""
    signature = identity.sign(_signed_bytes(mapping, identity.peer_id, issued_at))
    run = SignedRun(config=config, peer_id=identity.peer_id, issued_at=issued_at, signature=signature)
    return replace(run, text=to_toml({**mapping, "signature": signature_table(run)}))


def without_signature(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key != "signature"}


def signature_table(run: SignedRun) -> dict[str, Any]:
    values = (run.peer_id, run.issued_at, base64.b64encode(run.signature).decode())
    return dict(zip(_SIGNATURE_KEYS, values, strict=True))


def decode_text(data: bytes, path: Path | str) -> str:
    """Decode a run file of bounded size. Raises ConfigError."""
    if len(data) > MAX_RUN_FILE_BYTES:
        raise ConfigError(f"{path} is too large for a run file", remedy="check that it is the right one")
    try:
        return data.decode()
    except ValueError as error:
        raise ConfigError(f"{path} is not a text file", remedy="check that it is the right one") from error


def _signature_of(table: Mapping[str, Any], path: Path | str) -> tuple[str, int, bytes]:
    peer_id, issued_at, text = (table.get(key) for key in _SIGNATURE_KEYS)
    if isinstance(peer_id, str) and type(issued_at) is int and isinstance(text, str):
        try:
            return peer_id, issued_at, base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            pass  # raised below
    raise IntegrityError(f"the signature in {path} is incomplete or malformed", remedy="get the file again")


def _signed_bytes(mapping: Mapping[str, Any], peer_id: str, issued_at: int) -> bytes:
    """Return the bytes that are signed: equal for equal contents, whatever the file's order and spacing."""
    content = {"run": mapping, "peer_id": peer_id, "issued_at": issued_at}
    try:
        return _PURPOSE + json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"a run cannot hold this: {error}", remedy="use text, finite numbers and flat tables"
        ) from error


def to_toml(mapping: Mapping[str, Any]) -> str:
    """Return `mapping` as TOML: values first, then a table for each mapping, with deeper mappings inline. Keys are bare
    words."""
    lines = [f"{key} = {toml_value(value)}" for key, value in mapping.items() if not isinstance(value, Mapping)]
    for key, table in mapping.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{key}]", *(f"{name} = {toml_value(value)}" for name, value in table.items())]
    return "\n".join(lines) + "\n"


def toml_value(value: object) -> str:
    """Return `value` as TOML. Raises ConfigError for a type that a run cannot hold."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(str(key))} = {toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _text(value)
    raise ConfigError(f"a run cannot hold the value {value!r}", remedy="use text, numbers, lists and tables")


def _text(text: str) -> str:
    # a JSON string is a TOML string, but for DEL, which TOML wants escaped
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
