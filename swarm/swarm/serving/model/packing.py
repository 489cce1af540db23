"""Packs the weights of linear layers once, in the layout of oneDNN's kernels for this processor.

A decode step reads all weights for few rows, but torch's float32 product uses a layout for large matrices. The
operators with which torch's compiler prepacks weights (torch includes oneDNN) are two to three times faster for 4 to 64
rows, and faster than `Tensor.to_mkldnn`, which keeps the plain layout. Only torch can read the packed tensor. The
values are the same, and gradients pass through. A row has the same result beside any other rows; alone, it may differ
in the last bit.

Layers do not change if torch lacks these operators, on other kinds of processors, and in bfloat16 on older ones.
"""

from __future__ import annotations

import itertools
import platform
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from swarm.heap import give_back

_ROWS = 16
"""The number of rows for which the layout is optimized. It is also optimal for one row, and nearly optimal for
hundreds."""

_STEP_ROWS = 64
_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, _STEP_ROWS)
_MOST_ROWS = 512
"""Maximum rows computed at once. A kernel for each number of rows takes milliseconds to make and half a megabyte, so
there must be few."""

_SAME_ROWS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that families call with the same rows. Calls of small layers cost more than their
computation."""

_JOINED_BYTES = 2**25
"""Maximum bytes of weights that are joined. For more, a call costs little compared with reading the weights, and the
copy costs much."""


class PackedLinear(nn.Module):
    """A frozen nn.Linear with a packed copy of `weight` [out, in]: x [..., in] -> [..., out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            out: Tensor = _PackedProduct.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
            return out
        return _product(x, self.weight, self.bias)


class _Together:
    """Layers that get the same rows, such as those of queries, keys and values: one product, of which each takes its
    part.

    A layer that is called with other rows than the previous one computes the product again.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        weight = torch.cat([linear.weight.detach() for linear in linears])
        has_bias = linears[0].bias is not None
        self.packed = PackedLinear(weight, torch.cat([each.bias.detach() for each in linears]) if has_bias else None)
        self._num_parts = len(linears)
        self._x: Tensor | None = None
        self._out: Tensor | None = None
        self._num_taken = 0

    def product(self, x: Tensor) -> Tensor:
        """Return the product of all layers, joined in the last dimension. Cached until every layer has taken it."""
        if x is not self._x or self._out is None:
            self._x, self._out, self._num_taken = x, self.packed(x), 0
        out = self._out
        self._num_taken += 1
        if self._num_taken == self._num_parts:
            self._x = self._out = None
        return out


class PackedPart(nn.Module):
    """One of several layers that get the same rows and are computed together."""

    def __init__(self, linear: nn.Linear, together: _Together, begin: int) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.packed = together.packed  # shared by all parts, so that it is counted, moved and saved once
        self._together = together
        self._columns = slice(begin, begin + linear.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self._together.product(x)[..., self._columns].contiguous()


def joint(layers: Sequence[object]) -> PackedLinear | None:
    """Return the packed layer that computes all of `layers`, a group of _SAME_ROWS, with their outputs in order; None
    if there is none."""
    first = layers[0]
    if not isinstance(first, PackedPart):
        return None
    is_whole = all(isinstance(layer, PackedPart) and layer.packed is first.packed for layer in layers)
    return first.packed if is_whole else None


class _PackedProduct(torch.autograd.Function):
    """The packed product, with the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad @ ctx.weight.to_dense(), None, None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) <= _MOST_ROWS:
        out = _piece(rows, weight, bias)
    else:
        out = torch.cat([_piece(part, weight, bias) for part in torch.split(rows, _MOST_ROWS)])
    return out.view(*x.shape[:-1], -1)


def _piece(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num_rows = len(rows)
    if missing := _size(num_rows) - num_rows:
        rows = nn.functional.pad(rows, (0, 0, 0, missing))
    out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return out[:num_rows]


def _size(num_rows: int) -> int:
    """Return the next of _SIZES, or the next multiple of 64: the library makes and keeps a kernel for each number of
    rows."""
    if num_rows <= _STEP_ROWS:
        return _SIZES[bisect_left(_SIZES, num_rows)]
    return -(-num_rows // _STEP_ROWS) * _STEP_ROWS


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether this processor and this torch have the kernels for weights of `dtype`."""
    has_library = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    has_kernels = has_library and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if not has_kernels or platform.machine() not in ("x86_64", "AMD64"):
        return False
    # those of bfloat16 need AVX-512, or AVX with conversions
    is_bfloat16 = dtype is torch.bfloat16
    return dtype is torch.float32 or (is_bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


def pack_linears(model: nn.Module) -> None:
    """Replace the linear layers of a frozen `model`, one by one, so that few weights are in memory twice.

    A layer that shares its weight with another module, such as a tied head, does not change: a packed copy would need
    more memory.
    """
    num_owners = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    # holds no layers, so that their memory is freed once they are replaced
    for parent in [module for module in model.modules() if type(module) is not nn.Linear]:
        chosen = [
            name
            for name, module in parent.named_children()
            if type(module) is nn.Linear and _fits(module.weight) and num_owners[id(module.weight)] == 1
        ]
        for names in _joined(parent, chosen):
            linears = [parent.get_submodule(name) for name in names]
            for name, packed in zip(names, _packed(linears), strict=True):
                setattr(parent, name, packed)
            del linears
            give_back()


def _joined(parent: nn.Module, names: Sequence[str]) -> Iterable[Sequence[str]]:
    """Group `names`: layers that are computed together are in one group."""
    alone = set(names)
    for group in _SAME_ROWS:
        if alone.issuperset(group) and _fit_together([parent.get_submodule(name) for name in group]):
            alone.difference_update(group)
            yield group
    yield from ([name] for name in names if name in alone)


def _fit_together(linears: Sequence[Any]) -> bool:
    shapes = {(linear.in_features, linear.weight.dtype, linear.bias is None) for linear in linears}
    return len(shapes) == 1 and sum(linear.weight.nbytes for linear in linears) <= _JOINED_BYTES


def _packed(linears: Sequence[Any]) -> Sequence[nn.Module]:
    if len(linears) == 1:
        return [PackedLinear(linears[0].weight, linears[0].bias)]
    together = _Together(linears)
    ends = itertools.accumulate(linear.out_features for linear in linears)
    return [PackedPart(linear, together, end - linear.out_features) for linear, end in zip(linears, ends, strict=True)]


def _fits(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and can_pack(weight.dtype)
