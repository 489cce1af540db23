"""Caches the tokenizers and shapes of the models that a client asks for.

There is one cache per client, on its event loop. It keeps the assets of MAX_MODELS models, each with its own process.
Assets that make way for others keep their process until the last answer that uses them has ended.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar
from weakref import WeakSet, WeakValueDictionary

from swarm_protocol.errors import (
    IntegrityError,
    PeerError,
    PeerRefused,
    PeerTimeout,
    PeerUnreachable,
    PeerViolation,
    SwarmError,
)
from swarm_protocol.manifest_messages import PublishedManifest
from swarm_protocol.records import ServeRecord

from swarm.child_process import ChildProcess
from swarm.network.interface import Network
from swarm.newest_items import NewestItems
from swarm.serving.manifest.verification import complaint_about
from swarm.serving.session.peer_health import PeerHealth
from swarm.serving.session.stage_connections import DIAL_S
from swarm.serving.tokenizer.model_assets import (
    ModelAssets,
    TokenizerLimits,
    TokenizerProcess,
    fetch_files,
    open_assets,
    start_child,
)

MAX_MODELS = 8

MAX_PROCESSES = 2 * MAX_MODELS
"""Maximum models whose assets are kept, in use or being loaded. Anyone may announce models and ask for them."""

MAX_BAD_FILES = 3
"""Maximum servers with unusable files that are tried for one request. Each may take as long as a tokenizer may take to
load."""

MAX_PINGED = 16
"""Maximum servers that are pinged at once when the first one gives no answer. A model may have thousands."""

PATIENCE_S = 5.0
"""Seconds after which one more server is asked, if those that were asked sent nothing in the last half of this time. A
server may answer pings, and send no files."""

TRICKLE_S = 25.0
"""Seconds after which one more server is asked although bytes come: they may be a trickle, or of other requests."""

MAX_ASKED = 4
"""Maximum servers that are asked for the files of one model at a time. One more takes the place of one that sends
nothing."""

FETCH_S = 240.0
"""Seconds after which no server is asked for the files of a model any more, and those that were asked are given up."""

BAD_FILES_S = 600.0
"""Seconds for which a server whose files were unusable is asked for them only after all others."""

MAX_REMEMBERED = 1024

RETRY_AFTER_S = 10.0

AssetsKey = tuple[str, str, bytes]
"""A model's name and revision, and the digest of its manifest."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class AssetsCache:
    """Keeps the assets of the models that a client asked for last, and fetches missing ones."""

    def __init__(self, network: Network, health: PeerHealth, limits: TokenizerLimits) -> None:
        self._network = network
        self._health = health
        self._limits = limits
        self._assets = NewestItems[AssetsKey, ModelAssets](MAX_MODELS)
        self._loading: WeakValueDictionary[AssetsKey, asyncio.Lock] = WeakValueDictionary()
        self._num_loading = 0
        self._collected_s = -math.inf
        # assets that were dropped from the cache may still be in use
        self._opened: WeakSet[ModelAssets] = WeakSet()
        self._ready: ChildProcess | None = None
        self._bad_since = NewestItems[tuple[str, str, str], float](MAX_REMEMBERED)

    async def warm_up(self) -> None:
        """Start a process in advance, so that the first model does not wait a second for it."""
        if self._ready is None and not self._opened:
            self._ready = await asyncio.to_thread(start_child, self._limits)

    def close(self) -> None:
        """End the tokenizers' processes."""
        for assets in list(self._opened):
            assets.close()
        self._assets.clear()
        if self._ready is not None:
            self._ready.kill()
            self._ready = None

    async def get(
        self,
        model: str,
        servers: Mapping[str, ServeRecord],
        published: PublishedManifest | None,
        own_files: Mapping[str, bytes] | None = None,
    ) -> ModelAssets:
        """Return the assets of the servers' revision, which must match the `published` manifest if there is one.

        They are made from the client's `own_files` of this revision, if given, else from the files of a server. Raises
        PeerError (PeerRefused while MAX_PROCESSES models are in use), IntegrityError.
        """
        revision = next(iter(servers.values())).revision
        key = model, revision, b"" if published is None else published.digest
        # one lock for each model, so that stalling servers of one model do not delay another model
        loading = self._loading.setdefault(key, asyncio.Lock())
        async with loading:
            if key not in self._assets:
                with self._room():
                    if own_files is not None:
                        assets = await self._open(model, revision, own_files)
                    else:
                        willing = [peer_id for peer_id, record in servers.items() if record.state == "serving"]
                        assets = await self._from_servers(model, revision, willing, published)
                # the process of dropped assets ends once no answer uses them any more
                self._assets[key] = assets
            return self._assets[key]

    def _is_full(self) -> bool:
        return len(self._opened) + self._num_loading >= MAX_PROCESSES

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Count one more model as being loaded while the context lasts. Raises PeerRefused if there are too many."""
        now_s = asyncio.get_running_loop().time()
        if self._is_full() and now_s >= self._collected_s + RETRY_AFTER_S:
            gc.collect()  # an answer that failed refers to itself through its error, and would keep its assets
            self._collected_s = now_s
        if self._is_full():
            raise PeerRefused(
                f"the tokenizers of {MAX_PROCESSES} models are in use here",
                remedy="ask again later, or for one of these models",
                retry_after_s=RETRY_AFTER_S,
            )
        self._num_loading += 1
        try:
            yield
        finally:
            self._num_loading -= 1

    async def _from_servers(
        self, model: str, revision: str, peer_ids: Sequence[str], published: PublishedManifest | None
    ) -> ModelAssets:
        """Return the assets from the first server that sends usable files. While none of those that were asked is heard
        of for PATIENCE_S, or each TRICKLE_S, one more is asked."""
        failure: SwarmError = PeerUnreachable(f"nobody gave the files of {model}", remedy="try again in a moment")
        clock, num_bad, asked_s = asyncio.get_running_loop().time, 0, -math.inf
        until_s = clock() + FETCH_S
        left, silent = self._by_trust(model, revision, peer_ids), set[str]()
        asked: dict[asyncio.Task[dict[str, bytes]], str] = {}
        try:
            while (left or asked) and num_bad < MAX_BAD_FILES and clock() < until_s:
                is_trickle = clock() >= asked_s + TRICKLE_S
                mute = [task for task, peer_id in asked.items() if not self._is_heard(peer_id)]
                if left and (len(mute) == len(asked) or (is_trickle and len(asked) < MAX_ASKED)):
                    await _give_up(mute[: max(0, len(asked) + 1 - MAX_ASKED)], asked)
                    peer_id, asked_s = await self._next_server(left, silent, until_s), clock()
                    asked[asyncio.create_task(fetch_files(self._network, model, revision, peer_id))] = peer_id
                done, _ = await asyncio.wait(asked, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    peer_id = asked.pop(task)
                    try:
                        files = task.result()
                        if published is not None:
                            self._compare(published, files, peer_id)
                        return await self._open(model, revision, files)
                    except (PeerUnreachable, PeerTimeout) as error:
                        failure = error
                        self._health.failed(peer_id, error)
                    except PeerError as error:
                        failure = error
                    except IntegrityError as error:
                        failure, num_bad = error, num_bad + 1
                        self._bad_since[model, revision, peer_id] = clock()
        finally:
            await _give_up([*asked], asked)
        raise failure

    def _is_heard(self, peer_id: str) -> bool:
        return self._network.links.was_heard(peer_id, within_s=PATIENCE_S / 2)

    async def _next_server(self, left: list[str], silent: set[str], until_s: float) -> str:
        """Remove and return the server of `left` to ask next. Those that do not answer a ping may be gone, or only slow
        to reach: they are added to `silent`, and asked after all others. Look for another one until `until_s`."""
        clock = asyncio.get_running_loop().time
        while clock() < until_s and left[0] not in silent and await self._health.silent(left[:1], timeout_s=DIAL_S):
            silent |= {left[0], *await self._health.silent(left[1 : 1 + MAX_PINGED], timeout_s=DIAL_S)}
            left.sort(key=silent.__contains__)
        return left.pop(0)

    def _compare(self, published: PublishedManifest, files: Mapping[str, bytes], peer_id: str) -> None:
        """Check the files against the manifest. Raises PeerViolation if they differ; the server is then not asked
        again."""
        if complaint := complaint_about(published.manifest, files):
            difference = f"does not serve {published.manifest.name} as it was published: {complaint}"
            self._health.distrust(peer_id, f"it {difference}")
            violation = PeerViolation(
                f"{peer_id} {difference}",
                remedy="ask again: other servers are asked first",
                peer_id=peer_id,
            )
            logger.warning("%s; it is not used any more", violation.message)
            raise violation

    async def _open(self, model: str, revision: str, files: Mapping[str, bytes]) -> ModelAssets:
        ready, self._ready = self._ready, None
        process = await asyncio.to_thread(TokenizerProcess, model, files, self._limits, ready)
        assets = await open_assets(model, revision, process)
        self._opened.add(assets)
        return assets

    def _by_trust(self, model: str, revision: str, peer_ids: Sequence[str]) -> list[str]:
        now_s = asyncio.get_running_loop().time()
        for key in [key for key, at_s in self._bad_since.items() if now_s - at_s >= BAD_FILES_S]:
            del self._bad_since[key]
        failing, distrusted = self._health.failing(), self._health.distrusted
        willing = [peer_id for peer_id in peer_ids if peer_id not in distrusted]
        return sorted(
            willing, key=lambda peer_id: (self._bad_since.get((model, revision, peer_id), 0.0), peer_id in failing)
        )


async def _give_up(tasks: Sequence[asyncio.Task[T]], asked: dict[asyncio.Task[T], str]) -> None:
    """End `tasks`, and take them out of `asked`. Whatever they return or raise is ignored."""
    for task in tasks:
        task.cancel()
        del asked[task]
    await asyncio.gather(*tasks, return_exceptions=True)
