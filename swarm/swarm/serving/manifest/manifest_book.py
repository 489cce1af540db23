"""The signed manifests of models, by digest, which a client fetches from the servers that announce them.

Each client has one book, on its event loop. It keeps the last used manifests, up to MAX_BOOK_BYTES. It checks
signature, digest and name of a manifest before it keeps it.

Any server that announces the digest may be asked, since the digest identifies the manifest.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping, Sequence

from swarm_protocol.errors import IntegrityError, PeerError, PeerUnreachable, PeerViolation, SwarmError
from swarm_protocol.manifest_messages import (
    MANIFEST_METHOD,
    ModelManifestRequest,
    PublishedManifest,
    SignedManifest,
    open_manifest,
)
from swarm_protocol.records import ServeRecord

from swarm.ended_tasks import end_tasks
from swarm.network.interface import Network
from swarm.newest_items import NewestItems

MAX_BOOK_BYTES = 2 * 2**20
"""A manifest has some kilobytes, and takes up to thirty times as much in memory."""

MAX_FETCHED = 4
"""Manifests of one model that are fetched at a time. Anyone can announce more."""

RETRY_S = 60.0
"""Time after which a manifest that no server gave is asked for again."""

MAX_FAILED = 256

logger = logging.getLogger(__name__)


FETCH_TIMEOUT_S = 10.0
"""A manifest has some kilobytes, 512 KiB at most."""

MAX_ASKED_FOR_A_MANIFEST = 3
"""Servers that are asked for one manifest."""


async def fetch_manifest(network: Network, model: str, digest: bytes, peer_ids: Iterable[str]) -> PublishedManifest:
    """Return the manifest of `model` with `digest` from the first of a few servers that gives it.

    Raises the PeerError of the last server.
    """
    failure: PeerError = PeerUnreachable(f"no server gave the manifest of {model}", remedy="try again in a moment")
    for peer_id in list(peer_ids)[:MAX_ASKED_FOR_A_MANIFEST]:
        try:
            return await _from(network, model, digest, peer_id)
        except PeerError as error:
            failure = error
    raise failure


async def _from(network: Network, model: str, digest: bytes, peer_id: str) -> PublishedManifest:
    request = ModelManifestRequest(digest=digest).to_bytes()
    try:
        answer = await network.call(
            peer_id,
            f"{MANIFEST_METHOD}/{model}",
            request,
            timeout_s=FETCH_TIMEOUT_S,
            max_bytes=SignedManifest.MAX_BYTES,
        )
        published = open_manifest(answer)
    except PeerError:
        raise
    except IntegrityError as error:
        raise PeerViolation("the server gave a manifest with a wrong signature", peer_id=peer_id) from error
    except SwarmError as error:
        raise PeerError(error.message, peer_id=peer_id) from error
    if published.digest != digest or published.manifest.name != model:
        raise PeerViolation(f"the server gave another manifest than the one of {model} it announces", peer_id=peer_id)
    return published


class ManifestBook:
    """Keeps manifests, and fetches those that servers announce. `close` cancels running fetches."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._known: dict[bytes, PublishedManifest] = {}
        self._fetching: dict[bytes, asyncio.Task[None]] = {}
        self._failed_s = NewestItems[bytes, float](MAX_FAILED)
        self._warned_s = NewestItems[str, float](MAX_FAILED)

    def known(self, digest: bytes) -> PublishedManifest | None:
        """Return the manifest with `digest` if the book has it."""
        if (published := self._known.pop(digest, None)) is not None:
            self._known[digest] = published
        return published

    async def learn(self, model: str, servers: Mapping[str, ServeRecord], *, within_s: float) -> None:
        """Fetch the manifests of `model` that these servers announce and the book lacks; wait at most `within_s`.

        Slower fetches go on in the background.
        """
        now_s = asyncio.get_running_loop().time()
        holders: dict[bytes, list[str]] = {}
        for peer_id, record in servers.items():
            if record.manifest and record.state == "serving" and record.manifest not in self._known:
                holders.setdefault(record.manifest, []).append(peer_id)
        due = [each for each in holders if now_s - self._failed_s.get(each, now_s - RETRY_S) >= RETRY_S]
        # manifests that most servers announce come first
        for digest in sorted(due, key=lambda each: -len(holders[each]))[:MAX_FETCHED]:
            if digest not in self._fetching:
                self._fetching[digest] = asyncio.create_task(
                    self._fetch(model, digest, holders[digest]), name=f"fetch a manifest of {model}"
                )
        waiting = {self._fetching[digest] for digest in holders if digest in self._fetching}
        if waiting and within_s:
            await asyncio.wait(waiting, timeout=within_s)

    async def close(self) -> None:
        await end_tasks(*self._fetching.values())

    async def _fetch(self, model: str, digest: bytes, holders: Sequence[str]) -> None:
        try:
            self._keep(await fetch_manifest(self._network, model, digest, holders))
        except PeerError as error:
            self._failed_s[digest] = now_s = asyncio.get_running_loop().time()
            if now_s - self._warned_s.get(model, -math.inf) >= RETRY_S:  # anyone can announce thousands
                self._warned_s[model] = now_s
                logger.warning("no manifest of %s: %s", model, error)
        finally:
            del self._fetching[digest]

    def _keep(self, published: PublishedManifest) -> None:
        self._known[published.digest] = published
        while sum(len(each.signed) for each in self._known.values()) > MAX_BOOK_BYTES:
            del self._known[next(iter(self._known))]
