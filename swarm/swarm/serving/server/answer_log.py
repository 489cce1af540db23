"""Keeps the digests of the inputs and outputs of a server's session, and makes the commitment that the server signs.

The client gets the commitment when it closes the session. Every session has a log, whether its client checks answers or
not: a server that knew which answers are checked could lie in the others. The log is used in the server's event loop
only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swarm_protocol.limits import PAGE_TOKENS
from swarm_protocol.rows import Rows
from swarm_protocol.served_evidence_messages import (
    COMMITMENT_LIFETIME_S,
    COMMITMENT_PURPOSE,
    AnswerCommitment,
    PositionDigests,
)
from swarm_protocol.session_frames import Commitment, SampledToken, TokenDraw

from swarm.network.interface import Network
from swarm.serving.engine.page_allocator import PageInputs


class AnswerLog:
    """The log of one session: `inputs` are digests of rows as received, and `outputs` of rows as sent, or of draws.
    `state` makes a commitment of what the log adds: it knows whose session this is, and of which blocks.

    The session began with cached pages that were computed from the inputs `cached`. These count only if each was
    computed after the one before it. A client that names pages may combine some that were never computed together, and
    the server would sign for a computation that it did not do.
    """

    def __init__(self, state: Callable[..., AnswerCommitment], cached: Sequence[PageInputs | None] = ()) -> None:
        self.inputs = PositionDigests()
        self.outputs = PositionDigests()
        self._state = state
        self._taken_from = 0
        self._after = b""
        self._num_after = 0
        if known := _consecutive(cached):
            self.inputs.add_digests(0, b"".join(page.digests for page in known))

    def took(self, position: int, rows: Rows) -> None:
        """Add inputs. Those that replace drafts also drop the outputs for these, which may still be computed. Others
        may join a step that waits, whose outputs are for earlier inputs, too."""
        if position < self.inputs.end:
            self.outputs.cut(position)
            self._taken_from = position
        self.inputs.add_rows(position, rows.payload, rows.row_bytes)

    def page(self, index: int) -> PageInputs | None:
        """Return the inputs of the page that was just computed, or None if not all positions before it are known. Pages
        must be asked for in order."""
        if self.inputs.start or self.inputs.end < (index + 1) * PAGE_TOKENS:
            return None
        while self._num_after < index:
            self._after = self._page(self._num_after).after
            self._num_after += 1
        return self._page(index)

    def _page(self, index: int) -> PageInputs:
        return PageInputs(self._after, self.inputs.between(index * PAGE_TOKENS, (index + 1) * PAGE_TOKENS))

    def gave(self, position: int, rows: Rows) -> None:
        num_rows = rows.num_rows if position >= self._taken_from else min(rows.num_rows, self._taken_from - position)
        self.outputs.add_rows(position, rows.first(num_rows).payload, rows.row_bytes)

    def drew(self, position: int, draw: TokenDraw, token: SampledToken, *, of_step: int) -> None:
        """Add the draw after the input at `position`, in the step that began at position `of_step`."""
        if not of_step < self._taken_from <= position:
            self.outputs.add_draw(position, draw, token)

    def signed(self, network: Network, until: int) -> Commitment:
        """Return the signed commitment to the positions before `until`."""
        stated = self.commitment(until)
        signed = network.sign(COMMITMENT_PURPOSE, stated.model, stated.to_bytes(), lifetime_s=COMMITMENT_LIFETIME_S)
        return Commitment(sequence_id=stated.sequence_id, signed=signed)

    def commitment(self, until: int) -> AnswerCommitment:
        """Return the commitment to the positions before `until`, which the client knows of."""
        inputs, outputs = self.inputs, self.outputs
        return self._state(
            inputs_from=inputs.start,
            inputs_to=max(inputs.start, min(until, inputs.end)),
            inputs_digest=inputs.digest(until),
            outputs_from=outputs.start,
            outputs_to=max(outputs.start, min(until, outputs.end)),
            outputs_digest=outputs.digest(until),
        )


def _consecutive(pages: Sequence[PageInputs | None]) -> list[PageInputs]:
    """Return the pages if each was computed after the one before it, else an empty list."""
    found, after = list[PageInputs](), b""
    for page in pages:
        if page is None or page.before != after:
            return []
        found.append(page)
        after = page.after
    return found
