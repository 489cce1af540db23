"""The score of each trainer of a run: how much its contributions lower the loss on held-out data, as others measure it.

The outcome of each step draws a few contributions. Every other member applies its own part of a drawn contribution to
the state that the step began from, measures on held-out samples of its own draw by how much the loss falls, and says so
in its next signed report. This effect is in millionths of a nat, scaled to the whole vector. The median of the effects
in a group's reports counts; fewer than a third of liars cannot move it beyond the honest effects. A score is a slow
average of these medians. The idea is from Gauntlet (Lidin et al. 2025, arXiv 2505.21684), where a few validators with
stake score whole contributions.

Scores are part of the committed state, so that everybody computes the same. They have no effect unless the run
discounts members with low scores. Pure functions of the state and of signed reports, in whole numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from swarm_protocol import limits
from swarm_protocol.checks import check_int
from swarm_protocol.identity import check_peer_id
from swarm_protocol.training_messages import Contribution, Group

MICRO = 1_000_000
"""Effects and scores are in millionths of a nat."""
MEMORY = 8
"""A score is the mean of a trainer's effects up to this number, and then an exponential moving average over as many."""
LEAST_MEASURED = 3
"""A score of fewer effects has no consequences."""
LOW = 10
"""A score is low if it is at most 1 / LOW of the median score. Random contributions, and those trained on wrong labels,
have effects around zero or below."""
DISCOUNT = 10
"""A discounted contribution has 1 / DISCOUNT of its weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutScore:
    """The score of a trainer: `value` is the slow average of its effects, `num_measured` counts them up to MEMORY."""

    peer_id: str
    value: int
    num_measured: int

    def __post_init__(self) -> None:
        check_peer_id(self.peer_id)
        check_int(self.value, "value", low=-limits.MAX_EFFECT, high=limits.MAX_EFFECT)
        check_int(self.num_measured, "num_measured", low=1, high=MEMORY)

    def with_effect(self, effect: int) -> HeldOutScore:
        """Return the score after one more effect."""
        num_measured = min(self.num_measured + 1, MEMORY)
        value = self.value + (effect - self.value) // num_measured
        return HeldOutScore(peer_id=self.peer_id, value=value, num_measured=num_measured)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutRule:
    """A run's rule: how many contributions of each step are measured (0: none). `discounts`: members with a low score
    count for less."""

    num_drawn: int = 0
    discounts: bool = False

    def draw(self, origin: Group, part_digests: Sequence[bytes]) -> tuple[str, ...]:
        """Return the members whose contributions to `origin` are measured. The digests of all parts' results draw them,
        so nobody knew the draw when members committed to their contributions."""
        seed = hashlib.sha256(f"swarm-held-out:{origin.run}/{origin.step}:".encode() + b"".join(part_digests)).digest()
        peers = [member.peer_id for member in origin.contributors]
        peers.sort(key=lambda peer: hashlib.sha256(seed + peer.encode()).digest())
        return tuple(peers[: self.num_drawn])


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutScores:
    """The scores of a state. `drawn` are the members whose contributions to its step are measured now."""

    rule: HeldOutRule = field(default_factory=HeldOutRule)
    scores: tuple[HeldOutScore, ...] = ()
    drawn: tuple[str, ...] = ()

    def after(self, trainers: Collection[str], group: Group) -> tuple[HeldOutScore, ...]:
        """Return the scores of `trainers` after the step of `group`, whose reports contain the effects."""
        scores = {each.peer_id: each for each in self.scores if each.peer_id in trainers}
        for peer, effect in self.effects(group).items():
            if peer in trainers:
                known = scores.get(peer)
                scores[peer] = (
                    known.with_effect(effect) if known else HeldOutScore(peer_id=peer, value=effect, num_measured=1)
                )
        return tuple(scores[peer] for peer in sorted(scores))

    def effects(self, group: Group) -> Mapping[str, int]:
        """Return the median effect of each drawn contribution, by peer, from the reports in `group`.

        More than two thirds of the other deciding members must have measured it. If fewer than a third of the group
        lie, most of those are honest, so the median lies between honest effects.
        """
        found, deciding = dict[str, int](), set(group.deciding)
        for place, peer in enumerate(self.drawn):
            others = [each for each in group.members if each.peer_id in deciding and each.peer_id != peer]
            measured = [each.effects[place] for each in others if len(each.effects) == len(self.drawn)]
            if 3 * len(measured) > 2 * len(others):
                found[peer] = middle(measured)
        return found

    def is_discounted(self, peer: str) -> bool:
        """Return whether `peer` counts for less in the next step: its score is low, and the median score is positive.
        If contributions do not lower the held-out loss on the whole, scores say nothing about a member."""
        settled = {each.peer_id: each.value for each in self.scores if each.num_measured >= LEAST_MEASURED}
        if not self.rule.discounts or peer not in settled:
            return False
        median = middle(list(settled.values()))
        return median > 0 and LOW * settled[peer] <= median


def middle(values: Sequence[int]) -> int:
    """Return the median of `values`, which are not empty. Of two middle values it is the one nearer to zero, or zero if
    it lies between them."""
    ordered = sorted(values)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return max(0, low) if high > 0 else high


def discounted_weights(members: Sequence[Contribution], weights: Sequence[int]) -> list[int]:
    """Return the `weights` of `members` after the discount: at least one token for each that has any."""
    return [
        max(min(weight, 1), weight // DISCOUNT) if member.discounted else weight
        for member, weight in zip(members, weights, strict=True)
    ]
