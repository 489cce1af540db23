"""Runs both ends of a model in the client's process, for sessions that keep their text at home.

`find_parts` gets what that takes of a model's files: found, checked against the revision that is served, and small
enough. Each end is what a server would be: a deployment with its engine, and a `ConnectionServer` that speaks the
frames of sessions. A stream within the process takes the place of the network, so that a session treats both as any
other stage, and tokens are drawn by the code that draws them on servers. `open` loads, the task that it starts runs
both, and `close` ends it. Used in the client's loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from swarm_protocol.errors import ConfigError, IntegrityError, PeerUnreachable, SessionError, SwarmError
from swarm_protocol.records import ServeRecord
from swarm_protocol.serving_messages import FilesResponse

from swarm.ended_tasks import end_tasks
from swarm.network.interface import EndOfStream, Network
from swarm.router.routing import Hop
from swarm.serving.grammar.grammar_masks import GrammarPool
from swarm.serving.local_ends.kept_model import NUM_LAST_BLOCKS, KeptModel, WantedModel
from swarm.serving.model.hub_download import download_blocks, find_model
from swarm.serving.model.model_files import ModelFiles, open_model, weight_sizes
from swarm.serving.model.weights import needed_tensors
from swarm.serving.server.connection_server import ConnectionServer
from swarm.serving.server.deployment import DTYPES, Deployment, Dtype, ServerOptions
from swarm.serving.session.connection_pool import ConnectionPool

CACHE_BYTES_PER_BLOCK = 256 * 2**20
"""Keys and values of 65,000 tokens of a usual 8 B or 70 B model. It is reserved, and taken as sessions use it."""

MAX_SESSIONS = 256
"""A gateway's requests at once. Beyond that a request is refused here, as a server would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPart:
    """One span to keep, from the files in `directory`, and the options to load it with."""

    directory: Path
    start: int
    end: int
    options: ServerOptions


