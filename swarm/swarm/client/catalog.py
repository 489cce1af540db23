"""Holds a client's knowledge of the swarm's models: their servers, the missing blocks, and the revision to use.

There is one catalog per client, on its event loop. It remembers MAX_MODELS models, and their servers for
MODELS_FRESH_S. Revisions that have answered before take precedence, in the order of their first use: a revision that
answered only while the first one was gone does not keep the name. If a name has a believed publisher
(`swarm.client.publishers`), only revisions that this publisher signed are used under the name.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches

from swarm_protocol.errors import ConfigError, PeerTimeout
from swarm_protocol.manifest_messages import PublishedManifest, manifest_dtype
from swarm_protocol.records import ServeRecord

from swarm.client.possession_checks import PossessionChecks
from swarm.client.publishers import KnownPublishers, PublisherStanding, UsedRevisions
from swarm.network.membership import Membership
from swarm.newest_items import NewestItems
from swarm.router.revisions import (
    MIN_PIN_CHARS,
    Revision,
    choose,
    describe_revisions,
    revisions,
    short_revision,
    split_pin,
)
from swarm.serving.evidence.server_convictions import ServerConvictions
from swarm.serving.manifest.manifest_book import ManifestBook
from swarm.serving.session.peer_health import PeerHealth

NAME_IT = "give the model's name as its servers tell it"
"""The remedy for a value that cannot be the name of a model."""

MAX_MODELS = 8

MODELS_FRESH_S = 2.0
"""Seconds for which a list of models is valid. A gateway asks for it with each request."""

LOST_S = 10.0
"""Seconds of failing servers after which a used revision is given up for another, so that one failure is not enough."""

SHOWN_S = 1.0
"""Seconds for which a first request waits for the evidence that a model's servers show against other servers."""

LEARN_S = 5.0
"""Seconds for which a first request waits for the manifests of a model that has no settled revision yet."""

MAX_OTHERS = 8
"""Maximum other revisions of a model in its status. Anyone can make up more."""

MAX_WARNED = 256

