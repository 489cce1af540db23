"""Tests the moving averages that members with momentum contribute, alone and in a run."""

from __future__ import annotations

import torch
from support.training_swarm import Swarm, assert_equal_steps, config
from swarm.testing import virtual_time
from swarm.training.inner.interval import MemberMomentum
from torch import Tensor

WHOLE = slice(0, 3)


def test_average_is_the_weighted_mean_of_all_contributions_so_far() -> None:
    momentum, deltas = MemberMomentum(0.5), [torch.randn(3) for _ in range(4)]
    for count in range(1, 5):
        average_F = momentum.averaged(WHOLE, deltas[count - 1])
        weights = [0.5 ** (count - 1 - index) for index in range(count)]
        expected_F = sum(weight * each for weight, each in zip(weights, deltas, strict=False)) / sum(weights)
        assert torch.allclose(average_F, torch.as_tensor(expected_F))


def test_average_of_one_fragment_leaves_that_of_another_unchanged() -> None:
    momentum = MemberMomentum(0.9)
    first_F = momentum.averaged(WHOLE, torch.ones(3))
    momentum.averaged(slice(3, 5), 7 * torch.ones(2))
    assert torch.allclose(first_F, torch.ones(3))
    assert torch.allclose(momentum.averaged(WHOLE, torch.ones(3)), torch.ones(3))


def trained(outer_steps: int, member_momentum: float) -> Tensor:
    """Return the weights at the end of a run of three members."""

    async def main() -> None:
        run = config(min_group=3, outer_steps=outer_steps, member_momentum=member_momentum)
        async with Swarm(run) as swarm:
            for name in ("a", "b", "c"):
                await swarm.join(name)
            members = await swarm.finish()
        assert_equal_steps(members, outer_steps)
        state = members[0].trainer.state
        assert state is not None
        found.append(state.theta_N.clone())

    found: list[Tensor] = []
    virtual_time.run(main())
    return found[0]


def test_members_contribute_their_averages_when_the_run_has_member_momentum() -> None:
    assert torch.equal(trained(1, 0.9), trained(1, 0.0))
    assert not torch.allclose(trained(3, 0.9), trained(3, 0.0), rtol=0.05)
