"""Gets what is needed at home of a model: found, checked against the revision that is served, and small enough.
Blocking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from swarm_protocol.errors import ConfigError

from swarm.serving.home.kept_model import NUM_LAST_BLOCKS, KeptModel, WantedModel
from swarm.serving.model.hub_download import download_blocks, find_model
from swarm.serving.model.model_files import ModelFiles, open_model, weight_sizes
from swarm.serving.model.weights import needed_tensors
from swarm.serving.server.server_options import DTYPES, Dtype, ServerOptions

CACHE_BYTES_PER_BLOCK = 256 * 2**20
"""Keys and values of 65,000 tokens of a usual 8 B or 70 B model. It is reserved, and taken as sessions use it."""

MAX_SESSIONS = 256
"""A gateway's requests at once. Beyond that a request is refused here, as a server would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HomePart:
    """One span to keep, from the files in `directory`, and the options to load it with."""

    directory: Path
    start: int
    end: int
    options: ServerOptions


def find_parts(kept: KeptModel, wanted: WantedModel, is_over: Callable[[], bool] = lambda: False) -> Sequence[HomePart]:
    """Return the two spans at the ends of the model, whose weights are there afterwards.

    A download ends soon after `is_over` returns True, which it is asked in this thread; what came is kept.
    Raises ConfigError for files that cannot be found, are of another revision, leave no block for servers, or do not
    fit into memory; IntegrityError for damaged ones.
    """
    hub_id, hub = kept.hub_id, None
    if hub_id is None:
        directory = Path(kept.source)
    else:
        assert kept.cache is not None
        hub = find_model(hub_id[0], kept.cache, revision=hub_id[1], endpoint=kept.endpoint)
        directory = hub.directory
    files = open_model(directory, wanted.published)
    dtype = _served_dtype(files, kept, wanted)
    spans = _spans(files.num_blocks, kept.num_first_blocks, wanted.name)
    _check_memory(files, spans, dtype, wanted.name)

    def note(num_bytes: int, total_bytes: int) -> None:
        if is_over():
            raise InterruptedError("nobody waits for the model any more")
        kept.on_progress(num_bytes, total_bytes)

    for start, end in spans:
        if hub is not None:
            download_blocks(hub, start, end, note)
    return [
        HomePart(
            directory=directory,
            start=start,
            end=end,
            options=ServerOptions(
                dtype=dtype,
                kv_bytes=CACHE_BYTES_PER_BLOCK * (end - start),
                max_sessions=MAX_SESSIONS,
                published=wanted.published,
            ),
        )
        for start, end in spans
    ]


def _served_dtype(files: ModelFiles, kept: KeptModel, wanted: WantedModel) -> Dtype:
    """Return the dtype in which these files are the revision that is served. Raises ConfigError if there is none."""
    for dtype in DTYPES:
        if files.revision(dtype) == wanted.revision:
            return dtype
    raise ConfigError(
        f"the files of {wanted.name} in {kept.source} are not of the revision that is served, {wanted.revision:.12}",
        remedy="keep the files that its servers have: the same checkpoint or commit, from the same source",
    )


def _spans(num_blocks: int, num_first: int, name: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the two spans that are kept. Raises ConfigError where nothing is left between them."""
    last = num_blocks - NUM_LAST_BLOCKS
    if num_first >= last:
        raise ConfigError(
            f"{name} has {num_blocks} blocks: with the first {num_first} and the last one at home none is left for "
            "servers",
            remedy=f"keep at most {last - 1}" if last > 1 else "use a model of more blocks, or run it here as a whole",
        )
    return (0, num_first), (last, num_blocks)


def _check_memory(files: ModelFiles, spans: Sequence[tuple[int, int]], dtype: Dtype, name: str) -> None:
    """Raises ConfigError, with both figures, where the weights do not fit into the memory that is free.

    The bytes are those of the dtype that is computed in: weights of fewer bits pass through it when they are loaded.
    A head that is tied to the embedding counts twice, since each end has a copy.
    """
    sizes, item_bytes = weight_sizes(files), DTYPES[dtype].itemsize
    num_bytes = sum(sizes[tensor] * item_bytes for span in spans for tensor in needed_tensors(files, *span))
    free_bytes = psutil.virtual_memory().available
    if num_bytes > free_bytes:
        raise ConfigError(
            f"embedding, head and {sum(end - start for start, end in spans)} blocks of {name} take "
            f"{num_bytes / 2**20:.0f} MiB at home, and {free_bytes / 2**20:.0f} MiB are free",
            remedy="keep fewer blocks at home, or ask from a machine with more memory",
        )
