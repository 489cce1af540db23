"""What this node says of itself: publishes its records, again before half their life is over, and says goodbye.

The task that runs `Announcer.run` is the one that publishes; `put` and `withdraw` leave it messages, so both return at
once. Who may see the records, and what others say, is left to `membership`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import suppress
from dataclasses import dataclass, replace

from swarm_protocol import limits
from swarm_protocol.errors import SwarmError
from swarm_protocol.records import Kind, NodeRecord, Record, ServeRecord, TrainerRecord, publish_key

from swarm.network.interface import Network

PUBLISH_TIMEOUT_S = 5.0
"""Also how long leaving may take when nobody answers."""

RETRY_FRACTION = 0.1
"""Of a record's life, after a failure: four tries before the earlier record is gone."""

SEES_NOBODY = "no peer took it; this node sees nobody"

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Announced:
    record: Record
    due_s: float = 0.0
    """On the loop's clock; 0: at once."""
    is_farewell: bool = False


class Announcer:
    """A failure to publish is counted, warned of once per trouble and retried."""

    def __init__(self, network: Network, lifetime_s: float) -> None:
        self.num_failures = 0
        self._network = network
        self._lifetime_s = lifetime_s
        self._announced: dict[tuple[Kind, str], _Announced] = {}
        self._changed = asyncio.Event()
        self._failing: set[tuple[Kind, str]] = set()
        self._was_heard = False
        self._jitter = random.Random(network.peer_id)

    def announce(self, record: Record) -> None:
        """Publish `record` now and from then on, in place of the earlier one of its kind and name."""
        self._put(_Announced(record))

    def withdraw(self, kind: Kind, name: str) -> None:
        """Say goodbye in the record of this kind and name, and publish it no more. Nothing if it was not announced."""
        if announced := self._announced.get((kind, name)):
            self._put(_Announced(_farewell(announced.record), is_farewell=True))

    async def run(self) -> None:
        """Until it is cancelled; then, or when it fails, it says goodbye in every record."""
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
        self.num_failures += 1
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
