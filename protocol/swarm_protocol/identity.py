"""Manages a node's only key: its peer id, its signatures, and the file that keeps it.

The key is Ed25519, in libp2p's own file format, so the same file starts the libp2p host (`p2pd -id`). The peer id
embeds the public key, so every node that knows a peer id can check its signatures.

Formats (libp2p specs, peer-ids/peer-ids.md): the file is the protobuf `PrivateKey{Type: Ed25519, Data: seed + public}`,
the peer id is base58btc of the identity multihash of `PublicKey{Type: Ed25519, Data: public}`. For Ed25519 both have
one fixed length, so their protobuf headers are constants here.
"""

from __future__ import annotations

import os
import stat
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Annotated, TypeAlias

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarm_protocol.errors import ConfigError, IntegrityError, reason_of

KEY_BYTES = 32
SIGNATURE_BYTES = 64

# PrivateKey: field 1 (Type) = 1 (Ed25519), field 2 (Data) of 64 bytes
_PRIVATE_KEY_HEADER = bytes([0x08, 0x01, 0x12, 0x40])
# identity multihash (code 0) of 36 bytes; PublicKey: field 1 (Type) = 1 (Ed25519), field 2 (Data) of 32 bytes
_PEER_ID_HEADER = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])
_PEER_ID_CHARS = 52

_MAX_REMEMBERED_KEYS = 2**15
"""Maximum peers whose ids and keys are cached in both forms: base58 takes twenty microseconds."""

_MAX_REMEMBERED_BYTES = 4096
"""Maximum length of a message whose valid signature is cached: records and votes are shorter."""


class Identity:
    """An Ed25519 key pair. `repr` shows the peer id and never the key."""

    __slots__ = ("_key", "peer_id", "public_key")

    def __init__(self, seed: bytes) -> None:
        """Make the key pair of `seed`, 32 secret random bytes. Raises ValueError for another length."""
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public_key = self._key.public_key().public_bytes_raw()
        self.peer_id = peer_id_of(self.public_key)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"

    @classmethod
    def generate(cls) -> Identity:
        return cls(os.urandom(KEY_BYTES))

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Return the identity at `path`. Raises ConfigError if it is missing, unreadable, open to other users, or not
        such a key."""
        data = _read_private(path)
        seed, public_key = data[4 : 4 + KEY_BYTES], data[4 + KEY_BYTES :]
        if data[:4] == _PRIVATE_KEY_HEADER and len(public_key) == KEY_BYTES:
            identity = cls(seed)
            if identity.public_key == public_key:
                return identity
        raise ConfigError(
            f"{path} is not a libp2p Ed25519 private key",
            remedy="restore it from a backup, or move it away to start with a new identity",
        )

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Return the identity at `path`. If there is none, save a new one there. Two concurrent processes get the same
        one."""
        if not os.path.lexists(path):
            # if another process was quicker, its key is the one
            _write_private(path, cls.generate()._file_bytes())
        return cls.load(path)

    def save(self, path: Path) -> None:
        """Write the key to `path` atomically and durably, at no moment readable by other users.

        Raises ConfigError if it cannot be written or `path` exists: a lost key is a lost identity.
        """
        if not _write_private(path, self._file_bytes()):
            raise ConfigError(f"{path} exists already", remedy="keep it, or move it away first: it is who this node is")

    @property
    def seed(self) -> bytes:
        """The 32 secret bytes from which the key follows."""
        return self._key.private_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        """Return a deterministic signature of 64 bytes. The message must begin with its purpose (see
        `swarm_protocol.envelope`)."""
        return self._key.sign(message)

    def _file_bytes(self) -> bytes:
        return _PRIVATE_KEY_HEADER + self._key.private_bytes_raw() + self.public_key


def verify(peer_id: str, message: bytes, signature: bytes) -> None:
    """Check a signature. Raises IntegrityError unless `signature` is that of `message` by `peer_id`.

    Valid signatures of short messages are cached, because peers pass on the same records repeatedly.
    """
    check = _check_signature_cached if len(message) <= _MAX_REMEMBERED_BYTES else _check_signature
    check(peer_id, message, signature)


def _check_signature(peer_id: str, message: bytes, signature: bytes) -> None:
    try:
        Ed25519PublicKey.from_public_bytes(public_key_of(peer_id)).verify(signature, message)
    except (InvalidSignature, ValueError) as error:
        raise IntegrityError("the signature is not this peer's", peer_id=peer_id) from error


_check_signature_cached = lru_cache(maxsize=1024)(_check_signature)


