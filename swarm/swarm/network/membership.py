"""Who is there: publishes this node's records, looks up everyone's, and says how far a peer is.

One plane for training and serving. What a record says is claimed by its peer; only that the peer signed it, that it is
well formed, and that it is the newest of that peer is vouched for here. Which models and runs exist is read from the
node records, into which this module writes what the node has announced: no further index has to be kept and expired.

The task that its context runs is the one that publishes; `announce` and `withdraw` leave it messages, so both return at
once.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TypeVar

from swarm_protocol import limits
from swarm_protocol.envelope import Envelope
from swarm_protocol.errors import PeerViolation, SwarmError
from swarm_protocol.records import (
    Kind,
    NodeRecord,
    Record,
    ServeRecord,
    TrainerRecord,
    lookup_keys,
    publish_key,
)
from swarm_protocol.signed_record import read_record

from swarm.network.interface import Network
from swarm.network.round_trips import RoundTrips

PUBLISH_TIMEOUT_S = 5.0
"""Also how long leaving may take when nobody answers."""

LOOKUP_TIMEOUT_S = 5.0
"""Several hops through the store over slow links; longer, and asking again is better than waiting."""

RETRY_FRACTION = 0.1
"""Of a record's life, after a failure: four tries before the earlier record is gone."""

MAX_LISTED_PEERS = 4096
"""Of one model, one run, or all nodes. More would cost memory without giving anyone a better choice."""

MAX_LISTED_MODELS = 64
"""Whoever lists them looks up the servers of each, and anyone can make up names."""

MAX_VIEWS = 64
"""Models and runs whose records are remembered. Their names may come from users of a gateway."""

SEES_NOBODY = "no peer took it; this node sees nobody"

logger = logging.getLogger(__name__)

R = TypeVar("R", NodeRecord, ServeRecord, TrainerRecord)


@dataclass(slots=True)
class _Announced:
    record: Record
    due_s: float = 0.0
    """On the loop's clock; 0: at once."""
    is_farewell: bool = False


@dataclass(frozen=True, slots=True)
class _Seen:
    record: Record | None
    """None: malformed, remembered so that it is looked at and warned of once."""
    envelope: Envelope


