"""Proposals: one thread at a time, and nothing is kept of one whose caller was cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from support.training_swarm import config
from swarm.training.inner.lease import admitted
from swarm.training.state import replica as module
from swarm.training.state.replica import Held, Replica
from swarm.training.state.replica_state import ReplicaState
from swarm_compression import get_codec
from swarm_protocol.errors import RoundError
from swarm_protocol.identity import Identity
from swarm_protocol.training_messages import Contribution, Group, Outcome

PEER = Identity(bytes(32)).peer_id
GROUP = Group(
    run="run",
    step=1,
    attempt=0,
    state_digest=bytes(32),
    members=(Contribution(peer_id=PEER, num_tokens=1, num_samples=1),),
    part_values=(10,),
    reduce_s=1.0,
    vote_s=1.0,
)


class SlowStep:
    """Outer steps that wait to be let go, and how many of them were computed side by side."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.num_running = self.most_running = 0

    def __call__(self, *_: object) -> None:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        self.begun.release()
        assert self.go.acquire(timeout=20)
        self.num_running -= 1


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowStep:
    step = SlowStep()
    monkeypatch.setattr(module, "apply_outer_step", step)
    return step


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


def make_replica() -> Replica:
    initial = ReplicaState.initial(torch.zeros(10))
    return Replica(config(), Held.of(replace(initial, roster=(PEER,), lanes=admitted(initial.lanes, (PEER,)))))


def propose(replica: Replica, executor: ThreadPoolExecutor, name: bytes) -> asyncio.Task[Outcome]:
    return asyncio.create_task(replica.propose(executor, name * 32, GROUP, (part(name),)))


def part(name: bytes) -> bytes:
    """One for each name."""
    return get_codec("int8").encode(torch.full((10,), float(name[0])))


def test_propose_of_what_leads_to_a_state_that_is_not_finite_is_refused(executor: ThreadPoolExecutor) -> None:
    largest = torch.finfo(torch.float32).max
    replica = make_replica()
    state = replace(replica.current.state, theta_N=torch.full((10,), -largest), momentum_N=torch.full((10,), largest))
    replica = Replica(config(), Held.of(state))

    async def main() -> None:
        with pytest.raises(RoundError, match="a state that is not finite"):
            await propose(replica, executor, b"a")

    asyncio.run(main())
    assert replica.current.state is state


def test_propose_whose_caller_is_cancelled_keeps_nothing_and_the_next_waits_for_its_thread(
    slow: SlowStep, executor: ThreadPoolExecutor
) -> None:
    async def main() -> None:
        replica = make_replica()
        stale = propose(replica, executor, b"a")
        assert await asyncio.to_thread(slow.begun.acquire, timeout=20)
        stale.cancel()
        await asyncio.wait({stale})
        following = propose(replica, executor, b"b")
        assert not await asyncio.to_thread(slow.begun.acquire, timeout=0.1), "the first thread still runs"
        slow.go.release(2)
        outcome = await following
        assert slow.most_running == 1
        assert replica.proposal(outcome) is not None
        assert replica.parts_of(b"b" * 32) == (part(b"b"),)
        assert replica.parts_of(b"a" * 32) == ()
        assert len(replica._proposals) == 1

    asyncio.run(main())


def test_propose_from_a_state_that_is_no_longer_the_committed_one_is_refused(
    slow: SlowStep, executor: ThreadPoolExecutor
) -> None:
    async def main() -> None:
        replica = make_replica()
        stale = propose(replica, executor, b"a")
        assert await asyncio.to_thread(slow.begun.acquire, timeout=20)
        replica.current = Held.of(ReplicaState.initial(torch.ones(10)))
        slow.go.release()
        with pytest.raises(RoundError, match="meanwhile"):
            await stale
        assert not replica._proposals

    asyncio.run(main())
