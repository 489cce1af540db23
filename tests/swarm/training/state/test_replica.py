"""Tests that proposals are computed one at a time, that cancelled ones leave nothing behind, and the arithmetic of the
outer step."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.replica_states import with_head
from support.training_swarm import config
from swarm.training.allreduce.parts import part_frames
from swarm.training.run.run_tables import OuterConfig
from swarm.training.run.seeded import stream
from swarm.training.state import replica as module
from swarm.training.state.lease import admitted
from swarm.training.state.outer_step import apply_outer_step
from swarm.training.state.replica import Replica
from swarm.training.state.replica_state import ReplicaState
from swarm_compression import get_codec
from swarm_protocol.commit_messages import Outcome
from swarm_protocol.errors import RoundError
from swarm_protocol.identity import Identity
from swarm_protocol.training_messages import Contribution, Group
from torch import Tensor
from torch.optim.sgd import sgd

PEER = Identity(bytes(32)).peer_id
PEERS = tuple(sorted(Identity(bytes([number]) * 32).peer_id for number in range(4)))
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
    """Replace the outer step by one that waits for a release, and count how many run at the same time."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.num_running = self.most_running = 0

    def __call__(self, *_: object) -> None:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        self.begun.release()
        assert self.go.acquire(timeout=120)
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
    stripes = admitted(initial.manifest.stripes, (PEER,))
    return Replica(config(), with_head(initial, roster=(PEER,), stripes=stripes))


def propose(replica: Replica, executor: ThreadPoolExecutor, name: bytes) -> asyncio.Task[Outcome]:
    return asyncio.create_task(replica.propose(executor, name * 32, GROUP, (part(name),)))


def part(name: bytes) -> bytes:
    """Return a part that differs by name."""
    return get_codec("int8").encode(torch.full((10,), float(name[0])))


def test_clusters_do_not_wait_for_a_trainer_that_the_last_overlapping_round_left_out() -> None:
    heads, gone, newcomer = PEERS[:2], PEERS[2], PEERS[3]
    initial = ReplicaState.initial(torch.zeros(NUM_VALUES), overlap_steps=1)
    stripes = (
        replace(initial.manifest.stripes[0], roster=(*heads, newcomer)),
        replace(initial.manifest.stripes[1], roster=(*heads, gone, newcomer)),
    )
    state = with_head(initial, outer_step=1, roster=heads, stripes=stripes)
    replica = Replica(config(max_group=4, cluster_size=2), state)
    assert gone in replica.leased(2)
    assert replica.clusters().promoted == (newcomer,)


def test_propose_refuses_parts_that_lead_to_a_state_that_is_not_finite(executor: ThreadPoolExecutor) -> None:
    largest = torch.finfo(torch.float32).max
    replica = make_replica()
    state = replace(replica.current, theta_N=torch.full((10,), -largest), momentum_N=torch.full((10,), largest))
    replica = Replica(config(), state)

    async def main() -> None:
        with pytest.raises(RoundError, match="a state that is not finite"):
            await propose(replica, executor, b"a")

    asyncio.run(main())
    assert replica.current is state


def test_cancelled_propose_keeps_nothing_and_the_next_waits_for_its_thread(
    slow: SlowStep, executor: ThreadPoolExecutor
) -> None:
    async def main() -> None:
        replica = make_replica()
        stale = propose(replica, executor, b"a")
        assert await asyncio.to_thread(slow.begun.acquire, timeout=120)
        stale.cancel()
        await asyncio.wait({stale})
        following = propose(replica, executor, b"b")
        assert not await asyncio.to_thread(slow.begun.acquire, timeout=0.1), (
            "the second step began while the first one's thread still ran"
        )
        slow.go.release(2)
        outcome = await following
        assert slow.most_running == 1
        assert replica.proposal(outcome) is not None
        assert replica.parts_of(b"b" * 32) == (part(b"b"),)
        assert replica.parts_of(b"a" * 32) == ()
        assert len(replica._proposals) == 1

    asyncio.run(main())


