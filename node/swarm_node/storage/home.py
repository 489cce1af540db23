"""One node's directory on disk, the lock that limits it to one daemon, and its small JSON files.

    HOME/identity.key   the Ed25519 key (0600)
    HOME/daemon.lock    locked while a daemon lives; holds its pid
    HOME/control.sock   the daemon's control socket
    HOME/peers.json     the peers that the node remembers (see `remembered_peers`); may be deleted at any time
    HOME/revisions.json the revisions that its clients have used (see `client_models`); may be deleted
    HOME/publishers.json the publishers of these models (see `client_models`); may be deleted
    HOME/revisions.lock and HOME/publishers.lock, locked while a process changes these files
    HOME/reputation.json what spot checks have shown of servers (see `gateway.role`); may be deleted
    HOME/traffic.json   traffic of the month (see `lending.traffic_count`); may be deleted
    HOME/invitation     the invitation to a private network, and HOME/revocations (see `kept_invitation`)
    HOME/network.key    the key of a private network that this home owns, and HOME/network.json (see `owned_network`)
    HOME/cache/         measurements and downloaded files; may be deleted at any time
    HOME/served-evidence/   wrong answers of servers that a gateway's spot checks have found
    HOME/convicted-servers/ evidence that convicts servers, found by this node or received, by network
    HOME/checkpoints/   one directory per run, with its checkpoints, votes and evidence
    HOME/log/           rotated log files

The lock is the kernel's (`flock`), so the kernel releases it if a daemon is killed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from swarm_protocol.errors import ConfigError, reason_of

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_SOCKET_PATH_BYTES = 100  # the kernel's sun_path has 108 bytes on Linux and 104 on macOS, with the terminating zero
LOOK_S = 0.2
"""Seconds to wait for a lock that commands may hold briefly while they look whether a daemon runs."""

_PID_BYTES = 10  # fixed width, so that a shorter pid overwrites a longer one completely

NEW_SUFFIX = ".new"
"""Suffix of a file that is being written and then renamed. A crash leaves it behind."""
ABANDONED_S = 3600.0
"""Age at which a file with NEW_SUFFIX counts as left by a crash. Writing one takes at most seconds."""

EVIDENCE = "evidence"
"""Name of the directory of a run's evidence, inside the directory of its checkpoints."""

_REMEDIES = {
    errno.EACCES: "make it writable for this user, or choose another directory{option}",
    errno.EPERM: "make it writable for this user, or choose another directory{option}",
    errno.EROFS: "the file system is read-only: choose another directory{option}",
    errno.ENOTDIR: "a file is in the way: choose another directory{option}, or move the file away",
    errno.EEXIST: "a file is in the way: choose another directory{option}, or move the file away",
    errno.EISDIR: "a directory is in the way: choose another directory{option}, or move that one away",
    errno.ENOENT: "this place cannot hold files: choose another directory{option}",
    errno.ENOSPC: "the disk is full: free some space, or choose another disk{option}",
    errno.EDQUOT: "your disk quota is used up: free some space, or choose another disk{option}",
    errno.EFBIG: "files may not grow that large here: raise the limit, or choose another disk{option}",
    errno.EMFILE: "too many open files: raise the limit with `ulimit -n 4096`",
    errno.ENAMETOOLONG: "choose a shorter directory{option}",
    errno.ENOLCK: "files cannot be locked on this file system: choose another disk{option}",
    errno.EOPNOTSUPP: "files cannot be locked on this file system: choose another disk{option}",
}


def explain(error: OSError, doing: str, *, option: str = "--home") -> ConfigError | None:
    """Return `error` as a message with a remedy, or None if a user cannot act on it.

    `option` is the command-line option that chose the path, or "".
    """
    remedy = _REMEDIES.get(error.errno or 0)
    if remedy is None:
        return None
    advice = remedy.format(option=f" with {option}" if option else "")
    what = f" {error.filename}" if error.filename else ""
    return ConfigError(f"cannot {doing}{what}: {(error.strerror or str(error)).lower()}", remedy=advice)


@contextmanager
def explained(doing: str, place: Path | None = None, *, option: str = "--home") -> Iterator[None]:
    """Turn OSErrors that users can act on into ConfigError. `doing` completes "cannot …".

    `place` is named if the error has no path, as with a write to an open file.
    """
    try:
        yield
    except OSError as error:
        if place is not None and not error.filename:
            error.filename = str(place)
        readable = explain(error, doing, option=option)
        if readable is None:
            raise
        raise readable from error


