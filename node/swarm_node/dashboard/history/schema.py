"""The history's tables, and how texts are made to fit them.

Texts may be hostile. `bounded` shortens them before they are stored. Statements take them as bound parameters only, and
pages must escape them. Times are Unix seconds.

Only one dashboard writes to a database. Peers, runs and series are stored by row id, since their names are long and
repeated. `looked_at` is when the collector last recorded presence: presences that are open when a dashboard starts
either ended then or continue.
"""

from __future__ import annotations

import hashlib

import sqlalchemy as sa

MAX_NAME = 256
_DIGEST = 16

metadata = sa.MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
    }
)

collector = sa.Table(
    "history_collector",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),  # always 1
    sa.Column("looked_at", sa.Double, nullable=False),
)

nodes = sa.Table(
    "history_nodes",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("peer_id", sa.Text, nullable=False, unique=True),
)

presence = sa.Table(
    "history_presence",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("node_id", sa.ForeignKey("history_nodes.id"), nullable=False),
    sa.Column("since", sa.Double, nullable=False, index=True),
    sa.Column("until", sa.Double, index=True),  # null while the node is there
    sa.Column("saw_join", sa.Boolean, nullable=False),  # false if the node was there when the dashboard started
    sa.Column("saw_leave", sa.Boolean, nullable=False),
    sa.Index("ix_history_presence_node_id", "node_id", "since"),
)

series = sa.Table(
    "history_series",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("unit", sa.Text, nullable=False),
)

samples = sa.Table(
    "history_samples",
    metadata,
    sa.Column("series_id", sa.ForeignKey("history_series.id"), primary_key=True),
    sa.Column("width_s", sa.Integer, primary_key=True),
    sa.Column("bucket", sa.BigInteger, primary_key=True),  # Unix seconds // width_s
    sa.Column("num", sa.Integer, nullable=False),
    sa.Column("total", sa.Double, nullable=False),
    sqlite_with_rowid=False,
)

runs = sa.Table(
    "history_runs",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("run", sa.Text, nullable=False, unique=True),
    sa.Column("newest_at", sa.Double, nullable=False),
    sa.Column("file", sa.Text),  # as its author signed it
)

steps = sa.Table(
    "history_steps",
    metadata,
    sa.Column("run_id", sa.ForeignKey("history_runs.id"), primary_key=True),
    sa.Column("outer_step", sa.BigInteger, primary_key=True),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("loss", sa.Double),  # null: not a number
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("members", sa.Text, nullable=False),  # JSON: row ids of nodes
    sa.Column("num_tokens", sa.BigInteger, nullable=False),
    sa.Column("seconds", sa.Double),
    sa.Column("phases", sa.Text, nullable=False),  # JSON: seconds by name
    sa.Column("bytes_per_parameter", sa.Double),
    sa.Column("validation_loss", sa.Double),
    sqlite_with_rowid=False,
)

contributions = sa.Table(
    "history_contributions",
    metadata,
    sa.Column("run_id", sa.ForeignKey("history_runs.id"), primary_key=True),
    sa.Column("node_id", sa.ForeignKey("history_nodes.id"), primary_key=True, index=True),
    sa.Column("tokens", sa.BigInteger, nullable=False),
    sa.Column("rounds", sa.BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

refusals = sa.Table(
    "history_refusals",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("run_id", sa.ForeignKey("history_runs.id"), nullable=False),
    sa.Column("outer_step", sa.BigInteger, nullable=False),
    sa.Column("at", sa.Double, nullable=False, index=True),
    sa.Column("peer_id", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("by_peer_id", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.UniqueConstraint("run_id", "outer_step", "peer_id", "by_peer_id"),
)

happenings = sa.Table(
    "history_happenings",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("at", sa.Double, nullable=False, index=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("peer_id", sa.Text),
    sa.Column("words", sa.Text, nullable=False),
)

version = sa.Table("history_version", metadata, sa.Column("version_num", sa.String(32), primary_key=True))


def bounded(text: str, limit: int = MAX_NAME) -> str:
    """Shorten `text` to at most `limit` characters, ending in a digest of the whole. Text that fits stays unchanged.

    PostgreSQL does not accept a zero character, and neither database accepts an unpaired surrogate: both become
    question marks.
    """
    if len(text) <= limit and text.isascii() and "\0" not in text:
        return text
    clean = text.replace("\0", "?").encode("utf-8", "replace").decode("utf-8")
    if len(clean) <= limit:
        return clean
    digest = hashlib.sha256(clean.encode()).hexdigest()[:_DIGEST]
    return f"{clean[: limit - _DIGEST - 1]}…{digest}"
