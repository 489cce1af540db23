"""A history of an earlier version is migrated to the current tables; one of a later version is refused."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, inspect, text
from support.history_places import place, postgres  # noqa: F401
from swarm_node.dashboard.history.schema import metadata
from swarm_node.dashboard.history.store import VERSIONS, HistoryError, Store, open_store


def columns(connection: Connection) -> dict[str, dict[str, str]]:
    """Return the type and nullability of every column by table, as text."""
    found = inspect(connection)
    return {
        table: {
            each["name"]: f"{each['type'].python_type.__name__} {each['nullable']}" for each in found.get_columns(table)
        }
        for table in found.get_table_names()
    }


def opened(place: Path | str) -> Store:  # noqa: F811
    store, news = open_store(place)
    assert news is None
    return store


def test_new_database_has_exactly_the_tables(place: Path | str) -> None:  # noqa: F811
    store = opened(place)
    with store.writing() as connection:
        assert set(columns(connection)) == set(metadata.tables)
        assert connection.execute(text("SELECT version_num FROM history_version")).all() == [(VERSIONS[-1],)]
    store.close()


def test_first_version_with_data_is_migrated(place: Path | str) -> None:  # noqa: F811
    store = opened(place)
    with store.writing() as connection:
        newest = columns(connection)
        connection.execute(text("INSERT INTO history_nodes (peer_id) VALUES ('ada')"))
        connection.execute(
            text("INSERT INTO history_presence (node_id, since, saw_join, saw_leave) VALUES (1, 5.0, true, false)")
        )
        connection.execute(text("ALTER TABLE history_steps DROP COLUMN validation_loss"))
        connection.execute(text("ALTER TABLE history_runs DROP COLUMN file"))
        connection.execute(text("UPDATE history_version SET version_num = '0001'"))
    store.close()
    store = opened(place)
    with store.writing() as connection:
        assert columns(connection) == newest
        assert connection.execute(text("SELECT id, peer_id FROM history_nodes")).all() == [(1, "ada")]
        assert connection.execute(text("SELECT node_id, since FROM history_presence")).all() == [(1, 5.0)]
        assert connection.execute(text("SELECT version_num FROM history_version")).all() == [(VERSIONS[-1],)]
    store.close()


def test_later_version_is_refused_with_one_line(place: Path | str) -> None:  # noqa: F811
    store = opened(place)
    with store.writing() as connection:
        connection.execute(text("UPDATE history_version SET version_num = 'next'"))
    store.close()
    with pytest.raises(HistoryError, match=r"schema 'next', which a newer version of Swarm wrote: update") as told:
        open_store(place)
    assert "\n" not in str(told.value)


def test_file_of_another_program_is_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "bookmarks.sqlite"
    with closing(sqlite3.connect(file)) as other:
        other.execute("CREATE TABLE bookmarks (url TEXT)")
        other.commit()
        with pytest.raises(HistoryError, match=r"the database of another program: it has the table 'bookmarks'"):
            open_store(file)
        assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("bookmarks",)]
    assert not list(tmp_path.glob("*damaged*"))
