"""What one client has of the servers that it knows: connections to them, their health, and routes over them.

A connection to a server, one for each model, opens when a first session needs it and closes a while after the last one.
`PeerHealth` remembers failures and refusals, open sessions and round trips. Round trips are the membership's: the time
of a step says little about the client's own link, since activations go from server to server. `RouteFinder` looks
servers up again when those that are known do not suffice; `swarm.router.routing` chooses the chain, and the session
decides what to do with it.

There is one pool and one health per client, shared by its sessions and touched only from its event loop; `close` ends
their tasks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerUnreachable, PeerViolation, SwarmError
from swarm_protocol.records import ServeRecord
from swarm_protocol.session_frames import Frame, OpenSequence, Push, PushRefused, ServerLeaving

from swarm.network.interface import Network, Stream, StreamOpener
from swarm.network.membership import Membership
from swarm.router.revisions import manifest_of, with_other_revisions
from swarm.router.routing import Hop, NoChain, RoutingContext, find_chain
from swarm.serving.checking.spot_checks import SpotCheckOptions, SpotChecks
from swarm.serving.session.stage import PrefixStore
from swarm.serving.wire.multiplexed_connection import MultiplexedConnection, open_stream
from swarm.trust.reputation import Reputation

logger = logging.getLogger(__name__)

K = TypeVar("K")
T = TypeVar("T")

IDLE_S = 30.0
"""Time for a person to read an answer and ask again, without another dial."""

RETRY_S = 0.5
"""Pause between two searches for a server that could take over."""

FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 60.0
VIOLATION_BACKOFF_S = 3600.0
"""A server that broke the protocol is not asked again by this client while it matters."""

UNPROVEN_S = 7200.0
"""Longer than the time until a server that gives no proof is asked for one again."""

LEAVING_BACKOFF_S = 60.0
"""The life of a record: after that, a server that left is listed no more."""

REST_S = 2.0
"""Time without any request after a failure, or its backoff if shorter.

Later the server is asked if no other can answer.
"""

LEAVING_REST_S = 10.0
"""The same for a server that leaves. By then its record says so, or that it is back."""

FAILING_S = 60.0
"""How long a failure counts against a server that has not been asked since: the life of its record."""

MEASURE_S = 5.0
"""A peer that takes longer to answer counts as far."""

MAX_PEERS = 1024


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The connection has ended, and with it the sequence."""

    error: SwarmError


OnMessage: TypeAlias = Callable[[Frame | ConnectionLost], None]


class ClientConnection:
    """A connection to one server, which gives each frame to the sequence that it is for."""

    def __init__(self, stream: Stream, peer_id: str, idle_s: float) -> None:
        self._connection = MultiplexedConnection(stream, peer_id)
        self._sequences: dict[bytes, OnMessage] = {}
        self._idle_s = idle_s
        self._idle: asyncio.TimerHandle | None = None
        self._close_when_idle()

    @property
    def is_over(self) -> bool:
        return self._connection.is_over

    def attach(self, sequence_id: bytes, on_message: OnMessage) -> None:
        """Call `on_message` for what comes for the sequence, and when the connection ends. Raises what has ended it."""
        if self._connection.error is not None:
            raise self._connection.error.with_traceback(None)
        self._sequences[sequence_id] = on_message
        if self._idle is not None:
            self._idle.cancel()

    def detach(self, sequence_id: bytes) -> None:
        self._sequences.pop(sequence_id, None)
        if not self._sequences:
            self._close_when_idle()

    def send(self, frame: Frame) -> None:
        """Send a frame. Nothing happens once the connection has ended, since its sequences are told of that."""
        if self._connection.error is None:
            self._connection.send(frame)

    def fail(self, error: SwarmError) -> None:
        """End the connection now; its sequences are told of `error`."""
        self._connection.fail(error)

    async def run(self) -> None:
        """Send and receive until the connection ends."""
        try:
            await self._connection.run(self._on_frame)
        finally:
            if self._idle is not None:
                self._idle.cancel()
            error = self._connection.error or PeerUnreachable(
                "the connection is closed", peer_id=self._connection.peer_id
            )
            self._notify_all(ConnectionLost(error))

    def _on_frame(self, frame: Frame) -> None:
        if isinstance(frame, ServerLeaving):
            self._notify_all(frame)
        elif not isinstance(frame, OpenSequence | Push | PushRefused) and (
            on_message := self._sequences.get(frame.sequence_id)
        ):
            on_message(frame)

    def _notify_all(self, news: ServerLeaving | ConnectionLost) -> None:
        for on_message in list(self._sequences.values()):
            on_message(news)

    def _close_when_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(self._idle_s, self._connection.end)


