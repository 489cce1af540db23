"""Tests the order of the flat vector, and which of its values belong to which fragment of any model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from swarm.training.run.layout import Layout, fragment_of
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_model import build_model
from swarm_protocol.errors import ConfigError
from torch import nn


def _stack(num_layers: int, width: int = 4, vocabulary: int = 16) -> nn.Module:
    model = nn.Module()
    model.embed = nn.Embedding(vocabulary, width)
    model.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
    model.norm = nn.LayerNorm(width)
    model.head = nn.Linear(width, vocabulary, bias=False)
    return model


def test_layout_of_one_fragment_has_the_order_of_the_names(tiny_run: RunConfig) -> None:
    model = build_model(tiny_run.model)
    layout = Layout.of(model)
    assert list(layout.names) == sorted(name for name, _ in model.named_parameters())
    assert "lm_head.weight" not in layout.names
    assert layout.bounds == (0, sum(each.numel() for each in model.parameters()))
    assert layout.slice(0) == slice(0, layout.num_values)


def test_fragments_take_the_layers_in_turn() -> None:
    layout = Layout.of(_stack(12), 3)
    for fragment in range(3):
        here = slice(layout.bounds[fragment], layout.bounds[fragment + 1])
        assert layout.slice(fragment) == here
        pieces = layout.unflatten(torch.arange(layout.num_values))
        inside = [name for name, piece in pieces.items() if here.start <= int(piece.flatten()[0]) < here.stop]
        layers = {int(name.split(".")[1]) for name in inside if name.startswith("layers.")}
        assert layers == set(range(fragment, 12, 3))
        assert inside == sorted(inside)


def test_parameters_outside_layers_even_out_the_sizes_of_fragments() -> None:
    layout = Layout.of(_stack(2), 2)
    # two layers of 20 values each, then 64 values of the embedding, 64 of the head, 4 and 4 of the norm
    assert layout.bounds == (0, 20 + 64 + 4, 2 * (20 + 64 + 4))
    assert set(layout.names[:4]) == {"embed.weight", "layers.0.bias", "layers.0.weight", "norm.bias"}


@given(num_layers=st.integers(0, 9), fragments=st.integers(1, 10))
def test_fragments_cover_all_values_or_the_run_is_refused(num_layers: int, fragments: int) -> None:
    model = _stack(num_layers)
    if fragments > max(1, num_layers):
        with pytest.raises(ConfigError, match=f"fragments = {fragments}: the model has {num_layers} layers"):
            Layout.of(model, fragments)
        return
    layout = Layout.of(model, fragments)
    assert layout.fragments == fragments
    assert layout.bounds[0] == 0
    assert layout.num_values == sum(each.numel() for each in model.parameters())
    assert all(low < high for low, high in zip(layout.bounds, layout.bounds[1:], strict=False))
    assert sorted(layout.names) == sorted(name for name, _ in model.named_parameters())


def test_no_fragment_is_empty_when_layer_numbers_have_gaps() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    assert Layout.of(model, 3).bounds == (0, 12, 24, 36)


def test_flatten_gives_the_bits_that_were_set() -> None:
    model = _stack(4)
    layout = Layout.of(model, 2)
    theta_N = torch.arange(layout.num_values, dtype=torch.float32)
    layout.set_parameters(model, theta_N)
    assert torch.equal(layout.flatten(model), theta_N)
    assert torch.equal(layout.join(layout.unflatten(theta_N)), theta_N)
    assert not torch.equal(Layout.of(model).flatten(model), theta_N)


def test_set_parameters_refuses_a_vector_of_another_model() -> None:
    model = _stack(2)
    layout = Layout.of(model)
    before_N = layout.flatten(model)
    for num_values in (0, before_N.numel() - 1, before_N.numel() + 1):
        with pytest.raises(ValueError, match="the model has"):
            layout.set_parameters(model, torch.zeros(num_values))
    assert torch.equal(layout.flatten(model), before_N)


def test_fragments_are_moved_in_turn_from_the_first_step_on() -> None:
    assert [fragment_of(step, 3) for step in range(1, 8)] == [0, 1, 2, 0, 1, 2, 0]
    assert {fragment_of(step, 1) for step in range(1, 8)} == {0}
