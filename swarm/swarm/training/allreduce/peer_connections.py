"""How the members of one reduction reach each other, and whether one that sends nothing is still there.

A process that is stopped, or cut off without a word, keeps its connections for minutes. A call that every member
answers at once tells it from one that is only slow. No state.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm_protocol.errors import PeerError, PeerTimeout, PeerUnreachable

from swarm.network.interface import Network
from swarm.training.allreduce.bandwidth import Meter
from swarm.training.round.methods import Methods

QUIET_S = 1.0
"""A member that has sent nothing for so long is asked whether it is there."""
SILENT_S = 4.0
"""A member that leaves a small call unanswered for so long, beyond what its line is busy with, is taken for gone: it is
left out of the next attempt, and back in a later one. Busy machines and bad links answer within this."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PeerLines:
    """`meter` knows what the lines carry."""

    network: Network
    methods: Methods
    meter: Meter = field(default_factory=Meter)

    async def answers(self, peer: str, within_s: float) -> bool:
        """Whether `peer` answers a call that asks for nothing."""
        try:
            await self.network.call(peer, self.methods.alive, b"", timeout_s=within_s)
        except (PeerTimeout, PeerUnreachable):
            return False
        except PeerError:
            pass  # a refusal is an answer
        return True
