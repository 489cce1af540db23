"""A signed run: the values of a RunConfig as readable TOML, with the author's signature in the last table.

    name = "my-run"
    …
    [signature]
    peer_id = "12D3KooW…"
    issued_at = 1767225600
    signature = "…"

The signature covers a canonical form of all values in the file: comments and spacing may change, but a changed, added
or removed value is an IntegrityError. A setting that was added after runs had been signed has an implied value, which
applies to files without the setting. A run with that value keeps the id that it had before the setting existed.

Pure. `run_file` reads and writes files. `run_model.check_model` checks that the model can be built. It needs torch;
this module is also imported where torch is not installed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from swarm_protocol.errors import ConfigError, IntegrityError
from swarm_protocol.identity import Identity, verify
from swarm_protocol.toml_text import parse_toml, to_toml

from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_tables import MODEL_KEYS, DataConfig, InnerConfig, OuterConfig, StartConfig
from swarm.training.run.settings import (
    ImpossibleRun,
    ImpossibleValues,
    UnknownKey,
    declared,
    refuse_unknown_keys,
    table_of,
    with_floats,
)
from swarm.trust.standard_aggregators import DEFAULT_AGGREGATOR, aggregator_names, parameter_names

MAX_RUN_FILE_BYTES = 1 << 16
_PURPOSE = b"swarm-run:"
_SIGNATURE_KEYS = ("peer_id", "issued_at", "signature")
_HOLDS = "use text, finite numbers and flat tables"


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


LATER_SETTINGS: Mapping[str, Any] = _declared("implied")
"""Settings that were added after runs had been signed, such as "data.revision", with their implied values. See
`settings.setting`."""

ABOUT: Mapping[str, str] = _declared("about") | {f"model.{key}": text for key, text in MODEL_KEYS.items()}
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
    """Return the values from which a run's id is computed: `to_mapping` without the later settings that have their
    implied value."""
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
    """Return signed values with the implied value of each setting that they lack. Implied values are not the present
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
    """Return the config that these plain values describe.

    Raises ConfigError, which names all impossible values, or the unknown keys of one table, with remedies.
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
    """Raises ConfigError for a key that the chosen aggregator does not have. RunConfig checks the values."""
    name, given = values.get("aggregator", DEFAULT_AGGREGATOR), values.get("aggregation", {})
    if name in aggregator_names() and isinstance(given, Mapping):
        refuse_unknown_keys(given, parameter_names(name), f"[aggregation] of {name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedRun:
    """A run with a valid signature, created only by `verify_mapping` and `sign_mapping`. Neither checks that the model
    can be built (see `run_model.check_model`).

    `text` is a run file for `parse_signed_run`: the signed values as they were written, without comments.
    """

    config: RunConfig
    peer_id: str
    issued_at: int
    signature: bytes
    text: str = field(default="", repr=False, compare=False)
    run_id: str = field(init=False, repr=False, compare=False)
    """The run's name and 48 bits of the SHA-256 of its settings, its author and the time of signing."""

    def __post_init__(self) -> None:
        content = _signed_bytes(identifying_mapping(self.config), self.peer_id, self.issued_at)
        object.__setattr__(self, "run_id", f"{self.config.name}-{hashlib.sha256(content).hexdigest()[:12]}")

    def check_author(self, peer_id: str, deed: str) -> None:
        """Raises ConfigError unless `peer_id` signed the run. Only its author may do `deed`, such as "resume it"."""
        if peer_id != self.peer_id:
            raise ConfigError(
                f"{self.run_id} was signed by {self.peer_id}, and only that key can {deed}",
                remedy="sign with the author's key: give --identity, or the home that holds it",
            )

    def check_names(self, peer_id: str) -> None:
        """Raises ConfigError if only listed peers may contribute and `peer_id` is not one. It is empty for a node
        without a key."""
        if (named := self.config.only_named) and peer_id not in named:
            which = "that peer id" if peer_id else "the peer id that swarm-node identity --new shows"
            raise ConfigError(
                f"{self.run_id} admits only the peers in its setting admission, and not "
                f"{peer_id or 'this node, which has no key yet'}",
                remedy=f"ask its author to add {which} and to sign the run again",
            )


def parse_signed_run(data: bytes, where: str) -> SignedRun:
    """Check the signature of a run file that another machine sent, and return its run. `where` names the source in
    errors.

    Does not build the model, since an unknown run should not cost seconds and memory. Blocks for milliseconds. Raises
    ConfigError for an impossible run, IntegrityError for an invalid signature.
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
            f"{path} is not what its author signed", remedy="get the file again, or sign it again", peer_id=peer_id
        ) from error
    try:
        config = from_mapping(with_implied(mapping))
    except UnknownKey as error:  # the author's version of Swarm knows it, or it would not have signed the run
        raise ConfigError(
            f"{path} was signed by a newer version of Swarm: {error.message}",
            remedy="update this node",
            peer_id=peer_id,
        ) from None
    text = to_toml({**mapping, "signature": table})
    return SignedRun(config=config, peer_id=peer_id, issued_at=issued_at, signature=signature, text=text)


def sign_mapping(config: RunConfig, mapping: Mapping[str, Any], identity: Identity, issued_at: int) -> SignedRun:
    """Sign a run as `identity`. `mapping` has the values of `config` as the file has them. Raises ConfigError for one
    that a file cannot hold, such as None."""
    signature = identity.sign(_signed_bytes(mapping, identity.peer_id, issued_at))
    run = SignedRun(config=config, peer_id=identity.peer_id, issued_at=issued_at, signature=signature)
    text = to_toml({**mapping, "signature": signature_table(run)})
    parse_toml(text, f"the file of {config.name}", remedy=_HOLDS)
    return replace(run, text=text)


def without_signature(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key != "signature"}


def signature_table(run: SignedRun) -> dict[str, Any]:
    values = (run.peer_id, run.issued_at, base64.b64encode(run.signature).decode())
    return dict(zip(_SIGNATURE_KEYS, values, strict=True))


def decode_text(data: bytes, path: Path | str) -> str:
    """Decode a run file. Raises ConfigError if it is too large or not UTF-8."""
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
        raise ConfigError(f"a run cannot hold this: {error}", remedy=_HOLDS) from error
