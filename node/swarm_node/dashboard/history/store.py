"""One open database (SQLite by path or PostgreSQL by URL): transactions, size, the meaning of errors, and migration of
older schemas.

Only this module knows the libraries' errors. `reason` translates those that concern the database. Any other error is
the fault of a statement or a value. Blocking: used only in the history's threads.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sqlite3
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    create_engine,
    event,
    func,
    insert,
    inspect,
    literal_column,
    make_url,
    select,
    text,
    update,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from swarm_protocol.errors import ConfigError, SwarmError

from swarm_node.dashboard.history.schema import metadata, version
from swarm_node.storage import home

BUSY_S = 2.0
"""Time in seconds for which a statement waits for another process's lock. The writer retries for longer."""

_POSTGRESQL = ("postgresql", "postgres")
_SQLITE_BEGINNING = b"SQLite format 3\0"
_WAL_BYTES = 4 * 2**20
_CACHE_KIB = 8192
_POOL = "history"

_SQLITE = {
    "BUSY": ("another process holds its lock", "end the other program that uses it; the dashboard retries"),
    "LOCKED": ("another process holds its lock", "end the other program that uses it; the dashboard retries"),
    "READONLY": ("it is read-only", "make the file and its directory writable for this user, or choose another place"),
    "PERM": ("permission denied", "make the file and its directory writable for this user, or choose another place"),
    "FULL": ("the disk is full", "free some space, or choose another disk"),
    "IOERR": ("the disk cannot be read or written", "check the disk's space and health, or choose another disk"),
    "CANTOPEN": ("it cannot be opened", "name a file in a directory that is writable for this user"),
    "CORRUPT": ("the file is damaged", "it is renamed, and a new file begun, when the history is reopened"),
    "NOTADB": ("the file is damaged", "it is renamed, and a new file begun, when the history is reopened"),
    "INTERRUPT": ("it took too long", "try again; a faster disk, or PostgreSQL, helps a large site"),
}

_SQLSTATES = {
    "08": ("the connection broke", "check that PostgreSQL runs and can be reached; the dashboard retries"),
    "25006": ("it is read-only", "name the primary server, or a role that may write"),
    "28": ("it refuses this user", "check user and password in the URL"),
    "3D": ("there is no such database", "create it, or correct the URL"),
    "42501": ("this user may not write there", "grant this user the right to create tables in its schema"),
    "53": ("the server is out of disk, memory or connections", "free some on the server; the dashboard retries"),
    "55": ("a table is locked", "end the other transaction; the dashboard retries"),
    "57014": ("it took too long", "try again; check what else keeps PostgreSQL busy"),
    "57": ("the server is shutting down", "start the server again; the dashboard retries"),
    "58": ("the server's disk fails", "check PostgreSQL's log"),
    "XX": ("its data is damaged", "check PostgreSQL's log"),
}
_DAMAGED = ("CORRUPT", "NOTADB")

MIGRATIONS = (
    "ALTER TABLE history_steps ADD COLUMN validation_loss DOUBLE PRECISION",
    "ALTER TABLE history_runs ADD COLUMN file TEXT",
)
"""The statements that take a database from each version to the next, in order. A released statement never changes."""

VERSIONS = [f"{number:04}" for number in range(1, len(MIGRATIONS) + 2)]


class HistoryError(SwarmError):
    """The database cannot be used now: recorded facts wait, and a read finds nothing."""

    code = "history"


class DatabaseDamage(HistoryError):
    """A SQLite file is damaged, or is not a database."""


def url_of(place: Path | str) -> URL:
    """Return the URL of `place`.

    Text without `://` is a path. A PostgreSQL URL that names no driver gets the driver that swarm-node[postgres]
    installs. Raises ConfigError for a URL that is not a database's, or whose driver is not installed.
    """
    if isinstance(place, Path) or "://" not in place:
        return URL.create("sqlite", database=str(Path(place).absolute()))
    try:
        url = make_url(place)
        if url.drivername in _POSTGRESQL:
            url = url.set(drivername="postgresql+pg8000")
        url.get_dialect().import_dbapi()
    except ArgumentError as error:
        raise ConfigError(
            "the history's place is not the URL of a database",
            remedy="give a file, or postgresql://USER:PASSWORD@HOST/DATABASE",
        ) from error
    except (NoSuchModuleError, ImportError) as error:
        raise ConfigError(
            f"no driver for {place.split(':', 1)[0]!r} is installed",
            remedy="give a file, or install swarm-node[postgres] and give postgresql://USER:PASSWORD@HOST/DATABASE",
        ) from error
    if url.get_backend_name() not in ("sqlite", "postgresql"):
        raise ConfigError(f"the history cannot be kept in {url.get_backend_name()}", remedy="use SQLite or PostgreSQL")
    return url


