from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from swarm.training.run.seeded import permute, stream

seeds = st.integers(0, (1 << 63) - 1)


@given(num_items=st.integers(1, 3000), seed=seeds, epoch=st.integers(0, 1 << 40))
def test_permute_of_all_places_is_a_bijection(num_items: int, seed: int, epoch: int) -> None:
    result_B = permute(np.arange(num_items), num_items, seed=seed, epoch=epoch)
    assert sorted(result_B) == list(range(num_items))


@given(num_items=st.integers(1, 1 << 40), seed=seeds, drawn=st.data())
def test_permute_gives_a_place_the_same_item_alone_and_among_others(
    num_items: int, seed: int, drawn: st.DataObject
) -> None:
    place_B = np.array(drawn.draw(st.lists(st.integers(0, num_items - 1), min_size=1, max_size=20)))
    together_B = permute(place_B, num_items, seed=seed, epoch=1)
    alone_B = [int(permute(place_B[i : i + 1], num_items, seed=seed, epoch=1)[0]) for i in range(len(place_B))]
    assert together_B.tolist() == alone_B


def test_permute_order_differs_when_seed_or_epoch_differs() -> None:
    orders = [permute(np.arange(100), 100, seed=seed, epoch=epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    # items are scattered: at most two in a hundred keep their places, and runs are no more frequent than by chance
    assert all(sum(place == index for index, place in enumerate(order)) < 8 for order in orders)


def test_permute_and_stream_give_the_same_numbers_on_every_machine() -> None:
    order = permute(np.arange(1000), 1000, seed=42, epoch=3).astype("<i8").tobytes()
    numbers = stream(42, 3, 1000).astype("<u8").tobytes()
    assert hashlib.sha256(order).hexdigest()[:16] == "15c29a019699339a"
    assert hashlib.sha256(numbers).hexdigest()[:16] == "d41ecb06abc9ed90"


def test_stream_numbers_are_distinct_over_streams() -> None:
    drawn = np.concatenate([stream(seed, index, 1000) for seed in (0, 1) for index in (0, 1, 2)])
    assert len(np.unique(drawn)) == drawn.size


"""Tests the order of samples, which is equal on every machine."""
