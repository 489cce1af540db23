"""Measures how many blocks of a model a machine can hold, and how fast it computes them.

The speed is measured on a real block, before any decision; `router.placement` then chooses a span. The functions block;
the module has no state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from swarm_protocol import limits
from swarm_protocol.errors import ConfigError

from swarm.router.block_budget import BlockBudget, ModelNeeds, block_budget, kv_bytes_beside
from swarm.router.placement import Capacity, work_ms
from swarm.serving.engine.span_speed import SpanSpeed, measure
from swarm.serving.model.model_files import ModelFiles, open_model, weight_sizes
from swarm.serving.model.quantization import PASSING_BYTES, quantized_bytes
from swarm.serving.model.span_loading import load_span
from swarm.serving.model.weights import block_of_tensors, linear_tensors
from swarm.serving.server.deployment import ServerOptions

NUM_COPIES, FP32_BYTES = 2, 4
"""A server sends two copies of a token's hidden states, to the next server and to the client. Without a codec, a value
takes four bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VolunteerOptions:
    """Options of a volunteer that serves. `span` fixes the blocks; without it, as many blocks as `max_blocks` and
    `max_bytes` (cache included) allow are placed.

    `server.kv_bytes` is the maximum size of the cache; with `max_bytes`, the cache takes what the weights leave of
    that. `up_bytes_per_s` is the upload limit that the node's operator set. `is_relayed` returns whether others reach
    this node through a relay. `fetch_blocks` downloads missing weights of blocks [start, end) into the model's
    directory; it blocks and raises ConfigError or IntegrityError.
    """

    span: tuple[int, int] | None = None
    max_blocks: int | None = None
    max_bytes: int | None = None
    server: ServerOptions = field(default_factory=ServerOptions)
    up_bytes_per_s: float = math.inf
    is_relayed: Callable[[], bool] = lambda: False
    fetch_blocks: Callable[[int, int], None] = lambda _start, _end: None

    def __post_init__(self) -> None:
        if self.max_blocks is not None and self.max_blocks < 1:
            raise ConfigError(f"max_blocks is {self.max_blocks}", remedy="allow 1 block or more")
        if self.span is not None and not 0 <= self.span[0] < self.span[1]:
            raise ConfigError(
                f"blocks {self.span[0]}:{self.span[1]} are not a span", remedy="use START:END with START < END"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanCapability:
    """The capacity of a machine for a model. `needs` is None unless memory is limited, and `room` unless memory
    determines the number of blocks."""

    files: ModelFiles
    revision: str
    speed: SpanSpeed
    capacity: Capacity
    needs: ModelNeeds | None
    room: BlockBudget | None

    @property
    def is_whole(self) -> bool:
        """Return whether the whole model fits, so that there is no span to choose."""
        return self.capacity.num_blocks >= self.files.num_blocks


def measure_capability(model_dir: Path, peer_id: str, options: VolunteerOptions) -> SpanCapability:
    """Return what this machine can do for the model. Raises ConfigError or IntegrityError if the model cannot be served
    here."""
    files = open_model(model_dir, options.server.published)
    if options.max_bytes is not None:
        # checked first, so that a block that does not fit is not read to be measured
        kv_bytes_beside(weigh(files, options.server), 1, options.max_bytes, options.server.kv_bytes)
    options.fetch_blocks(*middle_block(files))
    speed = measure_block(files, options.server)
    num_blocks = max_blocks = min(options.max_blocks or files.num_blocks, files.num_blocks)
    needs = room = None
    if options.max_bytes is not None:
        needs = weigh(files, options.server, speed.kv_bytes_per_token)
        room = block_budget(needs, options.max_bytes, options.server.kv_bytes)
        is_given_fewer = room.num_blocks > num_blocks
        num_blocks, max_blocks = min(num_blocks, room.num_blocks), min(max_blocks, room.max_blocks)
        room = None if is_given_fewer else room
    capacity = Capacity(
        peer_id=peer_id,
        num_blocks=num_blocks,
        max_blocks=max_blocks,
        block_ms=work_ms(speed.decode_ms, speed.prefill_ms),
        send_ms=NUM_COPIES * hidden_ms(files.hidden_size, options.up_bytes_per_s),
    )
    revision = files.revision(options.server.dtype)
    return SpanCapability(files=files, revision=revision, speed=speed, capacity=capacity, needs=needs, room=room)


def hidden_ms(hidden_size: int, bytes_per_s: float) -> float:
    """Return the milliseconds that one token's hidden states take at `bytes_per_s`, bounded as in records."""
    return min(FP32_BYTES * hidden_size / bytes_per_s * 1000, limits.MAX_RTT_MS)


def planned_needs(model_dir: Path, options: ServerOptions) -> ModelNeeds:
    """Return the same as `weigh`, but with the cache size computed from the config: no block is run.

    Raises ConfigError or IntegrityError.
    """
    files = open_model(model_dir)
    config = files.config.get_text_config()
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return weigh(files, options, 2 * num_kv_heads * head_size * options.compute_dtype.itemsize)


def options_for(
    num_blocks: int, model_dir: Path, capability: SpanCapability | None, options: VolunteerOptions
) -> ServerOptions:
    """Return the server options, with the cache size that the weights of `num_blocks` leave.

    Raises ConfigError if none is left.
    """
    if options.max_bytes is None:
        return options.server
    # if the span was given, the cache size is only known, and checked, once the span is loaded
    needs = capability.needs if capability else weigh(open_model(model_dir), options.server)
    assert needs is not None
    num_blocks = min(num_blocks, needs.num_blocks)  # loading checks that so many exist
    kv_bytes = kv_bytes_beside(needs, num_blocks, options.max_bytes, options.server.kv_bytes)
    return replace(options.server, kv_bytes=kv_bytes)


def measure_block(files: ModelFiles, options: ServerOptions) -> SpanSpeed:
    """Return the speed of one block from the model's middle, for deciding how many to take."""
    return measure(
        load_span(files, *middle_block(files), dtype=options.compute_dtype, device=options.device, bits=options.bits)
    )


def middle_block(files: ModelFiles) -> tuple[int, int]:
    """Return the span of the block that `measure_block` reads."""
    return files.num_blocks // 2, files.num_blocks // 2 + 1


def weigh(files: ModelFiles, options: ServerOptions, kv_bytes: int = 0) -> ModelNeeds:
    """Return the sizes of a model, computed from the headers of the shards, without reading weights. Raises
    IntegrityError.

    `kv_bytes` is the cache of one token on one block.
    """
    bits, item_bytes = options.bits, options.compute_dtype.itemsize
    held, read, ends_bytes, largest = [0] * files.num_blocks, [0] * files.num_blocks, 0, 0
    blocks = block_of_tensors(files)
    rows = linear_tensors(files, bits) if bits else {}
    for name, num_values in weight_sizes(files).items():
        if (block := blocks[name]) is None:
            ends_bytes += num_values * item_bytes
            continue
        num_bytes = num_values * item_bytes
        read[block] += num_bytes
        if bits and name in rows:
            num_bytes, largest = quantized_bytes(bits, num_values, rows[name]), max(largest, num_values)
        held[block] += num_bytes
    # a span is read block by block, and each of a block's tensors is quantized on its own
    loading_bytes = max(read) - min(held) + PASSING_BYTES * largest if bits else 0
    return ModelNeeds(
        num_blocks=files.num_blocks,
        block_bytes=max(held),
        ends_bytes=ends_bytes,
        kv_bytes=kv_bytes,
        loading_bytes=loading_bytes,
        context_tokens=files.context_tokens,
    )
