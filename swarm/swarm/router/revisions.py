"""Chooses the weights that a model's name stands for, if servers announce several revisions under one name. The module
is pure.

Anyone can announce any weights under any name. So a user can pin a revision by `NAME@REVISION`, with its digest or the
beginning of the digest, and a revision that was used before takes precedence over one with more servers. The revision
of a published model follows from its manifest; `swarm.client.publishers` decides which publisher to believe about a
name. This module does not check whether a server computes with the weights that it names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from swarm_protocol import limits
from swarm_protocol.errors import ConfigError, first_few
from swarm_protocol.manifest_messages import manifest_dtype
from swarm_protocol.records import ServeRecord

from swarm.router.routing import NoChain, missing_spans

MIN_PIN_CHARS = 8
"""Minimum characters of a digest that pin a revision: few enough to type, and enough that no two revisions share them
by chance."""

SHORT_REVISION = 12

MAX_TOLD = 4
"""Maximum revisions in one message."""

_PINNED = re.compile(rf"(.+)@([0-9a-f]{{{MIN_PIN_CHARS},{limits.MAX_REVISION_BYTES}}})")


def split_pin(model: str) -> tuple[str, str]:
    """Split `NAME@REVISION` into the name and the beginning of the pinned digest, which is empty without a pin.

    A name that ends like a pin is always split, so that no server can take over a pinned name by announcing a model
    under the whole text.
    """
    pinned = _PINNED.fullmatch(model)
    return (pinned[1], pinned[2]) if pinned else (model, "")


def short_revision(revision: str) -> str:
    """Return the beginning of a revision, by which people tell revisions apart."""
    return revision[:SHORT_REVISION]


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """The servers of a model, by peer id, that announce one digest, number of blocks and manifest.

    `manifest` is the digest of the signed manifest from which the revision follows; b"" for an unpublished model.
    """

    digest: str
    num_blocks: int
    servers: Mapping[str, ServeRecord]
    manifest: bytes = b""

    def missing(self, without: Collection[str] = ()) -> tuple[tuple[int, int], ...]:
        """Return the blocks that no server serves, not counting the servers in `without`."""
        servers = {peer_id: record for peer_id, record in self.servers.items() if peer_id not in without}
        return missing_spans(servers, self.num_blocks)

    @property
    def num_servers(self) -> int:
        return sum(record.state == "serving" for record in self.servers.values())


def manifest_of(record: ServeRecord) -> bytes:
    """Return the digest of the manifest that a server announces; b"" if its revision does not follow from the
    manifest."""
    is_from_it = record.manifest and manifest_dtype(record.manifest, record.revision)
    return record.manifest if is_from_it else b""


def revisions(servers: Mapping[str, ServeRecord], failing: Collection[str] = ()) -> list[Revision]:
    """Return the revisions served under one name, the best first: the fewest blocks missing, then the most servers.

    Missing blocks are first counted without the `failing` servers; ties are decided with all servers.
    """
    groups: dict[tuple[str, int, bytes], dict[str, ServeRecord]] = {}
    for peer_id, record in servers.items():
        groups.setdefault((record.revision, record.num_blocks, manifest_of(record)), {})[peer_id] = record

    def merit(revision: Revision) -> tuple[int, int, int, str]:
        reached, listed = _num_blocks(revision.missing(failing)), _num_blocks(revision.missing())
        return -reached, -listed, len(revision.servers), revision.digest

    found = [
        Revision(digest=digest, num_blocks=num_blocks, servers=group, manifest=manifest)
        for (digest, num_blocks, manifest), group in groups.items()
    ]
    return sorted(found, key=merit, reverse=True)


def choose(
    found: Sequence[Revision],
    *,
    pin: str = "",
    used: Sequence[str] = (),
    failing: Collection[str] = (),
    lost: Collection[str] = (),
) -> Revision | None:
    """Return the revision to use from `found`, which is sorted by merit, or None if there is none.

    With a pin, return the pinned revision or None. Otherwise return the first used one that is whole without the `lost`
    servers, else the best one that is whole without the `failing` servers, else the first used one, else the best.
    Raises ConfigError for a pin that fits several digests.
    """
    if pin:
        return _pinned(found, pin)
    known = [each for digest in used for each in found if each.digest == digest]
    whole = (each for each in known if not each.missing(lost))
    # lazy, since anyone can announce thousands of revisions
    others = (each for each in found if not each.missing(failing))
    return next(chain(whole, others, known, found), None)


def _pinned(found: Sequence[Revision], pin: str) -> Revision | None:
    fitting = [each for each in found if each.digest.startswith(pin)]
    digests = sorted({each.digest for each in fitting})
    if len(digests) > 1:
        raise ConfigError(
            f"{len(digests)} revisions begin with {pin}: {', '.join(digests[:MAX_TOLD])}", remedy="write more of it"
        )
    return fitting[0] if fitting else None


def describe_revisions(found: Sequence[Revision]) -> str:
    """Describe revisions as `1a2b3c4d5e6f by 2 servers, …`."""
    texts = [
        f"{short_revision(each.digest)} by {each.num_servers} server{'' if each.num_servers == 1 else 's'}"
        for each in found
    ]
    return first_few(texts, MAX_TOLD)


def _num_blocks(spans: Sequence[tuple[int, int]]) -> int:
    return sum(high - low for low, high in spans)


def with_other_revisions(error: NoChain, revision: str, others: Mapping[str, ServeRecord]) -> NoChain:
    """Return `error` with the name of the other revision under which most servers serve the missing blocks, if there is
    one."""
    num_servers = Counter(
        record.revision
        for record in others.values()
        if record.state == "serving" and any(record.start < high and low < record.end for low, high in error.missing)
    )
    if not num_servers:
        return error
    ((other, count),) = num_servers.most_common(1)
    they = "1 server serves" if count == 1 else f"{count} servers serve"
    return type(error)(
        f"{error.message} (weights of revision {short_revision(revision)}); "
        f"{they} them with other weights, revision {short_revision(other)}",
        remedy=error.remedy,
        missing=error.missing,
    )
