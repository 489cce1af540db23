"""The daemon's unix socket, with both ends real."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from swarm_node import control
from swarm_node.commands import doctor, this_node
from swarm_node.control import ControlClient
from swarm_node.formatting import duration
from swarm_node.settings.config import Config
from swarm_node.storage.home import Home
from swarm_protocol import limits
from swarm_protocol.control_messages import (
    MAX_HOURS,
    LeaveReply,
    LeaveRequest,
    LimitStatus,
    PeerStatus,
    RelayStatus,
    ServingStatus,
    SpotCheckStatus,
    StatusReply,
    StatusRequest,
    TrainingStatus,
)
from swarm_protocol.errors import ConfigError, PeerTimeout, PeerUnreachable, StartError
from swarm_protocol.identity import peer_id_of
from swarm_protocol.records import PathCounts

REPLY = StatusReply(
    peer_id="12D3KooWHoK2zDpTB25vHJF4swgbFQqKcK3ruE4pJzSFjXSEDigi",
    name="home",
    version="0.1.0",
    pid=1,
    uptime_s=3.5,
    network_id="tests",
    addrs=("/ip4/127.0.0.1/tcp/1",),
    reachability="public",
    num_peers=2,
    state="training",
    training=TrainingStatus(run="r", outer_step=1, num_outer_steps=2, loss=3.0, tokens_per_s=4.0),
    serving=ServingStatus(model="m", start=0, end=2, num_sessions=1, tokens_per_s=5.0),
    memory_bytes=6,
)

PEERS = (
    PeerStatus(
        peer_id=REPLY.peer_id,
        name="Bob's attic",
        path="dialled back",
        rtt_ms=23.6,
        sent_bytes=1_500_000_000,
        received_bytes=512_000,
    ),
    *(PeerStatus(peer_id=REPLY.peer_id, path="relayed", sent_bytes=100 - number) for number in range(63)),
)


@asynccontextmanager
async def daemon(home: Home, *, hangs: bool = False) -> AsyncIterator[list[LeaveRequest]]:
    asked: list[LeaveRequest] = []

    async def status(_request: StatusRequest) -> StatusReply:
        if hangs:
            await asyncio.Event().wait()
        return REPLY

    async def leave(request: LeaveRequest) -> LeaveReply:
        asked.append(request)
        return LeaveReply(pid=os.getpid(), seconds=7.0)

    home.create()
    with home.locked():
        async with control.serving(home.socket, status, leave):
            yield asked


def test_client_gets_the_daemons_answers(tmp_path: Path) -> None:
    async def scene() -> None:
        home = Home(tmp_path)
        async with daemon(home) as asked:
            client = ControlClient(Home(tmp_path))
            assert await asyncio.to_thread(client.status) == REPLY
            assert await asyncio.to_thread(lambda: client.leave(drain=True)) == LeaveReply(pid=os.getpid(), seconds=7.0)
            assert asked == [LeaveRequest(drain=True)]
            assert stat.S_IMODE(home.socket.stat().st_mode) == 0o600

    asyncio.run(scene())


def test_doctor_asks_the_daemon_of_the_home(tmp_path: Path) -> None:
    """The home of a lone seed names no peer, and remembers none."""
    config = Config(home=tmp_path, name="test")

    async def scene() -> None:
        async with daemon(Home(tmp_path)):
            [found] = await asyncio.to_thread(doctor.check_daemon, config)
            assert (found.result, found.message) == ("ok", "in tests, which has 2 nodes")
            assert [each.check for each in await doctor.check_network(config)] == ["clock"]

    asyncio.run(scene())
    assert doctor.check_daemon(config) == []
    assert [each.check for each in asyncio.run(doctor.check_network(config))] == ["clock", "seeds"]


def test_doctor_says_why_the_daemon_has_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = replace(REPLY, addrs=(), num_peers=0, state="starting", training=None, serving=None, not_joined="no way")
    monkeypatch.setattr(ControlClient, "status", lambda _self: waiting)
    Home(tmp_path).create()
    with Home(tmp_path).locked():
        [found] = doctor.check_daemon(Config(home=tmp_path, name="test"))
    assert (found.result, found.message) == ("warn", "it has not joined tests yet: no way")
    assert "--peers" in found.remedy


@pytest.mark.parametrize("name", ["x" * 120, "backup, old", os.fsdecode(b"m\xfcller")], ids=["long", "comma", "bytes"])
def test_socket_of_a_home_that_gives_it_no_address_works(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    async def scene() -> None:
        home = Home(tmp_path / name)
        async with daemon(home):
            assert await asyncio.to_thread(ControlClient(home).status) == REPLY

    asyncio.run(scene())


@pytest.mark.parametrize("name", ["100%41", "my#home", "a?b", "ein Haus für mich"])
def test_socket_is_in_its_home_whatever_the_home_is_called(name: str, tmp_path: Path) -> None:
    async def scene() -> None:
        home = Home(tmp_path / name)
        async with daemon(home):
            assert await asyncio.to_thread(ControlClient(home).status) == REPLY
            assert stat.S_ISSOCK(home.socket.stat().st_mode)

    asyncio.run(scene())


def test_client_without_a_daemon_says_so_at_once(tmp_path: Path) -> None:
    with pytest.raises(PeerUnreachable, match="no daemon is running") as error:
        ControlClient(Home(tmp_path)).status()
    assert "swarm-node join" in error.value.remedy
    with pytest.raises(PeerUnreachable, match="no daemon is running") as error:
        ControlClient(Home(tmp_path)).leave(drain=True)
    assert error.value.remedy == "if one runs elsewhere, name its directory with --home"


def test_client_in_a_home_of_another_user_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_args: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)  # root, whom these tests may run as, may open everything
    with pytest.raises(ConfigError, match="permission denied") as error:
        ControlClient(Home(tmp_path)).status()
    assert "the user that owns it" in error.value.remedy
    assert [finding.result for finding in doctor.check_ports(Config(home=tmp_path, name="test"))] == ["ok"]


def test_client_of_a_stuck_daemon_names_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "DEADLINE_S", 0.2)

    async def scene() -> None:
        async with daemon(Home(tmp_path), hangs=True):
            with pytest.raises(PeerTimeout, match=rf"pid {os.getpid()}\) in {tmp_path} does not answer within 0 s: "):
                await asyncio.to_thread(ControlClient(Home(tmp_path)).status)

    asyncio.run(scene())


def test_client_waits_for_a_daemon_that_is_being_started_and_says_so_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "DEADLINE_S", 0.01)
    home = Home(tmp_path)
    home.create()
    told = list[str]()

    async def scene() -> StatusReply:
        with home.locked():
            asking = asyncio.create_task(asyncio.to_thread(ControlClient(Home(tmp_path), told.append).status))
            await asyncio.sleep(0.1)  # it loads torch
            [waits] = told
            assert waits.startswith(f"the daemon (pid {os.getpid()}) has no control socket yet")
            assert waits.endswith("waiting up to 30 s")
            async with control.serving(home.socket, answer, leave=None):  # type: ignore[arg-type]
                return await asking

    async def answer(_request: StatusRequest) -> StatusReply:
        return REPLY

    assert asyncio.run(scene()) == REPLY


def test_status_of_a_node_that_has_not_joined_yet_says_so() -> None:
    text = this_node.text(replace(REPLY, addrs=(), num_peers=0, state="starting", training=None, serving=None))
    assert re.search(r"^network +tests, not joined yet$", text, re.MULTILINE)
    assert re.search(r"^state +starting, up ", text, re.MULTILINE)


def test_status_says_why_a_node_has_not_joined_yet() -> None:
    waiting = replace(REPLY, addrs=(), num_peers=0, state="starting", training=None, serving=None)
    text = this_node.text(replace(waiting, not_joined="nobody answered"))
    assert re.search(r"^network +tests, not joined yet: nobody answered$", text, re.MULTILINE)


def test_serving_fails_with_the_reason_when_the_path_is_taken(tmp_path: Path) -> None:
    async def scene() -> None:
        (tmp_path / "socket").mkdir()
        with pytest.raises(StartError, match="cannot open the control socket"):
            async with control.serving(tmp_path / "socket", status=None, leave=None):  # type: ignore[arg-type]
                pass

    asyncio.run(scene())


def test_status_shows_that_only_this_machine_reaches_the_node_whatever_a_local_seed_reached() -> None:
    assert "tests, 2 nodes live, reachability this machine only" in this_node.text(REPLY)
    nearby = replace(REPLY, addrs=("/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.7/tcp/1"), num_peers=1)
    assert "tests, 1 node live, reachability local network only" in this_node.text(nearby)
    elsewhere = replace(nearby, addrs=(*nearby.addrs, "/ip4/203.0.113.7/tcp/1"))
    assert "tests, 1 node live, reachability public" in this_node.text(elsewhere)


def test_status_as_json_says_the_same_reachability_and_rounds_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    flags = SimpleNamespace(home=lambda: Path("/nowhere"), json=True)
    with patch.object(ControlClient, "status", return_value=REPLY):
        this_node.status(flags)  # type: ignore[arg-type]
    assert json.loads(capsys.readouterr().out)["reachability"] == "this machine only"
    reply = replace(REPLY, paths=PathCounts(dialled_back=2), uptime_s=2 / 3, peers=(replace(PEERS[0], rtt_ms=1 / 3),))
    with patch.object(ControlClient, "status", return_value=reply):
        this_node.status(flags)  # type: ignore[arg-type]
    shown = json.loads(capsys.readouterr().out)
    assert shown["paths"] == {"direct": 0, "dialled back": 2, "punched": 0, "relayed": 0}
    assert (shown["uptime_s"], shown["peers"][0]["rtt_ms"]) == (0.667, 0.333)


def test_status_lists_the_peers_with_the_most_bytes_and_counts_all() -> None:
    text = this_node.text(replace(REPLY, paths=PathCounts(direct=18, punched=1, relayed=1_000), peers=PEERS))
    lines = [line.strip() for line in text.splitlines()]
    first = lines.index("peers      1,019 connected: 18 direct, 1 punched, 1,000 relayed")
    assert lines[first + 1].split() == [
        "…jXSEDigi", "dialled", "back", "23.6", "ms", "1.5", "GB", "sent", "512", "kB", "received", "Bob's", "attic",
    ]  # fmt: skip
    assert lines[first + 2].split() == ["…jXSEDigi", "relayed", "–", "0.1", "kB", "sent", "0", "kB", "received"]
    assert lines[first + 1].index("sent") == lines[first + 2].index("sent")
    assert lines[first + 17] == "and 1,003 more peers with less traffic"


def test_status_of_a_node_without_peers_and_of_an_older_daemon() -> None:
    assert "peers      none connected" in this_node.text(replace(REPLY, paths=PathCounts()))
    assert "peers" not in this_node.text(REPLY)


def test_status_shows_each_limit_and_its_use() -> None:
    assert "load" not in this_node.text(REPLY), "an older daemon does not send it"
    use = LimitStatus(upload_bytes_per_s=153_000.0, download_bytes_per_s=0.0)
    free = this_node.text(replace(REPLY, limits=use)).splitlines()
    assert "upload     1.22 Mbit/s now, no limit" in free
    assert "download   0 kbit/s now, no limit" in free
    assert not [line for line in free if line.startswith(("traffic", "hours"))]
    limited = replace(
        REPLY,
        limits=replace(
            use,
            max_upload_bytes_per_s=2_500_000,
            max_download_bytes_per_s=12_500,
            hours=("22:00-07:00", "12:00-13:00"),
        ),
        month_bytes=412 * 10**9,
        month_budget_bytes=500 * 10**9,
    )
    lines = this_node.text(limited).splitlines()
    for line in (
        "upload     1.22 Mbit/s now, at most 20 Mbit/s",
        "download   0 kbit/s now, at most 100 kbit/s",
        "traffic    412 GB of 500 GB used in this month",
        "hours      22:00-07:00, 12:00-13:00, lending now",
    ):
        assert line in lines
    paused = this_node.text(replace(limited, pause="hours", state="paused"))
    assert "hours      22:00-07:00, 12:00-13:00\n" in paused


def test_status_shows_what_a_relay_carries_and_refuses() -> None:
    assert "relaying" not in this_node.text(REPLY)
    relaying = RelayStatus(
        num_reservations=3, num_circuits=1, relayed_bytes=1_500_000_000, num_refused=4_000, throttled_s=12.4
    )
    said = "relaying   for 3 nodes: 1 connection now, 1.5 GB carried, 4,000 refused, 12 s throttled"
    assert said in this_node.text(replace(REPLY, relaying=relaying))


def test_status_shows_the_results_of_spot_checks() -> None:
    assert "checks" not in this_node.text(REPLY)
    checks = SpotCheckStatus(num_passed=1200, num_failed=1, num_unchecked=3, barred=(REPLY.peer_id,))
    said = "1,200 spans passed, 1 failed, 0 disputed, 3 unchecked; not used any more: "
    assert said in this_node.text(replace(REPLY, spot_checks=checks))


def test_status_names_the_protocol_version_of_the_daemon_if_it_says_it() -> None:
    assert this_node.text(REPLY).endswith("version 0.1.0")
    assert this_node.text(replace(REPLY, protocol_version=7)).endswith("version 0.1.0, protocol 7")


def test_status_lists_convicted_servers() -> None:
    assert "not used " not in this_node.text(REPLY)
    lines = ("5Z1T2a is not used until 2026-12-26: it lied", "5Z1T2b is not used until 2026-12-27: it lied")
    assert f"not used   {lines[0]}\n           {lines[1]}" in this_node.text(replace(REPLY, convicted_servers=lines))


def test_status_shows_no_control_characters_of_a_peers_name() -> None:
    # the reply is checked as it is decoded; this one has not been
    hostile = replace(PEERS[0], name="a")
    object.__setattr__(hostile, "name", "\x1b[31mred")
    text = this_node.text(replace(REPLY, paths=PathCounts(direct=1), peers=(hostile,)))
    assert "\x1b" not in text


def test_status_at_every_bound_fits_the_control_socket() -> None:
    peers = tuple(
        PeerStatus(
            peer_id=peer_id_of(bytes([number] * 32)),
            name="\U0001f600" * limits.MAX_NODE_NAME_CHARS,
            path="dialled back",
            rtt_ms=limits.MAX_RTT_MS,
            sent_bytes=limits.MAX_TRAFFIC_BYTES,
            received_bytes=limits.MAX_TRAFFIC_BYTES,
        )
        for number in range(limits.MAX_CONTROL_PEERS)
    )
    addrs = tuple(f"/dns4/{number:02}{'a' * (limits.MAX_ADDR_BYTES - 8)}" for number in range(limits.MAX_CONTROL_ADDRS))
    hours = tuple(f"{number // 60:02}:{number % 60:02}-24:00" for number in range(MAX_HOURS))
    most = limits.MAX_TRAFFIC_BYTES
    link = LimitStatus(
        max_upload_bytes_per_s=most,
        max_download_bytes_per_s=most,
        upload_bytes_per_s=float(most),
        download_bytes_per_s=float(most),
        hours=hours,
    )
    reply = replace(REPLY, addrs=addrs, peers=peers, limits=link)
    assert StatusReply.from_bytes(reply.to_bytes()) == reply
    with pytest.raises(ValueError, match="peers"):
        replace(REPLY, peers=(*peers, PEERS[0]))


def test_status_of_a_waiting_trainer_says_for_whom_and_since_when() -> None:
    assert REPLY.training is not None
    waits = replace(REPLY.training, waits_for="5Z1T2a, kccVtQ", waits_s=75.0)
    line = this_node.text(replace(REPLY, training=waits))
    assert re.search(r"^state +waiting, up ", line, re.MULTILINE)
    assert f"waits for 5Z1T2a, kccVtQ for {duration(75.0)}" in line
    assert "tokens/s here" not in line
    between = this_node.text(replace(REPLY, training=replace(waits, waits_s=0.2)))
    assert "4 tokens/s here" in between, "a round takes a moment"
    assert re.search(r"^state +training, up ", between, re.MULTILINE)
    assert "tokens/s" not in this_node.text(
        replace(REPLY, serving=None, training=replace(REPLY.training, tokens_per_s=0.0))
    )


def test_status_shows_breaks_the_month_and_slow_links() -> None:
    at = datetime.now().replace(hour=22, minute=0, second=0, microsecond=0).timestamp()
    training = TrainingStatus(
        run="r",
        outer_step=1,
        num_outer_steps=2,
        slow_links=("a sends slowly", "b, too"),
        convicted=("5Z1T2a lied in this run: it signed a wrong result",),
    )
    paused = replace(
        REPLY, state="paused", pause="hours", lends_again_at=at, month_bytes=412 * 10**9, month_budget_bytes=5 * 10**11,
        training=training,
    )  # fmt: skip
    assert StatusReply.from_bytes(paused.to_bytes()) == paused
    shown = this_node.text(paused)
    assert "; outside its lending hours: lends again at 22:00" in shown
    assert "412 GB of 500 GB used in this month" in shown
    assert "convicted  5Z1T2a lied in this run: it signed a wrong result" in shown
    assert "links      a sends slowly\n           b, too" in shown
    assert "lends again" not in this_node.text(REPLY)


def test_status_says_while_a_trainer_is_on_probation_and_what_its_runs_author_endorses() -> None:
    assert REPLY.training is not None
    assert "probation" not in this_node.text(REPLY)
    assert "endorse" not in this_node.text(REPLY)
    assert "held out" not in this_node.text(REPLY)
    training = replace(REPLY.training, steps_left=3, probation_steps=4, endorsed_step=1200, held_out="this node +0.5")
    reply = replace(REPLY, training=training)
    assert StatusReply.from_bytes(reply.to_bytes()) == reply
    shown = this_node.text(reply)
    assert "probation  on probation: 3 of 4 outer steps left until this node counts fully" in shown
    assert "endorsed   by the run's author up to outer step 1,200" in shown
    assert "held out   this node +0.5" in shown
    assert "history" not in shown
    changed = replace(training, endorses_other=True, other_history="another state of outer step 1 is shown by …5Z1T2a")
    other = this_node.text(replace(REPLY, training=changed))
    assert "the run's author endorsed another state at outer step 1,200 than this node has" in other
    assert "history    another state of outer step 1 is shown by …5Z1T2a\n           the run's author can name" in other
