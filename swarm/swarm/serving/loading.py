"""A span that is ready to be served, with what was measured on it and the room it leaves for sessions. Blocking."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from swarm_protocol import limits
from swarm_protocol.errors import ConfigError
from swarm_protocol.serving_messages import FilesResponse

from swarm.serving.blocks import Span, block_of_tensors, load_span
from swarm.serving.measure import SpanSpeed, measure
from swarm.serving.model_files import ModelFiles, open_model, tensor_sizes
from swarm.serving.server_options import DTYPES, ServerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSpan:
    """`kv_tokens` fit into the allowed cache. `files` is the FilesResponse for clients, made once: it may be large."""

    span: Span
    speed: SpanSpeed
    kv_tokens: int
    max_step_tokens: int
    revision: str
    files: bytes


def load(model_dir: Path, start: int, end: int, options: ServerOptions) -> LoadedSpan:
    """Read, run and measure. Raises ConfigError or IntegrityError."""
    files = open_model(model_dir)
    span = load_span(files, start, end, dtype=DTYPES[options.dtype], device=options.device)
    row_bytes = 4 * max(files.hidden_size, files.vocab_size)
    room_bytes = limits.MAX_MESSAGE_BYTES - limits.MAX_OPEN_BYTES
    if row_bytes > room_bytes:
        raise ConfigError(f"{model_dir} is too wide for the messages of this network", remedy="serve another model")
    speed = measure(span)
    kv_tokens = options.kv_bytes // speed.kv_bytes_per_token
    if not kv_tokens:
        raise ConfigError(
            f"a token takes {speed.kv_bytes_per_token} bytes of cache, and {options.kv_bytes} are allowed",
            remedy="allow more memory or serve fewer blocks",
        )
    revision = files.revision()
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
        files=response,
    )


def measure_block(files: ModelFiles, options: ServerOptions) -> SpanSpeed:
    """The speed of one block from the model's middle, for deciding how many to take."""
    middle = files.num_blocks // 2
    return measure(load_span(files, middle, middle + 1, dtype=DTYPES[options.dtype], device=options.device))


def num_blocks_within(files: ModelFiles, max_bytes: int, options: ServerOptions) -> int:
    """How many blocks fit beside the cache, the embedding and the head. Raises ConfigError if none does."""
    item_bytes = DTYPES[options.dtype].itemsize
    block_bytes, rest_bytes = [0] * files.num_blocks, 0
    blocks = block_of_tensors(files)
    for name, num_values in tensor_sizes(files).items():
        if (block := blocks[name]) is None:
            rest_bytes += num_values * item_bytes
        else:
            block_bytes[block] += num_values * item_bytes
    needed = options.kv_bytes + rest_bytes
    num_blocks = (max_bytes - needed) // max(*block_bytes, 1)
    if num_blocks < 1:
        raise ConfigError(
            f"not one block fits into {max_bytes} bytes: one takes {max(block_bytes)}, "
            f"and cache, embedding and head {needed}",
            remedy="allow more memory or a smaller cache",
        )
    return min(num_blocks, files.num_blocks)
