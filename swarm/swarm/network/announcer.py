"""Publishing a node's own records, again before they expire, and withdrawing them.

The task that `Membership` starts runs `Announcer.run`; other nodes' records are looked up in `membership`.
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
    publish_key,
)

from swarm.network.interface import Network

logger = logging.getLogger(__name__)

PUBLISH_TIMEOUT_S = 5.0
"""Time-out of publishing; also the time that leaving takes when nobody answers."""

SETTLING_S = 120.0
MAX_LIVES = 5
"""The longer a node has been there, the longer it is likely to stay. After twice SETTLING_S its node record, whose end
nobody waits for, lives twice as long and is published half as often, and so on up to MAX_LIVES times: one that is gone
stays listed for at most half of the time that it was there. Records of other kinds do not."""

RETRY_FRACTION = 0.1
"""Pause after a failed publication, as a fraction of a record's lifetime: four tries before the old record expires."""

MOVE_UP_EVERY = 10
"""Publications after which a record under a key below a full one is offered to the one above again: five minutes, and
longer for the node record of a node that has been there for long."""

SEES_NOBODY = "no peer took it: this node sees nobody, or its clock is ahead of theirs"


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipCounters:
    """Tolerated failures since the start. A healthy node shows zeros, except for failures while it is alone."""

    num_publish_failures: int  # records that no peer took in time; each was tried again
    num_malformed: int  # records of others that were signed and made no sense
    num_dropped: int  # records of others beyond MAX_LISTED_PEERS


@dataclass(slots=True)
class _Announced:
    record: Record
    due_s: float = 0.0
    """Due time on the loop's clock; 0 means at once."""
    is_last: bool = False


class Announcer:
    """A failure to publish is counted, warned of once per trouble and retried."""

    def __init__(self, network: Network, lifetime_s: float) -> None:
        self.num_failures = 0
        self._network = network
        self._lifetime_s = lifetime_s
        self._since_s = 0.0
        self._announced: dict[tuple[Kind, str], _Announced] = {}
        self._changed = asyncio.Event()
        self._failing: set[tuple[Kind, str]] = set()
        self._depths: dict[tuple[Kind, str], int] = {}
        self._num_published = 0
        self._was_heard = False
        self._jitter = random.Random(network.peer_id)

    def announce(self, record: Record) -> None:
        """Publish `record` now and from then on, in place of the earlier one of its kind and name."""
        self._put(_Announced(record))

    def withdraw(self, kind: Kind, name: str) -> None:
        """Say goodbye in the record of this kind and name, and publish it no more. Nothing if it was not announced."""
        if announced := self._announced.get((kind, name)):
            self._put(_Announced(_last_record(announced.record), is_last=True))

    def renew(self) -> None:
        """Publish all records anew now."""
        for announced in self._announced.values():
            announced.due_s = 0.0
        self._changed.set()

    async def run(self) -> None:
        """Publish until cancelled. Then, or on failure, publish every record once more as leaving."""
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
        self._announced[_kind_and_name(announced.record)] = announced
        node = self._announced.get(("nodes", ""))
        if node is not None and node.record != (current := self._with_holdings(node.record)):
            self._announced["nodes", ""] = _Announced(current, is_last=node.is_last)
        self._changed.set()

    def _with_holdings(self, record: Record) -> Record:
        """Return the node record as given, naming the models and runs that are announced beside it."""
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
        if key not in self._failing:  # once per trouble: retries would fill the log
            self._failing.add(key)
            # the first node of a network has nobody to tell yet, and nothing is wrong with that
            level = logging.WARNING if self._was_heard or failure != SEES_NOBODY else logging.INFO
            logger.log(level, "could not publish the %s record: %s", " ".join(key).strip(), failure)

    async def _failure_to_publish(self, key: tuple[Kind, str], record: Record, life_s: float) -> str:
        self._num_published += 1
        depth = self._depths.get(key, 0)
        if depth and self._num_published % MOVE_UP_EVERY == 0:
            depth -= 1
        try:
            async with asyncio.timeout(PUBLISH_TIMEOUT_S):
                taken = await self._is_taken(record, depth, life_s)
                while not taken and depth < limits.MAX_KEY_DEPTH:
                    depth += 1
                    taken = await self._is_taken(record, depth, life_s)
                self._depths[key] = depth if taken else 0
        except TimeoutError:
            return f"nobody confirmed it within {PUBLISH_TIMEOUT_S:g} s"
        except SwarmError as error:
            return str(error)
        return "" if taken else SEES_NOBODY

    async def _is_taken(self, record: Record, depth: int, life_s: float) -> bool:
        key = publish_key(record, self._network.peer_id, depth)
        return await self._network.publish(key, record.to_bytes(), lifetime_s=life_s)

    def _life_s(self, record: Record) -> float:
        if not isinstance(record, NodeRecord):
            return self._lifetime_s
        num_lives = (asyncio.get_running_loop().time() - self._since_s) / SETTLING_S
        return self._lifetime_s * min(MAX_LIVES, max(1.0, num_lives))


def _kind_and_name(record: Record) -> tuple[Kind, str]:
    match record:
        case NodeRecord():
            return "nodes", ""
        case ServeRecord():
            return "serve", record.model
        case TrainerRecord():
            return "train", record.run


def _last_record(record: Record) -> Record:
    """Return the record that takes the place of a living one. A finished trainer stays finished: others wait for no
    more."""
    match record:
        case NodeRecord():
            return replace(record, state="leaving")
        case ServeRecord():
            return replace(record, state="draining")
        case TrainerRecord():
            return record if record.state == "finished" else replace(record, state="leaving")
