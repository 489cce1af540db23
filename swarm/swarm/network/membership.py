"""Membership: publishes this node's records, looks up the records of others, and estimates round trips.

One plane serves training and serving. A record's content is a claim of its peer. This module guarantees only that the
peer signed it, that it is well formed, and that it is the newest of that peer. Existing models and runs are read from
the node records, into which `Announcer` writes what the node has announced, so that no further index must be kept.

`Announcer.run` is the one task that publishes; `announce` and `withdraw` send it messages and return at once. The
context of `Membership` owns that task, and is cancelled if the task fails.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from swarm_protocol import limits
from swarm_protocol.envelope import Envelope, read_record
from swarm_protocol.errors import PeerTimeout, PeerViolation, SwarmError
from swarm_protocol.records import (
    Kind,
    NodeRecord,
    Record,
    ServeRecord,
    TrainerRecord,
    child_keys,
    lookup_key,
)

from swarm.network.announcer import Announcer, MembershipCounters
from swarm.network.interface import Network
from swarm.network.round_trips import RoundTrips
from swarm.newest_items import NewestItems

LOOKUP_TIMEOUT_S = 5.0
"""Several hops through the store over slow links; longer, and asking again is better than waiting."""

MAX_LISTED_PEERS = 4096
"""Maximum peers listed for one model, one run, or all nodes. More would cost memory without a better choice."""

MAX_LISTED_MODELS = 64
"""Maximum models listed. The caller looks up the servers of each, and anyone can make up names."""

FULL_RECORDS = limits.MAX_RECORDS_PER_KEY // 2
"""Living records of a key from which on the keys below it are read, too. Some of a full key's are of the dead, and
what comes free is soon taken by those below."""

NUM_SAMPLED = 32
"""Records of a key from which on a sample is taken of them, and of those below it."""

MAX_SAMPLED = 64
"""Four times as many as a member asks where they are."""

MAX_VIEWS = 64
"""Models and runs whose records are remembered. Their names may come from users of a gateway."""

logger = logging.getLogger(__name__)

R = TypeVar("R", NodeRecord, ServeRecord, TrainerRecord)


@dataclass(frozen=True, slots=True)
class _Seen:
    record: Record | None
    """None: malformed, remembered so that it is looked at once."""
    envelope: Envelope


class Membership:
    """This node's place in the network's membership. A context manager: leave it before the network closes.

    Within it each announced record is published, and again before half its life is over; leaving it tells everyone that
    this node leaves. A failure to publish is counted, warned of and retried. Should the publishing itself fail, which
    only a bug can do, it is logged, the task that entered the context is cancelled, and the context raises SwarmError.
    """

    def __init__(self, network: Network, *, lifetime_s: float = limits.RECORD_LIFETIME_S) -> None:
        self._network = network
        self._announcer = Announcer(network, lifetime_s)
        self._num_malformed = 0
        self._num_dropped = 0
        self._warned_of = NewestItems[str, None](MAX_LISTED_PEERS)  # signers of malformed records
        self._views: dict[tuple[Kind, str], dict[str, _Seen]] = {}
        self._samples: dict[str, dict[str, _Seen]] = {}
        self._chance = random.Random(network.peer_id)
        self._round_trips = RoundTrips(network)
        self._tasks = asyncio.TaskGroup()
        self._publishing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Membership:
        await self._round_trips.serve()
        await self._tasks.__aenter__()
        self._publishing = self._tasks.create_task(self._publish(), name="membership")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._publishing is not None
        self._publishing.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)  # which leaves the body's own error as it is
        except ExceptionGroup as failures:
            task = asyncio.current_task()
            is_ours = task is not None and not task.cancelling()
            if error is None or (is_ours and isinstance(error, asyncio.CancelledError)):
                raise SwarmError(
                    "this node's membership failed internally", remedy="restart this node; its log says why"
                ) from failures.exceptions[0]

    async def _publish(self) -> None:
        try:
            await self._announcer.run()
        except Exception:
            logger.exception("this node's records are published no more")
            raise

    @property
    def counters(self) -> MembershipCounters:
        """Return the current counters."""
        return MembershipCounters(
            num_publish_failures=self._announcer.num_failures,
            num_malformed=self._num_malformed,
            num_dropped=self._num_dropped,
        )

    # --- what this node says ----------------------------------------------------------------------------------------

    def announce(self, record: Record) -> None:
        """Publish `record` now and from then on, in place of the earlier one of its kind and name.

        A node record's models and runs are filled in from the other announced records.
        """
        self._announcer.announce(record)

    def withdraw(self, kind: Kind, name: str = "") -> None:
        """Say goodbye in the record of this kind and name, and publish it no more. Nothing if it was not announced."""
        self._announcer.withdraw(kind, name)

    def renew(self) -> None:
        """Publish all announced records anew now: others may have forgotten them while this machine was suspended."""
        self._announcer.renew()

    # --- what others say --------------------------------------------------------------------------------------------

    async def nodes(self, *, timeout_s: float = LOOKUP_TIMEOUT_S) -> dict[str, NodeRecord]:
        """Return the newest record of every node by peer id, this one's included. Raises PeerTimeout, as the next three
        do."""
        return await self._look_up(NodeRecord, "nodes", "", timeout_s)

    async def servers(self, model: str, *, timeout_s: float = LOOKUP_TIMEOUT_S) -> dict[str, ServeRecord]:
        """Return the servers of `model`, draining ones included. Raises ValueError for an invalid name."""
        return await self._look_up(ServeRecord, "serve", model, timeout_s)

    async def trainers(self, run: str, *, timeout_s: float = LOOKUP_TIMEOUT_S) -> dict[str, TrainerRecord]:
        """Return the trainers of `run`, finished and leaving ones included. Raises ValueError for an invalid name."""
        return await self._look_up(TrainerRecord, "train", run, timeout_s)

    async def some_trainers(self, run: str, *, timeout_s: float = LOOKUP_TIMEOUT_S) -> dict[str, TrainerRecord]:
        """Return all trainers of `run`, or of many about MAX_SAMPLED that are drawn by chance: what it costs does not
        grow with the run. Of repeated calls those stay that were heard of last."""
        now, root = self._network.now(), lookup_key("train", run)
        view = self._samples.pop(run, {})
        self._samples[run] = view
        for envelope in await self._find_some(root, timeout_s):
            self._remember(view, envelope)
        living = [(seen.envelope.issued_at, peer_id) for peer_id, seen in view.items() if seen.envelope.holds_at(now)]
        self._samples[run] = kept = {peer_id: view[peer_id] for _, peer_id in sorted(living)[-MAX_SAMPLED:]}
        if len(self._samples) > MAX_VIEWS:
            del self._samples[next(iter(self._samples))]
        return {
            peer_id: seen.record for peer_id, seen in sorted(kept.items()) if isinstance(seen.record, TrainerRecord)
        }

    async def _find_some(self, key: str, timeout_s: float) -> list[Envelope]:
        """Return the records under `key` and, where these are many, under a key below that is drawn by chance, and so
        on."""
        until = asyncio.get_running_loop().time() + timeout_s
        found = level = await self._network.lookup([key], timeout_s=timeout_s, max_records=NUM_SAMPLED)
        for _ in range(limits.MAX_KEY_DEPTH):
            if len(level) < NUM_SAMPLED:
                break
            key = self._chance.choice(child_keys(key))
            left_s = until - asyncio.get_running_loop().time()
            try:
                level = await self._network.lookup([key], timeout_s=left_s, max_records=NUM_SAMPLED)
            except PeerTimeout:
                break
            found = [*found, *level]
        return found

    def ages_s(self, kind: Kind, name: str = "") -> dict[str, float]:
        """Return the age in seconds of each peer's newest record in the last lookup of `kind` and `name`.

        No peer is asked. Living peers renew their records twice in the life of each, which is RECORD_LIFETIME_S, and up
        to five times as long for node records (`Announcer`); a dead one stays listed for all of it. The age is 0 for a
        peer whose clock is ahead.
        """
        now = self._network.now()
        view = self._views.get((kind, name), {})
        return {peer_id: max(0.0, now - seen.envelope.issued_at) for peer_id, seen in view.items()}

    async def models(self, *, timeout_s: float = LOOKUP_TIMEOUT_S) -> tuple[str, ...]:
        """Return the models that live nodes say they serve a span of, sorted; of very many those that most nodes
        name."""
        nodes = await self.nodes(timeout_s=timeout_s)
        num_nodes = Counter(model for node in nodes.values() for model in node.models)
        likeliest = sorted(num_nodes, key=lambda model: (-num_nodes[model], model))
        return tuple(sorted(likeliest[:MAX_LISTED_MODELS]))

    async def _look_up(self, record_type: type[R], kind: Kind, name: str, timeout_s: float) -> dict[str, R]:
        envelopes = await self._find_all(lookup_key(kind, name), timeout_s)
        view = self._view(kind, name)
        for envelope in sorted(envelopes, key=lambda envelope: envelope.peer_id):
            self._remember(view, envelope)
        return {peer_id: seen.record for peer_id, seen in sorted(view.items()) if isinstance(seen.record, record_type)}

    async def _find_all(self, root: str, timeout_s: float) -> list[Envelope]:
        """Return the records under `root` and under the keys below those that are full, level by level.

        Raises PeerTimeout if nobody answered for `root`; records below may be missing when time is up.
        """
        until = asyncio.get_running_loop().time() + timeout_s
        found = await self._network.lookup([root], timeout_s=timeout_s)
        level, deeper = found, True
        while deeper:
            held = Counter(envelope.subject for envelope in level)
            keys = [key for full in held if held[full] >= FULL_RECORDS for key in child_keys(full)]
            deeper = bool(keys) and len(found) < MAX_LISTED_PEERS
            if deeper:
                left_s = until - asyncio.get_running_loop().time()
                try:
                    level = await self._network.lookup(keys, timeout_s=left_s)
                except PeerTimeout:
                    break
                found += level
        return found

    def _view(self, kind: Kind, name: str) -> dict[str, _Seen]:
        """Return the remembered records that are valid now. A lookup that misses a record or finds an old one hides
        nothing."""
        now = self._network.now()
        view = self._views.pop((kind, name), {})
        self._views[kind, name] = view = {
            peer_id: seen for peer_id, seen in view.items() if seen.envelope.holds_at(now)
        }
        if len(self._views) > MAX_VIEWS:
            del self._views[next(iter(self._views))]
        return view

    def _remember(self, view: dict[str, _Seen], envelope: Envelope) -> None:
        known = view.get(envelope.peer_id)
        if known is None and len(view) >= MAX_LISTED_PEERS:
            self._num_dropped += 1
            return
        # of two of the same moment the later found one counts: the store has replaced the other
        if known is not None and (
            known.envelope is envelope or known.envelope.issued_at > envelope.issued_at or known.envelope == envelope
        ):
            return
        record = None
        try:
            record = read_record(envelope)
        except PeerViolation as violation:
            self._num_malformed += 1
            if envelope.peer_id not in self._warned_of:
                logger.warning("skipped a record of %s: %s", envelope.peer_id, violation)
            self._warned_of[envelope.peer_id] = None
        view[envelope.peer_id] = _Seen(record, envelope)

    # --- how far they are -------------------------------------------------------------------------------------------

    async def rtt_s(self, peer_id: str, *, timeout_s: float = LOOKUP_TIMEOUT_S) -> float:
        """Return the seconds of a round trip, measured with real calls and remembered for a minute. Raises
        PeerError."""
        return await self._round_trips.measure_s(peer_id, timeout_s=timeout_s)

    async def rtts_ms(
        self,
        peer_ids: Iterable[str],
        *,
        max_peers: int = limits.MAX_RTT_PEERS,
        timeout_s: float = LOOKUP_TIMEOUT_S,
    ) -> dict[str, float]:
        """Return the milliseconds of a round trip to those of `peer_ids` that answer within `timeout_s`, the nearest
        first.

        For a record's `rtt_ms`. At most `max_peers`, this node left out. Of those not measured within the last minute
        a few, drawn by chance, are measured now, all at once: called again and again it comes to know all of them.
        """
        others = [peer_id for peer_id in dict.fromkeys(peer_ids) if peer_id != self._network.peer_id]
        await self._round_trips.measure_some(others, timeout_s=timeout_s)
        return dict(list(self.known_rtts_ms(others).items())[:max_peers])

    async def silent(self, peer_ids: Iterable[str], *, timeout_s: float) -> set[str]:
        """Return those of `peer_ids` that do not answer within `timeout_s`, though their records may hold for a minute
        yet. Of many only a few are asked, drawn by chance."""
        return await self._round_trips.silent(list(peer_ids), timeout_s=timeout_s)

    def known_rtts_ms(self, peer_ids: Iterable[str]) -> dict[str, float]:
        """Return the milliseconds of a round trip to those of `peer_ids` whose is known, the nearest first. Asks
        nobody."""
        known = {peer_id: self._round_trips.known_s(peer_id) for peer_id in peer_ids}
        found = [(rtt_s * 1e3, peer_id) for peer_id, rtt_s in known.items() if rtt_s is not None]
        return {peer_id: rtt_ms for rtt_ms, peer_id in sorted(found)}

    def all_known_rtts_s(self) -> list[float]:
        """Return the seconds of a round trip to every peer whose is known. Asks nobody."""
        return self._round_trips.all_known_s()
