"""Defines a language model that imports fast, so that worker processes start fast. Workers import this module, not a
test's."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

VOCABULARY = 32


class SmallNet(nn.Module):
    """Compute two residual layers between an embedding and a head. `calls` counts how often a layer was computed."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        noise = torch.Generator().manual_seed(5)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=noise) / 3)

    def forward(self, x_BT: Tensor) -> Tensor:
        hidden_BTD = self.embed(x_BT)
        for layer in self.layers:
            hidden_BTD = layer(hidden_BTD)
        logits_BTV: Tensor = self.head(hidden_BTD)
        return logits_BTV


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.calls = 0

    def forward(self, x_BTD: Tensor) -> Tensor:
        self.calls += 1
        mixed_BTD: Tensor = x_BTD + torch.tanh(self.mix(x_BTD))
        return mixed_BTD


def small_loss(model: nn.Module, x_BT: Tensor) -> Tensor:
    return cross_entropy(model(x_BT[:, :-1]).flatten(0, 1).float(), x_BT[:, 1:].flatten())


def loss_that_fails_on_the_last_token(model: nn.Module, x_BT: Tensor) -> Tensor:
    if int(x_BT.max()) == VOCABULARY - 1:
        raise RuntimeError("no token of these is known")
    return small_loss(model, x_BT)


def windows(num_windows: int, seed: int = 0) -> Tensor:
    """Return int64 windows [B, T+1] that lack the last token of the vocabulary."""
    return torch.randint(0, VOCABULARY - 1, (num_windows, 13), generator=torch.Generator().manual_seed(seed))