def sqlite_file(url: URL) -> Path | None:
    """Return the SQLite file behind `url`. None for a database in memory, by a file: URI, or on a server."""
    name = url.database
    if url.get_backend_name() != "sqlite" or not name or name == ":memory:" or name.startswith("file:"):
        return None
    return Path(name)


def engine_for(url: URL, *, reads_only: bool = False) -> Engine:
    if url.get_backend_name() == "sqlite":
        return _sqlite_engine(url, reads_only=reads_only)
    options = {"timeout": 30} if url.get_driver_name() == "pg8000" else {}
    # without this, the pool logs a traceback if it cannot close a connection to a server that has gone
    logging.getLogger(f"sqlalchemy.pool.impl.QueuePool.{_POOL}").setLevel(logging.CRITICAL)
    return create_engine(
        url, pool_size=3, max_overflow=0, pool_pre_ping=True, connect_args=options, pool_logging_name=_POOL
    )


def _sqlite_engine(url: URL, *, reads_only: bool) -> Engine:
    options = {"check_same_thread": False, "isolation_level": None, "timeout": BUSY_S}
    engine = create_engine(url, pool_size=3, max_overflow=0, connect_args=options)

    def prepare(connection: Any, _: object) -> None:
        if reads_only:
            connection.execute("PRAGMA query_only = ON")
            return
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # effective only before the first table
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
        connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")

    # transactions begin here: Python's module begins them late, and none around schema changes
    begin = "BEGIN" if reads_only else "BEGIN IMMEDIATE"
    event.listen(engine, "connect", prepare)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
    return engine


def reason(error: Exception, place: str) -> HistoryError | None:
    """Translate `error` into a message with a remedy. Return None if a statement or its values failed, and not the
    database."""
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
        remedy = explained.remedy if explained else _SQLSTATES["08"][1]
        return (cause.strerror or "no answer").lower(), remedy
    # pg8000 has the SQLSTATE in a dictionary, other drivers as an attribute
    state = getattr(cause, "sqlstate", None)
    with contextlib.suppress(AttributeError, IndexError):
        state = state or cause.args[0].get("C")  # type: ignore[union-attr]
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
    """Return the primary code, such as `BUSY` for `SQLITE_BUSY_SNAPSHOT`."""
    found = re.match(r"SQLITE_([A-Z]+)", getattr(error, "sqlite_errorname", ""))
    return found.group(1) if found else ""


_STEPS_PER_CHECK = 10_000  # SQLite instructions between two checks of the clock: about a millisecond
_ROW_BYTES = 48  # overhead of a row in PostgreSQL, with one index entry
_VACUUMED_PAGES = 1024


class Store:
    """An open database. `place` is its name for messages, without a password."""

    def __init__(self, place: str, writer: Engine, reader: Engine, file: Path | None) -> None:
        self.place = place
        self._writer = writer
        self._reader = reader
        self._file = file
        self._inode = file.stat().st_ino if file else 0
        self._is_sqlite = writer.dialect.name == "sqlite"

    @contextlib.contextmanager
    def writing(self) -> Iterator[Connection]:
        """Hold a transaction, which is committed at the end."""
        with self._writer.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def reading(self, deadline_s: float) -> Iterator[Connection]:
        """Hold one snapshot of the database. A query that runs past `deadline_s` from now is interrupted."""
        with self._reader.begin() as connection:
            if not self._is_sqlite:
                connection.execute(text(f"SET LOCAL statement_timeout = {max(1, int(deadline_s * 1000))}"))
                yield connection
                return
            end = time.monotonic() + deadline_s
            driver: Any = connection.connection.driver_connection
            driver.set_progress_handler(lambda: time.monotonic() > end, _STEPS_PER_CHECK)
            try:
                yield connection
            finally:
                driver.set_progress_handler(None, 0)

    def used_bytes(self) -> int:
        """Return the size of the content in bytes. For PostgreSQL it is estimated from the size of every row."""
        with self._reader.begin() as connection:
            if not self._is_sqlite:
                sizes = (
                    select(func.sum(func.pg_column_size(literal_column(f"{table.name}.*")) + _ROW_BYTES)).select_from(
                        table
                    )
                    for table in metadata.sorted_tables
                )
                return sum(int(connection.scalar(size) or 0) for size in sizes)
            pages = connection.scalar(text("PRAGMA page_count")) - connection.scalar(text("PRAGMA freelist_count"))
            return int(pages * connection.scalar(text("PRAGMA page_size")))

    def give_back(self) -> None:
        """Return some freed space to the disk. PostgreSQL reuses its space by its own vacuum."""
        if self._is_sqlite and self._file is not None:
            with contextlib.closing(self._writer.raw_connection()) as connection:
                connection.cursor().execute(f"PRAGMA incremental_vacuum({_VACUUMED_PAGES})").fetchall()

    def check_place(self) -> None:
        """Raise HistoryError if the file was moved or removed: later writes would be lost."""
        if self._file is not None and (not self._file.exists() or self._file.stat().st_ino != self._inode):
            raise HistoryError(
                f"the history's file {self.place} was removed or replaced",
                remedy="stop the daemon before you move the file; a new file is begun",
            )

    def is_readable(self) -> bool:
        try:
            self.used_bytes()
        except (SQLAlchemyError, sqlite3.Error, OSError):
            return False
        return True

    def close(self) -> None:
        self._writer.dispose()
        self._reader.dispose()