Servers = Mapping[str, ServeRecord]
"""Servers of one model, by peer id."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRevision:
    """Other weights that are served under the same name. They can answer if no blocks are `missing`."""

    revision: str
    num_blocks: int
    num_servers: int
    missing: tuple[tuple[int, int], ...]

    @property
    def is_whole(self) -> bool:
        return not self.missing


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """The status of a model in the `revision` that this client uses. The model can answer if no blocks are `missing`.

    `others` are the next best revisions. `unreachable` also contains the blocks of servers that this client failed to
    reach, until they answer or publish a newer record. `age_s` is the age in seconds of the oldest record in use. A
    killed server counts until its record expires, or this client has failed to reach it. `manifest` is the digest, in
    hex, of the manifest that `publisher` signed, and `dtype` the one in which servers hold its weights; all three are
    empty for an unpublished model.
    """

    name: str
    revision: str
    num_blocks: int
    num_servers: int
    missing: tuple[tuple[int, int], ...]
    unreachable: tuple[tuple[int, int], ...]
    age_s: float
    others: tuple[OtherRevision, ...] = ()
    manifest: str = ""
    publisher: str = ""
    standing: PublisherStanding = "unpublished"
    dtype: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRevision:
    """The revision of the model `name` to use, and the others, the best first.

    `published` is its manifest, or None if it has none, or no server sent it. `is_pinned` is set if the client or the
    request pins the revision.
    """

    name: str
    revision: Revision
    others: Sequence[Revision]
    published: PublishedManifest | None = None
    is_pinned: bool = False


class ModelCatalog:
    """The models that a client knows. `pins` map a model's name to the start of the only revision to use. Raises
    ConfigError for bad ones."""

    def __init__(
        self,
        membership: Membership,
        health: PeerHealth,
        manifests: ManifestBook,
        *,
        pins: Mapping[str, str],
        used: UsedRevisions,
        publishers: KnownPublishers,
        possession: PossessionChecks,
        convictions: ServerConvictions,
    ) -> None:
        if not isinstance(pins, Mapping):
            raise ConfigError(f"pins is {pins!r:.80}", remedy='give pins={"MODEL": "REVISION"}')
        if not isinstance(used, UsedRevisions):
            raise ConfigError(f"used is {used!r:.80}", remedy="give used=UsedRevisions(…)")
        for name, pin in pins.items():
            if split_pin(f"{name}@{pin}") != (name, pin):
                raise ConfigError(
                    f"{pin!r:.80} is not the beginning of a revision of {name}",
                    remedy=f"give {MIN_PIN_CHARS} or more of its digits, as `swarm-node models` shows it",
                )
        self._membership = membership
        self._health = health
        self._pins = pins
        self._used = used
        self._manifests = manifests
        self._publishers = publishers
        self._possession = possession
        self._seen = NewestItems[str, tuple[float, Servers]](MAX_MODELS)
        self._convictions = convictions
        self._all: tuple[float, Mapping[str, Servers]] = (-MODELS_FRESH_S, {})
        self._turn = asyncio.Lock()
        self._failure: tuple[float, PeerTimeout] | None = None  # of the last lookup of all models, and when it began
        self._warned = NewestItems[tuple[str, str], None](MAX_WARNED)

    async def models(self) -> list[ModelStatus]:
        """Return the models that are served at least in part. Raises PeerTimeout."""
        if await self._look_at_all():
            async with asyncio.TaskGroup() as tasks:
                for name, servers in self._all[1].items():
                    tasks.create_task(self._learn(name, servers))
        found = []
        for name, servers in self._all[1].items():
            # a model whose pin fits several revisions is left out
            with suppress(ConfigError):
                found += [self._status(chosen)] if (chosen := self._choose(name, "", servers)) else []
        return found

    async def status(self, model: str) -> ModelStatus | None:
        """Return the status of one model, or None if nobody serves it, or the pinned revision. Raises PeerTimeout."""
        name, pin = _name_and_pin(model)
        try:
            servers = await self._servers(name)
        except ValueError:
            return None
        await self._learn(name, servers)
        chosen = self._choose(name, pin, servers)
        return self._status(chosen) if chosen else None

    async def newest_servers(self, model: str) -> Servers:
        """Look up the servers of the revision to use; nobody serves an invalid name. Raises PeerTimeout."""
        name, pin = _name_and_pin(model)
        try:
            servers = await self._membership.servers(name)
        except ValueError:
            return {}
        await self._learn(name, servers)
        chosen = self._choose(name, pin, servers)
        return chosen.revision.servers if chosen else {}

    async def to_use(self, model: str) -> ChosenRevision:
        """Choose the revision that is to answer. Raises ConfigError if there is none.

        Logs a warning once about other revisions. Asks the servers to prove that they hold the files, and some of them
        for evidence against servers: the first request for a model waits a moment for that.
        """
        name, pin = _name_and_pin(model)
        try:
            servers = await self._servers(name)
        except ValueError as error:
            raise ConfigError(str(error), remedy=NAME_IT, field="model") from error
        await self._learn(name, servers)
        chosen = self._choose(name, pin, servers)
        if chosen is None:
            raise await self._unknown(name, servers)
        if self._publishers.believed(name):
            self._warn_of_strangers(chosen)
        elif not self._pin(name, pin):
            self._warn_of_others(chosen)
        if chosen.published is not None:
            self._possession.start(chosen.revision.servers, chosen.published)
            await self._convictions.learn(name, chosen.revision.servers, within_s=SHOWN_S)
        return chosen

    def answered(self, chosen: ChosenRevision) -> None:
        """Record that the revision has answered: it takes precedence over others from now on, and its publisher is
        remembered for the name."""
        self._used.add(chosen.name, chosen.revision.digest)
        if chosen.published is not None and not chosen.is_pinned:
            self._publishers.answered(chosen.name, chosen.published.publisher)

    async def _look_at_all(self) -> bool:
        """Look up all models and their servers if the last lookup is too old. Concurrent callers share one lookup.
        Return whether this call made it. Raises PeerTimeout, also in callers that waited for a lookup that failed."""
        now_s = asyncio.get_running_loop().time
        asked_s = now_s()
        async with self._turn:
            began_s = now_s()
            if asked_s - self._all[0] < MODELS_FRESH_S:
                return False
            if self._failure is not None and self._failure[0] >= asked_s:
                raise PeerTimeout(self._failure[1].message, remedy=self._failure[1].remedy)
            try:
                names = await self._membership.models()
                self._all = (began_s, await self._membership.all_servers(names))
            except PeerTimeout as error:
                self._failure = began_s, error
                raise
            return True

    async def _servers(self, name: str) -> Servers:
        """Return the servers of all revisions, at most MODELS_FRESH_S old; a session looks them up again if one
        fails."""
        now_s = asyncio.get_running_loop().time()
        seen_s, servers = self._seen.get(name, (0.0, {}))
        if not servers or now_s - seen_s >= MODELS_FRESH_S:
            servers = await self._health.servers(name)
            if servers:
                self._seen[name] = (now_s, servers)
        return servers

    async def _learn(self, name: str, servers: Servers) -> None:
        """Fetch the announced manifests of the model that are not known here.

        It waits for them only if no complete revision was used before or has a believed publisher, so that a stranger
        who keeps announcing new manifests delays nobody.
        """
        with suppress(ConfigError):
            chosen = self._choose(name, "", servers)
            is_settled = False
            if chosen is not None and not chosen.revision.missing():
                is_settled = bool(self._publishers.believed(name)) or chosen.revision.digest in self._used.of(name)
            await self._manifests.learn(name, servers, within_s=0.0 if is_settled else LEARN_S)

    def _published(self, revision: Revision) -> PublishedManifest | None:
        """Return the manifest of a revision, if it is known and has as many blocks, else None."""
        published = self._manifests.known(revision.manifest)
        return published if published and published.manifest.num_blocks == revision.num_blocks else None

    def _trusted(self, name: str, pin: str, found: Sequence[Revision]) -> Sequence[Revision]:
        """Return the revisions that may be used under the name.

        A request with a pin may use any revision, unless publishers are pinned.
        """
        believed = self._publishers.pinned(name) if pin else self._publishers.believed(name)
        if not believed:
            return found
        return [each for each in found if (known := self._published(each)) and known.publisher in believed]

    def _choose(self, name: str, pin: str, servers: Servers) -> ChosenRevision | None:
        """Choose the revision, or return None if there is none. Raises ConfigError for a pin that fits several."""
        failing = self._health.failing()
        found = revisions(servers, failing)
        pin = self._pin(name, pin)
        trusted, used = self._trusted(name, pin, found), self._used.of(name)
        revision = choose(trusted, pin=pin, used=used, failing=failing, lost=self._health.failing(LOST_S))
        if revision is None:
            return None
        return ChosenRevision(
            name=name,
            revision=revision,
            others=[each for each in found if each is not revision],
            published=self._published(revision),
            is_pinned=bool(pin),
        )

    def _pin(self, name: str, pin: str) -> str:
        """Return the pin that applies to the model. Raises ConfigError for a request whose pin contradicts the
        client's."""
        always = self._pins.get(name, "")
        if not (always.startswith(pin) or pin.startswith(always)):
            raise ConfigError(
                f"of {name} only revision {always} is used here, and not {pin}",
                remedy=f"ask for {name}, or for {name}@{always}",
                field="model",
            )
        return max(always, pin, key=len)

    async def _unknown(self, name: str, servers: Servers) -> ConfigError:
        if servers:
            found = revisions(servers)
            if believed := self._publishers.believed(name):
                return ConfigError(
                    f"nobody serves {name} as {' or '.join(sorted(believed))} published it; served under that name "
                    f"are {describe_revisions(found)}",
                    remedy=f"wait for its servers, or believe another publisher: --publisher {name}=PEER_ID",
                )
            return ConfigError(
                f"nobody serves that revision of {name}; served are {describe_revisions(found)}",
                remedy=f"use one of these, as in {name}@{short_revision(found[0].digest)}",
            )
        near = get_close_matches(name, names := await self._membership.models(), n=1)
        pin = f"; after the @ belong {MIN_PIN_CHARS} or more digits of a revision" if "@" in name else ""
        use = f"did you mean {near[0]}?" if near and not pin else f"use one of these{pin}"
        return ConfigError(
            f"nobody serves a model {name!r}; known models: {', '.join(names) or 'none'}",
            remedy=use if names else "serve it: swarm-node join --model MODEL",
        )

    def _warn_of_others(self, chosen: ChosenRevision) -> None:
        others = [each for each in chosen.others if each.num_servers]
        key = chosen.name, chosen.revision.digest
        if not others or key in self._warned:
            return
        self._warned[key] = None
        logger.warning(
            "%s is served with several weights: revision %s, which is used here, and %s; to be sure of one, ask for %s",
            chosen.name,
            describe_revisions([chosen.revision]),
            describe_revisions(others),
            f"{chosen.name}@{short_revision(chosen.revision.digest)}",
        )

    def _warn_of_strangers(self, chosen: ChosenRevision) -> None:
        """Log a warning once for each other publisher of a name that has a believed one."""
        believed = self._publishers.believed(chosen.name)
        for each in chosen.others:
            known = self._published(each)
            if known is None or known.publisher in believed or (key := (chosen.name, known.publisher)) in self._warned:
                continue
            self._warned[key] = None
            logger.warning(
                "%s is now published by %s, too (%s); it is not used, since this client believes %s. If the model has "
                "a new publisher, say so: --publisher %s=%s",
                chosen.name,
                known.publisher,
                describe_revisions([each]),
                " and ".join(sorted(believed)),
                chosen.name,
                known.publisher,
            )

    def _status(self, chosen: ChosenRevision) -> ModelStatus:
        revision, publisher = chosen.revision, chosen.published.publisher if chosen.published else ""
        ages_s = self._membership.ages_s("serve", chosen.name)
        avoid = self._health.unreachable(ages_s)
        return ModelStatus(
            name=chosen.name,
            revision=revision.digest,
            num_blocks=revision.num_blocks,
            num_servers=revision.num_servers,
            missing=revision.missing(),
            unreachable=revision.missing(avoid),
            age_s=max((ages_s.get(peer_id, 0.0) for peer_id in revision.servers if peer_id not in avoid), default=0.0),
            others=tuple(
                OtherRevision(
                    revision=each.digest,
                    num_blocks=each.num_blocks,
                    num_servers=each.num_servers,
                    missing=each.missing(),
                )
                for each in chosen.others[:MAX_OTHERS]
            ),
            manifest=revision.manifest.hex() if chosen.published else "",
            publisher=publisher,
            standing=self._publishers.standing(chosen.name, publisher),
            dtype=manifest_dtype(revision.manifest, revision.digest) if chosen.published else "",
        )


def _name_and_pin(model: object) -> tuple[str, str]:
    """Return what `split_pin` does. Raises ConfigError for a value that is no text."""
    if not isinstance(model, str):
        raise ConfigError(f"model is {model!r:.80}", remedy=NAME_IT, field="model")
    return split_pin(model)
