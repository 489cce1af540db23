"""Says what a newcomer counts in a run until it has proven itself: a run's rule.

In an open run keys cost nothing. So who joins a run that is under way is on probation for a number of outer steps to
which it must contribute, that is, report samples (that it trained them is checked only where the run has a
`validation_rate`, which is off by default). Until then its work counts for less, all those on probation have a bounded
share of a step's weight and seats, and none of them decides: votes, rosters and certificates are those of the proven
members. So many fresh keys take as long as honest newcomers to get a say, a few at a time, and where intervals are
validated have to do as much work.

A newcomer at outer step n has to prove no more than n steps, since nobody has proven more. So those who are there when
a run begins are its founders and count fully at once, and a young run takes its friends in soon.

`standings` says where each peer stands by this rule. The weights are whole numbers, equal on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm_protocol.training_messages import Contribution

PER_MILLE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Probation:
    """A run's rule. A newcomer is on probation until it has contributed to `steps` outer steps (0: nobody is). Members
    on probation have at most `share` of a step's weight, and of a round's seats. A proven member that is away is
    remembered for as many steps as it has contributed to, and `absence_steps` at most."""

    steps: int = 0
    share: float = 0.25
    absence_steps: int = 0

    def of_newcomer(self, outer_step: int) -> int:
        """Return the steps that a peer has left which joins at `outer_step`."""
        return min(self.steps, outer_step)

    def num_seats(self, max_group: int, num_proven: int) -> int:
        """Return how many members on probation may be in a group with `num_proven` others: half as many at most, so
        that aggregators that count members have a third of strangers among them, and always one. Where nobody is on
        probation, any number."""
        if not self.steps:
            return max_group
        return max(1, min(int(self.share * max_group), num_proven // 2))

    def weights(self, members: Sequence[Contribution]) -> list[int]:
        """Return the weight of each of `members`: its tokens, where these are of a proven member.

        Tokens of a member on probation count for the share of its steps that it has done, this one included. Where
        those of all on probation are more than `share` of all, they are scaled down together. What a head brings of its
        followers is bounded likewise by what its cluster brings of proven ones. A contributor counts one token at
        least.
        """
        if not self.steps:
            return [member.num_tokens for member in members]
        proven, fresh = zip(*map(self._cluster, members), strict=True) if members else ((), ())
        cap, total = self._cap(sum(proven)), sum(fresh)
        if sum(proven) and total > cap:
            fresh = tuple(tokens * cap // total for tokens in fresh)
        least = [int(member.num_tokens > 0) for member in members]
        return [max(each) for each in zip(least, map(sum, zip(proven, fresh, strict=True)), strict=True)]

    def _cluster(self, member: Contribution) -> tuple[int, int]:
        """Return the tokens of a member and its followers that count fully, and those that are on probation."""
        works = [(member.steps_left, member.own_tokens)]
        works += [(each.steps_left, each.num_tokens) for each in member.followers]
        proven = sum(tokens for left, tokens in works if not left)
        fresh = sum(tokens * max(1, self.steps + 1 - left) // (self.steps + 1) for left, tokens in works if left)
        return proven, min(fresh, self._cap(proven)) if member.followers else fresh

    def _cap(self, proven: int) -> int:
        """Return the most tokens that may count beside `proven` ones."""
        share = round(self.share * PER_MILLE)
        return proven * share // (PER_MILLE - share)