def open_store(place: Path | str) -> tuple[Store, HistoryError | None]:
    """Open the database at its newest schema. Also return a notice if a damaged file was renamed.

    Raises ConfigError if `place` can never hold a database, HistoryError if the database cannot be used now.
    """
    url = url_of(place)
    file = sqlite_file(url)
    shown = url.render_as_string(hide_password=True) if file is None else str(file)
    try:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
        try:
            return _opened(url, file, shown), None
        except (SQLAlchemyError, sqlite3.Error, HistoryError) as error:
            if file is None or not is_damage(error):
                raise
            news = put_aside(file)
            return _opened(url, file, shown), news
    except Exception as error:  # a driver may raise any error if another kind of program answers
        if (known := reason(error, shown)) is not None:
            raise known from error
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise HistoryError(
            f"the history in {shown} cannot be used: {first}", remedy="choose another place for it"
        ) from error


def put_aside(file: Path) -> HistoryError:
    """Rename a damaged database and its log, so that they can be examined. Raises OSError."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    aside = file.with_name(f"{file.name}.damaged-{stamp}")
    for suffix in ("-wal", "-shm", ""):
        with contextlib.suppress(FileNotFoundError):
            Path(f"{file}{suffix}").replace(f"{aside}{suffix}")
    return HistoryError(
        f"the history in {file} was damaged; a new file is begun",
        remedy=f"the damaged file is kept as {aside}: delete it, or save what you can with `sqlite3 FILE .recover`",
    )


def _opened(url: URL, file: Path | None, shown: str) -> Store:
    writer = engine_for(url)
    if file is not None:
        _check_beginning(file)
    try:
        with writer.begin() as connection:
            if file is not None:
                _check_file(connection, shown)
            migrate(connection, shown)
        return Store(shown, writer, engine_for(url, reads_only=True), file)
    except BaseException:
        writer.dispose()
        raise


def migrate(connection: Connection, place: str) -> None:
    """Bring the database to the newest schema, in the transaction of `connection`.

    Raises HistoryError if the schema is newer than this program.
    """
    if not inspect(connection).has_table(version.name):
        metadata.create_all(connection)
        connection.execute(insert(version).values(version_num=VERSIONS[-1]))
        return
    found = connection.scalar(select(version.c.version_num))
    if found not in VERSIONS:
        raise HistoryError(
            f"the history in {place} has schema {found!r}, which a newer version of Swarm wrote",
            remedy="update this program, or choose another place with --history",
        )
    for statement in MIGRATIONS[VERSIONS.index(found) :]:
        connection.execute(text(statement))
    connection.execute(update(version).values(version_num=VERSIONS[-1]))


def _check_beginning(file: Path) -> None:
    """Raises HistoryError for a file that never was a database: such a file is not renamed, since it is the user's."""
    if not file.is_file():
        return
    with file.open("rb") as content:
        beginning = content.read(len(_SQLITE_BEGINNING))
    if beginning not in (b"", _SQLITE_BEGINNING):
        raise HistoryError(
            f"{file} is not a SQLite database, and is left as it is", remedy="choose another place for the history"
        )


def _check_file(connection: Connection, shown: str) -> None:
    """Check that the SQLite file is intact and a history.

    Raises DatabaseDamage or SQLite's error for a damaged file, HistoryError for another program's file.
    """
    found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
    if found != "ok":
        raise DatabaseDamage(
            f"the history in {shown} is damaged: {found}", remedy="the file is renamed when it is opened again"
        )
    tables = inspect(connection).get_table_names()
    if tables and version.name not in tables:
        raise HistoryError(
            f"{shown} is the database of another program: it has the table {tables[0][:40]!r}",
            remedy="choose another place for the history",
        )
