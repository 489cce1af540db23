"""The layout of the flat vector that replicas share: the place of each parameter, and the slice of each fragment.

Pure: layouts are equal for equal names and shapes, on every machine. Works on modules without memory (device "meta")
too.

Shapes: N values of the flat parameter vector, which holds all parameters, tied ones once.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from swarm_protocol.errors import ConfigError
from torch import Tensor, nn

MAX_STATE_VALUES = 1 << 34
"""Maximum values of a vector: a state of 128 GiB."""

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


def fragment_of(step: int, fragments: int) -> int:
    """Return the fragment that outer step `step`, counted from 1, moves."""
    return (step - 1) % fragments


def layer_of(name: str) -> int | None:
    """Return the layer of the parameter `name`: the first number in its dotted name. None if it belongs to no layer."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def mix_in(local_F: Tensor, theta_F: Tensor, mixing: float) -> None:
    """Replace the slice `local_F`, in place, by `mixing` times itself plus 1 - `mixing` times `theta_F`. Raises
    ValueError if F differs."""
    if local_F.shape != theta_F.shape:
        raise ValueError(f"the slice has {local_F.numel()} values, but the vector has shape {tuple(theta_F.shape)}")
    # exact without mixing, and for equal values
    local_F.copy_(torch.lerp(theta_F, local_F, mixing) if mixing else theta_F)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The `names` and `shapes` of the parameters in the flat vector's order: by fragment, then by name. See `of`.

    Fragment p has the values from `bounds[p]` to `bounds[p + 1]`. Fragments take the layers in turn (Streaming DiLoCo's
    strided pattern, arXiv 2501.18512, section 2.2). Parameters of no layer, such as the embeddings, go to the smallest
    fragment, which the paper leaves open. With one fragment, the order is that of the names.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, model: nn.Module, fragments: int = 1) -> Layout:
        """Return the layout of `model`. Raises ConfigError if it has fewer layers than `fragments`."""
        shapes = {name: parameter.shape for name, parameter in sorted(model.named_parameters())}
        members = _fragments({name: shape.numel() for name, shape in shapes.items()}, fragments)
        sizes = (sum(shapes[name].numel() for name in each) for each in members)
        names = tuple(itertools.chain.from_iterable(members))
        return cls(names=names, shapes=tuple(shapes[name] for name in names), bounds=(0, *itertools.accumulate(sizes)))

    @property
    def num_values(self) -> int:
        return self.bounds[-1]

    @property
    def fragments(self) -> int:
        return len(self.bounds) - 1

    def slice(self, fragment: int) -> slice:
        """Return that fragment's slice of the flat vector."""
        return slice(self.bounds[fragment], self.bounds[fragment + 1])

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of `model`, in the flat vector's order."""
        by_name = dict(model.named_parameters())
        return [by_name[name] for name in self.names]

    def require(self, theta_N: Tensor) -> None:
        """Raises ValueError if N differs."""
        if theta_N.shape != (self.num_values,):
            raise ValueError(
                f"the model has {self.num_values} parameters, but the vector has shape {tuple(theta_N.shape)}"
            )

    def flatten(self, model: nn.Module) -> Tensor:
        """Return fp32 CPU [N]: a copy of the parameters."""
        return torch.cat([each.detach().reshape(-1).float().cpu() for each in self.parameters(model)])

    def join(self, pieces: Mapping[str, Tensor]) -> Tensor:
        """Return the flat vector [N] of `pieces`, one for each name, of any shape."""
        return torch.cat([pieces[name].reshape(-1) for name in self.names])

    def unflatten(self, theta_N: Tensor) -> dict[str, Tensor]:
        """Return views of the pieces of `theta_N`, shaped, by the names of the parameters. Raises ValueError if N
        differs."""
        self.require(theta_N)
        pieces = torch.split(theta_N, [shape.numel() for shape in self.shapes])
        return {name: piece.view(shape) for name, shape, piece in zip(self.names, self.shapes, pieces, strict=True)}

    def set_parameters(self, model: nn.Module, theta_N: Tensor) -> None:
        """Copy `theta_N` into the model. Raises ValueError if N differs."""
        pieces = self.unflatten(theta_N)
        with torch.no_grad():
            for parameter, piece in zip(self.parameters(model), pieces.values(), strict=True):
                parameter.copy_(piece)


def _fragments(sizes: Mapping[str, int], fragments: int) -> list[list[str]]:
    """Return the names of each fragment's parameters, sorted."""
    layers = {name: layer for name in sizes if (layer := layer_of(name)) is not None}
    # an author's own module may have gaps in its layer numbers
    turn = {layer: index % fragments for index, layer in enumerate(sorted(set(layers.values())))}
    if fragments > max(1, len(turn)):
        raise ConfigError(
            f"fragments = {fragments}: the model has {len(turn)} layers", remedy=f"use at most {max(1, len(turn))}"
        )
    members: list[list[str]] = [[] for _ in range(fragments)]
    totals = [0] * fragments
    rest = sorted(sizes.keys() - layers.keys(), key=lambda name: (-sizes[name], name))
    for name in [*layers, *rest]:
        into = turn[layers[name]] if name in layers else totals.index(min(totals))
        members[into].append(name)
        totals[into] += sizes[name]
    return [sorted(each) for each in members]
