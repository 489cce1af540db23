"""One open database: transactions for the one writer and for readers, its size, and how it is opened and put aside.

Blocking; used from the history's threads only.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Connection, Engine, Table, func, literal_column, select, text
from sqlalchemy.exc import SQLAlchemyError

from swarm_node.dashboard.history.database import (
    DatabaseDamage,
    engine_for,
    is_damage,
    memory_engine,
    reason,
    sqlite_file,
    url_of,
)
from swarm_node.dashboard.history.facts import HistoryError
from swarm_node.dashboard.history.schema import metadata, migrate

logger = logging.getLogger(__name__)

_STEPS_A_LOOK = 10_000  # of SQLite's machine, between two looks at the clock: about a millisecond
_ROW_BYTES = 48  # of PostgreSQL's own and of an index entry
_MAX_COPIED_BYTES = 64 * 2**20
_VACUUMED_PAGES = 1024


class Store:
    """`place` names it to people, without a password."""

    def __init__(self, place: str, writer: Engine, reader: Engine | None, file: Path | None) -> None:
        self.place = place
        self._writer = writer
        self._reader = reader or writer
        self._alone = threading.Lock() if reader is None else contextlib.nullcontext()
        self._file = file
        self._inode = file.stat().st_ino if file else 0
        self._is_sqlite = writer.dialect.name == "sqlite"

    @contextlib.contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction, committed at the end."""
        with self._alone, self._writer.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def reading(self, deadline_s: float) -> Iterator[Connection]:
        """One state of the database; a query that runs past `deadline_s` from now is interrupted."""
        with self._alone, self._reader.begin() as connection:
            self._limit(connection, deadline_s)
            try:
                yield connection
            finally:
                self._unlimit(connection)

    def _limit(self, connection: Connection, deadline_s: float) -> None:
        if not self._is_sqlite:
            connection.execute(text(f"SET LOCAL statement_timeout = {max(1, int(deadline_s * 1000))}"))
            return
        end = time.monotonic() + deadline_s
        driver = connection.connection.driver_connection
        assert driver is not None
        driver.set_progress_handler(lambda: time.monotonic() > end, _STEPS_A_LOOK)

    def _unlimit(self, connection: Connection) -> None:
        driver = connection.connection.driver_connection
        if self._is_sqlite and driver is not None:
            driver.set_progress_handler(None, 0)

    def used_bytes(self) -> int:
        """Of what is kept now, without what retention freed; for PostgreSQL an estimate from every row's size."""
        with self._alone, self._reader.begin() as connection:
            if not self._is_sqlite:
                return sum(_row_bytes(connection, table) for table in metadata.sorted_tables)
            pages = connection.scalar(text("PRAGMA page_count")) - connection.scalar(text("PRAGMA freelist_count"))
            return int(pages * connection.scalar(text("PRAGMA page_size")))

    def give_back(self) -> None:
        """Returns a little of the freed space to the disk. PostgreSQL's own vacuum reuses it."""
        if self._is_sqlite and self._file is not None:
            with contextlib.closing(self._writer.raw_connection()) as connection:
                connection.cursor().execute(f"PRAGMA incremental_vacuum({_VACUUMED_PAGES})").fetchall()

    def check_place(self) -> None:
        """Raises HistoryError if the file is not any more where it was: what is written to it would be lost."""
        if self._file is not None and (not self._file.exists() or self._file.stat().st_ino != self._inode):
            raise HistoryError(
                f"the history's file {self.place} was removed or replaced",
                remedy="stop the daemon before you move it; a new one is begun",
            )

    def copy_to(self, engine: Engine) -> None:
        """Fills an empty engine in memory with what this store holds, if that is not too much."""
        if not self._is_sqlite or self.used_bytes() > _MAX_COPIED_BYTES:
            return
        with (
            contextlib.closing(self._reader.raw_connection()) as source,
            contextlib.closing(engine.raw_connection()) as target,
        ):
            assert source.driver_connection is not None
            source.driver_connection.backup(target.driver_connection)

    def close(self) -> None:
        self._writer.dispose()
        self._reader.dispose()


def open_memory(like: Store | None = None) -> Store:
    """A history that ends with the process; begun with what `like` holds, where that can still be read."""
    engine = memory_engine()
    if like is not None:
        try:
            like.copy_to(engine)
        except (SQLAlchemyError, sqlite3.Error) as error:
            logger.info("the history in memory begins empty: %s", error)
            engine.dispose()
            engine = memory_engine()
    metadata.create_all(engine)
    return Store("memory", engine, None, None)


def open_store(place: Path | str) -> tuple[Store, HistoryError | None]:
    """The database at its newest schema; beside it the news that a damaged file was put aside.

    Raises ConfigError for a place that cannot be one, HistoryError for one that cannot be used now.
    """
    url = url_of(place)
    shown = str(place) if isinstance(place, Path) else url.render_as_string(hide_password=True)
    file = sqlite_file(url)
    try:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
        try:
            return _opened(place, shown), None
        except (SQLAlchemyError, sqlite3.Error, HistoryError) as error:
            if file is None or not is_damage(error):
                raise
            news = put_aside(file)
            return _opened(place, shown), news
    except (SQLAlchemyError, sqlite3.Error, OSError, HistoryError) as error:
        raise _told(error, shown) from error


def put_aside(file: Path) -> HistoryError:
    """Renames a damaged database and its log, so that it can be looked at. Raises OSError."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    aside = file.with_name(f"{file.name}.damaged-{stamp}")
    for suffix in ("-wal", "-shm", ""):
        with contextlib.suppress(FileNotFoundError):
            Path(f"{file}{suffix}").replace(f"{aside}{suffix}")
    return HistoryError(
        f"the history in {file} was damaged; a new one is begun",
        remedy=f"the damaged file is kept as {aside}: delete it, or save what you can with `sqlite3 FILE .recover`",
    )


def _opened(place: Path | str, shown: str) -> Store:
    url = url_of(place)
    writer, file = engine_for(url), sqlite_file(url)
    try:
        if file is not None:
            _check_pages(writer, shown)
        with writer.begin() as connection:
            migrate(connection, shown)
        return Store(shown, writer, engine_for(url, reads_only=True), file)
    except BaseException:
        writer.dispose()
        raise


def _check_pages(engine: Engine, shown: str) -> None:
    """Raises DatabaseDamage; or what SQLite raises where it cannot even begin."""
    with engine.connect() as connection:
        found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
    if found != "ok":
        raise DatabaseDamage(
            f"the history in {shown} is damaged: {found}", remedy="it is put aside when it is opened again"
        )


def _told(error: Exception, shown: str) -> HistoryError:
    known = reason(error, shown)
    if known is not None:
        return known
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return HistoryError(f"the history in {shown} cannot be used: {first}", remedy="choose another place for it")


def _row_bytes(connection: Connection, table: Table) -> int:
    size = func.coalesce(func.sum(func.pg_column_size(literal_column(f"{table.name}.*")) + _ROW_BYTES), 0)
    return int(connection.scalar(select(size).select_from(table)) or 0)
