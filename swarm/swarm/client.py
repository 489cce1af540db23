"""The SDK: ask a swarm's models for text, from asyncio (`AsyncClient`) or without it (`Client`).

A client holds its tokenizers and what it has learnt about servers; each generation has a session of its own. An
`AsyncClient` belongs to one event loop; a `Client` runs one in its own thread, with a libp2p host and a fresh identity.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakSet, WeakValueDictionary

from swarm_protocol.errors import ConfigError, SessionError, SwarmError
from swarm_protocol.identity import Identity
from swarm_protocol.records import ServeRecord

from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.router.routing import best_revision, missing_spans
from swarm.serving.generate import Token, generate
from swarm.serving.links import Links
from swarm.serving.model_kit import Message, ModelKit, fetch_files, read_kit
from swarm.serving.sampling import Sampling
from swarm.serving.session import Session, SessionOptions
from swarm.serving.trace import Trace

__all__ = ["AsyncClient", "Client", "Generation", "ModelStatus", "Token"]

DEFAULT_NETWORK_ID = "swarm"
DEFAULT_MAX_TOKENS = 256
MAX_MODELS = 8
"""Whose tokenizers and servers are remembered."""

MODELS_FRESH_S = 2.0
"""How long a list of models is good for; a gateway asks for it with each request."""

ENCODE_S = 30.0
"""For a prompt of a million characters, many times over."""

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """What the swarm has of a model. It can answer when no blocks are `missing`."""

    name: str
    revision: str
    num_blocks: int
    num_servers: int
    missing: tuple[tuple[int, int], ...]


class Generation:
    """A running answer. Nothing happens before the first token is asked for; `aclose` frees the chain at any time."""

    def __init__(self, start: Callable[[Trace], AsyncGenerator[Token, None]], model: str) -> None:
        self._trace = Trace(model=model)
        self._tokens = start(self._trace)

    def __aiter__(self) -> AsyncIterator[Token]:
        return self._tokens

    async def aclose(self) -> None:
        await self._tokens.aclose()

    @property
    def num_prompt_tokens(self) -> int:
        """0 until the first token has come."""
        return self._trace.num_prompt_tokens

    def trace(self) -> dict[str, Any]:
        """What has happened so far: `hops` (servers, spans, milliseconds), `replays`, `failover_ms`, token counts."""
        return self._trace.to_dict()


class AsyncClient:
    """Stands on a network and a membership that the caller owns; `connect` makes both."""

    def __init__(self, *, network: Network, membership: Membership, session: SessionOptions | None = None) -> None:
        self._network = network
        self._membership = membership
        self._session = session or SessionOptions()
        self._links = Links()
        self._kits: dict[tuple[str, str], ModelKit] = {}
        self._seen: dict[str, tuple[float, Mapping[str, ServeRecord]]] = {}
        self._loading: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._models: tuple[float, tuple[ModelStatus, ...]] = (-MODELS_FRESH_S, ())
        self._last: Generation | None = None

    @classmethod
    @asynccontextmanager
    async def connect(cls, *, peers: Sequence[str], network_id: str = DEFAULT_NETWORK_ID) -> AsyncIterator[AsyncClient]:
        """Join the network behind `peers` (multiaddrs) as a client with a fresh identity. Raises StartError."""
        # with this come hivemind and the go-libp2p daemon, which an AsyncClient on another network does not need
        from swarm.network.libp2p import Libp2pNetwork, Libp2pOptions  # noqa: PLC0415

        with tempfile.TemporaryDirectory(prefix="swarm-client-") as folder:
            identity_path = Path(folder, "identity")
            Identity.generate().save(identity_path)
            options = Libp2pOptions(identity_path=identity_path, network_id=network_id, peers=tuple(peers))
            network = await Libp2pNetwork.create(options)
            try:
                async with Membership(network) as membership:
                    yield cls(network=network, membership=membership)
            finally:
                await network.close()

    async def models(self) -> tuple[ModelStatus, ...]:
        """The models that somebody serves a part of, by name. Raises PeerTimeout."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._models[0] >= MODELS_FRESH_S:
            names = await self._membership.models()
            found = [_status(name, best_revision(await self._membership.servers(name))) for name in names]
            self._models = (now_s, tuple(status for status in found if status is not None))
        return self._models[1]

    async def model(self, name: str) -> ModelStatus | None:
        """What the swarm has of one model; None if nobody serves it. Raises PeerTimeout."""
        try:
            return _status(name, await self._look_up(name))
        except ValueError:
            return None

    def generate(  # noqa: PLR0913 the names of every other text API
        self,
        *,
        model: str,
        prompt: str | None = None,
        messages: Sequence[Message] | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stream: bool = True,
    ) -> Generation:
        """Continue `prompt`, or answer `messages` by the model's chat template.

        Iterating yields a Token for each step, the last with its finish reason; with `stream=False` one Token with the
        whole text. A server's death costs a pause, never a token. Raises ConfigError for values without meaning, here;
        and when iterated ConfigError for an unknown model or a prompt over the context, SessionError when blocks are
        missing or were lost, PeerError when nobody answers.
        """
        if (prompt is None) == (messages is None):
            raise ConfigError("a generation needs either a prompt or messages", remedy="give one of the two")
        if max_tokens < 1:
            raise ConfigError(f"max_tokens is {max_tokens}", remedy="ask for 1 token or more")
        sampling = Sampling(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=secrets.randbits(63) if seed is None else seed,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
        )

        def start(trace: Trace) -> AsyncGenerator[Token, None]:
            tokens = self._tokens(model, prompt, messages, max_tokens, sampling, trace)
            return tokens if stream else _joined(tokens)

        self._last = Generation(start, model)
        return self._last

    def trace(self) -> dict[str, Any]:
        """Of the generation begun last; of a certain one: `Generation.trace`."""
        return self._last.trace() if self._last else {}

    async def _tokens(
        self,
        model: str,
        prompt: str | None,
        messages: Sequence[Message] | None,
        max_tokens: int,
        sampling: Sampling,
        trace: Trace,
    ) -> AsyncGenerator[Token, None]:
        clock = asyncio.get_running_loop().time
        since_s = clock()
        servers = await self._servers(model)
        kit = await self._kit(model, servers)
        prompt_ids = await _encode(kit, prompt, messages)
        check_room(kit, len(prompt_ids), max_tokens)
        trace.revision = kit.shape.revision
        session = Session(
            self._network,
            self._membership,
            self._links,
            kit.shape,
            max_tokens=len(prompt_ids) + max_tokens,
            servers=servers,
            trace=trace,
            options=self._session,
        )
        async with session:
            trace.opening_ms = (clock() - since_s) * 1000
            async with aclosing(generate(session, kit, prompt_ids, sampling, max_tokens, trace)) as tokens:
                async for token in tokens:
                    yield token

    async def _servers(self, model: str) -> Mapping[str, ServeRecord]:
        """Of the revision that can answer, one or more. Raises ConfigError if there are none."""
        try:
            servers = await self._look_up(model)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if not servers:
            known = ", ".join(await self._membership.models()) or "none"
            raise ConfigError(f"nobody serves a model {model!r}; known models: {known}", remedy="use one of these")
        return servers

    async def _look_up(self, model: str) -> Mapping[str, ServeRecord]:
        """The servers of the best revision, looked up again after MODELS_FRESH_S, and by a session when one fails.

        Raises ValueError if that cannot be a model's name.
        """
        now_s = asyncio.get_running_loop().time()
        seen_s, servers = self._seen.get(model, (0.0, {}))
        if not servers or now_s - seen_s >= MODELS_FRESH_S:
            servers = best_revision(await self._membership.servers(model))
            if servers:
                _keep(self._seen, model, (now_s, servers))
        return servers

    async def _kit(self, model: str, servers: Mapping[str, ServeRecord]) -> ModelKit:
        """The tokenizer and shape of the servers' revision."""
        revision = next(iter(servers.values())).revision
        key = model, revision
        if key not in self._kits:
            # for each model its own, so that one whose servers stall keeps no other waiting
            loading = self._loading.setdefault(key, asyncio.Lock())
            async with loading:
                if key not in self._kits:
                    willing = [peer_id for peer_id, record in servers.items() if record.state == "serving"]
                    files = await fetch_files(self._network, model, revision, willing)
                    _keep(self._kits, key, await asyncio.to_thread(_read_kit, model, revision, files))
        return self._kits[key]


