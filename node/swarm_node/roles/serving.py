"""Serves a model's blocks on this node until it leaves. `swarm.serving.server.span_placer` chooses the blocks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from swarm.recent_rate import RecentRate
from swarm.router.block_budget import least_bytes
from swarm.router.placement import PlacementDecision
from swarm.serving.model import fused_decode
from swarm.serving.model.model_files import manifest_beside
from swarm.serving.server.capability import VolunteerOptions, planned_needs
from swarm.serving.server.deployment import DTYPES, Dtype, ServerOptions
from swarm.serving.server.span_placer import SpanPlacer
from swarm_protocol.checks import check_name
from swarm_protocol.control_messages import ServingStatus
from swarm_protocol.errors import ConfigError, SessionError
from swarm_protocol.manifest_messages import PublishedManifest

from swarm_node.formatting import plural, rate, size
from swarm_node.machine.hardware import resident_bytes, share_of_free, share_of_limit
from swarm_node.metrics.readings import ServerMetrics, read_server
from swarm_node.node import Node
from swarm_node.roles.kept_convictions import kept_convictions
from swarm_node.roles.sources import FetchBlocks, ModelSource, ProgressReports, find_source
from swarm_node.settings.parsers import HubId

RATE_S = 5.0
"""Seconds over which the token rate is measured."""


def model_name(model: Path | HubId) -> str:
    """Return the name under which clients know a model: its directory's name, or its name on the hub. Raises
    ConfigError."""
    try:
        return check_name(model.name, "name")
    except ValueError as error:
        raise ConfigError(
            f"{model} cannot be served under its own name: {error}", remedy="serve a directory with another name"
        ) from error


class ModelServing:
    """Serves a part of one model on this node. The task in `until_leaving` owns it.

    `numbered` means that its start is reported as numbered steps. `dtype` replaces the configured one. A `published`
    model has the name in its manifest. Without `published`, a manifest beside the model's files counts if there is one.
    """

    def __init__(
        self,
        node: Node,
        model: Path | HubId,
        name: str,
        *,
        numbered: bool,
        dtype: Dtype | None = None,
        published: PublishedManifest | None = None,
    ) -> None:
        self._node = node
        self._model = model
        self._name = name
        self._numbered = numbered
        self._dtype = dtype or node.config.dtype
        self._published = published
        self._num_bytes = 0  # bytes downloaded so far
        self._is_chosen = False
        self._num_blocks = 0
        self._placer: SpanPlacer | None = None

    async def until_leaving(self) -> None:
        """Serve until the node leaves.

        Raises ConfigError or IntegrityError if the model cannot be served here, and SessionError if serving fails
        later.
        """
        self._node.emitter.emit("loading", model=self._name)
        source = await asyncio.to_thread(find_source, self._model, self._node.home, ProgressReports(self._downloading))
        await asyncio.to_thread(self._take_manifest, source.directory)
        options = await asyncio.to_thread(_options, self._node, source.directory, self._dtype, self._published)
        async with kept_convictions(self._node) as convictions:
            options = replace(options, server=replace(options.server, convictions=convictions))
            await self._place_with(options, source)

    async def _place_with(self, options: VolunteerOptions, source: ModelSource) -> None:
        placer = self._placer = SpanPlacer(
            self._node.network,
            self._node.membership,
            source.directory,
            name=self._name,
            options=replace(options, fetch_blocks=self._reporting(source.fetch_blocks)),
            on_choice=self._chosen,
            on_decision=self._decided,
        )
        with self._node.metrics.reading(lambda: read_server(placer)):
            await self._serve(placer)

    def _take_manifest(self, directory: Path) -> None:
        """Take the model's name from the given manifest, or from the one beside the model. Raises IntegrityError."""
        published = self._published = self._published or manifest_beside(directory)
        if published is None:
            return
        self._name = published.manifest.name
        self._node.emitter.emit(
            "manifest", model=self._name, publisher=published.publisher, digest=published.digest.hex()
        )

    async def _serve(self, placer: SpanPlacer) -> None:
        leaving = self._node.work_end.leaving
        try:
            await placer.start()
            rate = RecentRate(asyncio.get_running_loop().time(), RATE_S)
            while not leaving.is_set():
                if failure := placer.failure:
                    raise failure
                self._say(placer, rate)
                await self._node.work_end.wait(1.0)
            await placer.drain(within_s=self._node.work_end.grace_s)
        except SessionError:
            if not self._node.work_end.leaving.is_set():
                raise
        finally:
            await placer.close()
            self._node.activity.serving = None

    def _downloading(self, num_bytes: int, total_bytes: int) -> None:
        """Report a download. Called in the thread that downloads."""
        if self._node.work_end.leaving.is_set():
            raise SessionError(f"the node leaves before {self._name} is downloaded")
        self._num_bytes = num_bytes
        self._node.emitter.emit("downloading", model=self._name, num_bytes=num_bytes, total_bytes=total_bytes)

    def _chosen(self, decision: PlacementDecision) -> None:
        self._is_chosen = True
        if self._numbered:
            blocks = f"blocks {decision.start}:{decision.end} of {self._name}"
            self._node.steps.done("takes", f"{blocks}: {decision.reason}")

    def _reporting(self, fetch_blocks: FetchBlocks) -> FetchBlocks:
        """Return `fetch_blocks` with a report when the chosen span is there; earlier blocks are only measured. Runs in
        a thread."""

        def fetch_and_report(start: int, end: int) -> None:
            fetch_blocks(start, end)
            if self._numbered and self._is_chosen:
                had = f"{size(self._num_bytes)} came from the hub" if self._num_bytes else "everything is here already"
                self._node.steps.done("weights", had)

        return fetch_and_report

    def _decided(self, decision: PlacementDecision) -> None:
        assert self._placer is not None
        server = self._placer.server
        assert server is not None
        record = server.record
        self._num_blocks = record.num_blocks
        if self._numbered:
            self._numbered = False
            num_blocks = decision.end - decision.start
            loaded = f"{plural(num_blocks, 'block')} {'is' if num_blocks == 1 else 'are'} loaded and measured"
            self._node.steps.done("warm-up", loaded)
            self._node.steps.done("serving", "open for sessions")
        self._node.activity.state = "serving"
        self._node.emitter.emit(
            "serving",
            model=self._name,
            start=decision.start,
            end=decision.end,
            revision=record.revision,
            reason=decision.reason,
        )

    def _say(self, placer: SpanPlacer, rate: RecentRate) -> None:
        server = placer.server
        assert server is not None
        status = self._node.activity.serving = ServingStatus(
            model=self._name,
            start=server.start_block,
            end=server.end_block,
            num_sessions=len(server.sessions),
            tokens_per_s=rate.per_s(server.num_tokens, asyncio.get_running_loop().time()),
        )
        # while the server moves without memory for both spans, it has no record
        self._node.emitter.status("serving", serving_line(status, self._num_blocks))