@lru_cache(maxsize=_MAX_REMEMBERED_KEYS)
def peer_id_of(public_key: bytes) -> str:
    """Return the peer id that embeds the 32 bytes of an Ed25519 public key."""
    if len(public_key) != KEY_BYTES:
        raise ValueError(f"a public key has {KEY_BYTES} bytes, not {len(public_key)}")
    return base58_encode(_PEER_ID_HEADER + public_key)


@lru_cache(maxsize=_MAX_REMEMBERED_KEYS)
def public_key_of(peer_id: str) -> bytes:
    """Return the 32 bytes that `peer_id` embeds. Raises ValueError if it is not an Ed25519 peer id in its one base58
    form."""
    if len(peer_id) != _PEER_ID_CHARS:
        raise ValueError(_not_a_peer_id(peer_id))
    try:
        raw = base58_decode(peer_id)
    except ValueError:
        raise ValueError(_not_a_peer_id(peer_id)) from None
    header, key = raw[: len(_PEER_ID_HEADER)], raw[len(_PEER_ID_HEADER) :]
    if header != _PEER_ID_HEADER or len(key) != KEY_BYTES:
        raise ValueError(_not_a_peer_id(peer_id))
    return key


def check_peer_id(text: object, _field: str = "") -> str:
    """Return `text` if it is an Ed25519 peer id, 12D3KooW…. Raises ValueError."""
    if not isinstance(text, str) or len(text) != _PEER_ID_CHARS:
        raise ValueError(_not_a_peer_id(str(text)))
    public_key_of(text)
    return text


SHORT_ID_CHARS = 8


def short_id(peer_id: str) -> str:
    """Return the end of a peer id, by which messages name a peer: all peer ids begin alike."""
    return f"…{peer_id[-SHORT_ID_CHARS:]}"


PeerId: TypeAlias = Annotated[str, check_peer_id]
"""The annotation of a field that is checked, see `swarm_protocol.checks.Checked`."""


def _not_a_peer_id(text: str) -> str:
    return f"{text[:64]!r} is not an Ed25519 peer id (12D3KooW…, {_PEER_ID_CHARS} characters)"


def _read_private(path: Path) -> bytes:
    """Return the first bytes of a regular file that only its owner can touch. Raises ConfigError."""
    try:
        # O_NONBLOCK: a named pipe must not hang us
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path} is not a file", remedy="name the identity file itself")
            if status.st_mode & 0o077:
                raise ConfigError(
                    f"{path} can be read or changed by other users (mode {stat.S_IMODE(status.st_mode):04o})",
                    remedy=f"if nobody else can have copied it: chmod 600 {path}",
                )
            return file.read(len(_PRIVATE_KEY_HEADER) + 2 * KEY_BYTES + 1)
    except OSError as error:
        raise _unusable("read", path, error) from error


def _write_private(path: Path, data: bytes) -> bool:
    """Write `data` to `path` atomically. Return False if the path exists already. Raises ConfigError."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # mkstemp creates with mode 0600 and O_EXCL
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(descriptor)
            placed = _place(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)
    except OSError as error:
        raise _unusable("write", path, error) from error
    return placed


def _place(temporary: Path, path: Path) -> bool:
    """Rename `temporary` to `path`. Return False, without a change, if `path` exists."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:
        # no hard links on this file system; a rename would overwrite, so look first
        if os.path.lexists(path):
            return False
        temporary.rename(path)
    return True


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unusable(verb: str, path: Path, error: OSError) -> ConfigError:
    places = {
        "read": "name a key file that this user may read",
        "write": "choose a home that has room, and is writable",
    }
    return ConfigError(f"cannot {verb} the identity file {path}: {reason_of(error)}", remedy=places[verb])


_DIGITS = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_VALUES = {digit: value for value, digit in enumerate(_DIGITS)}


def base58_encode(data: bytes) -> str:
    number = int.from_bytes(data, "big")
    digits = []
    while number:
        number, digit = divmod(number, 58)
        digits.append(_DIGITS[digit])
    num_zeros = len(data) - len(data.lstrip(b"\0"))
    return "1" * num_zeros + "".join(reversed(digits))


def base58_decode(text: str) -> bytes:
    """Decode base58. Raises ValueError for a character that is no digit. Quadratic in the length, which the caller
    bounds."""
    number = 0
    for character in text:
        if character not in _VALUES:
            raise ValueError(f"{character!r} is not a digit of base58")
        number = number * 58 + _VALUES[character]
    num_zeros = len(text) - len(text.lstrip("1"))
    return bytes(num_zeros) + number.to_bytes((number.bit_length() + 7) // 8, "big")
