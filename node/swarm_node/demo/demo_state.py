"""Keeps what the demo's nodes have reported so far: pure bookkeeping over their events, for the display and the
stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EventFields = Mapping[str, Any]

STATES = {
    "ready": "ready",
    "training": "training",
    "run_finished": "trained",
    "loading": "loading",
    "serving": "serving",
    "draining": "draining",
    "stopped": "stopped",
}
"""The state of a node after an event."""


@dataclass(slots=True)
class NodeState:
    """One node, by its last report on each matter."""

    name: str
    state: str = "starting"
    peer_id: str = ""
    addrs: tuple[str, ...] = ()
    outer_step: int = 0
    tokens_per_s: float = 0.0
    span: tuple[int, int] | None = None
    model: str = ""
    checkpoint: str = ""
    url: str = ""
    error: str = ""


@dataclass(slots=True)
class DemoState:
    """Everything that the nodes reported: training and validation losses, digests and tokens by outer step."""

    num_nodes: int
    nodes: dict[str, NodeState] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    digests: dict[int, dict[str, str]] = field(default_factory=dict)
    bytes_sent: list[int] = field(default_factory=list)
    num_tokens: dict[int, int] = field(default_factory=dict)
    num_parameters: int = 1

    def apply(self, name: str, event: EventFields) -> None:
        """Add one event of the node `name`. Unknown events are ignored."""
        node, kind = self.node(name), event.get("event", "")
        node.state = STATES.get(kind, node.state)
        match kind:
            case "ready":
                node.peer_id, node.addrs = event["peer_id"], tuple(event["addrs"])
            case "interval":
                node.tokens_per_s = event["tokens_per_s"]
            case "outer_step":
                self._outer_step(node, event)
            case "validated":
                if event["loss"] is not None:
                    self.validation.setdefault(event["step"], event["loss"])
            case "exported":
                node.checkpoint = event["path"]
            case "serving":
                node.model, node.span = event["model"], (event["start"], event["end"])
            case "listening":
                node.url = event["url"]
            case "error":
                node.error = event["message"]

    def lose(self, name: str) -> None:
        """Note that the node was killed."""
        node = self.node(name)
        node.state, node.span = "killed", None

    def _outer_step(self, node: NodeState, event: EventFields) -> None:
        step = event["step"]
        node.outer_step, node.tokens_per_s = step, event["tokens_per_s"]
        if event["loss"] is not None:
            self.losses[step] = event["loss"]
        self.digests.setdefault(step, {})[node.name] = event["digest"]
        self.num_tokens[step] = event["num_tokens"]
        self.bytes_sent.append(event["bytes_sent"])

    def node(self, name: str) -> NodeState:
        """Return the node, empty before its first report."""
        return self.nodes.setdefault(name, NodeState(name))

    @property
    def trainers(self) -> list[NodeState]:
        return [node for name, node in self.nodes.items() if name.startswith("node-")]

    @property
    def outer_step(self) -> int:
        """Return the newest outer step that a node has committed."""
        return max(self.digests, default=0)

    def loss_curve(self) -> list[float]:
        """Return the training losses in the order of their outer steps."""
        return [self.losses[step] for step in sorted(self.losses)]

    def all_at(self, step: int) -> bool:
        """Return whether every trainer holds the state of `step`."""
        return len(self.digests.get(step, {})) == self.num_nodes

    def digests_equal(self) -> bool:
        """Return whether at every outer step all nodes that committed it have the same state."""
        return all(len(set(by_node.values())) == 1 for by_node in self.digests.values())

    @property
    def tokens_per_s(self) -> float:
        """Return the training speed of the whole swarm."""
        return sum(node.tokens_per_s for node in self.trainers)

    def bytes_per_param(self) -> float:
        """Return the mean bytes that one member sends for one outer step, by parameter."""
        return sum(self.bytes_sent) / max(1, len(self.bytes_sent)) / self.num_parameters

    def survives_any_death(self, num_blocks: int) -> bool:
        """Return whether every block is served by two nodes or more."""
        served = Counter(block for node in self.trainers if node.span for block in range(*node.span))
        return all(served[block] >= 2 for block in range(num_blocks))

    def by_peer(self, peer_id: str) -> NodeState | None:
        return next((node for node in self.nodes.values() if node.peer_id == peer_id), None)
