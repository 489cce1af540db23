"""A request for a proof of possession: what a server's announcement says is not believed."""

from __future__ import annotations

import random
from dataclasses import replace

from support.wrong_possession import manifest, record
from swarm.network.memory.memory_network import MemoryInternet
from swarm.serving.evidence.possession_call import ask_for_proof
from swarm.testing import virtual_time
from swarm_protocol.errors import PeerViolation
from swarm_protocol.identity import Identity

SERVER = Identity(bytes([60]) * 32)


def test_server_that_announces_blocks_beyond_the_manifest_s_has_failed_without_being_asked() -> None:
    announced = replace(record(), num_blocks=9, start=7, end=8)

    async def scenario() -> None:
        network = MemoryInternet().network(identity=Identity(bytes([61]) * 32))
        asked = await ask_for_proof(network, SERVER.peer_id, announced, manifest(), random.Random(0))
        assert (asked.outcome, asked.evidence, type(asked.error)) == ("failed", b"", PeerViolation)
        one = replace(announced, start=0, end=1)
        asked = await ask_for_proof(network, SERVER.peer_id, one, manifest(), random.Random(0))
        assert asked.outcome == "unanswered", "it is asked, and is not there"

    virtual_time.run(scenario())
