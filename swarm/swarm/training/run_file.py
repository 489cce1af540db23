"""Run files: a RunConfig as TOML that people read, with its signature in a last table.

    name = "my-run"
    …
    [signature]
    peer_id = "12D3KooW…"
    issued_at = 1767225600
    signature = "…"

The signature is over a canonical form of every value in the file, so comments and spacing are free, while a changed,
added or removed value is an IntegrityError. Signing writes down every setting, so that what a run is does not change
with the defaults of a later version; of [model] those of its type stay out, which are transformers'. Reads and writes
block; no state.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from swarm_protocol.errors import ConfigError, IntegrityError
from swarm_protocol.identity import Identity, verify

from swarm.training.model import check_model
from swarm.training.run_config import RunConfig, refuse_unknown_keys
from swarm.training.run_text import template, to_toml, with_missing, with_signature, with_value

MAX_RUN_FILE_BYTES = 1 << 16
MAX_KEY_WORDS = 32
"""In one dotted key. Its parser's time grows with the square of them: 20,000 took 42 s."""
_PURPOSE = b"swarm-run:"
_WORD = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![\w-]){_WORD}(?:[ \t]*+\.[ \t]*+{_WORD}){{{MAX_KEY_WORDS},}}")
_SIGNATURE_KEYS = ("peer_id", "issued_at", "signature")


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedRun:
    """A run and who answers for it. `sign_run` and `load_run` make it, so its signature and its model are checked;
    `read_run` does, too, and checks no model.

    `text` is a run file with the values that were signed, as they were written, and no comments: what `read_run` takes.
    """

    config: RunConfig
    peer_id: str
    issued_at: int
    signature: bytes
    text: str = field(default="", repr=False, compare=False)

    @property
    def run_id(self) -> str:
        """Name and digest of all that was signed, so two runs never share it: not even one config, signed twice."""
        content = _signed_bytes(self.config.to_mapping(), self.peer_id, self.issued_at)
        return f"{self.config.name}-{hashlib.sha256(content).hexdigest()[:12]}"


def sign_run(config: RunConfig, identity: Identity, *, issued_at: int) -> SignedRun:
    """`issued_at`: Unix seconds. Raises ConfigError if the model cannot be built."""
    check_model(config)
    return _signed(config, config.to_mapping(), identity, issued_at)


def write_run(path: Path, config: RunConfig, identity: Identity, *, issued_at: int | None = None) -> SignedRun:
    """Sign `config`, now unless `issued_at` says otherwise, and write it to `path`, whole or not at all.

    Raises ConfigError if the model cannot be built or `path` cannot be written.
    """
    run = sign_run(config, identity, issued_at=int(time.time()) if issued_at is None else issued_at)
    _write_whole(path, run.text)
    return run


