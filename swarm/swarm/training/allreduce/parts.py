"""How the vector of a round is cut: into parts, one an owner, and these into the frames that travel.

Pure. A part's result is its frames' encoded bytes, one after the other: this is what all members must hold byte for
byte, and nobody keeps it decoded. Shapes: N values of the vector, F values of a frame.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from swarm_compression import Codec, CodecError
from swarm_compression.codec import Data
from swarm_protocol import limits
from swarm_protocol.errors import IntegrityError
from swarm_protocol.training_messages import Group
from torch import Tensor

FRAME_VALUES = 3 << 15
"""Values in one message: 384 KiB of fp32, a quarter of that in int8. A smaller frame costs time, a larger one memory:
members hold many at once."""


def part_frames(group: Group, index: int) -> list[slice]:
    """The frames of part `index`, as slices of the whole vector."""
    stop = list(accumulate(group.part_values))[index]
    start = stop - group.part_values[index]
    return [slice(at, min(at + FRAME_VALUES, stop)) for at in range(start, stop, FRAME_VALUES)]


def num_values(frame: slice) -> int:
    return int(frame.stop - frame.start)


def part_bytes(group: Group, index: int, codec: Codec) -> int:
    """The size of part `index`, encoded."""
    return sum(codec.encoded_bytes(num_values(frame)) for frame in part_frames(group, index))


def check_frame(codec: Codec, data: Data, size: int) -> None:
    """Raises CodecError for what no honest member sends: what is no encoding of `size` values, and moves beyond all
    bounds."""
    _check_moves(codec.check(data, size))


def decode_frame(codec: Codec, data: Data, size: int) -> Tensor:
    """The values [size] of `data`. Raises CodecError where `check_frame` does."""
    x_F = torch.empty(size)
    _check_moves(codec.decode_into(data, x_F))
    return x_F


def _check_moves(largest: float) -> None:
    if not largest <= limits.MAX_PARAMETER_MOVE:
        raise CodecError(f"a parameter moves by {largest:.3g}")


def decoded_frames(group: Group, parts: Sequence[Data], codec: Codec) -> Iterator[tuple[slice, Tensor]]:
    """The values that `parts` encode, a frame [F] at a time, with each one's place in the vector.

    Raises IntegrityError for parts that are not of this group, or that no honest member made.
    """
    if len(parts) != len(group.part_values):
        raise IntegrityError(f"{len(parts)} parts of {len(group.part_values)}")
    for index, part in enumerate(parts):
        view, at = memoryview(part), 0
        if len(view) != (size := part_bytes(group, index, codec)):
            raise IntegrityError(f"part {index} has {len(view)} bytes instead of {size}")
        for frame in part_frames(group, index):
            stop = at + codec.encoded_bytes(num_values(frame))
            try:
                delta_F = decode_frame(codec, view[at:stop], num_values(frame))
            except CodecError as error:
                raise IntegrityError(f"part {index} cannot be decoded: {error}") from error
            yield frame, delta_F
            at = stop
