"""The loss on held-out data after a step."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    with op.batch_alter_table("history_steps") as table:
        table.add_column(sa.Column("validation_loss", sa.Double(), nullable=True))
