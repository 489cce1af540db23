"""Tests that a leaf has the same bytes when it is reduced together with others as when it is reduced alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.wrong_reduction import CODEC, NUM_VALUES, reduced
from swarm.training.allreduce import part_reduction
from swarm.training.allreduce.leaf_checks import reduced_leaf, reduced_leaves
from swarm.training.allreduce.parts import ReductionScheme, num_leaves
from swarm.trust.mixing import get_mixing, mixing_names
from swarm.trust.standard_aggregators import aggregator_names, get_aggregator

LEAVES = [num_leaves(NUM_VALUES) - 1, 0, 7, 3]
"""The leaves in the order in which they are drawn. The last leaf of the vector is shorter than the others."""


@pytest.mark.parametrize("mixing", mixing_names())
@pytest.mark.parametrize("aggregator", aggregator_names())
@pytest.mark.parametrize("at_once", [1 << 18, 1 << 11])
def test_leaf_has_the_same_bytes_reduced_together_with_others_as_alone(
    aggregator: str, mixing: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_reduction, "BATCH_VALUES", at_once)
    mixes = get_mixing(mixing, liar_share=0.34, reach=1.2)
    case, scheme = reduced(), ReductionScheme(codec=CODEC, aggregator=get_aggregator(aggregator, {}, mixes))
    shown = {leaf: case.slices(leaf) for leaf in LEAVES}
    together = reduced_leaves(case.group, scheme, shown)
    assert together == {leaf: reduced_leaf(case.group, scheme, leaf, shown[leaf]) for leaf in LEAVES}
    assert None not in together.values()


@pytest.mark.parametrize("aggregator", ["mean", "centered_clip"])
def test_only_the_leaf_with_an_undecodable_slice_has_no_result(aggregator: str) -> None:
    case, scheme = reduced(), ReductionScheme(codec=CODEC, aggregator=get_aggregator(aggregator, {}))
    shown = {leaf: case.slices(leaf) for leaf in LEAVES}
    first, *others = shown[7]
    bad = shown | {7: (replace(first, data=first.data[:-1]), *others)}
    assert reduced_leaves(case.group, scheme, bad) == reduced_leaves(case.group, scheme, shown) | {7: None}
