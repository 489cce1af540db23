"""The gateway role: a client of the swarm on one side and an HTTP server on the other, in one event loop.

OpenAI's API asks for a key if there are keys. The dashboard at `/` is read-only and open to everyone.

What spot checks have shown of servers is kept across restarts (see `swarm.trust.reputation`):

    HOME/reputation.json   {"network_id": …, "servers": {PEER_ID: [PASSED, DISPUTED, FAILED_AT, AT], …}}

If the file is missing, damaged or of another network, only this memory is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path

from fastapi import FastAPI
from starlette.types import ASGIApp
from swarm.client import AsyncClient
from swarm.client.async_client import ClientOptions
from swarm.client.possession_checks import FailedProof
from swarm.serving.checking.finished_answer import CheckReport
from swarm.serving.checking.spot_checks import SpotCheckOptions, SpotChecks
from swarm.serving.session.client_state import SessionOptions
from swarm.trust.reputation import MAX_PEERS, Reputation
from swarm_protocol.control_messages import MAX_BARRED, SpotCheckStatus
from swarm_protocol.errors import ConfigError

from swarm_node.dashboard.app import combined, create_dashboard
from swarm_node.dashboard.collector import check_folders, daemon_collector
from swarm_node.formatting import plural
from swarm_node.gateway import http_limits
from swarm_node.gateway.admission import KeyRing
from swarm_node.gateway.app import GatewayOptions, create_app
from swarm_node.gateway.metrics import SpotCheckCounter, read_possession
from swarm_node.http.addresses import checked
from swarm_node.http.rate_limit import Rates
from swarm_node.http.server import NOT_JOINED, is_local, listen, serving
from swarm_node.node import Node, NodeRole
from swarm_node.roles.kept_convictions import kept_convictions
from swarm_node.settings.config import Config
from swarm_node.storage import server_evidence
from swarm_node.storage.client_models import check_kept, kept_models, publishers_in, used_in
from swarm_node.storage.home import JsonMemory


class GatewayRole(NodeRole):
    """Serves HTTP until the node leaves. Running answers then have the node's grace period to finish.

    The constructor binds the port, before the node is ready or known to anybody. It raises ConfigError for unusable
    keys, for a gateway that would be open to all by accident, for a place that the dashboard cannot use, and for a kept
    model that cannot be used, and StartError if it cannot listen.
    """

    name = "gateway"

    def __init__(self, config: Config) -> None:
        self._options = options(config)
        check_kept(config)
        if config.dashboard:
            check_folders(config)
        self._pins = pins(config)
        self._listener = listen(config.host, config.port)

    def waiting(self) -> AbstractAsyncContextManager[object]:
        return serving(NOT_JOINED, self._listener.dup())

    async def run(self, node: Node) -> None:
        writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reputation")
        checks = spot_check_options(node, writer)
        remember = partial(_remember, node, writer, checks.reputation or Reputation())
        network_id = node.network.network_id
        async with kept_convictions(node) as convictions:
            client = AsyncClient(
                network=node.network,
                membership=node.membership,
                options=ClientOptions(
                    session=SessionOptions(checks=checks),
                    pins=self._pins,
                    used=used_in(node.home.revisions, network_id),
                    publishers=publishers_in(node.home.publishers, network_id, node.config.publisher),
                    on_failed_proof=lambda failure: _tell(node, failure, remember),
                    text_at_home=kept_models(node.config, node.home, node.emitter),
                ),
                convictions=convictions,
            )
            if self._options.keys is not None:
                self._options.keys.on_unusable = node.emitter.warning
            node.activity.spot_checks = partial(spot_check_status, client.checks)
            # close the client before the writer thread: until then it hands findings to that thread
            with writer:
                async with aclosing(client):
                    with node.metrics.reading(lambda: read_possession(client.possession)):
                        await self._answer(node, client)

    async def _answer(self, node: Node, client: AsyncClient) -> None:
        await client.warm_up()
        gateway = create_app(client, replace(self._options, registry=node.metrics, traces=node.traces))
        node.activity.first_token_s = gateway.state.first_tokens.newest
        if not node.config.dashboard:
            await self._serve(node, gateway)
            return
        async with daemon_collector(node) as collector:
            collector.unreachable = client.health.unreachable
            dashboard = create_dashboard(collector, has_chat=True, checkpoints=node.config.checkpoints)
            await self._serve(node, combined(gateway, dashboard), dashboard)

    async def _serve(self, node: Node, app: ASGIApp, dashboard: FastAPI | None = None) -> None:
        """Serve until the node leaves. `app` is all that is served, and `dashboard` is its part that shows the
        network."""
        config = node.config
        async with serving(
            checked(app, config), self._listener, proxies=config.trusted_proxies, grace_s=config.drain_s
        ) as url:
            node.activity.state = "gateway"
            keys = self._options.keys
            whom = "this machine" if is_local(node.config.host) else "anyone who reaches it"
            asked = f"for {plural(len(keys), 'API key')}" if keys else f"for {whom}, without a key"
            node.steps.done("gateway", f"OpenAI's API {asked}")
            node.emitter.emit("listening", url=url)
            if dashboard is not None:
                node.emitter.emit("dashboard", url=url)
            await node.shutdown.leaving.wait()
            if dashboard is not None:
                dashboard.state.live.close()


def _tell(node: Node, failure: FailedProof, remember: Callable[[], object]) -> None:
    remember()
    node.emitter.emit(
        "proof_failed", peer_id=failure.peer_id, model=failure.model, reason=failure.reason, answer=failure.answer.hex()
    )


def spot_check_options(node: Node, writer: Executor) -> SpotCheckOptions:
    """Return how the gateway checks answers, with what its home knows of servers.

    `writer` writes new findings to disk in a thread, since a disk can be slow.
    """
    counted = SpotCheckCounter(node.metrics)
    network_id, folder = node.network.network_id, node.home.served_evidence
    reputation = reputation_memory(node.home.reputation, network_id).read(Reputation.from_dict) or Reputation()

    def note(report: CheckReport) -> None:
        counted.add(report)
        if report.evidence:
            writer.submit(server_evidence.keep_answer, folder, report.named, network_id, report.evidence)
        if report.outcomes:
            _remember(node, writer, reputation)

    return SpotCheckOptions(share=node.config.spot_check, reputation=reputation, on_report=note)


def _remember(node: Node, writer: Executor, reputation: Reputation) -> None:
    memory = reputation_memory(node.home.reputation, node.network.network_id)
    writer.submit(memory.keep, reputation.to_dict())


def spot_check_status(checks: SpotChecks) -> SpotCheckStatus | None:
    """Return what a client's spot checks have found, or None if they are off."""
    if not checks.is_on:
        return None
    counts, now = checks.num_results, time.time()
    barred = [peer_id for peer_id, known in checks.reputation.track_records.items() if known.is_barred(now)]
    return SpotCheckStatus(
        num_passed=counts["passed"],
        num_failed=counts["failed"],
        num_disputed=counts["disputed"],
        num_unchecked=counts["unchecked"],
        barred=tuple(barred[-MAX_BARRED:]),
    )


