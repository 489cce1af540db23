"""Tests how many vectors of the model's size a trainer keeps, counted among all tensors of the process."""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from support.faults import Fault, FaultScript
from support.training_swarm import Swarm, SyntheticInner, config
from swarm.testing import virtual_time
from swarm.training.allreduce.parts import PartResult
from swarm.training.data.corpus import Corpus
from swarm.training.inner.inner_loop import InnerLoop
from swarm.training.inner.interval import TrainingSetup
from swarm.training.inner.one_device import OneDevice, next_token_loss
from swarm.training.member.reductions import NUM_KEPT
from swarm.training.member.round_driver import RoundDriver
from swarm.training.round.round_state import RoundState
from swarm.training.run.layout import Layout
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_cost import PARAMETER_BYTES
from swarm.training.run.run_model import build_model, initial_theta
from swarm.training.state.certificate import NUM_PARSED_GROUPS
from swarm.training.state.replica_state import ReplicaState
from swarm_protocol.errors import PeerUnreachable
from swarm_protocol.training_messages import SignedGroup
from torch import Tensor, nn


def storages() -> dict[int, int]:
    """Return the bytes of all tensors' storages, by address."""
    found = {}
    for each in gc.get_objects():
        # packed and compiled tensors have no storage, or sizes that are symbols
        if type(each) in {Tensor, nn.Parameter} and each.layout is torch.strided and not each.is_mkldnn:
            with suppress(NotImplementedError, RuntimeError):
                found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return found


def vectors(num_values: int) -> int:
    """Return the number of tensors' storages that hold one value, or one value more, for each parameter of the
    model."""
    return sum(num_bytes in {4 * num_values, 4 * (num_values + 1)} for num_bytes in storages().values())


@pytest.mark.parametrize("resumes", [False, True])
def test_member_between_intervals_keeps_only_its_weights_and_the_committed_state(
    tiny_run: RunConfig, tiny_corpus: Corpus, resumes: bool
) -> None:
    run = replace(tiny_run, outer_steps=3, interval_steps=2, min_group=2)
    num_values = Layout.of(build_model(run.model)).num_values

    async def main() -> int:
        async with Swarm(run) as swarm:
            for name in ("a", "b"):
                inner = InnerLoop(run, build_model(run.model), tiny_corpus)
                setup = TrainingSetup(inner=inner, theta_N=initial_theta(run))
                state = ReplicaState.initial(initial_theta(run)) if resumes else None
                await swarm.join(name, setup=setup, state=state)
            del setup, state
            await swarm.finish()
            return vectors(num_values)

    gc.collect()
    before = vectors(num_values)
    # objects that only the garbage collector frees would stay for many rounds, since full collections are rare
    gc.disable()
    try:
        # two members: the weights being trained, and the committed state's weights and momentum
        assert virtual_time.run(main()) - before == 2 * 3
    finally:
        gc.enable()


def test_member_in_a_round_needs_no_more_memory_than_run_show_says(tiny_run: RunConfig, tiny_corpus: Corpus) -> None:
    """Four bytes for each parameter are results in int8, which are no tensors."""
    run = replace(tiny_run, outer_steps=4, interval_steps=2, min_group=2)
    num_values, names, seen = Layout.of(build_model(run.model)).num_values, ("a", "b"), list[int]()
    phases = ("interval", "round.reduced", "round.proposed", "round.committed", "round.applied")

    def look(_who: str) -> None:
        gc.collect()
        seen.append(sum(storages().values()))

    script = FaultScript([Fault(who=who, phase=phase, what=look, nth=3) for who in names for phase in phases])

    async def main() -> None:
        async with Swarm(run, script) as swarm:
            for name in names:
                inner = InnerLoop(run, build_model(run.model), tiny_corpus)
                setup = TrainingSetup(inner=inner, theta_N=initial_theta(run))
                # `setup` replaces the synthetic inner loop, which must keep no vector that would be counted
                await swarm.join(name, inner=SyntheticInner(num_values=0), setup=setup)
            del inner, setup
            await swarm.finish()
            script.assert_all_fired()

    gc.collect()
    before = sum(storages().values())
    virtual_time.run(main())
    assert len(seen) == len(names) * len(phases)
    assert (max(seen) - before) / len(names) / num_values <= PARAMETER_BYTES - 4


def test_member_keeps_at_most_two_steps_states_and_groups_however_many_steps_it_has_made() -> None:
    names, seen, num_steps = ("a", "b", "c"), list[Counter[type]](), 12

    def look(_who: str) -> None:
        gc.collect()
        seen.append(Counter(map(type, gc.get_objects())))

    script = FaultScript([Fault(who="a", phase="round.applied", what=look, nth=num_steps)])
    look("")

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=num_steps), script) as swarm:
            for name in names:
                await swarm.join(name)
            await swarm.finish_after(script)

    virtual_time.run(main())
    before, after = seen
    for kind in (RoundDriver, RoundState, ReplicaState):
        assert len(names) <= after[kind] - before[kind] <= 2 * len(names), kind
    assert after[SignedGroup] - before[SignedGroup] <= NUM_PARSED_GROUPS + 2 * len(names)


def test_failed_attempts_keep_at_most_two_reductions() -> None:
    names, seen = ("a", "b"), list[int]()

    def fail(_who: str) -> None:
        seen.append(sum(type(each) is PartResult and len(each.data) > 0 for each in gc.get_objects()))
        raise PeerUnreachable("it fails again")

    script = FaultScript([Fault(who="a", phase="round.reducing", what=fail, nth=nth) for nth in range(1, 7)])

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=1), script) as swarm:
            for name in names:
                await swarm.join(name)
            await swarm.finish_after(script)

    gc.collect()
    virtual_time.run(main())
    num_parts = len(names) * len(names)
    assert seen[0] == num_parts
    assert max(seen) == NUM_KEPT * num_parts


def test_gradient_takes_memory_only_during_an_interval(tiny_run: RunConfig, tiny_corpus: Corpus) -> None:
    loop = InnerLoop(tiny_run, build_model(tiny_run.model), tiny_corpus)
    num_values = loop.flat().numel()
    gc.collect()
    before = vectors(num_values)
    loop.train(range(8), 2)
    gc.collect()
    assert vectors(num_values) == before


def test_loss_of_other_weights_copies_no_vector(tiny_run: RunConfig) -> None:
    model = build_model(tiny_run.model)
    num_values, counted = Layout.of(model).num_values, []

    def loss_of(model: nn.Module, x_BT: Tensor) -> Tensor:
        counted.append(vectors(num_values))
        return next_token_loss(model, x_BT)

    device = OneDevice(tiny_run.inner, model, device="cpu", loss=loss_of)
    theta_N, kept_N = 0.5 * device.flat(), device.flat()
    gc.collect()
    before = vectors(num_values)
    x_VT = torch.randint(0, 256, (4, 9), generator=torch.Generator().manual_seed(0))
    smaller = device.loss(theta_N, x_VT)
    assert counted == [before]
    assert torch.equal(device.flat(), kept_N)
    device.load(theta_N)
    assert device.loss(theta_N, x_VT) == smaller
