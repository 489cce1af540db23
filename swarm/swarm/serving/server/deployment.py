"""Loads one span into memory, with its cache and the engine that runs it, by the options of a server.

A server replaces its deployment when it moves, and holds the old one until its sessions have left.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError, SwarmError
from swarm_protocol.manifest_messages import PublishedManifest
from swarm_protocol.serving_messages import FilesResponse

from swarm.ended_tasks import end_tasks
from swarm.heap import give_back
from swarm.network.interface import FailpointHook, no_failpoints
from swarm.serving.engine.engine import Engine, EngineOptions
from swarm.serving.engine.span_speed import (
    NUM_STEPS_AGAIN,
    PREFILL_TOKENS,
    SpanSpeed,
    StepTrials,
    measure,
    thread_counts_near,
    worthwhile,
)
from swarm.serving.evidence.server_convictions import ServerConvictions
from swarm.serving.manifest.verification import HeldFile, check_small_files, held_files
from swarm.serving.model.family_check import check_config
from swarm.serving.model.kv_pool import PAGE_TOKENS, KVPool
from swarm.serving.model.model_files import ModelFiles, open_model
from swarm.serving.model.shape import check_span
from swarm.serving.model.span import STEPS, Span
from swarm.serving.model.span_loading import load_span
from swarm.serving.model.weights import needed_shards

logger = logging.getLogger(__name__)

CHOOSE_SOON_S = 20.0
"""Maximum seconds from loading until the numbers of threads are chosen again: they may have been chosen while the
machine was busy, as when several servers load at once. The moment is random, so that these do not measure together."""
CHOOSE_LATER_S = 600.0
"""Maximum seconds until each further choice."""

Dtype: TypeAlias = Literal["float32", "bfloat16", "float16", "int8", "int4"]

DTYPES: Mapping[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.bfloat16,
    "int4": torch.bfloat16,
}
"""The dtype of computations for each kind of weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions(EngineOptions):
    """The limits and settings of a server, including those of its engine.

    `kv_bytes` of cache are shared by all sessions; a session that sends nothing for `idle_s` is ended. At most
    `max_connections` connections are open. The waiting steps of all sessions together take up to `max_backlog_bytes`:
    those of one provider's network up to three quarters of that, and of one client up to half. `published` is the
    manifest that the model's files have to match; None means the one beside them, if there is one. `convictions` are
    the convicted servers that this process knows; None means none.

    Raises ConfigError for invalid values.
    """

    device: str = "cpu"
    dtype: Dtype = "float32"
    kv_bytes: int = 2**30
    idle_s: float = 120.0
    max_connections: int = 1024
    max_backlog_bytes: int = 256 * 2**20
    published: PublishedManifest | None = None
    convictions: ServerConvictions | None = None
    failpoints: FailpointHook = field(default=no_failpoints)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is unknown", remedy=f"use one of {', '.join(DTYPES)}")
        for limit in fields(self):
            value = getattr(self, limit.name)
            if isinstance(value, int | float) and not value > 0:
                raise ConfigError(f"{limit.name} must be above 0", remedy="use 1 or more")
        if not 1 <= self.max_step_tokens <= limits.MAX_STEP_TOKENS:
            raise ConfigError(f"max_step_tokens = {self.max_step_tokens}", remedy=f"use 1 to {limits.MAX_STEP_TOKENS}")

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which products are computed."""
        return DTYPES[self.dtype]

    @property
    def bits(self) -> Literal["int8", "int4"] | None:
        """The format to which the weights of linear layers are quantized, or None."""
        return self.dtype if self.dtype in ("int8", "int4") else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSpan:
    """A span that was read and measured. `kv_tokens` fit into the allowed cache. `files` is the FilesResponse for
    clients, made once since it may be large. `source` is `ModelFiles.source`. For a published model, `held` are the
    files from which the span was read, by their index in its `manifest`."""

    span: Span
    speed: SpanSpeed
    kv_tokens: int
    max_step_tokens: int
    revision: str
    source: str
    files: bytes
    manifest: PublishedManifest | None = None
    held: Mapping[int, HeldFile] = field(default_factory=dict)


def load(model_dir: Path, start: int, end: int, options: ServerOptions) -> LoadedSpan:
    """Read, check and measure a span. Raises ConfigError, and IntegrityError, also for a file that differs from the
    manifest of a published model."""
    files = open_model(model_dir, options.published)
    check_config(files.config)
    held = _check_published(files, start, end)
    span = load_span(files, start, end, dtype=options.compute_dtype, device=options.device, bits=options.bits)
    row_bytes = 4 * max(files.hidden_size, files.vocab_size)
    room_bytes = limits.MAX_MESSAGE_BYTES - limits.MAX_OPEN_BYTES
    if row_bytes > room_bytes:
        raise ConfigError(f"{model_dir} is too wide for the messages of this network", remedy="serve another model")
    speed = measure(span)
    give_back()  # frees the memory of the measurement
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
        manifest=files.manifest,
        held=held,
    )


def _check_published(files: ModelFiles, start: int, end: int) -> Mapping[int, HeldFile]:
    """Check the files from which a span is read against the manifest, if there is one. Raises IntegrityError."""
    if files.manifest is None:
        return {}
    check_small_files(files.directory, files.manifest)
    check_span(start, end, files.num_blocks)
    names = [shard.name for shard in needed_shards(files, start, end)]
    return held_files(files.directory, files.manifest, names)


class Deployment:
    """A span in memory with its engine. `start` runs the engine; `close` frees the memory."""

    def __init__(self, loaded: LoadedSpan, pool: KVPool, options: ServerOptions, thread: ThreadPoolExecutor) -> None:
        self.loaded = loaded
        self.options = options
        self.engine = Engine(loaded.span, pool, options, revision=loaded.revision, speed=loaded.speed, thread=thread)
        self._running: list[asyncio.Task[None]] = []

    @classmethod
    async def load(cls, model_dir: Path, start: int, end: int, options: ServerOptions) -> Deployment:
        """Load and measure a span. Raises ConfigError or IntegrityError. After a cancellation, loading may continue for
        minutes."""
        # the engine's own thread loads and measures. OpenMP gives each thread a team of its own, and with more teams
        # than cores, members sleep between any two loops. A new thread computes with the number of threads that was set
        # last, which may be that of another span that is served
        thread = ThreadPoolExecutor(
            1, thread_name_prefix="swarm-engine", initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
        )
        try:
            in_thread = partial(asyncio.get_running_loop().run_in_executor, thread)
            loaded = await in_thread(load, model_dir, start, end, options)
            pool = await in_thread(loaded.span.new_pool, loaded.kv_tokens // PAGE_TOKENS)
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return cls(loaded, pool, options, thread)

    @property
    def speed(self) -> SpanSpeed:
        """The speed as it was measured while loading, and observed since."""
        assert self.engine.observed is not None
        return self.engine.observed.speed

    async def measure_again(self) -> None:
        """Measure the span again while it is idle: a server that seems slow gets few requests, and so observes little.

        Steps that arrive meanwhile wait for a few short passes.
        """
        assert self.engine.observed is not None
        span = self.loaded.span
        trials = StepTrials(span)
        decode_ms = await self.engine.in_thread(partial(trials.step_ms, num_steps=NUM_STEPS_AGAIN), 1)
        prefill_ms = min([await self.engine.in_thread(trials.prefill_ms) for _ in range(NUM_STEPS_AGAIN)])
        num_blocks = span.end - span.start
        self.engine.observed.measured_again(decode_ms / num_blocks, prefill_ms / PREFILL_TOKENS / num_blocks)

    async def _keep_choosing(self) -> None:
        """Choose the numbers of threads again soon, and then seldom."""
        longest_s = CHOOSE_SOON_S
        while True:
            await asyncio.sleep(random.uniform(0.2, 1) * longest_s)
            try:
                if await self._choose_threads():
                    longest_s = CHOOSE_LATER_S
            except (SwarmError, RuntimeError, MemoryError) as error:
                logger.warning("could not choose the number of threads again: %s", error)

    async def _choose_threads(self) -> bool:
        """Choose the numbers of threads again, unless there is a session, and return whether that was done. The first
        step of a session that is opened meanwhile waits for NUM_STEPS_AGAIN steps."""
        span = self.loaded.span
        trials = StepTrials(span)
        for num_rows in STEPS:
            counts, times_ms = thread_counts_near(span.step_threads[num_rows], span.num_threads), dict[int, float]()
            trial = partial(trials.step_ms, num_rows, num_steps=NUM_STEPS_AGAIN)
            for count in counts:
                if self.engine.num_sequences:
                    return False
                times_ms[count] = await self.engine.in_thread(trial, count)
            span.step_threads[num_rows] = worthwhile(times_ms.__getitem__, counts)
        return True

    @property
    def blocks(self) -> tuple[int, int]:
        return self.loaded.span.start, self.loaded.span.end

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Run the engine as a task of the group. A defect of the engine ends the group."""
        self._running = [tasks.create_task(self.engine.run(), name="engine")]
        if self.loaded.span.device.type == "cpu" and self.loaded.span.num_threads > 1:
            self._running.append(tasks.create_task(self._keep_choosing(), name="choose threads"))

    async def close(self) -> None:
        """End its sequences and wait for the running pass. A second call does nothing. If the wait is cancelled, the
        pass still ends by itself."""
        await end_tasks(*self._running)
        await asyncio.get_running_loop().run_in_executor(None, partial(self.engine.close, wait=True))
