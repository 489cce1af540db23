"""What one look at the network has found: signed records by peer, and how old each is. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from swarm_protocol.records import NodeRecord, ServeRecord, TrainerRecord

R = TypeVar("R", NodeRecord, ServeRecord, TrainerRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed(Generic[R]):
    """The newest record of each peer, and the seconds since it was signed."""

    records: Mapping[str, R]
    ages_s: Mapping[str, float]

    def age_s(self, peer_id: str) -> float:
        return self.ages_s.get(peer_id, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Everything at one time, by peer id, by model and by run id. `rtts_ms`: to servers, as far as they are known."""

    at: float
    nodes: Listed[NodeRecord]
    models: Mapping[str, Listed[ServeRecord]]
    runs: Mapping[str, Listed[TrainerRecord]]
    rtts_ms: Mapping[str, float] = field(default_factory=dict)