class ConnectionPool:
    """Keeps one open connection to each server and model that sessions use."""

    def __init__(self, network: StreamOpener, *, idle_s: float = IDLE_S) -> None:
        self._network = network
        self._idle_s = idle_s
        self._openings: dict[tuple[str, str], asyncio.Future[ClientConnection]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def get(self, peer_id: str, model: str) -> ClientConnection:
        """Return the connection to a server of `model`. Raises PeerError, or what the server refuses it with."""
        opening = self._openings.get((peer_id, model))
        if opening is None or _is_over(opening):
            opening = self._open(peer_id, model)
        # several sessions may wait for it, and one of them may be cancelled
        return await asyncio.shield(opening)

    def drop(self, peer_id: str, error: SwarmError) -> None:
        """End the connections to a peer, those that are being opened too; their sequences are told of `error`."""

        def end(opening: asyncio.Future[ClientConnection]) -> None:
            if not opening.cancelled() and opening.exception() is None:
                opening.result().fail(error)

        for (each, _), opening in list(self._openings.items()):
            if each == peer_id:
                opening.add_done_callback(end)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _open(self, peer_id: str, model: str) -> asyncio.Future[ClientConnection]:
        loop = asyncio.get_running_loop()
        connection: asyncio.Future[ClientConnection] = loop.create_future()
        task = loop.create_task(self._keep_open(peer_id, model, connection), name=f"connection to {peer_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._openings[peer_id, model] = connection
        return connection

    async def _keep_open(self, peer_id: str, model: str, opened: asyncio.Future[ClientConnection]) -> None:
        try:
            async with open_stream(self._network, peer_id, model) as stream:
                connection = ClientConnection(stream, peer_id, self._idle_s)
                opened.set_result(connection)
                await connection.run()
        except SwarmError as error:
            if not opened.done():
                opened.set_exception(error)
                # the session that asked may have been cancelled meanwhile
                opened.exception()
        finally:
            if not opened.done():
                opened.cancel()
            if self._openings.get((peer_id, model)) is opened:
                del self._openings[peer_id, model]


def _is_over(opening: asyncio.Future[ClientConnection]) -> bool:
    return opening.done() and (opening.cancelled() or opening.exception() is not None or opening.result().is_over)


@dataclass(slots=True)
class _Failures:
    """Failures in a row, the first at `first_s` and the last at `last_s`."""

    first_s: float
    last_s: float = 0.0
    num_in_row: int = 0
    avoid_until_s: float = 0.0
    rest_until_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Refusal:
    num_tokens: int
    until_s: float


class PeerHealth:
    """Remembers failures, refusals and open sessions of each server. `reputation` is what spot checks have shown."""

    def __init__(self, membership: Membership, reputation: Reputation | None = None) -> None:
        self.reputation = reputation or Reputation()
        self._membership = membership
        self._measuring: asyncio.Task[object] | None = None
        self._failures: dict[str, _Failures] = {}
        self._refusals: dict[str, _Refusal] = {}
        self._load: Counter[str] = Counter()
        self._distrusted_s: dict[str, float] = {}
        self._unproven_s: dict[str, float] = {}

    async def close(self) -> None:
        if self._measuring is not None:
            self._measuring.cancel()
            await asyncio.wait({self._measuring})

    def measure(self, peer_ids: Iterable[str]) -> None:
        """Measure the round trips to these peers in the background, unless a measurement is under way."""
        if self._measuring is None or self._measuring.done():
            measuring = self._membership.rtts_ms(list(peer_ids), timeout_s=MEASURE_S)
            self._measuring = asyncio.create_task(measuring, name="measure round trips")

    @property
    def avoid(self) -> set[str]:
        """Peers that failed lately: asked only where no other can answer."""
        now_s = asyncio.get_running_loop().time()
        avoided = {peer_id for peer_id, failures in self._failures.items() if failures.avoid_until_s > now_s}
        return avoided | self.distrusted

    @property
    def unproven(self) -> set[str]:
        """Peers that give no proof of what they hold, and did not fail otherwise: asked only where no other can answer,
        but then always."""
        now_s = asyncio.get_running_loop().time()
        return {peer_id for peer_id, until_s in self._unproven_s.items() if until_s > now_s} - self.avoid

    @property
    def barred(self) -> set[str]:
        """Peers that failed just now, or broke the protocol: not asked at all."""
        now_s = asyncio.get_running_loop().time()
        resting = {peer_id for peer_id, failures in self._failures.items() if failures.rest_until_s > now_s}
        return resting | self.distrusted

    @property
    def distrusted(self) -> set[str]:
        """Peers that were found to serve something else than they announce: not asked, whatever they answer since."""
        now_s = asyncio.get_running_loop().time()
        return {peer_id for peer_id, until_s in self._distrusted_s.items() if until_s > now_s}

    def distrust(self, peer_id: str) -> None:
        """Do not ask the peer for VIOLATION_BACKOFF_S."""
        until_s = asyncio.get_running_loop().time() + VIOLATION_BACKOFF_S
        keep_newest(self._distrusted_s, peer_id, until_s, MAX_PEERS)

    def doubt(self, peer_id: str) -> None:
        """Count the peer as unproven until it has proven what it holds, or for UNPROVEN_S."""
        until_s = asyncio.get_running_loop().time() + UNPROVEN_S
        keep_newest(self._unproven_s, peer_id, until_s, MAX_PEERS)

    def proven(self, peer_id: str) -> None:
        """End the doubt about a peer."""
        self._unproven_s.pop(peer_id, None)

    def failing(self, for_s: float = 0.0) -> set[str]:
        """Return the peers that have failed each time for so long, the last time within FAILING_S."""
        since_s = asyncio.get_running_loop().time() - FAILING_S
        return self.distrusted | {
            peer_id
            for peer_id, failures in self._failures.items()
            if failures.last_s > since_s and failures.last_s - failures.first_s >= for_s
        }

    def full(self, max_tokens: int) -> set[str]:
        """Return the peers that lately refused a session of no more tokens."""
        now_s = asyncio.get_running_loop().time()
        return {p for p, said in self._refusals.items() if said.until_s > now_s and said.num_tokens <= max_tokens}

    @property
    def load(self) -> Mapping[str, int]:
        """The number of open sessions by peer."""
        return self._load

    def routing_context(
        self, peer_ids: Iterable[str], max_tokens: int, salt: str, *, between: tuple[str, str] = ("", "")
    ) -> RoutingContext:
        """Return what is known of these servers, for blocks whose inputs and outputs the two peers `between` handle."""
        peer_ids = list(peer_ids)
        trust = self.reputation.for_routing(peer_ids, time.time(), salt)
        return RoutingContext(
            rtt_ms=self._membership.known_rtts_ms(peer_ids),
            load=self._load,
            avoid=self.avoid | self.unproven | trust.avoided | trust.barred,
            barred=self.barred | trust.barred,
            full=self.full(max_tokens),
            max_tokens=max_tokens,
            salt=salt,
            previous_peer_id=between[0],
            next_peer_id=between[1],
            cost_factors=trust.cost_factors,
        )

    def opened(self, peer_id: str) -> None:
        self._load[peer_id] += 1

    def closed(self, peer_id: str) -> None:
        self._load[peer_id] -= 1
        if not self._load[peer_id]:
            del self._load[peer_id]

    def worked(self, peer_id: str) -> None:
        """Forget the peer's failures and refusals, since it has answered."""
        self._failures.pop(peer_id, None)
        self._refusals.pop(peer_id, None)

    def refused(self, peer_id: str, num_tokens: int, retry_after_s: float) -> None:
        """Do not ask the peer for as many tokens or more until then. It is healthy and may have room for fewer."""
        now_s = asyncio.get_running_loop().time()
        known = self._refusals.pop(peer_id, None)
        if known is not None and known.until_s > now_s:
            num_tokens = min(num_tokens, known.num_tokens)
        keep_newest(self._refusals, peer_id, _Refusal(num_tokens, now_s + retry_after_s), MAX_PEERS)

    def failed(self, peer_id: str, error: SwarmError) -> None:
        """Avoid the peer, each time twice as long as the last time, or until one that is leaving has left."""
        now_s = asyncio.get_running_loop().time()
        failures = self._failures.pop(peer_id, _Failures(now_s))
        failures.num_in_row += 1
        backoff_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (failures.num_in_row - 1))
        rest_s = min(REST_S, backoff_s)
        if isinstance(error, PeerViolation):
            backoff_s = rest_s = VIOLATION_BACKOFF_S
        elif isinstance(error, PeerRefused):
            backoff_s, rest_s = LEAVING_BACKOFF_S, LEAVING_REST_S
        failures.last_s = now_s
        failures.avoid_until_s, failures.rest_until_s = now_s + backoff_s, now_s + rest_s
        keep_newest(self._failures, peer_id, failures, MAX_PEERS)


def keep_newest(cache: dict[K, T], key: K, value: T, most: int) -> None:
    """Store a value as the newest one; drop the oldest one when there are too many."""
    cache.pop(key, None)
    if len(cache) >= most:
        del cache[next(iter(cache))]
    cache[key] = value


class KnownServers:
    """The servers of one revision of a model by peer id, at first those that the caller knows already."""

    def __init__(
        self, membership: Membership, servers: Mapping[str, ServeRecord], *, model: str, revision: str
    ) -> None:
        self.servers = servers
        self.model = model
        self._others: Mapping[str, ServeRecord] = {}
        self._membership = membership
        self._revision = revision
        # all are of one manifest, if they announce any
        self._manifest = next((manifest_of(record) for record in servers.values()), b"")

    async def look_up(self) -> None:
        """Look the servers up again; keep those that are known if nobody answers."""
        try:
            servers = await self._membership.servers(self.model)
        except PeerTimeout as error:
            logger.info("looking up servers of %s: %s", self.model, error)
            return
        self.servers = {
            peer_id: record
            for peer_id, record in servers.items()
            if record.revision == self._revision and manifest_of(record) == self._manifest
        }
        self._others = {peer_id: record for peer_id, record in servers.items() if record.revision != self._revision}

    def find_chain(self, start: int, end: int, context: RoutingContext) -> list[Hop]:
        """Return the cheapest chain over `[start, end)`. Raises NoChain, naming other revisions that are served."""
        try:
            return list(find_chain(self.servers, start, end, context).hops)
        except NoChain as error:
            raise with_other_revisions(error, self._revision, self._others) from None


class RouteFinder:
    """Find chains for one session with room for `max_tokens`; give up `patience_s` after a server was lost."""

    def __init__(
        self, known: KnownServers, health: PeerHealth, *, max_tokens: int, salt: str, patience_s: float
    ) -> None:
        self._known = known
        self._health = health
        self._max_tokens = max_tokens
        self._salt = salt
        self._patience_s = patience_s
        self._began_s: float | None = None

    async def find(self, start: int, end: int, between: tuple[str, str], *, since_s: float | None) -> list[Hop]:
        """Return the cheapest chain over `[start, end)` between two peers, the one before and the one after ("": none).

        The search ends `patience_s` after `since_s`, or after two tries if that is None. Until then servers to avoid
        are asked again where there are no others; without `since_s`, until `patience_s` after the session's first
        search. Raises NoChain.
        """
        clock = asyncio.get_running_loop().time
        self._began_s = clock() if self._began_s is None else self._began_s
        give_up_at_s = 0.0 if since_s is None else since_s + self._patience_s
        insist_until_s = self._began_s + self._patience_s if since_s is None else give_up_at_s
        looked_up = False
        while True:
            context = self._health.routing_context(self._known.servers, self._max_tokens, self._salt, between=between)
            if clock() >= insist_until_s:
                context = replace(context, barred=set(context.avoid) - self._health.unproven)
            try:
                return self._known.find_chain(start, end, context)
            except NoChain:
                # what was known at the start of the session may be old
                if looked_up and clock() >= give_up_at_s:
                    raise
                await asyncio.sleep(RETRY_S if looked_up else 0)
                await self._known.look_up()
                looked_up = True


class ClientState:
    """What all sessions of one client share: connections to servers, their health, prefixes of earlier sessions, and
    the spot checks of answers that have ended."""

    def __init__(self, network: Network, membership: Membership, checks: SpotCheckOptions | None = None) -> None:
        checks = checks or SpotCheckOptions(share=0.0)
        self.connections = ConnectionPool(network)
        self.health = PeerHealth(membership, checks.reputation)
        self.prefixes = PrefixStore()
        self.checks = SpotChecks(network, membership, self.health.reputation, checks)

    async def close(self) -> None:
        await self.checks.close()
        await self.health.close()
        await self.connections.close()
