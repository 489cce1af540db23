"""The digests of what one session took and gave, and the commitment that is signed of them when the client closes it.

Every session has a log, whether its client checks answers or not: a server that knew which answers are checked could
lie in the others. Used in the server's loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeAlias

from swarm_protocol.answer_commitments import AnswerCommitment, PositionDigests
from swarm_protocol.limits import PAGE_TOKENS
from swarm_protocol.rows import Rows

MAX_PAGES = 16384
"""The pages of a quarter of a million positions, 256 bytes each."""

PageName: TypeAlias = tuple[str, int, int, bytes]
"""The client, the blocks `[start, end)`, and the page's key."""

Signer: TypeAlias = Callable[[AnswerCommitment], bytes]
"""Return the commitment in an envelope of this server."""


class PageInputs:
    """The digests of the inputs of pages that may be in the cache, by the names that clients gave them.

    So a server can sign all inputs of a session that began with cached pages. A name that came with two different
    inputs stands for neither: another server pushed something else than it told the client.
    """

    def __init__(self) -> None:
        self._digests: OrderedDict[PageName, bytes] = OrderedDict()

    def note(self, name: PageName, digests: bytes) -> None:
        known = self._digests.pop(name, digests)
        self._digests[name] = digests if known == digests else b""
        while len(self._digests) > MAX_PAGES:
            self._digests.popitem(last=False)

    def of(self, names: Sequence[PageName]) -> bytes:
        """Return the digests of all positions of these pages, or no bytes if some are not known."""
        found = [self._digests.get(name, b"") for name in names]
        return b"".join(found) if all(found) else b""


class AnswerLog:
    """`inputs` are rows as they came on the wire; `outputs` are rows as they were sent, or draws.

    `names` are those of the first pages, `num_cached` positions of which are in the cache already.
    """

    def __init__(self, pages: PageInputs, names: Sequence[PageName] = (), num_cached: int = 0) -> None:
        self.inputs = PositionDigests()
        self.outputs = PositionDigests()
        self._pages = pages
        self._names = names
        if num_cached and (known := pages.of(names[: num_cached // PAGE_TOKENS])):
            self.inputs.add_digests(0, known)

    def took(self, position: int, rows: Rows) -> None:
        self.inputs.add_rows(position, rows.payload, rows.row_bytes)
        for page in range(position // PAGE_TOKENS, min(self.inputs.end // PAGE_TOKENS, len(self._names))):
            start = page * PAGE_TOKENS
            if start >= self.inputs.start:
                self._pages.note(self._names[page], self.inputs.between(start, start + PAGE_TOKENS))

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
