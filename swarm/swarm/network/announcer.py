"""Publishes a node's own records, publishes them again before they expire, and withdraws them.

A task of `Membership` runs `Announcer.run`. `membership` looks up the records of other nodes.
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import suppress
from dataclasses import dataclass, replace

from swarm_protocol import limits
from swarm_protocol.errors import SwarmError
from swarm_protocol.records import (
    Kind,
    NodeRecord,
    Record,
    ServeRecord,
    TrainerRecord,
    kind_and_name,
    publish_key,
)

from swarm.network.interface import Network

logger = logging.getLogger(__name__)

PUBLISH_TIMEOUT_S = 5.0
"""Time-out of publishing, and so the longest time that leaving takes when no peer answers."""

SETTLING_S = 120.0
MAX_LIVES = 5
"""A node that has been up for long is likely to stay up. So the lifetime of its node record grows with the time that it
has been up, by that time / SETTLING_S, from one lifetime to MAX_LIVES, and the record is published less often. A node
that is gone stays listed for at most half of the time that it was up, or for one lifetime. Records of other kinds keep
one lifetime, since others wait for their end."""

RETRY_FRACTION = 0.1
"""Pause after a failed publication, as a fraction of a record's lifetime: it leaves about four tries before the old
record expires."""

MOVE_UP_EVERY = 10
"""Once in this many publications of the node, a record under a child key is offered to the parent key again, which was
full. With one record, that is every five minutes, and less often for the node record of a node that is up for long."""

SEES_NOBODY = "no peer took it: this node sees no peer, or its clock is ahead of theirs"


@dataclass(slots=True)
class _Announced:
    record: Record
    due_s: float = 0.0
    """Due time on the loop's clock; 0 means at once."""
    is_last: bool = False


class Announcer:
    """Publishes the announced records. It counts and retries each failed publication, and logs the first of a
    series."""

    def __init__(self, network: Network) -> None:
        self.num_failures = 0
        self._network = network
        self._since_s = 0.0
        self._announced: dict[tuple[Kind, str], _Announced] = {}
        self._changed = asyncio.Event()
        self._failing: set[tuple[Kind, str]] = set()
        self._depths: dict[tuple[Kind, str], int] = {}
        self._num_published = 0
        self._was_heard = False
        self._jitter = random.Random(network.peer_id)

    def announce(self, record: Record) -> None:
        """Publish `record` now and again until it is withdrawn, in place of the earlier one of its kind and name."""
        self._put(_Announced(record))

    def withdraw(self, kind: Kind, name: str) -> None:
        """Publish the record of this kind and name a last time, as leaving. Do nothing if it was not announced."""
        if announced := self._announced.get((kind, name)):
            self._put(_Announced(_last_record(announced.record), is_last=True))

    def renew(self) -> None:
        """Publish all records again now."""
        for announced in self._announced.values():
            announced.due_s = 0.0
        self._changed.set()

    async def run(self) -> None:
        """Publish until cancelled. Then, or after a failure, publish every record a last time, as leaving."""
        self._since_s = asyncio.get_running_loop().time()
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
                self._put(_Announced(_last_record(announced.record), is_last=True))
            await self._publish_due()

    def _put(self, announced: _Announced) -> None:
        self._announced[kind_and_name(announced.record)] = announced
        node = self._announced.get(("nodes", ""))
        if node is not None and node.record != (current := self._with_holdings(node.record)):
            self._announced["nodes", ""] = _Announced(current, is_last=node.is_last)
        self._changed.set()

    def _with_holdings(self, record: Record) -> Record:
        """Return the node record with the models and runs that are announced besides it."""
        assert isinstance(record, NodeRecord)
        held: dict[Kind, list[str]] = {"serve": [], "train": []}
        for (kind, name), announced in sorted(self._announced.items()):
            if kind != "nodes" and not announced.is_last:
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
        life_s = self._life_s(announced.record)
        failure = await self._failure_to_publish(key, announced.record, life_s)
        if failure:
            self._count_failure(key, failure)
        else:
            self._failing.discard(key)
            self._was_heard = True
        if self._announced.get(key) is not announced:
            return  # replaced meanwhile
        if announced.is_last:
            del self._announced[key]
            return
        wait_s = life_s * (RETRY_FRACTION if failure else self._jitter.uniform(0.45, 0.5))
        announced.due_s = asyncio.get_running_loop().time() + wait_s

    def _count_failure(self, key: tuple[Kind, str], failure: str) -> None:
        self.num_failures += 1
        if key not in self._failing:  # only the first failure of a series: retries would fill the log
            self._failing.add(key)
            # the first node of a network normally has no peer yet
            level = logging.WARNING if self._was_heard or failure != SEES_NOBODY else logging.INFO
            logger.log(level, "could not publish the %s record: %s", " ".join(key).strip(), failure)

    async def _failure_to_publish(self, key: tuple[Kind, str], record: Record, life_s: float) -> str:
        self._num_published += 1
        depth = self._depths.get(key, 0)
        if depth and self._num_published % MOVE_UP_EVERY == 0:
            depth -= 1
        first = depth
        try:
            async with asyncio.timeout(PUBLISH_TIMEOUT_S):
                taken = await self._is_taken(record, depth, life_s)
                while not taken and depth < limits.MAX_KEY_DEPTH:
                    depth += 1
                    taken = await self._is_taken(record, depth, life_s)
                # perhaps no peer was in reach at first, and nobody reads below a key that is not full
                if taken and depth > first and await self._is_taken(record, first, life_s):
                    depth = first
                self._depths[key] = depth if taken else 0
        except TimeoutError:
            return f"no peer confirmed it within {PUBLISH_TIMEOUT_S:g} s"
        except SwarmError as error:
            return str(error)
        return "" if taken else SEES_NOBODY

    async def _is_taken(self, record: Record, depth: int, life_s: float) -> bool:
        key = publish_key(record, self._network.peer_id, depth)
        return await self._network.publish(key, record.to_bytes(), lifetime_s=life_s)

    def _life_s(self, record: Record) -> float:
        if not isinstance(record, NodeRecord):
            return limits.RECORD_LIFETIME_S
        num_lives = (asyncio.get_running_loop().time() - self._since_s) / SETTLING_S
        return limits.RECORD_LIFETIME_S * min(MAX_LIVES, max(1.0, num_lives))


def _last_record(record: Record) -> Record:
    """Return the last version of a record, which says that its node leaves. A finished trainer stays finished, which is
    all that others wait for."""
    match record:
        case NodeRecord():
            return replace(record, state="leaving")
        case ServeRecord():
            return replace(record, state="draining")
        case TrainerRecord():
            return record if record.state == "finished" else replace(record, state="leaving")