def test_propose_is_refused_when_another_state_was_committed_meanwhile(
    slow: SlowStep, executor: ThreadPoolExecutor
) -> None:
    async def main() -> None:
        replica = make_replica()
        stale = propose(replica, executor, b"a")
        assert await asyncio.to_thread(slow.begun.acquire, timeout=120)
        replica.current = ReplicaState.initial(torch.ones(10))
        slow.go.release()
        with pytest.raises(RoundError, match="meanwhile"):
            await stale
        assert not replica._proposals

    asyncio.run(main())


@pytest.mark.parametrize("bounds", [(0, 300_000), (0, 100_000, 300_000)])
def test_make_gives_the_state_with_the_manifest_of_the_proposal(
    executor: ThreadPoolExecutor, bounds: tuple[int, ...]
) -> None:
    """The vector has more than a chunk and more than a frame, and is moved as a whole or in its second fragment."""
    outer_step, initial = len(bounds) - 2, ReplicaState.initial(_known(0, bounds[-1]))
    stripes = admitted(initial.manifest.stripes, (PEER,))
    state = replace(initial, momentum_N=_known(1, bounds[-1])).hashed_again()
    state = with_head(state, outer_step=outer_step, stripes=stripes, roster=(PEER,))
    replica = Replica(config(), state, bounds=bounds)
    fragment = replica.fragment(outer_step + 1)
    delta_F = _known(2, fragment.stop - fragment.start) * 0.01
    group = replace(GROUP, step=outer_step + 1, part_values=(delta_F.numel(),))
    codec = get_codec("int8")
    frames = [delta_F[frame] for frame in part_frames(group, 0)]
    part = b"".join(map(codec.encode, frames))

    async def main() -> ReplicaState:
        outcome = await replica.propose(executor, bytes(32), group, (part,))
        proposal = replica.proposal(outcome)
        assert proposal is not None
        assert proposal.manifest.digest() == outcome.state_digest
        return await replica.make_state(executor, proposal)

    before = replica.digest
    made = asyncio.run(main())
    assert made.hashed_again().manifest == made.manifest
    assert replica.current.hashed_again().digest == before
    theta_F, momentum_F = state.theta_N[fragment].clone(), state.momentum_N[fragment].clone()
    decoded_F = torch.cat([codec.decode(codec.encode(x_C), x_C.numel()) for x_C in frames])
    apply_outer_step(theta_F, momentum_F, decoded_F, config().outer)
    assert torch.equal(made.theta_N[fragment], theta_F)
    assert torch.equal(made.momentum_N[fragment], momentum_F)


OUTER = OuterConfig(learning_rate=0.7, momentum=0.9)
NUM_VALUES = (1 << 17) + 12_345  # three blocks, of which the last one is shorter


def _known(index: int, num_values: int = NUM_VALUES) -> Tensor:
    """Return values in [-1, 1) that follow from integer arithmetic alone."""
    bits_N = (stream(11, index, num_values) >> np.uint64(40)).astype(np.int64) - (1 << 23)
    return torch.from_numpy(bits_N.astype(np.float32)) * 2.0**-23


def _three_steps(theta_N: Tensor, momentum_N: Tensor, config: OuterConfig = OUTER) -> None:
    for index in range(3):
        apply_outer_step(theta_N, momentum_N, _known(10 + index, theta_N.numel()) * 0.01, config)


