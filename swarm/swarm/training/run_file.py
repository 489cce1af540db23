"""Run files: a RunConfig as TOML that people read, with its signature in a last table.

    name = "my-run"
    …
    [signature]
    peer_id = "12D3KooW…"
    issued_at = 1767225600
    signature = "…"

The signature is over a canonical form of every value in the file, so comments and spacing are free, while a changed,
added or removed value is an IntegrityError. Blocking reads and writes; no state.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.training.model import check_model
from swarm.training.run_config import RunConfig, refuse_unknown_keys
from swarm_protocol.errors import ConfigError, IntegrityError
from swarm_protocol.identity import Identity, verify

MAX_RUN_FILE_BYTES = 1 << 16
_PURPOSE = b"swarm-run:"


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedRun:
    """A run and who answers for it. Only `sign_run` and `load_run` make one, so the signature has been checked."""

    config: RunConfig
    peer_id: str
    issued_at: int
    signature: bytes

    @property
    def run_id(self) -> str:
        """Name and digest of all that was signed: two runs never share it, also if one person signs one config twice."""
        content = _signed_bytes(self.config.to_mapping(), self.peer_id, self.issued_at)
        return f"{self.config.name}-{hashlib.sha256(content).hexdigest()[:12]}"


def sign_run(config: RunConfig, identity: Identity, *, issued_at: int) -> SignedRun:
    """`issued_at`: Unix seconds. Raises ConfigError if the model cannot be built."""
    check_model(config.model)
    content = _signed_bytes(config.to_mapping(), identity.peer_id, issued_at)
    return SignedRun(
        config=config, peer_id=identity.peer_id, issued_at=issued_at, signature=identity.sign(content)
    )


def write_run(path: Path, run: SignedRun) -> None:
    """Write atomically. Raises ConfigError if `path` cannot be written."""
    signature = {
        "peer_id": run.peer_id,
        "issued_at": run.issued_at,
        "signature": base64.b64encode(run.signature).decode(),
    }
    text = to_toml({**run.config.to_mapping(), "signature": signature})
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)  # noqa: PTH105
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", remedy="choose another place") from error


def read_config(path: Path) -> RunConfig:
    """The config in a run file, signed or not; a signature is not checked. Raises ConfigError."""
    mapping = _parse(path)
    mapping.pop("signature", None)
    return RunConfig.from_mapping(mapping)


def load_run(path: Path) -> SignedRun:
    """Raises ConfigError if it cannot be a run, IntegrityError if it is not what was signed."""
    mapping = _parse(path)
    table = mapping.pop("signature", None)
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path} is not signed", remedy="sign it first: only signed runs can be joined")
    refuse_unknown_keys(table, {"peer_id", "issued_at", "signature"}, "[signature]")
    peer_id, issued_at = table.get("peer_id"), table.get("issued_at")
    try:
        signature = base64.b64decode(table.get("signature", ""), validate=True)
        if not isinstance(peer_id, str) or type(issued_at) is not int:
            raise ValueError("peer_id or issued_at is missing")
    except (binascii.Error, ValueError, TypeError) as error:
        raise IntegrityError(f"the signature in {path} is malformed: {error}", remedy="get the file again") from None
    try:
        verify(peer_id, _signed_bytes(mapping, peer_id, issued_at), signature)
    except IntegrityError as error:
        raise IntegrityError(
            f"{path} was changed after it was signed", remedy="get the file again, or sign it anew", peer_id=peer_id
        ) from error
    config = RunConfig.from_mapping(mapping)
    check_model(config.model)
    return SignedRun(config=config, peer_id=peer_id, issued_at=issued_at, signature=signature)


def to_toml(mapping: Mapping[str, Any]) -> str:
    """Values first, then one table for each mapping in `mapping`, with mappings below that inline."""
    lines = [f"{key} = {_value(value)}" for key, value in mapping.items() if not isinstance(value, Mapping)]
    for key, table in mapping.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{key}]"] + [f"{name} = {_value(value)}" for name, value in table.items()]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_string(str(key))} = {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _string(value)
    raise ConfigError(f"a run cannot hold the value {value!r}", remedy="use text, numbers, lists and tables")


def _string(text: str) -> str:
    # JSON's strings are TOML's basic strings, but for DEL, which TOML wants escaped
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _parse(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_RUN_FILE_BYTES:
            raise ConfigError(f"{path} is too large for a run file", remedy="check that it is the right file")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", remedy="check the path") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", remedy="correct it at that place") from None


def _signed_bytes(mapping: Mapping[str, Any], peer_id: str, issued_at: int) -> bytes:
    """One byte string for each content, whatever the file's order and spacing."""
    content = {"run": mapping, "peer_id": peer_id, "issued_at": issued_at}
    try:
        return _PURPOSE + json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the run holds a value that it cannot: {error}", remedy="use text and finite numbers") from None
