"""Tests which groups a member refuses to reduce."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from support.round_scripts import COORDINATOR, FIRST, RUN
from swarm.training.member.reductions import Reductions
from swarm.training.round.round_events import Event, ReduceFailed
from swarm.training.state.certificate import RunSignatures
from swarm_protocol.identity import Identity


def test_group_of_a_contributor_without_a_commitment_is_not_reduced_and_its_coordinator_is_accused() -> None:
    """Nothing would convict a contributor that sends each owner and each auditor other slices."""
    events = list[Event]()
    signatures = RunSignatures(identity=Identity(bytes(32)), network_id="test", run=RUN)
    context = SimpleNamespace(replica=SimpleNamespace(proof=None), signatures=signatures)

    step = SimpleNamespace(context=context, feed=events.append)  # nothing convicts anyone
    reductions = Reductions(cast(Any, step))
    asyncio.run(reductions.reduce(FIRST, None))
    (event,) = events
    assert isinstance(event, ReduceFailed)
    assert event.accused == (COORDINATOR,)
    assert "has not committed to its slices" in event.reason
