"""Peers that want more sessions than a server has, in virtual time: who waits for how long.

Users of a peer ask as the sessions of one client do: together, again when the server said so, and at once when a
session of their own has ended.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median

import pytest
from support.arithmetic_span import NUM_PAGES, Sums, with_engine
from swarm.serving.engine.engine import Engine
from swarm.serving.engine.sequence import EngineSequence
from swarm.serving.model.kv_pool import PAGE_TOKENS
from swarm.serving.peer_shares import RETRY_AFTER_S
from swarm_protocol.errors import PeerRefused

NUM_SESSIONS = 16
POLL_S = 0.5
LASTS_S = 300.0
GIVES_UP_S = 20.0


@dataclass
class Peer:
    """One peer with `num_users`, each of which asks again `pause_s` after an answer, or after GIVES_UP_S without one.
    An answer takes `answers_s`, from and to, and `num_pages`. A `network` has peers; without one, a peer has one of its
    own. `waits_s` are the times from a request to its session."""

    name: str
    num_users: int
    pause_s: float = 0.0
    answers_s: tuple[float, float] = (2.0, 9.0)
    num_pages: int = 1
    begins_s: float = 0.0
    network: str = ""
    num_refused: int = 0
    num_given_up: int = 0
    waits_s: list[float] = field(default_factory=list)
    asks_at_s: float = 0.0

    async def ask(self, engine: Engine, chance: random.Random) -> None:
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(self.begins_s + chance.uniform(0, self.pause_s + POLL_S))
        while True:
            since_s = clock()
            while (session := self._open(engine, clock())) is None and clock() - since_s < GIVES_UP_S:
                await asyncio.sleep(POLL_S)
            if session is None:
                self.num_given_up += 1
                continue
            self.waits_s.append(clock() - since_s)
            await asyncio.sleep(chance.uniform(*self.answers_s))
            assert session.end_error is None, "no session that was admitted is ended"
            session.close()
            self.asks_at_s = 0.0
            await asyncio.sleep(chance.uniform(0.5, 1.5) * self.pause_s)

    def _open(self, engine: Engine, now_s: float) -> EngineSequence | None:
        if now_s < self.asks_at_s:
            return None
        try:
            return engine.open(
                client=self.name, network=self.network, start=0, end=4, max_tokens=self.num_pages * PAGE_TOKENS
            )
        except PeerRefused as refused:
            self.num_refused += 1
            self.asks_at_s = now_s + refused.retry_after_s
            return None


def served(*peers: Peer) -> None:
    """Let the peers ask one server."""

    async def work(engine: Engine, _span: Sums) -> None:
        chance = random.Random(1)
        with suppress(TimeoutError):
            async with asyncio.timeout(LASTS_S), asyncio.TaskGroup() as tasks:
                for peer in peers:
                    for _ in range(peer.num_users):
                        tasks.create_task(peer.ask(engine, chance))
        for session in list(engine._sequences):
            session.close()

    with_engine(work, max_sessions=NUM_SESSIONS, evict_idle_s=LASTS_S)


def waits_s(peers: Sequence[Peer]) -> list[float]:
    return [wait_s for peer in peers for wait_s in peer.waits_s]


def test_peer_that_is_alone_is_refused_only_the_place_that_is_kept() -> None:
    alone = Peer("a", NUM_SESSIONS - 1)
    served(alone)
    assert (alone.num_refused, max(alone.waits_s)) == (0, 0)


def test_visitor_is_admitted_at_once_beside_answers_that_take_minutes() -> None:
    greedy, visitor = Peer("greedy", 3 * NUM_SESSIONS, answers_s=(200.0, 300.0)), Peer("visitor", 1, pause_s=10.0)
    served(greedy, visitor)
    assert len(visitor.waits_s) > 10
    assert (greedy.num_refused > 0, max(visitor.waits_s)) == (True, 0)


def test_gateway_takes_all_that_a_visitor_leaves_but_the_kept_place() -> None:
    gateway, visitor = Peer("gateway", NUM_SESSIONS - 2), Peer("visitor", 1)
    served(gateway, visitor)
    assert (gateway.num_refused, visitor.num_refused) == (0, 0)


@pytest.mark.parametrize("network", ["", "lan"], ids=["of other networks", "of the same network"])
@pytest.mark.parametrize("num_others", [4, 15])
def test_each_of_many_peers_is_served_beside_two_that_want_everything(num_others: int, network: str) -> None:
    greedy = [Peer(f"greedy {number}", 3 * NUM_SESSIONS, network=network) for number in range(2)]
    others = [Peer(f"other {number}", 1, pause_s=10.0, network=network) for number in range(num_others)]
    served(*greedy, *others)
    assert min(len(other.waits_s) for other in others) > 10
    assert median(waits_s(others)) <= RETRY_AFTER_S
    assert max(waits_s(others)) <= 2 * RETRY_AFTER_S


@pytest.mark.parametrize("answers_s", [(2.0, 9.0), (20.0, 50.0)], ids=["short", "long"])
def test_peers_of_other_networks_are_served_beside_forty_keys_of_one(answers_s: tuple[float, float]) -> None:
    keys = [Peer(f"key {number}", 1, answers_s=answers_s, network="sybils") for number in range(40)]
    gateway = Peer("gateway", NUM_SESSIONS // 4, begins_s=20.0)
    visitors = [Peer(f"visitor {number}", 1, pause_s=10.0, begins_s=20.0, network="lan") for number in range(3)]
    served(*keys, gateway, *visitors)
    assert min(len(each.waits_s) for each in (gateway, *visitors)) > 10
    assert sum(each.num_given_up for each in (gateway, *visitors)) <= 1, "one, while the first answers of the keys last"
    assert median(waits_s((gateway, *visitors))) <= RETRY_AFTER_S


SMALL_PAGES = 3
MANY = [f"small {number}" for number in range(NUM_PAGES // SMALL_PAGES)]


@pytest.mark.parametrize("names", [["small"], MANY, ["large"]], ids=["of one peer", "of many", "of the same peer"])
def test_session_of_half_of_the_pages_is_admitted_among_many_small_ones(names: list[str]) -> None:
    """The small ones are twice as many as there is room for, and fit in what is freed at any time."""
    small = [Peer(name, 2 * len(MANY) // len(names), num_pages=SMALL_PAGES) for name in names]
    large = Peer("large", 1, pause_s=10.0, num_pages=NUM_PAGES // 2)
    served(*small, large)
    assert (len(large.waits_s) > 8, large.num_given_up) == (True, 0)
    in_use_s = sum(len(peer.waits_s) * peer.num_pages * sum(peer.answers_s) / 2 for peer in (*small, large))
    assert in_use_s > 0.85 * NUM_PAGES * LASTS_S


def test_session_for_which_there_is_never_room_takes_little_from_others() -> None:
    def num_answers(*others: Peer) -> int:
        long = [Peer(f"long {number}", 1, answers_s=(LASTS_S, LASTS_S), num_pages=12) for number in range(2)]
        small = [Peer(name, 1, num_pages=SMALL_PAGES, begins_s=1.0) for name in MANY]
        served(*long, *small, *others)
        assert (len(waits_s(long)), len(waits_s(others))) == (2, 0)
        return len(waits_s(small))

    assert num_answers(Peer("large", 1, num_pages=NUM_PAGES // 2, begins_s=1.0)) > 0.8 * num_answers()
