"""Tests the slices that the maker of a part keeps for its auditors."""

from __future__ import annotations

import pytest
from swarm.training.allreduce.committed_slices import MadePart
from swarm.training.allreduce.parts import PartResult, part_values
from swarm_compression import get_codec
from swarm_protocol.errors import RoundError
from swarm_protocol.identity import Identity
from swarm_protocol.training_messages import Contribution, Group

CODEC = get_codec("int8")
PEERS = sorted(Identity(bytes([number]) * 32).peer_id for number in range(1, 4))


def test_slice_is_refused_with_a_clear_message_when_it_arrives_after_the_step() -> None:
    group = Group(
        run="run",
        step=1,
        attempt=0,
        state_digest=bytes(32),
        members=tuple(Contribution(peer_id=peer, num_tokens=1, num_samples=1) for peer in PEERS),
        part_values=part_values(3000, (1.0,) * 3),
        reduce_s=10.0,
        vote_s=10.0,
    )
    made = MadePart(group, PartResult(group, 0, CODEC), CODEC)
    made.keep(PEERS[1], b"frame")
    made.drop()
    with pytest.raises(RoundError, match="the step is over"):
        made.keep(PEERS[1], b"frame")
