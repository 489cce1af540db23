"""What the codec has lost of a member's contributions and adds to the next ones: error feedback, a fragment each.

A fragment's residual counts once a committed state has the contribution (`seat.settle`). Until then each attempt sends
the same bytes. It is in no state and no checkpoint: after a restart it begins with nothing.
"""

from __future__ import annotations

from swarm_compression import Codec
from swarm_compression.feedback import ErrorFeedback


class Residuals:
    """Takes 8 bytes for each value of the fragments that this member has contributed to."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._feedbacks: dict[tuple[int, int], ErrorFeedback] = {}

    def of(self, fragment: slice) -> ErrorFeedback:
        """`fragment` is its place in the flat vector."""
        key = (fragment.start, fragment.stop)
        if key not in self._feedbacks:
            self._feedbacks[key] = ErrorFeedback(self._codec, fragment.stop - fragment.start)
        return self._feedbacks[key]

    def commit(self, fragment: slice) -> None:
        """The contribution to `fragment` counts. Blocks, as `rollback` does."""
        if (fragment.start, fragment.stop) in self._feedbacks:
            self.of(fragment).commit()

    def rollback(self, fragment: slice) -> None:
        if (fragment.start, fragment.stop) in self._feedbacks:
            self.of(fragment).rollback()