@pytest.mark.parametrize("config", [OUTER, OuterConfig(learning_rate=0.4, momentum=0.0), OuterConfig(momentum=0.99)])
def test_apply_outer_step_equals_the_equations_in_float64(config: OuterConfig) -> None:
    theta_N, momentum_N = _known(0), torch.zeros(NUM_VALUES)
    theta, momentum = theta_N.numpy().astype(np.float64), np.zeros(NUM_VALUES)
    for index in range(3):
        delta = (_known(10 + index) * 0.01).numpy().astype(np.float64)
        momentum = config.momentum * momentum + delta
        theta = theta - config.learning_rate * (delta + config.momentum * momentum)
    _three_steps(theta_N, momentum_N, config)
    np.testing.assert_allclose(theta_N.numpy(), theta, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(momentum_N.numpy(), momentum, rtol=1e-5, atol=1e-7)


def test_apply_outer_step_equals_torch_sgd_with_nesterov() -> None:
    theta_N, momentum_N = _known(0), torch.zeros(NUM_VALUES)
    expected_N, buffers = theta_N.clone(), list[torch.Tensor | None]([None])
    rule = {"weight_decay": 0.0, "momentum": 0.9, "dampening": 0.0, "nesterov": True, "maximize": False, "lr": 0.7}
    for index in range(3):
        # the function, since the first object of an optimizer class takes seconds: it imports torch's compiler
        sgd([expected_N], [_known(10 + index) * 0.01], buffers, **rule)
    _three_steps(theta_N, momentum_N)
    torch.testing.assert_close(theta_N, expected_N, rtol=1e-6, atol=1e-7)


def test_apply_outer_step_gives_the_same_bits_on_every_machine() -> None:
    theta_N, momentum_N = _known(0), torch.zeros(NUM_VALUES)
    _three_steps(theta_N, momentum_N)
    assert hashlib.sha256(theta_N.numpy().tobytes()).hexdigest()[:16] == "c96890d7b1d0599d"


def test_apply_outer_step_by_average_gives_the_mean_of_the_members() -> None:
    theta_N, momentum_N, config = _known(0), torch.zeros(NUM_VALUES), OuterConfig(optimizer="average")
    members = [_known(1), _known(2), _known(3)]
    mean_N = sum((theta_N - each for each in members), torch.zeros(NUM_VALUES)) / 3
    expected_N = torch.stack(members).mean(dim=0)
    apply_outer_step(theta_N, momentum_N, mean_N, config)
    torch.testing.assert_close(theta_N, expected_N, rtol=1e-5, atol=1e-6)
    assert not momentum_N.any()


def test_apply_outer_step_by_average_changes_nothing_when_a_value_is_not_finite() -> None:
    theta_N, delta_N = _known(0), _known(2)
    delta_N[0] = float("inf")
    with pytest.raises(RoundError, match="not finite"):
        apply_outer_step(theta_N, torch.zeros(NUM_VALUES), delta_N, OuterConfig(optimizer="average"))
    assert torch.equal(theta_N, _known(0))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_apply_outer_step_rounds_each_operation_with_any_number_of_threads(num_threads: int) -> None:
    theta_N, momentum_N, delta_N = _known(0), _known(1), _known(2)
    mu, eta = np.float32(0.9), np.float32(0.7)
    # numpy rounds after each operation
    momentum = momentum_N.numpy() * mu + delta_N.numpy()
    theta = theta_N.numpy() - (momentum * mu + delta_N.numpy()) * eta
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        apply_outer_step(theta_N, momentum_N, delta_N, OUTER)
    finally:
        torch.set_num_threads(before)
    assert np.array_equal(momentum_N.numpy(), momentum)
    assert np.array_equal(theta_N.numpy(), theta)


@pytest.mark.parametrize("first", [1, 7, 12_345])
def test_apply_outer_step_of_a_piece_equals_the_piece_of_the_whole(first: int) -> None:
    theta_N, momentum_N = _known(0), _known(1)
    piece_N, piece_momentum_N = theta_N[first:].clone(), momentum_N[first:].clone()
    apply_outer_step(theta_N, momentum_N, _known(2), OUTER)
    apply_outer_step(piece_N, piece_momentum_N, _known(2)[first:].clone(), OUTER)
    assert torch.equal(piece_N, theta_N[first:])
    assert torch.equal(piece_momentum_N, momentum_N[first:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_apply_outer_step_changes_nothing_when_the_pseudo_gradient_is_not_finite(bad: float) -> None:
    theta_N, momentum_N, delta_N = _known(0), _known(1), _known(2)
    delta_N[-1] = bad
    with pytest.raises(RoundError, match="not finite"):
        apply_outer_step(theta_N, momentum_N, delta_N, OUTER)
    assert torch.equal(theta_N, _known(0))
    assert torch.equal(momentum_N, _known(1))


@pytest.mark.parametrize("delta_N", [torch.zeros(3), torch.zeros(4, dtype=torch.float64), torch.zeros(2, 2)])
def test_apply_outer_step_refuses_tensors_that_do_not_fit(delta_N: Tensor) -> None:
    with pytest.raises(ValueError, match="flat fp32 CPU"):
        apply_outer_step(torch.zeros(4), torch.zeros(4), delta_N, OUTER)
