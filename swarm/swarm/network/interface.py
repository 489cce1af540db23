"""The interface of the network that all other packages use, and what its implementations share.

One conformance suite checks the two implementations: `libp2p_network.Libp2pNetwork` (real sockets) and
`memory.memory_network.MemoryNetwork` (a simulated internet with virtual time). Calls and streams deal in bytes, peer
ids and typed errors; callers need not know transports or the message-size limits of the layer below.

Time: callers sleep and wait with plain asyncio (under `testing.virtual_time` that time is virtual), and read the wall
clock only through `Network.now`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Generic, NoReturn, Protocol, TypeVar, cast

from swarm_protocol import limits
from swarm_protocol.envelope import Envelope, seal_now
from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerUnreachable, PeerViolation, SwarmError
from swarm_protocol.identity import Identity

from swarm.network.link_meter import LinkMeter

BUSY_RETRY_S = 1.0
"""Pause before this node asks a peer again that is busy with this node's calls. Most calls take less."""

MAX_RELEASES = 2
"""Number of latest releases whose methods are still answered. Older ones are dropped, since their handlers may hold the
state of a run that is over."""

logger = logging.getLogger(__name__)


class NotServed(Exception):
    """The peer answers, but has no handler for that protocol."""


class EndOfStream(Exception):
    """The other side has finished sending, which is no failure. A handler that still needs a message need not catch
    this: the network then answers the caller with a PeerViolation."""


class Stream(Protocol):
    """Ordered messages in both directions between two peers. At most one task reads, and at most one writes.

    Each message may have up to `limits.MAX_MESSAGE_BYTES`. Leaving the context that opened the stream ends the stream;
    the handler at the other side is then cancelled.
    """

    async def send(self, message: bytes) -> None:
        """Wait for room (backpressure), then queue `message`, which may be any buffer. The caller must not change it
        any more: it is not copied, and is kept until the other side has it.

        Once a call was cancelled that had sent a part of a message, the stream can send no more.

        Raises PeerUnreachable then, and if the other side is gone, PeerTimeout if there was no room within the stream's
        `timeout_s`, and the SwarmError that the other side's handler raised.
        """

    async def receive(self) -> bytes:
        """Return the next message. Raises EndOfStream, PeerUnreachable, PeerTimeout, or the other side's SwarmError."""

    async def finish(self) -> None:
        """Tell the other side that this side sends no more messages, without waiting for it. Receiving goes on."""


UnaryHandler = Callable[[str, bytes], Awaitable[bytes]]
"""`async handler(peer_id, request) -> response`; `peer_id` is authenticated by the transport."""

StreamHandler = Callable[[str, Stream], Awaitable[None]]
"""`async handler(peer_id, stream)`: a return ends the stream, and a SwarmError that it raises is sent to the caller.
The handler is cancelled when the caller leaves. It need not catch the TimeoutError of its own deadline: the network
then answers the caller with a PeerTimeout."""


class StreamOpener(Protocol):
    """Opens streams to peers: a network, or the ends of a model in this process."""

    def stream(self, peer_id: str, method: str, *, timeout_s: float | None) -> AbstractAsyncContextManager[Stream]:
        """Open a stream. `timeout_s` bounds the opening and then each single send and receive, unless it is None."""


