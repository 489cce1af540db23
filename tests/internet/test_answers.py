"""Tests an answer across every pair of hosts: the first host asks, two nodes of the second one serve, and one of these
dies."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from bench.report import Report
from internet.conftest import OpenLab
from internet.pairs import MAX_DIRECT_S, Pair, each_pair
from internet.paths import PairMeter
from internet.serving import PROMPT, await_servers, started_servers
from support.tiny_models import local_tokens

pytestmark = [pytest.mark.internet, pytest.mark.timeout(240)]

NUM_TOKENS = 240
PAUSE_S = 0.1
"""The pause after each token, so that the answer lasts until its paths have been measured."""
GOES_ON_S = 2.0
MAX_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Hold the times of one answer. `direct_s` is the time from the question until most bytes went directly, `again_s`
    the same from the server's death, and `went_on_s` the time from the death to the last token."""

    pair: Pair
    tokens: list[int]
    num_replays: int
    longest_pause_s: float
    went_on_s: float
    direct_s: float | None
    again_s: float | None


@pytest.fixture(scope="module")
def answer(request: pytest.FixtureRequest, open_lab: OpenLab, figures: Report, model: Path) -> Answer:
    pair: Pair = request.param
    with open_lab() as nodes:
        seed = nodes.seed()
        servers = started_servers(nodes, pair.other, model, seed.public, num=2)
        [client] = nodes.talkers(pair.one, peers=seed.public)
        await_servers(client, model, servers)
        meter = PairMeter(nodes.lab, pair.one, pair.other)
        question = {"model": model.name, "prompt": PROMPT, "num_tokens": NUM_TOKENS, "pause_s": PAUSE_S}
        asking = client.tell("ask", **question)
        [used] = asking.next()["servers"]
        direct_s = meter.wait_direct(within_s=pair.look_s)
        [victim] = [server for server in servers if server.peer_id == used]
        victim.process.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        again_s = meter.wait_direct(within_s=pair.look_s)
        time.sleep(GOES_ON_S)
        told, shares = asking.end(), meter.shares()
    found = Answer(
        pair=pair,
        tokens=told["tokens"],
        num_replays=told["num_replays"],
        longest_pause_s=told["longest_s"],
        went_on_s=told["last_at"] - killed_at,
        direct_s=direct_s,
        again_s=again_s,
    )
    figures.row(
        pair.name,
        answer_direct_after_s="never" if direct_s is None else direct_s,
        answer_pause_s=found.longest_pause_s,
        seed_share_of_answer=shares.seed_share,
    )
    return found


@each_pair("answer", with_path=False)
def test_answer_keeps_its_tokens_when_its_server_dies(answer: Answer, model: Path) -> None:
    assert answer.tokens == local_tokens(model, PROMPT, NUM_TOKENS)[: len(answer.tokens)]
    assert answer.went_on_s >= GOES_ON_S
    assert answer.num_replays == 1
    assert answer.longest_pause_s < MAX_PAUSE_S


@each_pair("answer", with_path=True)
def test_answer_takes_a_direct_path_soon(answer: Answer) -> None:
    for waited_s in (answer.direct_s, answer.again_s):
        assert waited_s is not None
        assert waited_s <= MAX_DIRECT_S