def serving_line(status: ServingStatus, num_blocks: int) -> str:
    """Return a line such as `SERVING blocks 12:20 of 32, 41 tok/s`."""
    blocks = f"blocks {status.start}:{status.end} of {num_blocks}"
    sessions = f", {status.num_sessions} sessions" if status.num_sessions > 1 else ""
    return f"SERVING {blocks}, {rate(status.tokens_per_s)}{sessions}"


def needed_bytes(directory: Path, dtype: Dtype, span: tuple[int, int] | None) -> int:
    """Return the least bytes for the blocks of `span`, or for one block. Raises ConfigError or IntegrityError."""
    start, end = span or (0, 1)
    return least_bytes(planned_needs(directory, ServerOptions(dtype=dtype)), end - start)


def _options(node: Node, directory: Path, dtype: Dtype, published: PublishedManifest | None) -> VolunteerOptions:
    """Return the options for serving. Blocks, for seconds the first time on a machine."""
    config, device = node.config, node.hardware.device
    if fused_decode.is_for(DTYPES[dtype], device):
        fused_decode.kernels()  # compiled now, so that their memory is counted below
    if not config.max_memory:
        share = share_of_free(node.hardware.free_memory_bytes)
    else:
        # on an accelerator the limit does not include this process's own memory
        held = resident_bytes() if device == "cpu" else 0
        limit_bytes = min(config.max_memory, node.hardware.memory_bytes)
        share = share_of_limit(limit_bytes, held, needed_bytes(directory, dtype, config.blocks))
    metrics = ServerMetrics(node.metrics)
    return VolunteerOptions(
        span=config.blocks,
        max_blocks=config.max_blocks or None,
        max_bytes=share.model_bytes,
        server=ServerOptions(
            device=device,
            dtype=dtype,
            kv_bytes=share.cache_bytes,
            max_backlog_bytes=share.waiting_bytes,
            published=published,
            on_step=metrics.step,
            on_drafts=metrics.drafts,
        ),
        up_bytes_per_s=node.limits.up_bytes_per_s,
        is_relayed=lambda: node.reachability == "relay",
    )
