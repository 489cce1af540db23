"""The directory of a node: its owner, and the messages when it cannot be used."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from swarm_node import cli
from swarm_node.storage.home import ABANDONED_S, MAX_SOCKET_PATH_BYTES, Home, explained
from swarm_protocol.errors import ConfigError

HOLD = """
import sys, time, pathlib, swarm_node.storage.home
with swarm_node.storage.home.Home(pathlib.Path(sys.argv[1])).locked():
    print("held", flush=True)
    time.sleep(60)
"""


def made(path: Path) -> Home:
    home = Home(path)
    home.create()
    return home


def test_create_makes_private_directories(tmp_path: Path) -> None:
    home = made(tmp_path / "deep" / "home")
    for directory in (home.path, home.cache, home.checkpoints, home.log):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    home.create()


@pytest.mark.parametrize("place", ["/proc/no-such", "/sys/kernel", "/dev/null", "/dev/null/home"])
def test_create_in_an_unwritable_place_says_what_to_do(place: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot use the home directory") as error:
        Home(Path(place)).create()
    assert place.split("/")[1] in error.value.message
    assert "--home" in error.value.remedy


def give_away(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the directory another user's, or let new files seem to be another user's if this one is not root."""
    if os.geteuid() == 0:
        os.chown(directory, 12345, -1)
    else:
        of_file = os.fstat

        def of_another(file: int) -> os.stat_result:
            fields, more = of_file(file).__reduce__()[1]
            return os.stat_result((*fields[:4], 12345, *fields[5:]), more)

        monkeypatch.setattr(os, "fstat", of_another)


@pytest.mark.parametrize("inner", ["", "log"])
def test_home_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inner: str) -> None:
    """That user could have put a link to any file of this one in the place of daemon.lock, and it was overwritten."""
    home = made(tmp_path / "home")
    give_away(home.path / inner, monkeypatch)
    with pytest.raises(ConfigError, match=r"belongs to another user") as error:
        home.create()
    assert "--home" in error.value.remedy


@pytest.mark.parametrize(
    "command",
    [
        "chat story --peers swarm.example.org",
        "invite --peers swarm.example.org",
        "run init run.toml --start someone/tiny",
    ],
    ids=["keeps revisions", "keeps invitations", "keeps downloads"],
)
def test_command_that_keeps_files_refuses_a_home_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """It made its lock file, or wrote a download, wherever that user's links led."""
    monkeypatch.chdir(tmp_path)
    assert cli.run(["invite", "--new-network", "--home", "home"]) == 0
    kept = sorted(Path("home").rglob("*"))
    give_away(Path("home"), monkeypatch)
    assert cli.run([*command.split(), "--home", "home"]) == 1
    assert "belongs to another user" in capsys.readouterr().err
    assert sorted(Path("home").rglob("*")) == kept


def test_check_own_of_a_home_that_is_missing_or_read_only_passes(tmp_path: Path) -> None:
    Home(tmp_path / "missing").check_own()
    Home(Path("/proc")).check_own()


def test_home_on_a_file_system_that_gives_all_files_to_one_user_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = made(tmp_path / "home")
    owner = 12345 if os.geteuid() == 0 else os.geteuid()
    for folder in (home.path, home.cache, home.checkpoints, home.log):
        os.chown(folder, owner, -1)
    monkeypatch.setattr(os, "fstat", lambda _: home.path.stat())
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    home.create()


def test_create_on_a_full_disk_says_so_and_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*, dir: Path) -> None:  # noqa: A002 the library's name
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), dir / "probe")

    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    with pytest.raises(ConfigError, match=rf"cannot use the home directory {tmp_path}/deep/home: no space left"):
        Home(tmp_path / "deep" / "home").create()
    assert list(tmp_path.iterdir()) == []


def test_locked_twice_names_the_daemon_that_holds_it(tmp_path: Path) -> None:
    home = made(tmp_path)
    assert home.owner() is None
    with home.locked():
        assert home.owner() == os.getpid()
        with (
            pytest.raises(ConfigError, match=rf"pid {os.getpid()}\) is already running in {tmp_path}"),
            Home(tmp_path).locked(),
        ):
            pass
    assert home.owner() is None


