"""Writes run files with every setting explained, for people to edit; signs them in place; reads and checks them.

`load_checked_run` checks that a file is TOML (`toml_text.parse_toml`), the signature covers its values
(`signed_run.verify_mapping`), the values are possible (`signed_run.from_mapping`), and the model can be built
(`run_model.check_model`).

Signing adds every missing setting to the file, so that a later version's defaults do not change the run. Missing
settings of [model] are not added: transformers has their defaults.

Edits change whole lines of the text, so that comments and spacing stay. They can fail for unusual TOML, such as inline
tables or multi-line strings, so `sign_file` parses the result and compares. Reads and writes block; no state.
"""

from __future__ import annotations

import errno
import os
import re
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from swarm_protocol.errors import ConfigError, IntegrityError, reason_of
from swarm_protocol.identity import Identity
from swarm_protocol.toml_text import parse_toml, toml_value

from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_tables import has_no_effect
from swarm.training.run.signed_run import (
    ABOUT,
    MAX_RUN_FILE_BYTES,
    SignedRun,
    completed,
    decode_text,
    from_mapping,
    sign_mapping,
    signature_table,
    to_mapping,
    verify_mapping,
    without_signature,
)
from swarm.trust.standard_aggregators import get_aggregator, parameters_of
from swarm.whole_files import write_whole

_WIDTH = 110  # of a comment, in characters
_HEAD = """\
# A run: what is trained, on what, and how. All its members share these settings.
# Every setting has its default: change what you need. Signing adds the settings that you leave out. Then:
#
#     swarm-node run sign {path}
#     swarm-node join --run {path} --peers ADDR

"""


def template(config: RunConfig, path: str) -> str:
    """Return `config` as a file to edit, unsigned, for `path`."""
    mapping, defaults = to_mapping(config), to_mapping(RunConfig(name=config.name))
    # otherwise an author who chooses another aggregator would have to remove the parameters of this one
    usual = parameters_of(get_aggregator(config.aggregator, {}))
    mapping["aggregation"] = {key: value for key, value in config.aggregation.items() if value != usual[key]}
    parts = [_HEAD.format(path=path)]
    for key, value in mapping.items():
        if not isinstance(value, Mapping):
            parts.append(_setting(key, key, value, defaults))
    for key, table in mapping.items():
        if isinstance(table, Mapping):
            parts.append(f"\n{_comment(ABOUT[key])}[{key}]\n")
            parts += [_setting(f"{key}.{name}", name, value, defaults[key]) for name, value in table.items()]
    return "".join(parts)


def with_signature(text: str, values: Mapping[str, Any]) -> str:
    """Return `text` with the table [signature] at its end, in place of an earlier one. Comments stay."""
    kept, inside = list[str](), False
    for line in text.splitlines():
        if header := _table_of(line):
            inside = header == "signature"
        if not (inside and line.strip() and not line.lstrip().startswith("#")):
            kept.append(line)
    body = "\n".join(kept).rstrip()
    return f"{body}\n\n[signature]\n" + "".join(f"{key} = {toml_value(value)}\n" for key, value in values.items())


def with_value(text: str, table: str, key: str, value: object) -> str:
    """Return `text` with the value of `key` in [table] replaced by `value`."""
    lines, inside = text.splitlines(), False
    for index, line in enumerate(lines):
        if header := _table_of(line):
            inside = header == table
        elif inside and re.match(rf"\s*{re.escape(key)}\s*=", line):
            _, _, comment = line.partition("#")
            lines[index] = f"{key} = {toml_value(value)}" + (f"  #{comment}" if comment else "")
    return "\n".join(lines) + "\n"


def with_missing(text: str, written: Mapping[str, Any], full: Mapping[str, Any]) -> str:
    """Add the settings of `full` that `written`, the contents of `text`, lacks: values at the end of their table,
    tables at the end of `text`."""
    for key, value in full.items():
        if isinstance(value, Mapping):
            given = written.get(key, {})
            missing = {name: each for name, each in value.items() if name not in given}
            if key not in written:
                text = f"{text.rstrip()}\n\n[{key}]\n"
            text = _with_lines(text, key, missing)
        elif key not in written:
            text = _with_lines(text, "", {key: value})
    return text


