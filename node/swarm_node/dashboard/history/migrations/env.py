"""Runs the migrations on the connection that `schema` hands over. Alembic executes this file."""

from __future__ import annotations

from alembic import context

from swarm_node.dashboard.history.schema import CONTEXT, metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, **CONTEXT)
context.run_migrations()
