"""Builds what the gateway reports about models: OpenAI's objects, and sentences that say which blocks are not
served."""

from __future__ import annotations

import time
from collections.abc import Sequence

from swarm.client import AsyncClient, ModelStatus
from swarm.newest_items import NewestItems
from swarm.router.revisions import short_revision
from swarm_protocol.errors import first_few

from swarm_node.gateway import http_limits
from swarm_node.gateway.responses import GatewayHealth, ModelHealth, ModelList, ServedModel, ServedRevision
from swarm_node.http.http_error import HttpError

Spans = Sequence[tuple[int, int]]


class Models:
    """The swarm's models by name, and when this gateway first saw each."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._seen = NewestItems[str, int](http_limits.MAX_SEEN_MODELS)

    async def all(self) -> ModelList:
        return ModelList(object="list", data=[self._object(model) for model in await self._client.models()])

    async def one(self, name: str) -> ServedModel:
        return self._object(await self.find(name))

    async def check_served(self, name: str) -> None:
        """Check that servers announce every block of the model.

        Raises HttpError: 404 for an unknown model, 503 with the blocks that no server has.
        """
        model = await self.find(name)
        if model.missing:
            raise HttpError(
                503,
                _describe(model, model.missing),
                code="model_not_served",
                param="model",
                retry_after_s=http_limits.RETRY_AFTER_S,
            )

    async def health(self, running_requests: int) -> GatewayHealth:
        """Return the health of all models. One complete model makes `status` "ok", because anyone can announce a part
        of a model.

        A server that this gateway failed to reach counts as gone until it answers or publishes a newer record. `age_s`
        is the age of the oldest record of the other servers. A killed server that nobody has tried to reach counts
        until its record expires (after 60 s); a live one renews its record every 30 s.
        """
        models = await self._client.models()
        return GatewayHealth(
            status="ok" if any(not model.unreachable for model in models) else "unavailable",
            detail="; ".join(_describe(model, model.unreachable) for model in models)
            or "no server of any model is known",
            models=[
                ModelHealth(
                    id=model.name,
                    num_blocks=model.num_blocks,
                    missing_blocks=list(model.unreachable),
                    age_s=round(model.age_s, 1),
                )
                for model in models
            ],
            running_requests=running_requests,
        )

    async def find(self, name: str) -> ModelStatus:
        """Return the model. Raises HttpError 404 if it is unknown."""
        if found := await self._client.model(name):
            return found
        names = [f"'{served}'" for model in await self._client.models() for served in _names(model, name)]
        known = first_few(names, http_limits.MAX_NAMED_MODELS)
        raise HttpError(
            404,
            f"the model '{name}' is not served here; served: {known or 'none'}",
            code="model_not_found",
            param="model",
        )

    def _object(self, model: ModelStatus) -> ServedModel:
        created = self._seen[model.name] = self._seen.get(model.name) or int(time.time())
        return ServedModel(
            id=model.name,
            object="model",
            created=created,
            owned_by="swarm",
            revision=model.revision,
            publisher=model.publisher or None,
            manifest=model.manifest or None,
            standing=model.standing,
            other_revisions=[
                ServedRevision(revision=other.revision, num_servers=other.num_servers, is_whole=other.is_whole)
                for other in model.others
            ],
        )


def _names(model: ModelStatus, asked: str) -> list[str]:
    """Return the names by which a request can name the model. They have revisions if `asked` has an @ after its
    name."""
    if not asked.startswith(f"{model.name}@"):
        return [model.name]
    return [
        f"{model.name}@{short_revision(revision)}"
        for revision in (model.revision, *(other.revision for other in model.others))
    ]


def _describe(model: ModelStatus, gaps: Spans) -> str:
    if not gaps:
        return f"{model.name}: all {model.num_blocks} blocks are served"
    written = ", ".join(f"{start}:{end}" for start, end in gaps)
    others = ", ".join(f"{model.name}@{short_revision(other.revision)}" for other in model.others if other.is_whole)
    of_these = f" in revision {short_revision(model.revision)}; complete: {others}" if others else ""
    return f"{model.name}: nobody serves blocks {written} of {model.num_blocks}{of_these}"