def find_parts(
    kept: KeptModel, wanted: WantedModel, is_over: Callable[[], bool] = lambda: False
) -> Sequence[LocalPart]:
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
        LocalPart(
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
    num_bytes = sum(sizes[tensor] * item_bytes for needed in needed_tensors(files, spans) for tensor in needed)
    free_bytes = psutil.virtual_memory().available
    if num_bytes > free_bytes:
        raise ConfigError(
            f"embedding, head and {sum(end - start for start, end in spans)} blocks of {name} take "
            f"{num_bytes / 2**20:.0f} MiB at home, and {free_bytes / 2**20:.0f} MiB are free",
            remedy="keep fewer blocks at home, or ask from a machine with more memory",
        )


MAX_WAITING = 4
"""Messages that wait at one end. Messages hold all frames of a moment, so more would only be older."""

logger = logging.getLogger(__name__)

KEY_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _End:
    """One end: the hop that stands for it in chains, what computes it, and what takes sessions."""

    hop: Hop
    deployment: Deployment
    connections: ConnectionServer


class LocalEnds:
    """The embedding with the first blocks, and the last block with norm and head, of one revision of a model.

    `files` are the small files, of which the tokenizer is made. `prefix_key` is drawn anew by each process.
    """

    def __init__(
        self, network: Network, wanted: WantedModel, directory: Path, deployments: Sequence[Deployment]
    ) -> None:
        self.prefix_key = secrets.token_bytes(KEY_BYTES)
        self.connections = ConnectionPool(self)
        loaded = deployments[0].loaded
        self.files: Mapping[str, bytes] = FilesResponse.from_bytes(loaded.files).files
        self.num_first_blocks = loaded.span.end
        self._name = wanted.name
        self._peer_id = network.peer_id
        self._grammars = GrammarPool(directory / "tokenizer.json")
        self._ends = {
            hop.peer_id: _End(hop=hop, deployment=each, connections=self._server(network, each))
            for each in deployments
            for hop in [_hop(each, wanted)]
        }
        first, last = (end.hop for end in self._ends.values())
        self.hops = first, last
        self._main = asyncio.create_task(self._run(), name=f"both ends of {wanted.name}")

    @classmethod
    async def open(cls, network: Network, kept: KeptModel, wanted: WantedModel) -> LocalEnds:
        """Find, check and load both ends. Raises ConfigError, IntegrityError; then nothing is left behind, and after a
        cancellation a download ends, since a program cannot end before its threads."""
        deployments: list[Deployment] = []
        is_over = threading.Event()
        try:
            parts = await asyncio.to_thread(find_parts, kept, wanted, is_over.is_set)
            for part in parts:
                deployments.append(await _loaded(part, wanted.name))
            return cls(network, wanted, parts[0].directory, deployments)
        except BaseException:
            is_over.set()
            for deployment in deployments:
                await deployment.close()
            raise

    def check(self) -> None:
        """Raises SessionError once a defect has ended an engine."""
        if self._main.done():
            raise SessionError(
                f"the part of {self._name} that is kept here has failed", remedy="start this client again"
            )

    async def close(self) -> None:
        """End every session on these ends and free their memory. Call it once."""
        await self.connections.close()
        await end_tasks(self._main)
        for end in self._ends.values():
            await end.deployment.close()
        self._grammars.close()

    @asynccontextmanager
    async def stream(self, peer_id: str, method: str, *, timeout_s: float | None) -> AsyncIterator[LocalStream]:
        """Open a stream to one of the ends, as a network does to a server."""
        del method, timeout_s  # there is one method, and what runs in this process answers or has failed
        near, far = LocalStream.pair()
        serving = asyncio.create_task(self._serve(self._ends[peer_id], far), name=f"serve {peer_id}")
        try:
            yield near
        finally:
            await end_tasks(serving)

    async def _serve(self, end: _End, stream: LocalStream) -> None:
        error: SwarmError | None = None
        try:
            await end.connections.serve(self._peer_id, stream)
        except SwarmError as refusal:
            error = refusal
        finally:
            await stream.end(error)

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for end in self._ends.values():
                    end.deployment.start(tasks)
                    tasks.create_task(end.connections.run(), name="connections")
        except ExceptionGroup as group:
            logger.exception("the part of %s that is kept here has failed", self._name, exc_info=group.exceptions[0])

    def _server(self, network: Network, deployment: Deployment) -> ConnectionServer:
        return ConnectionServer(
            network,
            self._name,
            deployment.options,
            offer=lambda: deployment,
            on_changed=lambda: None,
            grammars=self._grammars,
        )


async def _loaded(part: LocalPart, name: str) -> Deployment:
    """Load one end of the model `name`. Raises ConfigError, IntegrityError."""
    try:
        return await Deployment.load(part.directory, part.start, part.end, part.options)
    except IntegrityError as error:
        # the manifest is the one that is served: to do without a file of its own, as a server may, is no way out here
        remedy = f"keep the files of {name} that are served: get them from its publisher again"
        raise IntegrityError(error.message, remedy=remedy) from error


def _hop(deployment: Deployment, wanted: WantedModel) -> Hop:
    """Return the hop that stands for an end in chains. Its peer id is no peer's: those begin otherwise."""
    loaded, (start, end) = deployment.loaded, deployment.blocks
    record = ServeRecord(
        model=wanted.name,
        revision=loaded.revision,
        num_blocks=loaded.span.num_blocks,
        start=start,
        end=end,
        state="serving",
        prefill_ms_per_token=loaded.speed.prefill_ms,
        decode_ms_per_block=loaded.speed.decode_ms,
        free_kv_tokens=loaded.kv_tokens,
        dtype=deployment.options.dtype,
    )
    return Hop(peer_id=f"home/{start}:{end}", start=start, end=end, cost_ms=0.0, record=record)


class LocalStream:
    """One end of a stream. `end` closes both directions, with the error that the other end is told."""

    def __init__(self) -> None:
        self._received: deque[bytes] = deque()
        self._changed = asyncio.Condition()
        self._error: SwarmError | None = None
        self._is_over = False
        self._other: LocalStream = self

    @classmethod
    def pair(cls) -> tuple[LocalStream, LocalStream]:
        """Return the two ends of a new stream."""
        near, far = cls(), cls()
        near._other, far._other = far, near
        return near, far

    async def send(self, message: bytes) -> None:
        """Give the message to the other end, which has room for MAX_WAITING. Raises PeerUnreachable once it is over."""
        other = self._other
        async with other._changed:
            await other._changed.wait_for(lambda: other._is_over or len(other._received) < MAX_WAITING)
            if other._is_over:
                raise PeerUnreachable("the stream has ended")
            other._received.append(message)
            other._changed.notify_all()

    async def receive(self) -> bytes:
        """Return the next message. Raises EndOfStream, or the error that the other end closed the stream with."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._received or self._is_over)
            if self._received:
                self._changed.notify_all()
                return self._received.popleft()
        if self._error is not None:
            raise self._error
        raise EndOfStream

    async def finish(self) -> None:
        """Send no more: the other end receives EndOfStream after what waits there."""
        await self._other._close(None)

    async def end(self, error: SwarmError | None = None) -> None:
        """End both directions. A second call does nothing."""
        await self._other._close(error)
        await self._close(None)

    async def _close(self, error: SwarmError | None) -> None:
        async with self._changed:
            if not self._is_over:
                self._is_over, self._error = True, error
            self._changed.notify_all()
