"""The history's tables, and how a database of an earlier version is brought to them.

A database belongs to one dashboard: nobody else writes it. Peers, runs and series are stored by number, since their
names are long and repeated. `looked_at` is when the collector last recorded who is there: presences that are open when
a dashboard starts ended then, or went on.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    insert,
    inspect,
    select,
    text,
    update,
)

from swarm_node.dashboard.history.facts import HistoryError

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
    }
)

collector = Table(
    "history_collector",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),  # always 1
    Column("looked_at", Double, nullable=False),
)

nodes = Table(
    "history_nodes",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("peer_id", Text, nullable=False, unique=True),
)

presence = Table(
    "history_presence",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("node_id", ForeignKey("history_nodes.id"), nullable=False),
    Column("since", Double, nullable=False, index=True),
    Column("until", Double, index=True),  # null while it is there
    Column("saw_join", Boolean, nullable=False),  # false: it was there when the dashboard began to look
    Column("saw_leave", Boolean, nullable=False),
    Index("ix_history_presence_node_id", "node_id", "since"),
)

series = Table(
    "history_series",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("unit", Text, nullable=False),
)

samples = Table(
    "history_samples",
    metadata,
    Column("series_id", ForeignKey("history_series.id"), primary_key=True),
    Column("width_s", Integer, primary_key=True),
    Column("bucket", BigInteger, primary_key=True),  # Unix seconds // width_s
    Column("num", Integer, nullable=False),
    Column("total", Double, nullable=False),
    sqlite_with_rowid=False,
)

runs = Table(
    "history_runs",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run", Text, nullable=False, unique=True),
    Column("newest_at", Double, nullable=False),
)

steps = Table(
    "history_steps",
    metadata,
    Column("run_id", ForeignKey("history_runs.id"), primary_key=True),
    Column("outer_step", BigInteger, primary_key=True),
    Column("at", Double, nullable=False),
    Column("loss", Double),  # null: not a number
    Column("digest", Text, nullable=False),
    Column("members", Text, nullable=False),  # JSON: numbers of nodes
    Column("num_tokens", BigInteger, nullable=False),
    Column("seconds", Double),
    Column("phases", Text, nullable=False),  # JSON: seconds by name
    Column("bytes_per_parameter", Double),
    Column("validation_loss", Double),
    sqlite_with_rowid=False,
)

contributions = Table(
    "history_contributions",
    metadata,
    Column("run_id", ForeignKey("history_runs.id"), primary_key=True),
    Column("node_id", ForeignKey("history_nodes.id"), primary_key=True, index=True),
    Column("tokens", BigInteger, nullable=False),
    Column("rounds", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

refusals = Table(
    "history_refusals",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", ForeignKey("history_runs.id"), nullable=False),
    Column("outer_step", BigInteger, nullable=False),
    Column("at", Double, nullable=False, index=True),
    Column("peer_id", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("by_peer_id", Text, nullable=False),
    Column("reason", Text, nullable=False),
    UniqueConstraint("run_id", "outer_step", "peer_id", "by_peer_id"),
)

happenings = Table(
    "history_happenings",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("at", Double, nullable=False, index=True),
    Column("kind", Text, nullable=False),
    Column("peer_id", Text),
    Column("words", Text, nullable=False),
)

version = Table("history_version", metadata, Column("version_num", String(32), primary_key=True))

MIGRATIONS = ("ALTER TABLE history_steps ADD COLUMN validation_loss DOUBLE PRECISION",)
"""The statement that takes a database from each version to the next. One that was released is never changed."""

VERSIONS = [f"{number:04}" for number in range(1, len(MIGRATIONS) + 2)]


def migrate(connection: Connection, place: str) -> None:
    """Bring the database to the newest schema, in the transaction of `connection`.

    Raises HistoryError for a schema newer than this program.
    """
    if not inspect(connection).has_table(version.name):
        metadata.create_all(connection)
        connection.execute(insert(version).values(version_num=VERSIONS[-1]))
        return
    found = connection.scalar(select(version.c.version_num))
    if found not in VERSIONS:
        raise HistoryError(
            f"the history in {place} has schema {found!r}, which a newer version of Swarm wrote",
            remedy="update this one, or let it keep its history in another place",
        )
    for statement in MIGRATIONS[VERSIONS.index(found) :]:
        connection.execute(text(statement))
    connection.execute(update(version).values(version_num=VERSIONS[-1]))
