"""Connects to the history's database, SQLite by path or PostgreSQL by URL, and says in words what fails.

The one place that knows the libraries' errors. `reason` translates what a database refuses; what it does not know is
the fault of a statement or of a value, not of the database.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sqlite3
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.pool import StaticPool
from swarm_protocol.errors import ConfigError

from swarm_node.dashboard.history.facts import HistoryError
from swarm_node.storage import home

BUSY_S = 2.0
"""How long a statement waits for another process's lock. The writer tries again for longer."""

_WAL_BYTES = 4 * 2**20
_CACHE_KIB = 8192
_POOL = "history"
_THREADS = {"check_same_thread": False, "isolation_level": None}

_SQLITE = {
    "BUSY": ("another process holds its lock", "end the other program that uses it; it is tried again"),
    "LOCKED": ("another process holds its lock", "end the other program that uses it; it is tried again"),
    "READONLY": ("it is read-only", "make the file and its directory writable for this user, or choose another place"),
    "PERM": ("permission denied", "make the file and its directory writable for this user, or choose another place"),
    "FULL": ("the disk is full", "free some space, or choose another disk"),
    "IOERR": ("the disk cannot be read or written", "check the disk's space and health, or choose another disk"),
    "CANTOPEN": ("it cannot be opened", "name a file in a directory that is writable for this user"),
    "CORRUPT": ("the file is damaged", "it is put aside, and a new one begun, when the history is opened again"),
    "NOTADB": ("the file is no database", "it is put aside, and a new one begun, when the history is opened again"),
    "INTERRUPT": ("it took too long", "try again; a faster disk, or PostgreSQL, helps a large site"),
}

_SQLSTATES = {
    "08": ("the connection broke", "check that PostgreSQL runs and can be reached; it is tried again"),
    "25006": ("it is read-only", "name the primary server, or a role that may write"),
    "28": ("it does not let this user in", "check user and password in the URL"),
    "3D": ("there is no such database", "create it, or correct the URL"),
    "42501": ("this user may not write there", "grant it the right to create tables in its schema"),
    "53": ("the server is out of disk, memory or connections", "free some there; it is tried again"),
    "55": ("a table is locked", "end the other transaction; it is tried again"),
    "57014": ("it took too long", "try again; check what else keeps PostgreSQL busy"),
    "57": ("the server is shutting down", "start it again; it is tried again"),
    "58": ("the server's disk fails", "check PostgreSQL's log"),
    "XX": ("its data is damaged", "check PostgreSQL's log"),
}
_DAMAGED = ("CORRUPT", "NOTADB")


class DatabaseDamage(HistoryError):
    """A SQLite file is not, or not any more, a database."""


def url_of(place: Path | str) -> URL:
    """A text without `://` is a path. Raises ConfigError for the URL of no database whose driver is installed."""
    if isinstance(place, Path) or "://" not in place:
        return URL.create("sqlite", database=str(Path(place).absolute()))
    try:
        url = make_url(place)
        url.get_dialect().import_dbapi()
    except ArgumentError as error:
        raise ConfigError(
            "the history's place is no URL of a database",
            remedy="give a file, or postgresql+pg8000://USER:PASSWORD@HOST/DATABASE",
        ) from error
    except (NoSuchModuleError, ImportError) as error:
        raise ConfigError(
            f"no driver for {place.split(':', 1)[0]!r} is installed",
            remedy="install swarm-node[postgres], and begin the URL with postgresql+pg8000://",
        ) from error
    if url.get_backend_name() not in ("sqlite", "postgresql"):
        raise ConfigError(f"the history cannot be kept in {url.get_backend_name()}", remedy="use SQLite or PostgreSQL")
    return url


def sqlite_file(url: URL) -> Path | None:
    """The file behind `url`; None in memory, by a URI, or at a server."""
    name = url.database
    if url.get_backend_name() != "sqlite" or not name or name == ":memory:" or name.startswith("file:"):
        return None
    return Path(name)


def engine_for(url: URL, *, reads_only: bool = False) -> Engine:
    if url.get_backend_name() == "sqlite":
        return _sqlite_engine(url, reads_only=reads_only)
    options = {"timeout": 30} if url.get_driver_name() == "pg8000" else {}
    # the pool would tell, with a traceback, that a connection to a server that has gone could not be closed
    logging.getLogger(f"sqlalchemy.pool.impl.QueuePool.{_POOL}").setLevel(logging.CRITICAL)
    return create_engine(
        url, pool_size=3, max_overflow=0, pool_pre_ping=True, connect_args=options, pool_logging_name=_POOL
    )


def memory_engine() -> Engine:
    """One connection, to be used by one thread at a time."""
    engine = create_engine("sqlite://", poolclass=StaticPool, connect_args=_THREADS)
    _begin_with(engine, "BEGIN")
    return engine


def _sqlite_engine(url: URL, *, reads_only: bool) -> Engine:
    options = _THREADS | {"timeout": BUSY_S}
    engine = create_engine(url, pool_size=3, max_overflow=0, connect_args=options)

    def prepare(connection: Any, _: object) -> None:
        if reads_only:
            connection.execute("PRAGMA query_only = ON")
            return
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # heard only before the first table
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
        connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")

    event.listen(engine, "connect", prepare)
    _begin_with(engine, "BEGIN" if reads_only else "BEGIN IMMEDIATE")
    return engine


def _begin_with(engine: Engine, begin: str) -> None:
    """Python's module would begin transactions late, and none around tables; `isolation_level` None leaves it to us."""

    def do_it(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    event.listen(engine, "begin", do_it)


def reason(error: Exception, place: str) -> HistoryError | None:
    """`error` as a line with a remedy, if the database is at fault; None: the statement or its values are."""
    if isinstance(error, HistoryError):
        return error
    known = _known(error)
    if known is None:
        return None
    what, remedy = known
    kind = DatabaseDamage if is_damage(error) else HistoryError
    return kind(f"the history in {place} cannot be used: {what}", remedy=remedy)


def _known(error: Exception) -> tuple[str, str] | None:
    cause = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(cause, sqlite3.Error):
        return _SQLITE.get(_sqlite_code(cause))
    if isinstance(cause, OSError):
        explained = home.explain(cause, "use", option="")
        remedy = explained.remedy if explained else "check that PostgreSQL runs and can be reached; it is tried again"
        return (cause.strerror or "no answer").lower(), remedy
    state = _sqlstate(cause)
    if state:
        return _SQLSTATES.get(state) or _SQLSTATES.get(state[:2])
    if isinstance(error, DBAPIError) and (error.connection_invalidated or type(cause).__name__ == "InterfaceError"):
        return _SQLSTATES["08"]
    return None


def is_damage(error: Exception) -> bool:
    if isinstance(error, DatabaseDamage):
        return True
    cause = error.orig if isinstance(error, DBAPIError) else error
    return isinstance(cause, sqlite3.Error) and _sqlite_code(cause) in _DAMAGED


def _sqlite_code(error: sqlite3.Error) -> str:
    """`BUSY` of `SQLITE_BUSY_SNAPSHOT`."""
    found = re.match(r"SQLITE_([A-Z]+)", getattr(error, "sqlite_errorname", ""))
    return found.group(1) if found else ""


def _sqlstate(error: object) -> str:
    """pg8000 gives the server's fields as a dictionary, other drivers as an attribute."""
    told = getattr(error, "sqlstate", None)
    with contextlib.suppress(AttributeError, IndexError):
        told = told or error.args[0].get("C")  # type: ignore[attr-defined]
    return str(told or "")
