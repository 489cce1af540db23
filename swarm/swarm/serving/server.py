"""A node's span of a model: loads it, announces it, serves sessions on it, and leaves in order.

`session_server` holds one session's conversation, `engine` the compute. The task started by `start` runs the engine
and keeps the announcement fresh; `close` ends it. Should it end before that, by a defect, then the server leaves as
when it is drained, at once, and `failure` says why. Handlers run in the network's tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from swarm_protocol.errors import PeerRefused, PeerTimeout, SessionError
from swarm_protocol.records import ServeRecord, ServeState
from swarm_protocol.serving_messages import (
    FILES_METHOD,
    SESSION_METHOD,
    FilesRequest,
    Open,
    Ready,
)

from swarm.network.interface import EndOfStream, Network, Stream
from swarm.network.membership import Membership
from swarm.serving.blocks import Span
from swarm.serving.engine import Engine
from swarm.serving.loading import LoadedSpan, load
from swarm.serving.server_options import ServerOptions
from swarm.serving.session_server import ServedSession, serve_steps
from swarm.serving.sharing import Sharing

logger = logging.getLogger(__name__)

T = TypeVar("T")

ANNOUNCE_S = 3.0
"""How often a changed load is published: often enough to spread sessions, rarely enough for the DHT."""

OPEN_S = 10.0
"""What a new stream gets to say what it wants."""

MAX_VIEWS = 32
"""Parts of the span that clients asked for lately; each is some modules that share the weights."""

DRAIN_GRACE_S = 0.1
"""What a session that was asked to leave gets to read the refusal, before the server ends."""


class SpanServer:
    """Serves blocks `[start, end)` of the model in `model_dir` under the name `name`."""

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
        self.engine = Engine()
        self.sessions: set[ServedSession] = set()
        self.failure: SessionError | None = None
        self._sharing = Sharing(self.options.max_sessions)
        self._network = network
        self._membership = membership
        self._model_dir = model_dir
        self._state: ServeState = "joining"
        self._loaded: LoadedSpan | None = None
        self._views: dict[tuple[int, int], Span] = {}
        self._changed = asyncio.Event()
        self._emptied = asyncio.Event()
        self._main: asyncio.Task[None] | None = None

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load, measure, serve, announce. Raises ConfigError or IntegrityError, and then nothing is left behind.

        Once in the life of a network: a method is served once.
        """
        try:
            self._loaded = await self._in_engine(load, self._model_dir, self.start_block, self.end_block, self.options)
            await self._network.serve(f"{FILES_METHOD}/{self.name}", self._give_files)
            await self._network.serve_stream(f"{SESSION_METHOD}/{self.name}", self._serve_session)
        except BaseException:
            # loading may take minutes more, unseen
            self.engine.close(wait=False)
            raise
        self._state = "serving"
        self._main = asyncio.create_task(self._run(), name=f"serving {self.name}")

    async def move(self, start: int, end: int, *, still_wanted: Callable[[], Awaitable[bool]], within_s: float) -> bool:
        """Serve `[start, end)` instead: load it, ask `still_wanted`, switch, and let open sessions leave `within_s`.

        The old blocks answer until the new ones can, so both need memory for that while. Raises as `start`.
        """
        loop = asyncio.get_running_loop()
        loaded = await loop.run_in_executor(None, load, self._model_dir, start, end, self.options)
        if self._state != "serving" or loaded.revision != self._ready.revision or not await still_wanted():
            return False
        self._loaded, self.start_block, self.end_block = loaded, start, end
        self._views.clear()
        for session in self.sessions:
            session.leave_by(loop.time() + within_s)
        self._announce()
        return True

    async def drain(self, *, within_s: float = 30.0) -> None:
        """Take no new sessions, ask the open ones to leave, and return when they have or `within_s` is over."""
        self._state = "draining"
        self._announce()
        for session in self.sessions:
            session.leave_by(asyncio.get_running_loop().time() + within_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s + DRAIN_GRACE_S):
                while self.sessions:
                    self._emptied.clear()
                    await self._emptied.wait()

    async def close(self) -> None:
        """End every session at once and withdraw the record. Idempotent."""
        if self._main is None:
            return
        main, self._main = self._main, None
        self._leave()
        main.cancel()
        try:
            # not `await main`, which could not tell its cancellation from that of whoever closes
            await asyncio.wait({main})
            await asyncio.get_running_loop().run_in_executor(None, partial(self.engine.close, wait=True))
        finally:
            self.engine.close(wait=False)
            self._loaded = None
            self._views.clear()
        if not main.cancelled():
            main.result()

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.engine.run(), name="engine")
                tasks.create_task(self._keep_announcing(), name="announce load")
        except ExceptionGroup as group:
            self._fail(group.exceptions[0])

    def _fail(self, cause: Exception) -> None:
        """Nobody may wait for an engine that has ended, or be sent to it."""
        logger.error("the server of %s has failed", self.name, exc_info=cause)
        self.failure = SessionError(
            f"{self.name} is served here no more: {type(cause).__name__}: {cause}",
            remedy="start the node again; its log says more",
        )
        self._leave()

    def _leave(self) -> None:
        """End every session now and tell everyone."""
        self._state = "draining"
        for session in self.sessions:
            session.leave_by(asyncio.get_running_loop().time())
        self._membership.withdraw("serve", self.name)

    # --- what others are told ---------------------------------------------------------------------------------------

    @property
    def record(self) -> ServeRecord:
        """What is announced now. Only while started."""
        return ServeRecord(
            model=self.name,
            revision=self._ready.revision,
            num_blocks=self._ready.span.num_blocks,
            start=self.start_block,
            end=self.end_block,
            state=self._state,
            prefill_ms_per_token=self._ready.speed.prefill_ms,
            decode_ms_per_block=self._ready.speed.decode_ms,
            free_kv_tokens=self.free_kv_tokens,
            queue_depth=len(self.sessions),
        )

    @property
    def max_kv_tokens(self) -> int:
        """Cache room for all sessions together."""
        return self._ready.kv_tokens

    @property
    def free_kv_tokens(self) -> int:
        """After a move to a longer span, what older sessions hold may be over the new room."""
        return max(0, self._ready.kv_tokens - sum(session.max_tokens for session in self.sessions))

    @property
    def _ready(self) -> LoadedSpan:
        assert self._loaded is not None, "not started, or closed"
        return self._loaded

    async def _in_engine(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.engine.thread, work, *arguments)

    def _announce(self) -> None:
        self._membership.announce(self.record)

    async def _keep_announcing(self) -> None:
        """At once, and then whenever the load has changed, but not more often than each ANNOUNCE_S."""
        while True:
            self._changed.clear()
            self._announce()
            await asyncio.sleep(ANNOUNCE_S)
            await self._changed.wait()

    async def _give_files(self, _peer_id: str, request: bytes) -> bytes:
        FilesRequest.from_bytes(request)
        if self._loaded is None:
            raise PeerRefused(f"{self.name} is no longer served here", remedy="ask another server")
        return self._loaded.files

    # --- sessions ---------------------------------------------------------------------------------------------------

    async def _serve_session(self, peer_id: str, stream: Stream) -> None:
        session: ServedSession | None = None
        try:
            async with asyncio.timeout(OPEN_S) as deadline:
                session = self._admit(peer_id, Open.from_bytes(await stream.receive()), deadline)
                session.wait_for_client()
                await stream.send(Ready(max_step_tokens=session.max_step_tokens).to_bytes())
                await serve_steps(stream, session, self.engine, self.options.faults)
        except EndOfStream:
            pass
        except TimeoutError:
            raise session.refusal() if session else PeerTimeout("nothing was asked for", peer_id=peer_id) from None
        finally:
            if session is not None:
                self._release(session)

    def _admit(self, peer_id: str, wanted: Open, deadline: asyncio.Timeout) -> ServedSession:
        """Reserve cache room. Raises PeerRefused."""
        if self._state != "serving":
            raise PeerRefused("the server takes no new sessions", remedy="ask another server")
        revision = self._ready.revision
        if wanted.revision != revision:
            raise PeerRefused(f"this server has revision {revision} of {self.name}", remedy="look up its record")
        if not self.start_block <= wanted.start < wanted.end <= self.end_block:
            raise PeerRefused(
                f"this server has blocks [{self.start_block}, {self.end_block})", remedy="look up its record"
            )
        if wanted.max_tokens > self._ready.kv_tokens:
            raise PeerRefused(f"a session of {wanted.max_tokens} tokens is over this server's {self._ready.kv_tokens}")
        now_s = asyncio.get_running_loop().time()
        self._sharing.check(peer_id, wanted.max_tokens, self.sessions, self._ready.kv_tokens, now_s=now_s)
        span = self._view(wanted.start, wanted.end)
        session = ServedSession(
            peer_id,
            wanted,
            span,
            max_step_tokens=self._ready.max_step_tokens,
            deadline=deadline,
            idle_s=self.options.idle_s,
        )
        self.sessions.add(session)
        self._changed.set()
        return session

    def _view(self, start: int, end: int) -> Span:
        if (start, end) not in self._views:
            if len(self._views) >= MAX_VIEWS:
                self._views.pop(next(iter(self._views)))
            self._views[start, end] = self._ready.span.view(start, end)
        return self._views[start, end]

    def _release(self, session: ServedSession) -> None:
        self.sessions.discard(session)
        session.cache.free()
        self._changed.set()
        if not self.sessions:
            self._emptied.set()
