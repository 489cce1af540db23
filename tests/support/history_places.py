"""Fixtures of the history's tests: each kind of database, empty for every test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.postgres_server import PostgresServer, installed, postgres_server


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    programs = installed()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: /usr/lib/postgresql/*/bin/initdb is missing")
    with postgres_server(programs) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    if request.param == "sqlite":
        return tmp_path / "history.sqlite3"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()
