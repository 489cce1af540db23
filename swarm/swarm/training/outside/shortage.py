"""Says why a run waits for members: how many are there, how many a step needs, and what lets it go on. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from swarm_protocol.errors import first_few
from swarm_protocol.records import TrainerRecord

from swarm.training.round.quorum import Succession, presence

MAX_NAMED = 8
"""Missing members that the words name; they count the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Too few members are ready for a step, by the records that have not expired.

    A step needs `num_needed` members, of which `num_ready` are there; and of the last step's members it needs
    `num_roster_needed`, of which `num_roster_ready` are there and `missing` are not. The latter alone is what the run's
    author can change by an order (see `outside.resume`): if they are gone for good, no newcomer takes their place.
    """

    num_ready: int
    num_needed: int
    num_roster_ready: int
    num_roster_needed: int
    missing: tuple[str, ...]
    num_joining: int

    @property
    def is_of_roster(self) -> bool:
        """Return whether too few of the last step's members are there, so that newcomers alone do not help."""
        return self.num_roster_ready < self.num_roster_needed

    def words(self, name_of: Callable[[str], str]) -> str:
        """Return how many members are there of those that are needed, and who is missing; `name_of` names a peer."""
        counts = self.num_ready, self.num_needed
        if self.is_of_roster:
            counts = self.num_roster_ready, self.num_roster_needed
        text = presence(*counts, of_roster=self.is_of_roster)
        if self.num_joining:
            text += f", {self.num_joining} joining"
        if self.is_of_roster:
            text += f"; missing: {first_few(self.missing, MAX_NAMED, name_of)}"
        return text

    @property
    def remedy(self) -> str:
        """Return what lets the run go on if the missing members never come back; empty while others are joining."""
        if self.is_of_roster:
            return (
                "if they are gone for good, the run's author lets the others go on: "
                "swarm-node run resume FILE --peers ADDR"
            )
        return "" if self.num_joining else "it goes on once another node joins: swarm-node join --run FILE --peers ADDR"


def shortage_of(succession: Succession, roster: Sequence[str], members: Mapping[str, TrainerRecord]) -> Shortage | None:
    """Return why the run of `members` cannot take its next step, None if enough are ready.

    `roster` are the members of the last step, empty before the first. A member that has finished counts as ready.
    """
    ready = {peer for peer, record in members.items() if record.state in {"training", "finished"}}
    present = ready & set(roster)
    num_roster_needed = succession.num_enough(roster, present)
    if len(ready) >= succession.min_group and len(present) >= num_roster_needed:
        return None
    return Shortage(
        num_ready=len(ready),
        num_needed=succession.min_group,
        num_roster_ready=len(present),
        num_roster_needed=num_roster_needed,
        missing=tuple(sorted(set(roster) - ready)),
        num_joining=sum(record.state == "joining" for record in members.values()),
    )
