"""The interface of the network that everything above it uses, and what its implementations share.

Two implementations hold to it, checked by one conformance suite: `libp2p_network.Libp2pNetwork` (real sockets) and
`memory.MemoryNetwork` (a simulated internet with virtual time). Callers see bytes, peer ids and typed errors, and
never learn addresses, transports or message-size limits of the layer below.

Time: code above sleeps and waits with plain asyncio (under `testing.virtual_time` that time is virtual), and reads
the wall clock only through `Network.now`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Generic, NoReturn, Protocol, TypeVar, cast

from swarm_protocol import limits
from swarm_protocol.envelope import Envelope, seal_now
from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerViolation
from swarm_protocol.identity import Identity

from swarm.network.link_meter import LinkMeter

BUSY_RETRY_S = 1.0
"""Pause before asking again a peer that is busy with our calls. Most calls take less."""

MAX_RELEASES = 2
"""Releases of which the methods are still answered: handlers may hold the state of a run that is over."""


class NotServed(Exception):
    """The peer is there and has no handler of that name."""


class EndOfStream(Exception):
    """The other side has finished sending. Not a failure. A handler that still needs something may let it pass: the
    network answers the caller with `ended_early`."""


class Stream(Protocol):
    """Ordered messages both ways between two peers. One reader and one writer task at most.

    Each message may be up to `limits.MAX_MESSAGE_BYTES`. Leaving the context that opened the stream ends it; the
    handler at the other side is then cancelled.
    """

    async def send(self, message: bytes) -> None:
        """Wait for room (back-pressure), then queue `message`. It may be any buffer, and may not change from now on: it
        is kept until the other side has it, and not copied.

        Raises PeerUnreachable if the other side is gone, PeerTimeout if there was no room within the stream's
        `timeout_s`, and whatever SwarmError the other side's handler raised.
        """

    async def receive(self) -> bytes:
        """Return the next message. Raises EndOfStream, PeerUnreachable, PeerTimeout, or the other side's SwarmError."""

    async def finish(self) -> None:
        """Say that no more messages follow from this side. Receiving goes on."""


UnaryHandler = Callable[[str, bytes], Awaitable[bytes]]
"""`async handler(peer_id, request) -> response`; `peer_id` is authenticated by the transport."""

StreamHandler = Callable[[str, Stream], Awaitable[None]]
"""`async handler(peer_id, stream)`; returning finishes the stream, raising a SwarmError sends it to the caller.
It is cancelled when the caller leaves. The TimeoutError of a deadline that it has set may pass: the network answers the
caller with `took_too_long`."""


class StreamOpener(Protocol):
    """Opens streams to peers: a network, or whatever else leads to a server."""

    def stream(self, peer_id: str, method: str, *, timeout_s: float) -> AbstractAsyncContextManager[Stream]:
        """Open a stream. `timeout_s` bounds the opening and then each single send and receive."""


class Network(StreamOpener, Protocol):
    """One node's place in one network. Created by the implementation's own `create`, ended by `close`."""

    @property
    def peer_id(self) -> str: ...

    @property
    def network_id(self) -> str: ...

    @property
    def links(self) -> LinkMeter:
        """Return what this node's traffic has shown of its links."""

    def now(self) -> float:
        """Return the Unix time in seconds, the clock that records are issued and expire by."""

    async def call(
        self,
        peer_id: str,
        method: str,
        request: bytes,
        *,
        timeout_s: float,
        max_bytes: int = limits.MAX_MESSAGE_BYTES,
    ) -> bytes:
        """Ask `peer_id` once. Any request up to `limits.MAX_MESSAGE_BYTES`, and an answer up to `max_bytes`.

        Of a longer answer no more is taken in than a stream's window (4 MiB) beyond `max_bytes`; then it is a
        PeerViolation. Cancelling the call cancels the handler. Raises PeerUnreachable, PeerTimeout (after `timeout_s`),
        PeerRefused (it does not serve `method`, or it works on `limits.MAX_CALLS_PER_PEER` calls of ours and says when
        to ask again), or the SwarmError that the handler raised.
        """

    async def serve(self, method: str, handler: UnaryHandler) -> None:
        """Answer `call`s of `method`, each in a task of its own. A method is served once; again raises ValueError."""

    async def serve_stream(self, method: str, handler: StreamHandler) -> None:
        """Answer `stream`s of `method`, each in a task of its own."""

    def release(self, *methods: str) -> None:
        """Let `methods` be served anew by other handlers. Until they are, or MAX_RELEASES have followed, the present
        ones answer."""

    async def publish(self, key: str, payload: bytes, *, lifetime_s: float) -> bool:
        """Sign `payload` as a record of this peer under `key` and store it with other peers.

        A later publish under the same key replaces the earlier one. False: no peer took it (isolated).
        Raises ValueError if payload or lifetime is over `limits`.
        """

    async def lookup(self, keys: Sequence[str], *, timeout_s: float, max_records: int = 0) -> list[Envelope]:
        """Return all valid, unexpired records under `keys`, at most one a key and signer, own ones included.

        With `max_records`, of a key that has more a sample of about that number, drawn by chance, from few nodes: a
        record may be missing for once, and it costs less.
        Signature, purpose, network id, key, size and lifetime have been checked. Raises PeerTimeout.
        """

    def sign(self, purpose: str, subject: str, payload: bytes, *, lifetime_s: float) -> bytes:
        """Return `payload` in an envelope of this peer, for this purpose and network, about `subject`, from now on."""

    async def addrs(self) -> tuple[str, ...]:
        """Return multiaddrs, each ending in /p2p/<peer_id>, under which this peer can be reached now."""

    async def close(self) -> None:
        """Stop serving and end every task, socket and child process. Idempotent."""


