"""Brings a database to the schema that this version knows, by the migrations shipped beside this file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from swarm_node.dashboard.history.facts import HistoryError

MIGRATIONS = Path(__file__).with_name("migrations")

CONTEXT: dict[str, Any] = {"version_table": "history_version", "render_as_batch": True}
"""What every context of Alembic here is given: the database may be another program's as well."""


def migrate(connection: Connection, place: str, *, folders: tuple[Path, ...] = (MIGRATIONS / "versions",)) -> None:
    """Within the transaction of `connection`. Raises HistoryError for a schema newer than this program."""
    logging.getLogger("alembic").setLevel(logging.WARNING)
    config = _config(folders)
    scripts = ScriptDirectory.from_config(config)
    found = MigrationContext.configure(connection, opts=CONTEXT).get_current_revision()
    if found == scripts.get_current_head():
        return
    if found is not None and found not in {script.revision for script in scripts.walk_revisions()}:
        raise HistoryError(
            f"the history in {place} has schema {found!r}, which a newer version of Swarm wrote",
            remedy="update this one, or let it keep its history in another place",
        )
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _config(folders: tuple[Path, ...]) -> Config:
    config = Config()
    config.set_main_option("script_location", _literal(MIGRATIONS))
    config.set_main_option("path_separator", "newline")
    config.set_main_option("version_locations", "\n".join(_literal(folder) for folder in folders))
    return config


def _literal(path: Path) -> str:
    return str(path).replace("%", "%%")
