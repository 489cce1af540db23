"""Membership: publishes this node's records, looks up the records of others, and estimates round trips.

Training and serving use the same membership. A record's content is a claim of its peer. This module guarantees only
that the peer signed the record, that it is well formed, and that it is the newest record found of that peer. Existing
models and runs are read from the node records, into which `Announcer` writes what the node has announced, so that no
further index is needed.

`Announcer.run` is the one task that publishes; `announce` and `withdraw` only queue, and return at once. The context of
`Membership` owns that task, and is cancelled if the task fails.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
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
    root_key,
)

from swarm.network.announcer import Announcer
from swarm.network.interface import Network
from swarm.network.round_trips import RoundTrips
from swarm.newest_items import NewestItems

LOOKUP_TIMEOUT_S = 5.0
"""Time-out of a lookup: several hops through the DHT over slow links. After that, a new lookup is better than
waiting."""

MAX_LISTED_PEERS = 4096
"""Maximum peers listed for one model, one run, or all nodes. More peers would cost memory and not improve a choice."""

MAX_LISTED_MODELS = 64
"""Maximum models listed. The caller looks up the servers of each, and anyone can announce made-up names."""

FULL_RECORDS = limits.MAX_RECORDS_PER_KEY // 2
"""If a key has at least this many valid records, its child keys are read, too. A key that was full may have fewer valid
records now, since some of its nodes are gone."""

NUM_SAMPLED = 32
"""Records that a sample takes of a key. If a key has this many, one of its child keys is sampled, too."""

MAX_SAMPLED = 64
"""Maximum trainers that a sample returns: four times as many as a member asks for their standing."""

MAX_WARNED_OF = 32
"""Maximum signers of malformed records whom the log names. Others are only counted, since anyone can make keys."""

MAX_VIEW_BYTES = MAX_LISTED_PEERS * 2**10
"""Maximum bytes of the records that are remembered of one model, one run, or all nodes: 1 KiB for each peer. Decoded,
they take up to three times as much. The largest records would take eight times as much for each of MAX_VIEWS."""

MAX_VIEWS = 64
"""Maximum models and runs whose records are remembered. Their names may come from users of a gateway."""

logger = logging.getLogger(__name__)

R = TypeVar("R", NodeRecord, ServeRecord, TrainerRecord)


@dataclass(frozen=True, slots=True)
class _Seen:
    record: Record | None
    """None if malformed; it is remembered so that it is parsed only once."""
    envelope: Envelope


class Membership:
    """One node's part in the network's membership. It is a context manager, which must be left before the network
    closes.

    Within the context each announced record is published, and again before half of its lifetime is over. Leaving the
    context publishes that this node leaves. A failed publication is counted, logged and retried. If a bug ends the
    publishing task, the bug is logged, the task that entered the context is cancelled, and the context raises
    SwarmError.

    `num_malformed` counts records of others that were signed but malformed, and `num_dropped` those beyond
    MAX_LISTED_PEERS or MAX_VIEW_BYTES.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._announcer = Announcer(network)
        self.num_malformed = 0
        self.num_dropped = 0
        self._warned_of = set[str]()  # signers of malformed records
        self._views = NewestItems[tuple[Kind, str], dict[str, _Seen]](MAX_VIEWS)
        self._samples = NewestItems[str, dict[str, _Seen]](MAX_VIEWS)
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
            await self._tasks.__aexit__(None, None, None)  # without the body's error, which is raised unchanged
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
            logger.exception("this node no longer publishes its records")
            raise

    @property
    def num_publish_failures(self) -> int:
        """The number of publications that no peer took in time. Each was tried again."""
        return self._announcer.num_failures

    # --- what this node says ----------------------------------------------------------------------------------------

    def announce(self, record: Record) -> None:
        """Publish `record` now and again until it is withdrawn, in place of the earlier one of its kind and name.

        A node record's models and runs are filled in from the other announced records.
        """
        self._announcer.announce(record)

    def withdraw(self, kind: Kind, name: str = "") -> None:
        """Publish the record of this kind and name a last time, as leaving. Do nothing if it was not announced."""
        self._announcer.withdraw(kind, name)

    def renew(self) -> None:
        """Publish all announced records again now: others may have dropped them while this machine was suspended."""
        self._announcer.renew()

    # --- what others say --------------------------------------------------------------------------------------------

    async def nodes(self) -> dict[str, NodeRecord]:
        """Return the newest record of every node by peer id, including this one's. Raises PeerTimeout, as do the next
        three methods."""
        return (await self._look_up(NodeRecord, "nodes", [""]))[""]

    async def servers(self, model: str) -> dict[str, ServeRecord]:
        """Return the servers of `model`, draining ones included. Raises ValueError for an invalid name."""
        return (await self.all_servers([model]))[model]

    async def all_servers(self, models: Collection[str]) -> dict[str, dict[str, ServeRecord]]:
        """Return the servers of each of the `models`, looked up at once: anyone can make up names, and a lookup of each
        would take its own round trips."""
        return await self._look_up(ServeRecord, "serve", models)

    async def trainers(self, run: str, *, timeout_s: float = LOOKUP_TIMEOUT_S) -> dict[str, TrainerRecord]:
        """Return the trainers of `run`, finished and leaving ones included. Raises ValueError for an invalid name."""
        return (await self._look_up(TrainerRecord, "train", [run], timeout_s))[run]

    async def some_trainers(self, run: str) -> dict[str, TrainerRecord]:
        """Return all trainers of `run`, or a random sample of at most MAX_SAMPLED of many, so that the cost does not
        grow with the run. Repeated calls add to the sample, and keep the trainers whose records are newest."""
        now, root = self._network.now(), lookup_key("train", run)
        view = self._samples[run] = self._samples.get(run, {})
        for envelope in await self._find_some(root):
            self._remember(view, envelope)
        living = [(seen.envelope.issued_at, peer_id) for peer_id, seen in view.items() if seen.envelope.holds_at(now)]
        self._samples[run] = kept = {peer_id: view[peer_id] for _, peer_id in sorted(living)[-MAX_SAMPLED:]}
        return {
            peer_id: seen.record for peer_id, seen in sorted(kept.items()) if isinstance(seen.record, TrainerRecord)
        }

    async def _find_some(self, key: str) -> list[Envelope]:
        """Return a sample of the records under `key`. If it has NUM_SAMPLED, add a sample of a random child key, and so
        on down."""
        until = asyncio.get_running_loop().time() + LOOKUP_TIMEOUT_S
        found = level = await self._network.lookup([key], timeout_s=LOOKUP_TIMEOUT_S, max_records=NUM_SAMPLED)
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

        No peer is asked. A live peer renews a record after about half of its lifetime, which is RECORD_LIFETIME_S, or
        up to five times as long for node records (`Announcer`). A dead peer stays listed until the lifetime is over.
        The age is 0 for a peer whose clock is ahead.
        """
        now = self._network.now()
        view = self._views.get((kind, name), {})
        return {peer_id: max(0.0, now - seen.envelope.issued_at) for peer_id, seen in view.items()}

    async def models(self) -> tuple[str, ...]:
        """Return the models that node records name, sorted; at most MAX_LISTED_MODELS, those that most nodes name."""
        nodes = await self.nodes()
        num_nodes = Counter(model for node in nodes.values() for model in node.models)
        likeliest = sorted(num_nodes, key=lambda model: (-num_nodes[model], model))
        return tuple(sorted(likeliest[:MAX_LISTED_MODELS]))

    async def _look_up(
        self, record_type: type[R], kind: Kind, names: Collection[str], timeout_s: float = LOOKUP_TIMEOUT_S
    ) -> dict[str, dict[str, R]]:
        roots = {lookup_key(kind, name): name for name in names}
        envelopes = await self._find_all(list(roots), timeout_s) if roots else []
        views = {name: self._view(kind, name) for name in names}
        found: dict[str, list[Envelope]] = {name: [] for name in names}
        for envelope in sorted(envelopes, key=lambda envelope: envelope.peer_id):
            found[roots[root_key(envelope.subject)]].append(envelope)
        for name, view in views.items():
            for envelope in self._fitting(view, found[name]):
                self._remember(view, envelope)
        return {
            name: {peer: seen.record for peer, seen in sorted(view.items()) if isinstance(seen.record, record_type)}
            for name, view in views.items()
        }

    async def _find_all(self, roots: Sequence[str], timeout_s: float) -> list[Envelope]:
        """Return the records under `roots` and under the keys below those that are full, level by level. A root with
        enough records is read no further, so that a crowded one costs the others nothing.

        Raises PeerTimeout if nobody answered for the `roots`; records below may be missing when time is up.
        """
        until = asyncio.get_running_loop().time() + timeout_s
        found = level = await self._network.lookup(roots, timeout_s=timeout_s)
        num_found = Counter[str]()
        while True:
            held = Counter(envelope.subject for envelope in level)
            num_found.update(root_key(envelope.subject) for envelope in level)
            full = [key for key in held if held[key] >= FULL_RECORDS and num_found[root_key(key)] < MAX_LISTED_PEERS]
            keys = [child for key in full for child in child_keys(key)]
            if not keys:
                return found
            left_s = until - asyncio.get_running_loop().time()
            try:
                level = await self._network.lookup(keys, timeout_s=left_s)
            except PeerTimeout:
                return found
            found = [*found, *level]

    def _view(self, kind: Kind, name: str) -> dict[str, _Seen]:
        """Return the remembered records that are still valid, so that a lookup that misses a record, or finds an older
        one, does not hide it."""
        now = self._network.now()
        known = self._views.get((kind, name), {})
        view = {peer_id: seen for peer_id, seen in known.items() if seen.envelope.holds_at(now)}
        self._views[kind, name] = view
        return view

    def _fitting(self, view: dict[str, _Seen], found: Sequence[Envelope]) -> Sequence[Envelope]:
        """Return those of the `found` records that fit a view. If all together are too large, the largest ones are left
        out, and dropped from the view."""
        sizes = {peer_id: len(seen.envelope.payload) for peer_id, seen in view.items()}
        sizes |= {envelope.peer_id: len(envelope.payload) for envelope in found}
        if sum(sizes.values()) <= MAX_VIEW_BYTES:
            return found
        smallest = sorted(sizes, key=sizes.__getitem__)
        totals = accumulate(sizes[peer_id] for peer_id in smallest)
        fits = {peer_id for peer_id, total in zip(smallest, totals, strict=True) if total <= MAX_VIEW_BYTES}
        self.num_dropped += len(sizes) - len(fits)
        for peer_id in view.keys() - fits:
            del view[peer_id]
        return [envelope for envelope in found if envelope.peer_id in fits]

    def _remember(self, view: dict[str, _Seen], envelope: Envelope) -> None:
        known = view.get(envelope.peer_id)
        if known is None and len(view) >= MAX_LISTED_PEERS:
            self.num_dropped += 1
            return
        # of two records with one issue time, the one found later counts, since it has replaced the other in the DHT
        if known is not None and (
            known.envelope is envelope or known.envelope.issued_at > envelope.issued_at or known.envelope == envelope
        ):
            return
        record = None
        try:
            record = read_record(envelope)
        except PeerViolation as violation:
            self.num_malformed += 1
            if envelope.peer_id not in self._warned_of and len(self._warned_of) < MAX_WARNED_OF:
                self._warned_of.add(envelope.peer_id)
                logger.warning("skipped a record of %s: %s", envelope.peer_id, violation)
        view[envelope.peer_id] = _Seen(record, envelope)

    # --- how far they are -------------------------------------------------------------------------------------------

    async def rtts_ms(
        self,
        peer_ids: Iterable[str],
        *,
        max_peers: int = limits.MAX_RTT_PEERS,
        timeout_s: float = LOOKUP_TIMEOUT_S,
    ) -> dict[str, float]:
        """Return round trips in milliseconds to at most `max_peers` of `peer_ids`, the nearest first, for a record's
        `rtt_ms`.

        This node is left out. A few peers that were not measured within the last minute, drawn at random, are measured
        now, within `timeout_s` and all at once. So repeated calls measure all of them.
        """
        others = [peer_id for peer_id in dict.fromkeys(peer_ids) if peer_id != self._network.peer_id]
        await self._round_trips.measure_some(others, timeout_s=timeout_s)
        return dict(list(self.known_rtts_ms(others).items())[:max_peers])

    async def silent(self, peer_ids: Iterable[str], *, timeout_s: float) -> set[str]:
        """Return those of `peer_ids` that do not answer within `timeout_s`, though their records may be valid for
        another minute. If there are many, only a few are asked, drawn at random."""
        return await self._round_trips.silent(list(peer_ids), timeout_s=timeout_s)

    def known_rtts_ms(self, peer_ids: Iterable[str]) -> dict[str, float]:
        """Return the known round trips to `peer_ids` in milliseconds, the nearest first. Sends nothing."""
        known = {peer_id: self._round_trips.known_s(peer_id) for peer_id in peer_ids}
        found = [(rtt_s * 1e3, peer_id) for peer_id, rtt_s in known.items() if rtt_s is not None]
        return {peer_id: rtt_ms for rtt_ms, peer_id in sorted(found)}

    def all_known_rtts_s(self) -> list[float]:
        """Return all known round trips in seconds. Sends nothing."""
        return self._round_trips.all_known_s()