class Home:
    """The paths of one node. Nothing is created before `create`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.identity = path / "identity.key"
        self.peers = path / "peers.json"
        self.revisions = path / "revisions.json"
        self.publishers = path / "publishers.json"
        self.reputation = path / "reputation.json"
        self.served_evidence = path / "served-evidence"
        self.convicted_servers = path / "convicted-servers"
        self.traffic = path / "traffic.json"
        self.invitation = path / "invitation"
        self.revocations = path / "revocations"
        self.network_key = path / "network.key"
        self.network = path / "network.json"
        self.network_lock = path / "network.lock"
        self.cache = path / "cache"
        self.checkpoints = path / "checkpoints"
        self.log = path / "log"
        self._lock = path / "daemon.lock"

    def missing_folders(self) -> list[Path]:
        """Return the directories that `create` would make, each before the one that it is in."""
        places = (self.log, self.checkpoints, self.cache, self.path, *self.path.parents)
        return [place for place in places if not os.path.lexists(place)]

    def create(self) -> None:
        """Make the directories, readable only by their owner. Raises ConfigError, also for a home of another user, and
        then leaves none of them."""
        missing = self.missing_folders()
        try:
            with explained("use the home directory"):
                for directory in (self.path, self.cache, self.checkpoints, self.log):
                    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                    _check_usable(directory)
        except (ConfigError, OSError):
            remove_empty(missing)
            raise

    def check_own(self) -> None:
        """Raise ConfigError if the home is another user's. One that is missing or takes no files is no error."""
        for directory in (self.path, self.cache, self.checkpoints, self.log):
            with suppress(OSError):
                _check_usable(directory)

    @property
    def socket(self) -> Path:
        """The path of the control socket: in the home, or in the runtime directory if that path is too long for a
        socket, or none that gRPC can take: it divides addresses at commas."""
        path = self.path / "control.sock"
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES and str(path).isprintable() and "," not in str(path):
            return path
        digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
        return _runtime_directory() / f"{digest}.sock"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the home's lock for this process. Raises ConfigError, naming the daemon that has the lock."""
        with explained("lock the home directory"):
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with explained("lock the home directory", self.path):
                self._take(descriptor)
            with explained("write to the home directory", self.path):
                os.pwrite(descriptor, b"%-*d" % (_PID_BYTES, os.getpid()), 0)
            # the process that made this socket is gone, since its lock was free
            with explained("remove the old control socket"):
                self.socket.unlink(missing_ok=True)
            self._remove_abandoned()
            yield
        finally:
            os.close(descriptor)

    def _remove_abandoned(self) -> None:
        """Remove files of this home that a crash left half written. Commands may be writing others at this moment, and
        a user may keep other files here."""
        names = {each.name for each in vars(self).values()}
        for path in self.path.glob(f"*.????????{NEW_SUFFIX}"):  # as `write_private` names them
            with suppress(OSError):
                if Path(path.stem).stem in names and time.time() - path.lstat().st_mtime > ABANDONED_S:
                    path.unlink()

    def _take(self, descriptor: int) -> None:
        """Lock the home. Commands that call `owner` hold the lock for a moment. Raises ConfigError if a daemon has
        it."""
        until_s = time.monotonic() + LOOK_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise self._taken(os.pread(descriptor, _PID_BYTES, 0).strip()) from None
                time.sleep(LOOK_S / 20)
            else:
                return

    def owner(self) -> int | None:
        """Return the pid of the daemon that uses this home now, 0 if the pid is unknown, or None if there is none.

        Raises ConfigError if this user may not look into the home: a daemon of another user may run there.
        """
        try:
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CLOEXEC)
        except PermissionError as error:
            raise cannot_look_into(self.path) from error
        except OSError:
            return None
        try:
            with explained("look into the home directory", self.path):
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(descriptor, _PID_BYTES, 0).strip()
            return int(text) if text.isdigit() else 0
        finally:
            os.close(descriptor)
        return None

    def _taken(self, pid: bytes) -> ConfigError:
        who = f"pid {int(pid)}" if pid.isdigit() else "another process"
        return ConfigError(
            f"a daemon ({who}) is already running in {self.path}",
            remedy=f"choose another --home, or end that daemon: swarm-node stop --home {self.path}",
        )