def new_run_file(path: Path, config: RunConfig) -> None:
    """Write `config` to `path` for a person to edit and sign, every setting explained.

    Raises ConfigError if `path` exists or cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(template(config, str(path)))
    except FileExistsError:
        raise ConfigError(f"{path} exists already", remedy="name another file, or move it away") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", remedy="choose another place") from error


def sign_file(path: Path, identity: Identity, *, data_digest: str = "", issued_at: int | None = None) -> SignedRun:
    """Sign the run file at `path`, now unless `issued_at` says otherwise, in place of an earlier signature.

    Comments and spacing stay, and settings that are left out are written down. `data_digest`, unless empty, becomes the
    run's data.digest. The file is rewritten whole or not at all. Raises ConfigError if it cannot be a run, cannot be
    written, or is written in a way that cannot be changed line by line.
    """
    text = _read(path)
    written = _unsigned(_parsed(text, path))
    mapping = _completed(written, RunConfig.from_mapping(written))
    text = with_missing(text, written, mapping)
    if data_digest:
        text = with_value(text, "data", "digest", data_digest)
        mapping["data"] = {**mapping["data"], "digest": data_digest}
    config = RunConfig.from_mapping(mapping)
    check_model(config)
    issued_at = int(time.time()) if issued_at is None else issued_at
    run = _signed(config, mapping, identity, issued_at)
    signed = with_signature(text, _signature_table(run))
    if _parsed_or_none(signed, path) != {**mapping, "signature": _signature_table(run)}:
        raise ConfigError(
            f"{path} is written so that it cannot be signed in place",
            remedy="write each table below a line [table] and each setting on a line of its own, as run init does",
        )
    _write_whole(path, signed)
    return run


def _completed(written: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """`config` as `written`, and as it has become where nothing is."""
    full = {**config.to_mapping(), **written}
    for key, table in config.to_mapping().items():
        if isinstance(table, Mapping):
            full[key] = {**table, **written.get(key, {})}
    return full


def read_config(path: Path) -> RunConfig:
    """The config in a run file, signed or not; a signature is not checked. Raises ConfigError."""
    return _config_of(_parsed(_read(path), path))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspected:
    """A run file, whoever wrote it. `run` is None, and `problem` says why, unless its signature holds."""

    config: RunConfig
    run: SignedRun | None
    problem: str = ""


def inspect_run(path: Path) -> Inspected:
    """What a run file says, signed or not. Raises ConfigError if it cannot be a run."""
    mapping = _parsed(_read(path), path)
    if "signature" not in mapping:
        return Inspected(config=_config_of(mapping), run=None, problem="it is not signed")
    try:
        run = _checked(mapping, path)
    except IntegrityError as error:
        return Inspected(config=_config_of(mapping), run=None, problem=error.message)
    return Inspected(config=run.config, run=run)


def load_run(path: Path) -> SignedRun:
    """Raises ConfigError if it cannot be a run, IntegrityError if it is not what was signed."""
    return _checked(_parsed(_read(path), path), path)


def read_run(data: bytes, where: str) -> SignedRun:
    """What another machine gave as a run file, which came from `where`. The model is not built, which takes seconds
    and memory that nobody should spend on a run for having heard of it. Blocks for milliseconds.

    Raises ConfigError if it cannot be a run, IntegrityError if it is not what was signed.
    """
    return _verified(_parsed(_decoded(data, where), where), where)


def _checked(mapping: dict[str, Any], path: Path) -> SignedRun:
    """Raises as `load_run`."""
    run = _verified(mapping, path)
    check_model(run.config)
    return run


def _verified(mapping: dict[str, Any], path: Path | str) -> SignedRun:
    """Raises as `read_run`."""
    table, mapping = mapping.get("signature"), _unsigned(mapping)
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
    config = RunConfig.from_mapping(mapping)
    text = to_toml({**mapping, "signature": table})
    return SignedRun(config=config, peer_id=peer_id, issued_at=issued_at, signature=signature, text=text)


def _signed(config: RunConfig, mapping: Mapping[str, Any], identity: Identity, issued_at: int) -> SignedRun:
    """`mapping` is `config` as it is written."""
    signature = identity.sign(_signed_bytes(mapping, identity.peer_id, issued_at))
    run = SignedRun(config=config, peer_id=identity.peer_id, issued_at=issued_at, signature=signature)
    return replace(run, text=to_toml({**mapping, "signature": _signature_table(run)}))


def _config_of(mapping: Mapping[str, Any]) -> RunConfig:
    config = RunConfig.from_mapping(_unsigned(mapping))
    check_model(config)
    return config


def _unsigned(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key != "signature"}


def _signature_table(run: SignedRun) -> dict[str, Any]:
    values = (run.peer_id, run.issued_at, base64.b64encode(run.signature).decode())
    return dict(zip(_SIGNATURE_KEYS, values, strict=True))


def _write_whole(path: Path, text: str) -> None:
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


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_RUN_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", remedy="check the path") from error
    return _decoded(data, path)


def _decoded(data: bytes, path: Path | str) -> str:
    if len(data) > MAX_RUN_FILE_BYTES:
        raise ConfigError(f"{path} is too large for a run file", remedy="check that it is the right one")
    try:
        return data.decode()
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}", remedy="correct it there") from error


def _parsed_or_none(text: str, path: Path) -> dict[str, Any] | None:
    try:
        return _parsed(text, path)
    except ConfigError:
        return None


def _parsed(text: str, path: Path | str) -> dict[str, Any]:
    try:
        too_deep = _LONG_KEY.search(text) is not None
        mapping = {} if too_deep else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", remedy="correct it there") from error
    if too_deep:
        raise ConfigError(
            f"{path} has a dotted key of more than {MAX_KEY_WORDS} words", remedy="use flat keys below a line [table]"
        )
    return mapping


def _signature_of(table: Mapping[str, Any], path: Path | str) -> tuple[str, int, bytes]:
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
