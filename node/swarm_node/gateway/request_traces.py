"""Which servers answered a request: the newest traces, bounded, kept while and after a request runs.

State belongs to the gateway's event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from swarm_node.gateway import http_limits

Trace = dict[str, Any]


class TraceStore:
    """Traces by request id. A running request is asked for its trace each time; a finished one's is kept as it was."""

    def __init__(self, capacity: int = http_limits.MAX_KEPT_TRACES) -> None:
        self._capacity = capacity
        self._read: OrderedDict[str, Callable[[], Trace]] = OrderedDict()

    def begin(self, trace_id: str, read: Callable[[], Trace]) -> None:
        """Keep `read`, forgetting the oldest trace beyond the capacity."""
        self._read[trace_id] = read
        while len(self._read) > self._capacity:
            self._read.popitem(last=False)

    def finish(self, trace_id: str) -> None:
        """Hold the trace's last value instead of the request it came from."""
        if trace_id in self._read:
            last = self._read[trace_id]()
            self._read[trace_id] = lambda: last

    def get(self, trace_id: str) -> Trace | None:
        read = self._read.get(trace_id)
        return read() if read else None

    def __len__(self) -> int:
        return len(self._read)
