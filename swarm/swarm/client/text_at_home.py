"""Keeps text at home: holds the models of which a client runs both ends, and loads the ends with the first request for
each.

No token id of a prompt or an answer then leaves this process. Other models are refused, so that no text leaves by
mistake. `swarm.serving.local_ends` computes, and imports torch, which other clients do not need. There is one
`TextAtHome` per client, on its event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from swarm_protocol.errors import ConfigError

from swarm.client.catalog import ChosenRevision, ModelStatus
from swarm.ended_tasks import end_tasks
from swarm.network.interface import Network
from swarm.serving.local_ends.kept_model import NUM_LAST_BLOCKS, KeptModel, WantedModel

if TYPE_CHECKING:
    from swarm.serving.local_ends.local_ends import LocalEnds

logger = logging.getLogger(__name__)

KeptModels = Mapping[str, KeptModel | Path | str]
"""The models that a client keeps at home, by name. A path is a directory with the model's files."""


class TextAtHome:
    """Holds the kept models by name. Raises ConfigError for one that cannot be kept."""

    def __init__(self, network: Network, models: KeptModels) -> None:
        self._network = network
        if not (
            isinstance(models, Mapping) and all(isinstance(kept, KeptModel | Path | str) for kept in models.values())
        ):
            raise ConfigError(f"text_at_home is {models!r:.80}", remedy='give text_at_home={"MODEL": "DIRECTORY"}')
        self._models = {
            name: kept if isinstance(kept, KeptModel) else KeptModel(source=kept) for name, kept in models.items()
        }
        self._opening: dict[tuple[str, str], asyncio.Task[LocalEnds]] = {}

    @property
    def is_on(self) -> bool:
        """Return whether text stays at home, for all models."""
        return bool(self._models)

    def keeps(self, model: str) -> bool:
        """Return whether both ends of the model are kept here."""
        return model in self._models

    def completed(self, status: ModelStatus) -> ModelStatus:
        """Return the status of a model in which the blocks that are kept here do not count as missing."""
        kept = self._models.get(status.name)
        if kept is None:
            return status
        first, last = kept.num_first_blocks, status.num_blocks - NUM_LAST_BLOCKS
        missing, unreachable = (_between(spans, first, last) for spans in (status.missing, status.unreachable))
        return replace(status, missing=missing, unreachable=unreachable)

    async def ends(self, chosen: ChosenRevision) -> LocalEnds:
        """Return both ends of the revision. The first call for a revision loads them.

        Raises ConfigError for a model that is not kept, and for files that are of another revision or do not fit;
        IntegrityError for files that differ from the publisher's manifest; SessionError after a defect.
        """
        kept = self._models.get(chosen.name)
        if kept is None:
            raise ConfigError(
                f"this client keeps text at home, and has no part of {chosen.name} here: servers would see the text",
                remedy=f"ask for {' or '.join(sorted(self._models))}, or keep {chosen.name} at home, too",
            )
        key = chosen.name, chosen.revision.digest
        opening = self._opening.get(key)
        if opening is None:
            opening = self._opening[key] = asyncio.create_task(
                _open(self._network, kept, chosen), name=f"load both ends of {chosen.name}"
            )
            opening.add_done_callback(partial(self._forget_failed, key))
        # several requests may wait for the loading, and one of them may be cancelled
        ends = await asyncio.shield(opening)
        ends.check()
        return ends

    def _forget_failed(self, key: tuple[str, str], opening: asyncio.Task[LocalEnds]) -> None:
        if opening.cancelled() or opening.exception() is not None:
            self._opening.pop(key, None)

    def refuse(self, what: str) -> None:
        """Raise ConfigError if text stays at home, since `what` would send it to servers."""
        if self.is_on:
            raise ConfigError(
                f"this client keeps text at home, and {what} would give it to servers",
                remedy="use a client without text_at_home for that",
            )

    async def close(self) -> None:
        """End all sessions on the kept ends, and free their memory."""
        openings, self._opening = list(self._opening.values()), {}
        for opening in openings:
            if opening.done() and not opening.cancelled() and opening.exception() is None:
                await opening.result().close()
            else:
                await end_tasks(opening)


def _between(spans: Sequence[tuple[int, int]], first: int, last: int) -> tuple[tuple[int, int], ...]:
    cut = [(max(start, first), min(end, last)) for start, end in spans]
    return tuple((start, end) for start, end in cut if start < end)


async def _open(network: Network, kept: KeptModel, chosen: ChosenRevision) -> LocalEnds:
    wanted = WantedModel(name=chosen.name, revision=chosen.revision.digest, published=chosen.published)
    logger.info("loading both ends of %s, whose text stays here", chosen.name)
    # in a thread, since importing torch takes over a second, and the loop has streams to serve meanwhile
    await asyncio.to_thread(import_module, "swarm.serving.local_ends.local_ends")
    from swarm.serving.local_ends.local_ends import LocalEnds  # noqa: PLC0415 - brings torch

    ends = await LocalEnds.open(network, kept, wanted)
    spans = " and ".join(f"{hop.start}:{hop.end}" for hop in ends.hops)
    logger.info("the text of requests to %s stays here: blocks %s run in this process", chosen.name, spans)
    return ends
