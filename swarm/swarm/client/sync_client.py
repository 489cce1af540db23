"""Implements the SDK for code without an event loop: runs an `AsyncClient` in its own thread, with a libp2p host and a
fresh identity."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import threading
from collections.abc import Coroutine, Generator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from swarm_protocol.errors import SessionError, StartError, SwarmError
from swarm_protocol.network_invitation import NetworkInvitation

from swarm.client.async_client import AsyncClient
from swarm.client.catalog import ModelStatus
from swarm.client.publishers import KnownPublishers, UsedRevisions
from swarm.client.request import GenerationRequest, TextClient
from swarm.client.text_at_home import KeptModels
from swarm.ended_tasks import end_tasks
from swarm.serving.checking.spot_checks import DEFAULT_SHARE
from swarm.serving.session.generate import Generation, Token
from swarm.serving.tokenizer.model_assets import Message

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class Client(TextClient[Generator[Token, None, None]]):
    """A client for code without an event loop, which wraps `AsyncClient`. It is a context manager, and may be used from
    several threads."""

    def __init__(
        self,
        *,
        peers: Sequence[str] = (),
        network_id: str = "",
        pins: Mapping[str, str] | None = None,
        used: UsedRevisions | None = None,
        publishers: KnownPublishers | Sequence[str] = (),
        invite: str | NetworkInvitation | None = None,
        spot_check: float = DEFAULT_SHARE,
        text_at_home: KeptModels | None = None,
    ) -> None:
        """Take the arguments of `AsyncClient.connect`."""
        self._connect = partial(
            AsyncClient.connect,
            peers=peers,
            network_id=network_id,
            pins=pins,
            used=used,
            publishers=publishers,
            invite=invite,
            spot_check=spot_check,
            text_at_home=text_at_home,
        )
        self._client: AsyncClient | None = None
        self._generations: WeakSet[Generation] = WeakSet()
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._thread: threading.Thread | None = None
        # no call is scheduled after the end is. Reentrant, since an iterator may be collected while the lock is held
        self._open = threading.RLock()

    def __enter__(self) -> Client:
        """Connect. Raises ConfigError, StartError, and SessionError for a client that is connected."""
        if self._client is not None:
            raise SessionError("the client is connected already", remedy="use one `with` block for each Client")
        connected: Future[AsyncClient] = Future()
        self._thread = threading.Thread(target=self._run, args=(connected,), name="swarm-client", daemon=True)
        try:
            self._thread.start()
            self._client = connected.result()
        except SwarmError:
            self._thread.join()
            raise
        except BaseException:
            connected.cancel()  # interrupted, as by Ctrl-C: the thread ends itself once it has connected or failed to
            raise
        atexit.register(self.close)  # the end of a program stops the thread, for which an unread answer would wait
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End running generations, the host and the thread. A second call does nothing, nor does one in a forked
        process."""
        if self._thread is None or not self._thread.is_alive():
            return
        with self._open:
            if self._client is not None:
                self._client = None
                atexit.unregister(self.close)
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def models(self) -> tuple[ModelStatus, ...]:
        """Return the models that are served at least in part, by name. Raises PeerTimeout."""
        return self._wait(self._connected.models())

    def model(self, name: str) -> ModelStatus | None:
        """Return the status of one model, or None if nobody serves it. Raises as `AsyncClient.model`."""
        return self._wait(self._connected.model(name))

    def context_tokens(self, model: str) -> int:
        """Return the maximum number of tokens of a prompt and its answer together. Raises as `generate`."""
        return self._wait(self._connected.context_tokens(model))

    def has_chat_template(self, model: str) -> bool:
        """Return whether the model has a chat template. Raises as `generate`."""
        return self._wait(self._connected.has_chat_template(model))

    def default_sampling(self, model: str) -> Mapping[str, float]:
        """Return the model's own sampling options, as `AsyncClient.default_sampling` does. Raises as `generate`."""
        return self._wait(self._connected.default_sampling(model))

    def answer(self, request: GenerationRequest) -> Generator[Token, None, None]:
        """Answer a request as `generate` does. Closing or dropping the iterator frees the chain."""
        generation = self._connected.answer(request)
        self._generations.add(generation)
        return self._iterate(generation)

    def trace(self) -> dict[str, Any]:
        """Return the trace of the generation that began last, or an empty dict before the first one.

        It has `hops` (servers, spans, ms), `replays`, `failover_ms` and token counts. Raises SessionError.
        """
        return self._connected.trace()

    def tokenize(self, text: str | Sequence[Message], *, model: str) -> list[int]:
        """Return the token ids of a text, or of messages by the model's chat template. Raises as `generate`."""
        return self._wait(self._connected.tokenize(text, model=model))

    def decode(self, token_ids: Sequence[int], *, model: str) -> str:
        """Return the text of tokens, without special ones. Raises as `generate`."""
        return self._wait(self._connected.decode(token_ids, model=model))

    def embed(self, text: str | Sequence[int] | Tensor, *, model: str) -> Tensor:
        """Return the input embeddings of a text or of token ids: float32 [T, H], or [B, T, H] for a tensor [B, T].

        Raises as `forward`.
        """
        return self._wait(self._connected.embed(text, model=model))

    def pooled(self, text: str | Sequence[int], *, model: str) -> Tensor:
        """Return the mean of a text's last hidden states, after the last norm, scaled to length 1: float32 [H].

        Raises as `forward`, and ConfigError for a text that is empty or over the model's context.
        """
        return self._wait(self._connected.pooled(text, model=model))

    def forward(
        self, x: Tensor, *, model: str, start: int = 0, end: int | None = None, head: bool = False, codec: str = "raw"
    ) -> Tensor:
        """Compute blocks as `AsyncClient.forward` does; the backward pass may run in any thread, until the client is
        closed."""
        from swarm.client.remote_blocks import ForwardOptions  # noqa: PLC0415 - brings torch
        from swarm.client.tensor_calls import attach, check_tensor  # noqa: PLC0415 - brings torch

        check_tensor(x)
        wanted = ForwardOptions(start=start, end=end, head=head, codec=codec)
        return attach(x, self._wait(self._connected.run_forward(x.detach(), model, wanted)), self._wait)

    def _iterate(self, generation: Generation) -> Generator[Token, None, None]:
        tokens = aiter(generation)
        advancing: asyncio.Task[Any] | None = None

        async def advance() -> Token | None:
            nonlocal advancing
            advancing = asyncio.current_task()
            return await anext(tokens, None)

        async def end() -> None:
            # the thread that waited for the token was interrupted
            if advancing is not None and not advancing.done():
                await end_tasks(advancing)
            await generation.aclose()

        try:
            while (token := self._wait(advance())) is not None:
                yield token
        finally:
            # a closed client has closed the generation already
            with contextlib.suppress(SessionError):
                self._wait(end())

    @property
    def _connected(self) -> AsyncClient:
        if self._client is None:
            raise SessionError("the client is not connected", remedy="use it as: with Client(peers=[…]) as client")
        return self._client

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        closed = SessionError("the client has been closed", remedy="read answers inside its `with` block")
        if self._client is not None and not (self._thread and self._thread.is_alive()):
            # a forked process has no threads but its own, and nobody there releases a lock that another thread held
            coroutine.close()
            raise SessionError("this client belongs to another process", remedy="open a client in each process")
        with self._open:
            if self._client is None:
                coroutine.close()
                raise closed
            answer = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return answer.result()
        except CancelledError:
            raise closed from None

    def _run(self, connected: Future[AsyncClient]) -> None:
        """Run the client for the life of the thread."""
        try:
            with asyncio.Runner() as runner:
                runner.run(self._live(connected))
        except Exception as error:
            if connected.cancelled():
                return
            if connected.done():
                raise
            if isinstance(error, OSError):
                too_many = error.errno in (errno.EMFILE, errno.ENFILE)
                remedy = "close some files, or allow more with `ulimit -n 4096`" if too_many else ""
                error = StartError(f"the client cannot start: {error}", remedy=remedy)
            connected.set_exception(error)

    async def _live(self, connected: Future[AsyncClient]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with self._connect() as client:
            if not connected.set_running_or_notify_cancel():
                return
            connected.set_result(client)
            await self._stop.wait()
            for generation in list(self._generations):
                # a generation that another thread waits for ends with the network
                with contextlib.suppress(RuntimeError):
                    await generation.aclose()