def test_command_that_reads_who_holds_the_home_blocks_no_daemon_and_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = made(tmp_path)
    with home.locked():
        pass
    with (tmp_path / "daemon.lock").open("r+b") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert home.owner() is None
        monkeypatch.setattr(time, "sleep", lambda _s: fcntl.flock(looking, fcntl.LOCK_UN))
        with home.locked():
            assert home.owner() == os.getpid()


def test_locked_after_its_owner_was_killed_is_free(tmp_path: Path) -> None:
    home = made(tmp_path)
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert home.owner() == holder.pid
        (tmp_path / "control.sock").touch()
        holder.kill()
    with home.locked():
        assert not home.socket.exists(), "a dead daemon's socket must be removed"
        assert home.owner() == os.getpid()


def test_locked_on_a_full_disk_says_so(tmp_path: Path) -> None:
    home = made(tmp_path)
    (tmp_path / "daemon.lock").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match="no space left on device") as error, home.locked():
        pass
    assert "free some space" in error.value.remedy


def test_home_on_a_file_system_without_locks_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    home = made(tmp_path)
    with home.locked():
        pass
    monkeypatch.setattr(fcntl, "flock", refuse)
    for use in (home.locked().__enter__, home.owner):
        with pytest.raises(ConfigError, match=f"home directory {tmp_path}: no locks available") as error:
            use()
        assert error.value.remedy.endswith("choose another disk with --home")


def test_write_that_does_not_fit_names_its_place() -> None:
    """The system names no path, since the file is open already."""
    full = Path("/dev/full")
    with (
        pytest.raises(ConfigError, match=r"^cannot write /dev/full: no space left on device"),
        explained("write", full),
    ):
        full.write_text("something")


def test_create_names_the_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**place: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(place["dir"] / "tmpzf_z3dht"))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(ConfigError, match=f"^cannot use the home directory {tmp_path}: read-only file system: "):
        made(tmp_path)


REPLACE = """
import sys, pathlib, swarm_node.storage.home
for _ in range(200):
    swarm_node.storage.home.write_private(pathlib.Path(sys.argv[1]), sys.argv[2].encode() * int(sys.argv[3]))
"""


def test_file_that_two_processes_replace_is_whole_at_every_moment(tmp_path: Path) -> None:
    path, sizes = tmp_path / "file", {"a": 100_000, "b": 30_000}
    writers = [
        subprocess.Popen([sys.executable, "-c", REPLACE, str(path), letter, str(size)])
        for letter, size in sizes.items()
    ]
    while any(each.poll() is None for each in writers):
        text = path.read_text() if path.exists() else ""
        assert text == text[:1] * sizes.get(text[:1], 0)
    assert [each.returncode for each in writers] == [0, 0]
    assert list(tmp_path.iterdir()) == [path]


def test_start_removes_what_a_crash_left_half_written_and_nothing_else(tmp_path: Path) -> None:
    old, fresh = "network.key.x7_q2k1a.new", "peers.json.abcd1234.new"
    foreign = ("notes.new", "notes.20260101.new", "peers.json.2026.new")
    for name in (old, fresh, *foreign):
        (tmp_path / name).write_text("half")
    for name in (old, *foreign):
        os.utime(tmp_path / name, (0, time.time() - ABANDONED_S - 1))
    with Home(tmp_path).locked():
        assert not (tmp_path / old).exists()
        assert all((tmp_path / name).exists() for name in (fresh, *foreign))


def test_socket_with_a_long_path_moves_to_the_runtime_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest's own folder may be too deep for a socket
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        runtime = Path(short)
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        assert Home(runtime).socket == runtime / "control.sock"
        long = Home(tmp_path / ("x" * 120))
        assert long.socket.parent == runtime / "swarm-node"
        assert len(os.fsencode(long.socket)) <= MAX_SOCKET_PATH_BYTES
        assert long.socket == Home(long.path).socket != Home(tmp_path / ("y" * 120)).socket


def test_socket_in_a_runtime_directory_open_to_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "swarm-node").mkdir()
    (tmp_path / "swarm-node").chmod(0o777)
    with pytest.raises(ConfigError, match="open to other users"):
        _ = Home(tmp_path / ("x" * 120)).socket
