"""The certificates that led a member to where it is, which show others that it follows from where they are.

Whoever is behind trusts the members of its own state. A later certificate follows from it if enough of these voted for
it; if too many have been replaced meanwhile, those in between are the way there, link by link. Links that the others
make up for are thinned out when there are too many. Values only, but for the list.
"""

from __future__ import annotations

from collections.abc import Iterable

from swarm.training.round.certificate import Proof
from swarm.training.round.vote import Succession

MAX_LINKS = 512
MAX_HISTORY_BYTES = 16 << 20
"""16 members' certificates have 10 KB, so this is for groups of hundreds. It takes 3 s to check."""


class History:
    """Of one replica, in the order of the states."""

    def __init__(self, succession: Succession, links: Iterable[Proof] = ()) -> None:
        self._succession = succession
        self._links: list[Proof] = []
        self.add(links)

    @property
    def rosters(self) -> tuple[tuple[str, ...], ...]:
        return tuple(link.roster for link in self._links)

    def since(self, outer_step: int) -> tuple[Proof, ...]:
        """The links to states of `outer_step` and later ones."""
        return tuple(link for link in self._links if link.outer_step >= outer_step)

    def add(self, links: Iterable[Proof]) -> None:
        """Take in what has been checked."""
        known = {link.rank for link in self._links}
        new = {link.rank: link for link in links if link.rank not in known}
        self._links = sorted((*self._links, *new.values()), key=lambda link: link.rank)
        while len(self._links) > MAX_LINKS or self._num_bytes > MAX_HISTORY_BYTES:
            del self._links[self._spare()]

    @property
    def _num_bytes(self) -> int:
        return sum(len(link.certificate) for link in self._links)

    def _spare(self) -> int:
        """The first link whose neighbours follow from each other without it; if there is none, the oldest one."""
        for index in range(1, len(self._links) - 1):
            before, after = self._links[index - 1], self._links[index + 1]
            if self._succession.is_enough(before.roster, after.voters):
                return index
        return 0
