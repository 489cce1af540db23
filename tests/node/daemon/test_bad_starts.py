"""Everything that can be wrong when a node is started: each gives one line with its remedy, soon, and a
non-zero exit.
"""

from __future__ import annotations

import shutil
import socket
import sys
from pathlib import Path

import pytest
from support.node_process import Node
from support.tiny_models import FAMILIES, write_model

from .conftest import RunHere, Seed, run_node

UNKNOWN = "12D3KooWHoK2zDpTB25vHJF4swgbFQqKcK3ruE4pJzSFjXSEDigi"
NOBODY = f"/ip4/127.0.0.1/tcp/1/p2p/{UNKNOWN}"
JOIN = ("join", "--take", "nothing", "--network-id", "tests", "--probe", "off", "--device", "cpu")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("join", "--peers", NOBODY, "--run", "/no/run.toml"),
            "/no/run.toml does not exist → give --run the file that",
        ),
        (("join", "--run", "/tmp"), "/tmp is a directory, not a run file → give --run the file that"),
        (("join", "--model", "/no/model"), "there is no such directory → give --model the directory of config.json"),
        (("join", "--max-memory", "64MiB"), "none is left for a model → allow 107 MiB with --max-memory, and what"),
        (
            ("join", "--device", "cpu", "--max-memory", "400MiB"),
            "the node itself takes 320 MiB and needs 107 MiB to work: none is left",
        ),
        (("demo", "--keep", "/proc/x"), "choose another directory with --keep"),
        (("status",), "no daemon is running"),
        (("drain",), "no daemon is running"),
        (("stop",), "no daemon is running"),
        (("identity",), "there is no identity"),
    ],
)
def test_start_with_impossible_settings_says_what_to_do(
    arguments: tuple[str, ...], expected: str, run_here: RunHere, tmp_path: Path
) -> None:
    home = () if arguments[0] == "demo" else ("--home", tmp_path / "home")
    answer = run_here(*arguments, *home)
    assert expected in answer.error
    assert answer.code == 1


def test_start_with_too_little_memory_names_the_whole_need_of_a_local_model(run_here: RunHere, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", FAMILIES["llama"]())
    answer = run_here("join", "--model", model, "--max-memory", "64MiB", "--home", tmp_path / "home")
    assert (
        "of 64 MiB of memory the node itself takes 560 MiB and needs 107 MiB to work: the model needs" in answer.error
    )
    assert "→ allow 667 MiB with --max-memory" in answer.error
    assert answer.code == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("join",),
            "no peer to join through is named, and this home remembers none → give --peers the address",
        ),
        (
            ("gateway",),
            "no peer to join through is named, and this home remembers none → give --peers the address",
        ),
        (("join", "--peers", NOBODY, "--then-serve"), "--then-serve needs --run"),
        (("join", "--peers", NOBODY, "--blocks", "0:2"), "there is nothing to serve"),
        (("join", "--peers", NOBODY, "--take", "models", "--data", "/tmp"), "there is nothing to train, so --data"),
        (("join", "--peers", NOBODY, "--take", "runs", "--max-blocks", "2"), "there is nothing to serve"),
        (
            ("join", "--peers", NOBODY, "--take", "runs", "--model", "a/b"),
            "--take cannot be combined with --run or --model",
        ),
        (("jion",), "Did you mean 'join'? → see swarm-node --help"),
        (("join", "--peeers", "x"), "--peers) → see swarm-node join --help"),
        (("seed", "extra"), "(extra) → see swarm-node seed --help"),
        (("demo", "--bogus"), "--bogus → see swarm-node demo --help"),
        (("join", "--peers", "/ip4/127.0.0.1/tcp/x"), "--peers: address '/ip4/127.0.0.1/tcp/x' is malformed"),
        (("seed", "--listen", "localhost:4001"), "--listen: address 'localhost:4001' is malformed"),
        (("join", "--listen", "here"), "--listen: address 'here' is malformed"),
        (
            ("join", "--drain-s", "abc"),
            "is not a duration from 0s to 1h, such as 30s or 5m → write --drain-s 30s",
        ),
    ],
)
def test_wrong_usage_exits_2_and_names_the_help_or_an_example(
    arguments: tuple[str, ...], expected: str, run_here: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path / "home"))
    answer = run_here(*arguments)
    assert answer.code == 2
    assert expected in answer.error


