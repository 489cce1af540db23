"""The checks of `join` before it starts, and its setting for torch's threads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.node_settings import resolve
from support.private_networks import Owner
from swarm.training.data.token_file import TokenWriter
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_file import write_run
from swarm_node import cli
from swarm_node.commands import daemons
from swarm_node.commands.command_options import Flags
from swarm_node.commands.daemons import _check_work
from swarm_node.events.emitter import Emitter
from swarm_node.machine.lean_imports import SPINS
from swarm_node.node import NodeRole
from swarm_node.settings.config import Config
from swarm_node.storage.home import Home
from swarm_protocol.errors import ConfigError
from swarm_protocol.identity import Identity

THREAD_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")

SEED = f"/ip4/127.0.0.1/tcp/4001/p2p/{Identity.generate().peer_id}"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, ("passive", str(SPINS))),
        ({"GOMP_SPINCOUNT": "7"}, ("passive", "7")),
        ({"OMP_WAIT_POLICY": "active"}, ("active", None)),
    ],
)
def test_join_that_serves_lets_threads_sleep_soon_after_a_step_unless_the_environment_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, str], expected: tuple[str, str | None]
) -> None:
    without = {name: value for name, value in os.environ.items() if name not in THREAD_SETTINGS}
    monkeypatch.setattr(os, "environ", without | asked)
    monkeypatch.setattr(daemons, "live", lambda *_arguments, **_options: 0)
    (tmp_path / "config.json").write_text("{}")
    flags = Flags(values={"home": str(tmp_path / "home"), "model": str(tmp_path)}, json=False, file=None)
    assert daemons.join(flags) == 0
    assert tuple(map(os.environ.get, THREAD_SETTINGS)) == expected


def test_join_that_does_not_serve_does_not_change_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in THREAD_SETTINGS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(daemons, "live", lambda *_arguments, **_options: 0)
    assert daemons.join(Flags(values={"home": str(tmp_path / "home")}, json=False, file=None)) == 0
    assert not any(name in os.environ for name in THREAD_SETTINGS)


@pytest.fixture
def printed_before_role(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What a daemon has printed on stdout and stderr when it imports its role, which imports torch. The daemon then
    ends with code 0."""
    printed = list[str]()

    def imported(role_code: str) -> Callable[[Config], None]:
        printed.extend([role_code, *capsys.readouterr()])
        return lambda _config: None

    monkeypatch.setattr(daemons, "imported", imported)
    monkeypatch.setattr("swarm_node.daemon.run", lambda *_arguments: 0)
    return printed


@pytest.mark.parametrize("rule", ["welcome", "required"])
def test_join_says_that_it_starts_unless_the_run_lets_it_only_watch(
    rule: str, tmp_path: Path, printed_before_role: list[str]
) -> None:
    path = tmp_path / "run.toml"
    write_run(path, RunConfig(name="story", invitations=rule), Identity.generate())
    values = {"home": str(tmp_path / "home"), "run": str(path), "peers": SEED}
    flags = Flags(values=values, json=True, file=None)
    if rule == "required":
        with pytest.raises(ConfigError, match="takes only nodes with an invitation"):
            daemons.join(flags)
        assert printed_before_role == []
    else:
        assert daemons.join(flags) == 0
        role_code, event, line = printed_before_role
        assert role_code == "swarm_node.roles.volunteer:VolunteerRole"
        assert json.loads(event)["event"] == "starting"
        assert line == "starting: loading torch and, at the first start, measuring this machine\n"


@pytest.mark.parametrize(("more", "first"), [((), "starting"), (("--probe", "off"), ""), (("--take", "nothing"), "")])
def test_join_without_work_says_that_it_starts_if_it_measures_the_machine(
    more: tuple[str, ...], first: str, tmp_path: Path, printed_before_role: list[str]
) -> None:
    assert cli.run(["join", "--home", str(tmp_path), "--peers", SEED, *more]) == 0
    assert printed_before_role[-1].partition(":")[0] == first


def test_join_needs_no_data_when_the_pinned_tokens_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = tmp_path / "swarm" / "tokens"
    cache.mkdir(parents=True)
    (cache / "broken.tokens").write_text("")
    writer = TokenWriter(cache / "one.tokens", 256)
    writer.add(np.arange(9), held_out=False)
    digest = writer.finish().digest
    writer.close()
    run = tmp_path / "run.toml"
    told = resolve({"home": str(tmp_path), "run": str(run), "data": "/no/such"}, env={})
    run.write_text('[data]\ndigest = "another"\n')
    with pytest.raises(ConfigError, match="/no/such does not exist"):
        _check_work(told)
    run.write_text(f'[data]\ndigest = "{digest}"\n')
    _check_work(told)


PEER = "12D3KooWHoK2zDpTB25vHJF4swgbFQqKcK3ruE4pJzSFjXSEDigi"


@pytest.mark.parametrize(
    ("host", "listen"), [("203.0.113.7", "/ip4/0.0.0.0/tcp/0"), ("127.0.0.1", "/ip4/127.0.0.1/tcp/0")]
)
def test_node_that_joins_through_a_remote_peer_accepts_connections_and_its_http_stays_local(
    host: str, listen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Config] = []

    def run(config: Config, _home: Home, _emitter: Emitter, _role: NodeRole) -> int:
        ran.append(config)
        return 0

    monkeypatch.setattr("swarm_node.daemon.run", run)
    peer = f"/ip4/{host}/tcp/4001/p2p/{PEER}"
    assert cli.run(["join", "--take", "nothing", "--home", str(tmp_path), "--peers", peer]) == 0
    [config] = ran
    assert config.listen == (listen,)
    assert config.host == "127.0.0.1"


def test_invitation_of_a_first_start_is_kept_before_the_node_has_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is ended before it has joined must start again without --invite."""
    ran: list[Config] = []

    def run(config: Config, _home: Home, _emitter: Emitter, _role: NodeRole) -> int:
        ran.append(config)
        return 1

    monkeypatch.setattr("swarm_node.daemon.run", run)
    peer = f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"
    first, second = (Owner().invite(seeds=(peer,)).text() for _ in range(2))
    join = ("join", "--take", "nothing", "--home", str(tmp_path))
    for given in (("--invite", first), (), ("--invite", second), ()):
        assert cli.run([*join, *given]) == 1
    assert [config.invite and config.invite.text() for config in ran] == [first, first, second, first]
