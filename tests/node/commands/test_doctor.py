"""The doctor's local checks, each with something broken."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, NoReturn

import pytest
from swarm.network.libp2p.greeting import off_by
from swarm.network.network_entry import ClockError, NetworkEntry
from swarm_node import cli
from swarm_node.commands import doctor
from swarm_node.commands.doctor import Finding
from swarm_node.settings.config import Config
from swarm_node.storage.home import Home
from swarm_protocol.errors import ConfigError, StartError
from swarm_protocol.identity import Identity
from swarm_protocol.records import NodeRecord
from swarm_protocol.version import PROTOCOL_VERSION, software_version


class Usage(NamedTuple):
    free: int


def config(home: Path, **more: object) -> Config:
    return Config(home=home, name="test", **more)  # type: ignore[arg-type]


def only(findings: object) -> Finding:
    [finding] = findings  # type: ignore[misc]
    assert isinstance(finding, Finding)
    assert bool(finding.remedy) == (finding.result != "ok")
    return finding


def test_local_checks_pass_on_a_sound_machine(tmp_path: Path) -> None:
    found = [finding for check in doctor.LOCAL_CHECKS for finding in check(config(tmp_path))]
    assert [finding for finding in found if finding.result == "fail"] == []


def test_check_versions_names_the_protocol_version(tmp_path: Path) -> None:
    found = only(doctor.check_versions(config(tmp_path)))
    assert found.message.startswith(f"swarm-node {software_version()}, protocol {PROTOCOL_VERSION}, Python ")


def test_check_versions_names_what_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LIBRARIES", {"torch": (99,), "no-such-thing": (1,)})
    found = only(doctor.check_versions(config(tmp_path)))
    assert found.result == "fail"
    assert "is older than 99" in found.message
    assert "no-such-thing is not installed" in found.message


@pytest.mark.parametrize(
    ("script", "remedy"),
    [
        ("#!/bin/sh\nexit 3\n", "reinstall hivemind"),
        ("not a program", "reinstall hivemind"),
        ("#!/bin/sh\necho fatal error: out of memory\nexit 2\n", "ulimit -v"),
    ],
)
def test_check_libp2p_that_does_not_run_fails(
    script: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = tmp_path / "p2pd"
    binary.write_text(script)
    binary.chmod(0o700)
    monkeypatch.setattr(doctor, "p2pd_path", lambda: binary)
    found = only(doctor.check_libp2p(config(tmp_path)))
    assert (found.result, remedy in found.remedy) == ("fail", True)


def test_check_libp2p_that_hangs_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_arguments: object, **_options: object) -> None:
        raise subprocess.TimeoutExpired("p2pd", 10)

    monkeypatch.setattr(subprocess, "run", hang)
    assert only(doctor.check_libp2p(config(tmp_path))).result == "fail"


def test_check_home_that_cannot_be_written_fails() -> None:
    found = only(doctor.check_home(config(Path("/proc/no-such"))))
    assert found.result == "fail"
    assert "/proc" in found.message


def test_check_home_whose_lock_is_another_user_s_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def owner(_home: Home) -> int | None:
        raise ConfigError("cannot look into the home directory", remedy="run this command as the user that owns it")

    monkeypatch.setattr(Home, "owner", owner)
    assert only(doctor.check_home(config(tmp_path))).result == "fail"


def test_check_home_names_the_running_daemon(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.create()
    with home.locked():
        assert f"pid {os.getpid()}" in only(doctor.check_home(config(tmp_path))).message


def test_doctor_does_not_create_a_missing_home(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor", "--home", str(tmp_path / "new" / "home"), "--no-mdns"]) == 0
    printed = capsys.readouterr()
    assert "home is writable" in printed.out
    assert printed.err == "loading torch, to look for a GPU\n", "what takes seconds is said"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "log").mkdir()
    assert cli.run(["doctor", "--home", str(tmp_path), "--no-mdns"]) == 0
    assert list(tmp_path.iterdir()) == [tmp_path / "log"]


@pytest.mark.parametrize(("free", "result"), [(10**12, "ok"), (2**30, "warn"), (2**20, "fail")])
def test_check_disk_result_follows_the_free_bytes(
    free: int, result: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free=free))
    assert only(doctor.check_disk(config(tmp_path))).result == result


def test_check_disk_is_left_out_when_the_home_is_unusable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        assert only(doctor.check_home(config(place))).result == "fail"
        assert list(doctor.check_disk(config(place))) == []


def test_check_clock_before_this_software_was_made_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 0.0)
    found = only([doctor.check_clock()])
    assert found.result == "fail"
    assert "1970" in found.message


def test_clock_has_one_verdict_which_is_that_of_the_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skew_s = [0.0]

    def visiting(_config: Config, **_more: object) -> NoReturn:
        raise ClockError(f"this machine's clock is {off_by(skew_s[0])} that of the peer that it reached")

    monkeypatch.setattr(doctor, "visiting", visiting)
    peers = (f"/ip4/127.0.0.1/tcp/1/p2p/{Identity(bytes(32)).peer_id}",)
    for skew_s[0], told in ((-3 * 86400.0, "3 days ahead of"), (7000.0, "117 min behind"), (-99.0, "99 s ahead of")):
        found = asyncio.run(doctor.check_network(config(tmp_path, peers=peers, mdns=False)))
        assert [(each.check, each.result) for each in found] == [("clock", "fail")]
        assert told in found[0].message


def test_seed_that_is_down_is_not_a_finding_about_the_clock_even_if_its_name_has_this_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def visiting(_config: Config, **_more: object) -> NoReturn:
        raise StartError("none of the given peers could be reached: clock.example.org: no answer", remedy="another")

    monkeypatch.setattr(doctor, "visiting", visiting)
    monkeypatch.setattr("time.time", lambda: 0.0)
    peers = (f"/ip4/127.0.0.1/tcp/1/p2p/{Identity(bytes(32)).peer_id}",)
    clock, seeds = asyncio.run(doctor.check_network(config(tmp_path, peers=peers, mdns=False)))
    assert (clock.check, clock.result) == ("clock", "fail"), "its verdict needs no seed"
    assert (seeds.check, seeds.result) == ("seeds", "fail")
    assert "clock.example.org" in seeds.message


def test_check_disk_says_nothing_of_a_read_only_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a file system is often full, and its owner cannot free any space."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(free=0))
    assert only(doctor.check_disk(config(tmp_path))).result == "fail"
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_flag=os.ST_RDONLY))
    assert list(doctor.check_disk(config(tmp_path))) == []


def test_check_ports_that_are_taken_fail(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = f"/ip4/127.0.0.1/tcp/{holder.getsockname()[1]}"
        found = list(doctor.check_ports(config(tmp_path, listen=(taken, "/ip4/127.0.0.1/tcp/0"))))
    assert [finding.result for finding in found] == ["fail", "ok"]
    assert taken in found[0].message
    assert "port 0" in found[0].remedy


def test_seeds_are_asked_from_a_free_port_when_the_node_s_own_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[tuple[str, ...]]()

    def visiting(_config: Config, *, listen: tuple[str, ...], **_more: object) -> NoReturn:
        asked.append(listen)
        raise StartError("nobody answers")

    monkeypatch.setattr(doctor, "visiting", visiting)
    peers = (f"/ip4/127.0.0.1/tcp/1/p2p/{Identity(bytes(32)).peer_id}",)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = f"/ip4/127.0.0.1/tcp/{holder.getsockname()[1]}"
        for listen in ((taken, "/ip4/127.0.0.1/tcp/0"), ("/ip4/203.0.113.1/tcp/0",)):
            said = list[str]()
            settings = config(tmp_path, listen=listen, peers=peers, mdns=False)
            found = asyncio.run(doctor.check_network(settings, said.append))
            assert said == ["joining the network swarm"]
            assert [(each.check, each.message) for each in found if each.result != "ok"] == [
                ("seeds", "nobody answers")
            ]
            assert [each.result for each in found if each.check == "clock"] == ["ok"], "it has a verdict without seeds"
    assert asked == [("/ip4/127.0.0.1/tcp/0",) * 2, ("/ip4/127.0.0.1/tcp/0",)]


def test_check_ports_of_a_family_that_the_machine_lacks_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_arguments: object) -> None:
        raise OSError(97, "Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", lacking)
    found = only(doctor.check_ports(config(tmp_path, listen=("/ip6/::/tcp/0",))))
    assert found.result == "fail"
    assert "address family not supported" in found.message


def test_check_gpu_with_a_driver_that_torch_cannot_use_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert only(doctor.check_gpu()).result == "warn"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert only(doctor.check_gpu()).result == "ok"


def test_way_in_blames_given_peers_only_if_some_were_given(tmp_path: Path) -> None:
    network = SimpleNamespace(entry=NetworkEntry(remembered=("12D3KooWone", "12D3KooWtwo")))
    assert doctor._way_in(config(tmp_path), network) == "through 2 remembered peers"  # type: ignore[arg-type]
    given = config(tmp_path, peers=("/dns4/seed.example.org/tcp/4001/p2p/12D3KooWgone",))
    assert doctor._way_in(given, network).endswith("as no given peer answered")  # type: ignore[arg-type]


def look_around(settings: Config, *, reachability: str, addr: str, was_dialled_back: bool = False) -> Finding:
    """Return what the doctor finds of the reachability that a network measured."""

    async def addrs() -> tuple[str, ...]:
        return (addr,)

    async def found(**_: object) -> str:
        return reachability

    async def nodes() -> dict[str, NodeRecord]:
        return {}

    network = SimpleNamespace(
        addrs=addrs,
        reachability=found,
        was_dialled_back=was_dialled_back,
        is_behind_symmetric_nat=False,
        entry=SimpleNamespace(given=["a"]),
    )
    membership = SimpleNamespace(announce=lambda _: None, nodes=nodes)
    clock = Finding("clock", "ok", "now")
    return asyncio.run(doctor._look_around(settings, network, membership, clock))[-1]  # type: ignore[arg-type]


@pytest.mark.parametrize("was_dialled_back", [True, False])
def test_a_relayed_node_is_behind_a_nat_only_if_a_peer_has_tried_to_reach_it(
    tmp_path: Path, was_dialled_back: bool
) -> None:
    settings = config(tmp_path, listen=("/ip4/0.0.0.0/tcp/4001",))
    addr = "/ip4/198.51.100.7/tcp/4001"
    reached = look_around(settings, reachability="relay", addr=addr, was_dialled_back=was_dialled_back)
    assert ("behind a NAT" in reached.message) == was_dialled_back
    assert ("if this machine was busy, run the doctor again" in reached.remedy) != was_dialled_back


def test_a_node_whose_peers_are_on_its_machine_is_told_so_as_by_its_daemon_without_advice_to_listen_beyond_it(
    tmp_path: Path,
) -> None:
    addr = "/ip4/127.0.0.1/tcp/4001"
    settings = config(tmp_path, listen=(addr,), peers=(f"/ip4/127.0.0.1/tcp/4002/p2p/{Identity.generate().peer_id}",))
    reached = look_around(settings, reachability="unknown", addr=addr)
    assert reached == Finding("reachability", "ok", "only from this machine, where its peers are, too")
