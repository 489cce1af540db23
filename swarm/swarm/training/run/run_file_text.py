"""The text of a run file that people edit: written with every setting explained, and changed line by line.

An edit looks for whole lines, so that comments and spacing stay. It may miss in unusual TOML, such as a table written
inline or a text of several lines: who edits has to parse the outcome and compare. Pure.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from typing import Any

from swarm.training.run.run_config import ABOUT, RunConfig
from swarm.training.run.signed_run import toml_value
from swarm.trust.aggregators import get_aggregator, parameters_of

_WIDTH = 110  # of a comment, in characters
_HEAD = """\
# A run: what is trained, on what, and how. All its members share these settings.
# Every setting is here as it is by default: change what you need. Signing writes down those left out. Then:
#
#     swarm-node run sign {path}
#     swarm-node join --run {path} --peers ADDR

"""


def completed(written: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """Return `written`, with the values of `config` for all settings that it lacks."""
    full = {**config.to_mapping(), **written}
    for key, table in config.to_mapping().items():
        if isinstance(table, Mapping):
            full[key] = {**table, **written.get(key, {})}
    return full


def template(config: RunConfig, path: str) -> str:
    """Return `config` as a file to edit, unsigned, for `path`."""
    mapping, defaults = config.to_mapping(), RunConfig(name=config.name).to_mapping()
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
    """Return `text` with `key = value` in [table], in place of the line that is there; at the end of `text` without
    one."""
    lines, at, inside = text.splitlines(), None, False
    for index, line in enumerate(lines):
        if header := _table_of(line):
            inside = header == table
            at = index + 1 if inside else at
        elif inside and re.match(rf"\s*{re.escape(key)}\s*=", line):
            _, _, comment = line.partition("#")
            lines[index] = f"{key} = {toml_value(value)}" + (f"  #{comment}" if comment else "")
            return "\n".join(lines) + "\n"
    if at is None:
        lines += ["", f"[{table}]"]
        at = len(lines)
    lines.insert(at, f"{key} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


def with_missing(text: str, written: Mapping[str, Any], full: Mapping[str, Any]) -> str:
    """Return `text`, whose contents are `written`, with the settings that only `full` has: values at the end of their
    table, tables at the end of `text`."""
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