class Membership:
    """This node's place in the network's membership. A context manager: leave it before the network closes.

    Within it each announced record is published, and again before half its life is over; leaving it tells everyone that
    this node leaves. A failure is counted, warned of and retried.

    `num_publish_failures`, `num_malformed` and `num_dropped` count what was tolerated: records that no peer took in
    time, that made no sense, and that were too many.
    """

    def __init__(self, network: Network, *, lifetime_s: float = limits.RECORD_LIFETIME_S) -> None:
        self.num_publish_failures = 0
        self.num_malformed = 0
        self.num_dropped = 0
        self._network = network
        self._lifetime_s = lifetime_s
        self._announced: dict[tuple[Kind, str], _Announced] = {}
        self._changed = asyncio.Event()
        self._failing: set[tuple[Kind, str]] = set()
        self._was_heard = False
        self._jitter = random.Random(network.peer_id)
        self._views: dict[tuple[Kind, str], dict[str, _Seen]] = {}
        self._round_trips = RoundTrips(network)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Membership:
        await self._round_trips.serve()
        self._task = asyncio.create_task(self._run(), name="membership")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        try:
            await asyncio.wait({self._task})
        except asyncio.CancelledError:
            self._task.cancel()  # no time for goodbyes
            raise
        if not self._task.cancelled():
            self._task.result()

    # --- what this node says ----------------------------------------------------------------------------------------

    def announce(self, record: Record) -> None:
        """Publish `record` now and from then on, in place of the earlier one of its kind and name.

        A node record's models and runs are filled in from the other announced records.
        """
        self._put(_Announced(record))

    def withdraw(self, kind: Kind, name: str = "") -> None:
        """Say goodbye in the record of this kind and name, and publish it no more. Nothing if it was not announced."""
        if announced := self._announced.get((kind, name)):
            self._put(_Announced(_farewell(announced.record), is_farewell=True))

    async def _run(self) -> None:
        try:
            while True:
                self._changed.clear()
                await self._publish_due()
                next_s = min((announced.due_s for announced in self._announced.values()), default=None)
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(next_s):
                        await self._changed.wait()
        finally:
            for announced in list(self._announced.values()):
                self._put(_Announced(_farewell(announced.record), is_farewell=True))
            await self._publish_due()

    def _put(self, announced: _Announced) -> None:
        self._announced[_kind_and_name(announced.record)] = announced
        node = self._announced.get(("nodes", ""))
        if node is not None and node.record != (current := self._with_holdings(node.record)):
            self._announced["nodes", ""] = _Announced(current, is_farewell=node.is_farewell)
        self._changed.set()

    def _with_holdings(self, record: Record) -> Record:
        """The node record as given, naming the models and runs that are announced beside it."""
        assert isinstance(record, NodeRecord)
        held: dict[Kind, list[str]] = {"serve": [], "train": []}
        for (kind, name), announced in sorted(self._announced.items()):
            if kind != "nodes" and not announced.is_farewell:
                held[kind].append(name)
        return replace(
            record,
            models=tuple(held["serve"][: limits.MAX_MODELS_PER_NODE]),
            runs=tuple(held["train"][: limits.MAX_RUNS_PER_NODE]),
        )

    async def _publish_due(self) -> None:
        now_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as publishing:
            for key, announced in list(self._announced.items()):
                if announced.due_s <= now_s:
                    publishing.create_task(self._publish(key, announced))

    async def _publish(self, key: tuple[Kind, str], announced: _Announced) -> None:
        failure = await self._failure_to_publish(announced.record)
        if failure:
            self._count_failure(key, failure)
        else:
            self._failing.discard(key)
            self._was_heard = True
        if self._announced.get(key) is not announced:
            return  # replaced meanwhile
        if announced.is_farewell:
            del self._announced[key]
            return
        wait_s = self._lifetime_s * (RETRY_FRACTION if failure else self._jitter.uniform(0.45, 0.5))
        announced.due_s = asyncio.get_running_loop().time() + wait_s

    def _count_failure(self, key: tuple[Kind, str], failure: str) -> None:
        self.num_publish_failures += 1
        if key not in self._failing:  # once per trouble: retries would fill the log
            self._failing.add(key)
            # the first node of a network has nobody to tell yet, and nothing is wrong with that
            level = logging.WARNING if self._was_heard or failure != SEES_NOBODY else logging.INFO
            logger.log(level, "could not publish the %s record: %s", " ".join(key).strip(), failure)

    async def _failure_to_publish(self, record: Record) -> str:
        try:
            async with asyncio.timeout(PUBLISH_TIMEOUT_S):
                taken = await self._network.publish(
                    publish_key(record, self._network.peer_id), record.to_bytes(), lifetime_s=self._lifetime_s
                )
        except TimeoutError:
            return f"nobody confirmed it within {PUBLISH_TIMEOUT_S:g} s"
        except SwarmError as error:
            return str(error)
        return "" if taken else SEES_NOBODY

    # --- what others say --------------------------------------------------------------------------------------------

    async def nodes(self, *, timeout_s: float = LOOKUP_TIMEOUT_S) -> dict[str, NodeRecord]:
        """The newest record of every node by peer id, this one's included. Raises PeerTimeout, as the next three do."""
        return await self._look_up(NodeRecord, "nodes", "", timeout_s)

    async def servers(self, model: str, *, timeout_s: float = LOOKUP_TIMEOUT_S) -> dict[str, ServeRecord]:
        """Who serves `model`, draining ones included. Raises ValueError if that cannot be a model's name."""
        return await self._look_up(ServeRecord, "serve", model, timeout_s)

    async def trainers(self, run: str, *, timeout_s: float = LOOKUP_TIMEOUT_S) -> dict[str, TrainerRecord]:
        """Who trains `run`, finished and leaving ones included. Raises ValueError if that cannot be a run's name."""
        return await self._look_up(TrainerRecord, "train", run, timeout_s)

    async def models(self, *, timeout_s: float = LOOKUP_TIMEOUT_S) -> tuple[str, ...]:
        """The models that live nodes say they serve a span of, sorted; of very many those that most nodes name."""
        nodes = await self.nodes(timeout_s=timeout_s)
        num_nodes = Counter(model for node in nodes.values() for model in node.models)
        likeliest = sorted(num_nodes, key=lambda model: (-num_nodes[model], model))
        return tuple(sorted(likeliest[:MAX_LISTED_MODELS]))

    async def _look_up(self, record_type: type[R], kind: Kind, name: str, timeout_s: float) -> dict[str, R]:
        envelopes = await self._network.lookup(lookup_keys(kind, name), timeout_s=timeout_s)
        view = self._view(kind, name)
        for envelope in sorted(envelopes, key=lambda envelope: envelope.peer_id):
            self._remember(view, envelope)
        return {peer_id: seen.record for peer_id, seen in sorted(view.items()) if isinstance(seen.record, record_type)}

    def _view(self, kind: Kind, name: str) -> dict[str, _Seen]:
        """What is remembered and has not expired: a lookup that misses a record, or finds an old one, hides nothing."""
        now = self._network.now()
        view = self._views.pop((kind, name), {})
        self._views[kind, name] = view = {
            peer_id: seen for peer_id, seen in view.items() if seen.envelope.expires_at > now
        }
        if len(self._views) > MAX_VIEWS:
            del self._views[next(iter(self._views))]
        return view

    def _remember(self, view: dict[str, _Seen], envelope: Envelope) -> None:
        known = view.get(envelope.peer_id)
        if known is None and len(view) >= MAX_LISTED_PEERS:
            self.num_dropped += 1
            return
        # of two of the same moment the later found one counts: the store has replaced the other
        if known is not None and (known.envelope.issued_at > envelope.issued_at or known.envelope == envelope):
            return
        record = None
        try:
            record = read_record(envelope)
        except PeerViolation as violation:
            self.num_malformed += 1
            logger.warning("skipped a record of %s: %s", envelope.peer_id, violation)
        view[envelope.peer_id] = _Seen(record, envelope)

    # --- how far they are -------------------------------------------------------------------------------------------

    async def rtt_s(self, peer_id: str, *, timeout_s: float = LOOKUP_TIMEOUT_S) -> float:
        """Seconds of a round trip, measured with real calls and remembered for a minute. Raises PeerError."""
        return await self._round_trips.measure_s(peer_id, timeout_s=timeout_s)


def _kind_and_name(record: Record) -> tuple[Kind, str]:
    match record:
        case NodeRecord():
            return "nodes", ""
        case ServeRecord():
            return "serve", record.model
        case TrainerRecord():
            return "train", record.run


def _farewell(record: Record) -> Record:
    """The record that takes the place of a living one. A finished trainer stays finished: others wait for no more."""
    match record:
        case NodeRecord():
            return replace(record, state="leaving")
        case ServeRecord():
            return replace(record, state="draining")
        case TrainerRecord():
            return record if record.state == "finished" else replace(record, state="leaving")
