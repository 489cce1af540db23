"""Products of a step's few rows with weights as `packing` has them, which are asked for before they are needed.

oneDNN's kernels take a few rows through all weights, and then the next few: the first ones wait for memory, the others
do not. Here the next weights are on their way from memory while the rows go through those that have come, on one core.
A row comes out the same alone and beside any others.

For processors with AVX-512, most of whose 32 registers a tile takes. Numba compiles it; the functions here are the
source, and nobody calls them as Python. Legend: N rows, K inputs, M outputs, P panels of 64 outputs each (W).
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from swarm_compression.compiled import compiled
from torch import Tensor, nn

Floats = NDArray[np.float32]
Kernel = Callable[[Floats, Floats, Floats, Floats], None]

logger = logging.getLogger(__name__)

_FLOAT_BYTES = 4

_LANES = 16
"""Floats of a register, and of a cache line."""

_REGISTERS = 4
_WIDTH = _REGISTERS * _LANES
"""Outputs of a panel, one input after another: so oneDNN lays out a weight."""

_ROWS = 4
"""Of a tile, if there are as many: with a panel's width, 16 registers of sums, 4 of weights."""

_DEPTH = 64
"""Inputs that all rows go through before the next ones: 16 KiB of a panel, which the first cache holds."""

_LINES = 2
"""Cache lines of the weights after those that are asked for with each input: all four in two tiles, or half of them and
the processor's own reading ahead."""


class FewRows:
    """The product with one layer. Keeps the packed weight, whose memory it reads."""

    def __init__(self, kernel: Kernel, packed: Tensor, panels_PKW: Floats, linear: nn.Linear) -> None:
        self._kernel = kernel
        self._packed = packed
        self._panels_PKW = panels_PKW
        self._num_in, self._num_out = linear.in_features, linear.out_features
        self._bias_M = np.zeros(self._num_out, np.float32) if linear.bias is None else linear.bias.detach().numpy()

    def __call__(self, x_NK: Floats) -> Floats:
        """[N, M], both contiguous. Raises ValueError for rows of another width."""
        if x_NK.shape[1] != self._num_in:
            raise ValueError(f"rows of {x_NK.shape[1]} for a layer of {self._num_in} inputs")
        out_NM = np.empty((len(x_NK), self._num_out), np.float32)
        self._kernel(x_NK, self._panels_PKW, self._bias_M, out_NM)
        return out_NM


def few_rows(packed: Tensor, linear: nn.Linear) -> FewRows | None:
    """For a layer and what oneDNN has made of its weight; None where that is not as the kernel reads it, or there is no
    kernel."""
    if linear.weight.dtype != torch.float32 or (found := kernel()) is None:
        return None
    panels_PKW = _panels(packed, linear.weight.detach().numpy())
    return None if panels_PKW is None else FewRows(found, packed, panels_PKW, linear)


@functools.cache
def kernel() -> Kernel | None:
    """Compiled at the first use on a machine, which takes some seconds. None where it cannot be."""
    try:
        return load()
    except Exception as error:  # of numba's own kinds, too, where a later version no longer knows what we ask for
        logger.warning("steps of few rows take longer here than they could, because numba cannot be used: %s", error)
        return None


def load() -> Kernel | None:
    """(x [N, K], panels [P, K or more, W], bias [M], out [N, M]) -> None. None for another processor, or a torch that
    does not tell where a packed weight is.

    Compiles, or takes from numba's cache. ImportError where numba cannot be used.
    """
    import numba  # noqa: PLC0415 (a third of a second)
    from llvmlite import binding  # noqa: PLC0415

    tells = hasattr(torch.ops.mkldnn, "data_ptr") and hasattr(torch.ops.mkldnn, "_nbytes")
    if not tells or numba.config.DISABLE_JIT or not binding.get_host_cpu_features().get("avx512f"):
        return None
    _overload_tile(_tile_of_rows, _ROWS)
    _overload_tile(_tile_of_row, 1)
    number = numba.types.float32
    read_numbers, read_rows = (numba.types.Array(number, ndim, "C", readonly=True) for ndim in (1, 2))
    signature = numba.types.void(read_rows, number[:, :, ::1], read_numbers, number[:, ::1])
    compiled_: Kernel = compiled(_product, signature)
    return compiled_