def _with_lines(text: str, table: str, values: Mapping[str, Any]) -> str:
    """Return `text` with `values` at the end of [table], or before the first table if `table` is empty."""
    lines, at, inside = text.splitlines(), 0, not table
    for index, line in enumerate(lines):
        if header := _table_of(line):
            inside = header == table
        if inside and line.strip() and not line.lstrip().startswith("#"):
            at = index + 1
    lines[at:at] = [f"{key} = {toml_value(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def _setting(where: str, key: str, value: object, defaults: Mapping[str, Any]) -> str:
    has_default = where != "name" and key in defaults
    default = f" Default: {toml_value(defaults[key])}." if has_default else ""
    about = f"{ABOUT[where]}{default}" if where in ABOUT else ""
    return f"{_comment(about)}{key} = {toml_value(value)}\n"


def _comment(text: str) -> str:
    whole = text.replace("Default: ", "Default:\N{NO-BREAK SPACE}")  # a line with the value alone would be unclear
    lines = textwrap.wrap(whole, _WIDTH - 2)
    return "".join(f"# {line}\n" for line in lines).replace("\N{NO-BREAK SPACE}", " ")


def _table_of(line: str) -> str:
    """Return the name of the table that begins with this line; empty if none does."""
    match = re.fullmatch(r"\s*\[+\s*([^\[\]]+?)\s*\]+\s*(?:#.*)?", line)
    return match[1].strip("\"'") if match else ""


def sign_run(config: RunConfig, identity: Identity, *, issued_at: int) -> SignedRun:
    """Sign `config` at `issued_at`, in Unix seconds. Raises ConfigError if the model cannot be built, or if a setting
    has no effect."""
    _check_effect(config)
    _check_model(config)
    return sign_mapping(config, to_mapping(config), identity, issued_at)


def write_run(path: Path, config: RunConfig, identity: Identity, *, issued_at: int | None = None) -> SignedRun:
    """Sign `config` at `issued_at`, by default now, and write it to `path`, completely or not at all.

    Raises as `sign_run`, and ConfigError if `path` cannot be written.
    """
    run = sign_run(config, identity, issued_at=int(time.time()) if issued_at is None else issued_at)
    _write(path, run.text)
    return run


def new_run_file(path: Path, config: RunConfig) -> None:
    """Write `config` to `path` for a person to edit and sign, with every setting explained.

    Raises ConfigError if `path` exists or cannot be written.
    """
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists already", remedy="name another file, or move it away")
    _write(path, template(config, str(path)))


def sign_file(
    path: Path,
    identity: Identity,
    *,
    pins: Mapping[tuple[str, str], str] = MappingProxyType({}),
    issued_at: int | None = None,
) -> SignedRun:
    """Sign the run file at `path` at `issued_at`, by default now. Replaces an earlier signature.

    Comments and spacing stay, and missing settings are added. `pins` are values by table and key, such as the data's
    digest, that replace the file's. The file is rewritten completely or not at all. Raises ConfigError if it is not a
    possible run, cannot be written, or has a form that cannot be edited line by line.
    """
    text = _read(path)
    written = without_signature(parse_toml(text, path))
    mapping = completed(written, from_mapping(written))
    text = with_missing(text, written, mapping)
    for (table, key), value in pins.items():
        if value != mapping[table][key]:
            text = with_value(text, table, key, value)
            mapping[table] = {**mapping[table], key: value}
    config = from_mapping(mapping)
    _check_effect(config)
    _check_model(config)
    issued_at = int(time.time()) if issued_at is None else issued_at
    run = sign_mapping(config, mapping, identity, issued_at)
    signed = with_signature(text, signature_table(run))
    if _parsed_or_none(signed, path) != {**mapping, "signature": signature_table(run)}:
        raise ConfigError(
            f"{path} has a form that cannot be signed in place",
            remedy="write each table below a line [table] and each setting on a line of its own, as run init does",
        )
    _write(path, signed)
    return run


def read_config(path: Path) -> RunConfig:
    """Return the config in a run file, signed or not, without checking a signature. Raises ConfigError."""
    return _config_of(_mapping_in(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedRun:
    """The contents of a run file. If its signature is not valid, `run` is None and `problem` says why."""

    config: RunConfig
    run: SignedRun | None
    problem: str = ""


def inspect_run(path: Path) -> InspectedRun:
    """Read a run file, signed or not. Raises ConfigError if it is not a possible run."""
    mapping = _mapping_in(path)
    if "signature" not in mapping:
        return InspectedRun(config=_config_of(mapping), run=None, problem="it is not signed")
    try:
        run = _checked(mapping, path)
    except IntegrityError as error:
        return InspectedRun(config=_config_of(mapping), run=None, problem=error.message)
    return InspectedRun(config=run.config, run=run)


def load_checked_run(path: Path) -> SignedRun:
    """Read and check a signed run file. Raises ConfigError for an impossible run, IntegrityError for an invalid
    signature."""
    return _checked(_mapping_in(path), path)


def signed_run_id(path: Path) -> str:
    """Return the id of the run in a file, without torch; empty if its signature is missing or not valid."""
    try:
        return load_signed_run(path).run_id
    except (ConfigError, IntegrityError):
        return ""


def load_signed_run(path: Path) -> SignedRun:
    """Read a signed run file without torch. Raises as `load_checked_run`, except for a model that cannot be built."""
    return verify_mapping(_mapping_in(path), path)


def _checked(mapping: dict[str, Any], path: Path) -> SignedRun:
    """Return the signed run in a file's parsed contents. Raises as `load_checked_run`."""
    run = verify_mapping(mapping, path)
    _check_model(run.config)
    return run


def _config_of(mapping: Mapping[str, Any]) -> RunConfig:
    config = from_mapping(without_signature(mapping))
    _check_effect(config)
    _check_model(config)
    return config


def _check_effect(config: RunConfig) -> None:
    """Raises ConfigError if a setting has no effect. Signed runs are not checked, so that they stay valid."""
    if config.discount_low_scores and not config.held_out_scores:
        raise ConfigError(
            "discount_low_scores = true does nothing with held_out_scores = 0, which measures no scores",
            remedy="use discount_low_scores = false, or held_out_scores = 1 or more",
        )
    for key, value in config.model.items():
        if value and has_no_effect(key):
            raise ConfigError(
                f"[model] {key} = {toml_value(value)[:80]} does nothing: members train on the plain loss without "
                "dropout or noise",
                remedy="leave it out",
            )


def _check_model(config: RunConfig) -> None:
    from swarm.training.run.run_model import check_model  # noqa: PLC0415 - brings torch, which edits do not need

    check_model(config)


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, (text.encode(),))
    except OSError as error:
        remedy = "free space there" if error.errno in {errno.ENOSPC, errno.EDQUOT} else "choose another place"
        raise ConfigError(f"{path} cannot be written: {reason_of(error)}", remedy=remedy) from error


def _mapping_in(path: Path) -> dict[str, Any]:
    mapping = parse_toml(_read(path), path)
    if mapping.keys().isdisjoint(each.name for each in fields(RunConfig)):
        raise ConfigError(
            f"{path} is not a run file: it has none of a run's settings",
            remedy="name a run file, such as run.toml, which swarm-node run init writes",
        )
    return mapping


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_RUN_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {reason_of(error)}", remedy="check the path") from error
    return decode_text(data, path)


def _parsed_or_none(text: str, path: Path) -> dict[str, Any] | None:
    try:
        return parse_toml(text, path)
    except ConfigError:
        return None
