"""Tests that simulated servers refuse sessions for which they have no room, and announce their load."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from swarm.network.rate import Rate
from swarm.simulation.report import ANSWERED, TOKENS_PER_S, WORK
from swarm.simulation.scenario import Model, NodeClass, Scenario
from swarm.simulation.simulated_serving import ANNOUNCE_S, SimulatedServer
from swarm.simulation.world import simulate
from swarm.testing import virtual_time
from swarm_protocol.errors import PeerRefused
from swarm_protocol.records import ServeRecord

MODEL = Model(blocks=4, block_mib=100, kv_kib_per_token=64, prompt_tokens=192, answer_tokens=64)
SERVER = NodeClass(name="servers", role="serve", share=0.5, memory_gib=1.0, decode_ms_per_block=2)
SESSION_TOKENS = 256
NUM_SESSIONS = 9
"""A server's 1,024 MiB are 400 for the four blocks and 64 for each session: 256 tokens, 64 KiB on each block."""


class LonelyMembership:
    """The membership of a server that sees no other servers. It keeps what was announced."""

    def __init__(self) -> None:
        self.announced = list[ServeRecord]()

    def announce(self, record: ServeRecord) -> None:
        self.announced.append(record)

    async def servers(self, _model: str) -> dict[str, ServeRecord]:
        return {}

    async def rtts_ms(self, _servers: object, *, timeout_s: float) -> dict[str, float]:
        return {}


def test_server_refuses_sessions_that_its_cache_cannot_hold_and_announces_its_load() -> None:
    async def main() -> None:
        membership = LonelyMembership()
        network = cast("Any", SimpleNamespace(peer_id="server", host=SimpleNamespace(down=Rate(1e9))))
        server = SimulatedServer(network, cast("Any", membership), MODEL, SERVER, relayed=False)
        serving = asyncio.create_task(server.run())
        with pytest.raises(PeerRefused, match="does not serve yet"), server.session(SESSION_TOKENS):
            pass
        await asyncio.sleep(10)
        room = membership.announced[-1].free_kv_tokens
        assert room // SESSION_TOKENS == NUM_SESSIONS
        with ExitStack() as sessions:
            for _ in range(NUM_SESSIONS):
                sessions.enter_context(server.session(SESSION_TOKENS))
            with pytest.raises(PeerRefused, match="cache is full") as refusal, server.session(SESSION_TOKENS):
                pass
            assert refusal.value.peer_id == "server"
            await asyncio.sleep(2 * ANNOUNCE_S)
            assert membership.announced[-1].queue_depth == NUM_SESSIONS
            assert membership.announced[-1].free_kv_tokens == room - NUM_SESSIONS * SESSION_TOKENS
        await asyncio.sleep(2 * ANNOUNCE_S)
        assert membership.announced[-1].queue_depth == 0
        assert membership.announced[-1].free_kv_tokens == room
        serving.cancel()
        await asyncio.wait({serving})

    virtual_time.run(main())


def served(scenario: Scenario) -> dict[str, Any]:
    return dict(simulate(scenario).sections["Serving"])


def test_one_server_refuses_sessions_that_nine_servers_answer() -> None:
    one = Scenario(
        nodes=4,
        minutes=1,
        warm_up_minutes=2,
        probes_per_minute=0,
        model=replace(MODEL, requests_per_minute=180),
        classes=(replace(SERVER, share=1), NodeClass(name="gateways", role="gateway", share=3)),
    )
    few = served(one)
    more = served(replace(one, nodes=12, classes=(replace(SERVER, share=9), one.classes[1])))
    calm = served(replace(one, model=replace(MODEL, requests_per_minute=6)))
    assert few[ANSWERED] < 0.8 < 0.99 < more[ANSWERED]
    assert few["sessions that a full server has refused"] > 10
    assert few[TOKENS_PER_S]["median"] < 0.8 * calm[TOKENS_PER_S]["median"]
    assert few[WORK] > 4 * calm[WORK] > 0
