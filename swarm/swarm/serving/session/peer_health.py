"""Remembers what one client has seen of servers: failures and refusals, open sessions, and round trips.

Round trips come from the membership: the time of a step says little about the client's own link, since activations go
from server to server. Routing gets all this as a `RoutingContext`.

Each client has one `PeerHealth`, shared by its sessions and used only from its event loop; `close` ends its task.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from swarm_protocol.errors import PeerError, PeerRefused, PeerTimeout, PeerUnreachable, PeerViolation, SwarmError
from swarm_protocol.records import ServeRecord

from swarm.ended_tasks import end_tasks
from swarm.held_counts import HeldCounts
from swarm.network.membership import Membership
from swarm.newest_items import NewestItems
from swarm.router.routing import RoutingContext
from swarm.serving.session.connection_pool import client_closed
from swarm.serving.session.session_actions import AvoidPeer, FailureCause
from swarm.trust.reputation import Reputation

FIRST_BACKOFF_S = 1.0
GONE_BACKOFF_S = 15.0
"""The first backoff of a server that has fallen silent or cannot be reached. If it is cut off or has crashed, it stays
listed for a minute, and an answer that begins with it waits for `stage_connections.DIAL_S` or more."""

MAX_BACKOFF_S = 60.0
VIOLATION_BACKOFF_S = 3600.0
"""Seconds for which this client does not ask a server again that broke the protocol."""

UNPROVEN_S = 7200.0
"""Seconds for which a server counts as unproven: longer than the time until it is asked for a proof again."""

SUSPECTED_S = 60.0
"""Seconds for which others are preferred to several servers one of which sent bad rows: most of them are honest. Also
to one that was left because it was slow."""

LEAVING_BACKOFF_S = 60.0
"""Seconds for which a leaving server is avoided: the lifetime of its record, after which it is not listed any more."""

GONE_REST_S = 0.25
REST_S = 2.0
"""Seconds without any request to a server after a failure: at first GONE_REST_S if it has fallen silent or cannot be
reached, since its path may be back in a moment, and else FIRST_BACKOFF_S. They double with each failure in a row, up to
REST_S. After that the server is asked if no other can answer."""

LEAVING_REST_S = 10.0
"""The same for a leaving server. By then its record says that it is leaving, or that it is back."""

FAILING_S = 60.0
"""Seconds for which a failure counts against a server that has not been asked since: the lifetime of its record."""

MEASURE_S = 5.0
"""Timeout of a round-trip measurement in seconds: a peer that takes longer counts as far away."""

HEARD_S = 0.25
"""Seconds for which a server that a session has heard of counts as there: less than any session waits for news."""

MAX_PEERS = 1024
MAX_WOKEN = 4
"""Maximum searches that go on at once when a server has answered again. The others look again at their own time."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class _Failures:
    """Consecutive failures of a server, the first at `first_s` and the last at `last_s` for `reason`, after which it
    was avoided for `backoff_s`, and not asked at all for `rest_s`."""

    first_s: float
    last_s: float = 0.0
    reason: str = ""
    backoff_s: float = FIRST_BACKOFF_S / 2
    rest_s: float = GONE_REST_S / 2
    avoid_until_s: float = 0.0
    rest_until_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Refusal:
    num_tokens: int
    until_s: float
    is_final: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A session that has waited since `since_s` for room at any of the peers, or for a server that can be reached."""

    since_s: float
    peer_ids: Collection[str]
    is_over: asyncio.Event


class PeerHealth:
    """Remembers failures and refusals of each server, and the `load`: the number of open sessions by peer. `reputation`
    has the results of spot checks, and `convicted` returns the servers that evidence convicts."""

    def __init__(
        self,
        membership: Membership,
        reputation: Reputation | None = None,
        *,
        convicted: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        self.reputation = reputation or Reputation()
        self._convicted = convicted
        self._membership = membership
        self._measuring: asyncio.Task[object] | None = None
        self._failures = NewestItems[str, _Failures](MAX_PEERS)
        self._refusals = NewestItems[tuple[str, bool], _Refusal](MAX_PEERS)  # by peer, True: of a grammar only
        self._waiting: list[_Waiting] = []
        self._heard_s = NewestItems[str, float](MAX_PEERS)
        self._is_closed = False
        self._under_way: dict[str, asyncio.Task[Any]] = {}  # pings and lookups, by name
        self.load = HeldCounts[str]()
        self._distrusted = NewestItems[str, tuple[float, str]](MAX_PEERS)  # until when, and why
        self._unproven_s = NewestItems[str, float](MAX_PEERS)

    async def close(self) -> None:
        self._is_closed = True
        measuring = [self._measuring] if self._measuring is not None else []
        await end_tasks(*self._under_way.values(), *measuring)

    def measure(self, peer_ids: Iterable[str]) -> None:
        """Measure the round trips to these peers in the background, unless a measurement is under way."""
        if self._measuring is None or self._measuring.done():
            measuring = self._membership.rtts_ms(list(peer_ids), timeout_s=MEASURE_S)
            self._measuring = asyncio.create_task(measuring, name="measure round trips")

    async def silent(self, peer_ids: Collection[str], *, timeout_s: float) -> set[str]:
        """Return the peers that do not answer a ping within `timeout_s`, or one with the same timeout that is under
        way. A peer that a session has just heard of is not pinged."""
        since_s = asyncio.get_running_loop().time() - HEARD_S
        asked = [peer_id for peer_id in peer_ids if self._heard_s.get(peer_id, -math.inf) < since_s]
        pings = (self._shared(f"ping {each} for {timeout_s} s", partial(self._ping, each, timeout_s)) for each in asked)
        return set().union(*await asyncio.gather(*pings))

    async def _ping(self, peer_id: str, timeout_s: float) -> set[str]:
        silent = await self._membership.silent([peer_id], timeout_s=timeout_s)
        if not silent:
            self._heard_s[peer_id] = asyncio.get_running_loop().time()
        return silent

    async def servers(self, model: str) -> dict[str, ServeRecord]:
        """Look up the servers of a model, or wait for the lookup that is under way. Raises PeerTimeout, and
        SessionError once the client is closed."""
        return await self._shared(f"look up servers of {model}", partial(self._membership.servers, model))

    async def _shared(self, name: str, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of the work of this name, which is started unless it is under way. It goes on when a caller
        is cancelled, so that callers that wait for a moment at a time get its result, too."""
        if (work := self._under_way.get(name)) is None:
            work = self._under_way[name] = asyncio.create_task(start(), name=name)
            work.add_done_callback(self._on_done)
        try:
            return cast("T", await asyncio.shield(work))
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._is_closed and caller is not None and not caller.cancelling():
                raise client_closed() from None
            raise

    def _on_done(self, work: asyncio.Task[Any]) -> None:
        del self._under_way[work.get_name()]
        if not work.cancelled():
            work.exception()  # nobody may wait for it any more

    @property
    def avoid(self) -> set[str]:
        """Peers that failed lately. They are asked only if no other can answer."""
        return set(self.why_avoided)

    def unreachable(self, ages_s: Mapping[str, float]) -> set[str]:
        """Return the peers that failed lately, and those that have neither answered nor announced themselves since they
        failed, where `ages_s` has the age of each peer's newest record."""
        now_s = asyncio.get_running_loop().time()
        return self.avoid | {
            peer_id
            for peer_id, age_s in ages_s.items()
            if (failures := self._failures.get(peer_id)) is not None and now_s - failures.last_s < age_s
        }

    @property
    def why_avoided(self) -> dict[str, str]:
        """Return what each of the peers to avoid did."""
        now_s, convicted = asyncio.get_running_loop().time(), "evidence convicts it of a lie"
        failed = {peer_id: each.reason for peer_id, each in self._failures.items() if each.avoid_until_s > now_s}
        return failed | {peer_id: self._distrusted.get(peer_id, (0.0, convicted))[1] for peer_id in self.distrusted}

    @property
    def unproven(self) -> set[str]:
        """Peers that have not proven what they hold, were slow, or one of which sent bad rows, and that did not fail
        otherwise. They are asked only if no other can answer, but then always."""
        now_s = asyncio.get_running_loop().time()
        return {peer_id for peer_id, until_s in self._unproven_s.items() if until_s > now_s} - self.avoid

    @property
    def barred(self) -> set[str]:
        """Peers that failed just now or are distrusted. They are not asked at all."""
        return self.resting() | self.distrusted

    def resting(self, before_s: float = math.inf) -> set[str]:
        """Return the peers that are not asked for a moment since they failed just now, but before `before_s`."""
        now_s = asyncio.get_running_loop().time()
        return {
            peer_id
            for peer_id, failures in self._failures.items()
            if failures.rest_until_s > now_s and failures.last_s < before_s
        }

    @property
    def distrusted(self) -> set[str]:
        """Peers that broke the protocol, or serve something else than they announce, as this client found or evidence
        proves. They are not asked, whatever they answer later."""
        now_s = asyncio.get_running_loop().time()
        return {peer_id for peer_id, (until_s, _) in self._distrusted.items() if until_s > now_s} | self._convicted()

    def failed_since(self, since_s: float) -> set[str]:
        """Return the peers that have failed since then, and have not answered since they did."""
        return {peer_id for peer_id, failures in self._failures.items() if failures.last_s >= since_s}

    @asynccontextmanager
    async def until_rested(self, peer_ids: Collection[str]) -> AsyncIterator[None]:
        """End the body of the context once one of the peers that are not asked for a moment may be asked again."""
        until_s = [self._failures[peer_id].rest_until_s for peer_id in self.resting().intersection(peer_ids)]
        with suppress(TimeoutError):
            async with asyncio.timeout_at(min(until_s, default=None)):
                yield

    def distrust(self, peer_id: str, reason: str) -> None:
        """Do not ask the peer for VIOLATION_BACKOFF_S, because of what it did."""
        self._distrusted[peer_id] = asyncio.get_running_loop().time() + VIOLATION_BACKOFF_S, reason

    def doubt(self, peer_id: str, *, for_s: float = UNPROVEN_S) -> None:
        """Count the peer as unproven for at least `for_s`, unless it proves before that what it holds."""
        until_s = max(asyncio.get_running_loop().time() + for_s, self._unproven_s.get(peer_id, 0.0))
        self._unproven_s[peer_id] = until_s

    def proven(self, peer_id: str) -> None:
        """End the doubt about a peer."""
        self._unproven_s.pop(peer_id, None)

    def failing(self, for_s: float = 0.0) -> set[str]:
        """Return the peers whose consecutive failures span at least `for_s`, the last one within FAILING_S."""
        since_s = asyncio.get_running_loop().time() - FAILING_S
        return self.distrusted | {
            peer_id
            for peer_id, failures in self._failures.items()
            if failures.last_s > since_s and failures.last_s - failures.first_s >= for_s
        }

    def full(self, max_tokens: int, *, has_grammar: bool = False, for_good: bool = False) -> set[str]:
        """Return the peers that lately refused a session of at most `max_tokens`. With `has_grammar`, also those that
        refused its grammar; with `for_good`, only those that never have room for it."""
        now_s = asyncio.get_running_loop().time()
        return {
            peer_id
            for (peer_id, of_grammar), said in self._refusals.items()
            if said.until_s > now_s
            and said.num_tokens <= max_tokens
            and said.is_final >= for_good
            and has_grammar >= of_grammar
        }

    def routing_context(
        self,
        peer_ids: Iterable[str],
        max_tokens: int,
        salt: str,
        *,
        between: tuple[str, str] = ("", ""),
        has_grammar: bool = False,
        is_last: bool = False,
    ) -> RoutingContext:
        """Return what is known of these servers, for a route over blocks between the two peers `between`. The last
        search of several takes no server that has failed lately."""
        peer_ids = list(peer_ids)
        why_avoided, unproven = self.why_avoided, self.unproven
        trust = self.reputation.for_routing(peer_ids, time.time(), salt)
        avoid = why_avoided.keys() | unproven | trust.avoided | trust.barred
        return RoutingContext(
            rtt_ms=self._membership.known_rtts_ms(peer_ids),
            load=self.load,
            avoid=avoid,
            barred=self.barred | trust.barred | (avoid - unproven if is_last else set()),
            why_barred=why_avoided,
            full=self.full(max_tokens, has_grammar=has_grammar),
            max_tokens=max_tokens,
            salt=salt,
            previous_peer_id=between[0],
            next_peer_id=between[1],
            cost_factors=trust.cost_factors,
        )

    def opened(self, peer_id: str) -> None:
        self.load[peer_id] += 1

    def closed(self, peer_id: str) -> None:
        self.load[peer_id] -= 1

    def worked(self, peer_id: str) -> None:
        """Forget the peer's failures, since it has answered. What it answers in one session says nothing about room for
        another, so its refusals stay."""
        self._heard_s[peer_id] = asyncio.get_running_loop().time()
        if self._failures.pop(peer_id, None) is not None:
            asleep = [each for each in self._waiting if not each.is_over.is_set()]
            for waiting in sorted(asleep, key=lambda each: (peer_id not in each.peer_ids, each.since_s))[:MAX_WOKEN]:
                waiting.is_over.set()

    async def wait_for_server(self, peer_ids: Collection[str], since_s: float, *, within_s: float) -> None:
        """Wait until one of the peers has made room, or any peer that had failed has answered, but not longer than
        `within_s`. Those that have waited longest, since `since_s`, are told first: one that there is room, and up to
        MAX_WOKEN that a peer has answered."""
        waiting = _Waiting(since_s, peer_ids, asyncio.Event())
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(within_s):
                await waiting.is_over.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting.remove(waiting)

    def made_room(self, peer_id: str) -> None:
        """Forget that the peer had no room for now, since a session there has ended."""
        for key in ((peer_id, False), (peer_id, True)):
            said = self._refusals.get(key)
            if said is not None and not said.is_final:
                del self._refusals[key]
        waiting = [each for each in self._waiting if peer_id in each.peer_ids and not each.is_over.is_set()]
        if waiting:
            min(waiting, key=lambda each: each.since_s).is_over.set()

    def blame(self, failure: AvoidPeer, num_tokens: int, *, has_grammar: bool = False) -> None:
        """Record why a session of `num_tokens` gave up a server. If it `has_grammar`, a refusal for another reason than
        room keeps only sessions with a grammar from that server."""
        error = failure.error
        logger.info("%s: %s", failure.peer_id, error)
        if failure.cause is FailureCause.SLOW:
            self.doubt(failure.peer_id, for_s=SUSPECTED_S)  # what it answers meanwhile does not show that it is fast
            return
        is_accused = isinstance(error, PeerViolation) and failure.cause is not FailureCause.VIOLATION
        if is_accused or (isinstance(error, PeerTimeout) and failure.cause is FailureCause.REPORTED):
            # a server that accuses the client of a violation, or waited for it in vain, has not failed so itself
            error = PeerError(error.message, peer_id=failure.peer_id)
        if isinstance(error, PeerRefused) and (error.retry_after_s or error.lacks_room):
            of_grammar = has_grammar and not error.lacks_room
            self.refused(failure.peer_id, num_tokens, error.retry_after_s, of_grammar=of_grammar)
        else:
            self.failed(failure.peer_id, error)

    def refused(self, peer_id: str, num_tokens: int, retry_after_s: float, *, of_grammar: bool = False) -> None:
        """Do not ask the peer for `num_tokens` or more for `retry_after_s`; 0: it never has room for these. It is
        healthy, and may have room for fewer."""
        now_s, is_final = asyncio.get_running_loop().time(), not retry_after_s
        known = self._refusals.get((peer_id, of_grammar))
        if known is not None and known.until_s > now_s and not is_final:
            num_tokens = min(num_tokens, known.num_tokens)
        self._refusals[peer_id, of_grammar] = _Refusal(num_tokens, now_s + (retry_after_s or FAILING_S), is_final)

    def failed(self, peer_id: str, error: SwarmError) -> None:
        """Avoid the peer, with a backoff and a rest that double with each failure in a row. A leaving peer is avoided
        until it has left, and one that broke the protocol is distrusted.

        Failures of an avoided peer neither double nor shorten the backoff, and those of a resting one the rest: they
        are mostly of requests that began before it failed.
        """
        if isinstance(error, PeerViolation):
            self.distrust(peer_id, error.message)
            return
        now_s = asyncio.get_running_loop().time()
        failures = self._failures.get(peer_id, _Failures(now_s))
        first_s, first_rest_s = FIRST_BACKOFF_S, FIRST_BACKOFF_S
        if isinstance(error, PeerTimeout | PeerUnreachable):
            first_s, first_rest_s = GONE_BACKOFF_S, GONE_REST_S
        factor = 1 if now_s < failures.avoid_until_s else 2
        backoff_s = failures.backoff_s = min(MAX_BACKOFF_S, max(first_s, factor * failures.backoff_s))
        factor = 1 if now_s < failures.rest_until_s else 2
        rest_s = failures.rest_s = min(REST_S, max(first_rest_s, factor * failures.rest_s))
        if isinstance(error, PeerRefused):
            backoff_s, rest_s = LEAVING_BACKOFF_S, LEAVING_REST_S
        failures.last_s, failures.reason = now_s, error.message
        failures.avoid_until_s = max(failures.avoid_until_s, now_s + backoff_s)
        failures.rest_until_s = max(failures.rest_until_s, now_s + rest_s)
        self._failures[peer_id] = failures
