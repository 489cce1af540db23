"""A real PostgreSQL for tests, on a socket in a separate folder, run by a user without rights."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, text


def installed() -> Path | None:
    """Return the newest version's programs."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found else None


class PostgresServer:
    """A server; `folder` belongs to the user that runs it."""

    def __init__(self, programs: Path, folder: Path, user: str | None) -> None:
        self._programs = programs
        self._folder = folder
        self._user = user
        self._num_databases = 0

    def url(self, database: str = "postgres") -> str:
        return f"postgresql+pg8000://tester@/{database}?unix_sock={self._folder}/.s.PGSQL.5432"

    def new_database(self) -> str:
        """Return its URL."""
        self._num_databases += 1
        name = f"history{self._num_databases}"
        engine = create_engine(self.url(), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        engine.dispose()
        return self.url(name)

    def create(self) -> None:
        self._run("initdb", "-U", "tester", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C")

    def start(self) -> None:
        options = f"-k {self._folder} -c listen_addresses= -c fsync=off"
        self._run("pg_ctl", "-w", "-l", f"{self._folder}/log", "-o", options, "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-w", "-m", "immediate", "stop")

    def _run(self, program: str, *arguments: str) -> None:
        # the server outlives pg_ctl and would hold a pipe open
        command = [str(self._programs / program), "-D", f"{self._folder}/data", *arguments]
        with (self._folder / f"{program}.out").open("ab") as out:
            quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            subprocess.run(command, check=True, user=self._user, cwd="/", timeout=90, **quiet)


@contextmanager
def postgres_server(programs: Path) -> Iterator[PostgresServer]:
    folder = Path(tempfile.mkdtemp(prefix="swarm-pg-"))
    user = "nobody" if os.geteuid() == 0 else None
    if user is not None:
        os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
    server = PostgresServer(programs, folder, user)
    try:
        server.create()
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