def _status(name: str, servers: Mapping[str, ServeRecord]) -> ModelStatus | None:
    if not servers:
        return None
    record = next(iter(servers.values()))
    return ModelStatus(
        name=name,
        revision=record.revision,
        num_blocks=record.num_blocks,
        num_servers=sum(record.state == "serving" for record in servers.values()),
        missing=missing_spans(servers, record.num_blocks),
    )


def _keep(cache: dict[K, T], key: K, value: T) -> None:
    """The oldest goes when there are too many."""
    cache.pop(key, None)
    if len(cache) >= MAX_MODELS:
        del cache[next(iter(cache))]
    cache[key] = value


async def _encode(kit: ModelKit, prompt: str | None, messages: Sequence[Message] | None) -> list[int]:
    """Off the loop and for ENCODE_S at most: the patterns and the template are those of a peer. Raises ConfigError."""
    encoding = (
        asyncio.to_thread(kit.encode, prompt)
        if prompt is not None
        else asyncio.to_thread(kit.encode_chat, messages or ())
    )
    try:
        async with asyncio.timeout(ENCODE_S):
            return await encoding
    except TimeoutError:
        raise ConfigError(
            f"the tokenizer of {kit.shape.name} took over {ENCODE_S:g} s",
            remedy="shorten the prompt or use another model",
        ) from None


