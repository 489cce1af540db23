"""Run files: a RunConfig as TOML that people read, with its signature in a last table.

    name = "my-run"
    …
    [signature]
    peer_id = "12D3KooW…"
    issued_at = 1767225600
    signature = "…"

The signature is over a canonical form of every value in the file, so comments and spacing are free, while a changed,
added or removed value is an IntegrityError. Reads and writes block; no state.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm_protocol.errors import ConfigError, IntegrityError
from swarm_protocol.identity import Identity, verify

from swarm.training.model import check_model
from swarm.training.run_config import RunConfig, refuse_unknown_keys

MAX_RUN_FILE_BYTES = 1 << 16
MAX_KEY_WORDS = 32
"""In one dotted key. Its parser's time grows with the square of them: 20,000 took 42 s."""
_PURPOSE = b"swarm-run:"
_WORD = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![\w-]){_WORD}(?:[ \t]*+\.[ \t]*+{_WORD}){{{MAX_KEY_WORDS},}}")
_SIGNATURE_KEYS = ("peer_id", "issued_at", "signature")


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedRun:
    """A run and who answers for it. `sign_run` and `load_run` make it, so its signature and its model are checked."""

    config: RunConfig
    peer_id: str
    issued_at: int
    signature: bytes

    @property
    def run_id(self) -> str:
        """Name and digest of all that was signed, so two runs never share it: not even one config, signed twice."""
        content = _signed_bytes(self.config.to_mapping(), self.peer_id, self.issued_at)
        return f"{self.config.name}-{hashlib.sha256(content).hexdigest()[:12]}"


def sign_run(config: RunConfig, identity: Identity, *, issued_at: int) -> SignedRun:
    """`issued_at`: Unix seconds. Raises ConfigError if the model cannot be built."""
    check_model(config)
    signature = identity.sign(_signed_bytes(config.to_mapping(), identity.peer_id, issued_at))
    return SignedRun(config=config, peer_id=identity.peer_id, issued_at=issued_at, signature=signature)


def write_run(path: Path, config: RunConfig, identity: Identity, *, issued_at: int | None = None) -> SignedRun:
    """Sign `config`, now unless `issued_at` says otherwise, and write it to `path`, whole or not at all.

    Raises ConfigError if the model cannot be built or `path` cannot be written.
    """
    run = sign_run(config, identity, issued_at=int(time.time()) if issued_at is None else issued_at)
    signature = (run.peer_id, run.issued_at, base64.b64encode(run.signature).decode())
    text = to_toml({**config.to_mapping(), "signature": dict(zip(_SIGNATURE_KEYS, signature, strict=True))})
    partial = path.with_name(f".{path.name}.partial")
    try:
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", remedy="choose another place") from error
    return run


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
        raise ConfigError(f"{path} is not signed", remedy="sign it first: only a signed run can be joined")
    refuse_unknown_keys(table, _SIGNATURE_KEYS, "[signature]")
    peer_id, issued_at, signature = _signature_of(table, path)
    try:
        verify(peer_id, _signed_bytes(mapping, peer_id, issued_at), signature)
    except IntegrityError as error:
        raise IntegrityError(
            f"{path} is not what its author signed", remedy="get the file again, or sign it anew", peer_id=peer_id
        ) from error
    config = RunConfig.from_mapping(mapping)
    check_model(config)
    return SignedRun(config=config, peer_id=peer_id, issued_at=issued_at, signature=signature)


def to_toml(mapping: Mapping[str, Any]) -> str:
    """Values first, then a table for each mapping among them, with mappings below that inline. Keys are bare words."""
    lines = [f"{key} = {_value(value)}" for key, value in mapping.items() if not isinstance(value, Mapping)]
    for key, table in mapping.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{key}]", *(f"{name} = {_value(value)}" for name, value in table.items())]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(str(key))} = {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
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


def _parse(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_RUN_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", remedy="check the path") from error
    if len(data) > MAX_RUN_FILE_BYTES:
        raise ConfigError(f"{path} is too large for a run file", remedy="check that it is the right one")
    try:
        text = data.decode()
        too_deep = _LONG_KEY.search(text) is not None
        mapping = {} if too_deep else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", remedy="correct it there") from error
    if too_deep:
        raise ConfigError(
            f"{path} has a dotted key of more than {MAX_KEY_WORDS} words", remedy="use flat keys below a line [table]"
        )
    return mapping


def _signature_of(table: Mapping[str, Any], path: Path) -> tuple[str, int, bytes]:
    peer_id, issued_at, text = (table.get(key) for key in _SIGNATURE_KEYS)
    if isinstance(peer_id, str) and type(issued_at) is int and isinstance(text, str):
        try:
            return peer_id, issued_at, base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            pass  # said below
    raise IntegrityError(f"the signature in {path} is incomplete or malformed", remedy="get the file again")


def _signed_bytes(mapping: Mapping[str, Any], peer_id: str, issued_at: int) -> bytes:
    """One byte string for each content, whatever the file's order and spacing."""
    content = {"run": mapping, "peer_id": peer_id, "issued_at": issued_at}
    try:
        return _PURPOSE + json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"a run cannot hold this: {error}", remedy="use text, finite numbers and flat tables"
        ) from error
