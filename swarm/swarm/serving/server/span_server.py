"""Serves a node's span of a model: loads it, announces it, serves sessions on it, and leaves gracefully.

`deployment` computes, `connection_server` takes sessions, `forward_server` takes calls on whole sequences, `challenges`
asks other servers to prove what they hold, and `span_announcer` announces. The task started by `start` runs all of
them; `close` ends it. If a defect ends it earlier, the server ends all sessions at once, and `failure` says why.
Handlers run in the network's tasks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path

from swarm_protocol.errors import ConfigError, PeerRefused, SessionError, SwarmError
from swarm_protocol.manifest_messages import MANIFEST_METHOD, POSSESSION_METHOD, ModelManifestRequest
from swarm_protocol.records import ServeRecord, ServeState
from swarm_protocol.serving_messages import FILES_METHOD, KV_METHOD, FilesRequest
from swarm_protocol.session_frames import SESSION_METHOD

from swarm.network.interface import Network, StreamHandler, UnaryHandler
from swarm.network.membership import Membership
from swarm.serving.engine.engine import EngineLoad
from swarm.serving.evidence.server_convictions import ServerConvictions
from swarm.serving.grammar.grammar_masks import GrammarPool
from swarm.serving.server.connection_server import ConnectionServer
from swarm.serving.server.deployment import Deployment, ServerOptions
from swarm.serving.server.forward_server import ForwardServer
from swarm.serving.server.possession_server import PeerChallenges, PossessionServer
from swarm.serving.server.server_session import ServerSession
from swarm.serving.server.span_announcer import SpanAnnouncer

logger = logging.getLogger(__name__)


class SpanServer:
    """Serves blocks `[start, end)` of the model in `model_dir` under the name `name`.

    `deployed` has the announced blocks; it is None before `start`, after `close`, and while a move frees them to load
    others. `deployments` are all spans in memory: the announced one, and those that sessions are leaving.
    """

    def __init__(
        self,
        network: Network,
        membership: Membership,
        model_dir: Path,
        *,
        name: str,
        start: int,
        end: int,
        options: ServerOptions | None = None,
    ) -> None:
        self.name = name
        self.start_block = start
        self.end_block = end
        self.options = options or ServerOptions()
        self.failure: SessionError | None = None
        self.announcer = SpanAnnouncer(membership, self)
        self._grammars = GrammarPool(model_dir / "tokenizer.json")
        self.connections = ConnectionServer(
            network,
            name,
            self.options,
            offer=self._offered,
            on_changed=self.announcer.changed,
            grammars=self._grammars,
        )
        self.calls = ForwardServer(
            name, self._offered, provider_of=network.provider_of, failpoints=self.options.failpoints
        )
        self.possession = PossessionServer(
            network,
            name,
            offered=lambda: None if self.deployed is None else self.deployed.loaded,
            users=lambda: {session.client for session in self.sessions},
        )
        self.convictions = self.options.convictions or ServerConvictions(network, membership)
        self.challenges = PeerChallenges(
            network,
            membership,
            name,
            self.convictions,
            offered=lambda: None if self.deployed is None else self.deployed.loaded.manifest,
        )
        self._network = network
        self._model_dir = model_dir
        self.state: ServeState = "joining"
        self.deployed: Deployment | None = None
        self.deployments: Sequence[Deployment] = ()
        self._num_freed_tokens = 0
        self._tasks: asyncio.TaskGroup | None = None
        self._main: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load, measure, serve and announce. Raises ConfigError or IntegrityError, and then leaves nothing behind.

        Call it once for each object. After `close`, another server of the model may be started on the network.
        """
        deployed = await Deployment.load(self._model_dir, self.start_block, self.end_block, self.options)
        try:
            for method, answer in self._calls.items():
                await self._network.serve(method, answer)
            await self.convictions.serve(self.name)
            for method, handle in self._streams.items():
                await self._network.serve_stream(method, handle)
        except BaseException as error:
            if not isinstance(error, ValueError):  # then another server of the model is registered
                self._release()
            await deployed.close()
            raise
        self.deployed, self.deployments = deployed, (deployed,)
        self.state = "serving"
        self._main = asyncio.create_task(self._run(), name=f"serving {self.name}")

    async def move(
        self,
        start: int,
        end: int,
        *,
        options: ServerOptions,
        still_wanted: Callable[[], Awaitable[bool]],
        within_s: float,
    ) -> bool:
        """Serve `[start, end)` instead: load it, ask `still_wanted`, switch, and let open sessions leave `within_s`.

        The old blocks answer until the new ones can, and longer for sessions that are leaving, so both need memory
        meanwhile. Return whether it has moved. Raises like `start`.
        """
        new = await Deployment.load(self._model_dir, start, end, options)
        try:
            is_wanted = (
                self.state == "serving" and new.loaded.revision == self.revision and await still_wanted()
            ) and self.state == "serving"
        except BaseException:
            await new.close()
            raise
        if not is_wanted:
            await new.close()
            return False
        old, tasks = self._ready, self._take(new)
        tasks.create_task(self._retire(old, self.sessions, within_s), name="retire a span")
        self.announcer.announce()
        return True

    async def _retire(self, old: Deployment, leaving: Collection[ServerSession], within_s: float) -> None:
        await self._let_leave(leaving, within_s)
        await self._free(old)

    async def _free(self, old: Deployment) -> None:
        if self.deployed is old:
            self.deployed = None
        await old.close()
        self.deployments = [each for each in self.deployments if each is not old]
        self._num_freed_tokens += old.engine.num_tokens

    async def leave_and_move(self, start: int, end: int, *, options: ServerOptions, within_s: float) -> None:
        """Move without memory for both spans: first let sessions leave and free the old blocks.

        Raises like `start`, and then serves the old blocks again; if these cannot be loaded either, `failure` says so.
        """
        old, old_options, revision = (self.start_block, self.end_block), self.options, self.revision
        await self.drain(within_s=within_s)
        if self.deployed is not None:
            await self._free(self.deployed)
        try:
            new = await Deployment.load(self._model_dir, start, end, options)
            if new.loaded.revision != revision:
                await new.close()
                raise ConfigError(f"{self._model_dir} has changed", remedy="start the node again")
        except (SwarmError, RuntimeError, MemoryError, OSError):
            try:
                again = await Deployment.load(self._model_dir, *old, old_options)
            except (SwarmError, RuntimeError, MemoryError, OSError) as error:
                self._fail(error)
                raise
            await self._resume(again)
            raise
        await self._resume(new)

    async def _resume(self, deployed: Deployment) -> None:
        if self._main is None or self.failure is not None:
            await deployed.close()  # the server has been closed, or has failed
            return
        self._take(deployed)
        self.state = "serving"
        self.announcer.announce()

    def _take(self, new: Deployment) -> asyncio.TaskGroup:
        """Serve `new` from now on, and return the group of the server's tasks."""
        assert self._tasks is not None, "only while running"
        self.deployed, self.deployments = new, [*self.deployments, new]
        self.options = new.options
        self.start_block, self.end_block = new.blocks
        self.announcer.moving_to = (0, 0)
        new.start(self._tasks)
        return self._tasks

    async def drain(self, *, within_s: float = 30.0) -> None:
        """Accept no new sessions, ask the open ones to leave, and end those that have not left `within_s`."""
        self.state = "draining"
        self.announcer.announce()
        await self._let_leave(self.sessions, within_s)

    async def _let_leave(self, sessions: Collection[ServerSession], within_s: float) -> None:
        self.connections.leave(sessions, within_s)
        if tasks := {session.task for session in sessions if session.task is not None}:
            await asyncio.wait(tasks, timeout=within_s)
        self.connections.end(sessions, _leaving())

    async def close(self) -> None:
        """End every session at once and withdraw the record. A second call does nothing."""
        if self._main is None:
            return
        main, self._main = self._main, None
        self._leave()
        self._release()
        main.cancel()
        try:
            # not `await main`, which could not tell its own cancellation from that of the caller
            await asyncio.wait({main})
            if self.options.convictions is None:
                await self.convictions.close()
            for deployed in self.deployments:
                await deployed.close()
        finally:
            for deployed in self.deployments:
                deployed.engine.close(wait=False)
            self._grammars.close()
            self.deployed, self.deployments = None, ()
        if not main.cancelled():
            main.result()

    @property
    def _calls(self) -> Mapping[str, UnaryHandler]:
        return {
            f"{FILES_METHOD}/{self.name}": self._give_files,
            f"{MANIFEST_METHOD}/{self.name}": self._give_manifest,
            f"{POSSESSION_METHOD}/{self.name}": self.possession.answer,
        }

    @property
    def _streams(self) -> Mapping[str, StreamHandler]:
        return {
            f"{SESSION_METHOD}/{self.name}": self.connections.serve,
            f"{KV_METHOD}/{self.name}": self.connections.serve_kv,
            **self.calls.methods,
        }

    def _release(self) -> None:
        """Release the methods, so that another server of the model may serve them."""
        self._network.release(*self._calls, *self._streams, *self.convictions.methods_of(self.name))

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as self._tasks:
                assert self.deployed is not None
                self.deployed.start(self._tasks)
                self._tasks.create_task(self.connections.run(), name="connections")
                self._tasks.create_task(self.announcer.run(), name="announce load")
                self._tasks.create_task(self.challenges.run(), name=f"challenge servers of {self.name}")
        except ExceptionGroup as group:
            self._fail(group.exceptions[0])
        finally:
            self._tasks = None

    def _fail(self, cause: Exception) -> None:
        """End every session and withdraw the record, because the engine has ended, or there are no blocks any more."""
        logger.error("the server of %s has failed", self.name, exc_info=cause)
        self.failure = SessionError(
            f"{self.name} is served here no more: {type(cause).__name__}: {cause}",
            remedy="start the node again; its log says more",
        )
        self._leave()

    def _leave(self) -> None:
        """End every session now and withdraw the record."""
        self.state = "draining"
        self.connections.end(self.sessions, _leaving())
        self.announcer.withdraw()

    @property
    def record(self) -> ServeRecord:
        """The record to announce now. Valid only while started."""
        return self.announcer.record

    @property
    def sessions(self) -> tuple[ServerSession, ...]:
        """The open sessions, including those on blocks that are no longer announced."""
        return tuple(self.connections.sessions.values())

    @property
    def load(self) -> EngineLoad:
        """The current load of the announced blocks; zero while there are none."""
        return self.deployed.engine.load if self.deployed is not None else EngineLoad()

    @property
    def revision(self) -> str:
        return self._ready.loaded.revision

    @property
    def num_tokens(self) -> int:
        """The number of positions that were run since the start."""
        return self._num_freed_tokens + sum(deployed.engine.num_tokens for deployed in self.deployments)

    @property
    def _ready(self) -> Deployment:
        assert self.deployed is not None, "not started, or closed"
        return self.deployed

    def _offered(self) -> Deployment:
        """Return the deployment for new sessions and for calls on whole sequences. Raises PeerRefused if there is
        none."""
        if self.state != "serving" or self.deployed is None:
            raise PeerRefused("the server takes no new sessions", remedy="ask another server")
        return self.deployed

    async def _give_files(self, _peer_id: str, request: bytes) -> bytes:
        FilesRequest.from_bytes(request)
        if self.deployed is None:
            raise PeerRefused(f"{self.name} is no longer served here", remedy="ask another server")
        return self.deployed.loaded.files

    async def _give_manifest(self, _peer_id: str, request: bytes) -> bytes:
        asked = ModelManifestRequest.from_bytes(request)
        manifest = self.deployed.loaded.manifest if self.deployed is not None else None
        if manifest is None or manifest.digest != asked.digest:
            raise PeerRefused(f"that manifest of {self.name} is not served here", remedy="ask another server")
        return manifest.signed


def _leaving() -> PeerRefused:
    return PeerRefused("the server is leaving", remedy="go on with another server")
