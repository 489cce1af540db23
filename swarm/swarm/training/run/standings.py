"""Where each peer of a run stands after a committed state: whether it counts fully, and what the next state remembers.

It follows from the state and the run's rule alone, so that every replica computes the same. Pure functions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from swarm.training.run.probation import Probation
from swarm.training.run.register import Register, credits_after


@dataclass(frozen=True, slots=True, kw_only=True)
class Standings:
    """Where the peers of a run stand after `outer_step` steps. Of the `known` ones, the trainers of the state, those in
    `left` are on probation, for so many more steps. Those with `credits` are remembered (see `register`), and count
    fully; any other peer would begin now."""

    rule: Probation = field(default_factory=Probation)
    left: Mapping[str, int] = field(default_factory=dict)
    known: Collection[str] = ()
    outer_step: int = 0
    credits: Mapping[str, int] = field(default_factory=dict)

    def steps_left(self, peer: str) -> int:
        """Return the steps to which `peer` has to contribute before it counts fully; 0: it does."""
        if peer in self.known:
            return self.left.get(peer, 0)
        return 0 if peer in self.credits else self.rule.of_newcomer(self.outer_step)

    def after(self, trainers: Collection[str], contributors: Collection[str]) -> tuple[tuple[str, int], ...]:
        """Return who of `trainers` is still on probation after a step to which `contributors` have contributed, with
        the steps left, in the order of peer ids."""
        left = {peer: self.steps_left(peer) - (peer in contributors) for peer in trainers}
        return tuple((peer, left[peer]) for peer in sorted(left) if left[peer] > 0)

    def register_after(self, trainers: Collection[str], contributors: Collection[str], *, num_steps: int) -> Register:
        """Return the register after a round of `num_steps` outer steps, 0 or 1, behind which there are `trainers`."""
        unproven = {peer for peer, _ in self.after(trainers, contributors)}
        credit = credits_after(
            self.credits,
            most=self.rule.absence_steps if self.rule.steps else 0,
            proven=set(trainers) - unproven,
            unproven=unproven,
            contributors=contributors,
            num_steps=num_steps,
        )
        return Register(credits=credit)