def _panels(packed: Tensor, weight_MK: Floats) -> Floats | None:
    """The memory of a packed weight: [P, K rounded up to 16, W], zeros beyond the outputs. None if it is laid out
    otherwise, which the first and the last panel tell: how it is laid out oneDNN does not promise."""
    num_out, num_in = weight_MK.shape
    shape = -(-num_out // _WIDTH), -(-num_in // _LANES) * _LANES, _WIDTH
    size = shape[0] * shape[1] * shape[2]
    if torch.ops.mkldnn._nbytes(packed) != size * _FLOAT_BYTES:
        return None
    memory = (ctypes.c_float * size).from_address(torch.ops.mkldnn.data_ptr(packed))
    panels_PKW = np.ctypeslib.as_array(memory).reshape(shape)
    for p in (0, shape[0] - 1):
        outputs_MK = weight_MK[p * _WIDTH : (p + 1) * _WIDTH]
        if not np.array_equal(panels_PKW[p, :num_in, : len(outputs_MK)], outputs_MK.T, equal_nan=True):
            return None
    return panels_PKW


def _product(x_NK: Floats, panels_PKW: Floats, bias_M: Floats, out_NM: Floats) -> None:
    num_rows, num_in = x_NK.shape
    num_tiled = num_rows - num_rows % _ROWS
    last_NW = np.zeros((num_rows, _WIDTH), np.float32)
    for p in range(panels_PKW.shape[0]):
        begin, end = p * _WIDTH, min((p + 1) * _WIDTH, out_NM.shape[1])
        into_NM, column = (out_NM, begin) if end - begin == _WIDTH else (last_NW, 0)
        for row in range(num_rows):
            into_NM[row, column : column + end - begin] = bias_M[begin:end]
        for k in range(0, num_in, _DEPTH):
            depth = min(_DEPTH, num_in - k)
            ahead = 0  # of the lines after those of this depth
            for row in range(0, num_tiled, _ROWS):
                _tile_of_rows(x_NK, panels_PKW, into_NM, (row, column, p, k, depth, ahead))
                ahead = (ahead + _LINES * depth) % (_REGISTERS * depth)
            for row in range(num_tiled, num_rows):
                _tile_of_row(x_NK, panels_PKW, into_NM, (row, column, p, k, depth, ahead))
                ahead = (ahead + _LINES * depth) % (_REGISTERS * depth)
        if end - begin < _WIDTH:
            out_NM[:, begin:] = last_NW[:, : end - begin]


def _tile_of_rows(x_NK: Floats, panels_PKW: Floats, out_NM: Floats, where: tuple[int, int, int, int, int, int]) -> None:
    """Add to `out_NM[row:, column:]`, _ROWS by a panel's width, what `depth` inputs of panel `p` from `k` on give, and
    ask for the memory behind them from line `ahead` on. `where` has these in their order in `_product`."""


def _tile_of_row(x_NK: Floats, panels_PKW: Floats, out_NM: Floats, where: tuple[int, int, int, int, int, int]) -> None:
    """The same for one row."""


def _overload_tile(stub: Any, num_rows: int) -> None:  # noqa: C901 (one loop, part by part)
    """Have what is compiled run a loop over inputs for `num_rows`, whose sums stay in registers: the compiler by itself
    would find no such loop."""
    from llvmlite import ir  # noqa: PLC0415
    from numba.core import cgutils, types  # noqa: PLC0415
    from numba.extending import intrinsic, overload  # noqa: PLC0415

    byte, int32, int64 = ir.IntType(8).as_pointer(), ir.IntType(32), ir.IntType(64)
    number, register = ir.FloatType(), ir.VectorType(ir.FloatType(), _LANES)
    nothing, first_lane = ir.Constant(register, ir.Undefined), ir.Constant(ir.VectorType(int32, _LANES), [0] * _LANES)
    tile = [(row, part) for row in range(num_rows) for part in range(_REGISTERS)]
    asking = ir.FunctionType(ir.VoidType(), [byte, int32, int32, int32])

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def element(which: int, kind: Any, *index: Any) -> Any:
            """A pointer into an array, as to what is of `kind`."""
            array = context.make_array(signature.args[which])(context, builder, arguments[which])
            place = builder.bitcast(array.data, byte)
            for axis, at in enumerate(index):
                place = builder.gep(place, [builder.mul(at, builder.extract_value(array.strides, axis))])
            return builder.bitcast(place, kind.as_pointer())

        def load(pointer: Any) -> Any:
            return builder.load(pointer, align=_FLOAT_BYTES)

        row, column, p, k, depth, ahead = cgutils.unpack_tuple(builder, arguments[3])
        rows = [builder.add(row, int64(after)) for after in range(num_rows)]
        inputs = [element(0, number, row, k) for row in rows]
        weights = element(1, register, p, k)
        sums = [element(2, register, row, column) for row in rows]
        places = [builder.gep(sums[row], [int64(part)]) for row, part in tile]
        asked = builder.gep(weights, [builder.add(builder.mul(depth, int64(_REGISTERS)), ahead)])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], asking)

        entry, loop, end = builder.block, builder.append_basic_block(), builder.append_basic_block()
        before = [load(place) for place in places]
        builder.branch(loop)
        builder.position_at_end(loop)
        step, totals = builder.phi(int64), [builder.phi(register) for _ in tile]
        for line in range(_LINES):
            pointer = builder.gep(asked, [builder.add(builder.mul(step, int64(_LINES)), int64(line))])
            # to be read, soon again, as data
            builder.call(prefetch, [builder.bitcast(pointer, byte), int32(0), int32(3), int32(1)])
        first = builder.mul(step, int64(_REGISTERS))
        weight = [load(builder.gep(weights, [builder.add(first, int64(part))])) for part in range(_REGISTERS)]
        after = []
        for (row, part), total in zip(tile, totals, strict=True):
            lane = builder.insert_element(nothing, builder.load(builder.gep(inputs[row], [step])), int32(0))
            product = builder.fmul(builder.shuffle_vector(lane, nothing, first_lane), weight[part], flags=["contract"])
            after.append(builder.fadd(product, total, flags=["contract"]))
        following = builder.add(step, int64(1))
        for phi, initial, later in zip([step, *totals], [int64(0), *before], [following, *after], strict=True):
            phi.add_incoming(initial, entry)
            phi.add_incoming(later, loop)
        builder.cbranch(builder.icmp_signed("<", following, depth), loop, end)
        builder.position_at_end(end)
        for place, value in zip(places, after, strict=True):
            builder.store(value, place, align=_FLOAT_BYTES)
        return context.get_dummy_value()

    @intrinsic  # type: ignore[untyped-decorator]
    def run(_typing: Any, x: Any, panels: Any, out: Any, where: Any) -> Any:
        return types.void(x, panels, out, where), generate

    def typed(x_NK, panels_PKW, out_NM, where):  # type: ignore[no-untyped-def] # noqa: ARG001
        return lambda x_NK, panels_PKW, out_NM, where: run(x_NK, panels_PKW, out_NM, where)  # noqa: PLW0108

    overload(stub)(typed)
