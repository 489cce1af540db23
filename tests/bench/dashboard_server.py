"""A dashboard of a made-up swarm in a process of its own: `python dashboard_server.py NUM_NODES HISTORY`.

All but the network is what `swarm-node dashboard` runs: records are signed and checked, looked up through Membership,
shown over real HTTP. Each record is signed anew every 30 s, as members do. Prints its URL, and ends with its stdin.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import swarm.network.libp2p_network  # noqa: F401 what a daemon has loaded, for the sake of its memory
import uvloop
from support.dashboard_world import fetch_nothing, trainer_record
from support.plain_records import node_record, serve_record
from swarm.network.membership import Membership
from swarm.network.memory.memory_network import MemoryInternet, MemoryNetwork
from swarm.network.memory.memory_routes import AccessLink
from swarm.network.rate import Rate
from swarm_node.dashboard.app import create_dashboard
from swarm_node.dashboard.collector import Collector
from swarm_node.dashboard.history.history import DashboardHistory
from swarm_node.http.server import listen, serving
from swarm_protocol.envelope import Envelope, seal_record, unseal_record
from swarm_protocol.identity import Identity
from swarm_protocol.records import NodeRecord, Record, publish_key

REFRESH_S = 30.0
NUM_BLOCKS = 64
MODELS = ("large", "middle", "small")


class Peers(MemoryNetwork):
    """A network whose lookups find many peers' records, some signed anew with each lookup."""

    def __init__(self, num_nodes: int) -> None:
        unlimited = AccessLink(up=Rate(math.inf), down=Rate(math.inf), clock_offset_s=0.0)
        super().__init__(MemoryInternet(), Identity(b"d" * 32), "bench", unlimited)
        self._identities = [Identity(index.to_bytes(32, "big")) for index in range(1, num_nodes + 1)]
        self._held: dict[str, dict[str, Envelope]] = {}
        self._due: list[tuple[float, int]] = []
        for index in range(num_nodes):
            self._sign(index)
            self._due.append((time.time() + REFRESH_S * index / num_nodes, index))

    def now(self) -> float:
        return time.time()

    def _sign(self, index: int) -> None:
        for record in _records(index):
            identity = self._identities[index]
            key = publish_key(record, identity.peer_id)
            sealed = seal_record(
                identity, network_id="bench", key=key, payload=record.to_bytes(), issued_at=self.now(), lifetime_s=60
            )
            held = self._held.setdefault(key, {})
            held[identity.peer_id] = unseal_record(sealed.to_bytes(), network_id="bench", key=key, now=self.now())

    async def lookup(self, keys: Sequence[str], *, timeout_s: float, max_records: int = 0) -> list[Envelope]:
        for place, (due_at, index) in enumerate(self._due):
            if due_at <= self.now():
                self._sign(index)
                self._due[place] = (due_at + REFRESH_S, index)
        return [envelope for key in keys for envelope in self._held.get(key, {}).values()]


def _records(index: int) -> list[Record]:
    """Return the records of a node. Two of three nodes serve, the others train."""
    model = MODELS[index % len(MODELS)]
    start = index * 7 % (NUM_BLOCKS - 8)
    work: Record = serve_record(
        start, start + 8, model=model, num_blocks=NUM_BLOCKS, tokens_per_s=20.0, decode_ms_per_block=1 + index % 5
    )
    if index % 3 == 2:
        work = trainer_record(int(time.time() // 10) % 1000)
    node: NodeRecord = node_record(
        f"node {index}",
        models=(model,) if index % 3 != 2 else (),
        runs=("story",) if index % 3 == 2 else (),
        decode_tokens_per_s=20.0,
        device="NVIDIA GeForce RTX 4090",
    )
    return [node, work]


async def main(num_nodes: int, history: Path) -> None:
    network = Peers(num_nodes)
    async with Membership(network) as membership, DashboardHistory(history) as stored:
        collector = Collector(
            network,
            membership,
            stored,
            fetch_run=fetch_nothing,
        )
        polling = asyncio.create_task(collector.run_forever())
        app = create_dashboard(collector)
        async with serving(app, listen("127.0.0.1", 0)) as url:
            print(url, flush=True)
            await asyncio.to_thread(sys.stdin.read)
            app.state.live.close()
        polling.cancel()
        await asyncio.wait({polling})


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), Path(sys.argv[2])))
