"""What the owner of a part makes of the members' encoded slices: the aggregation, between decoding and encoding.

`own_part` brings the slices and hands out the result. Everything here blocks: call it off the loop, one frame after
the other, except where `is_quick`. Shapes: F values of a frame.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from swarm_compression import Codec, CodecError
from swarm_compression.codec import Data
from swarm_compression.feedback import ErrorFeedback
from swarm_protocol.errors import PeerViolation, RoundError
from swarm_protocol.training_messages import Contribution, Group

from swarm.training.allreduce.parts import check_frame, decode_frame
from swarm.trust.aggregation.aggregation import Aggregation
from swarm.trust.aggregation.aggregator import Aggregator, Report

logger = logging.getLogger(__name__)


QUICK_MEMBERS = 8
"""Their sum of a frame takes 0.1 to 0.2 ms with a quick codec."""
NOTABLE_KEPT = 0.5
"""Who keeps less of its pull is told of. Aggregators shorten the longest of honest contributions a little, too: the
least that one of them kept of five to eight members was 0.9 by default, and 0.4 with CenteredClip of radius 1."""
NOTABLE_VALUES = 256
"""In a part of fewer values, lengths are chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a run reduces vectors; `feedback`, where it has one, encodes what this member contributes."""

    codec: Codec
    aggregator: Aggregator
    feedback: ErrorFeedback | None = None


class PartOwner:
    """Reduces one part of `group`. Weights are the tokens that the group grants: whoever checked the group has capped
    them by the leases. Slices come in the order of `contributors`."""

    def __init__(self, scheme: Scheme, group: Group) -> None:
        self.contributors: Sequence[Contribution] = [member for member in group.members if member.num_tokens]
        self.report = Report()
        self._codec = scheme.codec
        self._aggregation = Aggregation(scheme.aggregator, [member.num_tokens for member in self.contributors])
        self._num_surveyed = 0

    @property
    def has_survey(self) -> bool:
        """Whether each frame goes through `survey` before the first one goes through `reduce`."""
        return self._aggregation.has_survey

    @property
    def is_quick(self) -> bool:
        """Whether `reduce` takes less than it takes to hand a frame to a thread and to hear of its end. After
        `decide`."""
        return self._aggregation.is_sum and self._codec.is_quick and len(self.contributors) <= QUICK_MEMBERS

    def survey(self, encoded: Sequence[Data], num_values: int) -> None:
        """Raises PeerViolation that names the sender of what cannot be decoded."""
        self._aggregation.survey(self._rows(encoded, num_values))
        self._num_surveyed += num_values

    def decide(self) -> None:
        self.report = self._aggregation.decide()
        if self.report.note:
            logger.warning("in this member's part, %s", self.report.note)
        for peer, kept in self.lessened.items():
            logger.info("%s keeps %.0f%% of its pull in this member's part", peer[-6:], 100 * kept)

    @property
    def lessened(self) -> dict[str, float]:
        """How much of whose pull is left, of those for whom that is notably little. After `decide`."""
        if self._num_surveyed < NOTABLE_VALUES:
            return {}
        kept = zip(self.contributors, self.report.kept, strict=bool(self.report.kept))
        return {member.peer_id: share for member, share in kept if share < NOTABLE_KEPT}

    def reduce(self, encoded: Sequence[Data], num_values: int, buffer: bytearray | memoryview) -> None:
        """The frame's encoded result, into `buffer`, where one of the slices may lie. Raises PeerViolation as `survey`
        does, and RoundError if the result cannot be encoded."""
        if self._aggregation.is_sum:
            self._check(encoded, num_values)
            with _encoding():
                # the bits of `Aggregation.combine`, without a decoded frame in between
                self._codec.combine(encoded, self._aggregation.coefficients, num_values, buffer)
        else:
            result_F = torch.from_numpy(self._aggregation.combine(self._rows(encoded, num_values)))
            with _encoding():
                self._codec.encode_into(result_F, buffer)

    def _check(self, encoded: Sequence[Data], num_values: int) -> None:
        for member, data in zip(self.contributors, encoded, strict=True):
            with _blamed(member):
                check_frame(self._codec, data, num_values)

    def _rows(self, encoded: Sequence[Data], num_values: int) -> Iterator[NDArray[Any]]:
        for member, data in zip(self.contributors, encoded, strict=True):
            with _blamed(member):
                x_F = decode_frame(self._codec, data, num_values)
            yield x_F.numpy()


@contextmanager
def _encoding() -> Iterator[None]:
    try:
        yield
    except CodecError as error:
        raise RoundError(f"the result cannot be encoded: {error}") from error


@contextmanager
def _blamed(member: Contribution) -> Iterator[None]:
    """What cannot be decoded inside is `member`'s."""
    try:
        yield
    except CodecError as error:
        raise PeerViolation(f"it sent a bad slice: {error}", peer_id=member.peer_id) from error
