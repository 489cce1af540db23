"""The named ladder of home connections that tests and benchmarks refer to.

A `Connection` is how one node is attached: rates up and down, and what it adds to each direction's latency. A test on
real sockets puts a `wan_proxy` with it before a node; a simulated node gets `MemoryInternet.network(up_bytes_per_s=…)`
and `link_between`. Numbers are typical of their kind, not of anyone's offer.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.network.memory.memory_link import LinkModel

MBIT_BYTES = 1_000_000 / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """`latency_s` is one way, from the node to the core of the internet; `loss` is per packet."""

    name: str
    down_bytes_per_s: float
    up_bytes_per_s: float
    latency_s: float
    jitter_s: float
    loss: float = 0.0

    def __post_init__(self) -> None:
        # a LinkModel checks the same bounds
        link_between(self, self)


def link_between(sender: Connection, receiver: Connection) -> LinkModel:
    """The simulated link in that direction: both latencies, the narrower rate."""
    return LinkModel(
        latency_s=sender.latency_s + receiver.latency_s,
        jitter_s=sender.jitter_s + receiver.jitter_s,
        bandwidth_bytes_per_s=min(sender.up_bytes_per_s, receiver.down_bytes_per_s),
        loss=1 - (1 - sender.loss) * (1 - receiver.loss),
    )


def _connection(
    name: str, down_mbit: float, up_mbit: float, latency_ms: float, jitter_ms: float, loss: float = 0.0
) -> Connection:
    return Connection(
        name=name,
        down_bytes_per_s=down_mbit * MBIT_BYTES,
        up_bytes_per_s=up_mbit * MBIT_BYTES,
        latency_s=latency_ms / 1000,
        jitter_s=jitter_ms / 1000,
        loss=loss,
    )


LINKS = {
    connection.name: connection
    for connection in (
        _connection("lan", 1000, 1000, 0.2, 0.1),
        _connection("fibre", 500, 500, 5, 1),
        _connection("cable", 200, 20, 25, 3),
        _connection("dsl", 50, 10, 30, 5, 0.0005),
        _connection("mobile", 30, 8, 50, 25, 0.005),
        _connection("awful", 2, 0.5, 150, 100, 0.02),
    )
}