@pytest.mark.parametrize(
    ("command", "home", "expected", "code"),
    [
        ("seed", "/proc/swarm", "/proc/swarm", 1),
        ("join", "/dev/null/home", "/dev/null", 2),  # no directory: a wrong setting
        ("gateway", "/proc/x", "/proc/x", 1),
    ],
)
def test_start_in_a_home_that_cannot_be_written_says_so(
    command: str, home: str, expected: str, code: int, run_here: RunHere
) -> None:
    answer = run_here(command, "--home", home)
    assert f"cannot use the home directory {expected}" in answer.error
    assert answer.code == code


def test_start_on_a_full_disk_says_so(tmp_path: Path) -> None:
    (tmp_path / "daemon.lock").symlink_to("/dev/full")
    answer = run_node("seed", "--home", tmp_path)
    assert "no space left on device → the disk is full: free some space" in answer.error
    assert answer.code == 1


def test_join_of_another_network_says_so(seed: Seed, run_here: RunHere, tmp_path: Path) -> None:
    answer = run_here(*JOIN, "--network-id", "others", "--peers", seed.addr, "--home", tmp_path)
    assert "peer is in network 'tests', and this node in 'others'" in answer.error
    assert answer.error.count("same network id") == 1
    assert answer.err.count("same network id") == 1, "it must be reported once"
    assert answer.code == 1


def test_start_on_an_occupied_port_says_so(run_here: RunHere, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        addr = f"/ip4/127.0.0.1/tcp/{holder.getsockname()[1]}"
        answer = run_here("seed", "--listen", addr, "--home", tmp_path)
    assert "a listen port is occupied" in answer.error
    assert addr.removeprefix("/ip4/").replace("/tcp/", ":") in answer.error
    assert answer.code == 1


def test_join_reports_a_clock_that_is_off_by_an_hour(seed: Seed, tmp_path: Path) -> None:
    # the clock of this one process is wrong, before any of its modules is imported
    code = "import time; real = time.time; time.time = lambda: real() + 3600; from swarm_node.cli import main; main()"
    answer = run_node(*JOIN, "--peers", seed.addr, "--home", tmp_path, command=(sys.executable, "-c", code))
    assert "this machine's clock is 60 min ahead of that of the peer that it reached" in answer.error
    assert "set the clock" in answer.error
    assert answer.code == 1


def test_join_with_a_copied_identity_names_it(seed: Seed, member: Node, run_here: RunHere, tmp_path: Path) -> None:
    [ready] = [event for event in member.events if event["event"] == "ready"]
    shutil.copy2(member.home / "identity.key", tmp_path / "identity.key")
    answer = run_here(*JOIN, "--peers", seed.addr, "--home", tmp_path)
    assert f"the identity {ready['peer_id']} is in use by another running node" in answer.error
    assert answer.code == 1
    assert member.process.poll() is None, "the original node must go on"


def test_start_with_an_identity_open_to_others_is_refused(run_here: RunHere, tmp_path: Path) -> None:
    assert run_here("identity", "--new", "--home", tmp_path).code == 0
    (tmp_path / "identity.key").chmod(0o644)
    answer = run_here("seed", "--home", tmp_path)
    assert "can be read or changed by other users" in answer.error
    assert "chmod 600" in answer.error


@pytest.mark.parametrize("option", ["--data", "--tokenizer"])
def test_join_reports_missing_data_before_it_connects(option: str, run_here: RunHere, tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text("")
    answer = run_here("join", "--run", run, option, "/no/such", "--home", tmp_path / "home")
    assert f"/no/such does not exist → give {option} an existing path" in answer.error
    assert answer.code == 1
    assert not (tmp_path / "home").exists()