class Network(StreamOpener, Protocol):
    """One node's access to one network. Each implementation has its own way to create one; `close` ends it."""

    @property
    def peer_id(self) -> str: ...

    @property
    def network_id(self) -> str: ...

    @property
    def links(self) -> LinkMeter:
        """Return the meter of this node's links to peers."""

    def now(self) -> float:
        """Return the Unix time in seconds, by which records are issued and expire."""

    async def call(
        self,
        peer_id: str,
        method: str,
        request: bytes,
        *,
        timeout_s: float,
        max_bytes: int = limits.MAX_MESSAGE_BYTES,
    ) -> bytes:
        """Send a request of up to `limits.MAX_MESSAGE_BYTES` once, and return the answer of up to `max_bytes`.

        A longer answer raises PeerViolation, after at most a stream's window (4 MiB) beyond `max_bytes` was received.
        Cancelling the call cancels the handler. Raises PeerUnreachable, PeerTimeout (after `timeout_s`), PeerRefused
        (the peer does not serve `method`, or works on too many calls and says when to ask again), or the SwarmError
        that the handler raised.
        """

    async def serve(self, method: str, handler: UnaryHandler) -> None:
        """Answer each `call` of `method` in a task of its own. Raises ValueError if `method` is served already."""

    async def serve_stream(self, method: str, handler: StreamHandler) -> None:
        """Answer each `stream` of `method` in a task of its own. Raises ValueError if `method` is served already."""

    def release(self, *methods: str) -> None:
        """Let other handlers serve `methods`. Until they do, the present handlers answer, but only for the MAX_RELEASES
        latest releases."""

    async def publish(self, key: str, payload: bytes, *, lifetime_s: float) -> bool:
        """Sign `payload` as a record of this peer under `key` and store it with other peers.

        A later record of this peer under the same key replaces the earlier one. Return False if no peer took the
        record. Raises ValueError if payload or lifetime is over `limits`.
        """

    async def lookup(self, keys: Sequence[str], *, timeout_s: float, max_records: int = 0) -> list[Envelope]:
        """Return all valid, unexpired records under `keys`, at most one for each key and signer, own ones included.

        With `max_records`, return a random sample of about that number for a key that has more. Fewer nodes are asked
        then, which costs less, but may miss a record. Signature, purpose, network id, key, size and lifetime have been
        checked. Raises PeerTimeout.
        """

    def sign(self, purpose: str, subject: str, payload: bytes, *, lifetime_s: float) -> bytes:
        """Return `payload` in an envelope that this peer signs for this network, valid from now for `lifetime_s`."""

    def provider_of(self, peer_id: str) -> Hashable:
        """Return the provider's network from which a peer, or its relay, is connected; where that is not known, the
        peer's id, as for a network of its own."""

    async def addrs(self) -> tuple[str, ...]:
        """Return the multiaddrs at which this peer can be reached now, each ending in /p2p/<peer_id>."""

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
    """The handlers of the methods that a node serves. Each method has one handler, which another one may replace once
    the method is released."""

    def __init__(self) -> None:
        self._handlers: dict[str, H] = {}
        self._released: set[str] = set()
        self._answering: list[set[str]] = []  # methods of the latest releases that were not served or released again

    def add(self, method: str, handler: H) -> bool:
        """Set the handler of a method, and return whether the method is new. Raises ValueError if it is served and was
        not released."""
        is_new = method not in self._handlers
        if not is_new and method not in self._released:
            raise ValueError(f"{method!r} is served already")
        self._released.discard(method)
        self._handlers[method] = handler
        return is_new

    @contextmanager
    def adding(self, method: str, handler: H) -> Iterator[bool]:
        """Do as `add`. If the body of the context fails, a new method is removed again."""
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
    raise PeerRefused("the peer does not serve the method any more", remedy="ask another peer")


def too_many_calls(peer_id: str) -> PeerRefused:
    """Return the refusal of a call to `peer_id`, which works on as many calls as `peer_budgets` allows."""
    return PeerRefused(
        f"the peer works on as many calls as it takes, from this node ({limits.MAX_CALLS_PER_PEER}) or from all",
        remedy="ask again when some have ended",
        retry_after_s=BUSY_RETRY_S,
        peer_id=peer_id,
    )


def too_many_streams() -> PeerRefused:
    """Return the refusal of a stream to its opener: it has, or all peers have, as many as `peer_budgets` allows."""
    return PeerRefused("too many streams to the peer are open", retry_after_s=BUSY_RETRY_S)


def failure_for_caller(error: Exception, peer_id: str) -> Exception:
    """Return the error that the caller `peer_id` is sent for the `error` of a handler. A defect is logged."""
    if isinstance(error, SwarmError):
        return error
    if isinstance(error, EndOfStream):
        what = "the caller finished sending before the handler had all that it needs"
        failure: SwarmError = PeerViolation(what, peer_id=peer_id)
    elif isinstance(error, TimeoutError):
        failure = PeerTimeout("the handler did not finish before its own deadline", peer_id=peer_id)
    else:
        logger.error("a handler failed", exc_info=error)
        return error
    logger.debug("%s is answered: %s", peer_id, failure.message)
    return failure


def cut_off(peer_id: str) -> PeerUnreachable:
    """Return the error for a sender that was cancelled amid a message to `peer_id`, and sends more on the same stream:
    the other side would take that for the rest of the message."""
    return PeerUnreachable("an earlier message to the peer was cut off in the middle", peer_id=peer_id)


def too_long(max_bytes: int, peer_id: str) -> PeerViolation:
    """Return the error for a message longer than its receiver accepts."""
    return PeerViolation(f"the peer sent a message of more than {max_bytes} bytes", peer_id=peer_id)


class FailpointHook(Protocol):
    """An observer that the code calls when it reaches a phase. Tests use it to inject faults."""

    async def reached(self, phase: str) -> None: ...


class _NoFailpoints:
    async def reached(self, phase: str) -> None:
        """Do nothing, without switching tasks."""


no_failpoints: FailpointHook = _NoFailpoints()
