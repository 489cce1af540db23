"""An answer across every pair of hosts: the first one asks, two nodes of the second one serve, and one of them dies."""

from __future__ import annotations

import signal
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

NUM_TOKENS = 220
PAUSE_S = 0.1
"""After each token, so that the answer lasts until its path has been looked at."""
MAX_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`direct_s`: from the question until most bytes went directly; `again_s`: likewise from the server's death on."""

    pair: Pair
    tokens: list[int]
    num_replays: int
    longest_pause_s: float
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
        direct_s = meter.wait_direct(within_s=MAX_DIRECT_S)
        [victim] = [server for server in servers if server.peer_id == used]
        victim.process.send_signal(signal.SIGKILL)
        again_s = meter.wait_direct(within_s=MAX_DIRECT_S)
        told, shares = asking.result(), meter.shares()
    found = Answer(
        pair=pair,
        tokens=told["tokens"],
        num_replays=told["num_replays"],
        longest_pause_s=told["longest_s"],
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
    assert answer.tokens == local_tokens(model, PROMPT, NUM_TOKENS)
    assert answer.num_replays == 1
    assert answer.longest_pause_s < MAX_PAUSE_S


@each_pair("answer", with_path=True)
def test_answer_takes_a_direct_path_soon(answer: Answer) -> None:
    assert answer.direct_s is not None
    assert answer.again_s is not None
