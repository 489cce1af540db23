"""Tests that conversations survive faults of homes, routers, relays and seeds without losing anything."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from bench.report import Report
from internet.lab import Lab
from internet.lab_nodes import Conversation, LabNode, LabNodes
from internet.serving import PROMPT, await_servers, started_servers
from internet.talker import POURED_BYTES
from support.node_process import wait_until
from support.tiny_models import local_tokens
from swarm.network.paths.introductions import RETRY_S

pytestmark = [pytest.mark.internet, pytest.mark.timeout(180)]

MAX_PAUSE_S = 5.0
"""The longest pause for a change of address or a lost relay, of a stream and of an answer."""
DOWN_S = 1.0
SETTLE_S = 2.0
"""Time for a conversation to get under way, and again to show that it goes on."""


def talk(one: LabNode, other: LabNode) -> Conversation:
    return one.tell("talk", peer=other.peer_id, seconds=100, pause_s=0.05, num_bytes=500)


def pair_of_talkers(nodes: LabNodes, host: str, other: str = "open1") -> tuple[LabNode, LabNode]:
    """Start a talker on each of two hosts, and a seed that they know."""
    seed = nodes.seed()
    ours, theirs = nodes.talkers(host, other, peers=seed.public)
    return ours, theirs


def longest_pause_s(
    nodes: LabNodes, host: str, change: Callable[[Lab], None], *, other: str = "open1", after_s: float = SETTLE_S
) -> float:
    """Return the longest pause of two streams, one opened from each side, while something changes."""
    ours, theirs = pair_of_talkers(nodes, host, other)
    talks = [talk(ours, theirs), talk(theirs, ours)]
    for each in talks:
        each.next()  # the first message has come back
    time.sleep(after_s)
    change(nodes.lab)
    changed_at = time.monotonic()
    time.sleep(MAX_PAUSE_S + SETTLE_S)
    ends = [talk.end() for talk in talks]
    assert min(end["last_at"] for end in ends) > changed_at + MAX_PAUSE_S, "a stream has stopped"
    return max(end["longest_s"] for end in ends)


@pytest.mark.parametrize("host", ["home1", "sym1"])
def test_streams_outlive_a_router_that_reboots(nodes: LabNodes, figures: Report, host: str) -> None:
    pause_s = longest_pause_s(nodes, host, lambda lab: lab.reboot_router(host, down_s=DOWN_S))
    figures.row(f"router of {host} reboots", longest_pause_s=pause_s - DOWN_S)
    assert pause_s < DOWN_S + MAX_PAUSE_S


@pytest.mark.parametrize("other", ["open1", "sym2"])
def test_streams_outlive_a_router_that_rewrites_ports(nodes: LabNodes, figures: Report, other: str) -> None:
    pause_s = longest_pause_s(nodes, "sym1", lambda lab: lab.rewrite_ports("sym1"), other=other)
    figures.row(f"router of sym1 rewrites ports, to {other}", longest_pause_s=pause_s)
    assert pause_s < MAX_PAUSE_S


@pytest.mark.quick
def test_streams_outlive_a_change_of_address(nodes: LabNodes, figures: Report) -> None:
    pause_s = longest_pause_s(nodes, "home1", lambda lab: lab.change_address("home1"))
    figures.row("address of home1 changes", longest_pause_s=pause_s)
    assert pause_s < MAX_PAUSE_S


@pytest.mark.parametrize("after_s", [SETTLE_S, RETRY_S + SETTLE_S])
def test_relayed_streams_outlive_a_change_of_address(nodes: LabNodes, figures: Report, after_s: float) -> None:
    pause_s = longest_pause_s(nodes, "sym1", lambda lab: lab.change_address("sym1"), other="sym2", after_s=after_s)
    figures.row(f"address of a relayed host changes after {after_s:g} s", longest_pause_s=pause_s)
    assert pause_s < MAX_PAUSE_S


@pytest.mark.parametrize("drinker", ["home1", "open1"])
def test_bulk_loses_no_byte_when_an_address_changes(nodes: LabNodes, figures: Report, drinker: str) -> None:
    nodes.lab.limit("home1", 40)
    ours, theirs = pair_of_talkers(nodes, "home1")
    one, other = (ours, theirs) if drinker == "home1" else (theirs, ours)
    drinking = one.tell("drink", peer=other.peer_id, num=120)
    while drinking.next().get("num", 0) < 17:
        pass
    nodes.lab.change_address("home1")
    drunk = drinking.result()
    figures.row(f"address changes, {drinker} takes 30 MB", longest_pause_s=drunk["longest_s"])
    assert drunk["num"] == 120
    assert drunk["longest_s"] < MAX_PAUSE_S


@pytest.mark.parametrize("trouble", ["address changes", "router reboots"])
def test_answer_loses_no_token_while_its_only_server_has_trouble(
    nodes: LabNodes, figures: Report, model: Path, trouble: str
) -> None:
    seed = nodes.seed()
    servers = started_servers(nodes, "home1", model, seed.public, num=1)
    [client] = nodes.talkers("open1", peers=seed.public)
    await_servers(client, model, servers)
    asking = client.tell("ask", model=model.name, prompt=PROMPT, num_tokens=200, pause_s=0.05)
    while asking.next()["num"] < 20:
        pass
    if trouble == "address changes":
        nodes.lab.change_address("home1")
    else:
        nodes.lab.reboot_router("home1", down_s=DOWN_S)
    answer = asking.result()
    figures.row(f"a server: {trouble}", longest_pause_s=answer["longest_s"], num_replays=answer["num_replays"])
    assert answer["tokens"] == local_tokens(model, PROMPT, 200)
    # the client gives the server up before the path is back, and asks it again over the stream that then goes on
    assert answer["longest_s"] < MAX_PAUSE_S


def test_stream_outlives_the_relay_that_carries_it(nodes: LabNodes, figures: Report) -> None:
    first = nodes.seed()
    second = nodes.seed("open4", peers=first.public)
    one, other = nodes.talkers("sym1", "sym2", peers=[*first.public, *second.public])
    talking = talk(one, other)
    before = {seed: nodes.lab.sent(seed.host).total for seed in (first, second)}
    time.sleep(SETTLE_S)
    carrier = max(before, key=lambda seed: nodes.lab.sent(seed.host).total - before[seed])
    carrier.process.send_signal(signal.SIGKILL)
    killed_at = time.monotonic()
    time.sleep(MAX_PAUSE_S + SETTLE_S)
    talked = talking.end()
    figures.row("relay dies", longest_pause_s=talked["longest_s"])
    assert talked["last_at"] > killed_at + MAX_PAUSE_S, "the stream has stopped"
    assert talked["longest_s"] < MAX_PAUSE_S
    called = one.tell("call", peer=other.peer_id, num=5, pause_s=0.1, num_bytes=100).result()
    assert called["failures"] == []


def test_pair_that_needs_a_relay_outlives_its_only_seed(nodes: LabNodes, figures: Report) -> None:
    seed = nodes.seed()
    [member] = nodes.talkers("open1", peers=seed.public)
    pair = one, other = nodes.talkers("sym1", "sym2", peers=seed.public)

    def are_relayed_by_member() -> bool:
        return all(any(member.peer_id in addr for addr in each.tell("addrs").result()) for each in pair)

    wait_until(are_relayed_by_member, "a member does not relay", timeout_s=30)
    talking = talk(one, other)
    time.sleep(SETTLE_S)
    seed.process.send_signal(signal.SIGKILL)
    killed_at = time.monotonic()
    time.sleep(MAX_PAUSE_S + SETTLE_S)
    talked = talking.end()
    figures.row("seed that relays vanishes", longest_pause_s=talked["longest_s"])
    assert talked["last_at"] > killed_at + MAX_PAUSE_S, "the stream has stopped"
    assert talked["longest_s"] < MAX_PAUSE_S
    [newcomer] = nodes.talkers("home1", peers=member.public)
    called = newcomer.tell("call", peer=other.peer_id, num=3, pause_s=0.1, num_bytes=100).result()
    assert called["failures"] == []


def test_line_of_20_mbit_is_used_and_lets_others_through(nodes: LabNodes, figures: Report) -> None:
    mbit, num = 20, 24
    nodes.lab.limit("home1", mbit)
    ours, theirs = pair_of_talkers(nodes, "home1")
    for one, other, way in ((ours, theirs, "down"), (theirs, ours, "up")):
        talking = talk(one, other)
        drunk = one.tell("drink", peer=other.peer_id, num=num).result()
        talked = talking.end()
        used_mbit = 8 * num * POURED_BYTES / 1e6 / (drunk["last_at"] - drunk["began_at"])
        figures.row(f"20 Mbit/s {way}", used_mbit=used_mbit, longest_pause_s=talked["longest_s"])
        assert 0.7 * mbit < used_mbit < mbit
        assert talked["longest_s"] < 2.0


def test_nat_that_forgets_after_30_s_costs_an_idle_stream_nothing(nodes: LabNodes, figures: Report) -> None:
    idle_s = 42.0
    nodes.lab.forget_after("home1", 30)
    ours, theirs = pair_of_talkers(nodes, "home1")
    talking = ours.tell("talk", peer=theirs.peer_id, seconds=100, pause_s=idle_s, num_bytes=500)
    time.sleep(idle_s + MAX_PAUSE_S)
    talked = talking.end()
    assert talked["num"] == 2, "the stream has stopped"
    pause_s = talked["longest_s"] - idle_s
    figures.row("NAT forgets after 30 s", longest_pause_s=pause_s)
    assert pause_s < MAX_PAUSE_S
    assert theirs.tell("call", peer=ours.peer_id, num=1, pause_s=0, num_bytes=100).result()["failures"] == []


def remembers(node: LabNode, other: LabNode) -> bool:
    path = node.home / "peers.json"
    return path.is_file() and other.peer_id in path.read_text()


def test_network_survives_the_loss_of_its_only_seed(nodes: LabNodes) -> None:
    seed = nodes.seed()
    open1, open2, home1 = nodes.talkers("open1", "open2", "home1", peers=seed.public)
    talks = [talk(open1, open2), talk(home1, open1)]
    wait_until(lambda: remembers(home1, open1), "a member does not remember another", timeout_s=30)
    seed.process.send_signal(signal.SIGKILL)
    killed_at = time.monotonic()
    time.sleep(2 * MAX_PAUSE_S)
    ends = [each.end() for each in talks]
    assert min(end["last_at"] for end in ends) > killed_at + MAX_PAUSE_S, "a stream has stopped"
    home1.end()
    [back] = nodes.talkers("home1", peers=(), home=home1.home.name)
    [newcomer] = nodes.talkers("open3", peers=open1.public)
    for one, other in ((newcomer, open2), (back, open2), (newcomer, back)):
        called = one.tell("call", peer=other.peer_id, num=3, pause_s=0.1, num_bytes=100).result()
        assert called["failures"] == [], (one.host, other.host)
