"""A database that is locked, damaged, read-only, full, gone or too new is reported in a line, and the dashboard goes
on.
"""

from __future__ import annotations

import asyncio
import re
import resource
import signal
import sqlite3
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import make_url, text
from support.history_places import postgres  # noqa: F401
from support.postgres_server import PostgresServer
from swarm_node.dashboard.history import store
from swarm_node.dashboard.history.history import DashboardHistory
from swarm_node.dashboard.history.recorder import SamplesFact, SeriesSample
from swarm_node.dashboard.history.store import HistoryError, open_store, reason, url_of
from swarm_node.dashboard.history.writer import MAX_OFTEN, MAX_ONCE, WriteQueue, WriterTiming
from swarm_node.dashboard.views import ChangeEvent
from swarm_protocol.errors import ConfigError

HASTY = WriterTiming(patience_s=0.0, retry_s=0.01, again_s=0.05, tidy_s=0.05)
DEADLINE_S = 60


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Lock the database from another connection, as another process would."""
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


@contextmanager
def full_disk(most_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond `most_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    heard = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, heard)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


def say(history: DashboardHistory, words: str) -> None:
    history.record(ChangeEvent(at=time.time(), kind="run", peer_id=None, words=words))


async def words(history: DashboardHistory) -> list[str]:
    return [each.words for each in reversed(await history.changes())]


def begun(file: Path, *said: str) -> None:
    async def run() -> None:
        async with DashboardHistory(file) as history:
            for each in said:
                say(history, each)

    asyncio.run(run())


def kept(place: Path | str) -> list[str]:
    async def run() -> list[str]:
        async with DashboardHistory(place) as history:
            assert history.problem is None
            return await words(history)

    return asyncio.run(run())


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[4096:] = b"\x5a" * (len(content) - 4096)
    file.write_bytes(content)


def test_locked_at_the_start_is_a_warning_and_recorded_data_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "BUSY_S", 0.2)
    file = tmp_path / "history.sqlite3"
    begun(file, "before")
    heard: list[HistoryError] = []

    async def run() -> None:
        with locked(file):
            history = DashboardHistory(file, timing=HASTY, on_warning=heard.append)
            await history.__aenter__()
            await until(lambda: history.problem is not None)
            say(history, "meanwhile")
            assert await words(history) == []
        await until(lambda: history.problem is None)
        assert await history.flushed(DEADLINE_S)
        assert await words(history) == ["before", "meanwhile"]
        await history.__aexit__()

    asyncio.run(run())
    assert kept(file) == ["before", "meanwhile"]
    assert "another process holds its lock" in heard[0].message
    assert heard[0].remedy


def test_locked_while_running_is_read_and_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "BUSY_S", 0.2)
    file = tmp_path / "history.sqlite3"
    heard: list[HistoryError] = []

    async def run() -> None:
        async with DashboardHistory(file, timing=HASTY, on_warning=heard.append) as history:
            say(history, "one")
            assert await history.flushed(DEADLINE_S)
            with locked(file):
                say(history, "two")
                await until(lambda: history.problem is not None)
                assert await words(history) == ["one"]
            await until(lambda: history.problem is None)
            say(history, "three")

    asyncio.run(run())
    assert kept(file) == ["one", "two", "three"]
    assert [re.sub("[0-9].*", "", each.message.removeprefix(f"the history in {file} ")) for each in heard] == [
        "cannot be used: another process holds its lock",
        "works again; it could not be used for ",
    ]


def test_locked_until_the_end_loses_waiting_data_and_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "BUSY_S", 0.2)
    file = tmp_path / "history.sqlite3"

    async def run() -> None:
        with ExitStack() as stack:
            async with DashboardHistory(file, timing=HASTY) as history:
                say(history, "one")
                assert await history.flushed(DEADLINE_S)
                stack.enter_context(locked(file))
                say(history, "two")
                await until(lambda: history.problem is not None)

    asyncio.run(run())
    assert kept(file) == ["one"]


def test_file_that_is_no_database_is_refused_and_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("this is no database at all\n")
    with pytest.raises(
        HistoryError, match=r"notes\.txt is not a SQLite database, and is left as it is: choose another"
    ):
        open_store(file)
    assert [each.name for each in tmp_path.iterdir()] == ["notes.txt"]
    assert file.read_text() == "this is no database at all\n"


def test_unreadable_database_is_moved_aside(tmp_path: Path) -> None:
    file = tmp_path / "history.sqlite3"
    content = b"SQLite format 3\0" + b"\xff" * 9000
    file.write_bytes(content)
    heard: list[HistoryError] = []

    async def run() -> None:
        async with DashboardHistory(file, on_warning=heard.append) as history:
            await asyncio.sleep(0)
            assert history.problem is None
            say(history, "new")

    asyncio.run(run())
    assert kept(file) == ["new"]
    (aside,) = tmp_path.glob("history.sqlite3.damaged-*Z")
    assert aside.read_bytes() == content
    assert str(aside) in heard[0].remedy


def test_database_damaged_while_running_is_moved_aside_and_a_new_one_created(tmp_path: Path) -> None:
    file = tmp_path / "history.sqlite3"
    begun(file, *("x" * 900 for _ in range(200)))
    heard: list[HistoryError] = []

    async def run() -> None:
        async with DashboardHistory(file, timing=HASTY, on_warning=heard.append) as history:
            damage(file)
            async with asyncio.timeout(DEADLINE_S):
                while not list(tmp_path.glob("*.damaged-*Z")):
                    say(history, "after")
                    await history.changes()
                    await asyncio.sleep(0.05)
            await until(lambda: history.problem is None)
            say(history, "last")

    asyncio.run(run())
    assert kept(file)[-1] == "last"
    assert heard


def test_history_goes_on_after_a_full_disk(tmp_path: Path) -> None:
    file = tmp_path / "history.sqlite3"
    heard: list[HistoryError] = []

    async def run() -> None:
        async with DashboardHistory(file, timing=HASTY, on_warning=heard.append) as history:
            with full_disk(300_000):
                for number in range(600):
                    say(history, f"{number}" + "x" * 900)
                await until(lambda: history.problem is not None)
            await until(lambda: history.problem is None)

    asyncio.run(run())
    assert kept(file)[-1].startswith("599x")
    assert "disk" in heard[0].message


def test_full_disk_of_sqlite_is_reported_in_words(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path / "history.sqlite3")
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorname = "SQLITE_FULL"
    with pytest.raises(HistoryError, match="the disk is full: free some space"):
        raise_told(error, store.place)
    store.close()


def raise_told(error: Exception, place: str) -> None:
    told = reason(error, place)
    assert told is not None
    raise told


def test_read_only_file_is_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "history.sqlite3"
    begun(file, "before")

    async def run() -> None:
        place = f"sqlite:///file:{file}?mode=ro&uri=true"
        async with DashboardHistory(place, timing=HASTY) as history:
            say(history, "unwritten")
            await until(lambda: history.problem is not None)
            assert "read-only" in str(history.problem)

    asyncio.run(run())
    assert kept(file) == ["before"]


def test_directory_in_the_way_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def run(place: Path) -> None:
        async with DashboardHistory(place, timing=HASTY) as history:
            assert history.problem is not None
            assert history.problem.remedy
            say(history, "hello")
            assert await words(history) == []

    asyncio.run(run(tmp_path))
    asyncio.run(run(tmp_path / "file" / "history.sqlite3"))


def test_removed_file_is_created_again(tmp_path: Path) -> None:
    file = tmp_path / "history.sqlite3"
    heard: list[HistoryError] = []

    async def run() -> None:
        async with DashboardHistory(file, timing=HASTY, on_warning=heard.append) as history:
            for path in tmp_path.iterdir():
                path.unlink()
            await until(lambda: bool(heard))
            assert history.problem is None
            say(history, "new")

    asyncio.run(run())
    assert kept(file) == ["new"]
    assert "removed or replaced" in heard[0].message


@pytest.mark.parametrize(
    "place", ["nonsense://host/db", "://", "mysql://host/db", "oracle://host/db", "postgresql+nodriver://host/db"]
)
def test_impossible_place_is_refused(place: str) -> None:
    with pytest.raises(ConfigError) as told:
        DashboardHistory(place)
    assert told.value.remedy


def test_unreachable_server_is_a_warning_without_its_password() -> None:
    heard: list[HistoryError] = []

    async def run() -> None:
        place = "postgresql+pg8000://ada:secret@127.0.0.1:1/swarm"
        async with DashboardHistory(place, timing=HASTY, on_warning=heard.append) as history:
            await until(lambda: history.problem is not None)
            say(history, "hello")
            assert await words(history) == []

    asyncio.run(run())
    assert "secret" not in str(heard[0])
    assert "127.0.0.1:1" in heard[0].message
    assert "PostgreSQL runs" in heard[0].remedy


def test_unexpected_failure_of_the_driver_is_one_warning_and_retried_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[HistoryError] = []
    asked: list[object] = []

    def fail(*about: object) -> None:
        asked.append(about)
        raise KeyError(b"\0")  # as pg8000 does when another program than PostgreSQL answers

    async def run() -> None:
        monkeypatch.setattr(store, "_opened", fail)
        timing = WriterTiming(again_s=DEADLINE_S)
        place = "postgresql+pg8000://ada:secret@127.0.0.1:1/swarm"
        async with DashboardHistory(place, timing=timing, on_warning=heard.append) as history:
            await until(lambda: history.problem is not None)
            assert await words(history) == []
            assert len(asked) == 1

    asyncio.run(run())
    assert [each.remedy for each in heard] == ["choose another place for it"]


def test_reads_while_the_database_is_away_leave_no_task_or_connection(tmp_path: Path) -> None:
    async def run() -> None:
        timing = WriterTiming(patience_s=0.0, again_s=DEADLINE_S)
        async with DashboardHistory(tmp_path, timing=timing) as history:
            problem = history.problem
            assert problem is not None
            at_first = len(traceback.extract_tb(problem.__traceback__))
            for _ in range(10):
                assert await history.changes() == ()
                await asyncio.sleep(0)
            assert history.problem is problem
            assert len(traceback.extract_tb(problem.__traceback__)) == at_first

    asyncio.run(run())


def test_server_that_dies_and_returns_gets_all_data(postgres: PostgresServer) -> None:  # noqa: F811
    place = postgres.new_database()

    async def run() -> None:
        async with DashboardHistory(place, timing=HASTY) as history:
            say(history, "one")
            assert await history.flushed(DEADLINE_S)
            await asyncio.to_thread(postgres.stop)
            try:
                say(history, "two")
                await until(lambda: history.problem is not None)
                assert await words(history) == []
            finally:
                await asyncio.to_thread(postgres.start)
            await until(lambda: history.problem is None)
            say(history, "three")

    asyncio.run(run())
    assert kept(place) == ["one", "two", "three"]


def test_recording_never_waits_and_drops_the_oldest_samples() -> None:
    queue = WriteQueue()
    for number in range(MAX_OFTEN + 7):
        queue.put(SamplesFact(float(number), (SeriesSample(name="s", unit="", value=1.0),)))
    for number in range(MAX_ONCE):
        queue.put(ChangeEvent(at=float(number), kind="run", peer_id=None, words=""))
    assert len(queue) == MAX_OFTEN + MAX_ONCE
    facts = queue.take(0.0)
    assert not queue.wait_empty(0.0)
    queue.put_back(facts)
    queue.done()
    again = queue.take(0.0)
    assert again == facts
    assert min(fact.at for fact in again if isinstance(fact, SamplesFact)) == 7.0


def test_slow_read_ends_at_its_deadline(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path / "history.sqlite3")
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    with pytest.raises(Exception, match="interrupted") as raised, store.reading(0.05) as connection:
        connection.execute(text(endless)).scalar()
    with pytest.raises(HistoryError, match="it took too long"):
        raise_told(raised.value, store.place)
    with store.reading(5.0) as connection:
        assert connection.execute(text("SELECT 1")).scalar() == 1
    store.close()


def test_history_place_without_a_scheme_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "history.sqlite3"
    begun(file, "hello")
    assert kept(str(file)) == ["hello"]
    monkeypatch.chdir(tmp_path)
    opened, _ = open_store("history.sqlite3")
    assert opened.place == str(file)
    opened.close()


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+pg8000"])
def test_url_of_postgresql_needs_no_driver_in_it(scheme: str) -> None:
    assert url_of(f"{scheme}://ada:secret@host/swarm") == make_url("postgresql+pg8000://ada:secret@host/swarm")