def check_room(kit: ModelKit, num_prompt_tokens: int, max_tokens: int) -> None:
    """Raises ConfigError for an empty prompt, and for one that leaves no room for the answer, saying by how much."""
    if not num_prompt_tokens:
        raise ConfigError("the prompt is empty", remedy="give some text to continue")
    surplus = num_prompt_tokens + max_tokens - kit.context_tokens
    if surplus > 0:
        raise ConfigError(
            f"{num_prompt_tokens} prompt tokens and {max_tokens} new ones are {surplus} over the context of "
            f"{kit.context_tokens} tokens of {kit.shape.name}",
            remedy="shorten the prompt or ask for fewer tokens",
        )


def _read_kit(model: str, revision: str, files: Mapping[str, bytes]) -> ModelKit:
    with tempfile.TemporaryDirectory(prefix="swarm-model-") as folder:
        return read_kit(model, revision, files, Path(folder))


async def _joined(tokens: AsyncGenerator[Token, None]) -> AsyncGenerator[Token, None]:
    async with aclosing(tokens):
        all_tokens = [token async for token in tokens]
    last = all_tokens[-1]
    text = "".join(token.text for token in all_tokens)
    yield Token(text=text, token_id=last.token_id, finish_reason=last.finish_reason)


class Client:
    """`AsyncClient` for code without an event loop. A context manager; may be used from several threads."""

    def __init__(self, *, peers: Sequence[str], network_id: str = DEFAULT_NETWORK_ID) -> None:
        self._peers = peers
        self._network_id = network_id
        self._client: AsyncClient | None = None
        self._generations: WeakSet[Generation] = WeakSet()
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._thread: threading.Thread | None = None
        # no call is scheduled once the end is. Entered again by an iterator that is collected within
        self._open = threading.RLock()

    def __enter__(self) -> Client:
        """Connect. Raises StartError."""
        connected: Future[AsyncClient] = Future()
        self._thread = threading.Thread(
            target=asyncio.run, args=(self._live(connected),), name="swarm-client", daemon=True
        )
        self._thread.start()
        try:
            self._client = connected.result()
        except SwarmError:
            self._thread.join()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End running generations, the host and the thread. Idempotent."""
        with self._open:
            if self._client is not None:
                self._client = None
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread is not None:
            self._thread.join()

    def models(self) -> tuple[ModelStatus, ...]:
        return self._wait(self._connected.models())

    def generate(  # noqa: PLR0913 the names of AsyncClient.generate
        self,
        *,
        model: str,
        prompt: str | None = None,
        messages: Sequence[Message] | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stream: bool = True,
    ) -> Iterator[Token]:
        """As `AsyncClient.generate`. Closing the iterator, or dropping it, frees the chain."""
        generation = self._connected.generate(
            model=model,
            prompt=prompt,
            messages=messages,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=stop,
            stream=stream,
        )
        self._generations.add(generation)
        return self._iterate(generation)

    def trace(self) -> dict[str, Any]:
        return self._connected.trace()

    def _iterate(self, generation: Generation) -> Iterator[Token]:
        tokens = aiter(generation)

        async def advance() -> Token | None:
            return await anext(tokens, None)

        try:
            while (token := self._wait(advance())) is not None:
                yield token
        finally:
            # a client that is closed has closed it
            with contextlib.suppress(SessionError):
                self._wait(generation.aclose())

    @property
    def _connected(self) -> AsyncClient:
        if self._client is None:
            raise SessionError("the client is not connected", remedy="use it as: with Client(peers=[…]) as client")
        return self._client

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        closed = SessionError("the client has been closed", remedy="read answers inside its `with` block")
        with self._open:
            if self._client is None:
                coroutine.close()
                raise closed
            answer = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return answer.result()
        except CancelledError:
            raise closed from None

    async def _live(self, connected: Future[AsyncClient]) -> None:
        """The thread's whole life."""
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with AsyncClient.connect(peers=self._peers, network_id=self._network_id) as client:
                connected.set_result(client)
                await self._stop.wait()
                for generation in list(self._generations):
                    # one that another thread waits for ends with the network
                    with contextlib.suppress(RuntimeError):
                        await generation.aclose()
        except Exception as error:
            if connected.done():
                raise
            connected.set_exception(error)
