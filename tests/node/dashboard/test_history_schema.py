"""The migrations make exactly the tables that the code uses, keep what is there, and refuse what they do not know."""

from __future__ import annotations

from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, inspect, text
from support.history_places import place, postgres  # noqa: F401
from swarm_node.dashboard.history.facts import HistoryError
from swarm_node.dashboard.history.schema import CONTEXT, MIGRATIONS, metadata, migrate
from swarm_node.dashboard.history.store import engine_for, open_store, url_of

NEXT = """
import sqlalchemy as sa
from alembic import op
revision = "next"
down_revision = "0002"
def upgrade():
    with op.batch_alter_table("history_nodes") as table:
        table.add_column(sa.Column("colour", sa.Text(), nullable=False, server_default="grey"))
"""


def differences(connection: Connection) -> list[object]:
    context = MigrationContext.configure(connection, opts=CONTEXT | {"compare_server_default": True})
    return list(compare_metadata(context, metadata))


def test_migrations_make_exactly_the_tables(place: Path | str) -> None:  # noqa: F811
    store, news = open_store(place)
    assert news is None
    store.close()
    engine = engine_for(url_of(place))
    with engine.begin() as connection:
        assert differences(connection) == []
        assert "history_version" in inspect(connection).get_table_names()
        connection.execute(text("DROP INDEX ix_history_presence_until"))
        assert differences(connection) != []
    engine.dispose()


def test_first_revision_with_data_is_brought_forward_and_then_too_new(
    place: Path | str,  # noqa: F811
    tmp_path: Path,
) -> None:
    store, _ = open_store(place)
    store.close()
    later = tmp_path / "later"
    later.mkdir()
    (later / "next.py").write_text(NEXT)
    engine = engine_for(url_of(place))
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO history_nodes (peer_id) VALUES ('ada')"))
        connection.execute(
            text("INSERT INTO history_presence (node_id, since, saw_join, saw_leave) VALUES (1, 5.0, true, false)")
        )
    with engine.begin() as connection:
        migrate(connection, "here", folders=(MIGRATIONS / "versions", later))
        assert connection.execute(text("SELECT id, peer_id, colour FROM history_nodes")).all() == [(1, "ada", "grey")]
        assert connection.execute(text("SELECT node_id, since FROM history_presence")).all() == [(1, 5.0)]
    engine.dispose()
    with pytest.raises(HistoryError, match=r"schema 'next', which a newer version of Swarm wrote: update") as told:
        open_store(place)
    assert "\n" not in str(told.value)


def test_migrations_travel_with_the_package() -> None:
    assert {path.name for path in MIGRATIONS.rglob("*.py")} >= {"env.py", "r0001_first.py"}
