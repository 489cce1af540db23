"""A span that is ready to be served, with what was measured on it and the room it leaves for sessions. Blocking."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from swarm_protocol import limits
from swarm_protocol.errors import ConfigError
from swarm_protocol.serving_messages import FilesResponse

from swarm.heap import give_back
from swarm.serving.engine.span_speed import SpanSpeed, measure
from swarm.serving.model.batch import PAGE_TOKENS
from swarm.serving.model.family_check import check_config
from swarm.serving.model.model_files import ModelFiles, open_model, weight_sizes
from swarm.serving.model.quantization import PASSING_BYTES, Bits, quantized_bytes
from swarm.serving.model.span import Span, load_span
from swarm.serving.model.weights import block_of_tensors, linear_tensors
from swarm.serving.server.server_options import DTYPES, ServerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSpan:
    """`kv_tokens` fit into the allowed cache. `files` is the FilesResponse for clients, made once: it may be large.
    `source` is `ModelFiles.source`."""

    span: Span
    speed: SpanSpeed
    kv_tokens: int
    max_step_tokens: int
    revision: str
    source: str
    files: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Bytes of a model's largest block, and of embedding and head together, as they are held in memory.

    `loading_bytes` come on top of a span's weights while it is loaded; 0 where that is a few tensors on their way.
    """

    block_bytes: int
    ends_bytes: int
    loading_bytes: int = 0


def load(model_dir: Path, start: int, end: int, options: ServerOptions) -> LoadedSpan:
    """Read, run and measure. Raises ConfigError or IntegrityError."""
    files = open_model(model_dir)
    check_config(files.config)
    span = _load_span(files, start, end, options)
    row_bytes = 4 * max(files.hidden_size, files.vocab_size)
    room_bytes = limits.MAX_MESSAGE_BYTES - limits.MAX_OPEN_BYTES
    if row_bytes > room_bytes:
        raise ConfigError(f"{model_dir} is too wide for the messages of this network", remedy="serve another model")
    speed = measure(span)
    give_back()  # what was measured with
    page_bytes = PAGE_TOKENS * speed.kv_bytes_per_token
    kv_tokens = options.kv_bytes // page_bytes * PAGE_TOKENS
    if not kv_tokens:
        raise ConfigError(
            f"{PAGE_TOKENS} tokens take {page_bytes} bytes of cache, and {options.kv_bytes} are allowed",
            remedy="allow more memory or serve fewer blocks",
        )
    revision = files.revision(options.dtype)
    response = FilesResponse(revision=revision, files=files.small_files()).to_bytes()
    if len(response) > limits.MAX_MESSAGE_BYTES:
        raise ConfigError(
            f"the config and tokenizer in {model_dir} are larger than a message of {limits.MAX_MESSAGE_BYTES} bytes",
            remedy="remove the files that no tokenizer needs",
        )
    return LoadedSpan(
        span=span,
        speed=speed,
        kv_tokens=min(kv_tokens, limits.MAX_KV_TOKENS),
        max_step_tokens=min(options.max_step_tokens, room_bytes // (4 * files.hidden_size)),
        revision=revision,
        source=files.source,
        files=response,
    )


def measure_block(files: ModelFiles, options: ServerOptions) -> SpanSpeed:
    """The speed of one block from the model's middle, for deciding how many to take."""
    return measure(_load_span(files, *middle_block(files), options))


def middle_block(files: ModelFiles) -> tuple[int, int]:
    """The span of the block that `measure_block` reads."""
    return files.num_blocks // 2, files.num_blocks // 2 + 1


def _load_span(files: ModelFiles, start: int, end: int, options: ServerOptions) -> Span:
    dtype, bits = DTYPES[options.dtype], _bits(options)
    return load_span(files, start, end, dtype=dtype, device=options.device, bits=bits)


def _bits(options: ServerOptions) -> Bits | None:
    smaller: dict[str, Bits] = {"int8": "int8", "int4": "int4"}
    return smaller.get(options.dtype)


def weigh(files: ModelFiles, options: ServerOptions) -> Weights:
    """From the headers of the shards, without reading weights. Raises IntegrityError."""
    bits, item_bytes = _bits(options), DTYPES[options.dtype].itemsize
    held, read, ends_bytes, largest = [0] * files.num_blocks, [0] * files.num_blocks, 0, 0
    blocks = block_of_tensors(files)
    rows = linear_tensors(files) if bits else {}
    for name, num_values in weight_sizes(files).items():
        if (block := blocks[name]) is None:
            ends_bytes += num_values * item_bytes
            continue
        num_bytes = num_values * item_bytes
        read[block] += num_bytes
        if bits and name in rows:
            num_bytes, largest = quantized_bytes(bits, num_values, rows[name]), max(largest, num_values)
        held[block] += num_bytes
    # a span is read block by block, and each of a block's tensors is made smaller alone
    loading_bytes = max(read) - min(held) + PASSING_BYTES * largest if bits else 0
    return Weights(block_bytes=max(held), ends_bytes=ends_bytes, loading_bytes=loading_bytes)
