"""Which weights a model's name stands for, where servers announce several revisions under one name. Pure.

Anyone can announce anything under any name. So a user can pin a revision, by `NAME@REVISION`, and what was used before
goes before what has more servers. That a server computes with the weights it names is not checked here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from swarm_protocol.errors import ConfigError
from swarm_protocol.records import ServeRecord

from swarm.router.revision_names import short
from swarm.router.routing import missing_spans

MAX_TOLD = 4
"""Revisions in one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """The servers of a model, by peer id, that announce one digest and number of blocks."""

    digest: str
    num_blocks: int
    servers: Mapping[str, ServeRecord]

    def missing(self, without: Collection[str] = ()) -> tuple[tuple[int, int], ...]:
        """The blocks that nobody serves, or nobody but those `without`."""
        servers = {peer_id: record for peer_id, record in self.servers.items() if peer_id not in without}
        return missing_spans(servers, self.num_blocks)

    @property
    def num_servers(self) -> int:
        return sum(record.state == "serving" for record in self.servers.values())


def revisions(servers: Mapping[str, ServeRecord], failing: Collection[str] = ()) -> list[Revision]:
    """What is served under one name, the best first: the fewest blocks missing, then the most servers.

    Servers that are `failing` count as gone where that decides.
    """
    groups: dict[tuple[str, int], dict[str, ServeRecord]] = {}
    for peer_id, record in servers.items():
        groups.setdefault((record.revision, record.num_blocks), {})[peer_id] = record

    def merit(revision: Revision) -> tuple[int, int, int, str]:
        reached, listed = _num_blocks(revision.missing(failing)), _num_blocks(revision.missing())
        return -reached, -listed, len(revision.servers), revision.digest

    found = [
        Revision(digest=digest, num_blocks=num_blocks, servers=group) for (digest, num_blocks), group in groups.items()
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
    """The revision to use of those `found`, the best first; None if there is none.

    A pinned one or none. Else the one used first that is whole without the `lost` servers; else the best that is whole
    without the `failing` ones; else one that was used. Raises ConfigError for a pin that fits several.
    """
    if pin:
        return _pinned(found, pin)
    known = [each for digest in used for each in found if each.digest == digest]
    whole = [each for each in known if not each.missing(lost)]
    others = [each for each in found if not each.missing(failing)]
    return next(iter([*whole, *others, *known, *found]), None)


def _pinned(found: Sequence[Revision], pin: str) -> Revision | None:
    fitting = [each for each in found if each.digest.startswith(pin)]
    digests = sorted({each.digest for each in fitting})
    if len(digests) > 1:
        raise ConfigError(
            f"{len(digests)} revisions begin with {pin}: {', '.join(digests[:MAX_TOLD])}", remedy="write more of it"
        )
    return fitting[0] if fitting else None


def in_words(found: Sequence[Revision]) -> str:
    """`1a2b3c4d5e6f by 2 servers, …`"""
    told = [
        f"{short(each.digest)} by {each.num_servers} server{'' if each.num_servers == 1 else 's'}"
        for each in found[:MAX_TOLD]
    ]
    more = len(found) - MAX_TOLD
    return ", ".join(told) + (f" and {more} more" if more > 0 else "")


def _num_blocks(spans: Sequence[tuple[int, int]]) -> int:
    return sum(high - low for low, high in spans)