def pins(config: Config) -> dict[str, str]:
    """Return the pinned revision of each model. Raises ConfigError if a model is pinned twice."""
    found = {pin.model: pin.revision for pin in config.pin_model}
    if len(found) < len(config.pin_model):
        raise ConfigError("a model is pinned twice", remedy="give --pin-model once for each model")
    return found


def options(config: Config) -> GatewayOptions:
    """Return the gateway's options. Raises ConfigError for unusable keys and for a gateway that is open to all by
    accident."""
    local = is_local(config.host)
    if not (local or config.api_keys or config.open_to_all):
        raise ConfigError(
            f"other machines can reach {config.host} and would need no key",
            remedy="give --api-keys FILE, or --open-to-all if anyone may ask",
        )
    if "*" in config.allowed_origins and not (config.api_keys or config.open_to_all):
        raise ConfigError(
            "any web page that is open on this machine could use the gateway, and would need no key",
            remedy="name the pages' origins with --allowed-origins, or give --api-keys FILE or --open-to-all",
        )
    requests_per_min = config.requests_per_min
    if requests_per_min is None:
        requests_per_min = 0 if local or config.api_keys else http_limits.REQUESTS_PER_MIN
    return GatewayOptions(
        rates=Rates(requests_per_min=requests_per_min, tokens_per_min=config.tokens_per_min),
        keys=KeyRing(config.api_keys, time.monotonic) if config.api_keys else None,
        allowed_origins=config.allowed_origins,
    )


MAX_FILE_BYTES = MAX_PEERS * 256
"""Twice the size of a peer id and four numbers with all their digits, for each peer."""


def reputation_memory(path: Path, network_id: str) -> JsonMemory:
    """Return the store for `Reputation.to_dict` of that network in the file at `path`."""
    return JsonMemory(
        path=path,
        owner=("network_id", network_id),
        key="servers",
        what="what is known of servers",
        max_bytes=MAX_FILE_BYTES,
    )
