"""The first schema: presence, series, runs with steps and contributions, refusals, happenings."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    _nodes()
    _series()
    _runs()
    _events()


def _nodes() -> None:
    op.create_table(
        "history_collector",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("looked_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_history_collector")),
    )
    op.create_table(
        "history_nodes",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("peer_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_history_nodes")),
        sa.UniqueConstraint("peer_id", name=op.f("uq_history_nodes_peer_id")),
    )
    op.create_table(
        "history_presence",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("node_id", sa.Integer(), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("until", sa.Double(), nullable=True),
        sa.Column("saw_join", sa.Boolean(), nullable=False),
        sa.Column("saw_leave", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["node_id"], ["history_nodes.id"], name=op.f("fk_history_presence_node_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_history_presence")),
    )
    op.create_index("ix_history_presence_node_id", "history_presence", ["node_id", "since"], unique=False)
    op.create_index(op.f("ix_history_presence_since"), "history_presence", ["since"], unique=False)
    op.create_index(op.f("ix_history_presence_until"), "history_presence", ["until"], unique=False)


def _series() -> None:
    op.create_table(
        "history_series",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("unit", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_history_series")),
        sa.UniqueConstraint("name", name=op.f("uq_history_series_name")),
    )
    op.create_table(
        "history_samples",
        sa.Column("series_id", sa.Integer(), nullable=False),
        sa.Column("width_s", sa.Integer(), nullable=False),
        sa.Column("bucket", sa.BigInteger(), nullable=False),
        sa.Column("num", sa.Integer(), nullable=False),
        sa.Column("total", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["series_id"], ["history_series.id"], name=op.f("fk_history_samples_series_id")),
        sa.PrimaryKeyConstraint("series_id", "width_s", "bucket", name=op.f("pk_history_samples")),
        sqlite_with_rowid=False,
    )


def _runs() -> None:
    op.create_table(
        "history_runs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("newest_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_history_runs")),
        sa.UniqueConstraint("run", name=op.f("uq_history_runs_run")),
    )
    op.create_table(
        "history_steps",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("outer_step", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("members", sa.Text(), nullable=False),
        sa.Column("num_tokens", sa.BigInteger(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.Column("phases", sa.Text(), nullable=False),
        sa.Column("bytes_per_parameter", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["history_runs.id"], name=op.f("fk_history_steps_run_id")),
        sa.PrimaryKeyConstraint("run_id", "outer_step", name=op.f("pk_history_steps")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "history_contributions",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("node_id", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("rounds", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["node_id"], ["history_nodes.id"], name=op.f("fk_history_contributions_node_id")),
        sa.ForeignKeyConstraint(["run_id"], ["history_runs.id"], name=op.f("fk_history_contributions_run_id")),
        sa.PrimaryKeyConstraint("run_id", "node_id", name=op.f("pk_history_contributions")),
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_history_contributions_node_id"), "history_contributions", ["node_id"], unique=False)


def _events() -> None:
    op.create_table(
        "history_refusals",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("outer_step", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("peer_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("by_peer_id", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["history_runs.id"], name=op.f("fk_history_refusals_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_history_refusals")),
        sa.UniqueConstraint("run_id", "outer_step", "peer_id", "by_peer_id", name=op.f("uq_history_refusals_run_id")),
    )
    op.create_index(op.f("ix_history_refusals_at"), "history_refusals", ["at"], unique=False)
    op.create_table(
        "history_happenings",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("peer_id", sa.Text(), nullable=True),
        sa.Column("words", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_history_happenings")),
    )
    op.create_index(op.f("ix_history_happenings_at"), "history_happenings", ["at"], unique=False)
