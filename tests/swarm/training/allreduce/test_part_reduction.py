"""Tests that the owner of a part reports liars and no honest member as members whose weight it reduced."""

from __future__ import annotations

import pytest
import torch
from swarm.training.allreduce import part_reduction
from swarm.training.allreduce.part_reduction import NOTABLE_VALUES, PartReducer
from swarm.training.allreduce.parts import FRAME_VALUES, ReductionScheme
from swarm.training.run.run_config import RunConfig
from swarm.trust.mixing import Bucketing, Mixing, NearestNeighbours
from swarm.trust.standard_aggregators import get_aggregator
from swarm_compression import get_codec
from swarm_protocol.identity import Identity
from swarm_protocol.training_messages import Contribution
from torch import Tensor

CODEC = get_codec("int8")
PEERS = sorted(Identity(bytes([number]) * 32).peer_id for number in range(1, 9))


def reducer_of(x_MF: Tensor, aggregator: str) -> PartReducer:
    """Return a reducer that has reduced the slices."""
    members = tuple(Contribution(peer_id=peer, num_tokens=256, num_samples=2) for peer in PEERS[: len(x_MF)])
    scheme = ReductionScheme(codec=CODEC, aggregator=get_aggregator(aggregator, {}))
    reducer = PartReducer(scheme, members, FRAME_VALUES, lambda _: b"")
    reducer.combined([CODEC.encode(x_F) for x_F in x_MF], slice(0, x_MF.shape[1]))
    return reducer


def contributions(num_members: int, num_values: int, seed: int) -> Tensor:
    """Return slices [M, F] that share a direction. Each has noise of the same length, and lengths differ by half."""
    generator = torch.Generator().manual_seed(seed)
    common_F = torch.randn(num_values, generator=generator)
    noise_MF = torch.randn(num_members, num_values, generator=generator)
    return (1 + torch.rand(num_members, 1, generator=generator) / 2) * (common_F + noise_MF)


@pytest.mark.parametrize("aggregator", [RunConfig(name="run").aggregator, "norm_clipped_mean"])
@pytest.mark.parametrize("num_members", [3, 4, 5, 8])
@pytest.mark.parametrize("num_values", [1, 16, NOTABLE_VALUES, 4096])
def test_owner_reports_no_honest_member_even_when_its_part_is_small(
    num_values: int, num_members: int, aggregator: str
) -> None:
    for seed in range(50):
        assert reducer_of(contributions(num_members, num_values, seed), aggregator).kept_shares == {}


@pytest.mark.parametrize("aggregator", [RunConfig(name="run").aggregator, "norm_clipped_mean"])
def test_owner_reports_a_member_whose_slice_is_much_larger_than_the_others(aggregator: str) -> None:
    x_MF = contributions(5, NOTABLE_VALUES, 0)
    x_MF[2] *= -30
    assert list(reducer_of(x_MF, aggregator).kept_shares) == [PEERS[2]]


@pytest.mark.parametrize("leaves_at_once", [1, 3])
@pytest.mark.parametrize("mixing", [Bucketing(liar_share=0.2), NearestNeighbours()], ids=lambda mixing: mixing.name)
def test_frame_has_the_same_values_for_any_number_of_leaves_aggregated_at_once(
    mixing: Mixing, leaves_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An auditor reduces a drawn leaf alone, with the beacon of its place in the vector."""
    leaf, place, x_MF = 256, slice(512, 512 + 10 * 256 + 77), contributions(5, 10 * 256 + 77, 3)
    members = tuple(Contribution(peer_id=peer, num_tokens=256, num_samples=2) for peer in PEERS[:5])
    scheme = ReductionScheme(codec=CODEC, aggregator=get_aggregator("centered_clip", {}, mixing))

    def reducer() -> PartReducer:
        return PartReducer(scheme, members, leaf, lambda index: bytes([index]))

    together_F = reducer().combined([CODEC.encode(x_F) for x_F in x_MF], place)
    alone = [
        reducer().combined([CODEC.encode(x_L) for x_L in x_ML], slice(at, at + x_ML.shape[1]))
        for at, x_ML in zip(range(512, place.stop, leaf), x_MF.split(leaf, dim=1), strict=True)
    ]
    monkeypatch.setattr(part_reduction, "BATCH_VALUES", leaves_at_once * leaf * len(members))
    few_F = reducer().combined([CODEC.encode(x_F) for x_F in x_MF], place)
    assert torch.equal(together_F, torch.cat(alone))
    assert torch.equal(together_F, few_F)
