"""The digests of what a server's session took and gave, and the commitment that is signed of them.

The client gets it when it closes the session. Every session has a log, whether its client checks answers or not: a
server that knew which answers are checked could lie in the others. Used in the server's event loop only.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm_protocol.limits import PAGE_TOKENS
from swarm_protocol.rows import Rows
from swarm_protocol.served_evidence_messages import AnswerCommitment, PositionDigests

from swarm.serving.engine.page_allocator import PageInputs


class AnswerLog:
    """`inputs` are rows as they came on the wire; `outputs` are rows as they were sent, or draws.

    The session began with cached pages that were computed from the inputs `cached`. These count only if they follow
    each other: a client that names pages may put together what was never computed as one, and the server would sign
    for what it did not do.
    """

    def __init__(self, cached: Sequence[PageInputs | None] = ()) -> None:
        self.inputs = PositionDigests()
        self.outputs = PositionDigests()
        self._after = b""
        self._num_after = 0
        if known := _consecutive(cached):
            self.inputs.add_digests(0, b"".join(page.digests for page in known))

    def took(self, position: int, rows: Rows) -> None:
        self.inputs.add_rows(position, rows.payload, rows.row_bytes)

    def page(self, index: int) -> PageInputs | None:
        """Return what the page that was just computed is of; None if not all positions before it are known. Pages are
        asked for in their order."""
        if self.inputs.start or self.inputs.end < (index + 1) * PAGE_TOKENS:
            return None
        while self._num_after < index:
            self._after = self._page(self._num_after).after
            self._num_after += 1
        return self._page(index)

    def _page(self, index: int) -> PageInputs:
        return PageInputs(self._after, self.inputs.between(index * PAGE_TOKENS, (index + 1) * PAGE_TOKENS))

    def gave(self, position: int, rows: Rows) -> None:
        self.outputs.add_rows(position, rows.payload, rows.row_bytes)

    def commitment(
        self, client: str, sequence_id: bytes, *, model: str, revision: str, blocks: tuple[int, int], until: int
    ) -> AnswerCommitment:
        """Return what holds of the positions before `until`, which the client has heard of."""
        inputs, outputs = self.inputs, self.outputs
        return AnswerCommitment(
            client_peer_id=client,
            sequence_id=sequence_id,
            model=model,
            revision=revision,
            start=blocks[0],
            end=blocks[1],
            inputs_from=inputs.start,
            inputs_to=max(inputs.start, min(until, inputs.end)),
            inputs_digest=inputs.digest(until),
            outputs_from=outputs.start,
            outputs_to=max(outputs.start, min(until, outputs.end)),
            outputs_digest=outputs.digest(until),
        )


def _consecutive(pages: Sequence[PageInputs | None]) -> list[PageInputs]:
    """Return the pages if each was computed after the one before it, else none."""
    found, after = list[PageInputs](), b""
    for page in pages:
        if page is None or page.before != after:
            return []
        found.append(page)
        after = page.after
    return found