class SigningNetwork(ABC):
    """The part of `Network` that follows from the node's identity alone."""

    def __init__(self, identity: Identity, network_id: str) -> None:
        self._identity = identity
        self._network_id = network_id

    @property
    def peer_id(self) -> str:
        return self._identity.peer_id

    @property
    def network_id(self) -> str:
        return self._network_id

    @abstractmethod
    def now(self) -> float: ...

    def sign(self, purpose: str, subject: str, payload: bytes, *, lifetime_s: float) -> bytes:
        return seal_now(
            self._identity,
            self._network_id,
            purpose=purpose,
            subject=subject,
            payload=payload,
            now=self.now(),
            lifetime_s=lifetime_s,
        )


H = TypeVar("H")


class ServedMethods(Generic[H]):
    """The handlers of the methods that a node serves. Each method has one, which another replaces once it is
    released."""

    def __init__(self) -> None:
        self._handlers: dict[str, H] = {}
        self._released: set[str] = set()
        self._answering: list[set[str]] = []  # the last releases, without what is served or released again

    def add(self, method: str, handler: H) -> bool:
        """Return whether the method is new. Raises ValueError if it is served, and was not released."""
        is_new = method not in self._handlers
        if not is_new and method not in self._released:
            raise ValueError(f"{method!r} is served already")
        self._released.discard(method)
        self._handlers[method] = handler
        return is_new

    @contextmanager
    def adding(self, method: str, handler: H) -> Iterator[bool]:
        """Do as `add`; a new method whose body fails is not served, and may be tried again."""
        is_new = self.add(method, handler)
        try:
            yield is_new
        except BaseException:
            if is_new:
                del self._handlers[method]
            raise

    def release(self, *methods: str) -> None:
        earlier = [left for names in self._answering if (left := (names & self._released).difference(methods))]
        self._answering = [*earlier, set(methods)]
        self._released.update(methods)
        if len(self._answering) > MAX_RELEASES:
            for method in self._answering.pop(0) & self._handlers.keys():
                self._handlers[method] = cast("H", _refuse)

    def get(self, method: str) -> H | None:
        return self._handlers.get(method)

    def __getitem__(self, method: str) -> H:
        return self._handlers[method]

    def clear(self) -> None:
        self._handlers.clear()


async def _refuse(_peer_id: str, _request: object) -> NoReturn:
    raise PeerRefused("this node serves that no longer", remedy="ask another peer")


def too_many_calls(peer_id: str) -> PeerRefused:
    """Return the refusal of a call while `peer_id` runs `limits.MAX_CALLS_PER_PEER` others of the same caller."""
    return PeerRefused(
        f"the peer works on {limits.MAX_CALLS_PER_PEER} calls of this node already",
        remedy="ask again when some have ended",
        retry_after_s=BUSY_RETRY_S,
        peer_id=peer_id,
    )


def ended_early(peer_id: str) -> PeerViolation:
    """Return the error for `peer_id` that finished sending, or left, before a handler had all that it needs."""
    return PeerViolation("the stream ended before its handler had all that it needs", peer_id=peer_id)


def took_too_long(peer_id: str) -> PeerTimeout:
    """Return the error for `peer_id` whose stream or call took longer than its handler's own deadline."""
    return PeerTimeout("the handler's time for it was over", peer_id=peer_id)


def too_long(max_bytes: int, peer_id: str) -> PeerViolation:
    """Return the error for a message longer than its receiver accepts."""
    return PeerViolation(f"the peer sent a message of more than {max_bytes} bytes", peer_id=peer_id)


class FailpointHook(Protocol):
    """An observer that is told when the code reaches a phase. Tests use it to inject a fault there."""

    async def reached(self, phase: str) -> None: ...


class _NoFailpoints:
    async def reached(self, phase: str) -> None:
        """Do nothing, and let nothing else run: no task switch."""


no_failpoints: FailpointHook = _NoFailpoints()