def _check_usable(directory: Path) -> None:
    """Raise OSError, naming the directory, if no file can be written there. Raise ConfigError if it is another user's,
    who can replace its files by links to this user's own.

    Some file systems, such as NFS, give all files to one user, so that a new file tells who this user is there.
    """
    try:
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"is there room, and may we write?")
            own = os.fstat(probe.fileno()).st_uid
    except OSError as error:
        error.filename = str(directory)
        raise
    if directory.stat().st_uid not in {0, own}:
        raise ConfigError(
            f"the home directory {directory} belongs to another user, who could have this node overwrite your files",
            remedy="run this command as that user, or choose another directory with --home",
        )


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove these directories, each before the one that it is in, unless they have content."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def cannot_look_into(home: Path) -> ConfigError:
    remedy = "run this command as the user that owns it"
    return ConfigError(f"cannot look into the home directory {home}: permission denied", remedy=remedy)


def _runtime_directory() -> Path:
    given = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(given) / "swarm-node" if given else Path(tempfile.gettempdir()) / f"swarm-node-{os.getuid()}"
    with explained("use the runtime directory"):
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{path} is open to other users, so it cannot hold the control socket",
            remedy="remove it, set XDG_RUNTIME_DIR, or choose a shorter --home",
        )
    return path


def read_text(path: Path, max_bytes: int, remedy: str) -> str:
    """Read a text file that a user has named.

    Raises ConfigError with this remedy if the file is missing, larger than `max_bytes`, or not text.
    """
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise ConfigError(f"{path} is larger than {max_bytes} bytes", remedy=remedy)
        return data.decode()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {reason_of(error)}", remedy=remedy) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file", remedy=remedy) from error
    except ValueError as error:  # a name with a NUL byte, which a settings file can contain
        raise ConfigError(f"cannot read {str(path)!r}: {reason_of(error)}", remedy=remedy) from error


def read_json(path: Path, *, max_bytes: int) -> Any:
    """Read JSON of at most `max_bytes`. Return None if there is no file.

    Raises OSError, ValueError or RecursionError for a file that no node wrote.
    """
    if not path.is_file():
        return None
    with path.open("rb") as file:
        text = file.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise ValueError(f"the file has more than {max_bytes} bytes")
    return json.loads(text)


def replace_json(path: Path, value: Any) -> None:
    """Replace the file atomically. Raises OSError, and then leaves the file unchanged."""
    write_private(path, json.dumps(value, indent=1).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonMemory:
    """A value that a home keeps under `key` in the JSON file at `path`, for one `owner` (a field's name and value).

    If the file is missing, damaged or has another owner, only this value is lost. `what` names the value in warnings.
    """

    path: Path
    owner: tuple[str, str]
    key: str
    what: str
    max_bytes: int

    def keep(self, value: object) -> None:
        """Write `value`. Blocks. A failing disk only causes a warning."""
        name, owner = self.owner
        with self._failing_softly():
            replace_json(self.path, {name: owner, self.key: value})

    def change(self, checked: Callable[[Any], T], changed: Callable[[T | None], object]) -> None:
        """Do as `keep` with what `changed` makes of the value that `read` returns, while no other process changes
        it."""
        with self._failing_softly(), locked_by(self.path.with_suffix(".lock")):
            self.keep(changed(self.read(checked)))

    @contextmanager
    def _failing_softly(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            logger.warning("cannot write %s to remember %s: %s", self.path, self.what, reason_of(error))

    def read(self, checked: Callable[[Any], T]) -> T | None:
        """Return the value after `checked`, which raises for an invalid one. Return None if there is no valid value."""
        name, owner = self.owner
        try:
            data = read_json(self.path, max_bytes=self.max_bytes)
            return None if data is None or data[name] != owner else checked(data[self.key])
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            logger.warning("%s cannot be read, so %s is lost: %s", self.path, self.what, error)
            return None


def check_new_file(path: Path | None) -> None:
    """Raise ConfigError unless a new file can be created at `path`, given by --out. No command overwrites a file."""
    if path is None:
        return
    remedy = "choose another --out"
    folder = path.absolute().parent
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists already", remedy=f"move it away, or {remedy}")
    if not folder.is_dir():
        raise ConfigError(f"there is no directory {folder} to write {path.name} to", remedy=remedy)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{folder} is not writable for this user", remedy=remedy)


@contextmanager
def locked_by(path: Path) -> Iterator[None]:
    """Hold the lock file at `path`, which is made if it is missing, for this process alone. Blocks. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_private(path: Path, data: bytes) -> None:
    """Replace a file atomically, readable only by its owner, also while another process replaces it. Raises OSError,
    and then leaves the file unchanged."""
    descriptor, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=NEW_SUFFIX, dir=path.parent)
    beside = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        with suppress(OSError):
            beside.unlink()
        raise
