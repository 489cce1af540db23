"""The servers that evidence convicts, as far as this node knows: evidence is received, checked, stored and sent to
others.

Servers of published models send new evidence to each other, and show their evidence to every node that asks. Clients
ask with their first request for a model, and again every few minutes. So evidence that one node finds reaches all that
use or serve the model. Evidence is checked before it is kept. Once a peer's evidence proves nothing, its further
evidence is refused.

Evidence comes in by `take` (from a peer, or found by this node), `learn` (shown by servers that were asked), or
`recall` (from the disk). `_take` checks it (`check_possession`) and adds the ban (`server_bans`), `_keep` writes it to
the store, `_spread` sends it to some servers of each model that this node serves or uses, and `_answer` shows it to
peers that ask.

One for each node, on its event loop; checks and the store run in threads. `close` ends its tasks.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Coroutine, Mapping
from functools import partial
from typing import Any

from swarm_protocol import limits
from swarm_protocol.errors import IntegrityError, PeerRefused, PeerViolation, SwarmError
from swarm_protocol.records import ServeRecord
from swarm_protocol.served_evidence_messages import (
    SERVER_BANS_METHOD,
    SERVER_EVIDENCE_METHOD,
    ServerBansRequest,
)

from swarm.ended_tasks import end_tasks
from swarm.evidence_folder import EvidenceFolder
from swarm.network.interface import EndOfStream, Network, Stream
from swarm.network.membership import Membership
from swarm.newest_items import NewestItems
from swarm.serving.evidence.server_bans import ServerBan, ServerBans
from swarm.serving.manifest.possession import MAX_AGE_S, accused, check_possession, read_possession

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 300.0
"""Average time until servers of a model are asked again for their evidence."""

NUM_ASKED = 2
"""Servers that are asked at a time. One of them may be the liar."""

SPREAD = 8
"""Servers of a model to which new evidence is sent. Each sends it to as many, so it reaches 10,000 in five hops."""

GIVE_TIMEOUT_S = 10.0
"""Time for a peer to take evidence, to open a stream of it, and to say what it asks for."""

SHOW_TIMEOUT_S = 60.0

LISTED_S = 60.0
"""Time for which a lookup of a model's servers is reused when evidence comes in. Anyone can make keys that convict
themselves, and so make all users of a model look it up."""

NONE_LISTED_S = 10.0
"""The same for a lookup that failed, after which the previous result is used, or that found no server: the first one
may have just started."""

MAX_MODELS = 8
"""Models that this node served or used last, to whose servers it sends evidence."""

MAX_PEERS = 1024

MAX_TAKEN = 32
"""Pieces of evidence that are checked for one peer within an hour. Anyone can make keys that convict themselves."""

HOUR_S = 3600.0
MAX_SHOWING = 4
SHOWN_AGAIN_S = 30.0
"""Minimum time before the same peer is shown all evidence again."""


class ServerConvictions:
    """One node's evidence about servers. `store` keeps it for the next process. `num_refused` counts evidence that
    proved nothing."""

    def __init__(self, network: Network, membership: Membership, *, store: EvidenceFolder | None = None) -> None:
        self.num_refused = 0
        self._network = network
        self._membership = membership
        self._store = store
        self._listeners: set[Callable[[ServerBan], None]] = set()
        self._bans = ServerBans()
        self._models = NewestItems[str, None](MAX_MODELS)
        self._asked_s = NewestItems[str, float](MAX_PEERS)
        self._listed = NewestItems[str, tuple[float, frozenset[str]]](MAX_MODELS)
        self._ignored = NewestItems[str, None](MAX_PEERS)
        self._taken = NewestItems[str, tuple[float, int]](MAX_PEERS)
        self._shown_s = NewestItems[str, float](MAX_PEERS)
        self._num_showing = 0
        self._checking = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._rng = random.SystemRandom()

    @property
    def bans(self) -> tuple[ServerBan, ...]:
        """The bans that hold now, newest evidence last."""
        return self._bans.at(self._network.now())

    @property
    def peers(self) -> frozenset[str]:
        """The servers that are not used now."""
        return self._bans.peers(self._network.now())

    def watch(self, listener: Callable[[ServerBan], None]) -> Callable[[], None]:
        """Call `listener` with each new ban from now on, also those that `recall` finds. Return a function that ends
        this."""
        self._listeners.add(listener)
        return partial(self._listeners.discard, listener)

    async def recall(self) -> None:
        """Take the evidence in the store."""
        if self._store is None:
            return
        for data in await asyncio.to_thread(self._store.read):
            try:
                await self._take(data, sender=self._network.peer_id, was_kept=True)
            except (PeerViolation, IntegrityError) as error:
                logger.warning("stored evidence about a server proves nothing: %s", error)

    async def serve(self, model: str) -> None:
        """Receive and show evidence as a server of `model`."""
        self._models[model] = None
        await self._network.serve(f"{SERVER_EVIDENCE_METHOD}/{model}", self._on_evidence)
        await self._network.serve_stream(f"{SERVER_BANS_METHOD}/{model}", self._answer)

    @staticmethod
    def methods_of(model: str) -> tuple[str, ...]:
        """Return the methods by which a server of `model` receives and shows evidence."""
        return f"{SERVER_EVIDENCE_METHOD}/{model}", f"{SERVER_BANS_METHOD}/{model}"

    def found(self, data: bytes) -> None:
        """Take evidence that this node found, and send it to others, in a task."""
        self._spawn(self._take_own(data))

    async def take(self, data: bytes, sender: str) -> bool:
        """Take encoded Evidence from a peer, and return whether it adds a ban. Raises PeerViolation or IntegrityError
        if it proves nothing, and PeerRefused if the peer sends too much."""
        if sender in self._ignored:
            raise PeerViolation("its earlier evidence proved nothing", peer_id=sender)
        try:
            return await self._take(data, sender=sender)
        except (PeerViolation, IntegrityError):
            self.num_refused += 1
            if sender != self._network.peer_id:
                self._ignored[sender] = None
            raise

    async def learn(self, model: str, servers: Mapping[str, ServeRecord], *, within_s: float = 0.0) -> None:
        """Ask some of a model's `servers` for their evidence, if it is due. The first time for a model, wait at most
        `within_s` for the answers."""
        now_s = asyncio.get_running_loop().time()
        is_first = model not in self._asked_s
        self._models[model] = None
        if self._asked_s.get(model, now_s) > now_s:
            return
        convicted = self.peers | {self._network.peer_id}
        serving = [peer for peer, record in servers.items() if record.state == "serving" and peer not in convicted]
        if not serving:
            return
        self._asked_s[model] = now_s + ASK_AGAIN_S * self._rng.uniform(0.5, 1.5)
        asked = self._rng.sample(serving, min(NUM_ASKED, len(serving)))
        asking = [self._spawn(self._ask(peer_id, model)) for peer_id in asked]
        if is_first and within_s:
            await asyncio.wait(asking, timeout=within_s)

    async def close(self) -> None:
        """Cancel running tasks. Bans stay, and further evidence may be taken."""
        await end_tasks(*self._tasks)

    async def _on_evidence(self, peer_id: str, data: bytes) -> bytes:
        await self.take(data, peer_id)
        return b""

    async def _take_own(self, data: bytes) -> None:
        try:
            await self.take(data, self._network.peer_id)
        except (PeerViolation, IntegrityError) as error:
            logger.warning("evidence that this node found proves nothing: %s", error)

    async def _take(self, data: bytes, *, sender: str, was_kept: bool = False) -> bool:
        is_own = sender == self._network.peer_id
        async with self._checking:  # one at a time, of all senders
            wrong = read_possession(data)
            peer_id, at = accused(wrong)
            now = self._network.now()
            await self._forget(self._bans.lapse(now))  # first: a lie soon after that of an ended ban is news
            # a later date is no violation: clocks differ, and an honest peer may have sent it on; it counts once it is
            # due
            if not self._bans.is_news(peer_id, at) or at > now + MAX_AGE_S:
                return False
            if not is_own:
                self._count(sender)
            verdict = await asyncio.to_thread(check_possession, wrong, self._network.network_id)
            listed = await self._listed_servers() | ({peer_id} if is_own else frozenset())
            if verdict.until <= now:
                await self._forget({peer_id})  # an earlier process may have stored it
                return False
            ban = ServerBan(verdict=verdict, data=data)
            displaced = self._bans.add(ban, listed)
            if displaced is None:
                return False
            if not was_kept:
                await self._keep(peer_id, data)
            await self._forget(displaced)
        logger.warning("%s is convicted and not used any more: it %s", peer_id, verdict.reason)
        if not was_kept:
            self._spawn(self._spread(data, {sender, peer_id}))
        for listener in tuple(self._listeners):
            listener(ban)
        return True

    def _count(self, sender: str) -> None:
        """Count a piece of evidence that is checked for a peer. Raises PeerRefused if the peer has sent too many."""
        now_s = asyncio.get_running_loop().time()
        since_s, num = self._taken.get(sender, (now_s, 0))
        if now_s - since_s >= HOUR_S:
            since_s, num = now_s, 0
        if num >= MAX_TAKEN:
            raise PeerRefused(
                "too much evidence came from this peer",
                remedy="ask again later",
                retry_after_s=since_s + HOUR_S - now_s,
            )
        self._taken[sender] = since_s, num + 1

    async def _listed_servers(self) -> frozenset[str]:
        """Return the servers of the models that this node serves or uses."""
        return frozenset().union(*[await self._servers_of(model) for model in tuple(self._models)])

    async def _servers_of(self, model: str) -> frozenset[str]:
        now_s = asyncio.get_running_loop().time()
        until_s, servers = self._listed.get(model, (now_s, frozenset()))
        if now_s >= until_s:
            lasts_s = NONE_LISTED_S
            try:
                servers = frozenset(await self._membership.servers(model))
                lasts_s = LISTED_S if servers else NONE_LISTED_S
            except SwarmError as error:
                logger.info("looking up the servers of %s: %s", model, error)
            self._listed[model] = now_s + lasts_s, servers
        return servers

    async def _spread(self, data: bytes, left_out: Collection[str]) -> None:
        """Send evidence to some servers of each model that this node serves or uses."""
        chosen: set[str] = set()
        for model in tuple(self._models):
            others = (await self._servers_of(model)) - self.peers - chosen - {self._network.peer_id, *left_out}
            for peer_id in self._rng.sample(sorted(others), min(SPREAD, len(others))):
                chosen.add(peer_id)
                self._spawn(self._give(peer_id, model, data))

    async def _give(self, peer_id: str, model: str, data: bytes) -> None:
        try:
            await self._network.call(peer_id, f"{SERVER_EVIDENCE_METHOD}/{model}", data, timeout_s=GIVE_TIMEOUT_S)
        except SwarmError as error:
            logger.info("%s did not take evidence about a server: %s", peer_id, error)

    async def _ask(self, peer_id: str, model: str) -> None:
        """Ask a server of `model` for its evidence, and take it."""
        request = ServerBansRequest(known=tuple(self.peers))
        try:
            async with (
                asyncio.timeout(SHOW_TIMEOUT_S),
                self._network.stream(peer_id, f"{SERVER_BANS_METHOD}/{model}", timeout_s=GIVE_TIMEOUT_S) as stream,
            ):
                await stream.send(request.to_bytes())
                await stream.finish()
                for _ in range(limits.MAX_SERVER_BANS):
                    await self.take(await stream.receive(), peer_id)
        except EndOfStream:
            return
        except (SwarmError, TimeoutError) as error:
            logger.info("%s does not show its evidence about servers: %s", peer_id, error)

    async def _answer(self, peer_id: str, stream: Stream) -> None:
        """Show a peer the evidence that it does not know. Raises PeerRefused if it asks too often, or too many ask at
        once."""
        async with asyncio.timeout(GIVE_TIMEOUT_S):
            request = ServerBansRequest.from_bytes(await stream.receive())
        now_s = asyncio.get_running_loop().time()
        wait_s = self._shown_s.get(peer_id, now_s - SHOWN_AGAIN_S) + SHOWN_AGAIN_S - now_s
        if wait_s > 0 or self._num_showing >= MAX_SHOWING:
            raise PeerRefused(
                "it is showing its evidence to others now", remedy="ask again", retry_after_s=max(1.0, wait_s)
            )
        self._shown_s[peer_id] = now_s
        self._num_showing += 1
        try:
            async with asyncio.timeout(SHOW_TIMEOUT_S):
                for ban in self._bans.unknown_to(request.known, self._network.now()):
                    await stream.send(ban.data)
        finally:
            self._num_showing -= 1

    async def _keep(self, peer_id: str, data: bytes) -> None:
        if self._store is not None:
            await asyncio.to_thread(self._store.keep, peer_id, data)

    async def _forget(self, peer_ids: Collection[str]) -> None:
        if self._store is not None:
            for peer_id in peer_ids:
                await asyncio.to_thread(self._store.forget, peer_id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name="evidence about servers")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
